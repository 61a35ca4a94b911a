"""Assign recorded operations of a pipeline to stage programs and actions.

A trace names the program and the device of an operation. Stages can share a program, and every microbatch runs it
again, so that each execution is identified by the order of its rank's calls.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..device_arrays import device_number
from ..pipeline.executor import PipelineExecutor
from ..pipeline.jobs import ProgramKey
from ..pipeline.record import ActionEvent, Handover, PipelineRun
from ..schedule.actions import entry_actions
from .instructions import Instructions
from .lanes import NS
from .xplane import RecordedOp, StepTrace

# Launch numbers of one program are consecutive, and those of another begin anywhere: a wider range means several
# programs.
_ONE_PROGRAM = 2**20


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
