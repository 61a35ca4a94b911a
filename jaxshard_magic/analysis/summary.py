"""Report of a sharded step, from its compiled program and the measurements of its calls.

`StepRun` is a step and its calls, as far as a report tells of them beside the compiled program. `summarize` reads both,
collects the advice, and adds the experts and sequence positions that the plan shards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from weakref import WeakKeyDictionary

from jax.sharding import Mesh

from .. import hardware
from ..compilation.compiled_step import CompiledStep
from ..compilation.expert_rows import ExpertRowCounts
from ..compilation.loop_clock import LoopClock
from ..compilation.planned_call import PlannedCall
from ..compilation.recompilation import Recompilation
from ..config.request import Request, apply_line
from ..errors import ShardError
from ..hardware import Chip, chip_of
from ..links import AxisLink
from ..pipeline.executor import PipelineExecutor
from ..plan import DividedExperts, DividedPositions
from ..program.flatten_call import FlatCall
from ..program.phases import BACKWARD
from ..program.routing import RoutedLayer
from ..report import (
    Advice,
    Alternative,
    Check,
    Checkpoints,
    Collective,
    EarlyEnd,
    ExpertLoad,
    Experts,
    Measured,
    Memory,
    MeshInfo,
    Metrics,
    Positions,
    Report,
    Ring,
    SourceExcerpt,
    TimeSpread,
    Timing,
)
from ..targets import mesh_prefix, slices, target_of
from ..targets.device_memory import peak_bytes, usable_chip_bytes
from .advice import Case, TrainingLoop, advise, by_level
from .advice.pipeline import PipelineCase, pipeline_advice
from .memory import with_limit, with_measured
from .memory_timeline import rename_files, with_file_names
from .mesh_info import with_node_size
from .pipeline_timing import PipelineTiming, time_pipeline, weight_traffic_seconds
from .plan_prediction import differences, once_per_loop
from .predicted_times import PredictionInputs
from .profile_analysis import Profile, Recording, profile_breakdown, read_recording
from .program_reading import ProgramReading, program_reading
from .program_texts import home_files
from .roofline import Roofline, roofline, timing, with_schedule, with_times
from .sources import SourceText, distinct_names, sources


@dataclass(frozen=True)
class StepRun:
    """A sharded step at the time of a report, with the measurements of its calls.

    Attributes:
        name: Name of the step.
        request: Strategy, mesh and options.
        plan_call: Plans a call under another request; raises ShardError for an impossible one.
        clock: Times of the reported program's calls in the loop.
        calls: Number of calls in the loop, of all programs together.
        profile: Recorded calls of the reported program; None without a recording.
        metrics: Metrics of the loop; None for calls that nobody followed.
        loss: Name of the loss among the metrics; None without one.
        idle_samples: Samples without a working device, by file and line of the loop.
        recompilations: Compiles in the middle of loops.
        data_share: Share of the time spent waiting for batches of a feed; None without a feed.
        previous_examples: Batch size of an earlier run of the same step; None without one.
        checkpoints: Cost of saving the loop's state; None if nothing was saved.
        checked: Comparison with the plain step; None without one.
        alternatives: The step with other options, as compiled.
        bytes_with_fix: Bytes on a device by suggested fix, as compiled.
        ended: Premature end of the cell; None after a regular end.
        report_number: Number of the report in its notebook.
        cell: Notebook cell of the step: its file name for Python, its text; None outside of a notebook.
    """

    name: str
    request: Request
    plan_call: Callable[[FlatCall, Request], PlannedCall]
    clock: LoopClock
    calls: int
    profile: Profile | None = None
    metrics: Metrics | None = None
    loss: str | None = None
    idle_samples: Mapping[tuple[str, int], int] = field(default_factory=dict)
    recompilations: Sequence[Recompilation] = ()
    data_share: float | None = None
    previous_examples: int | None = None
    checkpoints: Checkpoints | None = None
    checked: Check | None = None
    alternatives: tuple[Alternative, ...] = ()
    bytes_with_fix: Mapping[str, int] = field(default_factory=dict)
    ended: EarlyEnd | None = None
    report_number: int | None = None
    cell: tuple[str, str] | None = None

    @property
    def mesh(self) -> Mesh:
        """Mesh of the step."""
        return self.request.mesh


def summarize(step: StepRun, entry: CompiledStep) -> Report:
    """Return the report of one program of a step.

    Args:
        step: The step, with the measurements of its calls.
        entry: The program.
    """
    reading = program_reading(entry)
    mesh, target = reading.mesh, target_of(step.mesh)
    chip, attached = _chip(step, mesh)
    collectives, roof = reading.collectives, None
    memory = with_measured(reading.memory, entry.initial_peak_bytes, peak_bytes(entry.plan.mesh))
    # Devices that stand in for the chip don't know its memory.
    if chip is not None and not attached:
        memory = with_limit(memory, usable_chip_bytes(chip))
    if chip is not None and reading.pipeline_facts is None:
        plan = entry.plan
        roof = roofline(chip, mesh.axes, plan.shares, reading.leaves, collectives, target, plan.batch_axes)
        # The instruction order holds only for the chip that the program was compiled for.
        if reading.schedule is not None and chip_of(mesh.device_kind) == chip:
            roof, collectives = with_schedule(roof, reading.schedule, reading.hlo_collectives) or (roof, collectives)
        collectives = None if collectives is None else with_times(collectives, roof)
    times = timing(_loop_timing(step, entry), entry.plan, roof, collectives or (), attached)
    pipeline = None
    if isinstance(entry.compiled, PipelineExecutor) and reading.pipeline_facts is not None:
        recorded = None if step.profile is None else step.profile.run
        how = {"recorded": recorded, "chip": chip, "target": target, "simulated": mesh.source == "simulated"}
        pipeline = time_pipeline(entry, entry.compiled, reading.pipeline_facts, reading.leaves, **how)
    if pipeline is not None and chip is not None:
        low, best, high = pipeline.seconds
        times = replace(times, on=chip.name, predicted_step_s=best, predicted_low_s=low, predicted_high_s=high)
    spent = _time_breakdown(step, entry, reading, collectives, chip, attached)
    loop, experts = _loop_facts(step, times), _experts_of(entry)
    report = Report(
        name=step.name,
        strategy=step.request.strategy,
        options=step.request.options,
        mesh=mesh,
        leaves=reading.leaves,
        memory=memory,
        collectives=collectives,
        timing=times,
        advice=by_level(
            (
                *_step_advice(step, entry, reading, memory, collectives or (), roof, spent, loop, experts),
                *_schedule_advice(step, entry, reading, pipeline, chip),
            )
        ),
        alternatives=step.alternatives,
        pipeline=pipeline and pipeline.shown,
        check=step.checked,
        measured=spent,
        ended=step.ended,
        metrics=loop.metrics,
        number=step.report_number,
        checkpoints=step.checkpoints,
        experts=experts,
        positions=_positions_of(entry),
    )
    return _named(report, step, entry, reading.text)


def read_profile(
    recording: Recording, entry: CompiledStep, all_of: Callable[[Callable[[], str]], Sequence[str]]
) -> Profile:
    """Read the recorded calls of a program. Collective: all hosts of the mesh call this function together.

    Args:
        recording: Recorded calls of `entry`.
        entry: The program.
        all_of: Runs a function for this host's text, and returns the texts of all hosts.
    """
    reading = program_reading(entry)
    said = None if reading.pipeline_facts is None else reading.pipeline_facts.traffic
    return read_recording(recording, entry, reading.hlo_collectives, said, all_of)


def _time_breakdown(
    step: StepRun,
    entry: CompiledStep,
    reading: ProgramReading,
    collectives: Sequence[Collective] | None,
    chip: Chip | None,
    attached: bool,
) -> Measured | None:
    """Return the time breakdown of recorded steps; None without a recording."""
    if step.profile is None:
        return None
    rows, wires = tuple(collectives or ()), dict[str, AxisLink]()
    if chip is not None:
        wires = roofline(chip, reading.mesh.axes, None, (), (), target_of(step.mesh)).wires
    said = None if reading.pipeline_facts is None else reading.pipeline_facts.traffic
    beside = PredictionInputs(rows, chip, wires, attached)
    return profile_breakdown(step.profile, entry, reading.hlo_collectives, said, beside)


def _chip(step: StepRun, mesh: MeshInfo) -> tuple[Chip | None, bool]:
    """Return the chip of the prediction, and whether the step runs on that chip."""
    if (target := target_of(step.mesh)) is not None:
        return target.chip, False
    attached = chip_of(mesh.device_kind) if mesh.source == "attached" else None
    chip = attached if step.request.chip is None else hardware.chip(step.request.chip)
    return chip and with_node_size(chip, mesh), attached is not None and chip == attached


def _named(report: Report, step: StepRun, entry: CompiledStep, text: SourceText) -> Report:
    """Return the report with the reader's names of files, and with the source text of its lines."""
    lines: dict[str, set[int]] = {}
    memory, collectives = report.memory, report.collectives or ()
    live = [memory.live] if memory and memory.live else []
    spent = report.measured.lines if report.measured else ()
    with_calls = (*collectives, *((memory and memory.buffers) or ()), *live, *spent)
    for part in (*with_calls, *_parts_with_lines(report)):
        if part.file is not None and part.line is not None:
            lines.setdefault(part.file, set()).add(part.line)
    home = home_files(entry)
    calls = (part.called.rpartition(":")[0] for part in with_calls if part.called)
    names = distinct_names([*home, *lines, *calls])
    name_of = names.__getitem__
    shown = sources(lines, text, home, names)
    if step.cell is not None:
        file, typed = step.cell
        shown = tuple(_as_typed(s, typed) if s.name == names.get(file) else s for s in shown)
    return replace(
        _with_names(report, name_of),
        collectives=None if report.collectives is None else tuple(with_file_names(c, name_of) for c in collectives),
        memory=memory and rename_files(memory, name_of),
        measured=report.measured and replace(report.measured, lines=tuple(with_file_names(s, name_of) for s in spent)),
        sources=shown,
    )


