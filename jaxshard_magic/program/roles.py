"""What every input of a step is: parameter, optimizer state, batch, key; from the traced program, not from names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from .copies import find_copies
from .flow import Flow, by_alias, results
from .ir import Program
from .state import Pairs, Steps, match_state
from .trace import Traced

PARAMS, OPTIMIZER, BATCH, RNG, OTHER = "params", "optimizer", "batch", "rng", "other"


@dataclass(frozen=True)
class Roles:
    """`of[i]`: the role of input i. `state`: output -> the input whose next value it is.

    `data`: the inputs that may have a batch dimension: data, and state that is none of the parameters'.
    `stored`: state in the order in which storage is chosen, parameters first, then what follows them. `copies`: inputs
    that are used as parameters without being any, by the parameter that each is a copy of.
    """

    of: tuple[str, ...]
    state: Pairs
    data: frozenset[int]
    stored: tuple[int, ...]
    copies: Mapping[int, int] = field(default_factory=dict)

    @property
    def keys(self) -> frozenset[int]:
        """The inputs that are random keys."""
        return frozenset(i for i, role in enumerate(self.of) if role == RNG)

    def is_raw_key(self, program: Program, i: int) -> bool:
        """Return whether an input is a key, or keys, as plain whole numbers: its last dimension are words of a key."""
        return self.of[i] == RNG and program.avals[program.inputs[i]].dtype == "uint32"


def find_roles(traced: Traced, flow: Flow) -> Roles:
    """The role of every input.

    Parameters are differentiated and come back; optimizer state is what a new parameter depends on, other than
    through the gradient, with what lies among it; a copy of parameters (an EMA, a target network, moved by the step or
    not) and statistics are other; keys have a key's type or are used as one; the rest that the step uses is data. What
    is differentiated and does not come back stays data (adversarial examples), unless nothing comes back (a step that
    returns gradients).
    """
    pairs, steps = match_state(traced, flow)
    avals = [flow.program.avals[v] for v in flow.program.inputs]
    state, keys = set(pairs.values()), _keys(flow)
    wrt = flow.inputs_behind((v for e in flow.differentiated for v in e.ins), by_alias)
    inexact = {i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)}
    closed_over = len(traced.consts)
    params = wrt & state & inexact or {i for i in wrt & inexact if i >= closed_over}
    updated = (flow.program.outputs[o] for o, i in pairs.items() if i in params)
    feeding = flow.inputs_behind(updated, lambda v, _w, _e: v not in flow.gradients)
    following = {i for i in state & inexact if avals[i].shape and _follows(i, params, pairs, steps)}
    used = flow.inputs_behind(results(flow.program))
    untrained = set(range(closed_over, len(avals))) - keys - params - (state & feeding)
    copies = find_copies(traced, flow, params, untrained)
    of, rank = [], {}
    for i, aval in enumerate(avals):
        if i in keys:
            role = RNG
        elif i in params:
            role, rank[i] = PARAMS, 0
        elif i in state and i in feeding and i >= closed_over:
            role, rank[i] = OPTIMIZER, 1
        elif i in state or i in copies:
            role, rank[i] = OTHER, 1 if i in following or i in copies else 2
        else:
            role = BATCH if aval.shape and i in used else OTHER
        of.append(role)
    for i in _among_optimizer(traced, of, rank):
        of[i], rank[i] = OPTIMIZER, 1
    data = frozenset(i for i, role in enumerate(of) if role == BATCH or rank.get(i) == 2)
    return Roles(tuple(of), pairs, data, tuple(sorted(rank, key=lambda i: (rank[i], i))), copies)


def _keys(flow: Flow) -> set[int]:
    """The inputs of a key's type, and those of the shape of a key's data that are used as keys."""
    avals = [flow.program.avals[v] for v in flow.program.inputs]
    used = flow.inputs_behind((v for e in flow.random for v in e.ins), by_alias)
    data = {i for i in used if avals[i].dtype == jnp.uint32 and avals[i].shape[-1:] in ((), (2,))}
    return data | {i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key)}


def _among_optimizer(traced: Traced, of: list[str], rank: dict[int, int]) -> list[int]:
    """Other state whose nearest neighbours, as the arguments are nested, are optimizer state: its counters."""
    counters = []
    for i in (i for i, r in rank.items() if r == 2 and of[i] == OTHER):
        path = traced.in_paths[i]
        for depth in range(len(path) - 1, 0, -1):
            beside = {of[j] for j, p in enumerate(traced.in_paths) if p[:depth] == path[:depth]} - {OTHER}
            if beside:
                if beside == {OPTIMIZER}:
                    counters.append(i)
                break
    return counters


def _follows(i: int, params: set[int], pairs: Pairs, steps: Steps) -> bool:
    return any((o, p) in steps for o, j in pairs.items() if j == i for p in params)
