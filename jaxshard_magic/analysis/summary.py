"""A sharded step -> its Report: what the compiled program says, and what its calls measured."""

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from jax.sharding import Mesh

from .. import hardware
from ..hardware import Chip, chip_of
from ..pipeline.executed import Pipeline
from ..pipeline.record import Run
from ..plan import Finding
from ..program.phases import BACKWARD
from ..report import Advice, Collective, Leaf, Memory, MeshInfo, Report, Source, Spread, Timing
from ..report import Pipeline as PipelineReport
from ..schedule import Costs, simulate
from ..targets import Built, Target, slices, target_of
from .advice import Case, advise, by_level
from .advice.pipeline import pipeline_advice
from .attribution import attributed, host_calls
from .buffers import live_bytes, serialized
from .collectives import Move, moves
from .complaints import Complaint, complaints, findings
from .exhausted import exhausted, with_needed
from .garbage import uncollected
from .hlo import read
from .leaves import leaves
from .live import renamed, with_live
from .memory import device_limit, memory, peaks, usable, with_limit, with_measured, with_temporaries
from .mesh_info import mesh_info
from .origin import Origins
from .pipelined import measured, predicted
from .roofline import Roofline, roofline, timing, with_seconds
from .sources import SourceText, distinct_names, plain_name, sources
from .staged import Staged, staged, staged_leaves
from .staged_costs import around_seconds, flops_costs, roofline_costs, update_seconds
from .staged_memory import staged_memory
from .staged_moves import said_by, staged_collectives

if TYPE_CHECKING:
    from ..step import Entry, ShardedStep


class Facts(NamedTuple):
    """What the compiled program says, whether it ran or not. Files have the names that Python knows them by."""

    mesh: MeshInfo
    leaves: tuple[Leaf, ...]
    memory: Memory
    collectives: tuple[Collective, ...] | None
    moves: tuple[Move, ...]
    callbacks: tuple[str | None, ...]
    complaints: tuple[Finding, ...]
    text: SourceText
    staged: Staged | None = None


_known: "WeakKeyDictionary[Entry, Facts]" = WeakKeyDictionary()  # reading a very large program takes seconds
_timed: "WeakKeyDictionary[Entry, tuple[Run | Costs | None, PipelineReport]]" = WeakKeyDictionary()


def summarize(step: "ShardedStep") -> Report:
    """The Report of `step`'s last kind of call; `step` has at least one entry."""
    entry = step.entry
    assert entry is not None
    found = facts_of(entry)
    chip, attached = _chip(step, found.mesh)
    timed = Timing(entry.compile_s, entry.calls, len(entry.timings), _spread(entry.timings))
    rows, roof, memory = (
        found.collectives,
        None,
        with_measured(found.memory, entry.peaks, peaks(entry.plan.mesh)),
    )
    if chip is not None and not attached:
        memory = with_limit(memory, usable(chip))
    if chip is not None and found.staged is None:
        roof = roofline(chip, found.mesh.axes, entry.plan.shares, found.leaves, rows, target_of(step.mesh))
        rows = None if rows is None else with_seconds(rows, roof.wires)
    told = timing(timed, entry.plan, roof, attached)
    piped, predicted_s = _piped(entry, found, chip, target_of(step.mesh))
    report = Report(
        name=step.name,
        strategy=step.strategy,
        options=step.request.options,
        mesh=found.mesh,
        leaves=found.leaves,
        memory=memory,
        collectives=rows,
        timing=_of_pipeline(told, chip, predicted_s) if found.staged else told,
        advice=by_level(
            (
                *_advice(step, entry, found, memory, rows or (), roof),
                *_advice_on_pipeline(step, entry, found, piped),
            )
        ),
        alternatives=step.alternatives,
        pipeline=piped,
        check=step.checked,
    )
    return _named(report, step, found.text)


