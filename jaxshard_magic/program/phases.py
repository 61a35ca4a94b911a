"""Which part of a step an equation belongs to: forward, backward or update."""

from .flow import Flow
from .ir import Program

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


def phases(program: Program, flow: Flow) -> dict[int, str]:
    """The phase of every equation, by its index.

    jax names the stack of an equation of a gradient call `jvp` in its forward pass and `transpose` in its backward one,
    and all in its bodies belongs there; of the rest, what depends on a gradient is the update, and what only it reads,
    as a step's learning rate. A step that takes no gradients is forward as a whole.
    """
    late, phase_of = flow.forward(flow.gradients), {}
    only_late = flow.back(late).keys() - flow.back({*flow.gradients, *flow.values}).keys()
    todo = [(e, "") for e in program.top.equations]
    for e, outside in todo:
        stack = f"{outside}/{e.eqn.source_info.name_stack}"
        of_update = any(v in late for v in (*e.ins, *e.outs)) or any(v in only_late for v in e.outs)
        made_late = "jvp(" not in stack and of_update
        phase_of[e.index] = BACKWARD if "transpose(" in stack else UPDATE if made_late else FORWARD
        todo += [(inner, stack) for door in e.doors for inner in door.scope.equations]
    return phase_of
