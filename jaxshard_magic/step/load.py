"""How many rows of tokens each expert of a step gets, counted on one call's inputs by a program of its own.

An output more of the step would change what its program moves, so that it is left as it is: what chooses among experts
is run once more, before the first call, as far as the last layer that does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..compiler_log import captured
from ..placing import whole as values
from ..program import settings
from ..program.compiling import compile_apart, jit
from ..program.garbage import uncollected
from ..program.hooks import retracing
from ..program.memory_kinds import lowered_as
from ..program.peel import specs
from ..program.routing import Route
from ..strategies.hold import Hold
from ..strategies.load import Loads
from ..temporary import within
from .planned import own_mesh

if TYPE_CHECKING:
    from .entry import Entry


@dataclass(frozen=True, eq=False)
class Counted:
    """Of the layers of a route: the rows that chose each expert, the most of them in one group, and those that have a
    place; each (layers, experts), the last None where experts have no places."""

    chosen: np.ndarray
    most: np.ndarray
    kept: np.ndarray | None


def routes_of(entry: "Entry") -> tuple[Route, ...]:
    """The layers whose rows can be counted: none of a step that calls Python, which would be called once more."""
    if entry.hosts > 1 or not isinstance(entry.plan.run, Hold) or entry.traced.closed.effects:
        return ()
    return tuple(route for experts in entry.plan.experts for route in experts.routes)


@within(settings.own_work)
@within(retracing)
def counted(
    entry: "Entry", leaves: Sequence[Any], say: Callable[[str], None] = lambda _: None
) -> dict[Route, Counted]:
    """What each route of a step gives on the inputs of one call, placed as its program takes them.

    It compiles and runs as much of the step's forward pass as its last router needs. Empty where that would take more
    temporary memory than the step itself.
    """
    routes, plan = routes_of(entry), entry.plan
    if not routes or not isinstance(plan.run, Hold):
        return {}
    say("counting the rows of experts")
    shardings = plan.in_shardings
    whole = NamedSharding(plan.mesh, PartitionSpec())
    inputs = [*entry.consts, *leaves]
    loads = Loads(plan.run.layout, routes, entry.real)
    with own_mesh(plan.mesh):
        count = jit(lambda *xs: loads(*xs), in_shardings=shardings, out_shardings=whole)
        with uncollected():
            lowering = count.lower(*lowered_as(specs(inputs), shardings))
        with captured():  # complaints are not of the step
            program = compile_apart(lowering)
    room, takes = entry.compiled.memory_analysis(), program.memory_analysis()
    if room and takes and takes.temp_size_in_bytes > room.temp_size_in_bytes:
        return {}
    found = jax.tree.map(values, program(*inputs))
    return {route: Counted(*each) for route, each in zip(routes, found, strict=True) if each is not None}