def _advice(
    step: "ShardedStep",
    entry: "Entry",
    found: Facts,
    memory: Memory,
    rows: Sequence[Collective],
    roof: Roofline | None,
) -> tuple[Advice, ...]:
    plan, placed, target = entry.plan, found.leaves, target_of(step.mesh)
    case = Case(
        leaves=placed,
        mesh=found.mesh,
        strategy=plan.strategy,
        jobs=plan.jobs,
        idle_axes=plan.idle_axes,
        given={leaf.path for leaf in plan.leaves if leaf.why.startswith(("given ", "rule ", "follows "))},
        kept=[] if entry.donated else [placed[i] for i in set(plan.state_pairs.values())],
        moves=found.moves,
        collectives=rows,
        memory=memory,
        roof=roof,
        shares=plan.shares or (),
        examples=plan.examples,
        examples_before=step.examples_before,
        callbacks=found.callbacks,
        target=target,
        larger=() if target is None else slices.larger(target.chip, target.extent),
        tried=step.tried,
        inside=step.request.gradients if any(work.phase == BACKWARD for work in plan.work) else None,
    )
    found_before = (Advice(f.code, f.level, f.message, f.fix) for f in (*plan.findings, *found.complaints))
    return by_level((*found_before, *advise(case)))


def _piped(
    entry: "Entry", found: Facts, chip: Chip | None, target: Target | None
) -> tuple[PipelineReport | None, float | None]:
    """The pipeline in time, as it was measured, or as its programs are predicted to run on `chip`, or by their
    FLOPs alone; and the seconds that a step is predicted to take there. None for a step that is no pipeline."""
    pipeline, of = entry.compiled, found.staged
    if not isinstance(pipeline, Pipeline) or of is None:
        return None, None
    costs = None if chip is None else roofline_costs(pipeline, chip, target, of.said)
    seconds = None
    if chip is not None and costs is not None:
        update = update_seconds(pipeline, chip, found.leaves)
        around = around_seconds(pipeline, chip, target, of.said)
        makespan = simulate(pipeline.split.schedule, costs).makespan
        seconds = None if around is None else makespan + update + around
    run = pipeline.typical
    key = run if run is not None else costs
    if entry not in _timed or _timed[entry][0] != key:
        held = {"holds": of.holds, "devices": of.devices, "activation_bytes": of.activation_bytes}
        if run is not None:
            _timed[entry] = key, measured(run, **held, split=of.split, alike=of.alike)
        else:
            unit = "" if costs is None else "s"
            _timed[entry] = (
                key,
                predicted(pipeline.split.schedule, costs or flops_costs(pipeline), **held, unit=unit),
            )
    return _timed[entry][1], seconds


def _of_pipeline(told: Timing, chip: Chip | None, seconds: float | None) -> Timing:
    return told if chip is None else replace(told, on=chip.name, predicted_step_s=seconds)


def _advice_on_pipeline(
    step: "ShardedStep", entry: "Entry", found: Facts, piped: PipelineReport | None
) -> list[Advice]:
    pipeline, of = entry.compiled, found.staged
    if piped is None or of is None or step.request.pipeline is None or not piped.unit:
        return []
    return pipeline_advice(
        piped,
        examples=entry.plan.examples,
        shards=of.shards,
        crossing=of.crossing,
        units=of.units,
        balanced=step.request.pipeline.balance == "measured" or pipeline.split.loss.chosen,
        transfers=() if pipeline.typical is None else pipeline.typical.transfers(),
    )


def _chip(step: "ShardedStep", mesh: MeshInfo) -> tuple[Chip | None, bool]:
    """The chip that a prediction is for, and whether it is the one that the step runs on."""
    if (target := target_of(step.mesh)) is not None:
        return target.chip, False
    here = chip_of(mesh.device_kind) if mesh.source == "attached" else None
    if step.request.chip is None:
        return here, here is not None
    return hardware.chip(step.request.chip), here is not None and hardware.chip(step.request.chip) == here


def _source(mesh: Mesh) -> str:
    if target_of(mesh) is not None:
        return "topology"
    return "simulated" if mesh.devices.flat[0].platform == "cpu" else "attached"


def facts_of(entry: "Entry") -> Facts:
    """What the compiled program of `entry` says, read once."""
    if entry not in _known:
        _known[entry] = facts(entry)
    return _known[entry]


def facts(entry: "Entry") -> Facts:
    """Read a compiled step."""
    if isinstance(entry.compiled, Pipeline):
        return _facts_of_stages(entry, entry.compiled)
    # XLA takes its time for the analysis but does not hold the interpreter: that goes on beside the reading.
    with uncollected(), ThreadPoolExecutor(1) as beside:
        return _facts(entry, beside.submit(entry.compiled.memory_analysis).result)


