"""What every input of a step is: parameter, optimizer state, batch, key; from the traced program, not from names."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .flow import Flow, by_alias
from .state import Pairs, Steps, match_state
from .trace import Traced

PARAMS, OPTIMIZER, BATCH, RNG, OTHER = "params", "optimizer", "batch", "rng", "other"


@dataclass(frozen=True)
class Roles:
    """`of[i]`: the role of input i. `state`: output -> the input whose next value it is.

    `data`: the inputs that may have a batch dimension: data, and state that is none of the parameters'.
    `stored`: state in the order in which storage is chosen, parameters first, then what follows them.
    """

    of: tuple[str, ...]
    state: Pairs
    data: frozenset[int]
    stored: tuple[int, ...]


def find_roles(traced: Traced, flow: Flow) -> Roles:
    """The role of every input.

    Parameters are differentiated and come back; optimizer state is what a new parameter depends on, other than
    through the gradient, with what lies among it; a copy that follows a parameter (an EMA, a target network) and
    statistics are other state; keys have a key's type or are used as one; the rest that the step uses is data. What is
    differentiated and does not come back stays data (adversarial examples), unless nothing comes back (a step that
    returns gradients).
    """
    pairs, steps = match_state(traced, flow)
    avals = [flow.program.avals[v] for v in flow.program.inputs]
    state, keys, wrt = set(pairs.values()), _keys(flow), _reached_from_marks(flow)
    inexact = {i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)}
    closed_over = len(traced.consts)
    params = wrt & state & inexact or {i for i in wrt & inexact if i >= closed_over}
    feeding = _feeding(flow, [o for o, i in pairs.items() if i in params])
    following = {i for i in state & inexact if avals[i].shape and _follows(i, params, pairs, steps)}
    used = flow.back(flow.program.outputs)
    of, rank = [], {}
    for i, aval in enumerate(avals):
        if i in keys:
            role = RNG
        elif i in params:
            role, rank[i] = PARAMS, 0
        elif i in state and i in feeding and i >= closed_over:
            role, rank[i] = OPTIMIZER, 1
        elif i in state:
            role, rank[i] = OTHER, 1 if i in following else 2
        else:
            role = BATCH if aval.shape and flow.program.inputs[i] in used else OTHER
        of.append(role)
    for i in _among_optimizer(traced, of, rank):
        of[i], rank[i] = OPTIMIZER, 1
    data = frozenset(i for i, role in enumerate(of) if role == BATCH or rank.get(i) == 2)
    return Roles(tuple(of), pairs, data, tuple(sorted(rank, key=lambda i: (rank[i], i))))


def _keys(flow: Flow) -> set[int]:
    position = {v: i for i, v in enumerate(flow.program.inputs)}
    avals = flow.program.avals
    found = {i for v, i in position.items() if jnp.issubdtype(avals[v].dtype, jax.dtypes.prng_key)}
    for e in flow.random:
        for v in flow.back(e.ins, by_alias):
            if (
                v in position
                and avals[v].dtype == jnp.uint32
                and (not avals[v].shape or avals[v].shape[-1] == 2)
            ):
                found.add(position[v])
    return found


def _reached_from_marks(flow: Flow) -> set[int]:
    position = {v: i for i, v in enumerate(flow.program.inputs)}
    met = (v for e in flow.differentiated for v in flow.back(e.ins, by_alias))
    return {position[v] for v in met if v in position}


def _feeding(flow: Flow, outputs: list[int]) -> set[int]:
    """The inputs that these outputs depend on, other than through a gradient."""
    position = {v: i for i, v in enumerate(flow.program.inputs)}
    met = flow.back([flow.program.outputs[o] for o in outputs], lambda v, _w, _e: v not in flow.gradients)
    return {position[v] for v in met if v in position}


def _among_optimizer(traced: Traced, of: list[str], rank: dict[int, int]) -> list[int]:
    """Other state whose nearest neighbours, as the arguments are nested, are optimizer state: its counters."""
    found = []
    for i in (i for i, r in rank.items() if r == 2 and of[i] == OTHER):
        path = traced.in_paths[i]
        for depth in range(len(path) - 1, 0, -1):
            beside = {of[j] for j, p in enumerate(traced.in_paths) if p[:depth] == path[:depth]} - {OTHER}
            if beside:
                if beside == {OPTIMIZER}:
                    found.append(i)
                break
    return found


def _follows(i: int, params: set[int], pairs: Pairs, steps: Steps) -> bool:
    return any((o, p) in steps for o, j in pairs.items() if j == i for p in params)
