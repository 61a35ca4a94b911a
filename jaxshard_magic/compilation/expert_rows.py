"""Count the rows (tokens) routed to each expert for one call's inputs, with a program of its own.

The routers run once more before the first call, as far as the last layer with a router.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..compiler_log import capture_messages
from ..device_arrays import to_numpy as values
from ..program import jax_settings
from ..program.compiling import compile_in_thread, jit
from ..program.flatten_call import shape_structs
from ..program.gc_pause import gc_paused
from ..program.hooks import retrace_context
from ..program.memory_kinds import shapes_for_lowering
from ..program.routing import RoutedLayer
from ..strategies.expert_load import ExpertLoads
from ..strategies.sharded_lowering import ShardedLowering
from ..temporary import run_in_context
from .planned_call import mesh_context

if TYPE_CHECKING:
    from .compiled_step import CompiledStep


@dataclass(frozen=True, eq=False)
class ExpertRowCounts:
    """Routed rows in the layers of a route; arrays of shape `(layers, experts)`.

    Attributes:
        chosen: Rows that chose each expert.
        max_per_group: Largest number of rows for an expert in one group.
        within_capacity: Rows within an expert's capacity; None for experts without a capacity.
    """

    chosen: np.ndarray
    max_per_group: np.ndarray
    within_capacity: np.ndarray | None


def countable_routes(entry: "CompiledStep") -> tuple[RoutedLayer, ...]:
    """Return the routes with countable rows; none on several hosts, for a step without sharding constraints, or for a
    step with effects."""
    # Counting would run effects, such as calls to Python, once more.
    if entry.hosts > 1 or not isinstance(entry.plan.run, ShardedLowering) or entry.traced.closed.effects:
        return ()
    return tuple(route for experts in entry.plan.experts for route in experts.layers)


@run_in_context(jax_settings.suspend_checks)
@run_in_context(retrace_context)
def count_expert_rows(
    entry: "CompiledStep", leaves: Sequence[Any], say: Callable[[str], None] = lambda _: None
) -> dict[RoutedLayer, ExpertRowCounts]:
    """Return the rows of each expert for the inputs of one call.

    Compiles and runs the forward pass as far as the last router.

    Args:
        entry: Compiled program of the call.
        leaves: Flat inputs, placed for the program.
        say: Progress callback.

    Returns:
        Rows by route; empty if counting would take more temporary memory than the step itself.
    """
    routes, plan = countable_routes(entry), entry.plan
    if not routes or not isinstance(plan.run, ShardedLowering):
        return {}
    say("counting the rows of experts")
    shardings = plan.in_shardings
    whole = NamedSharding(plan.mesh, PartitionSpec())
    inputs = [*entry.consts, *leaves]
    loads = ExpertLoads(plan.run.layout, routes, entry.example_mask)
    # An additional output of the step would change the collectives of the step's program, so a program of its own
    # counts.
    with mesh_context(plan.mesh):
        count = jit(lambda *xs: loads(*xs), in_shardings=shardings, out_shardings=whole)
        with gc_paused():
            lowering = count.lower(*shapes_for_lowering(shape_structs(inputs), shardings))
        with capture_messages():  # messages of the compiler are about this program, not the step
            program = compile_in_thread(lowering)
    room, takes = entry.compiled.memory_analysis(), program.memory_analysis()
    if room and takes and takes.temp_size_in_bytes > room.temp_size_in_bytes:
        return {}
    counts = jax.tree.map(values, program(*inputs))
    return {route: ExpertRowCounts(*each) for route, each in zip(routes, counts, strict=True) if each is not None}
