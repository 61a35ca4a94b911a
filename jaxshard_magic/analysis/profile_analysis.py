"""Time breakdown of a profiled step: the recording of each host read, and combined with predictions."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ..compilation.compiled_step import CompiledStep
from ..device_arrays import count_hosts, device_number
from ..errors import ShardError
from ..pipeline.executor import PipelineExecutor
from ..pipeline.jobs import ProgramKey as ProgramKey
from ..pipeline.record import PipelineRun
from ..program.gc_pause import gc_paused
from ..report import Measured
from .collectives import Cause, HloCollective
from .host_totals import HostTotals, host_totals, longest, median_run, run_durations
from .instructions import Instructions, count_operations
from .pipeline_trace import RecordedAction, TracedProgram, assign_programs, program_label, recorded_run
from .pipeline_traffic import ProgramTraffic, instructions_of, operations_of
from .predicted_times import PredictionInputs, predict_step
from .program_texts import program_texts, read_inputs
from .time_breakdown import time_breakdown
from .xplane import read_trace as read_trace

# Operations to record at most: storing and reading one takes some 40 us. Slightly below the limit on reading.
WORTH = 100_000


@dataclass(frozen=True, eq=False)
class Profile:
    """Totals of recorded calls of one program.

    Attributes:
        hosts: Totals of each host, with files named as on this host.
        asked: Number of calls requested.
        run: For a pipeline, the run of median duration.
        calls: By file and number of a line, the line that called it.
    """

    hosts: tuple[HostTotals, ...]
    asked: int
    run: PipelineRun | None = None
    calls: Mapping[tuple[str | None, int | None], str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Recording:
    """Recording of the profiler.

    Attributes:
        xspace: Serialized XSpace.
        skipped_calls: Number of first calls to leave out.
        requested_calls: Number of requested calls, without the first ones.
    """

    xspace: bytes
    skipped_calls: int
    requested_calls: int


_known: "WeakKeyDictionary[Profile, tuple[PredictionInputs, Measured]]" = WeakKeyDictionary()


def calls_to_record(entry: CompiledStep, n: int) -> int:
    """Return how many of `n` calls to record, since more would not be read; equal on all hosts."""
    mesh, texts = entry.plan.mesh, program_texts(entry)
    with gc_paused():
        if isinstance(entry.compiled, PipelineExecutor):
            each = operations_of(entry.compiled, texts) * mesh.size // len(entry.compiled.ranks)
        elif (parsed := texts.parsed(entry.compiled, read_inputs(entry))) is not None:
            each = count_operations(parsed.module) * -(-mesh.size // count_hosts(mesh))
        else:
            return n
    return max(1, min(n, WORTH // max(1, each)))


def read_recording(
    recording: Recording,
    entry: CompiledStep,
    moves: Sequence[tuple[HloCollective, Cause]],
    said: Mapping[ProgramKey, ProgramTraffic] | None,
    all_of: Callable[[Callable[[], str]], Sequence[str]],
) -> Profile:
    """Read the recording of this host, and exchange totals with all hosts.

    Collective: all hosts call this function together.

    Args:
        recording: Recorded calls of `entry`.
        entry: The program.
        moves: The collectives of the program, with the lines that cause them.
        said: The traffic of each program of a pipeline; else None.
        all_of: Runs a function for this host's text, and returns the texts of all hosts.

    Raises:
        ShardError: The recording has none of the program's operations.
    """
    none = ShardError("the step was recorded, and the recording holds none of its operations")
    with gc_paused():
        pipeline, devices, texts = entry.compiled, _ordinals(entry), program_texts(entry)
        programs: Mapping[ProgramKey, TracedProgram] = {}
        if said is not None:
            programs = {key: TracedProgram(*each) for key, each in instructions_of(pipeline, said, texts).items()}
            instructions = {program_label(key): each.instructions for key, each in programs.items()}
            modules = {each.module for each in programs.values()}
        elif (parsed := texts.parsed(entry.compiled, read_inputs(entry))) is not None:
            modules = {parsed.module.name}
            instructions = {parsed.module.name: Instructions(parsed.module, parsed.origins, moves)}
        else:
            raise none
        trace, ran = read_trace(recording.xspace, modules, recording.skipped_calls), list[RecordedAction]()
        if said is not None:
            trace, ran = assign_programs(trace, pipeline, programs, devices)
        local_durations = run_durations(trace, devices)
        if not local_durations:
            raise none
        durations = longest([_runs(each) for each in all_of(lambda: json.dumps(local_durations))])
        sums = host_totals(trace, instructions, devices, durations)
        run = None if said is None else recorded_run(pipeline, ran, trace.runs - 1 - median_run(durations), trace)
        hosts = tuple(HostTotals.from_json(each).with_local_files(instructions) for each in all_of(sums.to_json))
        return Profile(hosts, recording.requested_calls, run, _calls(hosts, instructions.values()))


def _calls(hosts: Sequence[HostTotals], programs: Iterable[Instructions]) -> dict[tuple[str | None, int | None], str]:
    """Return, by file and number of a recorded line, the calling line in another file."""
    found: dict[tuple[str | None, int | None], str] = {}
    known = list(programs)
    for line in (line for sums in hosts for line in sums.lines):
        every = (each for program in known if (each := program[line.name]) is not None)
        same = (each.called for each in every if (each.file, each.line) == (line.file, line.line))
        if (called := next(filter(None, same), None)) is not None:
            found[line.file, line.line] = called
    return found


def _runs(text: str) -> dict[int, float]:
    """Return durations by run from JSON."""
    # The keys of a JSON object are strings.
    return {int(run): took for run, took in json.loads(text).items()}


def _ordinals(entry: CompiledStep) -> dict[int, int]:
    """Return the device numbers of this host by the ordinals of a recording."""
    # A recording numbers CPU devices by their id, which is unique over hosts, and others by their position on the host.
    own = entry.plan.mesh.local_devices
    return {
        d.id if d.platform == "cpu" or d.local_hardware_id is None else d.local_hardware_id: device_number(d)
        for d in own
    }


def profile_breakdown(
    profile: Profile,
    entry: CompiledStep,
    moves: Sequence[tuple[HloCollective, Cause]],
    said: Mapping[ProgramKey, ProgramTraffic] | None,
    beside: PredictionInputs,
) -> Measured:
    """Return the time breakdown of the recorded steps, with predictions.

    Args:
        profile: The recorded calls.
        entry: The program.
        moves: The collectives of the program, with the lines that cause them.
        said: The traffic of each program of a pipeline; else None.
        beside: Inputs of the predictions.
    """
    if profile not in _known or _known[profile][0] != beside:
        with gc_paused():
            known = predict_step(entry, moves, said, beside)._replace(calling_lines=profile.calls)
            found = time_breakdown(profile.hosts, known, profile.asked, _ranks(entry))
            _known[profile] = beside, found
    return _known[profile][1]


def _ranks(entry: CompiledStep) -> dict[int, int] | None:
    """Return the rank of each device of a pipeline; None for other steps."""
    if not isinstance(entry.compiled, PipelineExecutor):
        return None
    ranks = enumerate(entry.compiled.ranks.sub_meshes)
    return {device_number(d): rank for rank, mesh in ranks for d in mesh.devices.flat}
