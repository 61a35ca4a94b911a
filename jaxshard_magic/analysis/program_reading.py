"""Reading of a step's compiled program: memory, collectives with source lines, and compiler messages.

Without a program the plan is read.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..compilation.compiled_step import CompiledStep
from ..hardware import chip_of
from ..pipeline.executor import PipelineExecutor
from ..plan import Finding
from ..program.gc_pause import gc_paused
from ..report import Collective, Leaf, Memory, MeshInfo
from ..targets import CompileResult
from ..targets.device_memory import device_limit
from .buffers import live_bytes, serialized_assignment
from .collectives import Cause, HloCollective, merge, module_collectives
from .compiler_diagnostics import Diagnostic, findings, parse_messages
from .leaves import host_bytes, leaves
from .memory import memory, parse_required_bytes, with_needed, with_temporaries
from .memory_timeline import TimelineProgram, with_timeline
from .mesh_info import detect_mesh_info
from .origin import HloOrigins, describe_origin, host_calls, with_causes, with_origins
from .overlap import CollectiveSchedule, read_schedule
from .pipeline_facts import PipelineFacts, pipeline_leaves, read_pipeline_facts
from .pipeline_memory import compiled_bytes, pipeline_memory
from .pipeline_traffic import compiled_traffic, pipeline_collectives
from .plan_prediction import planned_bytes, planned_traffic, predict_from_plan
from .program_texts import ProgramTexts, program_texts, read_inputs
from .sources import SourceText


class ProgramReading(NamedTuple):
    """Facts about a compiled program, or about the plan where nothing is compiled. Files have Python's names.

    Attributes:
        mesh: The mesh.
        leaves: All flat inputs, by position.
        memory: Bytes on each device.
        collectives: Collectives as rows of a report; None where unknown.
        hlo_collectives: The collectives one by one, with their causes.
        schedule: Order of the compiled program; None without a known chip or a compiled program.
        callbacks: Lines of calls to Python from inside the step, None for a call without a line.
        complaints: Findings from the compiler's log, or from the plan.
        text: The user's files.
        pipeline_facts: Facts about the stages of a pipeline; else None.
    """

    mesh: MeshInfo
    leaves: tuple[Leaf, ...]
    memory: Memory
    collectives: tuple[Collective, ...] | None
    hlo_collectives: tuple[tuple[HloCollective, Cause], ...]
    schedule: CollectiveSchedule | None
    callbacks: tuple[str | None, ...]
    complaints: tuple[Finding, ...]
    text: SourceText
    pipeline_facts: PipelineFacts | None = None


# Reading a very large program takes seconds.
_readings: "WeakKeyDictionary[CompiledStep, ProgramReading]" = WeakKeyDictionary()


def program_reading(entry: CompiledStep) -> ProgramReading:
    """Return the facts about `entry`, read once. Cost: seconds for a very large program."""
    if entry not in _readings:
        _readings[entry] = read_program(entry, program_texts(entry))
    return _readings[entry]


def read_program(entry: CompiledStep, texts: ProgramTexts) -> ProgramReading:
    """Read the facts about `entry`.

    Args:
        entry: A compiled or planned program of a step.
        texts: The texts of its programs.
    """
    if isinstance(entry.compiled, PipelineExecutor):
        return _read_stages(entry, entry.compiled, texts)
    failed = entry.compiled.failed if isinstance(entry.compiled, CompileResult) else None
    if entry.compiled is None or failed is not None:
        placed, text = leaves(entry.plan.leaves, entry.plan.mesh), SourceText()
        held, sent, found = predict_from_plan(entry, [placed[i] for i in read_inputs(entry)], placed, text, failed)
        said = () if found is None else (found,)
        return ProgramReading(detect_mesh_info(entry.plan.mesh), placed, held, sent, (), None, (), said, text)
    # XLA's memory analysis is slow and releases the interpreter lock: it runs while the program is read.
    with gc_paused(), ThreadPoolExecutor(1) as beside:
        return _read_compiled(entry, texts, beside.submit(entry.compiled.memory_analysis).result)


def _read_compiled(entry: CompiledStep, texts: ProgramTexts, stats_of: Callable[[], Any]) -> ProgramReading:
    plan, compiled = entry.plan, entry.compiled
    placed = leaves(plan.leaves, plan.mesh)
    inputs = read_inputs(entry)
    parsed, sources = texts.parsed(compiled, inputs), SourceText()
    causes, merged, schedule, calls, module, origins = (), None, None, (), None, None
    if parsed is not None:
        module, origins = parsed
        hlo_collectives = module_collectives(module, plan.mesh.shape, detect_mesh_info(plan.mesh).islands)
        causes = with_causes(module, with_origins(module, hlo_collectives, origins), placed, sources)
        merged = merge(causes)
        # A CPU hides no communication: it does one thing at a time.
        if chip_of(plan.mesh.devices.flat[0].device_kind) is not None:
            schedule = read_schedule(module, hlo_collectives)
        calls = host_calls(module, origins)
    first, stats, on_host = plan.mesh.devices.flat[0], stats_of(), host_bytes(entry, inputs)
    device_memory = memory(stats, [placed[i] for i in inputs], plan.mesh, device_limit(first), on_host)
    if module is not None and origins is not None and (parts := serialized_assignment(compiled, stats)):
        live = live_bytes(*parts, module, on_host)
        if live is not None:
            device_memory = with_timeline(device_memory, live, TimelineProgram(module, origins, placed, plan.mesh.size))
            # The compiler's own figure adds up the temporaries of two memories.
            if isinstance(compiled, CompileResult):
                device_memory = with_temporaries(device_memory, lambda _: live.reserved)
    refused = compiled.refused if isinstance(compiled, CompileResult) else None
    if refused is not None and (needed := parse_required_bytes(refused)) is not None:
        device_memory = with_needed(device_memory, needed, compiled.stand_in)
    complaints = _complaints(entry, origins)
    return ProgramReading(
        detect_mesh_info(plan.mesh), placed, device_memory, merged, causes, schedule, calls, complaints, sources
    )


def _read_stages(entry: CompiledStep, pipeline: PipelineExecutor, texts: ProgramTexts) -> ProgramReading:
    plan, sources = entry.plan, SourceText()
    placed = pipeline_leaves(pipeline, plan.leaves)
    if entry.compile_s is None:
        said, own, source = (planned_traffic(entry, pipeline, placed, sources), planned_bytes(pipeline), "planned")
    else:
        said, own, source = (compiled_traffic(pipeline, placed, texts, sources), compiled_bytes(pipeline), "compiled")
    return ProgramReading(
        detect_mesh_info(plan.mesh),
        placed,
        pipeline_memory(pipeline, placed, own, source),
        pipeline_collectives(pipeline, said),
        (),
        None,
        tuple(dict.fromkeys(call for one in said.values() for call in one.host_calls)),
        _complaints(entry, None),
        sources,
        read_pipeline_facts(pipeline, plan.leaves, said),
    )


def _complaints(entry: CompiledStep, origins: HloOrigins | None) -> tuple[Finding, ...]:
    """Return the messages in the compiler's log as findings, with source lines."""

    def line_of(one: Diagnostic) -> str | None:
        if origins is None or one.stack_frame_id is None:
            return None
        return describe_origin(origins.locate(origins.frames[one.stack_frame_id]))

    return findings(parse_messages(entry.compiler_messages, entry.plan.mesh.shape), line_of)
