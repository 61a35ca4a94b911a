"""The loss of a step cut into stages: which equations each runs, what it needs of others, and whose parameters."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax

from ..program.ir import Program, Value
from ..program.primitives import scan_counts
from .balance import stage_starts
from .layers import Cut, CutScans, Pieces
from .starts import allowed_starts
from .units import Units, equation_costs


@dataclass(frozen=True)
class Piece:
    """An operand of the loss, or layers `first` to `end` of one."""

    operand: int
    first: int | None = None
    end: int | None = None


@dataclass(frozen=True)
class Uncut:
    """What is never cut: the parameters (operands of the loss) that it reads, which layer of a scan it is, and its
    cost."""

    parameters: tuple[int, ...]
    layer: int | None
    cost: float


@dataclass(frozen=True)
class CutLoss:
    """`program`: the loss with its equations in the scopes of their stages, and of its inputs `pieces[i]` says which
    operand of the loss, or which layers of it, input i is. `units`: of each stage. `crossing`: the bytes that one
    microbatch takes over the boundary after each stage but the last. `chosen`: stages begin only where names or markers
    let them."""

    program: Program
    pieces: tuple[Piece, ...]
    units: tuple[tuple[Uncut, ...], ...]
    crossing: tuple[int, ...]
    chosen: bool


@dataclass(frozen=True)
class Wish:
    """Where a loss is to be cut. `names`: a regular expression for modules, functions and scopes that stages begin at.
    `costs`: what each unit costs, in the place of its FLOPs."""

    names: str | None = None
    costs: Sequence[float] | None = None


BY_FLOPS = Wish()


def cut_loss(
    loss: Program,
    parameters: Collection[int],
    examples: Collection[int],
    stages: int,
    chunks: int = 1,
    wish: Wish = BY_FLOPS,
) -> CutLoss:
    """`loss`, of one microbatch, in `stages` stages of about the same work, of which a rank runs `chunks`.

    `parameters` and `examples`: the positions of the inputs that are weights, trained or frozen, and of those that hold
    examples. Raises ShardError where it has fewer places for stages.
    """
    units = Units(loss, [loss.inputs[i] for i in parameters], [loss.inputs[i] for i in examples], wish.costs)
    among = allowed_starts(units, stages, chunks, wish.names)
    bounds = stage_starts(units, stages, chunks, among)
    stage_at = [sum(u >= b for b in bounds) for u in range(len(units.units))]
    cuts, whole = {}, {}
    for e in units.main:
        first, last = units.span[e.index]
        mine = stage_at[first : last + 1]
        if mine[0] == mine[-1]:
            whole[e.index] = mine[0]
        else:
            places = [k for k in range(1, len(mine)) if mine[k] != mine[k - 1]]
            cuts[e.index] = Cut((0, *places, len(mine)), (mine[0], *(mine[k] for k in places)))
    program, pieces = _in_pieces(loss, parameters, cuts, whole)
    of = {v: i for i, v in enumerate(loss.inputs)}
    uncut = [
        Uncut(tuple(sorted(of[v] for v in units.read[u])), x.layer, x.cost) for u, x in enumerate(units.units)
    ]
    parts = [tuple(uncut[a:b]) for a, b in pairwise([0, *bounds, len(uncut)])]
    return CutLoss(program, pieces, tuple(parts), tuple(units.crossing[b] for b in bounds), among is not None)


def whole_loss(loss: Program, parameters: Collection[int], stages: int) -> CutLoss:
    """`loss` with all of it in the last of `stages` stages. `parameters` as `cut_loss` has them."""
    last = {e.index: stages - 1 for e in loss.top.equations}
    program, pieces = _in_pieces(loss, parameters, {}, last)
    one = Uncut(tuple(sorted(parameters)), None, sum(equation_costs(loss).values()))
    return CutLoss(program, pieces, (*[()] * (stages - 1), (one,)), (0,) * (stages - 1), chosen=False)


def _in_pieces(
    loss: Program, parameters: Collection[int], cuts: Mapping[int, Cut], whole: Mapping[int, int]
) -> tuple[Program, tuple[Piece, ...]]:
    """The loss run with its scans cut, and as many parameters in pieces as nothing needs whole."""
    bounds = _stepped_over(loss, parameters, cuts)
    while True:
        pieces = [piece for i in range(len(loss.inputs)) for piece in _pieces(i, bounds.get(i))]
        replay = CutScans(loss, cuts, whole)
        closed = jax.make_jaxpr(partial(_run, replay, bounds))(*(_aval(loss, piece) for piece in pieces))
        if not replay.joined:
            return Program(closed), tuple(pieces)
        bounds = {i: b for i, b in bounds.items() if i not in replay.joined}


def _pieces(operand: int, bounds: tuple[int, ...] | None) -> list[Piece]:
    return [Piece(operand)] if bounds is None else [Piece(operand, a, b) for a, b in pairwise(bounds)]


def _run(replay: CutScans, bounds: Mapping[int, tuple[int, ...]], *xs: Any) -> list:
    rest, inputs = iter(xs), []
    for i in range(len(replay.program.inputs)):
        if i in bounds:
            inputs.append(Pieces([next(rest) for _ in bounds[i][1:]], bounds[i], i))
        else:
            inputs.append(next(rest))
    return replay(*inputs)


def _aval(loss: Program, piece: Piece) -> Any:
    aval = loss.closed.in_avals[piece.operand]
    if piece.first is None or piece.end is None:
        return aval
    return aval.update(shape=(piece.end - piece.first, *aval.shape[1:]))


def _stepped_over(
    loss: Program, parameters: Collection[int], cuts: Mapping[int, Cut]
) -> dict[int, tuple[int, ...]]:
    """The parameters with as many layers as a cut scan that something made of them may be stepped over by."""
    layers: dict[int, tuple[int, ...]] = {}
    for i in parameters:
        shape = loss.shapes[loss.inputs[i]]
        for e in loss.top.equations:
            if e.index in cuts and shape and shape[0] == cuts[e.index].bounds[-1]:
                consts, carried = scan_counts(e.params)
                if made_of_it_alone(loss, loss.inputs[i]) & {
                    v for v in e.ins[consts + carried :] if v is not None
                }:
                    layers.setdefault(i, cuts[e.index].bounds)
    return layers


def made_of_it_alone(loss: Program, value: Value) -> set[Value]:
    """`value` and what is made of it alone."""
    made = {value}
    for e in loss.top.equations:
        arrays = {v for v in e.ins if v is not None}
        if arrays and arrays <= made:
            made.update(e.outs)
    return made
