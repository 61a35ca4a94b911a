"""Split a step into pipeline stages: array locations and programs of each rank, as data.

Footgun: arrays are named by values of the outer program (the step without its gradient calls), with one value per piece
of a scanned weight. An input of the step is not such a value.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax.numpy as jnp

from ..errors import ShardError
from ..gradients.accumulate import AccumulatedGradient
from ..program.gradient_calls import GradientCall
from ..program.ir import Equation, Program, Value
from ..schedule import Schedule
from ..schedule.actions import entry_actions as split_up
from .equation_groups import RankAssignment, assign_ranks
from .outer_program import Bounds, OuterProgram, gradient_calls, make_outer_program
from .programs import StageProgram
from .split_loss import SplitLoss, SplitOptions, split_loss, unsplit_loss
from .stages import make_stages


@dataclass(frozen=True)
class ValuePieces:
    """A value at the boundary of the outer program, in one or several pieces.

    Attributes:
        values: Values in the outer program, in order.
    """

    values: tuple[Value, ...]


class LossStages:
    """One loss of a step, split into the stages of a schedule and numbered as there.

    Args:
        number: Position of the loss in the step, from 0.
        call: Its gradient call over microbatches.
        marked: The equation of the gradient call.
        schedule: The schedule.
        options: How to split the loss.

    Attributes:
        traceback: Traceback of the gradient call.
        first_operand: Number of inputs of a microbatch's loss before the operands of the call: its rows, then sums of
            the batch.
        split_loss: The split loss; all of it in the last stage after a failed split.
        split_error: The error of a failed split, else None.
        trained: Positions of the parameters among the inputs.
        programs: Programs of each stage.
        operands: Operands of the call, as values of the outer program.
        results: Results of the call, as values of the outer program.
        input_values: Outer value of each input of the loss from an operand; an array in pieces has one input per piece.
        gradient_values: Outer value of the gradient of each parameter input.
    """

    def __init__(
        self, number: int, call: AccumulatedGradient, marked: Equation, schedule: Schedule, options: SplitOptions
    ):
        gradient: GradientCall = marked.params["gradient"]
        self.number, self.call, self.gradient, self._schedule = number, call, gradient, schedule
        self.traceback = marked.jaxpr_eqn.source_info.traceback
        each = schedule.stages_per_loss
        self.stages = range(number * each, (number + 1) * each)
        self.first_operand = first = 1 + len(call.followed.full_batch_values)
        parameters = {first + k for k in gradient.differentiated_positions}
        examples = {0} | {first + k for k in call.data}
        weights = parameters | {first + k for k in _frozen_weights(call, gradient)}
        self.split_error: ShardError | None = None
        try:
            self.split_loss: SplitLoss = split_loss(call.loss, weights, examples, each, schedule.chunks, options)
        except ShardError as error:
            # Not raised here: the step runs as a pipeline if any of its losses can be split.
            self.split_error, self.split_loss = error, unsplit_loss(call.loss, weights, each)
        self.trained = {i for i, p in enumerate(self.split_loss.pieces) if p.operand in parameters}
        # Operand 0, the rows of a microbatch, counts as examples.
        example_inputs = {i for i, p in enumerate(self.split_loss.pieces) if p.operand - first in {-first, *call.batch}}
        halved_stages = {
            a.stage for row in schedule.grid for step in row for a in split_up(step) if a.kind in ("I", "W")
        }
        local_stages = make_stages(self.split_loss.program, self.trained, each)
        numbered = (replace(stage, number=s) for s, stage in zip(self.stages, local_stages, strict=True))
        self.programs = [
            StageProgram(self.split_loss.program, stage, example_inputs, stage.number in halved_stages)
            for stage in numbered
        ]

    @property
    def operand_bounds(self) -> dict[int, tuple[int, ...]]:
        """Piece bounds of the operands in pieces, by operand position."""
        ends: dict[int, list[int]] = defaultdict(lambda: [0])
        for piece in self.split_loss.pieces:
            if piece.end_layer is not None:
                ends[piece.operand - self.first_operand].append(piece.end_layer)
        return {k: tuple(rows) for k, rows in ends.items()}

    @cached_property
    def stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """Stages of this loss on each rank."""
        return tuple(tuple(s for s in stages if s in self.stages) for stages in self._schedule.stages_of)

    @cached_property
    def reader_stages(self) -> dict[int, tuple[int, ...]]:
        """Stages that read each input of the loss, in order."""
        users: dict[int, list[int]] = defaultdict(list)
        for program in self.programs:
            stage = program.stage
            for i in (*stage.parameters, *stage.other_inputs):
                users[i].append(stage.number)
        return {i: tuple(stages) for i, stages in users.items()}

    @property
    def loss_rank(self) -> int:
        """The rank of the last stage, where the loss is computed."""
        return self._schedule.rank_of[self.stages[-1]]

    def owner_rank(self, i: int) -> int:
        """Return the rank that owns an input of the loss: the rank of its first reader."""
        stages = self.reader_stages.get(i)
        return self.loss_rank if not stages else self._schedule.rank_of[stages[0]]

    def stage_program(self, s: int) -> StageProgram:
        """Return the programs of stage s of the schedule."""
        return self.programs[s - self.stages[0]]

    def output_source(self, j: int) -> tuple[int, int]:
        """Return the stage that computes output j of a microbatch's loss, and its position among the forward
        outputs."""
        for program in self.programs:
            if j in program.stage.loss_outputs:
                return program.stage.number, len(program.stage.outgoing) + program.stage.loss_outputs.index(j)
        raise LookupError(f"no stage makes output {j} of the loss")

    def set_operands(self, operands: Sequence[ValuePieces], results: Sequence[ValuePieces]) -> None:
        """Set the values of the outer program for the operands and results of the call.

        Args:
            operands: One entry per operand.
            results: One entry per result.
        """
        self.operands, self.results = operands, results
        self.input_values, seen = {}, defaultdict[int, int](int)
        for i, piece in enumerate(self.split_loss.pieces):
            k = piece.operand - self.first_operand
            if k >= 0:
                self.input_values[i] = operands[k].values[seen[k]]
                seen[k] += 1
        self.gradient_values: dict[int, Value] = {}
        for n, k in enumerate(self.gradient.differentiated_positions):
            mine = [i for i, p in enumerate(self.split_loss.pieces) if p.operand == self.first_operand + k]
            self.gradient_values.update(zip(mine, results[self.gradient.num_outputs + n].values, strict=True))

    @property
    def result_ranks(self) -> Mapping[Value, int]:
        """Ranks of the results: gradients with their parameters, state with the stage that computes it, the rest on
        `loss_rank`."""
        given = len(self.call.outputs.computed)
        carried = {
            j: self._schedule.rank_of[self.output_source(given + n)[0]] for n, j in enumerate(self.call.outputs.carried)
        }
        places = {
            v: carried.get(j, self.loss_rank) for j in range(self.gradient.num_outputs) for v in self.results[j].values
        }
        return places | {v: self.owner_rank(i) for i, v in self.gradient_values.items()}

    @property
    def combined_results(self) -> list[Value]:
        """Results combined from all microbatches on `loss_rank`: all except gradients and state."""
        outs = range(len(self.call.large.outputs))
        return [self.results[j].values[0] for j in outs if j not in self.call.outputs.carried]


def _frozen_weights(call: AccumulatedGradient, gradient: GradientCall) -> list[int]:
    """Return the positions of weights without gradient: floating-point arrays that are neither examples nor state."""
    others = {*call.data, *call.outputs.carried.values(), *gradient.differentiated_positions}
    avals = call.small.closed.in_avals
    return [k for k, a in enumerate(avals) if k not in others and a.shape and jnp.issubdtype(a.dtype, jnp.inexact)]


class SplitStep:
    """A flat step, divided over the ranks of a schedule.

    Args:
        step: The flat program, with each gradient call as one equation.
        calls: The gradient calls over microbatches, in order.
        schedule: A schedule with one loss per gradient call.
        state: Pairs of an input of the step and the output that replaces it in the next step.
        batch: Inputs that hold examples.
        wishes: How to split each loss.

    Raises:
        ShardError: None of the losses can be split.
    """

    def __init__(
        self,
        step: Program,
        calls: Sequence[AccumulatedGradient],
        schedule: Schedule,
        state: Sequence[tuple[int, int]],
        batch: Sequence[int],
        wishes: Sequence[SplitOptions],
    ):
        self.schedule = schedule
        call_equations = gradient_calls(step)
        self.losses = [
            LossStages(n, call, e, schedule, option)
            for n, (call, e, option) in enumerate(zip(calls, call_equations, wishes, strict=True))
        ]
        if (error := self.losses[0].split_error) is not None and all(loss.split_error for loss in self.losses):
            raise error
        self.outer: OuterProgram = make_outer_program(step, [loss.operand_bounds for loss in self.losses])
        self._assign_values(state, batch)

    @cached_property
    def programs(self) -> list[StageProgram]:
        """The programs of all stages of the schedule."""
        return [program for loss in self.losses for program in loss.programs]

    def loss_of(self, stage: int) -> LossStages:
        """Return the loss to which a stage belongs."""
        return self.losses[stage // self.schedule.stages_per_loss]

    @cached_property
    def leaf_of(self) -> dict[Value, int]:
        """Position of the step input behind each value of the outer program that is an input, or a piece of one."""
        return {v: i for i, part in enumerate(self.leaves) for v in part.values}

    @property
    def loss_rank(self) -> int:
        """The rank of the last stage, where the losses are computed."""
        return self.schedule.rank_of[-1]

    def _assign_values(self, state: Sequence[tuple[int, int]], batch: Sequence[int]) -> None:
        """Name the inputs and outputs of the outer program, and assign ranks to its equations."""
        program, a = self.outer.program, self.outer
        outs = (v for v in program.outputs if v is not None)  # the outer program returns no literals
        ins = iter(program.inputs)
        self.leaves = _take_pieces(ins, a.leaves)
        results = [_take_pieces(ins, cuts) for cuts in a.results]
        operands = [_take_pieces(outs, cuts) for cuts in a.operands]
        self.outputs = _take_pieces(outs, a.outputs)
        for loss, own, made in zip(self.losses, operands, results, strict=True):
            loss.set_operands(own, made)
        reader_ranks: dict[Value, int] = {}
        for loss in self.losses:
            for i, v in loss.input_values.items():
                reader_ranks.setdefault(v, loss.owner_rank(i))
        self.state_values = [  # pairs of a value before the step and its replacement after the step
            pair
            for i, o in state
            if len(self.leaves[i].values) == len(self.outputs[o].values)
            for pair in zip(self.leaves[i].values, self.outputs[o].values, strict=True)
        ]
        self.assignment: RankAssignment = assign_ranks(
            program,
            [loss.result_ranks for loss in self.losses],
            reader_ranks,
            self.state_values,
            self.loss_rank,
            [list(loss.input_values.values()) for loss in self.losses],
            [v for i in batch for v in self.leaves[i].values],
        )


def _take_pieces(values: Iterator[Value], cuts: Sequence[Bounds]) -> tuple[ValuePieces, ...]:
    """Take the values of each array from an iterator: one, or one per piece."""
    return tuple(ValuePieces(tuple(next(values) for _ in range(1 if cut is None else len(cut) - 1))) for cut in cuts)
