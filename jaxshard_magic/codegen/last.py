"""The last kind of call of a step, which a program is written for, and its plan with other text in its functions."""

import ast
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ShardError
from ..program.peel import Peeled
from .swap import swapped

if TYPE_CHECKING:
    from ..step import ShardedStep
    from ..step.entry import Entry
    from ..step.planned import Planned


def last_call(step: "ShardedStep") -> tuple["Entry", Peeled]:
    """The program of the step's last call, and that call. Raises ShardError before the step has run or was compiled."""
    entry = step.entry
    if entry is None or entry.call_of is None:
        raise ShardError(f"{step.name} has neither run nor been compiled; call it, then write its code")
    return entry, entry.call_of


def planned_with(
    step: "ShardedStep", trees: Mapping[str, tuple[ast.Module, ast.Module]], given: Mapping[str, Any]
) -> "Planned":
    """The plan of that call where the step's functions run what `swapped` makes of these arguments."""
    with swapped(trees, given):
        return step.planned_for(last_call(step)[1])
