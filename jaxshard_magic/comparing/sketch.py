"""What is known of a candidate before it is compiled: what it multiplies, must send and holds, from its plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..analysis.leaves import leaves
from ..analysis.planned import collective
from ..analysis.roofline import ERROR, roofline
from ..analysis.staged_costs import with_start
from ..config.pipeline_microbatches import default_microbatches
from ..config.request import Request
from ..hardware import Chip
from ..pipeline.outline import Outline
from ..plan import Plan, Share
from ..report.held import held
from ..schedule import Costs, Schedule, simulate
from ..step import ShardedStep
from ..strategies.footprint import Footprint, footprint
from ..strategies.hold import Hold
from ..strategies.traffic import traffic
from ..targets import target_of
from .candidates import Candidate


@dataclass(frozen=True)
class Sketch:
    """`seconds`: of a step, guessed best, where compilers hide what they usually do; `own` of them in products and the
    update, `sent` more on the links. `least`: of a slice, whose compiler tells what it hides, where that is all that it
    may, and no less than predictions err by; `most`: where they hide nothing. None where the chip's figures do not
    tell. `holds`: bytes of the arrays of the fullest device, `needs` with what lies in between. All None for a strategy
    whose layout the compiler chooses. `stages`: into how many a pipeline cuts each loss. `experts`: whether the step
    was seen to have some."""

    seconds: float | None = None
    own: float | None = None
    sent: float | None = None
    holds: int | None = None
    needs: int | None = None
    stages: int | None = None
    least: float | None = None
    most: float | None = None
    experts: bool = False


def sketch(
    step: ShardedStep, candidate: Candidate, args: Sequence[Any], kwargs: Mapping[str, Any], chip: Chip
) -> Sketch:
    """Plan `step`, made of `candidate`, and compile nothing. Raises `ShardError` for what can't be planned."""
    outline = None
    if step.request.pipeline is None:
        planned = step.planned(*args, **kwargs)
    else:
        planned, outline = step.outlined(*args, **kwargs)
    plan, mesh = planned.plan, candidate.mesh
    if not isinstance(plan.run, Hold):
        return Sketch()
    memory = footprint(plan.run, [len(planned.traced.consts) + i for i in planned.donated])
    if outline is not None:
        return _of_stages(step.request, plan, candidate, outline, memory, chip)
    moves = map(collective, traffic(plan.run))
    target = target_of(mesh)
    placed = leaves(plan.leaves, plan.mesh)
    roof = roofline(chip, mesh.shape, plan.shares, placed, moves, target, plan.batch_axes)
    # Where no compiled program will tell what overlaps, the rule that guesses it now is what compares them then, too.
    least = roof.step
    if target is not None and roof.step is not None and roof.least is not None:
        least = max(roof.least, (1 - ERROR) * roof.step)
    held = memory.arrays, memory.peak
    return Sketch(
        roof.step,
        roof.own,
        roof.communication,
        *held,
        least=least,
        most=roof.high,
        experts=planned.facts.may_mix_experts,
    )


def _of_stages(
    request: Request, plan: Plan, candidate: Candidate, outline: Outline, memory: Footprint, chip: Chip
) -> Sketch:
    """A pipeline by the plan of the whole step on one rank: each stage has its share of the products by its own, and of
    the update and the arrays by its parameters."""
    piped, target, axes = request.pipeline, target_of(candidate.mesh), candidate.mesh.shape
    assert piped is not None
    ranks, shards = axes[request.stage_axis], prod(axes[axis] for axis in plan.batch_axes)
    m = request.gradients.microbatches
    if m == 1 and plan.examples is not None:
        m = default_microbatches(plan.examples, shards, ranks, piped)
    schedule = piped.scheduled(ranks, m).for_losses(len(outline))
    stages = outline.stages(schedule, piped.cut)
    most = _most(schedule, [stage.weights for stage in stages])
    placed = leaves(plan.leaves, plan.mesh)
    weights = held([leaf for leaf in placed if leaf.role in ("params", "optimizer")]) / (held(placed) or 1)
    shares = plan.shares and [
        replace(s, bytes=s.bytes + (m - 1) * s.weights, weights=m * s.weights) for s in plan.shares
    ]
    roof = roofline(chip, axes, shares, (), (), target)
    update = roofline(chip, axes, (), placed, (), target).own
    during, after = _sent(plan, m, chip, candidate)
    way = roof.wires[request.stage_axis].bandwidth
    holds = int(memory.arrays * (1 - weights * (1 - most)))
    works = [
        [replace(p, flops=p.flops // m // shards, bytes=_once(p, m * shards)) for p in stage.products]
        for stage in stages
    ]
    times = [roofline(chip, axes, each, (), (), target).own or 0.0 for each in works]
    times = [(roof.own or 0.0) / m * t / (sum(times) or 1.0) for t in times]
    run = simulate(schedule, _costs(schedule, times))
    held_at_once = max(run.peak_activations) / m / schedule.all_stages
    needs = int(holds + held_at_once * memory.between)
    each = schedule.stages_of_loss
    if roof.own is None or update is None or during is None or after is None or not way:
        return Sketch(None, None, None, holds, needs, each)
    crossing = [stage.crossing / m / shards / way for stage in stages]
    sending = _costs(schedule, times, during / schedule.all_stages / m, crossing)
    own = run.makespan + most * update
    sent = simulate(schedule, sending).makespan - run.makespan + most * after
    return Sketch(own + sent, own, sent, holds, needs, each, own + sent, own + sent)


def _costs(
    schedule: Schedule,
    products: Sequence[float],
    sent: float = 0.0,
    transfer: float | Sequence[float] = 0.0,
) -> Costs:
    """The seconds of each stage's actions, whose products take so many for one microbatch: a third in the forward pass,
    and what comes from no stage has no input gradients. `sent`: of the two passes of each stage on the links."""
    thirds = [each / 3 for each in products]
    first = [s % schedule.stages_of_loss == 0 for s in range(len(thirds))]
    return Costs(
        with_start([t + sent / 2 for t in thirds]),
        [0.0 if f else t for t, f in zip(thirds, first, strict=True)],
        with_start([(2 * t if f else t) + sent / 2 for t, f in zip(thirds, first, strict=True)]),
        transfer,
    )


def _once(share: Share, parts: int) -> int:
    """The bytes of a product for one of so many parts of the examples, for which its weights are read whole."""
    return (share.bytes - share.weights) // parts + share.weights


def _most(schedule: Schedule, weights: Sequence[float]) -> float:
    """The share of the parameters, 0 to 1, of the rank that has most of them."""
    of_ranks = [sum(weights[s] for s in stages) for stages in schedule.stages_of]
    return max(of_ranks) / (sum(weights) or 1.0)


def _sent(plan: Plan, m: int, chip: Chip, candidate: Candidate) -> tuple[float | None, float | None]:
    """Seconds on the links while a pipeline's microbatches are worked on, all stages together, and after them, when
    gradients are added up. Weights that the batch's axes divide are gathered for each microbatch."""
    assert isinstance(plan.run, Hold)
    during, after = [], []
    for move in traffic(plan.run):
        over_batch = not set(move.axes).isdisjoint(plan.batch_axes)
        if move.kind == "all-gather" and over_batch:
            during.append(replace(move, count=move.count * m))
        else:
            (after if over_batch else during).append(move)
    mesh = candidate.mesh
    first, last = (
        roofline(chip, mesh.shape, (), (), map(collective, moves), target_of(mesh)).communication
        for moves in (during, after)
    )
    return first, last
