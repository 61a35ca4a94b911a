"""Collect the advice of a report: findings of planning and compiling, then the results of the rules in `advice`."""

from collections.abc import Iterator, Sequence
from functools import partial
from weakref import WeakKeyDictionary

from ..compilation.compiled_step import CompiledStep
from ..config.request import apply_line
from ..errors import ShardError
from ..hardware import Chip
from ..program.phases import BACKWARD
from ..report import Advice, Collective, Experts, Measured, Memory, Timing
from ..targets import mesh_prefix, slices, target_of
from .advice import Case, TrainingLoop, advise
from .advice.pipeline import PipelineCase, pipeline_advice
from .pipeline_costs import weight_traffic_seconds
from .pipeline_timing import PipelineTiming
from .plan_prediction import differences, once_per_loop
from .roofline import Roofline
from .step_facts import StepFacts, step_facts
from .step_run import StepRun

_refusals: "WeakKeyDictionary[CompiledStep, dict[str, str | None]]" = WeakKeyDictionary()


def step_advice(
    step: StepRun,
    entry: CompiledStep,
    reading: StepFacts,
    memory: Memory,
    collectives: Sequence[Collective],
    roof: Roofline | None,
    measured: Measured | None,
    loop: TrainingLoop,
    experts: tuple[Experts, ...],
) -> Iterator[Advice]:
    """Yield the advice on a step: findings of the planner and of the compiler, then the results of `advise`.

    Args:
        step: Step to report on.
        entry: One compiled program of the step.
        reading: Facts read from the program.
        memory: Memory of each device.
        collectives: Merged collectives of the program.
        roof: Predicted times; None without a chip to predict for.
        measured: Times recorded by the profiler; None without a recording.
        loop: Facts about the calling loop.
        experts: Sharded experts of the step.
    """
    plan, leaves, target = entry.plan, reading.leaves, target_of(step.mesh)
    case = Case(
        leaves=leaves,
        mesh=reading.mesh,
        strategy=plan.strategy,
        jobs=plan.axes_by_strategy,
        idle_axes=plan.idle_axes,
        # The planner's reasons for specs chosen by the user begin with these words.
        user_spec_paths={leaf.path for leaf in plan.leaves if leaf.reason.startswith(("given ", "rule ", "follows "))},
        undonated_state=[] if entry.donated else [leaves[i] for i in set(plan.state_pairs.values())],
        hlo_collectives=[move for move, _ in reading.hlo_collectives],
        collectives=collectives,
        memory=memory,
        roof=roof,
        shares=plan.shares or (),
        examples=entry.examples,
        examples_before=step.previous_examples,
        callbacks=reading.callbacks,
        target=target,
        larger=() if target is None else slices.larger_sizes(target.chip, target.extent),
        tried=step.bytes_with_fix,
        request=step.request,
        gradient_options=step.request.gradients if any(work.phase == BACKWARD for work in plan.work) else None,
        refusal_reason=partial(_refusal, step, entry),
        made_of=mesh_prefix(step.mesh),
        once_per_loop=partial(once_per_loop, entry, step.request.gradients.sum_dtype),
        largest_weight=plan.largest_weight,
        measured=measured,
        loop=loop,
        experts=experts,
    )
    planning_difference = None if entry.early_plan is None else differences(step_facts(entry.early_plan), reading)
    for finding in (*plan.findings, *reading.complaints, *filter(None, [planning_difference])):
        yield Advice(finding.code, finding.level, finding.message, case.usable_fix(finding.fix))
    yield from advise(case)


def _refusal(step: StepRun, entry: CompiledStep, line: str) -> str | None:
    """Return the reason against a step under the options of `line`; None if the step can be planned and trains on the
    same loss.

    The reason is an error message of the planner, or a note on another loss. Cost: one planning for each program and
    line; answers are cached.
    """
    reasons = _refusals.setdefault(entry.early_plan or entry, {})
    if line not in reasons and entry.call_shapes is not None:
        try:
            planned = step.plan_call(entry.call_shapes, apply_line(line, step.request))
            reasons[line] = planned.rewritten and planned.rewritten.other_loss
        except ShardError as error:
            reasons[line] = str(error)
    return reasons.get(line)


def loop_facts(step: StepRun, times: Timing) -> TrainingLoop:
    """Return the facts known about the loop around the step.

    Args:
        step: Step called by the loop.
        times: Timings of the calls.

    Returns:
        Timings and recompilations only, unless the calls of the step are followed.
    """
    idle = step.idle_samples
    at = max(idle, key=lambda line: idle[line], default=None)
    return TrainingLoop(
        times,
        step.metrics,
        step.loss,
        tuple(step.recompilations),
        None if at is None else (*at, idle[at]),
        sum(idle.values()),
    )


def schedule_advice(
    step: StepRun, entry: CompiledStep, reading: StepFacts, pipeline: PipelineTiming | None, chip: Chip | None
) -> list[Advice]:
    """Return the advice on a pipeline's schedule; empty for a step without a pipeline.

    Args:
        step: Step to report on.
        entry: Compiled pipeline of the step.
        reading: Facts read from the programs of the pipeline.
        pipeline: Measured or predicted timing of the pipeline; None without a pipeline.
        chip: Chip to predict for; None if unknown.
    """
    pipelined, staged = entry.compiled, reading.pipeline_facts
    if pipeline is None or staged is None or step.request.pipeline is None:
        return []
    run = pipeline.run if pipeline.advised.source == "measured" else None
    weights = None
    # Predicted seconds can only be added to predicted costs.
    if run is None and chip is not None:
        axes = entry.plan.batch_axes
        weights = weight_traffic_seconds(pipelined, chip, target_of(step.mesh), staged.traffic, axes)
    case = PipelineCase(
        pipeline.advised,
        examples=entry.examples,
        shards=staged.shards,
        crossing=staged.crossing,
        units=staged.units,
        balanced=step.request.pipeline.balance == "measured" or staged.chosen,
        transfers=() if run is None else run.boundary_seconds(),
        weights=weights or (),
        whole=entry.rewritten is not None and bool(entry.rewritten.undivided_reason or entry.rewritten.other_loss),
        usable_fix=Case(leaves=(), mesh=reading.mesh, strategy=step.request.strategy, request=step.request).usable_fix,
        basis="as predicted" if pipeline.advised is pipeline.shown else "by FLOPs",
    )
    return pipeline_advice(case)
