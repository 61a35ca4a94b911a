"""What is known of a candidate before it is compiled: what it multiplies, must send and holds, from its plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..analysis.collectives import wire_bytes
from ..analysis.leaves import leaves
from ..analysis.roofline import roofline
from ..analysis.staged import staged_leaves
from ..analysis.staged_costs import roofline_costs, update_seconds
from ..hardware import Chip
from ..pipeline.executed import Pipeline
from ..plan import Plan, Sent
from ..report import Collective
from ..report.held import held
from ..request.pipeline_options import default_microbatches
from ..schedule import Costs, simulate
from ..step import ShardedStep
from ..strategies.footprint import footprint
from ..strategies.hold import Hold
from ..strategies.traffic import traffic
from ..targets import target_of
from .candidates import Candidate


@dataclass(frozen=True)
class Sketch:
    """`seconds`: of a step at least, of them `own` in products and the update and `sent` on the links; None where the
    chip's figures do not tell. `holds`: bytes of the arrays of the fullest device, `needs` with what lies in between.
    All None for a strategy whose layout the compiler chooses. `rough`: of a pipeline that was not cut into its stages
    yet, as if these were all alike."""

    seconds: float | None = None
    own: float | None = None
    sent: float | None = None
    holds: int | None = None
    needs: int | None = None
    rough: bool = False


def sketch(
    step: ShardedStep, candidate: Candidate, args: Sequence[Any], kwargs: Mapping[str, Any], chip: Chip
) -> Sketch:
    """Plan `step`, made of `candidate`, and compile nothing. Raises `ShardError` for what can't be planned."""
    planned = step.planned(*args, **kwargs)
    plan, mesh = planned.plan, candidate.mesh
    if not isinstance(plan.run, Hold):
        return Sketch()
    memory = footprint(plan.run, [len(planned.traced.consts) + i for i in planned.donated])
    if step.request.pipeline is not None:
        return _of_stages(step, plan, candidate, memory.arrays, memory.between, chip)
    moves = map(collective, traffic(plan.run))
    roof = roofline(chip, mesh.shape, plan.shares, leaves(plan.leaves, plan.mesh), moves, target_of(mesh))
    return Sketch(roof.step, roof.own, roof.communication, memory.arrays, memory.peak)


def _of_stages(
    step: ShardedStep, plan: Plan, candidate: Candidate, arrays: int, between: int, chip: Chip
) -> Sketch:
    """A pipeline by the plan of the whole step on one rank: stages that are all alike."""
    piped = step.request.pipeline
    assert piped is not None
    mesh, target = candidate.mesh, target_of(candidate.mesh)
    stages = mesh.shape[candidate.request.stage_axis]
    shards = prod(mesh.shape[axis] for axis in plan.batch_axes)
    m = step.request.gradients.microbatches
    if m == 1 and plan.examples is not None:
        m = default_microbatches(plan.examples, shards, stages, piped)
    run = simulate(piped.scheduled(stages, m))
    shares = plan.shares and [replace(s, bytes=s.bytes + (m - 1) * s.weights) for s in plan.shares]
    products = roofline(chip, mesh.shape, shares, (), (), target).own
    update = roofline(chip, mesh.shape, (), leaves(plan.leaves, plan.mesh), (), target).own
    during, after = _sent(plan, m, chip, candidate)
    busy, held_at_once = 1 / stages / (1 - run.bubble), max(run.peak_activations) / m / stages
    memory = int(arrays / stages), int(arrays / stages + held_at_once / run.schedule.chunks * between)
    if products is None or update is None or during is None or after is None:
        return Sketch(None, None, None, *memory, rough=True)
    own, sent = busy * products + update / stages, busy * during + after / stages
    return Sketch(own + sent, own, sent, *memory, rough=True)


def refined(pipeline: Pipeline, candidate: Candidate, chip: Chip, rough: Sketch) -> Sketch:
    """The sketch of a pipeline that is cut into its stages, each with its own products and arrays."""
    plan, schedule, target = pipeline.plan, pipeline.split.schedule, target_of(candidate.mesh)
    costs = roofline_costs(pipeline, chip, target, {})
    during, after = _sent(plan, schedule.microbatches, chip, candidate)
    placed = staged_leaves(pipeline, plan.leaves)
    holds = held(placed)
    needs = None if rough.needs is None or rough.holds is None else holds + rough.needs - rough.holds
    if costs is None or during is None or after is None:
        return Sketch(None, None, None, holds, needs)
    stages = schedule.all_stages
    each = during / stages / schedule.microbatches / 2  # of a microbatch's two passes through a stage
    every = costs.per_stage(stages)
    sending = Costs(
        [t + each for t in every.forward],
        every.input_grad,
        [t + each for t in every.weight_grad],
        every.transfer,
    )
    alone = simulate(schedule, costs).makespan
    own, sent = alone + update_seconds(pipeline, chip, placed), after / schedule.stages
    sent += simulate(schedule, sending).makespan - alone
    return Sketch(own + sent, own, sent, holds, needs)


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


def collective(move: Sent) -> Collective:
    n = move.group_size
    sent = wire_bytes(move.kind, n, move.count * move.bytes)
    return Collective(move.kind, move.axes, n, move.count, move.bytes, sent)
