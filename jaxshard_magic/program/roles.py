"""Roles of a step's inputs (parameter, optimizer state, batch, random key), read from the program, not names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from .flow import Flow, follow_aliases, live_roots
from .ir import Program
from .parameter_copies import find_copies
from .state_matching import ElementwiseDistances, StatePairs, match_state
from .trace import Traced

PARAMS, OPTIMIZER, BATCH, RNG, OTHER = "params", "optimizer", "batch", "rng", "other"


@dataclass(frozen=True)
class InputRoles:
    """Roles of a step's inputs. Inputs and outputs are numbered by position.

    Attributes:
        by_input: Role of each input.
        state: Output to input, for each output that is the next value of an input.
        data: Inputs that may have a batch dimension: data, and state that belongs to no parameter.
        storage_order: State in the order in which storage is chosen: parameters, then state that follows them, then the
            rest.
        copies: Copy to parameter, both by input, for inputs used as parameters without being any.
    """

    by_input: tuple[str, ...]
    state: StatePairs
    data: frozenset[int]
    storage_order: tuple[int, ...]
    copies: Mapping[int, int] = field(default_factory=dict)

    @property
    def random_keys(self) -> frozenset[int]:
        """Inputs that are random keys."""
        return frozenset(i for i, role in enumerate(self.by_input) if role == RNG)

    def is_raw_key(self, program: Program, i: int) -> bool:
        """Return whether an input holds keys as plain uint32, the words of a key along the last dimension."""
        return self.by_input[i] == RNG and program.avals[program.inputs[i]].dtype == "uint32"


def find_roles(traced: Traced, flow: Flow) -> InputRoles:
    """Return the role of every input.

    - Parameters are differentiated, and the step returns their next values. Differentiated inputs without a next value
      stay data (adversarial examples); but if none has a next value (a step that returns gradients), all are
      parameters.
    - Optimizer state is state on which a new parameter depends, other than through the gradient, and state nested
      next to it in the arguments.
    - Copies of parameters (an EMA, a target network, updated by the step or not) and statistics are other.
    - Random keys have a key's dtype or are used as keys.
    - Any other input that the step uses is data.

    Args:
        traced: Step.
        flow: Data flow of its program.
    """
    pairs, steps = match_state(traced, flow)
    avals = [flow.program.avals[v] for v in flow.program.inputs]
    state, keys = set(pairs.values()), _random_keys(flow)
    differentiated = flow.input_ancestors((v for e in flow.differentiation_marks for v in e.operands), follow_aliases)
    inexact = {i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)}
    n_consts = len(traced.consts)
    # A step that returns gradients instead of new parameters has no next value for any differentiated input.
    params = differentiated & state & inexact or {i for i in differentiated & inexact if i >= n_consts}
    new_params = (flow.program.outputs[o] for o, i in pairs.items() if i in params)
    # Not through gradients, which depend on all that the loss reads.
    param_sources = flow.input_ancestors(new_params, lambda v, _w, _e: v not in flow.gradients)
    following = {i for i in state & inexact if avals[i].shape and _follows_params(i, params, pairs, steps)}
    used = flow.input_ancestors(live_roots(flow.program))
    untrained = set(range(n_consts, len(avals))) - keys - params - (state & param_sources)
    copies = find_copies(traced, flow, params, untrained)
    # Ranks sort inputs into the order of storage: parameters, state stored like them, other state.
    roles, rank = [], {}
    for i, aval in enumerate(avals):
        if i in keys:
            role = RNG
        elif i in params:
            role, rank[i] = PARAMS, 0
        elif i in state and i in param_sources and i >= n_consts:
            role, rank[i] = OPTIMIZER, 1
        elif i in state or i in copies:
            role, rank[i] = OTHER, 1 if i in following or i in copies else 2
        else:
            role = BATCH if aval.shape and i in used else OTHER
        roles.append(role)
    for i in _optimizer_counters(traced, roles, rank):
        roles[i], rank[i] = OPTIMIZER, 1
    data = frozenset(i for i, role in enumerate(roles) if role == BATCH or rank.get(i) == 2)
    return InputRoles(tuple(roles), pairs, data, tuple(sorted(rank, key=lambda i: (rank[i], i))), copies)


def _random_keys(flow: Flow) -> set[int]:
    """Return inputs with a key's dtype, and inputs with the shape of key data that are used as keys."""
    avals = [flow.program.avals[v] for v in flow.program.inputs]
    used = flow.input_ancestors((v for e in flow.random_equations for v in e.operands), follow_aliases)
    # A raw key is uint32[..., 2], as from `jax.random.PRNGKey`; a scalar is a seed.
    raw_keys = {i for i in used if avals[i].dtype == jnp.uint32 and avals[i].shape[-1:] in ((), (2,))}
    return raw_keys | {i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key)}


def _optimizer_counters(traced: Traced, of: list[str], rank: dict[int, int]) -> list[int]:
    """Return other state with only optimizer state as nearest neighbours in the nesting of arguments: step counters."""
    counters = []
    for i in (i for i, r in rank.items() if r == 2 and of[i] == OTHER):
        path = traced.in_paths[i]
        for depth in range(len(path) - 1, 0, -1):
            neighbour_roles = {of[j] for j, p in enumerate(traced.in_paths) if p[:depth] == path[:depth]} - {OTHER}
            if neighbour_roles:
                if neighbour_roles == {OPTIMIZER}:
                    counters.append(i)
                break
    return counters


def _follows_params(i: int, params: set[int], pairs: StatePairs, steps: ElementwiseDistances) -> bool:
    """Return whether the next value of input `i` is an elementwise function of a parameter."""
    return any((o, p) in steps for o, j in pairs.items() if j == i for p in params)
