"""A sharded step -> its Report: what the compiled program says, and what its calls measured."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from .. import hardware
from ..hardware import Chip, chip_of
from ..pipeline.executed import Pipeline
from ..places import place
from ..plan import Finding
from ..program.garbage import uncollected
from ..program.phases import BACKWARD
from ..report import (
    Advice,
    Collective,
    Experts,
    Leaf,
    Measured,
    Memory,
    MeshInfo,
    Report,
    Source,
    Spread,
    Timing,
)
from ..targets import Built, slices, target_of
from ..wires import Wire
from .advice import Case, Loop, advise, by_level
from .advice.pipeline import PipelineCase, pipeline_advice
from .attribution import caused, host_calls, traced
from .buffers import live_bytes, serialized
from .collectives import Cause, Move, merge, moves
from .complaints import Complaint, complaints, findings
from .divided import experts_of, positions_of
from .divided import placed as placed_lines
from .divided import with_names as divided_names
from .exhausted import exhausted, with_needed
from .in_time import InTime, in_time
from .leaves import host_bytes, leaves
from .live import Program, renamed, with_live
from .memory import device_limit, memory, peaks, usable, with_limit, with_measured, with_temporaries
from .mesh_info import in_nodes, info_of
from .origin import Origins
from .overlap import Schedule, scheduled
from .planned import plan_alone
from .predicted import Beside
from .profiled import Profile, profiled, read_recorded
from .roofline import Roofline, in_order, roofline, timing, with_seconds
from .sources import SourceText, distinct_names, sources
from .staged import Staged, staged, staged_leaves
from .staged_costs import weights_seconds
from .staged_memory import staged_memory
from .staged_moves import said_by, staged_collectives
from .texts import Texts, home_of, inputs_of, texts_of

if TYPE_CHECKING:
    from ..step import Entry, ShardedStep
    from ..step.recorded import Recording


class Reading(NamedTuple):
    """What the compiled program says, whether it ran or not. Files have the names that Python knows them by."""

    mesh: MeshInfo
    leaves: tuple[Leaf, ...]
    memory: Memory
    collectives: tuple[Collective, ...] | None
    moves: tuple[tuple[Move, Cause], ...]
    schedule: Schedule | None
    callbacks: tuple[str | None, ...]
    complaints: tuple[Finding, ...]
    text: SourceText
    staged: Staged | None = None


_readings: "WeakKeyDictionary[Entry, Reading]" = (
    WeakKeyDictionary()
)  # reading a very large program takes seconds


def summarize(step: "ShardedStep") -> Report:
    """The Report of `step`'s last kind of call; `step` has at least one entry."""
    entry = step.entry
    assert entry is not None
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
            told = in_order(roof, reading.schedule, [move for move, _ in reading.moves])
            roof, waits = told or (roof, None)
            collectives = merge(reading.moves, waits)
        collectives = None if collectives is None else with_seconds(collectives, roof.wires)
    times = timing(_measured(step, entry), entry.plan, roof, attached)
    pipeline = None
    if isinstance(entry.compiled, Pipeline) and reading.staged is not None:
        recorded = None if step.last_profile is None else step.last_profile.run
        how = {"recorded": recorded, "chip": chip, "target": target, "simulated": mesh.source == "simulated"}
        pipeline = in_time(entry, entry.compiled, reading.staged, reading.leaves, **how)
    if pipeline is not None and chip is not None:
        low, best, high = pipeline.seconds
        times = replace(
            times, on=chip.name, predicted_step_s=best, predicted_low_s=low, predicted_high_s=high
        )
    spent = _profiled(step, entry, reading, collectives, chip, attached)
    loop, experts = _loop(step, times), experts_of(entry)
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
                *_advice(step, entry, reading, memory, collectives or (), roof, spent, loop, experts),
                *_advice_on_pipeline(step, entry, reading, pipeline, chip),
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
    return _named(report, step, reading.text)


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
    if step.last_profile is None:
        return None
    rows, wires = tuple(collectives or ()), dict[str, Wire]()
    if chip is not None:
        wires = roofline(chip, reading.mesh.axes, None, (), (), target_of(step.mesh)).wires
        rows = with_seconds(rows, wires)
    said = None if reading.staged is None else reading.staged.said
    beside = Beside(rows, chip, wires, attached)
    return profiled(step.last_profile, entry, reading.moves, said, beside)


