"""Save a step's state, and restore a state in the layout of the step's plan."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import ShapeDtypeStruct
from jax.sharding import NamedSharding, PartitionSpec

from ..checkpoints import CheckpointInfo, CheckpointStore
from ..checkpoints.checkpoint_info import VERSIONS
from ..checkpoints.name_rules import parse_rules
from ..checkpoints.state_arrays import StateArrays, flatten_state
from ..checkpoints.state_match import (
    check_same,
    closest_part,
    join_path,
    leaves_of_part,
    matching_part,
    paths_by_prefix,
)
from ..checkpoints.weight_files import SUFFIXES, is_weights
from ..checkpoints.weight_loading import load_weights
from ..checkpoints.weight_saving import save_weights
from ..errors import ShardError, list_names
from ..packages import versions
from ..program.trace import path_name
from ..report.parts import mesh_text

if TYPE_CHECKING:
    from .sharded_step import ShardedStep


def save(
    step: "ShardedStep",
    path: "str | PathLike[str]",
    state: Any,
    rename: "Mapping[str, str] | Iterable[str]" = (),
    force: bool = False,
    warn: Callable[[str], object] = warnings.warn,
) -> int:
    """Save a state into a folder of checkpoints or a file of weights.

    Args:
        step: The sharded step.
        path: Folder, or file with the suffix of a file of weights.
        state: State to save.
        rename: Names of arrays in a file of weights, as for `restore`.
        force: Overwrite an existing file of weights.
        warn: Receives a line on arrays left out of a file of weights.

    Returns:
        Number of steps behind the state: as counted by the state itself, else by the calls of the step.

    Raises:
        ShardError: The state has shapes in place of arrays, an option doesn't apply, or writing fails.
    """
    state_of, where = flatten_state(state), Path(expanduser(path))
    if shape := next((name for name, x in state_of.by_name.items() if isinstance(x, ShapeDtypeStruct)), None):
        raise ShardError(f"{shape} is a shape, and arrays are saved: give what the step gives back")
    number = state_of.step_count
    if number is None:
        # `step.calls` doesn't have the skipped calls of a resumed loop.
        skipped = 0 if step.last_checkpoint_loop is None else step.last_checkpoint_loop.resumed or 0
        number = step.calls_before + skipped + step.calls
    if where.name.endswith(SUFFIXES):
        _save_weights(where, state_of, number, rename, force, warn)
        return number
    for value, option in ((rename, "rename"), (force, "force")):
        if value:
            raise ShardError(
                f"{option} is for files of weights, {list_names(SUFFIXES)}: {path} is a folder of checkpoints"
            )
    saved = CheckpointInfo(number, step.strategy, mesh_text(step.mesh.shape), state_of.saved_leaves)
    with CheckpointStore(where) as store:
        store.save(number, state_of.arrays(), saved)
    return number


def restore(
    step: "ShardedStep",
    path: "str | PathLike[str]",
    like: Any,
    number: int | None = None,
    cast: bool = False,
    rename: "Mapping[str, str] | Iterable[str]" = (),
    part: str | None = None,
    state_name: str = "",
    warn: Callable[[str], object] = warnings.warn,
) -> Any:
    """Return a state of a folder of checkpoints or a file of weights, in the layout of the step's plan.

    Args:
        step: The sharded step, called or prepared before.
        path: Folder of checkpoints, or files of weights.
        like: State of the same structure: arrays or shapes.
        number: Number of the checkpoint; None for the newest.
        cast: Convert to the dtypes of `like`.
        rename: Names of arrays in a file of weights.
        part: Part of the checkpoint to restore, if several have the names of `like`.
        state_name: Name of the state; empty without one.
        warn: Receives a line on arrays that are unknown to the plan, and on superfluous arrays of a file.
    """
    state, where = flatten_state(like), Path(expanduser(path))
    if not is_weights(where):
        return _from_folder(step, where, state, number, cast, rename, part, state_name, warn)
    for value, option in ((number, "number"), (part, "part")):
        if value is not None:
            raise ShardError(f"{option} is for folders of checkpoints, and {path} is of weights: leave it out")
    return load_weights(
        where, state, lambda: state_shardings(step, state, warn), parse_rules(rename), cast=cast, tell=warn
    )


def _save_weights(
    path: Path,
    state: StateArrays,
    number: int,
    rename: "Mapping[str, str] | Iterable[str]",
    force: bool,
    warn: Callable[[str], object],
) -> None:
    """Write a state's arrays into a file of weights, without keys of random numbers."""
    rows = zip(state.names, state.arrays().values(), state.saved_leaves, state.is_generator, strict=True)
    arrays, random_keys = {}, []
    for name, x, leaf, random in rows:
        if random:
            random_keys.append(name)
        else:
            arrays[name] = x if hasattr(x, "sharding") else np.asarray(x, leaf.dtype)
    if not arrays:
        raise ShardError(f"{path}: the state has no arrays but keys of random numbers, which are no weights")
    # Readers of safetensors ask for the format "pt", whatever program wrote the file.
    about = {"format": "pt", "calls": str(number), **versions(VERSIONS)}
    save_weights(path, arrays, parse_rules(rename), force=force, metadata=about)
    if random_keys:
        warn(
            f"{list_names(random_keys)} left out of {path.name}: a generator of random numbers, which "
            "loading leaves as it is"
        )


