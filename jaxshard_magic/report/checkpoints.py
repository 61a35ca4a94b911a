"""Cost of saving a loop's state."""

from dataclasses import dataclass

MAX_SAVES = 200  # saves listed one by one in a report


@dataclass(frozen=True)
class Save:
    """A single save.

    Attributes:
        step: Step of the saved state.
        seconds: Time for which the loop was blocked.
        bytes: Size of the arrays.
    """

    step: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of a loop.

    Attributes:
        folder: Folder of the checkpoints.
        every: Interval, as written by the user.
        saves: Newest saves, at most 200.
        count: Number of all saves.
        seconds: Time of all saves together.
        resumed: Step at which the loop resumed; None for a loop from the start.
        copy: Bytes on the fullest device in addition to the step while a save is written: a copy of the state that the
            step would have donated. 0 if the step donates nothing, None before the first save.
    """

    folder: str
    every: str
    saves: tuple[Save, ...] = ()
    count: int = 0
    seconds: float = 0.0
    resumed: int | None = None
    copy: int | None = None
