"""A folder of numbered checkpoints, each of them complete or absent.

A save in progress is awaited in a thread of its own, so that hosts learn meanwhile of a failure on another host.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np

from ..coordination import LONG_S, LOOK_S, NamedBarriers, ProcessFailed, gather_texts, is_multiprocess
from ..device_arrays import to_numpy
from ..errors import ShardError, printable
from ..temporary import TemporaryChange
from . import checksums
from .checkpoint_info import CheckpointInfo, to_json_value
from .chunked_reads import chunk_bytes
from .folder import (
    META,
    REMOVED,
    UNFINISHED_MARK,
    FolderLock,
    check_shared_by_hosts,
    check_writable,
    filesystem_error,
    make_folder,
    run_on_first_host,
)
from .reader import STATE, CheckpointReader, import_orbax, without_empty_arrays

WHY_S = 10.0  # seconds to wait for the error of a host that failed
LAST_SAVE_S = 60.0  # seconds for the last save of a stopped loop
CANCEL_S = 10.0  # seconds for Orbax's threads to end after `cancel`

_holding: "WeakValueDictionary[str, CheckpointStore]" = WeakValueDictionary()  # stores of this process, by folder


class _PendingSave:
    """Save in progress.

    Args:
        manager: Orbax's manager, which is writing from now on.
        passage: Barriers of the hosts during the save; None with one process.
        then: Called once Orbax has written; a part of the save.
    """

    def __init__(self, manager: Any, passage: NamedBarriers | None, then: Callable[[], object]):
        self._manager, self._passage, self._then = manager, passage, then
        self._error: BaseException | None = None
        # `Thread.join` would not do: in Python 3.11 an interrupted join marks the running thread as ended.
        self._over = threading.Event()
        threading.Thread(target=self._run, name="jaxshard checkpoint", daemon=True).start()

    def is_over(self, seconds: float | None) -> bool:
        """Return whether the save ends within `seconds`, written or failed; None for no limit."""
        return self._over.wait(seconds)

    def wait(self) -> None:
        """Wait until the save is written. An interrupt ends the wait, not the save.

        Raises the save's own error, and ProcessFailed if another host's part failed.
        """
        while not self.is_over(None if self._passage is None else LOOK_S):
            if self._passage is not None:
                self._passage.raise_if_failed()
        if self._error is not None:
            raise self._error

    def cancel(self) -> bool:
        """Cancel a save that has failed here or on another host. Return whether Orbax's threads end within 10 s."""
        if not self.is_over(0) and (cancel := getattr(self._manager, "_checkpointer", None)) is not None:
            # Orbax's threads would wait 600 s for files of host 0 that never come.
            cancel.cancel()
        return self.is_over(CANCEL_S)

    def _run(self) -> None:
        """Wait for Orbax and call `then`; keep an error for `wait`."""
        try:
            self._manager.wait_until_finished()
            self._then()
        except BaseException as error:  # raised by `wait`
            self._error = error
        finally:
            self._over.set()