def _from_folder(
    step: "ShardedStep",
    path: Path,
    state: StateArrays,
    number: int | None,
    cast: bool,
    rename: "Mapping[str, str] | Iterable[str]",
    part: str | None,
    state_name: str,
    warn: Callable[[str], object],
) -> Any:
    """Restore a state from a folder of checkpoints."""
    if rename:
        raise ShardError(f"rename is for files of weights, and {path} is a folder of checkpoints: leave it out")
    with CheckpointStore(path) as store:
        step_number = newest_checkpoint(store, number)
        saved = store.info(step_number)
        where = f"{store.folder.name}/{step_number}"
        part_path = matching_part((x.path for x in saved.leaves), state.names, where, part, state_name)
        saved_leaves = leaves_of_part(part_path, saved.leaves, state.saved_leaves)
        check_same(saved_leaves, state.saved_leaves, f"{part_path} of {where}" if part_path else where, cast=cast)
        targets = {
            join_path(part_path, name): x
            for name, x in state.restore_targets(state_shardings(step, state, warn)).items()
        }
        arrays = store.restore(step_number, targets)
    # Checkpoints of this step continue the numbers of the saved run.
    step.calls_before = saved.step - step.calls
    return state.rebuild({name: arrays[join_path(part_path, name)] for name in state.names})


def newest_checkpoint(store: CheckpointStore, number: int | None = None) -> int:
    """Return the number of the newest checkpoint, or `number`, if all hosts have it. Raises ShardError for none."""
    agreed = store.step_on_all_hosts(number)
    if agreed is None:
        torn = store.remove_interrupted()
        cut = f", only saves that were cut off, which are removed: {', '.join(torn)}" if torn else ""
        raise ShardError(f"{store.name} has no checkpoint{cut}.{store.name_suggestion} step.save(DIR, state) makes one")
    return agreed


def state_shardings(
    step: "ShardedStep", state: StateArrays, warn: Callable[[str], object] = warnings.warn
) -> dict[str, Any]:
    """Return the sharding of each leaf of a state by path, as in the program of the last kind of call.

    Leaves that are no input of the program are replicated.

    Args:
        step: The sharded step.
        state: State to lay out.
        warn: Receives a line on replicated leaves of more than one element.

    Raises:
        ShardError: The step has no program yet.
    """
    entry = step.entry

    if entry is None:
        raise ShardError(
            f"{step.name} has no plan yet, by which a state is laid out: call it once, or step.prepare(state, batch) "
            "with arrays or their shapes"
        )
    n = len(entry.consts)
    names = [path_name(path) for path in entry.traced.in_paths[n:]]
    rows = zip(names, entry.traced.closed.in_avals[n:], entry.shardings, strict=True)
    free: dict[tuple[str, tuple[int, ...]], list[Any]] = {}
    for name, aval, sharding in rows:
        free.setdefault((name.partition(".")[2], aval.shape), []).append(sharding)
    part = closest_part(paths_by_prefix(name for name, _ in free), set(state.names))
    whole = NamedSharding(step.mesh, PartitionSpec())
    by_path: dict[str, Any] = {}
    replicated = []
    for leaf in state.saved_leaves:
        # In turn: a part of the state, a state that is one argument, a state of several arguments.
        names = (join_path(part, leaf.path), leaf.path, leaf.path.partition(".")[2])
        candidates = next((each for name in names if (each := free.get((name, leaf.shape)))), None)
        by_path[leaf.path] = whole if candidates is None else candidates.pop(0)
        if candidates is None and math.prod(leaf.shape) > 1:
            replicated.append(leaf)
    if replicated and step.mesh.size > 1:
        more = f" and {len(replicated) - 1} more" if len(replicated) > 1 else ""
        warn(
            f"{replicated[0]}{more} whole on each of {step.mesh.size} devices: {step.name} takes no input of this name "
            "and shape, so its plan has no place for it"
        )
    return by_path
