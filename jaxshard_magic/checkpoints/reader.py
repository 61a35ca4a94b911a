"""Reading from a folder of numbered checkpoints."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..coordination import gather_texts, is_multiprocess
from ..device_arrays import put
from ..errors import ShardError, list_names
from ..files import read_limited
from ..packages import install_command
from . import checksums
from .checkpoint_info import CheckpointInfo, from_json_value
from .chunked_reads import read_arrays
from .folder import (
    META,
    filesystem_error,
    first_line,
    is_complete,
    is_number,
    run_on_all_hosts,
    run_on_first_host,
    suggest_name,
)

STATE = "state"
_METADATA = 1 << 30  # bytes of the JSON of a checkpoint, at most; it includes the log of a loop


class CheckpointReader:
    """Read access to a folder of numbered checkpoints.

    Args:
        folder: Path as the user wrote it; `~` is expanded. Need not exist.

    Attributes:
        folder: Absolute path.
        name: Path as written, for messages.
    """

    def __init__(self, folder: "str | Path"):
        self.folder = Path(folder).expanduser().absolute()
        self.name = str(folder)

    def steps(self) -> list[int]:
        """Return the numbers of all complete checkpoints, in rising order."""
        return sorted(int(each.name) for each in self._entries() if is_complete(each))

    def incomplete_names(self) -> list[str]:
        """Return the sorted names of entries with a number for a name that are no complete checkpoints."""
        return sorted(each.name for each in self._entries() if is_number(each.name) and not is_complete(each))

    def step_on_all_hosts(self, step: int | None = None) -> int | None:
        """Return the number of a checkpoint common to all hosts. Every host must call this.

        Args:
            step: Number of the checkpoint; None for the newest that host 0 sees.

        Returns:
            The number, or None if host 0 sees no checkpoint.

        Raises:
            ShardError: No checkpoint has this number, or some host sees another checkpoint under it.
        """
        number = run_on_first_host(lambda: str(self.latest() if step is None else step))
        if not number.isdecimal():
            return None
        if is_multiprocess():
            # Each host's own disk may have a checkpoint of this number, so descriptions are compared and not numbers
            # alone.
            seen = gather_texts(self._fingerprint(int(number)))
            if others := [i for i, sign in enumerate(seen) if sign != seen[0]]:
                raise ShardError(
                    f"host {others[0]} doesn't see checkpoint {number} of {self.folder} that host 0 sees: "
                    "name a folder "
                    "on a disk that all hosts share"
                )
        self._metadata(int(number))
        return int(number)

    def latest(self) -> int | None:
        """Return the number of the newest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    @property
    def name_suggestion(self) -> str:
        """Suggestion, as ` Did you mean 'ckpt'?`, of the most similarly named checkpoint folder beside this one; else
        ""."""
        return suggest_name(self.folder, lambda each: each.is_dir() and bool(CheckpointReader(each).steps()))

    def info(self, step: int) -> CheckpointInfo:
        """Return the description saved with a checkpoint.

        Raises ShardError if no checkpoint has this number, or the description can't be read.
        """
        told = self._metadata(step).get("saved")
        try:
            return CheckpointInfo.from_json(told)
        except ShardError as error:
            raise ShardError(f"checkpoint {step} of {self.folder} can't be read: {error}") from None

    def extra(self, step: int) -> dict[str, Any]:
        """Return the other values saved with a checkpoint, arrays as numpy arrays. Raises ShardError as `info` does,
        and for damaged values."""
        try:
            return dict(from_json_value(self._metadata(step)["extra"]))
        except (KeyError, TypeError, ValueError, MemoryError) as error:
            raise ShardError(
                f"checkpoint {step} of {self.folder} can't be read: what it keeps beside the state is damaged "
                f"({first_line(error)})"
            ) from None

    def restore(self, step: int, target: Any) -> Any:
        """Read a checkpoint's arrays onto devices. Every host must call this.

        Args:
            step: Number of the checkpoint.
            target: The saved tree, or some of its arrays by name, of `jax.ShapeDtypeStruct` with shardings. Shardings
                may be of several meshes. Values are converted to the target's dtype.

        Returns:
            The tree of `target` with arrays. Each device reads its own shards alone.

        Raises:
            ShardError: The checkpoint is missing, damaged or of another state. No leaf is named: compare `info` first.
        """
        return _with_empty(target, run_on_all_hosts(lambda: self._read(step, without_empty_arrays(target))))

    def _entries(self) -> list[Path]:
        """Return the entries of the folder; none if it is missing. Raises ShardError if it can't be read."""
        try:
            return [*self.folder.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise filesystem_error(self.folder, "read", error) from None

    def _metadata(self, step: int) -> dict[str, Any]:
        """Read a checkpoint's metadata: description and extra values. Raises ShardError."""
        if step not in (there := self.steps()):
            have = f"it has {list_names(map(str, there))}" if there else "it has none"
            if str(step) in self.incomplete_names():
                raise ShardError(
                    f"checkpoint {step} of {self.folder} was not saved by jaxshard_magic, or is damaged: it doesn't "
                    f"tell what is in it; {have} beside it"
                )
            raise ShardError(f"{self.folder} has no checkpoint {step}; {have}")
        ocp = import_orbax()
        try:
            checksums.check(self.folder / str(step), META)
            # Orbax would read the file whatever its size, and whether or not it is a regular file.
            read_limited(self.folder / str(step) / META / "metadata", _METADATA)
            return dict(ocp.JsonCheckpointHandler().restore(self.folder / str(step) / META))
        except Exception as error:
            raise ShardError(f"checkpoint {step} of {self.folder} can't be read: {first_line(error)}") from error

    def _fingerprint(self, step: int) -> str:
        """Return a text that tells a checkpoint from others of the same number; "" if it can't be read."""
        try:
            saved = self.info(step)
        except ShardError:
            return ""
        return f"{saved.hash} {saved.when} {saved.strategy} {saved.mesh}"

    def _read(self, step: int, target: Any) -> list[Any]:
        """Read the arrays of `target` in the order of its leaves. Raises ShardError."""
        self._metadata(step)
        try:
            # Each host verifies its share of the files; `restore` raises a mismatch on every host.
            checksums.check(self.folder / str(step), STATE, jax.process_index(), jax.process_count())
            return read_arrays(self.folder / str(step) / STATE, target)
        except Exception as error:
            raise ShardError(
                f"checkpoint {step} of {self.folder} can't be read back: {first_line(error)}; it was moved in part, or "
                f"damaged: the others there are {list_names(map(str, sorted({*self.steps()} - {step})))}"
            ) from error


def import_orbax() -> Any:
    """Import Orbax, the only import of it in the package. Raises ShardError if it is not installed."""
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        raise ShardError(f"checkpoints need Orbax: {install_command('checkpoints')}") from None
    # Orbax's threads log each failure with a traceback, besides the exception, which is raised again as one line.
    logging.getLogger("absl").addFilter(_not_of_orbax)
    return ocp


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """Return whether a log record comes from outside of Orbax."""
    return "orbax" not in Path(record.pathname).parts


def without_empty_arrays(tree: Any) -> Any:
    """Return a tree with None in place of arrays without elements, since Orbax writes none of them."""
    return jax.tree.map(lambda x: x if np.size(x) else None, tree)


def _with_empty(target: Any, arrays: list[Any]) -> Any:
    """Return the tree of `target` with the arrays that were read, and new arrays for leaves without elements."""
    wanted, structure = jax.tree.flatten(target)
    found = iter(arrays)
    return structure.unflatten([next(found) if np.size(x) else _empty(x) for x in wanted])


def _empty(like: Any) -> jax.Array:
    """Return an array without elements in the shape, dtype and sharding of `like`."""
    [made] = put([jnp.zeros(like.shape, like.dtype)], like.sharding or jax.devices()[0])
    return made
