"""`Archive`: a folder of numbered checkpoints as it is read."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..coordination import gathered, is_there
from ..errors import ShardError, one_of
from ..files import content
from ..packages import install
from ..placing import put
from . import checksums
from .agreed import on_all, on_first
from .folder import META, first_line, is_number, is_whole, nearest_to, told_of
from .plain import from_plain
from .reading import read
from .saved import Saved

STATE = "state"
_METADATA = 1 << 30  # bytes of what tells of a checkpoint, with what its loop returned


class Archive:
    """The checkpoints of a folder, by their numbers."""

    def __init__(self, folder: "str | Path"):
        self.folder = Path(folder).expanduser().absolute()
        self.name = str(folder)  # as it was written

    def steps(self) -> list[int]:
        """The numbers of the whole checkpoints that are there, in order."""
        return sorted(int(each.name) for each in self._there() if is_whole(each))

    def strays(self) -> list[str]:
        """The names of what has a number like a checkpoint, and is none."""
        return sorted(each.name for each in self._there() if is_number(each.name) and not is_whole(each))

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
        return nearest_to(self.folder, lambda each: each.is_dir() and bool(Archive(each).steps()))

    def saved(self, step: int) -> Saved:
        """What is told of a checkpoint. Raises ShardError where there is none of this number."""
        told = self._meta(step).get("saved")
        try:
            return Saved.from_json(told)
        except ShardError as error:
            raise ShardError(f"checkpoint {step} of {self.folder} can't be read: {error}") from None

    def extra(self, step: int) -> dict[str, Any]:
        """What else was kept with a checkpoint, arrays as numpy's. Raises ShardError as `saved` does."""
        try:
            return dict(from_plain(self._meta(step)["extra"]))
        except (KeyError, TypeError, ValueError, MemoryError) as error:
            raise ShardError(
                f"checkpoint {step} of {self.folder} can't be read: what it keeps beside the state is damaged "
                f"({first_line(error)})"
            ) from None

    def restore(self, step: int, target: Any) -> Any:
        """The tree of a checkpoint, each array where the target says.

        Args:
            target: a tree as it was saved, or some of its arrays by name, of `jax.ShapeDtypeStruct` with shardings; of
                several meshes, too. Another dtype converts. Each device reads the parts that it will hold.

        Compare what is `saved` first: what doesn't fit raises a ShardError here that names no leaf.
        """
        return _with_empty(target, on_all(lambda: self._read(step, filled(target))))

    def _there(self) -> list[Path]:
        try:
            return [*self.folder.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise told_of(self.folder, "read", error) from None

    def _meta(self, step: int) -> dict[str, Any]:
        if step not in (there := self.steps()):
            have = f"it has {one_of(map(str, there))}" if there else "it has none"
            if str(step) in self.strays():
                raise ShardError(
                    f"checkpoint {step} of {self.folder} was not saved by jaxshard_magic, or is damaged: it doesn't "
                    f"tell what is in it; {have} beside it"
                )
            raise ShardError(f"{self.folder} has no checkpoint {step}; {have}")
        ocp = orbax()
        try:
            checksums.check(self.folder / str(step), META)
            content(
                self.folder / str(step) / META / "metadata", _METADATA
            )  # which Orbax reads whatever it is
            return dict(ocp.JsonCheckpointHandler().restore(self.folder / str(step) / META))
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
            checksums.check(self.folder / str(step), STATE, jax.process_index(), jax.process_count())
            return read(self.folder / str(step) / STATE, target)
        except Exception as error:
            raise ShardError(
                f"checkpoint {step} of {self.folder} can't be read back: {first_line(error)}; it was moved in part, or "
                f"damaged: the others there are {one_of(map(str, sorted({*self.steps()} - {step})))}"
            ) from error


def orbax() -> Any:
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


def filled(tree: Any) -> Any:
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
