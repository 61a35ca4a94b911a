"""A sharded step -> its Report: what the compiled program says, and what its calls measured."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .. import hardware
from ..hardware import Chip, chip_of
from ..pipeline.executed import Pipeline
from ..report import Collective, Measured, MeshInfo, Report, Source, Spread, Timing
from ..targets import target_of
from ..wires import Wire
from .advice import by_level
from .advised import loop_of, schedule_advice, step_advice
from .divided import experts_of, positions_of
from .divided import placed as placed_lines
from .divided import with_names as divided_names
from .in_time import in_time
from .live import renamed, with_names
from .memory import peaks, usable, with_limit, with_measured
from .mesh_info import in_nodes
from .predicted import Beside
from .profiled import Profile, profiled, read_recorded
from .reading import Reading, reading_of
from .roofline import in_order, roofline, timed, timing
from .sources import SourceText, distinct_names, sources
from .texts import home_of

if TYPE_CHECKING:
    from ..step import Entry, ShardedStep
    from ..step.recorded import Recording


def summarize(step: "ShardedStep", entry: "Entry") -> Report:
    """The Report of one of the programs of `step`, or of one that is only planned: then without what was recorded of
    others."""
    reading = reading_of(entry)
    mesh, target = reading.mesh, target_of(step.mesh)
    chip, attached = _chip(step, mesh)
    collectives, roof = reading.collectives, None
    memory = with_measured(reading.memory, entry.peaks, peaks(entry.plan.mesh))
    if chip is not None and not attached:
        memory = with_limit(memory, usable(chip))
    if chip is not None and reading.staged is None:
        plan = entry.plan
        roof = roofline(chip, mesh.axes, plan.shares, reading.leaves, collectives, target, plan.batch_axes)
        # The order of a program says nothing of another chip than the one that it was compiled for.
        if reading.schedule is not None and chip_of(mesh.device_kind) == chip:
            roof, collectives = in_order(roof, reading.schedule, reading.moves) or (roof, collectives)
        collectives = None if collectives is None else timed(collectives, roof)
    times = timing(_measured(step, entry), entry.plan, roof, collectives or (), attached)
    pipeline = None
    if isinstance(entry.compiled, Pipeline) and reading.staged is not None:
        profile = _profile_of(step, entry)
        recorded = None if profile is None else profile.run
        how = {"recorded": recorded, "chip": chip, "target": target, "simulated": mesh.source == "simulated"}
        pipeline = in_time(entry, entry.compiled, reading.staged, reading.leaves, **how)
    if pipeline is not None and chip is not None:
        low, best, high = pipeline.seconds
        times = replace(
            times, on=chip.name, predicted_step_s=best, predicted_low_s=low, predicted_high_s=high
        )
    spent = _profiled(step, entry, reading, collectives, chip, attached)
    loop, experts = loop_of(step, times), experts_of(entry)
    report = Report(
        name=step.name,
        strategy=step.strategy,
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
        number=step.number,
        checkpoints=None if step.kept is None else step.kept.told,
        experts=experts,
        positions=positions_of(entry),
    )
    return _named(report, step, entry, reading.text)


def read_profile(
    recording: "Recording", entry: "Entry", all_of: Callable[[Callable[[], str]], Sequence[str]]
) -> Profile:
    """Read recorded calls of a program, together with all hosts of its mesh; see `profiled.read_recorded`."""
    reading = reading_of(entry)
    said = None if reading.staged is None else reading.staged.said
    return read_recorded(recording, entry, reading.moves, said, all_of)


def _profiled(
    step: "ShardedStep",
    entry: "Entry",
    reading: Reading,
    collectives: Sequence[Collective] | None,
    chip: Chip | None,
    attached: bool,
) -> Measured | None:
    """Where the time of recorded steps went; None where none were recorded."""
    profile = _profile_of(step, entry)
    if profile is None:
        return None
    rows, wires = tuple(collectives or ()), dict[str, Wire]()
    if chip is not None:
        wires = roofline(chip, reading.mesh.axes, None, (), (), target_of(step.mesh)).wires
    said = None if reading.staged is None else reading.staged.said
    beside = Beside(rows, chip, wires, attached)
    return profiled(profile, entry, reading.moves, said, beside)


def _profile_of(step: "ShardedStep", entry: "Entry") -> Profile | None:
    """What was recorded last; None for a plan."""
    return None if entry.compile_s is None else step.last_profile


def _chip(step: "ShardedStep", mesh: MeshInfo) -> tuple[Chip | None, bool]:
    """The chip that a prediction is for, and whether it is the one that the step runs on."""
    if (target := target_of(step.mesh)) is not None:
        return target.chip, False
    attached = chip_of(mesh.device_kind) if mesh.source == "attached" else None
    chip = attached if step.request.chip is None else hardware.chip(step.request.chip)
    return chip and in_nodes(chip, mesh), attached is not None and chip == attached


def _named(report: Report, step: "ShardedStep", entry: "Entry", text: SourceText) -> Report:
    """The report with the reader's names for files, and the text that its lines are of."""

    lines: dict[str, set[int]] = {}
    memory, collectives = report.memory, report.collectives or ()
    live = [memory.live] if memory and memory.live else []
    spent = report.measured.lines if report.measured else ()
    with_calls = (*collectives, *((memory and memory.buffers) or ()), *live, *spent)
    for part in (*with_calls, *placed_lines(report)):
        if part.file is not None and part.line is not None:
            lines.setdefault(part.file, set()).add(part.line)
    home = home_of(entry)
    calls = (part.called.rpartition(":")[0] for part in with_calls if part.called)
    names = distinct_names([*home, *lines, *calls])
    name_of = names.__getitem__
    shown = sources(lines, text, home, names)
    if step.cell is not None:
        file, typed = step.cell
        shown = tuple(_as_typed(s, typed) if s.name == names.get(file) else s for s in shown)
    return replace(
        divided_names(report, name_of),
        collectives=None
        if report.collectives is None
        else tuple(with_names(c, name_of) for c in collectives),
        memory=memory and renamed(memory, name_of),
        measured=report.measured
        and replace(report.measured, lines=tuple(with_names(s, name_of) for s in spent)),
        sources=shown,
    )


def _as_typed(source: Source, text: str) -> Source:
    """The cell as its editor shows it: what ran has its magics rewritten."""
    lines = text.splitlines()
    return replace(source, numbers=tuple(range(1, len(lines) + 1)), text=tuple(lines), note=None)


def _measured(step: "ShardedStep", entry: "Entry") -> Timing:
    """The step's loop, its times those of the calls of `entry`."""
    clock, calls = step.loops.of(entry)
    pace, others = clock.pace(), calls - clock.calls
    data = None if step.waits is None else step.waits.share
    if pace is None:
        return Timing(entry.compile_s, calls, 0, None, others=others, data_share=data)
    spread = Spread(pace.least, pace.median, pace.most)
    how = {"how": pace.how, "apart_s": pace.apart, "data_share": data}
    return Timing(entry.compile_s, calls, pace.calls, spread, others=others, **how)
