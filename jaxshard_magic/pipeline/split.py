"""A step split into the stages of a pipeline: which arrays live where, and what each rank runs, as data."""

from collections.abc import Iterator, Sequence
from functools import cached_property

from ..gradients.accumulate import Accumulated
from ..program.ir import Program, Value
from ..schedule import Schedule
from .around import Around, Bounds, around, gradient_calls
from .loss import Wish
from .loss_stages import LossStages, Part
from .places import Placed, placed
from .programs import StageProgram


class Split:
    """`step`, a flat program, over the ranks of `schedule`, which has a loss for each of its gradient calls.

    `calls` are these over microbatches, in order; `state` pairs inputs of the step with the outputs that take their
    place; `batch` are the inputs that hold examples. `wishes`: where each loss is to be cut. Raises ShardError where
    none of the losses can be.
    """

    def __init__(
        self,
        step: Program,
        calls: Sequence[Accumulated],
        schedule: Schedule,
        state: Sequence[tuple[int, int]],
        batch: Sequence[int],
        wishes: Sequence[Wish],
    ):
        self.schedule = schedule
        marked = gradient_calls(step)
        self.losses = [
            LossStages(n, call, e, schedule, wish)
            for n, (call, e, wish) in enumerate(zip(calls, marked, wishes, strict=True))
        ]
        if (why := self.losses[0].uncut) is not None and all(loss.uncut for loss in self.losses):
            raise why
        self.around: Around = around(step, [loss.bounds for loss in self.losses])
        self._place(state, batch)

    @cached_property
    def programs(self) -> list[StageProgram]:
        """Of every stage of the schedule."""
        return [program for loss in self.losses for program in loss.programs]

    def loss_of(self, stage: int) -> LossStages:
        """The loss that a stage belongs to."""
        return self.losses[stage // self.schedule.stages_of_loss]

    @cached_property
    def leaf_of(self) -> dict[Value, int]:
        """Of each value around the gradient calls that is an input of the step, or a piece of one, which."""
        return {v: i for i, part in enumerate(self.leaves) for v in part.values}

    @property
    def hub(self) -> int:
        """The rank of the last stage: the losses are there."""
        return self.schedule.rank_of[-1]

    def _place(self, state: Sequence[tuple[int, int]], batch: Sequence[int]) -> None:
        program, a = self.around.program, self.around
        outs = (v for v in program.outputs if v is not None)  # `around` gives no literals
        ins = iter(program.inputs)
        self.leaves = _parts(ins, a.leaves)
        results = [_parts(ins, cuts) for cuts in a.results]
        operands = [_parts(outs, cuts) for cuts in a.operands]
        self.outputs = _parts(outs, a.outputs)
        for loss, own, made in zip(self.losses, operands, results, strict=True):
            loss.give_operands(own, made)
        wanted: dict[Value, int] = {}
        for loss in self.losses:
            for i, v in loss.input_of.items():
                wanted.setdefault(v, loss.owner(i))
        self.same = [  # values before the step, and those that take their place
            pair
            for i, o in state
            if len(self.leaves[i].values) == len(self.outputs[o].values)
            for pair in zip(self.leaves[i].values, self.outputs[o].values, strict=True)
        ]
        self.placed: Placed = placed(
            program,
            [loss.places for loss in self.losses],
            wanted,
            self.same,
            self.hub,
            [list(loss.input_of.values()) for loss in self.losses],
            [v for i in batch for v in self.leaves[i].values],
        )


def _parts(values: Iterator[Value], cuts: Sequence[Bounds]) -> tuple[Part, ...]:
    """As many of `values` for each as it has pieces."""
    return tuple(Part(tuple(next(values) for _ in range(1 if cut is None else len(cut) - 1))) for cut in cuts)
