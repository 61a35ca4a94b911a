"""Which part of a step an equation belongs to: forward, backward or update."""

from collections.abc import Iterator

from .flow import Flow
from .ir import Equation, Program

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


def phases(program: Program, flow: Flow) -> dict[int, str]:
    """The phase of every equation, by its index.

    jax names the stack of an equation of a gradient call `jvp` in its forward pass and `transpose` in its backward one,
    and all in its bodies belongs there; of the rest, what depends on a gradient is the update, and what only it reads,
    as a step's learning rate. A step that takes no gradients is forward as a whole.
    """
    late, phase_of = flow.forward(flow.gradients), {}
    only_late = flow.back(late).keys() - flow.back({*flow.gradients, *flow.values}).keys()
    for e, stack in _stacks(program):
        of_update = any(v in late for v in (*e.ins, *e.outs)) or any(v in only_late for v in e.outs)
        made_late = "jvp(" not in stack and of_update
        phase_of[e.index] = BACKWARD if "transpose(" in stack else UPDATE if made_late else FORWARD
    return phase_of


def beside_gradients(program: Program) -> set[int]:
    """Return the equations, by index, that are in no gradient call of a step: what stands before, between and behind
    these."""
    return {e.index for e, stack in _stacks(program) if "jvp(" not in stack and "transpose(" not in stack}


def _stacks(program: Program) -> Iterator[tuple[Equation, str]]:
    """Yield each equation with the names of those that it is inside of, and its own."""
    todo = [(e, "") for e in program.top.equations]
    for e, outside in todo:
        stack = f"{outside}/{e.eqn.source_info.name_stack}"
        yield e, stack
        todo += [(inner, stack) for door in e.doors for inner in door.scope.equations]
