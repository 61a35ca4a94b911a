"""What a step's gradient call gives of a part of the batch: is it a mean or a sum over examples?"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from ..config.options import GradientOptions
from ..errors import ShardError
from ..gradients.accumulate import Accumulated
from ..program.batching.examples import Constant, Joined, Rows, Summed
from ..program.batching.follow import follow
from ..program.capture import gradients_of
from ..program.flow import Flow
from ..program.ir import Program
from ..program.mapped import PerDevice
from ..program.peel import specs
from ..program.roles import BATCH
from ..program.trace import Traced, path_name
from ..step.planned import own_mesh
from ..step.tracing import captured_at
from .last import last_call

if TYPE_CHECKING:
    from ..step import ShardedStep


def is_mean(step: "ShardedStep", n: int, calls: Sequence[Accumulated]) -> bool | None:
    """Is all that the step's gradient `calls` over `n` microbatches give a mean over examples, or one for each? False:
    sums. None: neither, or with draws that depend on what is drawn before."""
    if len(calls) != 1 or not _plain(calls[0]) or _draws(calls[0].small, bool(objects(step))):
        return None
    scales = {how.scale for how in calls[0].outputs.how.values() if isinstance(how, Summed)}
    mean = {Fraction(1, n): True, Fraction(1): False}.get(scales.pop()) if len(scales) == 1 else None
    return mean if mean is not None and _reads_rows(step, n) else None


def convolves(calls: Sequence[Accumulated]) -> bool:
    """Do losses have convolutions?"""
    return any(
        (c := e.contraction) is not None and c.windowed for call in calls for e in call.small.equations
    )


def objects(step: "ShardedStep") -> list[str]:
    """The step's arguments that are NNX objects: a loop's body may only read copies of its own."""
    _, call = last_call(step)
    return [] if call.nodes is None else [path_name(path[:1]) for path in call.nodes.root_paths]


def batch_names(step: "ShardedStep") -> set[str]:
    """The step's arguments that are examples as a whole."""
    roles: dict[str, set[str]] = defaultdict(set)
    for leaf in last_call(step)[0].plan.leaves:
        roles[leaf.path.partition(".")[0]].add(leaf.role)
    return {name for name, own in roles.items() if own == {BATCH}}


def calls_of(step: "ShardedStep") -> tuple[int, Sequence[Accumulated]]:
    """Over how many microbatches the step's gradient calls are taken, and those calls: of a step without microbatches
    as they would be with the fewest. None where there can't be any."""
    (entry, call), n = last_call(step), step.request.gradients.microbatches
    rewritten, plan = entry.rewritten, entry.plan
    if n == 1:
        each = (plan.examples or 0) // plan.shards
        n = next((k for k in range(2, each + 1) if each % k == 0), 1)
        request = replace(step.request, gradients=GradientOptions(microbatches=n))
        try:
            rewritten = step.planned_for(call, request).rewritten
        except ShardError:
            return n, ()
    return n, tuple(rewritten.calls.values()) if rewritten is not None else ()


def _plain(call: Accumulated) -> bool:
    outputs, small = call.outputs, call.small
    joined = [how for how in outputs.how.values() if isinstance(how, Joined)]
    return (
        outputs.exact
        and not (outputs.guessed or outputs.carried or call.followed.norms)
        and {*outputs.how} <= {*small.outputs}
        and all(how.dim == 0 and how.scale == 1 for how in joined)
        and set(call.batch.values()) <= {0}
    )


def _draws(loss: Program, objects: bool) -> bool:
    """Does a loss draw numbers that it depends on? `objects`: those that draw are changed by it."""
    flow = Flow(loss)
    met = flow.back(loss.outputs)
    return any(objects or any(v in met for v in e.outs) for e in flow.random)


def _reads_rows(step: "ShardedStep", n: int) -> bool:
    """Does the gradient call read of the batch what an n-th of it has as well: a row for each example?

    Not so where the step, before it takes its gradient, normalises its batch as a whole, or draws noise for it."""
    entry, call = last_call(step)
    if isinstance(entry.traced, PerDevice):
        return True
    batch, avals = batch_names(step), specs(call.leaves)
    names = [leaf.path.partition(".")[0] for leaf in entry.plan.leaves[len(entry.traced.consts) :]]
    cut = {i: 0 for i, (name, a) in enumerate(zip(names, avals, strict=True)) if name in batch and a.shape}
    part = [a.update(shape=(a.shape[0] // n, *a.shape[1:])) if i in cut else a for i, a in enumerate(avals)]
    try:
        with own_mesh(step.mesh):
            large, small = (captured_at(call, these) for these in (avals, part))
        return _follows_rows(small, large, cut)
    except (ShardError, TypeError, ValueError):  # of a step that takes its sizes from elsewhere
        return False


def _follows_rows(small: Traced, large: Traced, cut: Mapping[int, int]) -> bool:
    program, first = Program(small.closed), len(small.consts)
    followed = follow(program, Program(large.closed), {first + i: d for i, d in cut.items()})
    changed = {
        v for i in (*followed.draws, *(i for i, _ in followed.scales)) for v in program.equations[i].outs
    }
    calls, flow = gradients_of(program), Flow(program)
    read = [followed.of[v] for e in calls for v in e.ins if v is not None]
    rows = all(isinstance(label, Constant) or label == Rows(0) for label in read)
    return rows and not changed & flow.back(v for e in calls for v in e.ins).keys()