def _advice(
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
        examples=plan.examples,
        examples_before=step.before and step.before.examples_of(plan),
        callbacks=reading.callbacks,
        target=target,
        larger=() if target is None else slices.larger(target.chip, target.extent),
        tried=step.tried,
        inside=step.request.gradients if any(work.phase == BACKWARD for work in plan.work) else None,
        largest_weight=plan.largest_weight,
        measured=spent,
        loop=loop,
        experts=experts,
    )
    for finding in (*plan.findings, *reading.complaints):
        yield Advice(finding.code, finding.level, finding.message, finding.fix)
    yield from advise(case)


def _loop(step: "ShardedStep", times: Timing) -> Loop:
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


def _advice_on_pipeline(
    step: "ShardedStep", entry: "Entry", reading: Reading, pipeline: InTime | None, chip: Chip | None
) -> list[Advice]:
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
        examples=entry.plan.examples,
        shards=staged.shards,
        crossing=staged.crossing,
        units=staged.units,
        balanced=step.request.pipeline.balance == "measured" or staged.chosen,
        transfers=() if run is None else run.transfers(),
        weights=weights or (),
    )
    return pipeline_advice(case)


def _chip(step: "ShardedStep", mesh: MeshInfo) -> tuple[Chip | None, bool]:
    """The chip that a prediction is for, and whether it is the one that the step runs on."""
    if (target := target_of(step.mesh)) is not None:
        return target.chip, False
    attached = chip_of(mesh.device_kind) if mesh.source == "attached" else None
    chip = attached if step.request.chip is None else hardware.chip(step.request.chip)
    return chip and in_nodes(chip, mesh), attached is not None and chip == attached


def reading_of(entry: "Entry") -> Reading:
    """What the compiled program of `entry` says, read once."""
    if entry not in _readings:
        _readings[entry] = read_entry(entry, texts_of(entry))
    return _readings[entry]


def read_entry(entry: "Entry", texts: Texts) -> Reading:
    """Read what the compiled program of `entry` says, whose `texts` are given."""
    if isinstance(entry.compiled, Pipeline):
        return _read_stages(entry, entry.compiled, texts)
    if isinstance(entry.compiled, Built) and entry.compiled.failed is not None:
        placed = leaves(entry.plan.leaves, entry.plan.mesh)
        held, sent, found = plan_alone(entry, entry.compiled.failed, [placed[i] for i in inputs_of(entry)])
        return Reading(info_of(entry.plan.mesh), placed, held, sent, (), None, (), (found,), SourceText())
    # XLA takes its time for the analysis but does not hold the interpreter: that goes on beside the reading.
    with uncollected(), ThreadPoolExecutor(1) as beside:
        return _read_program(entry, texts, beside.submit(entry.compiled.memory_analysis).result)


