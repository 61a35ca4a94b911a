"""A step's state saved, and restored where the step's plan has it."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from jax.sharding import NamedSharding, PartitionSpec

from ..errors import ShardError
from ..program.trace import path_name
from ..report.parts import mesh_text
from .outputs import OWN

if TYPE_CHECKING:
    from ..checkpoints import SavedLeaf, Store
    from ..checkpoints.objects import Opened
    from .sharded import ShardedStep


def save(step: "ShardedStep", path: "str | PathLike[str]", state: Any) -> int:
    """Save a state into a folder of checkpoints, and the number that it got there. Raises ShardError as
    `Store` does."""
    from ..checkpoints import Saved, Store
    from ..checkpoints.objects import opened

    state_of = opened(state)
    skipped = 0 if step.kept is None else step.kept.resumed or 0  # of the run before
    number = step.calls_before + skipped + step.calls
    saved = Saved(number, step.strategy, mesh_text(step.mesh.shape), state_of.told)
    with Store(str(path)) as store:
        store.save(number, state_of.arrays(), saved)
    return number


def restore(
    step: "ShardedStep",
    path: "str | PathLike[str]",
    like: Any,
    number: int | None = None,
    cast: bool = False,
    tell: Callable[[str], object] = warnings.warn,
) -> Any:
    """A state of a folder of checkpoints as `like` has it, laid out by the step's plan; `tell` gets a line of arrays
    that the plan has no place for."""
    from ..checkpoints import Store
    from ..checkpoints.differs import check_same
    from ..checkpoints.objects import opened

    state = opened(like)
    with Store(str(path)) as store:
        found = newest(store) if number is None else number
        saved = store.saved(found)
        there = of_loop(saved.leaves, state) if "kinds" in store.extra(found) else {}
        leaves = [
            replace(x, path=there.get(x.path, x.path)) for x in saved.leaves if not there or x.path in there
        ]
        check_same(leaves, state.told, f"{store.folder.name}/{found}", cast=cast)
        targets = state.targets(shardings(step, state, tell))
        names = there or {name: name for name in targets}
        read = store.restore(found, {name: targets[own] for name, own in names.items()})
        arrays = {own: read[name] for name, own in names.items()}
    step.calls_before = saved.step - step.calls
    return state.restored(arrays)


def of_loop(saved: Sequence["SavedLeaf"], state: "Opened") -> dict[str, str]:
    """The names of a state's leaves by those that a loop's checkpoint has for them, where these begin with the name of
    the step's argument. A state of several objects is of as many arguments, in their order. Empty where none fits."""
    of_arguments = _by_first([x.path for x in saved if not x.path.startswith(OWN)])
    for rest in of_arguments.values():
        if rest.keys() == {"" if name == "state" else name for name in state.names}:
            return {path: name or "state" for name, path in rest.items()}
    found: dict[str, str] = {}
    for wanted in _by_first(state.names).values():
        head = next((head for head, rest in of_arguments.items() if rest.keys() == wanted.keys()), None)
        if head is None:
            return {}
        found |= {path: wanted[name] for name, path in of_arguments.pop(head).items()}
    return found


def _by_first(paths: Iterable[str]) -> dict[str, dict[str, str]]:
    """Paths by their first part, and then by what is behind it."""
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        head, _, rest = path.partition(".")
        found.setdefault(head, {})[rest] = path
    return found


def newest(store: "Store") -> int:
    """The number of the newest checkpoint. Raises ShardError where there is none."""
    found = store.latest()
    if found is None:
        torn = store.torn()
        cut = f", only saves that were cut off, which are removed: {', '.join(torn)}" if torn else ""
        raise ShardError(f"{store.name} has no checkpoint{cut}; step.save(DIR, state) makes one")
    return found


def shardings(
    step: "ShardedStep", state: "Opened", tell: Callable[[str], object] = warnings.warn
) -> dict[str, Any]:
    """Where the program of the last kind of call wants each leaf of a state; whole on every device what none of its
    inputs is, of which `tell` gets a line where it is more than a number. Raises ShardError before there is one."""
    entry = step.entry
    if entry is None:
        raise ShardError(
            f"{step.name} has no plan yet, by which a state is laid out: call it once, or step.prepare(state, batch) "
            "with arrays or their shapes"
        )
    n = len(entry.consts)
    rows = zip(entry.traced.in_paths[n:], entry.traced.closed.in_avals[n:], entry.shardings, strict=True)
    free = [(path_name(path).partition(".")[2], aval.shape, sharding) for path, aval, sharding in rows]
    whole = NamedSharding(step.mesh, PartitionSpec())
    found: dict[str, Any] = {}
    without = []
    for leaf in state.told:
        names = (leaf.path, leaf.path.partition(".")[2])  # a state of one argument, or of several
        at = next((i for name in names for i, row in enumerate(free) if row[:2] == (name, leaf.shape)), None)
        found[leaf.path] = whole if at is None else free.pop(at)[2]
        if at is None and math.prod(leaf.shape) > 1:
            without.append(leaf)
    if without and step.mesh.size > 1:
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        tell(
            f"{without[0]}{more} whole on each of {step.mesh.size} devices: {step.name} takes no input of this name "
            "and shape, so its plan has no place for it"
        )
    return found
