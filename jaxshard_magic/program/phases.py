"""Which part of a step an equation belongs to: forward, backward or update."""

from .flow import Flow
from .ir import Program, Value

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


def phases(program: Program, flow: Flow) -> dict[int, str]:
    """The phase of every equation, by its index.

    jax names the stack of a transposed equation so, and all in its bodies belongs to it; what depends on a gradient and
    is none of those is the update. A step that takes no gradients is forward as a whole.
    """
    late, found = _depending(flow), {}
    todo = [(e, False) for e in program.top.equations]
    for e, inside in todo:
        transposed = inside or "transpose(" in str(e.eqn.source_info.name_stack)
        made_late = any(v in late for v in (*e.ins, *e.outs))
        found[e.index] = BACKWARD if transposed else UPDATE if made_late else FORWARD
        todo += [(inner, transposed) for door in e.doors for inner in door.scope.equations]
    return found


def _depending(flow: Flow) -> set[Value]:
    """The gradients and all that is made from them."""
    after: list[list[Value]] = [[] for _ in flow.before]
    for made, sources in enumerate(flow.before):
        for source, _ in sources:
            after[source].append(made)
    seen = set(flow.gradients)
    todo = list(seen)
    for v in todo:
        for made in after[v]:
            if made not in seen:
                seen.add(made)
                todo.append(made)
    return seen