def _as_typed(source: SourceExcerpt, text: str) -> SourceExcerpt:
    """Return the source of a cell as shown in the editor: the executed text has its magics rewritten."""
    lines = text.splitlines()
    return replace(source, numbers=tuple(range(1, len(lines) + 1)), text=tuple(lines), note=None)


def _loop_timing(step: StepRun, entry: CompiledStep) -> Timing:
    """Return the times of the step's loop, from the calls of `entry`."""
    calls, pace, data = step.calls, step.clock.step_time(), step.data_share
    others = calls - step.clock.calls
    if pace is None:
        return Timing(entry.compile_s, calls, 0, None, others=others, data_share=data)
    spread = TimeSpread(pace.shortest, pace.median, pace.longest)
    how = {"how": pace.method, "apart_s": pace.call_interval, "data_share": data}
    return Timing(entry.compile_s, calls, pace.calls, spread, others=others, **how)


def _experts_of(entry: CompiledStep) -> tuple[Experts, ...]:
    """Return the sharded experts of a compiled program; files carry the names used by Python."""
    counted, real = entry.expert_rows or {}, entry.example_mask
    # Rows that pad the batch have no tokens to count.
    share = Fraction(1) if real is None else Fraction(int(real.sum()), real.size)

    def told(one: DividedExperts) -> Experts:
        loads = (load for route in one.layers for load in _loads(route, share, counted.get(route)))
        return Experts(one.expert_count, one.axes, one.work, tuple(loads))

    return tuple(map(told, entry.plan.experts))


