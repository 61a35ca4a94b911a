"""A step split into the stages of a pipeline: which arrays live where, and what each rank runs, as data."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp

from ..gradients.accumulate import Accumulated
from ..program.capture import Gradient
from ..program.ir import Program, Value
from ..schedule import Schedule
from ..schedule.actions import parts as split_up
from .around import Around, around, gradient_call
from .loss import BY_FLOPS, CutLoss, Wish, cut_loss
from .places import Placed, placed
from .programs import StageProgram
from .stages import stages_of


@dataclass(frozen=True)
class Part:
    """A value of the step around the gradient call, in one piece or several: its values there, in order."""

    values: tuple[Value, ...]


class Split:
    """`step`, a flat program with one gradient call, over the ranks of `schedule`.

    `call` is its gradient call over microbatches; `state` pairs inputs of the step with the outputs that take their
    place; `batch` are the inputs that hold examples. `wish`: where the loss is to be cut.
    """

    def __init__(
        self,
        step: Program,
        call: Accumulated,
        schedule: Schedule,
        state: Sequence[tuple[int, int]],
        batch: Sequence[int],
        wish: Wish = BY_FLOPS,
    ):
        self.schedule, self.call = schedule, call
        gradient: Gradient = gradient_call(step).params["gradient"]
        first = 1 + len(call.followed.norms)  # inputs of a microbatch's loss: its rows, sums of the batch
        parameters = {first + k for k in gradient.differentiated}
        examples = {0} | {first + k for k in call.data}
        parts = schedule.stages * schedule.chunks
        weights = parameters | {first + k for k in _frozen(call, gradient)}
        self.loss: CutLoss = cut_loss(call.loss, weights, examples, parts, schedule.chunks, wish)
        self.trained = {i for i, p in enumerate(self.loss.pieces) if p.operand in parameters}
        varying = {i for i, p in enumerate(self.loss.pieces) if p.operand - first in {-first, *call.batch}}
        halved = {
            a.stage for row in schedule.grid for step in row for a in split_up(step) if a.kind in ("I", "W")
        }
        self.programs = [
            StageProgram(self.loss.program, stage, varying, stage.number in halved)
            for stage in stages_of(self.loss.program, self.trained, parts)
        ]
        self.first = first
        self.around: Around = around(step, _bounds(self.loss, first))
        self._place(gradient, state, batch)

    @cached_property
    def users(self) -> dict[int, tuple[int, ...]]:
        """Of each input of the loss the stages that read it, in order."""
        users: dict[int, list[int]] = defaultdict(list)
        for program in self.programs:
            stage = program.stage
            for i in (*stage.parameters, *stage.others):
                users[i].append(stage.number)
        return {i: tuple(stages) for i, stages in users.items()}

    @cached_property
    def leaf_of(self) -> dict[Value, int]:
        """Of each value around the gradient call that is an input of the step, or a piece of one, which."""
        return {v: i for i, part in enumerate(self.leaves) for v in part.values}

    @property
    def hub(self) -> int:
        """The rank of the last stage: the loss is there."""
        return self.schedule.rank_of[-1]

    def owner(self, i: int) -> int:
        """The rank where an input of the loss lives: of the first stage that reads it."""
        stages = self.users.get(i)
        return self.hub if not stages else self.schedule.rank_of[stages[0]]

    def _place(self, gradient: Gradient, state: Sequence[tuple[int, int]], batch: Sequence[int]) -> None:
        program, a = self.around.program, self.around
        leaves = _parts(program.inputs, a.leaves, 0)
        results = _parts(program.inputs, a.results, sum(len(p.values) for p in leaves))
        outs = [v for v in program.outputs if v is not None]  # `around` gives no literals
        self.operands = _parts(outs, a.operands, 0)
        self.outputs = _parts(outs, a.outputs, sum(len(p.values) for p in self.operands))
        self.leaves, self.results = leaves, results
        self.input_of = self._inputs()
        given: dict[Value, int] = {}
        carried = dict(zip(self.call.outputs.carried, self._state_ranks(), strict=True))
        for j in range(gradient.outs):
            given.update((v, carried.get(j, self.hub)) for v in results[j].values)
        wanted: dict[Value, int] = {}
        self.gradient_of: dict[int, Value] = {}
        for i, v in self.input_of.items():
            wanted.setdefault(v, self.owner(i))
        for n, k in enumerate(gradient.differentiated):
            mine = [i for i, p in enumerate(self.loss.pieces) if p.operand == self.first + k]
            for i, v in zip(mine, results[gradient.outs + n].values, strict=True):
                given[v], self.gradient_of[i] = self.owner(i), v
        same = [
            pair
            for i, o in state
            if len(leaves[i].values) == len(self.outputs[o].values)
            for pair in zip(leaves[i].values, self.outputs[o].values, strict=True)
        ]
        everywhere = [v for i in batch for v in leaves[i].values]
        self.placed: Placed = placed(
            program, given, wanted, same, self.hub, list(self.input_of.values()), everywhere
        )

    def _inputs(self) -> dict[int, Value]:
        """The value around the call of each input of the loss that is an operand of the call, or a piece of one."""
        inputs, seen = {}, defaultdict(int)
        for i, piece in enumerate(self.loss.pieces):
            k = piece.operand - self.first
            if k >= 0:
                inputs[i] = self.operands[k].values[seen[k]]
                seen[k] += 1
        return inputs

    def _state_ranks(self) -> list[int]:
        """The rank that makes each output that a microbatch hands to the next."""
        given = len(self.call.outputs.given)
        where = {j: p.stage.number for p in self.programs for j in p.stage.gives}
        n = len(self.call.outputs.carried)
        return [self.schedule.rank_of[where[given + s]] for s in range(n)]


def _frozen(call: Accumulated, gradient: Gradient) -> list[int]:
    """The operands that are weights as well, but not differentiated: arrays of numbers that are not the examples', nor
    state of the loss."""
    others = {*call.data, *call.outputs.carried.values(), *gradient.differentiated}
    avals = call.small.closed.in_avals
    return [
        k for k, a in enumerate(avals) if k not in others and a.shape and jnp.issubdtype(a.dtype, jnp.inexact)
    ]


def _bounds(loss: CutLoss, first: int) -> dict[int, tuple[int, ...]]:
    """The bounds of each operand of the gradient call that comes in pieces."""
    ends: dict[int, list[int]] = defaultdict(lambda: [0])
    for piece in loss.pieces:
        if piece.end is not None:
            ends[piece.operand - first].append(piece.end)
    return {k: tuple(rows) for k, rows in ends.items()}


def _parts(values: Sequence[Value], cuts: Sequence[tuple[int, ...] | None], start: int) -> tuple[Part, ...]:
    parts, at = [], start
    for cut in cuts:
        n = 1 if cut is None else len(cut) - 1
        parts.append(Part(tuple(values[at : at + n])))
        at += n
    return tuple(parts)
