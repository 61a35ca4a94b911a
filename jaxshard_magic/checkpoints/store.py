"""`Store`: a folder of numbered checkpoints, each of which is there as a whole or not at all."""

import logging
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..coordination import LONG_S, OtherFailed, Passage, gathered, is_there
from ..errors import ShardError, one_of
from ..packages import install
from ..placing import put, whole
from .agreed import on_all, on_first
from .folder import Lock, first_line, made, nearest_to, shared_by_hosts, told_of
from .plain import from_plain, to_plain
from .reading import chunk_of, read
from .saved import Saved
from .saving import Saving

STATE, META = "state", "meta"
WHY_S = 10.0  # for a host that failed to say so
_TORN, _REMOVED = ".orbax-checkpoint-tmp", ".removed"


class Store:
    """A folder of checkpoints, numbered by the calls that the step had made.

    A save writes into a folder with a name of its own, which gets its number when all is written: one that is cut off
    leaves the checkpoints before it as they were. One process saves into a folder at a time, or one program of several
    hosts, all of which come to every method together but to those that only look.

    Args:
        folder: made with the first save.
        keep: how many checkpoints stay, the newest; None for all.
    """

    def __init__(self, folder: "str | Path", keep: int | None = None):
        self.folder, self.keep = Path(folder).expanduser().absolute(), keep
        self.name = str(folder)  # as it was written
        self._manager: Any = None
        self._lock = Lock(self.folder)
        self._under_way: int | None = None
        self._writing: Saving | None = None
        self._shared = False
        self._passage: Passage | None = None  # of the manager, on several hosts

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
        ocp = _orbax()
        on_first(lambda: self._opened(step))
        self.check_shared()
        meta = {"saved": saved.to_json(), "extra": to_plain(dict(extra or {}))}
        state = jax.tree.map(_to_write, _filled(tree))
        args = {META: ocp.args.JsonSave(meta)}
        if jax.tree.leaves(state):
            pieces = jax.tree.map(lambda x: ocp.SaveArgs(chunk_byte_size=chunk_of(x.shape)), state)
            args[STATE] = ocp.args.StandardSave(state, save_args=pieces)
        try:
            self._open_manager().save(step, args=ocp.args.Composite(**args), force=True)
        except Exception as error:
            raise self._failed(step, error) from error
        self._under_way, self._writing = step, Saving(self._manager, self._passage)
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait until the save that was begun is on disk, and remove checkpoints beyond `keep`. An interrupt ends the
        waiting, not the save. Raises ShardError where the save failed."""
        if self._under_way is None or self._writing is None:
            return
        try:
            self._writing.wait()
        except Exception as error:
            step, writing = self._under_way, self._writing
            self._under_way = self._writing = None
            raise self._failed(step, error, writing) from error
        self._under_way = self._writing = None
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

    def steps(self) -> list[int]:
        """The numbers of the whole checkpoints that are there, in order."""
        try:
            found = [int(each.name) for each in self.folder.iterdir() if _is_number(each.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise told_of(self.folder, "read", error) from None
        return sorted(found)

    def agreed(self, step: int | None = None) -> int | None:
        """The number of a checkpoint that all hosts have: the newest that the first one sees unless given; None where
        that sees none. Raises ShardError where there is none of this number, or another one on some host."""
        found = on_first(lambda: str(self.latest() if step is None else step))
        if not found.isdecimal():
            return None
        if is_there():
            seen = gathered(self._sign(int(found)))
            if others := [i for i, sign in enumerate(seen) if sign != seen[0]]:
                raise ShardError(
                    f"host {others[0]} doesn't see checkpoint {found} of {self.folder} that host 0 sees: name a folder "
                    "on a disk that all hosts share"
                )
        self._meta(int(found))
        return int(found)

    def latest(self) -> int | None:
        """The number of the newest whole checkpoint, None where there is none."""
        return max(self.steps(), default=None)

    @property
    def nearest(self) -> str:
        """` Did you mean 'ckpt'?` for the folder of checkpoints beside this one whose name is nearest."""
        return nearest_to(self.folder, lambda each: each.is_dir() and bool(Store(each).steps()))

    def saved(self, step: int) -> Saved:
        """What is told of a checkpoint. Raises ShardError where there is none of this number."""
        told = self._meta(step)["saved"]
        try:
            return Saved.from_json(told)
        except ShardError as error:
            raise ShardError(f"checkpoint {step} of {self.folder} can't be read: {error}") from None

    def extra(self, step: int) -> dict[str, Any]:
        """What else was kept with a checkpoint, arrays as numpy's. Raises ShardError as `saved` does."""
        return from_plain(self._meta(step)["extra"])

    def restore(self, step: int, target: Any) -> Any:
        """The tree of a checkpoint, each array where the target says.

        Args:
            target: a tree as it was saved, or some of its arrays by name, of `jax.ShapeDtypeStruct` with shardings; of
                several meshes, too. Another dtype converts. Each device reads the parts that it will hold.

        Compare what is `saved` first: what doesn't fit raises a ShardError here that names no leaf.
        """
        return _with_empty(target, on_all(lambda: self._read(step, _filled(target))))

    def torn(self) -> tuple[str, ...]:
        """The names of saves that were cut off, which are removed where no living process can be writing them."""
        return tuple(filter(None, on_first(lambda: "\n".join(self._clear())).split("\n")))

    def close(self) -> None:
        """Wait for the save that was begun, and let others save here. An interrupt ends the waiting; what else there is
        to do is done when the save is written. Raises ShardError where the save failed."""
        try:
            self.wait()
            self._end()
        except KeyboardInterrupt:
            threading.Thread(target=self._close_later, name="a checkpoint is written", daemon=True).start()
            raise
        except BaseException:
            self._lock.release()
            raise
        self._lock.release()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self, step: int) -> str:
        """The folder ready to be saved into; on the first process."""
        made(self.folder)
        self._lock.take()
        if step in self.steps():
            raise ShardError(
                f"{self.folder} has a checkpoint {step} already, which stays as it is: call the step once more, or "
                "name another folder"
            )
        self._clear()
        return ""

    def _open_manager(self) -> Any:
        if self._manager is None:
            ocp = _orbax()
            self._passage = passage = Passage() if is_there() else None
            together = (
                None
                if passage is None
                else lambda key, timeout_ms: passage.go_through(key, timeout_ms / 1000)
            )
            options = ocp.CheckpointManagerOptions(
                create=False,
                enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(timeout_secs=int(LONG_S), barrier_sync_fn=together),
            )
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        return self._manager

    def _close_later(self) -> None:
        with suppress(ShardError):  # nobody waits for it any more
            self.close()

    def _end(self) -> None:
        """End the threads of Orbax's, which raise what a save failed by once: in `wait`, which comes before. Raises
        ShardError for anything else."""
        manager, self._manager = self._manager, None
        if manager is not None:
            try:
                manager.close()
            except Exception as error:
                raise told_of(self.folder, "end saving into", error) from error

    def _meta(self, step: int) -> dict[str, Any]:
        if step not in (there := self.steps()):
            have = f"it has {one_of(map(str, there))}" if there else "it has none"
            raise ShardError(f"{self.folder} has no checkpoint {step}; {have}")
        if not (self.folder / str(step) / META).is_dir():
            raise ShardError(
                f"checkpoint {step} of {self.folder} was not saved by jaxshard_magic, or is damaged: it doesn't tell "
                "what is in it"
            )
        ocp = _orbax()
        try:
            return ocp.JsonCheckpointHandler().restore(self.folder / str(step) / META)
        except Exception as error:
            raise ShardError(
                f"checkpoint {step} of {self.folder} can't be read: {first_line(error)}"
            ) from error

    def _sign(self, step: int) -> str:
        """What tells a checkpoint from others of its number; "" where it can't be read."""
        try:
            saved = self.saved(step)
        except ShardError:
            return ""
        return f"{saved.hash} {saved.when} {saved.strategy} {saved.mesh}"

    def _read(self, step: int, target: Any) -> list[Any]:
        self._meta(step)
        try:
            return read(self.folder / str(step) / STATE, target)
        except Exception as error:
            raise ShardError(
                f"checkpoint {step} of {self.folder} can't be read back: {first_line(error)}; it was moved in part, or "
                f"damaged: the others there are {one_of(map(str, sorted({*self.steps()} - {step})))}"
            ) from error

    def _torn_names(self) -> list[str]:
        try:
            names = sorted(each.name for each in self.folder.iterdir())
        except OSError:
            return []
        mine = () if self._under_way is None else (f"{self._under_way}{_TORN}",)
        return [
            x for x in names if (_TORN in x or x.endswith(_REMOVED)) and not x.startswith(mine or ("\0",))
        ]

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
        return [name for name in names if not name.endswith(_REMOVED)]

    def _remove(self, step: int) -> None:
        """A checkpoint loses its number before its files: a part of it is never taken for it."""
        gone = self.folder / f"{step}{_REMOVED}"
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


def _orbax() -> Any:
    """Imports Orbax, which nothing else here does."""
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        raise ShardError(f"checkpoints need Orbax: {install('checkpoints')}") from None
    logging.getLogger("absl").addFilter(_not_of_orbax)
    return ocp


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """Its threads log what they failed by with a traceback each, which `Store` raises in one line."""
    return "orbax" not in Path(record.pathname).parts


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


def _is_number(name: str) -> bool:
    return name.isdecimal() and str(int(name)) == name


def _filled(tree: Any) -> Any:
    """A tree with None for the arrays that have no elements, of which Orbax writes none."""
    return jax.tree.map(lambda x: x if np.size(x) else None, tree)


def _with_empty(target: Any, arrays: list[Any]) -> Any:
    """What was read, as the target's tree, with its arrays that have no elements."""
    wanted, structure = jax.tree.flatten(target)
    found = iter(arrays)
    return structure.unflatten([next(found) if np.size(x) else _empty(x) for x in wanted])


def _empty(like: Any) -> jax.Array:
    [made] = put([jnp.zeros(like.shape, like.dtype)], like.sharding or jax.devices()[0])
    return made
