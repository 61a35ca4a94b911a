"""What the profiler recorded of a step, read and put beside what is predicted of it."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ..errors import ShardError
from ..pipeline.executed import Pipeline
from ..pipeline.jobs import Key as ProgramKey
from ..pipeline.record import Run
from ..placing import hosts_of, number_of
from ..program.garbage import uncollected
from ..report import Measured
from .collectives import Cause, Move
from .instructions import Instructions, operations
from .predicted import Beside, rates
from .spent import spent
from .staged_moves import Said, instructions_of, operations_of
from .staged_trace import Ran, Text, named, run_of, told_apart
from .summed import Sums, longest, summed, takes, typical
from .texts import inputs_of, texts_of
from .traced import read as read_trace

if TYPE_CHECKING:
    from ..step import Entry
    from ..step.recorded import Recording

WORTH = 100_000  # operations that are recorded: keeping and reading one takes some 40 us. A few fewer than are read


@dataclass(frozen=True, eq=False)
class Profile:
    """What each host read of recorded calls of one program, with files named as on this one. `asked`: for so many
    calls; `run`: of a pipeline the one that is typical; `calls`: of a line, by file and number, the one that led to
    it."""

    hosts: tuple[Sums, ...]
    asked: int
    run: Run | None = None
    calls: Mapping[tuple[str | None, int | None], str] = field(default_factory=dict)


_known: "WeakKeyDictionary[Profile, tuple[Beside, Measured]]" = WeakKeyDictionary()


def worth_recording(entry: "Entry", n: int) -> int:
    """How many of `n` calls of a program to record, as more of them would not be read; the same on all hosts."""
    mesh, texts = entry.plan.mesh, texts_of(entry)
    with uncollected():
        if isinstance(entry.compiled, Pipeline):
            each = operations_of(entry.compiled, texts) * mesh.size // len(entry.compiled.ranks)
        elif (parsed := texts.of(entry.compiled, inputs_of(entry))) is not None:
            each = operations(parsed.module) * -(-mesh.size // hosts_of(mesh))
        else:
            return n
    return max(1, min(n, WORTH // max(1, each)))


def read_recorded(
    recording: "Recording",
    entry: "Entry",
    moves: Sequence[tuple[Move, Cause]],
    said: Mapping[ProgramKey, Said] | None,
    all_of: Callable[[Callable[[], str]], Sequence[str]],
) -> Profile:
    """Read what this host recorded, and hear what the others did, which come here together.

    Args:
        recording: of calls of `entry`.
        entry: the program.
        moves: what moves, with the lines that cause it.
        said: of a pipeline what the text of each of its programs says; else None.
        all_of: makes what this host tells, and gives what each host has told.

    Raises ShardError where none of the program's operations were recorded.
    """
    none = ShardError("the step was recorded, and the recording holds none of its operations")
    with uncollected():
        pipeline, devices, texts = entry.compiled, _ordinals(entry), texts_of(entry)
        programs: Mapping[ProgramKey, Text] = {}
        if said is not None:
            programs = {key: Text(*each) for key, each in instructions_of(pipeline, said, texts).items()}
            told = {named(key): each.instructions for key, each in programs.items()}
            modules = {each.module for each in programs.values()}
        elif (parsed := texts.of(entry.compiled, inputs_of(entry))) is not None:
            modules = {parsed.module.name}
            told = {parsed.module.name: Instructions(parsed.module, parsed.origins, moves)}
        else:
            raise none
        trace, ran = read_trace(recording.xspace, modules, recording.skip), list[Ran]()
        if said is not None:
            trace, ran = told_apart(trace, pipeline, programs, devices)
        own = takes(trace, devices)
        if not own:
            raise none
        every = longest([_runs(each) for each in all_of(lambda: json.dumps(own))])
        sums = summed(trace, told, devices, every)
        run = None if said is None else run_of(pipeline, ran, trace.runs - 1 - typical(every), trace)
        hosts = tuple(Sums.from_json(each).by(told) for each in all_of(sums.to_json))
        return Profile(hosts, recording.asked, run, _calls(hosts, told.values()))


def _calls(
    hosts: Sequence[Sums], programs: Iterable[Instructions]
) -> dict[tuple[str | None, int | None], str]:
    """Of the lines that were recorded the ones that led to them, where they stand in another file."""
    found: dict[tuple[str | None, int | None], str] = {}
    known = list(programs)
    for line in (line for sums in hosts for line in sums.lines):
        every = (each for program in known if (each := program[line.name]) is not None)
        same = (each.called for each in every if (each.file, each.line) == (line.file, line.line))
        if (called := next(filter(None, same), None)) is not None:
            found[line.file, line.line] = called
    return found


def _runs(text: str) -> dict[int, float]:
    """JSON has text for numbers that are keys."""
    return {int(run): took for run, took in json.loads(text).items()}


def _ordinals(entry: "Entry") -> dict[int, int]:
    """The numbers of this host's devices by what a recording calls them: a CPU's by its id, which no other host has,
    others' by their place on the host."""
    own = entry.plan.mesh.local_devices
    return {
        d.id if d.platform == "cpu" or d.local_hardware_id is None else d.local_hardware_id: number_of(d)
        for d in own
    }


def profiled(
    profile: Profile,
    entry: "Entry",
    moves: Sequence[tuple[Move, Cause]],
    said: Mapping[ProgramKey, Said] | None,
    beside: Beside,
) -> Measured:
    """Where the time of the recorded steps went, with what was predicted; see `predicted.rates`."""
    if profile not in _known or _known[profile][0] != beside:
        with uncollected():
            known = rates(entry, moves, said, beside)._replace(calls=profile.calls)
            found = spent(profile.hosts, known, profile.asked, _ranks(entry))
            _known[profile] = beside, found
    return _known[profile][1]


def _ranks(entry: "Entry") -> dict[int, int] | None:
    """Of a pipeline the rank of each device."""
    if not isinstance(entry.compiled, Pipeline):
        return None
    ranks = enumerate(entry.compiled.ranks.each)
    return {number_of(d): rank for rank, mesh in ranks for d in mesh.devices.flat}
