"""Estimate of a candidate by its plan, before compiling: products, bytes sent and bytes held."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..analysis.leaves import leaves
from ..analysis.pipeline_timing import with_start
from ..analysis.plan_prediction import to_report_collective
from ..analysis.roofline import PREDICTION_ERROR, roofline
from ..config.pipeline_microbatches import default_microbatches
from ..config.request import Request
from ..hardware import Chip
from ..pipeline.outline import Outline
from ..plan import DeviceWork, Plan
from ..report.device_leaves import stored_bytes
from ..schedule import Costs, Schedule, simulate
from ..step import ShardedStep
from ..strategies.footprint import Footprint, footprint
from ..strategies.planned_collectives import planned_collectives
from ..strategies.sharded_lowering import ShardedLowering
from ..targets import target_of
from .candidates import Candidate


@dataclass(frozen=True)
class PlanEstimate:
    """Estimate by a plan. Times are None if the chip's figures don't suffice; all fields are None if the compiler
    chooses the layout.

    Attributes:
        seconds: Best guess for a step, with the usual overlap of communication.
        compute_seconds: Part of `seconds` in products and the update.
        communication_seconds: Seconds of all communication at full bandwidth, hidden or not; in a pipeline the part of
            `seconds` that the links add.
        array_bytes: Bytes of the arrays of the fullest device.
        peak_bytes: Peak bytes of the fullest device, temporaries included.
        stages: Number of stages of each loss in a pipeline; None without a pipeline.
        min_seconds: Lower bound of the seconds. For a slice, whose compiled program tells what overlaps, with all
            possible overlap, but not below `seconds` by more than predictions err; else `seconds`.
        max_seconds: Upper estimate of the seconds, without overlap; in a pipeline `seconds`.
        experts: Whether the step was seen to have experts.
    """

    seconds: float | None = None
    compute_seconds: float | None = None
    communication_seconds: float | None = None
    array_bytes: int | None = None
    peak_bytes: int | None = None
    stages: int | None = None
    min_seconds: float | None = None
    max_seconds: float | None = None
    experts: bool = False


def estimate_plan(
    step: ShardedStep, candidate: Candidate, args: Sequence[Any], kwargs: Mapping[str, Any], chip: Chip
) -> PlanEstimate:
    """Estimate `step` by a plan; compile nothing.

    Args:
        step: Sharded step of the candidate.
        candidate: Candidate.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        chip: Chip with the figures.

    Raises:
        ShardError: The step can't be planned.
    """
    outline = None
    if step.request.pipeline is None:
        planned = step.planned(*args, **kwargs)
    else:
        planned, outline = step.programs.outlined(tuple(args), kwargs)
    plan, mesh = planned.plan, candidate.mesh
    if not isinstance(plan.run, ShardedLowering):
        return PlanEstimate()
    memory = footprint(plan.run, [len(planned.traced.consts) + i for i in planned.donated])
    if outline is not None:
        return _of_stages(step.request, plan, candidate, outline, memory, chip)
    moves = map(to_report_collective, planned_collectives(plan.run))
    target = target_of(mesh)
    placed = leaves(plan.leaves, plan.mesh)
    roof = roofline(chip, mesh.shape, plan.shares, placed, moves, target, plan.batch_axes)
    # Without a compiled program to show the overlap, candidates are compared by the same rule after compiling.
    least = roof.step
    if target is not None and roof.step is not None and roof.least is not None:
        least = max(roof.least, (1 - PREDICTION_ERROR) * roof.step)
    held = memory.arrays, memory.peak
    return PlanEstimate(
        roof.step,
        roof.own,
        roof.communication,
        *held,
        min_seconds=least,
        max_seconds=roof.high,
        experts=planned.facts.may_mix_experts,
    )


def _of_stages(
    request: Request, plan: Plan, candidate: Candidate, outline: Outline, memory: Footprint, chip: Chip
) -> PlanEstimate:
    """Estimate a pipeline by the plan of the whole step on one rank.

    A stage takes the share of the products in its own equations, and shares of the update and the arrays by parameters.
    """
    piped, target, axes = request.pipeline, target_of(candidate.mesh), candidate.mesh.shape
    assert piped is not None
    ranks, shards = axes[request.stage_axis], prod(axes[axis] for axis in plan.batch_axes)
    microbatches = request.gradients.microbatches
    if microbatches == 1 and plan.examples is not None:
        microbatches = default_microbatches(plan.examples, shards, ranks, piped)
    schedule = piped.scheduled(ranks, microbatches).for_losses(len(outline))
    stages = outline.stages(schedule, piped.cut)
    most = _most(schedule, [stage.weight_bytes for stage in stages])
    placed = leaves(plan.leaves, plan.mesh)
    weights = stored_bytes([leaf for leaf in placed if leaf.role in ("params", "frozen", "optimizer")]) / (
        stored_bytes(placed) or 1
    )
    # Each microbatch reads the weights again.
    shares = plan.shares and [
        replace(s, bytes=s.bytes + (microbatches - 1) * s.weights, weights=microbatches * s.weights)
        for s in plan.shares
    ]
    roof = roofline(chip, axes, shares, (), (), target)
    update = roofline(chip, axes, (), placed, (), target).own
    during, after = _sent(plan, microbatches, chip, candidate)
    bandwidth = roof.wires[request.stage_axis].bandwidth
    holds = int(memory.arrays * (1 - weights * (1 - most)))
    works = [
        [
            replace(p, flops=p.flops // microbatches // shards, bytes=_once(p, microbatches * shards))
            for p in stage.products
        ]
        for stage in stages
    ]
    times = [roofline(chip, axes, each, (), (), target).own or 0.0 for each in works]
    # Scaled to the plan's time for the whole step; the stages' own products only divide the time.
    times = [(roof.own or 0.0) / microbatches * t / (sum(times) or 1.0) for t in times]
    run = simulate(schedule, _costs(schedule, times))
    held_at_once = max(run.peak_activations) / microbatches / schedule.all_stages
    needs = int(holds + held_at_once * memory.temporaries)
    each = schedule.stages_per_loss
    if roof.own is None or update is None or during is None or after is None or not bandwidth:
        return PlanEstimate(None, None, None, holds, needs, each)
    crossing = [stage.crossing_bytes / microbatches / shards / bandwidth for stage in stages]
    sending = _costs(schedule, times, during / schedule.all_stages / microbatches, crossing)
    own = run.makespan + most * update
    sent = simulate(schedule, sending).makespan - run.makespan + most * after
    return PlanEstimate(own + sent, own, sent, holds, needs, each, own + sent, own + sent)


def _costs(
    schedule: Schedule, products: Sequence[float], sent: float = 0.0, transfer: float | Sequence[float] = 0.0
) -> Costs:
    """Return the seconds of each stage's actions on one microbatch.

    The forward pass takes a third. A first stage has no input gradients.

    Args:
        schedule: Schedule of the pipeline.
        products: Seconds of each stage's products for one microbatch.
        sent: Seconds of both passes of a stage on the links.
        transfer: Seconds between stages.
    """
    thirds = [each / 3 for each in products]
    first = [s % schedule.stages_per_loss == 0 for s in range(len(thirds))]
    return Costs(
        with_start([t + sent / 2 for t in thirds]),
        [0.0 if f else t for t, f in zip(thirds, first, strict=True)],
        with_start([(2 * t if f else t) + sent / 2 for t, f in zip(thirds, first, strict=True)]),
        transfer,
    )


def _once(share: DeviceWork, parts: int) -> int:
    """Return the bytes of a product for one of `parts` parts of the examples; the weights are read whole."""
    return (share.bytes - share.weights) // parts + share.weights


def _most(schedule: Schedule, weights: Sequence[float]) -> float:
    """Return the largest share of the parameters on one rank, 0 to 1."""
    of_ranks = [sum(weights[s] for s in stages) for stages in schedule.stages_of]
    return max(of_ranks) / (sum(weights) or 1.0)


def _sent(plan: Plan, m: int, chip: Chip, candidate: Candidate) -> tuple[float | None, float | None]:
    """Return the seconds on the links during a pipeline's microbatches, all stages together, and after them.

    Gradients are summed after the microbatches. Weights sharded over the batch's axes are gathered for each microbatch.
    """
    assert isinstance(plan.run, ShardedLowering)
    during, after = [], []
    for move in planned_collectives(plan.run):
        over_batch = not set(move.axes).isdisjoint(plan.batch_axes)
        if move.kind == "all-gather" and over_batch:
            during.append(replace(move, count=move.count * m))
        else:
            (after if over_batch else during).append(move)
    mesh = candidate.mesh
    first, last = (
        roofline(chip, mesh.shape, (), (), map(to_report_collective, moves), target_of(mesh)).communication
        for moves in (during, after)
    )
    return first, last
