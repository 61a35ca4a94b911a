"""One loss of a step in the stages of a schedule: what each runs, and which values of the step it reads."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax.numpy as jnp

from ..errors import ShardError
from ..gradients.accumulate import Accumulated
from ..program.capture import Gradient
from ..program.ir import Equation, Value
from ..schedule import Schedule
from ..schedule.actions import parts as split_up
from .loss import CutLoss, Wish, cut_loss, whole_loss
from .programs import StageProgram
from .stages import stages_of


@dataclass(frozen=True)
class Part:
    """A value of the step around its gradient calls, in one piece or several: its values there, in order."""

    values: tuple[Value, ...]


class LossStages:
    """The `number`th loss of a step, counted from 0, in the stages that `schedule` has for it, numbered as there.

    `call`: its gradient call over microbatches, `marked` in the step; `traceback`: of that. `first`: how many inputs a
    microbatch's loss has before the operands of the call. `cut`: that loss, cut; whole on the last stage, where `uncut`
    says why it can't be. `trained`: which of its inputs are parameters. `programs`: of each stage.
    """

    def __init__(self, number: int, call: Accumulated, marked: Equation, schedule: Schedule, wish: Wish):
        gradient: Gradient = marked.params["gradient"]
        self.number, self.call, self.gradient, self._schedule = number, call, gradient, schedule
        self.traceback = marked.eqn.source_info.traceback
        each = schedule.stages_of_loss
        self.stages = range(number * each, (number + 1) * each)
        self.first = first = 1 + len(call.followed.norms)  # its rows, sums of the batch
        parameters = {first + k for k in gradient.differentiated}
        examples = {0} | {first + k for k in call.data}
        weights = parameters | {first + k for k in _frozen(call, gradient)}
        self.uncut: ShardError | None = None
        try:
            self.cut: CutLoss = cut_loss(call.loss, weights, examples, each, schedule.chunks, wish)
        except ShardError as error:
            self.uncut, self.cut = error, whole_loss(call.loss, weights, each)
        self.trained = {i for i, p in enumerate(self.cut.pieces) if p.operand in parameters}
        varying = {i for i, p in enumerate(self.cut.pieces) if p.operand - first in {-first, *call.batch}}
        halved = {
            a.stage for row in schedule.grid for step in row for a in split_up(step) if a.kind in ("I", "W")
        }
        own = stages_of(self.cut.program, self.trained, each)
        numbered = (replace(stage, number=s) for s, stage in zip(self.stages, own, strict=True))
        self.programs = [
            StageProgram(self.cut.program, stage, varying, stage.number in halved) for stage in numbered
        ]

    @property
    def bounds(self) -> dict[int, tuple[int, ...]]:
        """The bounds of each operand of the gradient call that comes in pieces."""
        ends: dict[int, list[int]] = defaultdict(lambda: [0])
        for piece in self.cut.pieces:
            if piece.end is not None:
                ends[piece.operand - self.first].append(piece.end)
        return {k: tuple(rows) for k, rows in ends.items()}

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Its stages on each rank."""
        return tuple(tuple(s for s in stages if s in self.stages) for stages in self._schedule.stages_of)

    @cached_property
    def users(self) -> dict[int, tuple[int, ...]]:
        """Of each input of the loss the stages that read it, in order."""
        users: dict[int, list[int]] = defaultdict(list)
        for program in self.programs:
            stage = program.stage
            for i in (*stage.parameters, *stage.others):
                users[i].append(stage.number)
        return {i: tuple(stages) for i, stages in users.items()}

    @property
    def hub(self) -> int:
        """The rank of its last stage, which makes the loss."""
        return self._schedule.rank_of[self.stages[-1]]

    def owner(self, i: int) -> int:
        """The rank where an input of the loss lives: of the first stage that reads it."""
        stages = self.users.get(i)
        return self.hub if not stages else self._schedule.rank_of[stages[0]]

    def program(self, s: int) -> StageProgram:
        """That of stage s of the schedule."""
        return self.programs[s - self.stages[0]]

    def giver(self, j: int) -> tuple[int, int]:
        """The stage that makes output j of a microbatch's loss, and where among what it makes."""
        for program in self.programs:
            if j in program.stage.gives:
                return program.stage.number, len(program.stage.outs) + program.stage.gives.index(j)
        raise LookupError(f"no stage makes output {j} of the loss")

    def give_operands(self, operands: Sequence[Part], results: Sequence[Part]) -> None:
        """Take the values around the gradient calls that are its operands and its results."""
        self.operands, self.results = operands, results
        self.input_of, seen = {}, defaultdict[int, int](int)
        for i, piece in enumerate(self.cut.pieces):
            k = piece.operand - self.first
            if k >= 0:
                self.input_of[i] = operands[k].values[seen[k]]
                seen[k] += 1
        self.gradient_of: dict[int, Value] = {}
        for n, k in enumerate(self.gradient.differentiated):
            mine = [i for i, p in enumerate(self.cut.pieces) if p.operand == self.first + k]
            self.gradient_of.update(zip(mine, results[self.gradient.outs + n].values, strict=True))

    @property
    def places(self) -> Mapping[Value, int]:
        """The ranks where its results are made: gradients where their parameters live, state where it is handed on."""
        given = len(self.call.outputs.given)
        carried = {
            j: self._schedule.rank_of[self.giver(given + n)[0]]
            for n, j in enumerate(self.call.outputs.carried)
        }
        places = {
            v: carried.get(j, self.hub) for j in range(self.gradient.outs) for v in self.results[j].values
        }
        return places | {v: self.owner(i) for i, v in self.gradient_of.items()}

    @property
    def made_by_hub(self) -> list[Value]:
        """The results that the hub makes of what microbatches give: all but gradients and state."""
        outs = range(len(self.call.large.outputs))
        return [self.results[j].values[0] for j in outs if j not in self.call.outputs.carried]


def _frozen(call: Accumulated, gradient: Gradient) -> list[int]:
    """The operands that are weights as well, but not differentiated: arrays of numbers that are not the examples', nor
    state of the loss."""
    others = {*call.data, *call.outputs.carried.values(), *gradient.differentiated}
    avals = call.small.closed.in_avals
    return [
        k for k, a in enumerate(avals) if k not in others and a.shape and jnp.issubdtype(a.dtype, jnp.inexact)
    ]
