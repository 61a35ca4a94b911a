"""What each stage of a cut loss runs, reads, hands on and gives."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ..program.flow import made_of, needed, origins, origins_of
from ..program.ir import Equation, Program, Value
from ..program.sizes import nbytes
from .layers import stage_of

_SMALL = 16  # a number made of parameters travels, rather than they, where it is so many times smaller


@dataclass(frozen=True)
class Stage:
    """One stage of a loss.

    `ins`: the values that it has from the stage before, `outs` those that it hands to the next; a value that skips
    stages is handed on by each. `parameters`, `others`: the positions of the inputs that it reads, the differentiated
    ones and the rest. `gives`: the positions of the outputs that it makes.
    """

    number: int
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    parameters: tuple[int, ...]
    others: tuple[int, ...]
    gives: tuple[int, ...]


def stages_of(loss: Program, trained: Collection[int], stages: int) -> tuple[Stage, ...]:
    """The stages of `loss`, whose equations are in the scopes of theirs; `trained` are the positions of parameters.

    Equations in no scope are run by every stage that reads what they make, but for small numbers made of parameters
    alone, such as penalties on weights: those are made where the parameters are, and travel.
    """
    at = {e.index: s for e in loss.top.equations if (s := stage_of(e)) is not None}
    at |= _pinned(loss, [loss.inputs[i] for i in trained], at, stages)
    made = {v: at[e.index] for e in loss.top.equations if e.index in at for v in e.outs}
    gives: dict[int, list[int]] = defaultdict(list)
    for j, v in enumerate(loss.outputs):
        gives[made.get(v, stages - 1) if v is not None else stages - 1].append(j)
    last_read = _last_read(loss, at, made, stages)
    every = []
    ins: tuple[Value, ...] = ()
    for s in range(stages):
        outs = tuple(v for v, stage in made.items() if stage <= s < last_read.get(v, -1))
        wanted = {v for v in outs if made[v] == s} | {
            v for j in gives[s] if (v := loss.outputs[j]) is not None
        }
        read = inputs_read(loss, wanted, ins)
        every.append(
            Stage(
                s,
                ins,
                outs,
                tuple(i for i in read if i in trained),
                tuple(i for i in read if i not in trained),
                tuple(gives[s]),
            )
        )
        ins = outs
    return tuple(every)


def _last_read(loss: Program, at: dict[int, int], made: dict[Value, int], stages: int) -> dict[Value, int]:
    """The last stage that reads each value that a stage makes, by its own equations or by free ones that they read."""
    last: dict[Value, int] = {}
    behind = origins(loss.top, made)
    for e in loss.top.equations:
        if e.index in at:
            for v in origins_of(e, behind):
                last[v] = max(last.get(v, -1), at[e.index])
    for v in loss.outputs:  # what is in no stage the last one gives
        if v is not None and v not in made:
            last.update(dict.fromkeys(behind.get(v, frozenset()), stages - 1))
    return last


def inputs_read(program: Program, wanted: Iterable[Value], known: Iterable[Value]) -> list[int]:
    """The positions of the inputs that `wanted` are made of, not looking behind what is known."""
    wanted, known = set(wanted), set(known)
    indices = needed(program.top, wanted - known, known)
    read = {v for e in program.top.equations if e.index in indices for v in e.ins} | wanted
    return [i for i, v in enumerate(program.inputs) if v in read]


def _pinned(loss: Program, parameters: Collection[Value], at: dict[int, int], stages: int) -> dict[int, int]:
    """The stage of each equation that makes a small number of parameters alone, where they are on one stage."""
    free = [e for e in loss.top.equations if e.index not in at and e.outs]
    mixed = made_of(loss.top, [v for v in loss.inputs if v not in parameters])
    of = origins(loss.top, parameters)

    def small(e: Equation) -> bool:
        size = sum(nbytes(loss.avals[p]) for p in of.get(e.outs[0], ()))
        made = sum(nbytes(loss.avals[v]) for v in e.outs)
        return e.outs[0] in of and e.outs[0] not in mixed and _SMALL * made <= size

    sums = {e.index for e in free if small(e)}
    stop = {v for e in free if e.index in sums for v in e.outs}
    users: dict[Value, set[int]] = defaultdict(set)
    for s in range(stages):
        mine = {v for e in loss.top.equations if at.get(e.index) == s for v in e.ins if v is not None}
        run = needed(
            loss.top, mine - stop, stop | {v for e in loss.top.equations if e.index in at for v in e.outs}
        )
        read = mine | {v for e in free if e.index in run for v in e.ins if v is not None}
        for p in read & set(parameters):
            users[p].add(s)
    pinned: dict[int, int] = {}
    where: dict[Value, int] = {}
    for e in free:
        if e.outs[0] in mixed:
            continue
        behind = {where[v] for v in e.ins if v is not None and v in where}
        own = {s for p in of[e.outs[0]] for s in users[p]} if e.index in sums else set()
        if behind or len(own) == 1:
            pinned[e.index] = max(behind | own)
            where.update(dict.fromkeys(e.outs, pinned[e.index]))
    return _before_their_readers(loss, at, pinned)


def _before_their_readers(loss: Program, at: dict[int, int], pinned: dict[int, int]) -> dict[int, int]:
    """`pinned` without what a stage before its own reads: that stage makes it itself."""
    makers = {v: e.index for e in loss.top.equations if e.index in pinned for v in e.outs}
    while True:
        early = {
            makers[v]
            for e in loss.top.equations
            if (s := at.get(e.index, pinned.get(e.index))) is not None
            for v in e.ins
            if v in makers and pinned.get(makers[v], s) > s
        }
        if not early & pinned.keys():
            return pinned
        pinned = {i: s for i, s in pinned.items() if i not in early}
