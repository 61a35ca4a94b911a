"""Assign equations to the phase of a step: forward, backward or update."""

from collections.abc import Iterator

from .flow import Flow
from .ir import Equation, Program

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


def equation_phases(program: Program, flow: Flow) -> dict[int, str]:
    """Return the phase of every equation, by index.

    All in the bodies of a gradient call's equation has its phase; a loop around gradient calls has equations of all
    phases. The update is all that depends on a gradient, and all that only the update reads, such as a learning rate. A
    step without gradients is all forward.
    """
    after_gradients, phase_of = flow.descendants(flow.gradients), {}
    only_for_update = (
        flow.ancestors(after_gradients).keys() - flow.ancestors({*flow.gradients, *flow.loss_values}).keys()
    )
    for e, stack in _name_stacks(program):
        reaches_update = any(v in after_gradients for v in (*e.operands, *e.results)) or any(
            v in only_for_update for v in e.results
        )
        # JAX marks the name stack of a gradient call with `jvp(` in the forward pass and `transpose(` in the backward
        # pass.
        is_update = "jvp(" not in stack and reaches_update
        phase_of[e.index] = BACKWARD if "transpose(" in stack else UPDATE if is_update else FORWARD
    return phase_of


def outside_gradients(program: Program) -> set[int]:
    """Return the indices of equations outside of gradient calls: before, between and after them."""
    return {e.index for e, stack in _name_stacks(program) if "jvp(" not in stack and "transpose(" not in stack}


def _name_stacks(program: Program) -> Iterator[tuple[Equation, str]]:
    """Yield each equation with its name stack, prefixed by those of all enclosing equations."""
    todo = [(e, "") for e in program.top.equations]
    for e, outside in todo:
        # An equation in a body does not carry the name stack of the equation around it.
        stack = f"{outside}/{e.jaxpr_eqn.source_info.name_stack}"
        yield e, stack
        todo += [(inner, stack) for body in e.bodies for inner in body.sub_jaxpr.equations]
