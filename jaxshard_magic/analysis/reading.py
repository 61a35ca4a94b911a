"""The compiled program of a step read: memory, collectives with their lines, and what the compiler complained of."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from ..hardware import chip_of
from ..pipeline.executed import Pipeline
from ..plan import Finding
from ..program.garbage import uncollected
from ..report import Collective, Leaf, Memory, MeshInfo
from ..targets import Built
from .attribution import caused, host_calls, traced
from .buffers import live_bytes, serialized
from .collectives import Cause, Move, merge, moves
from .complaints import Complaint, complaints, findings
from .exhausted import exhausted, with_needed
from .leaves import host_bytes, leaves
from .live import Program, with_live
from .memory import device_limit, memory, with_temporaries
from .mesh_info import info_of
from .origin import Origins, in_words
from .overlap import Schedule, scheduled
from .planned import plan_alone
from .sources import SourceText
from .staged import Staged, staged, staged_leaves
from .staged_memory import compiled_bytes, staged_memory
from .staged_moves import said_by, staged_collectives
from .staged_plan import bytes_by_plan, said_by_plan
from .texts import Texts, inputs_of, texts_of

if TYPE_CHECKING:
    from ..step import Entry


class Reading(NamedTuple):
    """What the compiled program says, or the plan where there is none; files by the names that Python knows."""

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


def reading_of(entry: "Entry") -> Reading:
    """What the compiled program of `entry` says, read once."""
    if entry not in _readings:
        _readings[entry] = read_entry(entry, texts_of(entry))
    return _readings[entry]


def read_entry(entry: "Entry", texts: Texts) -> Reading:
    """Read what the compiled program of `entry` says, whose `texts` are given."""
    if isinstance(entry.compiled, Pipeline):
        return _read_stages(entry, entry.compiled, texts)
    failed = entry.compiled.failed if isinstance(entry.compiled, Built) else None
    if entry.compiled is None or failed is not None:
        placed, text = leaves(entry.plan.leaves, entry.plan.mesh), SourceText()
        held, sent, found = plan_alone(entry, [placed[i] for i in inputs_of(entry)], placed, text, failed)
        said = () if found is None else (found,)
        return Reading(info_of(entry.plan.mesh), placed, held, sent, (), None, (), said, text)
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
    if entry.compile_s is None:
        said, own, source = said_by_plan(entry, pipeline, placed, sources), bytes_by_plan(pipeline), "planned"
    else:
        said, own, source = said_by(pipeline, placed, texts, sources), compiled_bytes(pipeline), "compiled"
    return Reading(
        info_of(plan.mesh),
        placed,
        staged_memory(pipeline, placed, own, source),
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
        return in_words(origins.place(origins.frames[one.stack_frame_id]))

    return findings(complaints(entry.complaints, entry.plan.mesh.shape), line_of)
