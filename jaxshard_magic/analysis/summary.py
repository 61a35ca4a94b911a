"""Report of a sharded step, from its compiled program and the measurements of its calls."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from .. import hardware
from ..compilation.compiled_step import CompiledStep
from ..hardware import Chip, chip_of
from ..links import AxisLink
from ..pipeline.executor import PipelineExecutor
from ..report import Collective, Measured, MeshInfo, Report, SourceExcerpt, TimeSpread, Timing
from ..targets import target_of
from ..targets.device_memory import peak_bytes, usable_chip_bytes
from .advice import by_level
from .experts_and_positions import experts_of, positions_of
from .experts_and_positions import parts_with_lines as placed_lines
from .experts_and_positions import with_names as divided_names
from .memory import with_limit, with_measured
from .memory_timeline import rename_files, with_file_names
from .mesh_info import with_node_size
from .pipeline_timing import time_pipeline
from .predicted_times import PredictionInputs
from .profile_analysis import Profile, Recording, profile_breakdown, read_recording
from .program_texts import home_files
from .report_advice import loop_facts, schedule_advice, step_advice
from .roofline import roofline, timing, with_schedule, with_times
from .sources import SourceText, distinct_names, sources
from .step_facts import StepFacts, step_facts
from .step_run import StepRun


def summarize(step: StepRun, entry: CompiledStep) -> Report:
    """Return the report of one program of a step.

    Args:
        step: The step, with the measurements of its calls.
        entry: The program.
    """
    reading = step_facts(entry)
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
    loop, experts = loop_facts(step, times), experts_of(entry)
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
                *step_advice(step, entry, reading, memory, collectives or (), roof, spent, loop, experts),
                *schedule_advice(step, entry, reading, pipeline, chip),
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
        positions=positions_of(entry),
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
    reading = step_facts(entry)
    said = None if reading.pipeline_facts is None else reading.pipeline_facts.traffic
    return read_recording(recording, entry, reading.hlo_collectives, said, all_of)


def _time_breakdown(
    step: StepRun,
    entry: CompiledStep,
    reading: StepFacts,
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
    for part in (*with_calls, *placed_lines(report)):
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
        divided_names(report, name_of),
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
