"""Size of the weights of a step, as its equations read them."""

from .flow import Flow, follow_aliases
from .primitives import scan_counts
from .roles import PARAMS, InputRoles
from .sizes import nbytes


def largest_weight(flow: Flow, roles: InputRoles) -> int | None:
    """Return the bytes of the largest weight that an equation reads, on all devices together; None without weights.

    A weight that a scan steps over counts by the slice read in a trip.
    """
    program = flow.program
    avals = {i: program.avals[v] for i, v in enumerate(program.inputs) if roles.by_input[i] == PARAMS}
    sizes = {i: nbytes(aval) for i, aval in avals.items()}
    read_sizes = dict(sizes)
    for e in program.equations:
        if e.is_scan:
            consts, carried = scan_counts(e.params)
            for i in flow.input_ancestors(e.operands[consts + carried :], follow_aliases) & sizes.keys():
                read_sizes[i] = min(read_sizes[i], sizes[i] // max(1, e.params["length"]))
    return max(read_sizes.values(), default=None)
