"""What the profiler recorded of a step, and what is predicted of it, as the measured part of its report."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ..errors import ShardError
from ..pipeline.executed import Pipeline
from ..pipeline.jobs import Key as ProgramKey
from ..pipeline.record import Run
from ..placing import hosts_of, number_of
from ..program.flops import REMATTED
from ..program.garbage import uncollected
from ..program.ir import Program
from ..report import Collective, Measured
from .collectives import Cause, Move
from .efficiency import efficiency, seconds_of
from .frames import called
from .hlo import read
from .instructions import RECOMPUTED, Instructions, operations
from .lanes import Key
from .origin import Origins, op_name
from .roofline import Roofline
from .spent import Rates, spent
from .staged_moves import Said, instructions_of, operations_of
from .staged_trace import Ran, Text, named, run_of, told_apart
from .summed import Moves, Sums, longest, summed, takes, typical
from .traced import read as read_trace

if TYPE_CHECKING:
    from ..step import Entry
    from ..step.recorded import Recording

WORTH = 100_000  # operations that are recorded: keeping and reading one takes some 40 us. A few fewer than are read
_Alike = tuple[object, ...]


@dataclass(frozen=True, eq=False)
class Profile:
    """What each host read of recorded calls of one program, with files named as on this one. `asked`: for so many
    calls; `run`: of a pipeline the one that is typical."""

    hosts: tuple[Sums, ...]
    asked: int
    run: Run | None = None


_known: "WeakKeyDictionary[Profile, tuple[Rates, Measured]]" = WeakKeyDictionary()


def worth_recording(entry: "Entry", n: int) -> int:
    """How many of `n` calls of a program to record, as more of them would not be read; the same on all hosts."""
    mesh = entry.plan.mesh
    with uncollected():
        if isinstance(entry.compiled, Pipeline):
            each = operations_of(entry.compiled) * mesh.size // len(entry.compiled.ranks)
        elif text := entry.compiled.as_text():
            each = operations(read(text)) * -(-mesh.size // hosts_of(mesh))
        else:
            return n
    return max(1, min(n, WORTH // max(1, each)))


def read_recorded(
    recording: "Recording",
    entry: "Entry",
    home: Sequence[str],
    moves: Sequence[tuple[Move, Cause]],
    said: Mapping[ProgramKey, Said] | None,
    all_of: Callable[[Callable[[], str]], Sequence[str]],
) -> Profile:
    """Read what this host recorded, and hear what the others did, which come here together.

    Args:
        recording: of calls of `entry`.
        entry: the program.
        home: the files to look for a line in first.
        moves: what moves, with the lines that cause it.
        said: of a pipeline what the text of each of its programs says; else None.
        all_of: makes what this host tells, and gives what each host has told.

    Raises ShardError where none of the program's operations were recorded.
    """
    none = ShardError("the step was recorded, and the recording holds none of its operations")
    with uncollected():
        pipeline, devices = entry.compiled, _ordinals(entry)
        texts: Mapping[ProgramKey, Text] = {}
        if said is not None:
            texts = {key: Text(*each) for key, each in instructions_of(pipeline, said, home).items()}
            told = {named(key): each.instructions for key, each in texts.items()}
            modules = {each.module for each in texts.values()}
        elif text := entry.compiled.as_text():
            module = read(text)
            modules = {module.name}
            told = {module.name: Instructions(module, Origins(module, home), moves)}
        else:
            raise none
        trace, ran = read_trace(recording.xspace, modules, recording.skip), list[Ran]()
        if said is not None:
            trace, ran = told_apart(trace, pipeline, texts, devices)
        own = takes(trace, devices)
        if not own:
            raise none
        every = longest([_runs(each) for each in all_of(lambda: json.dumps(own))])
        sums = summed(trace, told, devices, every)
        run = None if said is None else run_of(pipeline, ran, trace.runs - 1 - typical(every), trace)
        hosts = tuple(Sums.from_json(each).by(told) for each in all_of(sums.to_json))
        return Profile(hosts, recording.asked, run)


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
    home: Sequence[str],
    told: Sequence[tuple[Move, Cause]],
    collectives: Sequence[Collective],
    roof: Roofline | None,
    attached: bool,
) -> Measured:
    """Where the time of the recorded steps went.

    Args:
        profile: what was read of calls of `entry`.
        entry: the program.
        home: the files to look for a line in first.
        told: what moves, with the lines that cause it.
        collectives: the same, merged, with what they are predicted to take.
        roof: what is predicted, where a chip is known.
        attached: whether that is the chip that the step ran on.
    """
    with uncollected():
        rates = _rates(entry, home, told, collectives, roof, attached)
        if profile not in _known or _known[profile][0] != rates:
            _known[profile] = rates, spent(profile.hosts, rates, profile.asked, _ranks(entry))
        return _known[profile][1]


def _ranks(entry: "Entry") -> dict[int, int] | None:
    """Of a pipeline the rank of each device."""
    if not isinstance(entry.compiled, Pipeline):
        return None
    ranks = enumerate(entry.compiled.ranks.each)
    return {number_of(d): rank for rank, mesh in ranks for d in mesh.devices.flat}


def _rates(
    entry: "Entry",
    home: Sequence[str],
    told: Sequence[tuple[Move, Cause]],
    collectives: Sequence[Collective],
    roof: Roofline | None,
    attached: bool,
) -> Rates:
    sent, seconds = Counter[Moves](), defaultdict[Moves, float](float)
    for c in collectives:
        sent[c.kind, c.axes] += c.wire_bytes
        if c.seconds is not None:
            seconds[c.kind, c.axes] += c.seconds
    wires = {} if roof is None or not attached else roof.wires
    links = {axis: wire.bandwidth for axis, wire in wires.items() if wire.bandwidth is not None}
    lines = defaultdict[Key, float](float)
    for key, each in _collectives_by_line(told, collectives):
        lines[key] += each
    if roof is not None:
        origins = Origins(read(entry.compiled.as_text() or ""), home)
        for key, each in _products_by_line(entry, origins, roof):
            lines[key] += each
    return Rates(dict(sent), dict(seconds), links, dict(lines))


def _collectives_by_line(
    told: Sequence[tuple[Move, Cause]], collectives: Sequence[Collective]
) -> Iterable[tuple[Key, float]]:
    """What collectives are predicted to be waited for, by line and phase: those that are done again for the backward
    pass are told apart, which rows of the report do not."""
    shares: dict[_Alike, Counter[str | None]] = defaultdict(Counter)
    for move, cause in told:
        phase = RECOMPUTED if REMATTED in op_name(move.instruction) else cause.phase
        shares[_alike(move, cause)][phase] += move.count
    for c in collectives:
        if c.waited is not None:
            phases = shares[_alike(c, c)] or {c.phase: 1}
            for phase, count in phases.items():
                yield (c.file, c.line, phase), c.waited * count / sum(phases.values())


def _alike(moved: Move | Collective, cause: Cause | Collective) -> _Alike:
    return (
        *(moved.kind, moved.axes, moved.group_size, moved.bytes),
        *(cause.phase, cause.file, cause.line, cause.at),
    )


def _products_by_line(entry: "Entry", origins: Origins, roof: Roofline) -> Iterable[tuple[Key, float]]:
    """What products are predicted to take, each as long as it multiplies or reads its operands."""
    plan, chip = entry.plan, roof.chip
    if plan.shares is None or len(plan.shares) != len(plan.work):
        return
    equations = Program((plan.traced or entry.traced).closed).equations
    for work, share in zip(plan.work, plan.shares, strict=True):
        peak = seconds_of(chip, share)
        if peak is None or not share.exact:
            continue
        frame = origins.place(called(equations[work.equation].eqn.source_info.traceback)).frame
        phase = RECOMPUTED if work.recomputed else work.phase
        key: Key = (None, None, phase) if frame is None else (frame.file, frame.line, phase)
        yield key, max(peak / efficiency(chip, share), share.bytes / chip.hbm_bandwidth)