class CheckpointStore(CheckpointReader, TemporaryChange):
    """Folder of checkpoints, numbered by the calls of the step before each save.

    A save writes into a folder with a temporary name, which is renamed to the number when all is written: an
    interrupted save leaves earlier checkpoints intact. One process saves into a folder at a time, or one program of
    several hosts. All hosts must call each method together, except methods that merely look. Within a process the
    newest loop gets the folder: an earlier loop, stopped or given up, releases it.

    Args:
        folder: Created by the first save.
        keep: Number of newest checkpoints to keep; None for all.
        loop: Whether a training loop saves here repeatedly, instead of a single save.
    """

    def __init__(self, folder: "str | Path", keep: int | None = None, *, loop: bool = False):
        super().__init__(folder)
        self.keep, self.loop = keep, loop
        self._manager: Any = None
        self._lock = FolderLock(self.folder)
        self._under_way: int | None = None  # number of the save in progress
        self._writing: _PendingSave | None = None  # the same save; None until Orbax has begun to write it
        self._shared = False
        self._passage: NamedBarriers | None = None  # barriers of the manager, on several hosts
        self._closing = self._given_up = False
        self._one_closes = threading.Lock()
        self._closed: threading.Event | None = None  # set once closing in the background has ended
        self._failure: BaseException | None = None  # of closing in the background, raised by `close`

    def apply(self) -> None:
        """Do nothing: the folder is locked by the first save."""

    def revert(self) -> None:
        """Close in the background, unless closed."""
        if self._lock.is_locked or self._manager is not None:
            self._close_later()

    def save(self, step: int, tree: Any, info: CheckpointInfo, extra: Mapping[str, Any] | None = None) -> float:
        """Begin to save a pytree of arrays; `wait` ends it. An earlier save is awaited first.

        Args:
            step: Number of the checkpoint, the same on all hosts.
            tree: Arrays of JAX and numpy, preferably a dict by name. JAX arrays are written from device memory, each
                host its own shards. Devices keep them until they are written, even if the next step donates them. numpy
                arrays are copied.
            info: Description of the checkpoint.
            extra: Other values to save: JSON's types and small arrays, which come back as numpy arrays.

        Returns:
            Seconds that this call took.

        Raises:
            ShardError: The number exists; the folder can't be written, is not shared by the hosts, or another process
                saves into it; or the earlier save failed.
        """
        start = time.perf_counter()
        self.wait()
        ocp = import_orbax()
        run_on_first_host(lambda: self._opened(step))
        self.check_shared()
        meta = {"saved": info.to_json(), "extra": to_json_value(dict(extra or {}))}
        state = jax.tree.map(_to_write, without_empty_arrays(tree))
        args = {META: ocp.args.JsonSave(meta)}
        if jax.tree.leaves(state):
            pieces = jax.tree.map(lambda x: ocp.SaveArgs(chunk_byte_size=chunk_bytes(x.shape)), state)
            args[STATE] = ocp.args.StandardSave(state, save_args=pieces)
        manager = self._open_manager()
        self._under_way = step
        try:
            manager.save(step, args=ocp.args.Composite(**args), force=True)
            self._writing = self._saving(manager, step)
        except Exception as error:
            self._under_way = None
            raise self._end_failed_save(step, error) from error
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait until the save in progress is on disk, and remove checkpoints beyond `keep`.

        An interrupt ends the wait, not the save. Raises ShardError if the save failed.
        """
        step = self._under_way
        if step is None:
            return
        # An interrupt may have come as the save began: Orbax may be writing all the same.
        if begun := self._writing is None:
            self._writing = self._saving(self._manager, step)
        writing = self._writing
        try:
            writing.wait()
        except Exception as error:
            self._under_way = self._writing = None
            raise self._end_failed_save(step, error, writing) from error
        self._under_way = self._writing = None
        if begun:
            self._close_manager()
        if self.keep is not None and jax.process_index() == 0:
            for step in self.steps()[: -self.keep]:
                self._remove(step)

    def is_idle_within(self, seconds: float) -> bool:
        """Return whether no save is in progress within `seconds`. Its error is left for `wait`."""
        return self._writing is None or self._writing.is_over(seconds)

    def check_shared(self) -> None:
        """Raise ShardError if the hosts do not share the folder, which must exist. Checked once."""
        if not self._shared:
            check_shared_by_hosts(self.folder)
            self._shared = True

    def lock(self) -> None:
        """Lock the folder for this store until `close`, and create it if missing.

        Raises ShardError if the folder can't be created or written, or if another process or store saves into it.
        """
        make_folder(self.folder)
        # One folder may have several paths.
        key = os.path.realpath(self.folder)
        other = _holding.get(key)
        if other is not None and other is not self and other._lock.is_locked:
            other._hand_over(self)
        self._lock.acquire()
        _holding[key] = self
        try:
            check_writable(self.folder)
        except ShardError:
            if not self._clear():  # remains of interrupted saves may fill the disk
                raise
            check_writable(self.folder)

    def remove_interrupted(self) -> tuple[str, ...]:
        """Remove interrupted saves, except while a living process may be writing them. Return their names."""
        return tuple(filter(None, run_on_first_host(lambda: "\n".join(self._clear())).split("\n")))

    def close(self) -> None:
        """Wait for the save in progress and unlock the folder.

        An interrupt ends the wait; closing goes on in the background. Raises ShardError if the save failed.
        """
        self.close_within(None)

    def close_within(self, seconds: float | None) -> bool:
        """Close as `close` does, but wait for `seconds` at most (None: no limit). Return whether closing is done by
        then."""
        self._closing = True
        if not self._close_later().wait(seconds):
            return False
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return True

    def __exit__(self, *error: object) -> None:
        try:
            self.close()
        finally:
            super().__exit__(*error)

    def _opened(self, step: int) -> str:
        """Lock the folder and make it ready for checkpoint `step`; on the first host. Raises ShardError."""
        if self._given_up:
            raise ShardError(
                f"{self.folder}: another loop of this process saves into it by now, and this one saves no more"
            )
        self.lock()
        if step in self.steps():
            raise ShardError(
                f"{self.folder} has a checkpoint {step} already, which stays as it is: call the step once more, or "
                "name another folder"
            )
        if (self.folder / str(step)).exists():
            raise ShardError(
                f"{self.folder / str(step)} is no checkpoint, and stands where checkpoint {step} goes: move it away, "
                "or name another folder"
            )
        self._clear()
        return ""

    def _hand_over(self, other: "CheckpointStore") -> None:
        """Close in favour of another store of this process: after `close` was called, or if both belong to loops.

        Raises ShardError otherwise, and if the last save takes longer than 60 s.
        """
        if not self._closing and not (self.loop and other.loop):
            what = (
                "a loop of this process saves its checkpoints" if self.loop else "this process is saving a checkpoint"
            )
            raise ShardError(f"{self.folder}: {what} into it; name another folder")
        self._given_up = True
        if not self._close_later().wait(LAST_SAVE_S):
            raise ShardError(
                f"{self.folder}: what was saved last is still being written, after {LAST_SAVE_S:g} s: try again, or "
                "name another folder"
            )

    def _close_later(self) -> threading.Event:
        """Close in the background, and return an event that is set when this is done."""
        closed = self._closed
        if closed is None or closed.is_set():
            closed = threading.Event()
            closer = threading.Thread(target=self._close, args=(closed,), name="a checkpoint is written", daemon=True)
            # After an interrupt in this line the thread runs or doesn't, so the next call may start another.
            closer.start()
            self._closed = closed
        return closed

    def _close(self, closed: threading.Event) -> None:
        """Wait for the save, close Orbax and unlock the folder; keep an error for `close`."""
        with self._one_closes:
            try:
                self.wait()
                self._close_manager()
            except BaseException as error:  # raised by `close`
                self._failure = error
            finally:
                self._lock.release()
                closed.set()

    def _saving(self, manager: Any, step: int) -> _PendingSave:
        """Return the save that a manager is writing; on host 0 the checksums of its files are a part of it."""
        first = jax.process_index() == 0
        return _PendingSave(
            manager, self._passage, partial(_sum_up, self.folder / str(step)) if first else lambda: None
        )

    def _open_manager(self) -> Any:
        """Return Orbax's manager for the folder, created at the first save."""
        if self._manager is None:
            ocp = import_orbax()
            self._passage = passage = NamedBarriers() if is_multiprocess() else None
            together = None if passage is None else lambda key, timeout_ms: passage.wait_at(key, timeout_ms / 1000)
            options = ocp.CheckpointManagerOptions(
                create=False,
                enable_async_checkpointing=True,
                # If a folder can't be created in the background, Orbax's threads wait for it for 600 s.
                async_options=ocp.AsyncOptions(
                    timeout_secs=int(LONG_S),
                    barrier_sync_fn=together,
                    create_directories_asynchronously=passage is not None,
                ),
            )
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        return self._manager

    def _close_manager(self) -> None:
        """Close Orbax's manager and thereby end its threads. Raises ShardError."""
        # Orbax raises a save's error once. `wait` comes first and takes it: an error here has another cause.
        manager, self._manager = self._manager, None
        if manager is not None:
            try:
                manager.close()
            except Exception as error:
                raise filesystem_error(self.folder, "end saving into", error) from error

    def _torn_names(self) -> list[str]:
        """Return the names of interrupted saves and of checkpoints half removed, except the save in progress."""
        try:
            names = sorted(each.name for each in self.folder.iterdir())
        except OSError:
            return []
        mine = () if self._under_way is None else (f"{self._under_way}{UNFINISHED_MARK}",)
        return [x for x in names if (UNFINISHED_MARK in x or x.endswith(REMOVED)) and not x.startswith(mine or ("\0",))]

    def _clear(self) -> list[str]:
        """Remove what interrupted saves left, unless another process may be saving. Return the names of those saves."""
        names, held = self._torn_names(), self._lock.is_locked
        try:
            if names and not held:
                self._lock.acquire()
        except ShardError:
            return []  # another process may be saving
        try:
            for name in names:
                shutil.rmtree(self.folder / name, ignore_errors=True)
        finally:
            if not held:
                self._lock.release()
        return [name for name in names if not name.endswith(REMOVED)]

    def _remove(self, step: int) -> None:
        """Remove a checkpoint."""
        # The number goes before the files: a checkpoint without some of its files must never look complete.
        gone = self.folder / f"{step}{REMOVED}"
        with suppress(OSError):  # a later save removes it
            (self.folder / str(step)).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _end_failed_save(self, step: int, error: Exception, writing: _PendingSave | None = None) -> ShardError:
        """End a failed save, and return its error, with the same text on all hosts."""
        own = _own(error)
        if self._passage is None:
            line = self._line_of(step, error)
        elif own is None:
            line = self._passage.why(WHY_S) or self._line_of(step, error)
        else:
            line = self._passage.fail(self._line_of(step, own))
        ended = writing.cancel() if writing is not None else self._passage is None
        if ended:
            try:
                self._close_manager()
            except ShardError as other:
                error.add_note(str(other))
        self._manager = None
        if writing is not None:
            gather_texts("")  # waits until no host writes any more
        if jax.process_index() == 0:
            # The disk may be full: the remains of this save make room again.
            self._clear()
        return ShardError(line)

    def _line_of(self, step: int, error: BaseException) -> str:
        """Return the message for a failed save, with the host and the last complete checkpoint."""
        latest = self.latest()
        left = "there is none before it" if latest is None else f"the last one is {latest}"
        host = "" if self._passage is None else f"host {jax.process_index()}: "
        return f"{host}{filesystem_error(self.folder, f'write checkpoint {step} into', error)}; {left}"


