"""`Store`: a folder of numbered checkpoints, each of which is there as a whole or not at all."""

import os
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np

from ..coordination import LONG_S, OtherFailed, Passage, gathered, is_there
from ..errors import ShardError
from ..placing import whole
from ..temporary import Temporary
from . import checksums
from .agreed import on_first
from .archive import STATE, Archive, filled, orbax
from .folder import (
    META,
    REMOVED,
    TORN,
    Lock,
    check_writable,
    made,
    shared_by_hosts,
    told_of,
)
from .plain import to_plain
from .reading import chunk_of
from .saved import Saved
from .saving import Saving

WHY_S = 10.0  # for a host that failed to say so
LEAVES_S = 60.0  # for what is still written of a loop that was stopped
_holding: "WeakValueDictionary[str, Store]" = WeakValueDictionary()  # by folder, those of this process


class Store(Archive, Temporary):
    """A folder of checkpoints, numbered by the calls that the step had made.

    A save writes into a folder with a name of its own, which gets its number when all is written: one that is cut off
    leaves the checkpoints before it as they were. One process saves into a folder at a time, or one program of several
    hosts, all of which come to every method together but to those that only look. Within a process the last loop has
    it: one before it, which was stopped or given up, lets go of it.

    Args:
        folder: made with the first save.
        keep: how many checkpoints stay, the newest; None for all.
        loop: it has the checkpoints of a loop, and no single one.
    """

    def __init__(self, folder: "str | Path", keep: int | None = None, *, loop: bool = False):
        super().__init__(folder)
        self.keep, self.loop = keep, loop
        self._manager: Any = None
        self._lock = Lock(self.folder)
        self._under_way: int | None = None
        self._writing: Saving | None = None  # that; None while it is begun, and after an interrupt in that
        self._shared = False
        self._passage: Passage | None = None  # of the manager, on several hosts
        self._closing = self._given_up = False
        self._one_closes = threading.Lock()
        self._closed: threading.Event | None = None  # set once what closes it in the background is done
        self._failure: BaseException | None = None  # of that, which `close` raises

    def begin(self) -> None:
        """Nothing is held before the first save."""

    def end(self) -> None:
        """Close it in the background, where it is not closed."""
        if self._lock.held or self._manager is not None:
            self._close_later()

    def save(self, step: int, tree: Any, saved: Saved, extra: Mapping[str, Any] | None = None) -> float:
        """Begin to save a pytree of arrays, best a dict of names; `wait` ends it. The save before it is waited for.

        Args:
            step: its number; of hosts the same on all.
            tree: arrays of jax and numpy. jax's are written from where they lie, each host its own parts; until they
                are written, devices hold them even where the next step takes them over. Arrays of numpy are copied.
            saved: what is told of it.
            extra: what else is kept: what JSON can say, and small arrays, which come back as numpy's.

        Returns the seconds that this took. Raises ShardError for a number that is there, a folder that can't be
        written, that hosts don't share or that another process saves into, and for a save before this one that failed.
        """
        start = time.perf_counter()
        self.wait()
        ocp = orbax()
        on_first(lambda: self._opened(step))
        self.check_shared()
        meta = {"saved": saved.to_json(), "extra": to_plain(dict(extra or {}))}
        state = jax.tree.map(_to_write, filled(tree))
        args = {META: ocp.args.JsonSave(meta)}
        if jax.tree.leaves(state):
            pieces = jax.tree.map(lambda x: ocp.SaveArgs(chunk_byte_size=chunk_of(x.shape)), state)
            args[STATE] = ocp.args.StandardSave(state, save_args=pieces)
        manager = self._open_manager()
        self._under_way = step
        try:
            manager.save(step, args=ocp.args.Composite(**args), force=True)
            self._writing = self._saving(manager, step)
        except Exception as error:
            self._under_way = None
            raise self._failed(step, error) from error
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait until the save that was begun is on disk, and remove checkpoints beyond `keep`. An interrupt ends the
        waiting, not the save. Raises ShardError where the save failed."""
        step = self._under_way
        if step is None:
            return
        if begun := self._writing is None:  # an interrupt came while it was begun
            self._writing = self._saving(self._manager, step)
        writing = self._writing
        try:
            writing.wait()
        except Exception as error:
            self._under_way = self._writing = None
            raise self._failed(step, error, writing) from error
        self._under_way = self._writing = None
        if begun:
            self._end()
        if self.keep is not None and jax.process_index() == 0:
            for step in self.steps()[: -self.keep]:
                self._remove(step)

    def settles(self, seconds: float) -> bool:
        """Whether no save is being written, within so many seconds. What it failed by `wait` tells."""
        return self._writing is None or self._writing.is_over(seconds)

    def check_shared(self) -> None:
        """Raise ShardError where several hosts don't share the folder, which is there; looked at once."""
        if not self._shared:
            shared_by_hosts(self.folder)
            self._shared = True

    def hold(self) -> None:
        """Be the one that saves into the folder, from here to `close`. Raises ShardError for a folder that can't be
        made or written, and where another one saves into it."""
        made(self.folder)
        key = os.path.realpath(self.folder)
        other = _holding.get(key)
        if other is not None and other is not self and other._lock.held:
            other._hand_over(self)
        self._lock.take()
        _holding[key] = self
        try:
            check_writable(self.folder)
        except ShardError:
            if not self._clear():  # what was cut off may be what there is no room for
                raise
            check_writable(self.folder)

    def torn(self) -> tuple[str, ...]:
        """The names of saves that were cut off, which are removed where no living process can be writing them."""
        return tuple(filter(None, on_first(lambda: "\n".join(self._clear())).split("\n")))

    def close(self) -> None:
        """Wait for the save that was begun, and let others save here. An interrupt ends the waiting; what else there is
        to do is done when the save is written. Raises ShardError where the save failed."""
        self.closes(None)

    def closes(self, seconds: float | None) -> bool:
        """As `close`, waiting for so long; whether it is closed by then."""
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
        """The folder ready to be saved into; on the first process."""
        if self._given_up:
            raise ShardError(
                f"{self.folder}: another loop of this process saves into it by now, and this one saves no more"
            )
        self.hold()
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

    def _hand_over(self, other: "Store") -> None:
        """Let another one save, where this one has ended or both are of loops."""
        if not self._closing and not (self.loop and other.loop):
            what = (
                "a loop of this process saves its checkpoints"
                if self.loop
                else "this process is saving a checkpoint"
            )
            raise ShardError(f"{self.folder}: {what} into it; name another folder")
        self._given_up = True
        if not self._close_later().wait(LEAVES_S):
            raise ShardError(
                f"{self.folder}: what was saved last is still being written, after {LEAVES_S:g} s: try again, or name "
                "another folder"
            )

    def _close_later(self) -> threading.Event:
        """Close it in the background; what is set when that is done."""
        closed = self._closed
        if closed is None or closed.is_set():
            closed = threading.Event()
            closer = threading.Thread(
                target=self._close, args=(closed,), name="a checkpoint is written", daemon=True
            )
            closer.start()  # where that is interrupted it runs or does not: another one may run after it
            self._closed = closed
        return closed

    def _close(self, closed: threading.Event) -> None:
        with self._one_closes:
            try:
                self.wait()
                self._end()
            except BaseException as error:  # raised by `close`
                self._failure = error
            finally:
                self._lock.release()
                closed.set()

    def _saving(self, manager: Any, step: int) -> Saving:
        """What a manager writes now, with the checksums of its files."""
        first = jax.process_index() == 0
        return Saving(
            manager, self._passage, partial(_sum_up, self.folder / str(step)) if first else lambda: None
        )

    def _open_manager(self) -> Any:
        if self._manager is None:
            ocp = orbax()
            self._passage = passage = Passage() if is_there() else None
            together = (
                None
                if passage is None
                else lambda key, timeout_ms: passage.go_through(key, timeout_ms / 1000)
            )
            options = ocp.CheckpointManagerOptions(
                create=False,
                enable_async_checkpointing=True,
                # Of a folder that can't be made in the background Orbax's threads wait for it for 600 s.
                async_options=ocp.AsyncOptions(
                    timeout_secs=int(LONG_S),
                    barrier_sync_fn=together,
                    create_directories_asynchronously=passage is not None,
                ),
            )
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        return self._manager

    def _end(self) -> None:
        """End the threads of Orbax's, which raise what a save failed by once: in `wait`, which comes before. Raises
        ShardError for anything else."""
        manager, self._manager = self._manager, None
        if manager is not None:
            try:
                manager.close()
            except Exception as error:
                raise told_of(self.folder, "end saving into", error) from error

    def _torn_names(self) -> list[str]:
        try:
            names = sorted(each.name for each in self.folder.iterdir())
        except OSError:
            return []
        mine = () if self._under_way is None else (f"{self._under_way}{TORN}",)
        return [x for x in names if (TORN in x or x.endswith(REMOVED)) and not x.startswith(mine or ("\0",))]

    def _clear(self) -> list[str]:
        """The names of what saves left that were cut off; removed where this process alone may save here."""
        names, held = self._torn_names(), self._lock.held
        try:
            if names and not held:
                self._lock.take()
        except ShardError:
            return []  # of a save that may be under way
        try:
            for name in names:
                shutil.rmtree(self.folder / name, ignore_errors=True)
        finally:
            if not held:
                self._lock.release()
        return [name for name in names if not name.endswith(REMOVED)]

    def _remove(self, step: int) -> None:
        """A checkpoint loses its number before its files: a part of it is never taken for it."""
        gone = self.folder / f"{step}{REMOVED}"
        with suppress(OSError):  # it stays one more save
            (self.folder / str(step)).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _failed(self, step: int, error: Exception, writing: Saving | None = None) -> ShardError:
        """What a save failed by, in one line, of hosts the same on all; what it left is removed, so that there is room
        again."""
        own = _own(error)
        if self._passage is None:
            line = self._line_of(step, error)
        elif own is None:
            line = self._passage.why(WHY_S) or self._line_of(step, error)
        else:
            line = self._passage.fail(self._line_of(step, own))
        ended = writing.leave() if writing is not None else self._passage is None
        if ended:
            try:
                self._end()
            except ShardError as other:
                error.add_note(str(other))
        self._manager = None
        if writing is not None:
            gathered("")  # nobody writes any more
        if jax.process_index() == 0:
            self._clear()
        return ShardError(line)

    def _line_of(self, step: int, error: BaseException) -> str:
        latest = self.latest()
        left = "there is none before it" if latest is None else f"the last one is {latest}"
        host = "" if self._passage is None else f"host {jax.process_index()}: "
        return f"{host}{told_of(self.folder, f'write checkpoint {step} into', error)}; {left}"


def _own(error: BaseException | None) -> BaseException | None:
    """What this host itself failed by, which what it heard from others while it left came after; None for nothing."""
    while isinstance(error, OtherFailed):
        error = error.__cause__ or error.__context__
    return error


def _to_write(x: Any) -> Any:
    """An array as Orbax takes it: of several hosts what each has of its own is alike, and the first one writes it."""
    if isinstance(x, jax.Array) and not (jax.process_count() > 1 and x.is_fully_addressable):
        return x
    return whole(x) if isinstance(x, jax.Array) else np.array(x)


def _sum_up(checkpoint: Path) -> None:
    if checkpoint.is_dir():  # else an interrupt came before anything of it was written
        checksums.write(checkpoint)
