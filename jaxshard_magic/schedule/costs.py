"""Costs of pipeline actions: time of each stage's actions, and time of a transfer to the next rank."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from jaxshard_magic.errors import ShardError

Cost = float | Sequence[float]


class PerStage(NamedTuple):
    """Costs of all stages, each a list with a number per stage.

    Attributes:
        forward: Time of a forward action.
        input_grad: Time of an input gradient.
        weight_grad: Time of a weight gradient.
        backward: Time of a full backward action, the sum of both gradients.
        transfer: Time of a stage's result to another rank.
        kept_for_weight_grad: Share, 0 to 1, of a microbatch's activations held between input and weight gradient.
    """

    forward: list[float]
    input_grad: list[float]
    weight_grad: list[float]
    backward: list[float]
    transfer: list[float]
    kept_for_weight_grad: list[float]


@dataclass(frozen=True)
class Costs:
    """Costs of actions, each a number for all stages or a number per stage, in any unit of time.

    Args:
        forward: Time of the forward action of a microbatch, 1 by default.
        input_grad: Time of the input gradient, 1 by default. A full backward action takes `input_grad + weight_grad`.
        weight_grad: Time of the weight gradient, 1 by default.
        transfer: Time of a stage's result, activations or their gradients, to another rank, 0 by default. The sending
            rank continues with other actions meanwhile.
        kept_for_weight_grad: Share, 0 to 1, of a microbatch's activations held between its input gradient and its
            weight gradient, 1 by default.

    Raises:
        ShardError: A number below 0 or not finite, or a share above 1.
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
                raise ShardError(f"cost {name} is {given!r}; write a number, or a list of one number per stage")
            for stage, number in enumerate([given] if one else given):
                _check(name, number, None if one else stage)
            # The usual way to normalize fields of a frozen dataclass, which refuses assignment.
            object.__setattr__(self, name, float(given) if one else tuple(map(float, given)))

    def per_stage(self, stages: int) -> PerStage:
        """Return the costs of each of `stages` stages.

        Raises:
            ShardError: A list has another length.
        """
        forward, input_grad, weight_grad, transfer, kept = (
            self._list(name, stages) for name in ("forward", "input_grad", "weight_grad", "transfer", _KEPT)
        )
        backward = [i + w for i, w in zip(input_grad, weight_grad, strict=True)]
        return PerStage(forward, input_grad, weight_grad, backward, transfer, kept)

    def even(self, stages: int, losses: int = 1) -> "Costs":
        """Return costs with each loss's work spread evenly over its stages, and without transfer time.

        Args:
            stages: Number of stages of all losses together.
            losses: Number of losses, each with `stages // losses` stages.
        """
        own, each = self.per_stage(stages), stages // losses

        def evened(numbers: list[float]) -> list[float]:
            means = (sum(numbers[s : s + each]) / each for s in range(0, stages, each))
            return [mean for mean in means for _ in range(each)]

        forward, input_grad, weight_grad = map(evened, own[:3])
        return Costs(forward, input_grad, weight_grad, 0.0, self.kept_for_weight_grad)

    def without_transfer(self) -> "Costs":
        """Return the same costs with transfers that take no time."""
        return Costs(self.forward, self.input_grad, self.weight_grad, 0.0, self.kept_for_weight_grad)

    def _list(self, name: str, stages: int) -> list[float]:
        """Return a cost as a list with a number per stage."""
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
    """Raise ShardError for a cost that is no number in its range."""
    of = "" if stage is None else f" of stage {stage}"
    allowed = "a share from 0 to 1" if name == _KEPT else "a number from 0"
    # A bool is a Real, but not a valid cost.
    numeric = isinstance(number, Real) and not isinstance(number, bool)
    if not numeric or not 0 <= float(number) <= (1 if name == _KEPT else sys.float_info.max):
        raise ShardError(f"cost {name}{of} is {number!r}; it must be {allowed}")
