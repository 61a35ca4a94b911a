"""The advice of a report: what is known of a step, its program and its loop, put before the rules of `advice`."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ..config.from_line import changed_by
from ..errors import ShardError
from ..hardware import Chip
from ..program.phases import BACKWARD
from ..report import Advice, Collective, Experts, Measured, Memory, Timing
from ..targets import made_of, slices, target_of
from .advice import Case, Loop, advise
from .advice.pipeline import PipelineCase, pipeline_advice
from .in_time import InTime
from .planned import differences, once_a_loop
from .reading import Reading, reading_of
from .roofline import Roofline
from .staged_costs import weights_seconds

if TYPE_CHECKING:
    from ..step import Entry, ShardedStep

_refusals: "WeakKeyDictionary[Entry, dict[str, str | None]]" = WeakKeyDictionary()


def step_advice(
    step: "ShardedStep",
    entry: "Entry",
    reading: Reading,
    memory: Memory,
    collectives: Sequence[Collective],
    roof: Roofline | None,
    spent: Measured | None,
    loop: Loop,
    experts: tuple[Experts, ...],
) -> Iterator[Advice]:
    """What there is to say of a step: what was found while it was planned and compiled, and what `advise` finds."""
    plan, leaves, target = entry.plan, reading.leaves, target_of(step.mesh)
    case = Case(
        leaves=leaves,
        mesh=reading.mesh,
        strategy=plan.strategy,
        jobs=plan.jobs,
        idle_axes=plan.idle_axes,
        given={leaf.path for leaf in plan.leaves if leaf.why.startswith(("given ", "rule ", "follows "))},
        kept=[] if entry.donated else [leaves[i] for i in set(plan.state_pairs.values())],
        moves=[move for move, _ in reading.moves],
        collectives=collectives,
        memory=memory,
        roof=roof,
        shares=plan.shares or (),
        examples=entry.examples,
        examples_before=step.before and step.before.examples_of(entry),
        callbacks=reading.callbacks,
        target=target,
        larger=() if target is None else slices.larger(target.chip, target.extent),
        tried=step.tried,
        asked=step.request,
        inside=step.request.gradients if any(work.phase == BACKWARD for work in plan.work) else None,
        refuses=partial(_refusal, step, entry),
        made_of=made_of(step.mesh),
        once_a_loop=partial(once_a_loop, entry, step.request.gradients.sum_dtype),
        largest_weight=plan.largest_weight,
        measured=spent,
        loop=loop,
        experts=experts,
    )
    told = None if entry.planned is None else differences(reading_of(entry.planned), reading)
    for finding in (*plan.findings, *reading.complaints, *filter(None, [told])):
        yield Advice(finding.code, finding.level, finding.message, case.line(finding.fix))
    yield from advise(case)


def _refusal(step: "ShardedStep", entry: "Entry", line: str) -> str | None:
    """Why the step can't be had as a line says, or would train on another loss; None where it can. Plans it so, once
    for each program and line."""
    known = _refusals.setdefault(entry.planned or entry, {})
    if line not in known and entry.call_of is not None:
        try:
            planned = step.planned_for(entry.call_of, changed_by(line, step.request))
            known[line] = planned.rewritten and planned.rewritten.other_loss
        except ShardError as error:
            known[line] = str(error)
    return known.get(line)


def loop_of(step: "ShardedStep", times: Timing) -> Loop:
    """What is known of the loop that called the step."""
    watch = step.watched
    if watch is None:
        return Loop(times, recompiled=tuple(step.recompiled))
    ((at, seen),) = watch.idle_at.most_common(1) or [(None, 0)]
    return Loop(
        times,
        watch.run.metrics(),
        watch.loss_name or None,
        tuple(step.recompiled),
        None if at is None else (*at, seen),
        watch.idle_at.total(),
    )


def schedule_advice(
    step: "ShardedStep", entry: "Entry", reading: Reading, pipeline: InTime | None, chip: Chip | None
) -> list[Advice]:
    """What there is to say of a pipeline's schedule."""
    pipelined, staged = entry.compiled, reading.staged
    if pipeline is None or staged is None or step.request.pipeline is None:
        return []
    run = pipeline.run if pipeline.advised.source == "measured" else None
    weights = None
    if run is None and chip is not None:  # as the costs of what is advised are predicted
        axes = entry.plan.batch_axes
        weights = weights_seconds(pipelined, chip, target_of(step.mesh), staged.said, axes)
    case = PipelineCase(
        pipeline.advised,
        examples=entry.examples,
        shards=staged.shards,
        crossing=staged.crossing,
        units=staged.units,
        balanced=step.request.pipeline.balance == "measured" or staged.chosen,
        transfers=() if run is None else run.transfers(),
        weights=weights or (),
        whole=entry.rewritten is not None and bool(entry.rewritten.whole or entry.rewritten.other_loss),
        line=Case(leaves=(), mesh=reading.mesh, strategy=step.strategy, asked=step.request).line,
        by="as predicted" if pipeline.advised is pipeline.shown else "by FLOPs",
    )
    return pipeline_advice(case)
