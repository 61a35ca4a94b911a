"""Actions of a pipeline: the work of a stage on a single microbatch, printed and parsed as `2F0`."""

import re
from collections.abc import Sequence
from typing import NamedTuple, cast

from jaxshard_magic.errors import ShardError

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Action(NamedTuple):
    """Work of a stage on a single microbatch: `2F0` is stage 2, forward, microbatch 0.

    `I` and `W` are the halves of the full backward pass `B`: the input gradient, needed by the stage before, and the
    weight gradient, needed by no other stage.

    Attributes:
        stage: Number of the stage, from 0.
        kind: `F`, `B`, `I` or `W`, a key of `KINDS`.
        microbatch: Number of the microbatch, from 0.

    >>> str(Action(2, "F", 0))
    '2F0'
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Fused(NamedTuple):
    """Actions that run as a unit and hide each other's communication: `2F4+3B1`.

    A fused entry starts when all its parts may start and takes the sum of their times. All parts end together.

    Attributes:
        parts: The actions.
    """

    parts: tuple[Action, ...]

    def __str__(self) -> str:
        return "+".join(str(part) for part in self.parts)


ScheduleEntry = Action | Fused


def entry_actions(step: ScheduleEntry) -> tuple[Action, ...]:
    """Return the actions of a schedule entry: the entry itself, or the parts of a fused entry."""
    return step.parts if isinstance(step, Fused) else (step,)


def flatten_fused(steps: Sequence[ScheduleEntry]) -> Sequence[Action]:
    """Return the actions of `steps` in order, with fused entries replaced by their parts."""
    for step in steps:
        if type(step) is Fused:
            return [part for step in steps for part in entry_actions(step)]
    # Nothing is fused in most schedules: the sequence itself serves, without a copy.
    return cast(Sequence[Action], steps)


def shift_stages(step: ScheduleEntry, stages: int) -> ScheduleEntry:
    """Return the same work with each stage number increased by `stages`."""
    each = tuple(part._replace(stage=part.stage + stages) for part in entry_actions(step))
    return Fused(each) if isinstance(step, Fused) else each[0]


_ACTION = re.compile(r"(\d{1,9})([A-Za-z])(\d{1,9})")


def parse_entry(text: str, where: str = "") -> ScheduleEntry:
    """Parse a single action, or fused actions joined by `+`.

    Args:
        text: The text of an entry.
        where: Prefix of error messages, the position of the text in its source.

    Returns:
        An `Action`, or a `Fused` for several actions.

    Raises:
        ShardError: Any other text.

    >>> parse_entry("2F4+3B1").parts[1]
    Action(stage=3, kind='B', microbatch=1)
    """
    found = tuple(_action(part, where) for part in text.split("+"))
    return found[0] if len(found) == 1 else Fused(found)


def _action(text: str, where: str) -> Action:
    """Parse a single action."""
    match = _ACTION.fullmatch(text)
    if match is None or match[2].upper() not in KINDS:
        kinds = ", ".join(f"{letter} ({name})" for letter, name in KINDS.items())
        raise ShardError(f"{where}'{text}' is no action: write stage, kind, microbatch, as in 2F0; kinds are {kinds}")
    return Action(int(match[1]), match[2].upper(), int(match[3]))
