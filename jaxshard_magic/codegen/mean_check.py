"""Check of a step's gradient call on parts of the batch: does it return means or sums over examples?"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from ..compilation.planned_call import mesh_context
from ..compilation.tracing import capture_gradients
from ..config.options import GradientOptions
from ..errors import ShardError
from ..gradients.accumulate import AccumulatedGradient
from ..program.batching.batch_labels import Concatenated, Constant, PerExample, Summed
from ..program.batching.followed_program import follow_batch
from ..program.flatten_call import shape_structs
from ..program.flow import Flow
from ..program.gradient_calls import gradient_equations
from ..program.ir import Program
from ..program.per_device import PerDeviceTrace
from ..program.roles import BATCH
from ..program.trace import Traced, path_name
from .latest_call import last_call

if TYPE_CHECKING:
    from ..step import ShardedStep


def is_mean(step: "ShardedStep", n: int, calls: Sequence[AccumulatedGradient]) -> bool | None:
    """Return whether all results of the gradient call are means over examples or have a row per example.

    Args:
        step: The step.
        n: Number of microbatches.
        calls: Gradient calls of the step over `n` microbatches.

    Returns:
        True for means, False for sums. None for neither, for several calls, and for a loss that depends on random
        draws.
    """
    if len(calls) != 1 or not _is_exact(calls[0]) or _draws(calls[0].small, bool(nnx_arguments(step))):
        return None
    scales = {how.scale for how in calls[0].outputs.combinations.values() if isinstance(how, Summed)}
    # Means of microbatches are combined with a factor of 1/n, sums with 1.
    mean = {Fraction(1, n): True, Fraction(1): False}.get(scales.pop()) if len(scales) == 1 else None
    return mean if mean is not None and _reads_rows(step, n) else None


def convolves(calls: Sequence[AccumulatedGradient]) -> bool:
    """Return whether losses have convolutions."""
    return any((c := e.contraction) is not None and c.windowed for call in calls for e in call.small.equations)


def nnx_arguments(step: "ShardedStep") -> list[str]:
    """Return the step's arguments that are NNX objects."""
    _, call = last_call(step)
    return [] if call.nodes is None else [path_name(path[:1]) for path in call.nodes.root_paths]


def batch_names(step: "ShardedStep") -> set[str]:
    """Return the step's arguments whose arrays are all examples."""
    roles: dict[str, set[str]] = defaultdict(set)
    for leaf in last_call(step)[0].plan.leaves:
        roles[leaf.path.partition(".")[0]].add(leaf.role)
    return {name for name, own in roles.items() if own == {BATCH}}


def gradient_calls(step: "ShardedStep") -> tuple[int, Sequence[AccumulatedGradient]]:
    """Return the number of microbatches and the step's gradient calls over them.

    A step without microbatches is planned with the smallest possible number, a divisor of the examples per shard. The
    calls are empty where no number is possible, and where planning fails.
    """
    (entry, call), n = last_call(step), step.request.gradients.microbatches
    rewritten, plan = entry.rewritten, entry.plan
    if n == 1:
        each = (plan.examples or 0) // plan.batch_shards
        n = next((k for k in range(2, each + 1) if each % k == 0), 1)
        request = replace(step.request, gradients=GradientOptions(microbatches=n))
        try:
            rewritten = step.programs.planned_for(call, request).rewritten
        except ShardError:
            return n, ()
    return n, tuple(rewritten.calls.values()) if rewritten is not None else ()


def _is_exact(call: AccumulatedGradient) -> bool:
    """Return whether the results of a call follow from the microbatches exactly, with examples along the first
    dimension."""
    outputs, small = call.outputs, call.small
    joined = [how for how in outputs.combinations.values() if isinstance(how, Concatenated)]
    return (
        outputs.exact
        and not (outputs.averaged or outputs.carried or call.followed.full_batch_values)
        and {*outputs.combinations} <= {*small.outputs}
        and all(how.dim == 0 and how.scale == 1 for how in joined)
        and set(call.batch.values()) <= {0}
    )


def _draws(loss: Program, objects: bool) -> bool:
    """Return whether a loss depends on random draws. With NNX objects each draw counts, as it changes the object."""
    flow = Flow(loss)
    met = flow.ancestors(loss.outputs)
    return any(objects or any(v in met for v in e.results) for e in flow.random_equations)


def _reads_rows(step: "ShardedStep", n: int) -> bool:
    """Return whether the gradient call reads the same rows from an n-th of the batch as from the whole.

    False for a step with a normalization of the whole batch, or with noise drawn for the batch, before the gradient.
    """
    entry, call = last_call(step)
    if isinstance(entry.traced, PerDeviceTrace):
        return True
    batch, avals = batch_names(step), shape_structs(call.leaves)
    names = [leaf.path.partition(".")[0] for leaf in entry.plan.leaves[len(entry.traced.consts) :]]
    cut = {i: 0 for i, (name, a) in enumerate(zip(names, avals, strict=True)) if name in batch and a.shape}
    part = [a.update(shape=(a.shape[0] // n, *a.shape[1:])) if i in cut else a for i, a in enumerate(avals)]
    try:
        with mesh_context(step.mesh):
            large, small = (capture_gradients(call, these) for these in (avals, part))
        return _follows_rows(small, large, cut)
    except (ShardError, TypeError, ValueError):  # a step with sizes from elsewhere does not trace on a smaller batch
        return False


def _follows_rows(small: Traced, large: Traced, cut: Mapping[int, int]) -> bool:
    """Return whether all operands of the gradient calls have one row per example or are constant over examples."""
    program, first = Program(small.closed), len(small.consts)
    followed = follow_batch(program, Program(large.closed), {first + i: d for i, d in cut.items()})
    changed = {
        v for i in (*followed.draw_dims, *(i for i, _ in followed.operand_scales)) for v in program.equations[i].results
    }
    calls, flow = gradient_equations(program), Flow(program)
    read = [followed.value_labels[v] for e in calls for v in e.operands if v is not None]
    rows = all(isinstance(label, Constant) or label == PerExample(0) for label in read)
    return rows and not changed & flow.ancestors(v for e in calls for v in e.operands).keys()
