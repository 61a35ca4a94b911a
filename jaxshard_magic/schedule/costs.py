"""`Costs`: how long a stage's actions take, and how long a result takes to the next rank."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from jaxshard_magic.errors import ShardError

Cost = float | Sequence[float]


class PerStage(NamedTuple):
    """The costs of every stage, each a list of one number per stage."""

    forward: list[float]
    input_grad: list[float]
    weight_grad: list[float]
    backward: list[float]
    transfer: list[float]
    kept: list[float]


@dataclass(frozen=True)
class Costs:
    """What actions cost, each a number for all stages, or one number per stage. Any unit of time; 1 by default.

    Args:
        forward, input_grad, weight_grad: time of one microbatch; the full backward pass takes the latter two together.
        transfer: time that a stage's result, activations or their gradients, takes to reach another rank. The rank goes
            on with other actions meanwhile.
        kept_for_weight_grad: the share, 0 to 1, of a microbatch's activations that is still held between its input and
            its weight gradient.

    Raises ShardError for a number below 0 or not finite, and for a share above 1.
    """

    forward: Cost = 1.0
    input_grad: Cost = 1.0
    weight_grad: Cost = 1.0
    transfer: Cost = 0.0
    kept_for_weight_grad: Cost = 1.0

    def __post_init__(self) -> None:
        for name, given in vars(self).items():
            one = isinstance(given, Real)
            if not one and (isinstance(given, str) or not isinstance(given, Sequence)):
                raise ShardError(
                    f"cost {name} is {given!r}; write a number, or a list of one number per stage"
                )
            for stage, number in enumerate([given] if one else given):
                _check(name, number, None if one else stage)
            object.__setattr__(self, name, float(given) if one else tuple(map(float, given)))

    def per_stage(self, stages: int) -> PerStage:
        """The costs of each of `stages` stages. Raises ShardError where a list has another length."""
        forward, input_grad, weight_grad, transfer, kept = (
            self._list(name, stages) for name in ("forward", "input_grad", "weight_grad", "transfer", _KEPT)
        )
        backward = [i + w for i, w in zip(input_grad, weight_grad, strict=True)]
        return PerStage(forward, input_grad, weight_grad, backward, transfer, kept)

    def even(self, stages: int, losses: int = 1) -> "Costs":
        """The work of each loss spread evenly over its share of `stages` stages, with nothing to wait for between
        ranks."""
        own, each = self.per_stage(stages), stages // losses

        def evened(numbers: list[float]) -> list[float]:
            means = (sum(numbers[s : s + each]) / each for s in range(0, stages, each))
            return [mean for mean in means for _ in range(each)]

        forward, input_grad, weight_grad = map(evened, own[:3])
        return Costs(forward, input_grad, weight_grad, 0.0, self.kept_for_weight_grad)

    def without_transfer(self) -> "Costs":
        """The same costs where results are with the next rank at once."""
        return Costs(self.forward, self.input_grad, self.weight_grad, 0.0, self.kept_for_weight_grad)

    def _list(self, name: str, stages: int) -> list[float]:
        given = getattr(self, name)
        if isinstance(given, float):
            return [given] * stages
        if len(given) != stages:
            raise ShardError(
                f"cost {name} has {len(given)} numbers for {stages} stages; write one per stage, or one for all"
            )
        return list(given)


_KEPT = "kept_for_weight_grad"


def _check(name: str, number: Any, stage: int | None) -> None:
    of = "" if stage is None else f" of stage {stage}"
    allowed = "a share from 0 to 1" if name == _KEPT else "a number from 0"
    numeric = isinstance(number, Real) and not isinstance(number, bool)
    if not numeric or not 0 <= float(number) <= (1 if name == _KEPT else sys.float_info.max):
        raise ShardError(f"cost {name}{of} is {number!r}; it must be {allowed}")
