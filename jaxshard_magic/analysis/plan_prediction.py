"""Memory and communication predicted from the plan of a step, without a compiled program; the same for a pipeline."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from ..compilation.compiled_step import CompiledStep
from ..gradients.accumulate import accumulation_dtype
from ..pipeline.executor import PipelineExecutor
from ..pipeline.jobs import ProgramKey
from ..pipeline.programs import Subprogram
from ..pipeline.stage_jobs import StageJobs
from ..plan import Finding, PlannedCollective, wire_bytes
from ..program.flow import required_equations
from ..program.ir import Program, Value
from ..program.op_labels import GRADIENT, parse_label, weight_label
from ..program.phases import BACKWARD, equation_phases, outside_gradients
from ..program.sizes import array_bytes
from ..report import Collective, Leaf, Memory
from ..schedule.actions import KINDS
from ..strategies.footprint import footprint, footprint_of_part
from ..strategies.planned_collectives import planned_collectives
from ..strategies.regions.hoisted_gathers import HoistedGathers
from ..strategies.sharded_lowering import ShardedLowering
from ..targets.device_memory import device_limit
from ..units import byte_text
from .advice.case import OncePerLoop
from .collectives import Cause, merge
from .memory import memory, with_temporaries
from .origin import calling_line, locate_frames
from .pipeline_memory import shard_bytes
from .pipeline_traffic import ProgramTraffic, leaves_of
from .program_texts import home_files
from .sources import Frame, SourceText, frames_of_traceback

if TYPE_CHECKING:
    from .program_reading import ProgramReading

MEMORY_ALIKE = 0.05  # share of the planned peak; each compiler packs temporaries in its own way
SENT_ALIKE = 0.01  # share of all bytes sent; scalars such as a loss don't matter

# Key of all programs outside the stages: the plan of the whole step describes them together.
OUTSIDE_STAGES = ("beside", 0)


def predict_from_plan(
    entry: CompiledStep, read: Sequence[Leaf], leaves: Sequence[Leaf], text: SourceText, failed: str | None = None
) -> tuple[Memory, tuple[Collective, ...] | None, Finding | None]:
    """Predict memory and communication of a step without a compiled program.

    Args:
        entry: The step, with its plan.
        read: The arguments read by the step.
        leaves: All flat inputs, by position.
        text: The user's files, for the text of lines.
        failed: Error of the compiler; None where the compiler was not called.

    Returns:
        Memory; communication with the lines that cause it; and a finding where the compiler failed, else None. Where
        the compiler decides the layout, memory has the arrays of the step alone, and communication is None.
    """
    plan, run = entry.plan, entry.plan.run
    limit = device_limit(plan.mesh.devices.flat[0]) if failed is None else None
    predicted_memory, sent = replace(memory(None, read, plan.mesh, limit), source="planned"), None
    if isinstance(run, ShardedLowering):
        peak = _peak(entry, run)
        predicted_memory = with_temporaries(predicted_memory, lambda arrays: max(peak - arrays, 0))
        sent = merge(with_plan_causes(planned_collectives(run), run.program, run, leaves, text, home_files(entry)))
    scope_text = (
        "Arrays at rest are exact, and no more is known" if sent is None else "All figures are the plan's prediction"
    )
    if failed is None:
        return predicted_memory, sent, None
    return (predicted_memory, sent, Finding("compiler-failed", "error", f"Not compiled: {failed}. {scope_text}."))


def _peak(entry: CompiledStep, run: ShardedLowering) -> int:
    """Return the peak bytes on a device."""
    closed_over = len(entry.plan.in_specs) - len(entry.shardings)
    return footprint(run, [closed_over + i for i in entry.donated]).peak


def once_per_loop(entry: CompiledStep, sum_dtype: Any) -> OncePerLoop | None:
    """Return the traffic and memory of the step with weights gathered, and gradients reduced, once per loop, by the
    plan.

    Args:
        entry: The step, with its plan.
        sum_dtype: Dtype of gradient sums.

    Returns:
        None where no loop gathers or reduces at every trip.
    """
    run = entry.plan.run
    if not isinstance(run, ShardedLowering) or not any(e.trip_count > 1 for e in run.program.equations):
        return None
    other = ShardedLowering(run.layout, run.scope_names, "once-gathered", sum_dtype)
    if not other.region(HoistedGathers).operands:
        return None
    sent, then = (
        sum(to_report_collective(move).wire_bytes for move in planned_collectives(each)) for each in (run, other)
    )
    return OncePerLoop(sent, then, _peak(entry, other) - _peak(entry, run))


def to_report_collective(move: PlannedCollective) -> Collective:
    """Return a planned collective in the form of a report."""
    n = move.group_size
    sent = wire_bytes(move.kind, n, move.count * move.bytes)
    return Collective(move.kind, move.axes, n, move.count, move.bytes, sent, apart=move.stride)


def differences(planned: "ProgramReading", compiled: "ProgramReading") -> Finding | None:
    """Return a finding on the differences between a compiled program and the plan shown before; None where they agree.

    Small differences are left out: in peak memory, up to `MEMORY_ALIKE` of the planned peak; in the bytes sent by a
    kind of collective, up to `SENT_ALIKE` of all bytes sent.
    """
    changes = []
    planned_peak, compiled_peak = (
        max((d.peak or 0 for d in each.memory.per_device), default=0) for each in (planned, compiled)
    )
    if planned_peak and compiled_peak and abs(compiled_peak - planned_peak) > MEMORY_ALIKE * planned_peak:
        changes.append(f"peak memory is {byte_text(compiled_peak)}, not {byte_text(planned_peak)}")
    if planned.collectives is not None and compiled.collectives is not None:
        before, after = _sent_by_kind(planned.collectives), _sent_by_kind(compiled.collectives)
        least = SENT_ALIKE * max(before.total(), after.total())
        changes += [
            f"{kind} sends {byte_text(after[kind])}, not {byte_text(before[kind])}"
            for kind in sorted(before | after)
            if abs(after[kind] - before[kind]) > least
        ]
    if not changes:
        return None
    return Finding("plan-differs", "info", f"Compiled, it is not all as planned: {'; '.join(changes)}.")


def _sent_by_kind(collectives: Sequence[Collective]) -> Counter[str]:
    """Return the bytes sent by a device in a step, by kind of collective."""
    sent = Counter[str]()
    for each in collectives:
        sent[each.kind] += each.wire_bytes
    return sent


def with_plan_causes(
    collectives: Iterable[PlannedCollective],
    program: Program,
    lowering: ShardedLowering,
    leaves: Sequence[Leaf],
    text: SourceText,
    home: Sequence[str],
) -> Iterator[tuple[PlannedCollective, Cause]]:
    """Yield planned collectives, each with the user's line and the array that it serves.

    Args:
        collectives: The planned collectives of `lowering`.
        program: The program emitted by `lowering`, or a program like it with other source lines.
        lowering: The program under a layout.
        leaves: The arrays named by labels, in the order of their numbers.
        text: The user's files, for the text of lines.
        home: The file with the step's definition, where known.
    """
    flow = lowering.layout.flow
    phase_of = equation_phases(program, flow)
    for sent in collectives:
        if sent.equation is None:
            yield sent, Cause()
            continue
        frames = frames_of_traceback(lowering.traceback_of(program.equations[sent.equation]))
        name = lowering.scope_names.get(sent.equation)
        if sent.value is not None:
            name = weight_label(program, flow, sent.value)
        label = parse_label(name or "")
        yield sent, cause_of(frames, phase_of[sent.equation], label, leaves, text, home)


def cause_of(
    frames: Sequence[Frame],
    phase: str,
    label: tuple[str, int] | None,
    leaves: Sequence[Leaf],
    text: SourceText,
    home: Sequence[str],
) -> Cause:
    """Return the cause of a collective.

    Args:
        frames: Call stack of the collective's equation, innermost last.
        phase: Phase of the equation.
        label: Kind of label (gradient or not) and number of the array in `leaves`; None without an array.
        leaves: The arrays named by labels, in the order of their numbers.
        text: The user's files, for the text of lines.
        home: The file with the step's definition, where known.
    """
    origin, what = locate_frames(frames, home), None
    if label is not None and label[1] < len(leaves):
        path = leaves[label[1]].path
        what = f"gradient of {path}" if label[0] == GRADIENT else path
    if (frame := origin.frame) is None:
        return Cause(phase=phase, what=what)
    return Cause(phase, frame.file, frame.line, text.line(frame), calling_line(origin), what)


def planned_traffic(
    entry: CompiledStep, pipeline: PipelineExecutor, leaves: Sequence[Leaf], text: SourceText
) -> dict[ProgramKey, ProgramTraffic]:
    """Return the planned collectives of each program of a pipeline, with the lines that cause them.

    Programs outside the stages appear as one (`OUTSIDE_STAGES`), as in the plan of the whole step on one rank.
    Assembling the results of microbatches is left out: a loss is a few numbers.

    Args:
        entry: The step, with the plan of one rank's devices.
        pipeline: Stages, compiled or not.
        leaves: All flat inputs of the step, by position.
        text: The user's files, for the text of lines.
    """
    found, home = dict[ProgramKey, ProgramTraffic](), home_files(entry)
    for key in pipeline.jobs():
        kind, number = key
        named = leaves_of(pipeline, key, leaves)
        if kind == "settle":
            found[key] = ProgramTraffic(tuple(_sums(pipeline, number, named, text, home)))
        elif kind in KINDS and (hold := pipeline.stages[number].lowering) is not None:
            program = pipeline.stages[number].program
            sent = planned_collectives(hold, _equations(program.subprogram(kind)))
            found[key] = ProgramTraffic(tuple(with_plan_causes(sent, program.joint_program, hold, named, text, home)))
    run = entry.plan.run
    if isinstance(run, ShardedLowering):
        beside = outside_gradients(run.program)
        sent = [each for each in planned_collectives(run) if each.equation in beside]
        found[OUTSIDE_STAGES] = ProgramTraffic(tuple(with_plan_causes(sent, run.program, run, leaves, text, home)))
    return found


def planned_bytes(pipeline: PipelineExecutor) -> dict[ProgramKey, int | None]:
    """Return the bytes on one device of each program without its arguments.

    Stages take the planner's memory estimate. Other programs take the bytes of their results, less those of donated
    arguments.
    """
    # A stage on a single device was given no lowering: nothing is sharded there.
    lowerings = [
        stage.lowering or ShardedLowering(pipeline.stage_layouts(s).layout(stage.program))
        for s, stage in enumerate(pipeline.stages)
    ]
    return {key: _bytes_of(pipeline, lowerings, *key) for key in pipeline.jobs()}


def _bytes_of(pipeline: PipelineExecutor, holds: Sequence[ShardedLowering], kind: str, number: int) -> int:
    avals, homes = pipeline.split.outer.program.avals, pipeline.shardings
    taken: Sequence[Value] = ()
    if kind in KINDS:
        return _bytes_of_stage(pipeline.stages[number], holds[number], kind)
    if kind == "prepare":  # the batch and the sums of gradients are counted separately
        return 0
    if kind == "settle":
        settled = pipeline.settle_jobs[number]
        made = [settled.loss.gradient_values[i] for i in settled.owned_inputs]
    elif kind == "finish":
        made = pipeline.split.losses[number].combined_results
    else:
        made, taken = pipeline.split.assignment.groups[number].outputs, pipeline.group_jobs[number][2]
    rank = pipeline.rank_of((kind, number))
    size, freed = (sum(shard_bytes(avals[v], homes.sharding(v, rank)) for v in vs) for vs in (made, taken))
    return max(0, size - freed)


def _bytes_of_stage(stage: StageJobs, hold: ShardedLowering, kind: str) -> int:
    share = stage.program.subprogram(kind)
    results = [v for v in share.results if isinstance(v, Value)]
    beside = 0
    # Gradients are added to their sums one by one, so that only the largest counts.
    if kind in "BW":
        gradients = {v for v in stage.program.gradients if isinstance(v, Value)}
        results = [v for v in results if v not in gradients]
        beside = max(
            (shard_bytes(stage.program.joint_program.avals[v], stage.sharding(v)) for v in gradients), default=0
        )
    return beside + footprint_of_part(hold, _equations(share), share.known_values, results)


def _equations(share: Subprogram) -> Collection[int]:
    wanted = {v for v in share.results if isinstance(v, Value)} - {*share.known_values}
    return required_equations(share.joint_program.top, wanted, {*share.known_values})


def _sums(
    pipeline: PipelineExecutor, number: int, leaves: Sequence[Leaf], text: SourceText, home: Sequence[str]
) -> Iterator[tuple[PlannedCollective, Cause]]:
    """Yield the sums over devices of the gradients owned by a rank, each once per step.

    `leaves` are the leaves of these gradients.
    """
    settled = pipeline.settle_jobs[number]
    for i, s, k in settled.sum_sources:
        stage = pipeline.stages[s]
        partial, value = stage.partial_sum_specs[k], stage.program.gradients[k]
        if partial is None or not isinstance(value, Value):
            continue
        whole, axes = stage.program.joint_program, partial[0]
        aval = whole.avals[value]
        size = array_bytes(stage.sharding(value).shard_shape(aval.shape), accumulation_dtype(aval.dtype))
        frames = frames_of_traceback(whole.producer[value].jaxpr_eqn.source_info.traceback)
        cause = cause_of(frames, BACKWARD, (GRADIENT, settled.owned_inputs.index(i)), leaves, text, home)
        yield (PlannedCollective("all-reduce", axes, prod(pipeline.ranks.mesh.shape[a] for a in axes), size, 1), cause)