def _facts(entry: "Entry", stats_of: Callable[[], Any]) -> Facts:
    plan, compiled = entry.plan, entry.compiled
    device = plan.mesh.devices.flat[0]
    mesh = mesh_info(plan.mesh, _source(plan.mesh))
    placed = leaves(plan.leaves, plan.mesh)
    inputs = [i for i, is_read in zip(entry.order, entry.reads, strict=True) if is_read]
    text, own = compiled.as_text(), SourceText()
    found, rows, calls, module, origins = (), None, (), None, None
    if text:
        module = read(text)
        found = moves(module, plan.mesh.shape)
        origins = Origins(module, [entry.home] if entry.home else [], inputs)
        rows = attributed(module, found, origins, placed, own)
        calls = host_calls(module, origins)
    stats = stats_of()
    held = memory(stats, [placed[i] for i in inputs], plan.mesh, device_limit(device))
    if module is not None and origins is not None and (parts := serialized(compiled, stats)):
        live = live_bytes(*parts, module)
        if live is not None:
            held = with_live(held, live, module, origins, placed)
            held = with_temporaries(held, live.reserved) if isinstance(compiled, Built) else held
    refused = compiled.refused if isinstance(compiled, Built) else None
    if refused is not None and (said := exhausted(refused)) is not None:
        held = with_needed(held, said, compiled.stand_in)
    return Facts(mesh, placed, held, rows, found, calls, _complaints(entry, origins), own)


def _facts_of_stages(entry: "Entry", pipeline: Pipeline) -> Facts:
    plan, text = entry.plan, SourceText()
    placed = staged_leaves(pipeline, plan.leaves)
    said = said_by(pipeline, placed, [entry.home] if entry.home else [], text)
    return Facts(
        mesh_info(plan.mesh, _source(plan.mesh)),
        placed,
        staged_memory(pipeline, placed),
        staged_collectives(pipeline, said),
        (),
        tuple(dict.fromkeys(call for one in said.values() for call in one.calls)),
        _complaints(entry, None),
        text,
        staged(pipeline, plan.leaves, said),
    )


def _complaints(entry: "Entry", origins: Origins | None) -> tuple[Finding, ...]:
    """What the compiler wrote in its log, with the lines it is of."""

    def line_of(one: Complaint) -> str | None:
        if origins is None or one.stack_frame_id is None:
            return None
        frame = origins.place(origins.frames[one.stack_frame_id]).frame
        return None if frame is None else f"line {frame.line}"

    return findings(complaints(entry.complaints, entry.plan.mesh.shape), line_of)


def _named(report: Report, step: "ShardedStep", text: SourceText) -> Report:
    """The report with the reader's names for files, and the text that its lines are of."""

    def rename(c: Collective) -> Collective:
        if c.file is None:
            return c
        at = c.at and _renamed_place(c.at, name_of)
        return replace(c, file=name_of(c.file), at=at)

    lines: dict[str, set[int]] = {}
    memory = report.memory
    live = [memory.live] if memory and memory.live else []
    for part in (*(report.collectives or ()), *((memory and memory.buffers) or ()), *live):
        if part.file is not None and part.line is not None:
            lines.setdefault(part.file, set()).add(part.line)
    entry = step.entry
    home = [entry.home] if entry is not None and entry.home else []
    deeper = (c.at.rpartition(":")[0] for c in report.collectives or () if c.at)
    names = distinct_names([*home, *lines, *deeper], lambda file: step.name_of(file) or plain_name(file))
    name_of = names.__getitem__
    found = sources(lines, text, home, name_of)
    if step.cell is not None:
        found = tuple(_as_typed(s, step.cell[1]) if s.name == names.get(step.cell[0]) else s for s in found)
    return replace(
        report,
        collectives=None if report.collectives is None else tuple(map(rename, report.collectives)),
        memory=memory and renamed(memory, name_of),
        sources=found,
    )


def _as_typed(source: Source, text: str) -> Source:
    """The cell as its editor shows it: what ran has its magics rewritten."""
    lines = text.splitlines()
    return replace(source, numbers=tuple(range(1, len(lines) + 1)), text=tuple(lines), note=None)


def _renamed_place(place: str, name_of: Callable[[str], str]) -> str:
    file, _, line = place.rpartition(":")
    return f"{name_of(file)}:{line}"


def _spread(seconds: Sequence[float]) -> Spread | None:
    return Spread(min(seconds), statistics.median(seconds), max(seconds)) if seconds else None