def _own(error: BaseException | None) -> BaseException | None:
    """Return this host's own error, to which errors heard from other hosts (ProcessFailed) were added; None
    without one."""
    while isinstance(error, ProcessFailed):
        error = error.__cause__ or error.__context__
    return error


def _to_write(x: Any) -> Any:
    """Return an array in the form for Orbax: JAX arrays as they are, numpy arrays copied, and a JAX array that one host
    of several has alone as a numpy array."""
    # With several hosts, an array that one host has alone is equal on all of them, and host 0 writes it. NumPy arrays
    # are copied, as the loop may change them while Orbax writes.
    if isinstance(x, jax.Array) and not (jax.process_count() > 1 and x.is_fully_addressable):
        return x
    return to_numpy(x) if isinstance(x, jax.Array) else np.array(x)


def _sum_up(checkpoint: Path) -> None:
    """Write the checksums of a checkpoint that was written."""
    # After an interrupt as the save began, nothing may have been written.
    if checkpoint.is_dir():
        checksums.write(checkpoint)


def list_checkpoints(store: CheckpointStore) -> list[str]:
    """Return one line for each checkpoint, and one for interrupted saves, which are removed.

    Raises ShardError if the folder has none.
    """
    lines, torn = [], store.remove_interrupted()
    for step in store.steps():
        try:
            saved = store.info(step)
        except ShardError as error:
            lines.append(str(error))
            continue
        versions = ", ".join(f"{name} {number}" for name, number in saved.versions.items())
        lines.append(
            f"checkpoint {step}: {len(saved.leaves)} arrays, {saved.strategy} on {saved.mesh}, {saved.when}, "
            f"{versions}, hash {saved.hash}"
        )
    if strays := store.incomplete_names():
        lines.append(f"no checkpoints, or damaged ones, as they don't tell what is in them: {', '.join(strays)}")
    if torn:
        lines.append(f"cut off while they were saved, and removed: {', '.join(torn)}")
    if not lines:
        raise ShardError(f"{store.name} has no checkpoints.{store.name_suggestion} %shard save DIR state makes one")
    return [printable(line) for line in lines]