def _loads(route: RoutedLayer, share: Fraction, counted: ExpertRowCounts | None) -> Iterator[ExpertLoad]:
    mask, (tokens, groups) = route.mask, route.real_counts(share)
    load = ExpertLoad(
        tokens,
        route.experts_per_token,
        None if mask is None else mask.capacity * groups,
        groups,
        file=route.file,
        line=route.line,
    )
    for layer in range(route.layer_count):
        if counted is None:
            yield load
            continue
        kept = None if counted.within_capacity is None else tuple(counted.within_capacity[layer].tolist())
        chosen, most = tuple(counted.chosen[layer].tolist()), int(counted.max_per_group[layer].max())
        yield replace(load, chosen=chosen, kept=kept, most=None if mask is None else most)


def _positions_of(entry: CompiledStep) -> tuple[Positions, ...]:
    """Return the sharded sequence positions of a compiled program; files carry the names used by Python."""
    attention = entry.plan.attention
    if attention is None:
        return ()

    def told(one: DividedPositions) -> Positions:
        rings = (Ring(r.turns, r.count, r.bytes, r.gradients, r.zigzag, r.file, r.line) for r in one.rings)
        return Positions(one.position_count, one.axes, attention, tuple(rings))

    return tuple(map(told, entry.plan.positions))


def _parts_with_lines(report: Report) -> Iterator[ExpertLoad | Ring]:
    """Yield the parts of a report with a source line: layers of experts, and rings."""
    yield from (load for experts in report.experts for load in experts.layers)
    yield from (ring for positions in report.positions for ring in positions.rings)


def _with_names(report: Report, name: Callable[[str], str]) -> Report:
    """Return the report with the files of expert layers and rings renamed for the reader.

    Args:
        report: Report with the file names used by Python.
        name: Maps a file to the name shown to the reader.
    """

    def named(part):
        return part if part.file is None else replace(part, file=name(part.file))

    experts = (replace(one, layers=tuple(map(named, one.layers))) for one in report.experts)
    positions = (replace(one, rings=tuple(map(named, one.rings))) for one in report.positions)
    return replace(report, experts=tuple(experts), positions=tuple(positions))


def _step_advice(
    step: StepRun,
    entry: CompiledStep,
    reading: ProgramReading,
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
    planning_difference = None if entry.early_plan is None else differences(program_reading(entry.early_plan), reading)
    for finding in (*plan.findings, *reading.complaints, *filter(None, [planning_difference])):
        yield Advice(finding.code, finding.level, finding.message, case.usable_fix(finding.fix))
    yield from advise(case)


_refusals: "WeakKeyDictionary[CompiledStep, dict[str, str | None]]" = WeakKeyDictionary()


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


def _loop_facts(step: StepRun, times: Timing) -> TrainingLoop:
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


def _schedule_advice(
    step: StepRun, entry: CompiledStep, reading: ProgramReading, pipeline: PipelineTiming | None, chip: Chip | None
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
