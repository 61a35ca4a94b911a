"""What a profiler recorded of a pipeline: which program of a stage each operation is of, and when each action ran.

A trace names an operation by its program's name and its device. Stages that are alike share a program, and each
microbatch runs it again: which of them an execution is follows from the order in which its rank calls its programs.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..pipeline.executed import Pipeline
from ..pipeline.jobs import Key
from ..pipeline.record import Event, Handover, Run
from ..placing import number_of
from ..schedule.actions import parts
from .instructions import Instructions
from .lanes import NS
from .traced import Op, Trace

_ONE_PROGRAM = 2**20  # executions of one program are numbered on; those of another begin anywhere


class Text(NamedTuple):
    """A program as a trace has it: the name of its module, and its instructions."""

    module: str
    instructions: Instructions


class Ran(NamedTuple):
    """An action as one device ran it, in nanoseconds of the recording's clock."""

    run: int
    rank: int
    action: str
    start: float
    end: float


def named(key: Key) -> str:
    """What an operation's module is called once its program is known."""
    kind, number = key
    return f"{kind} {number}"


def told_apart(
    trace: Trace, pipeline: Pipeline, texts: Mapping[Key, Text], devices: Mapping[int, int]
) -> tuple[Trace, list[Ran]]:
    """The trace with the name of its program for each operation's module, and the actions that ran.

    Args:
        trace: operations of a pipeline's calls.
        pipeline: that pipeline.
        texts: its programs.
        devices: the numbers of the mesh's devices by their ordinals.
    """
    rank_of = {number_of(d): rank for rank, mesh in enumerate(pipeline.ranks.each) for d in mesh.devices.flat}
    orders = [_by_module(pipeline.order(rank), texts) for rank in range(len(pipeline.ranks))]
    programs: dict[tuple[int, int, str], list[Op]] = defaultdict(list)
    ops: list[Op] = []
    for op in trace.ops:
        if op.module is not None and op.device in devices:
            programs[op.run, op.device, op.module].append(op)
        else:
            ops.append(op)
    ran: list[Ran] = []
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
            name = named(key)
            ops += [op._replace(module=name) for op in launch]
            if action is not None:
                start, end = min(op.start for op in launch), max(op.end for op in launch)
                ran.append(Ran(run, rank, action, start, end))
    return replace(trace, ops=tuple(ops)), ran


_Calls = list[tuple[Key, str | None]]


def _by_module(order: _Calls, texts: Mapping[Key, Text]) -> dict[str, _Calls]:
    calls: dict[str, _Calls] = defaultdict(list)
    for key, action in order:
        calls[texts[key].module].append((key, action))
    return calls


def _launches(ops: Sequence[Op], of: Sequence[Instructions]) -> list[list[Op]]:
    """The operations of programs of one name on one device in one run, by execution, in order. Where a trace tells none
    apart, one begins where an instruction comes again that runs once in each."""
    ops = sorted(ops, key=lambda op: op.start)
    if any(op.launch is None for op in ops):
        first = next((op.name for op in ops if any(each.once(op.name) for each in of)), None)
        launches: list[list[Op]] = [[]]
        for op in ops:
            if op.name == first and any(op.name == each.name for each in launches[-1]):
                launches.append([])
            launches[-1].append(op)
        return launches
    by_number: dict[int, list[Op]] = defaultdict(list)
    for op in ops:
        by_number[op.launch or 0].append(op)
    if max(by_number) - min(by_number) < _ONE_PROGRAM:
        return [by_number[number] for number in sorted(by_number)]
    return list(by_number.values())


def _next(launch: Sequence[Op], calls: _Calls, at: int, texts: Mapping[Key, Text]) -> int:
    """The next of a rank's calls, from `at` on, of a program that has these operations; a program that has nothing to
    do leaves none."""
    names = {op.name for op in launch}
    for i in range(at, len(calls)):
        instructions = texts[calls[i][0]].instructions
        if all(instructions[name] is not None for name in names):
            return i
    return at


def run_of(pipeline: Pipeline, ran: Sequence[Ran], run: int, trace: Trace) -> Run | None:
    """One recorded run of a pipeline, its times from the call on; None where it has no operation of an action.

    An action whose program has nothing to do is where the one before it ends.
    """
    schedule, (called, ended) = pipeline.split.schedule, trace.calls[run]
    spans: dict[tuple[int, str], tuple[float, float]] = {}
    for each in ran:
        if each.run == run:
            low, high = spans.get((each.rank, each.action), (each.start, each.end))
            spans[each.rank, each.action] = min(low, each.start), max(high, each.end)
    if not spans:
        return None
    events: list[Event] = []
    for rank, row in enumerate(schedule.grid):
        at = min((start for (r, _), (start, _) in spans.items() if r == rank), default=called)
        placed: list[tuple[float, float, str]] = []
        for action in (str(a) for step in row for a in parts(step)):
            start, end = spans.get((rank, action), (at, at))
            placed.append((start, end, action))
            at = end
        at = called
        for start, end, action in sorted(placed, key=lambda each: each[:2]):  # no instant is of two actions
            start = max(start, at)
            at = max(start, end)
            events.append(Event(rank, action, (start - called) * NS, (at - called) * NS))
    handovers = tuple(_handovers(pipeline, {event.action: event for event in events}))
    return Run(schedule, tuple(events), handovers, pipeline.peaks, (ended - called) * NS)


def _handovers(pipeline: Pipeline, events: Mapping[str, Event]) -> list[Handover]:
    """From the end of what makes a result to the start of what reads it, on another rank."""
    split, found = pipeline.split, list[Handover]()
    rank_of = split.schedule.rank_of

    def event(s: int, m: int, kinds: str) -> Event | None:
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
