"""How large the weights of a step are as it uses them."""

from .flow import Flow, by_alias
from .primitives import scan_counts
from .roles import PARAMS, Roles
from .sizes import nbytes


def largest_weight(flow: Flow, roles: Roles) -> int | None:
    """Bytes of the largest weight that an operation reads, on all devices together: of one that a loop steps over, what
    a trip does. None for a step without weights."""
    program = flow.program
    avals = {i: program.avals[v] for i, v in enumerate(program.inputs) if roles.of[i] == PARAMS}
    sizes = {i: nbytes(aval) for i, aval in avals.items()}
    of_trips = dict(sizes)
    for e in program.equations:
        if e.is_scan:
            consts, carried = scan_counts(e.params)
            for i in flow.inputs_behind(e.ins[consts + carried :], by_alias) & sizes.keys():
                of_trips[i] = min(of_trips[i], sizes[i] // max(1, e.params["length"]))
    return max(of_trips.values(), default=None)