def _read_program(entry: "Entry", texts: Texts, stats_of: Callable[[], Any]) -> Reading:
    plan, compiled = entry.plan, entry.compiled
    placed = leaves(plan.leaves, plan.mesh)
    inputs = inputs_of(entry)
    parsed, sources = texts.of(compiled, inputs), SourceText()
    told, merged, schedule, calls, module, origins = (), None, None, (), None, None
    if parsed is not None:
        module, origins = parsed
        found = moves(module, plan.mesh.shape, info_of(plan.mesh).islands)
        told = caused(module, traced(module, found, origins), placed, sources)
        merged = merge(told)
        if chip_of(plan.mesh.devices.flat[0].device_kind) is not None:  # a CPU does one thing at a time
            schedule = scheduled(module, found)
        calls = host_calls(module, origins)
    first, stats, on_host = plan.mesh.devices.flat[0], stats_of(), host_bytes(entry, inputs)
    held = memory(stats, [placed[i] for i in inputs], plan.mesh, device_limit(first), on_host)
    if module is not None and origins is not None and (parts := serialized(compiled, stats)):
        live = live_bytes(*parts, module, on_host)
        if live is not None:
            held = with_live(held, live, Program(module, origins, placed, plan.mesh.size))
            if isinstance(compiled, Built):  # its own figures count the temporaries of two memories together
                held = with_temporaries(held, lambda _: live.reserved)
    refused = compiled.refused if isinstance(compiled, Built) else None
    if refused is not None and (needed := exhausted(refused)) is not None:
        held = with_needed(held, needed, compiled.stand_in)
    complaints = _complaints(entry, origins)
    return Reading(info_of(plan.mesh), placed, held, merged, told, schedule, calls, complaints, sources)


def _read_stages(entry: "Entry", pipeline: Pipeline, texts: Texts) -> Reading:
    plan, sources = entry.plan, SourceText()
    placed = staged_leaves(pipeline, plan.leaves)
    said = said_by(pipeline, placed, texts, sources)
    return Reading(
        info_of(plan.mesh),
        placed,
        staged_memory(pipeline, placed),
        staged_collectives(pipeline, said),
        (),
        None,
        tuple(dict.fromkeys(call for one in said.values() for call in one.calls)),
        _complaints(entry, None),
        sources,
        staged(pipeline, plan.leaves, said),
    )


def _complaints(entry: "Entry", origins: Origins | None) -> tuple[Finding, ...]:
    """What the compiler wrote in its log, with the lines it is of."""

    def line_of(one: Complaint) -> str | None:
        if origins is None or one.stack_frame_id is None:
            return None
        frame = origins.place(origins.frames[one.stack_frame_id]).frame
        return None if frame is None else place(frame.file, frame.line)

    return findings(complaints(entry.complaints, entry.plan.mesh.shape), line_of)


def _named(report: Report, step: "ShardedStep", text: SourceText) -> Report:
    """The report with the reader's names for files, and the text that its lines are of."""

    def rename(c: Collective) -> Collective:
        if c.file is None:
            return c
        at = c.at
        if at is not None:
            file, _, line = at.rpartition(":")
            at = f"{names[file]}:{line}"
        return replace(c, file=names[c.file], at=at)

    lines: dict[str, set[int]] = {}
    memory, collectives = report.memory, report.collectives or ()
    live = [memory.live] if memory and memory.live else []
    spent = report.measured.lines if report.measured else ()
    for part in (*collectives, *((memory and memory.buffers) or ()), *live, *spent, *placed_lines(report)):
        if part.file is not None and part.line is not None:
            lines.setdefault(part.file, set()).add(part.line)
    home = home_of(step.entry)
    deeper = (c.at.rpartition(":")[0] for c in collectives if c.at)
    names = distinct_names([*home, *lines, *deeper])
    shown = sources(lines, text, home, names)
    if step.cell is not None:
        file, typed = step.cell
        shown = tuple(_as_typed(s, typed) if s.name == names.get(file) else s for s in shown)
    return replace(
        divided_names(report, names.__getitem__),
        collectives=None if report.collectives is None else tuple(map(rename, collectives)),
        memory=memory and renamed(memory, names.__getitem__),
        measured=report.measured and _with_names(report.measured, names),
        sources=shown,
    )


def _with_names(measured: Measured, names: Mapping[str, str]) -> Measured:
    lines = (row if row.file is None else replace(row, file=names[row.file]) for row in measured.lines)
    return replace(measured, lines=tuple(lines))


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
