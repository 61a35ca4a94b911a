"""Last recorded call of a step, and its plan with other code in the user's functions."""

import ast
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ShardError
from ..program.flatten_call import FlatCall
from .swap import swap_code

if TYPE_CHECKING:
    from ..compilation.compiled_step import CompiledStep
    from ..compilation.planned_call import PlannedCall
    from ..step import ShardedStep


def last_call(step: "ShardedStep") -> tuple["CompiledStep", FlatCall]:
    """Return the compiled program of the step's last call, and the call with its arrays as shapes.

    Raises:
        ShardError: The step has neither run nor been compiled.
    """
    entry = step.entry
    if entry is None or entry.call_shapes is None:
        raise ShardError(f"{step.name} has neither run nor been compiled; call it, then write its code")
    return entry, entry.call_shapes


def plan_with_code(
    step: "ShardedStep", trees: Mapping[str, tuple[ast.Module, ast.Module]], given: Mapping[str, Any]
) -> "PlannedCall":
    """Plan the last call again while the user's functions run other code.

    Args:
        step: A step with a recorded call.
        trees: Original and changed syntax tree of each cell.
        given: Further names for the changed code, with values.
    """
    with swap_code(trees, given):
        return step.programs.planned_for(last_call(step)[1])
