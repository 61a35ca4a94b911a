"""What saving a loop's state cost it."""

from dataclasses import dataclass

MOST = 200  # saves that a report has one by one


@dataclass(frozen=True)
class Save:
    """One save: the `step` that it has the state of, the `seconds` that the loop stood still for it, and the `bytes` of
    its arrays."""

    step: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a loop.

    `every` as it was written. `saves`: the newest, at most 200; `count` of all, and the `seconds` that they took
    together. `resumed`: the step at which the loop went on, None where it began. `copy`: bytes that the fullest device
    holds beside the step while a save is written, the state that the step would have taken over; 0 where it takes
    nothing over, None before the first save.
    """

    folder: str
    every: str
    saves: tuple[Save, ...] = ()
    count: int = 0
    seconds: float = 0.0
    resumed: int | None = None
    copy: int | None = None
