"""How large the weights of a step are as it uses them."""

from ..plan import Plan
from ..program.flow import by_alias
from ..program.primitives import scan_counts
from ..program.roles import PARAMS
from ..program.sizes import nbytes
from ..strategies.hold import Hold


def largest_weight(plan: Plan) -> int | None:
    """Bytes of the largest weight that an operation reads, on all devices together: of one that a loop steps over, what
    a trip does. None for a step without weights, and where the compiler alone decides how it is run."""
    if not isinstance(plan.run, Hold):
        return None
    program, flow = plan.run.program, plan.run.layout.flow
    sizes = {
        i: nbytes(program.avals[v])
        for i, (v, leaf) in enumerate(zip(program.inputs, plan.leaves, strict=True))
        if leaf.role == PARAMS
    }
    of_trips = dict(sizes)
    for e in program.equations:
        if e.name == "scan":
            consts, carried = scan_counts(e.params)
            for i in flow.inputs_behind(e.ins[consts + carried :], by_alias) & sizes.keys():
                of_trips[i] = min(of_trips[i], sizes[i] // max(1, e.params["length"]))
    return max(of_trips.values(), default=None)
