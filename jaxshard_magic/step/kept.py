"""A step's state saved, and restored where the step's plan has it."""

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

from ..errors import ShardError, one_of
from ..packages import versions
from ..program.trace import path_name
from ..report.parts import mesh_text

if TYPE_CHECKING:
    from ..checkpoints import Store
    from ..checkpoints.objects import Opened
    from .sharded import ShardedStep


def save(
    step: "ShardedStep",
    path: "str | PathLike[str]",
    state: Any,
    rename: "Mapping[str, str] | Iterable[str]" = (),
    force: bool = False,
    tell: Callable[[str], object] = warnings.warn,
) -> int:
    """Save a state into a folder of checkpoints or a file of weights, and how many steps it has behind it. Raises
    ShardError as `Store` does, and `writing.save`. `tell` gets a line of what a file of weights leaves out."""
    from ..checkpoints import Saved, Store
    from ..checkpoints.objects import opened
    from ..checkpoints.tensors import SUFFIXES

    state_of, where = opened(state), Path(expanduser(path))
    if shape := next((name for name, x in state_of.by_name.items() if isinstance(x, ShapeDtypeStruct)), None):
        raise ShardError(f"{shape} is a shape, and arrays are saved: give what the step gives back")
    number = state_of.steps
    if number is None:
        skipped = 0 if step.kept is None else step.kept.resumed or 0  # of the run before
        number = step.calls_before + skipped + step.calls
    if where.name.endswith(SUFFIXES):
        _save_weights(where, state_of, number, rename, force, tell)
        return number
    for given, what in ((rename, "rename"), (force, "force")):
        if given:
            raise ShardError(
                f"{what} is for files of weights, {one_of(SUFFIXES)}: {path} is a folder of checkpoints"
            )
    saved = Saved(number, step.strategy, mesh_text(step.mesh.shape), state_of.told)
    with Store(where) as store:
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
    called: str = "",
    tell: Callable[[str], object] = warnings.warn,
) -> Any:
    """A state of a folder of checkpoints, or of a file of weights, as `like` has it, laid out by the step's plan.
    `called`: the state's own name, where it has one. `tell` gets a line of arrays that the plan has no place for, and
    of those that a file has beside."""
    from ..checkpoints.objects import opened
    from ..checkpoints.rename import rules_of
    from ..checkpoints.tensors import is_weights
    from ..checkpoints.weights import load

    state, where = opened(like), Path(expanduser(path))
    if not is_weights(where):
        return _from_folder(step, where, state, number, cast, rename, part, called, tell)
    for given, what in ((number, "number"), (part, "part")):
        if given is not None:
            raise ShardError(f"{what} is for folders of checkpoints, and {path} is of weights: leave it out")
    return load(where, state, lambda: shardings(step, state, tell), rules_of(rename), cast=cast, tell=tell)


def _save_weights(
    path: Path,
    state: "Opened",
    number: int,
    rename: "Mapping[str, str] | Iterable[str]",
    force: bool,
    tell: Callable[[str], object],
) -> None:
    from ..checkpoints.rename import rules_of
    from ..checkpoints.saved import VERSIONS
    from ..checkpoints.writing import save

    rows = zip(state.names, state.arrays().values(), state.told, state.own, strict=True)
    arrays, own = {}, []
    for name, x, leaf, random in rows:
        if random:
            own.append(name)
        else:
            arrays[name] = x if hasattr(x, "sharding") else np.asarray(x, leaf.dtype)
    if not arrays:
        raise ShardError(f"{path}: the state has no arrays but keys of random numbers, which are no weights")
    about = {
        "format": "pt",
        "calls": str(number),
        **versions(VERSIONS),
    }  # what readers ask for, whatever wrote it
    save(path, arrays, rules_of(rename), force=force, about=about)
    if own:
        tell(
            f"{one_of(own)} left out of {path.name}: a generator of random numbers, which loading leaves as it is"
        )


def _from_folder(
    step: "ShardedStep",
    path: Path,
    state: "Opened",
    number: int | None,
    cast: bool,
    rename: "Mapping[str, str] | Iterable[str]",
    part: str | None,
    called: str,
    tell: Callable[[str], object],
) -> Any:
    from ..checkpoints import Store
    from ..checkpoints.differs import check_same
    from ..checkpoints.parts import joined, leaves_of, part_of

    if rename:
        raise ShardError(
            f"rename is for files of weights, and {path} is a folder of checkpoints: leave it out"
        )
    with Store(path) as store:
        found = newest(store, number)
        saved = store.saved(found)
        where = f"{store.folder.name}/{found}"
        inside = part_of((x.path for x in saved.leaves), state.names, where, part, called)
        there = leaves_of(inside, saved.leaves, state.told)
        check_same(there, state.told, f"{inside} of {where}" if inside else where, cast=cast)
        targets = {joined(inside, name): x for name, x in state.targets(shardings(step, state, tell)).items()}
        arrays = store.restore(found, targets)
    step.calls_before = saved.step - step.calls
    return state.restored({name: arrays[joined(inside, name)] for name in state.names})


def newest(store: "Store", number: int | None = None) -> int:
    """The number of the newest checkpoint, or the one that is asked for, which all hosts have. Raises ShardError where
    there is none."""
    found = store.agreed(number)
    if found is None:
        torn = store.torn()
        cut = f", only saves that were cut off, which are removed: {', '.join(torn)}" if torn else ""
        raise ShardError(
            f"{store.name} has no checkpoint{cut}.{store.nearest} step.save(DIR, state) makes one"
        )
    return found


def shardings(
    step: "ShardedStep", state: "Opened", tell: Callable[[str], object] = warnings.warn
) -> dict[str, Any]:
    """Where the program of the last kind of call wants each leaf of a state; whole on every device what none of its
    inputs is, of which `tell` gets a line where it is more than a number. Raises ShardError before there is one."""
    entry = step.entry
    from ..checkpoints.parts import joined, most_of, under

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
    part = most_of(under(name for name, _ in free), set(state.names))
    whole = NamedSharding(step.mesh, PartitionSpec())
    found: dict[str, Any] = {}
    without = []
    for leaf in state.told:
        names = (
            joined(part, leaf.path),
            leaf.path,
            leaf.path.partition(".")[2],
        )  # a part, a state of one argument, or of several
        places = next((each for name in names if (each := free.get((name, leaf.shape)))), None)
        found[leaf.path] = whole if places is None else places.pop(0)
        if places is None and math.prod(leaf.shape) > 1:
            without.append(leaf)
    if without and step.mesh.size > 1:
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        tell(
            f"{without[0]}{more} whole on each of {step.mesh.size} devices: {step.name} takes no input of this name "
            "and shape, so its plan has no place for it"
        )
    return found
