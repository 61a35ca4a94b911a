"""Time breakdown of a profiled step: the recording of each host read, and combined with predictions.

Recorded operations of a pipeline are assigned to stage programs and actions. A trace names the program and the device
of an operation. Stages can share a program, and every microbatch runs it again, so that each execution is identified by
the order of its rank's calls.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..compilation.compiled_step import CompiledStep
from ..device_arrays import count_hosts, device_number
from ..errors import ShardError
from ..pipeline.executor import PipelineExecutor
from ..pipeline.jobs import ProgramKey as ProgramKey
from ..pipeline.record import ActionEvent, Handover, PipelineRun
from ..program.gc_pause import gc_paused
from ..report import Measured
from ..schedule.actions import entry_actions
from .collectives import Cause, HloCollective
from .host_totals import HostTotals, host_totals, longest, median_run, run_durations
from .instructions import Instructions, count_operations
from .lanes import NS
from .pipeline_traffic import ProgramTraffic, instructions_of, operations_of
from .predicted_times import PredictionInputs, predict_step
from .program_texts import program_texts, read_inputs
from .time_breakdown import time_breakdown
from .xplane import RecordedOp, StepTrace
from .xplane import read_trace as read_trace

# Operations to record at most: storing and reading one takes some 40 us. Slightly below the limit on reading.
WORTH = 100_000

# Launch numbers of one program are consecutive, and those of another begin anywhere: a wider range means several
# programs.
_ONE_PROGRAM = 2**20


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


class TracedProgram(NamedTuple):
    """Program as named in a trace.

    Attributes:
        module: Name of the HLO module.
        instructions: Its instructions.
    """

    module: str
    instructions: Instructions


class RecordedAction(NamedTuple):
    """One action on one device.

    Attributes:
        run: Position of the step's call.
        rank: The rank.
        action: Name of the action.
        start: Start, in nanoseconds of the recording's clock.
        end: End, in the same unit.
    """

    run: int
    rank: int
    action: str
    start: float
    end: float


def program_label(key: ProgramKey) -> str:
    """Return the module name given to operations of a known program."""
    kind, number = key
    return f"{kind} {number}"


def assign_programs(
    trace: StepTrace, pipeline: PipelineExecutor, texts: Mapping[ProgramKey, TracedProgram], devices: Mapping[int, int]
) -> tuple[StepTrace, list[RecordedAction]]:
    """Return the trace with each operation's module replaced by its program, and the recorded actions.

    Args:
        trace: Operations of a pipeline's calls.
        pipeline: The pipeline.
        texts: Its programs.
        devices: Device numbers of the mesh, by ordinal.
    """
    rank_of = {device_number(d): rank for rank, mesh in enumerate(pipeline.ranks.sub_meshes) for d in mesh.devices.flat}
    orders = [_by_module(pipeline.call_order(rank), texts) for rank in range(len(pipeline.ranks))]
    programs: dict[tuple[int, int, str], list[RecordedOp]] = defaultdict(list)
    ops: list[RecordedOp] = []
    for op in trace.ops:
        if op.module is not None and op.device in devices:
            programs[op.run, op.device, op.module].append(op)
        else:
            ops.append(op)
    ran: list[RecordedAction] = []
    for (run, device, module), own in programs.items():
        rank = rank_of[devices[device]]
        calls, at = orders[rank].get(module, []), 0
        for launch in _launches(own, [texts[key].instructions for key, _ in calls]):
            at = _next(launch, calls, at, texts)
            if at == len(calls):
                ops += launch
                continue
            key, action = calls[at]
            at += 1
            name = program_label(key)
            ops += [op._replace(module=name) for op in launch]
            if action is not None:
                start, end = min(op.start for op in launch), max(op.end for op in launch)
                ran.append(RecordedAction(run, rank, action, start, end))
    return replace(trace, ops=tuple(ops)), ran


_Calls = list[tuple[ProgramKey, str | None]]


def _by_module(order: _Calls, texts: Mapping[ProgramKey, TracedProgram]) -> dict[str, _Calls]:
    calls: dict[str, _Calls] = defaultdict(list)
    for key, action in order:
        calls[texts[key].module].append((key, action))
    return calls


def _launches(ops: Sequence[RecordedOp], of: Sequence[Instructions]) -> list[list[RecordedOp]]:
    """Return the operations of same-named programs on one device in one run, grouped by execution, in order.

    Where a trace has no execution numbers, an execution begins at each repetition of an instruction that runs once in
    each.
    """
    ops = sorted(ops, key=lambda op: op.start)
    if any(op.launch is None for op in ops):
        first = next((op.name for op in ops if any(each.runs_once(op.name) for each in of)), None)
        launches: list[list[RecordedOp]] = [[]]
        for op in ops:
            if op.name == first and any(op.name == each.name for each in launches[-1]):
                launches.append([])
            launches[-1].append(op)
        return launches
    by_number: dict[int, list[RecordedOp]] = defaultdict(list)
    for op in ops:
        by_number[op.launch or 0].append(op)
    if max(by_number) - min(by_number) < _ONE_PROGRAM:
        return [by_number[number] for number in sorted(by_number)]
    return list(by_number.values())


def _next(launch: Sequence[RecordedOp], calls: _Calls, at: int, texts: Mapping[ProgramKey, TracedProgram]) -> int:
    """Return the next position, from `at` on, of a call whose program contains all operations of `launch`; else `at`.

    Programs without work leave no operations, and are skipped.
    """
    names = {op.name for op in launch}
    for i in range(at, len(calls)):
        instructions = texts[calls[i][0]].instructions
        if all(instructions[name] is not None for name in names):
            return i
    return at


def recorded_run(
    pipeline: PipelineExecutor, ran: Sequence[RecordedAction], run: int, trace: StepTrace
) -> PipelineRun | None:
    """Return one recorded run of a pipeline, timed from the call; None without operations of an action.

    Args:
        pipeline: The pipeline.
        ran: The recorded actions.
        run: Position of the run.
        trace: Operations of the pipeline's calls.
    """
    schedule, (called, ended) = pipeline.split.schedule, trace.calls[run]
    spans: dict[tuple[int, str], tuple[float, float]] = {}
    for each in ran:
        if each.run == run:
            low, high = spans.get((each.rank, each.action), (each.start, each.end))
            spans[each.rank, each.action] = min(low, each.start), max(high, each.end)
    if not spans:
        return None
    events: list[ActionEvent] = []
    for rank, row in enumerate(schedule.grid):
        at = min((start for (r, _), (start, _) in spans.items() if r == rank), default=called)
        placed: list[tuple[float, float, str]] = []
        for action in (str(a) for step in row for a in entry_actions(step)):
            # An action without work is placed at the end of the action before.
            start, end = spans.get((rank, action), (at, at))
            placed.append((start, end, action))
            at = end
        at = called
        # Actions of a rank don't overlap: the next one begins when the one before has ended.
        for start, end, action in sorted(placed, key=lambda each: each[:2]):
            start = max(start, at)
            at = max(start, end)
            events.append(ActionEvent(rank, action, (start - called) * NS, (at - called) * NS))
    handovers = tuple(_handovers(pipeline, {event.action: event for event in events}))
    return PipelineRun(schedule, tuple(events), handovers, pipeline.peaks, (ended - called) * NS)


def _handovers(pipeline: PipelineExecutor, events: Mapping[str, ActionEvent]) -> list[Handover]:
    """Return the transfers between ranks, from the end of the producing to the start of the reading action."""
    split, found = pipeline.split, list[Handover]()
    rank_of = split.schedule.rank_of

    def event(s: int, m: int, kinds: str) -> ActionEvent | None:
        return next((events[name] for kind in kinds if (name := f"{s}{kind}{m}") in events), None)

    each = ((s, m) for s in range(len(rank_of)) for m in range(split.schedule.microbatches))
    for s, m in each:
        for to, kinds in ((s + 1, "F"), (s - 1, "BI")):
            if to not in split.loss_of(s).stages or rank_of[to] == rank_of[s]:
                continue
            made, read = event(s, m, kinds), event(to, m, kinds)
            if made is not None and read is not None:
                found.append(Handover(s, to, m, made.end, max(made.end, read.start)))
    return found
