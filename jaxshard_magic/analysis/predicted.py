"""What is known of a step beside its recording, so that a line's prediction stands beside what was measured of it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..hardware import Chip
from ..pipeline.executed import Pipeline
from ..pipeline.jobs import Key as ProgramKey
from ..plan import Share
from ..program.flops import REMATTED, Work
from ..program.ir import Program
from ..report import Collective
from ..wires import Wire
from .collectives import Cause, Move, merge
from .efficiency import efficiency, seconds_of
from .frames import called
from .instructions import RECOMPUTED
from .lanes import Key
from .origin import Origin, op_name, place_of
from .roofline import on_links
from .spent import Rates
from .staged_moves import Said
from .staged_works import runs_of, works_of
from .summed import Moves
from .texts import home_of

if TYPE_CHECKING:
    from ..step import Entry

_Alike = tuple[object, ...]


class Beside(NamedTuple):
    """What predictions follow from. `collectives`: of the step, with what they are predicted to take; of a pipeline
    without, as its programs tell that. `chip`: None where none is known; `wires`: what carries each mesh axis there.
    `attached`: whether the step ran on that chip."""

    collectives: tuple[Collective, ...]
    chip: Chip | None
    wires: Mapping[str, Wire]
    attached: bool


def rates(
    entry: "Entry",
    moves: Sequence[tuple[Move, Cause]],
    said: Mapping[ProgramKey, Said] | None,
    beside: Beside,
) -> Rates:
    """What is known of the step of `entry`.

    Args:
        entry: the program.
        moves: what moves in it, with the lines that cause it.
        said: of a pipeline what the text of each of its programs says; else None.
        beside: what predictions follow from.
    """
    sent, takes = Counter[Moves](), defaultdict[Moves, float](float)
    for c in beside.collectives:
        sent[c.kind, c.axes] += c.wire_bytes
        if c.seconds is not None:
            takes[c.kind, c.axes] += c.seconds
    wires = beside.wires if beside.attached else {}
    links = {axis: wire.bandwidth for axis, wire in wires.items() if wire.bandwidth is not None}
    lines = defaultdict[Key, float](float)
    if isinstance(entry.compiled, Pipeline):
        if beside.chip is not None:
            ranks = len(entry.compiled.ranks)
            for key, each in _of_stages(entry, entry.compiled, beside.chip):
                lines[key] += each / ranks
            for moved, key, each in _inside_stages(
                entry, entry.compiled, said or {}, beside.chip, beside.wires
            ):
                takes[moved] += each / ranks
                lines[key] += each / ranks
    else:
        for key, each in _of_collectives(moves, beside.collectives):
            lines[key] += each
        if beside.chip is not None:
            for key, each in _of_products(entry, beside.chip):
                lines[key] += each
    return Rates(dict(sent), dict(takes), links, dict(lines))


def _of_stages(entry: "Entry", pipeline: Pipeline, chip: Chip) -> Iterable[tuple[Key, float]]:
    """What the products of a pipeline's stages are predicted to take, by line and phase, on one device of each, as
    often as a step runs them. A whole backward pass is both of its halves."""
    runs, home = runs_of(pipeline), home_of(entry)
    for s, stage in enumerate(pipeline.stages):
        equations = stage.program.with_halves.whole.equations
        call = place_of(called(pipeline.split.losses[pipeline.split.loss_of(s).number].traceback), home)
        for kind, works in works_of(pipeline, s).items():
            times = runs[kind, s] + (0 if kind == "F" else runs["B", s])
            for work, share in works:
                takes = _product(chip, share)
                if takes is not None:
                    place = place_of(called(equations[work.equation].eqn.source_info.traceback), home)
                    yield _key(place if place.frame is not None else call, work), takes * times


def _inside_stages(
    entry: "Entry",
    pipeline: Pipeline,
    said: Mapping[ProgramKey, Said],
    chip: Chip,
    wires: Mapping[str, Wire],
) -> Iterable[tuple[Moves, Key, float]]:
    """What the collectives inside of a pipeline's programs are predicted to be on the links: by kind and axes, and by
    line and phase, on one device of each, as often as a step runs them. None is sent as one with another program's."""
    runs = runs_of(pipeline)
    for key, one in said.items():
        moves = one.in_text
        rows = [row for each in moves for row in merge([each])]
        for (move, cause), takes in zip(
            moves, on_links(rows, chip, wires, entry.plan.batch_axes), strict=True
        ):
            if takes is not None:
                line = cause.file, cause.line, _phase(move, cause)
                yield (move.kind, move.axes), line, takes * runs.get(key, 1)


def _of_products(entry: "Entry", chip: Chip) -> Iterable[tuple[Key, float]]:
    """What the products of a step of one program are predicted to take, by line and phase."""
    plan, home = entry.plan, home_of(entry)
    if plan.shares is None or len(plan.shares) != len(plan.work):
        return
    equations = Program((plan.traced or entry.traced).closed).equations
    for work, share in zip(plan.work, plan.shares, strict=True):
        takes = _product(chip, share)
        if takes is not None:
            frames = called(equations[work.equation].eqn.source_info.traceback)
            yield _key(place_of(frames, home), work), takes


def _product(chip: Chip, share: Share) -> float | None:
    """Seconds of a product: as long as it multiplies, or reads its operands. None where that is not known."""
    peak = seconds_of(chip, share)
    if peak is None or not share.exact:
        return None
    return max(peak / efficiency(chip, share), share.bytes / chip.hbm_bandwidth)


def _key(place: Origin, work: Work) -> Key:
    frame = place.frame
    return frame and frame.file, frame and frame.line, RECOMPUTED if work.recomputed else work.phase


def _of_collectives(
    moves: Sequence[tuple[Move, Cause]], collectives: Sequence[Collective]
) -> Iterable[tuple[Key, float]]:
    """What collectives are predicted to be waited for, by line and phase: those that are done again for the backward
    pass are told apart, which rows of the report do not."""
    shares: dict[_Alike, Counter[str | None]] = defaultdict(Counter)
    for move, cause in moves:
        shares[_alike(move, cause)][_phase(move, cause)] += move.count
    for c in collectives:
        if c.waited is not None:
            phases = shares[_alike(c, c)] or {c.phase: 1}
            for phase, count in phases.items():
                yield (c.file, c.line, phase), c.waited * count / sum(phases.values())


def _phase(move: Move, cause: Cause) -> str | None:
    return RECOMPUTED if REMATTED in op_name(move.instruction) else cause.phase


def _alike(moved: Move | Collective, cause: Cause | Collective) -> _Alike:
    return (
        *(moved.kind, moved.axes, moved.group_size, moved.bytes),
        *(cause.phase, cause.file, cause.line, cause.called),
    )
