"""Split a step into pipeline stages: array locations and programs of each rank, as data.

Footgun: arrays are named by values of the outer program (the step without its gradient calls), with one value per piece
of a scanned weight. An input of the step is not such a value.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

from ..gradients.accumulate import AccumulatedGradient
from ..program.ir import Program, Value
from ..schedule import Schedule
from .equation_groups import RankAssignment, assign_ranks
from .loss_stages import LossStages, ValuePieces
from .outer_program import Bounds, OuterProgram, gradient_calls, make_outer_program
from .programs import StageProgram
from .split_loss import SplitOptions


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
