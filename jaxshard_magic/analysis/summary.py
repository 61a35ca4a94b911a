"""A sharded step -> its Report: what the compiled program says, and what its calls measured."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from ..plan import Plan
from ..report import Advice, Collective, Leaf, Memory, MeshInfo, Report, Spread, Timing
from .advice import advise
from .collectives import merge, moves
from .leaves import leaves
from .memory import device_limit, memory
from .mesh_info import mesh_info

if TYPE_CHECKING:
    from ..step import Entry, ShardedStep


class Facts(NamedTuple):
    """What the compiled program says, whether it ran or not."""

    mesh: MeshInfo
    leaves: tuple[Leaf, ...]
    memory: Memory
    collectives: tuple[Collective, ...] | None
    advice: tuple[Advice, ...]


_known: "WeakKeyDictionary[Entry, Facts]" = WeakKeyDictionary()  # reading a very large program takes seconds


def summarize(step: "ShardedStep") -> Report:
    """The Report of `step`'s last kind of call; `step` has at least one entry."""
    entry = step.entry
    assert entry is not None
    found = facts_of(entry)
    return Report(
        name=step.name,
        strategy=step.strategy,
        options=step.options,
        mesh=found.mesh,
        leaves=found.leaves,
        memory=found.memory,
        collectives=found.collectives,
        timing=Timing(entry.compile_s, entry.calls, len(entry.timings), _spread(entry.timings)),
        advice=found.advice,
        check=step.checked,
    )


def facts_of(entry: "Entry") -> Facts:
    """What the compiled program of `entry` says, read once."""
    if entry not in _known:
        _known[entry] = facts(entry.plan, entry.compiled, donated=bool(entry.donated))
    return _known[entry]


def facts(plan: Plan, compiled: Any, *, donated: bool) -> Facts:
    """Read a compiled step; `donated` says whether it takes its old state's memory for the new one."""
    device = plan.mesh.devices.flat[0]
    mesh = mesh_info(plan.mesh, "simulated" if device.platform == "cpu" else "attached")
    placed = leaves(plan.leaves, plan.mesh)
    text = compiled.as_text()
    found = moves(text, plan.mesh.shape) if text else ()
    kept = [] if donated else [placed[i] for i in set(plan.state_pairs.values())]
    given = {leaf.path for leaf in plan.leaves if leaf.why.startswith(("given ", "rule ", "follows "))}
    advice = advise(
        placed, mesh, plan.strategy, idle_axes=plan.idle_axes, given=given, moves=found, kept=kept
    )
    own = tuple(Advice(f.code, f.level, f.message, f.fix) for f in plan.findings)
    held = memory(compiled, placed, plan.mesh, device_limit(device))
    return Facts(mesh, placed, held, merge(found) if text else None, own + advice)


def _spread(seconds: Sequence[float]) -> Spread | None:
    return Spread(min(seconds), statistics.median(seconds), max(seconds)) if seconds else None
