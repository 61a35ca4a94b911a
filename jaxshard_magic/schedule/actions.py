"""Actions of a pipeline: what a rank does with one microbatch on one stage, printed and parsed as `2F0`."""

import re
from collections.abc import Sequence
from typing import NamedTuple, cast

from jaxshard_magic.errors import ShardError

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Action(NamedTuple):
    """One stage's work on one microbatch: `2F0` is stage 2, forward, microbatch 0.

    `B` is the full backward pass; `I` and `W` are its two halves, the input's gradient, which the stage before waits
    for, and the weights', which nobody waits for.

    >>> str(Action(2, "F", 0))
    '2F0'
    """

    stage: int
    kind: str  # F | B | I | W
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Fused(NamedTuple):
    """Actions that run as one, with their communication hidden behind each other: `2F4+3B1`.

    It starts when all its parts may, takes their time together, and its parts end with it.
    """

    parts: tuple[Action, ...]

    def __str__(self) -> str:
        return "+".join(str(part) for part in self.parts)


Step = Action | Fused


def parts(step: Step) -> tuple[Action, ...]:
    """The actions that `step` is made of: itself alone, where nothing is fused."""
    return step.parts if isinstance(step, Fused) else (step,)


def flat(steps: Sequence[Step]) -> Sequence[Action]:
    """The actions of `steps`, with none fused."""
    for step in steps:
        if type(step) is Fused:
            return [part for step in steps for part in parts(step)]
    return cast(Sequence[Action], steps)


def moved(step: Step, stages: int) -> Step:
    """The same work on stages that are so many further on."""
    each = tuple(part._replace(stage=part.stage + stages) for part in parts(step))
    return Fused(each) if isinstance(step, Fused) else each[0]


_ACTION = re.compile(r"(\d{1,9})([A-Za-z])(\d{1,9})")


def parse_step(text: str, where: str = "") -> Step:
    """The action, or the fused actions, that `text` says.

    >>> parse_step("2F4+3B1").parts[1]
    Action(stage=3, kind='B', microbatch=1)

    Raises ShardError for anything else; `where` says in it where the text stands.
    """
    found = tuple(_action(part, where) for part in text.split("+"))
    return found[0] if len(found) == 1 else Fused(found)


def _action(text: str, where: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None or match[2].upper() not in KINDS:
        kinds = ", ".join(f"{letter} ({name})" for letter, name in KINDS.items())
        raise ShardError(
            f"{where}'{text}' is no action: write stage, kind, microbatch, as in 2F0; kinds are {kinds}"
        )
    return Action(int(match[1]), match[2].upper(), int(match[3]))
