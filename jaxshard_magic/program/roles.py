"""Roles of a step's inputs (parameter, frozen weight, optimizer state, batch, random key), read from the program, not
names.

Inputs that copy parameters and receive no gradient, such as target networks, averages and reference models, are found
as well.
"""

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile

import jax
import jax.numpy as jnp

from .flow import Flow, follow_aliases, live_roots
from .ir import Program, Value
from .primitives.primitive import Kind
from .state_matching import ElementwiseDistances, StatePairs, match_state, shape_and_dtype, subtrees
from .trace import Traced

PARAMS, FROZEN, OPTIMIZER, BATCH, RNG, OTHER = "params", "frozen", "optimizer", "batch", "rng", "other"
WEIGHTS = (PARAMS, FROZEN)  # roles of what a step multiplies activations with, trained or not
_DEPTHS = range(1, 6)  # lengths of the paths at which a network may be found


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

    @cached_property
    def weights(self) -> frozenset[int]:
        """Inputs that are weights: parameters, and frozen ones."""
        return frozenset(i for i, role in enumerate(self.by_input) if role in WEIGHTS)

    def with_frozen(self, frozen: Collection[int]) -> "InputRoles":
        """Return the roles with some inputs as frozen weights, stored in the order of parameters.

        Args:
            frozen: Inputs, by position.
        """
        roles = tuple(FROZEN if i in frozen else role for i, role in enumerate(self.by_input))
        weights = {i for i in self.storage_order if roles[i] in WEIGHTS} | {*frozen}
        rest = (i for i in self.storage_order if i not in weights)
        return replace(self, by_input=roles, data=self.data - {*frozen}, storage_order=(*sorted(weights), *rest))

    @cached_property
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
    copies = _find_copies(traced, flow, params, untrained)
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


def _find_copies(traced: Traced, flow: Flow, params: Collection[int], others: Collection[int]) -> dict[int, int]:
    """Return the copies of parameters among the inputs `others`, each with the input copied, by position.

    A copy is in a subtree of the arguments with the inner paths, shapes and dtypes of a subtree of parameters, and is
    multiplied or looked up in the same way: a whole argument, or several layers of an argument. Among several
    candidates the one with the nearest path is chosen.

    Args:
        traced: The step.
        flow: Dataflow of its program.
        params: Inputs that are parameters.
        others: Inputs that may be copies.
    """
    originals = defaultdict(list)
    for members, form in _subtrees_within(traced, flow, params):
        originals[form].append(members)
    original_by_copy: dict[int, int] = {}
    for members, form in _subtrees_within(traced, flow, others):
        candidates = sorted(originals[form], key=lambda tree: -_common_prefix_length(traced, tree[0], members[0]))
        # A whole argument needs one matching product or look-up; part of an argument needs two.
        min_uses = 1 if len(traced.in_paths[members[0]]) - len(form[0][0]) == 1 else 2
        fitting = (t for t in candidates if _num_matching_uses(flow, dict(zip(members, t, strict=True))) >= min_uses)
        if tree := next(fitting, None):
            original_by_copy.update((i, p) for i, p in zip(members, tree, strict=True) if i not in original_by_copy)
    return original_by_copy


def match_gradients(flow: Flow, params: Collection[int]) -> dict[Value, int]:
    """Return the input differentiated by each gradient, by the gradient's value; empty where calls can't be matched.

    A gradient is to be stored like its input, whether the step applies the update or returns the gradient to the
    caller.

    Args:
        flow: Dataflow of a marked step.
        params: Inputs of interest, by position.
    """
    # Gradient calls mark their arguments and their gradients in the order of their leaves, so both lists correspond.
    marked = [e.operands[0] for e in flow.differentiation_marks]
    gradients = sorted(flow.gradients)
    shapes = flow.program.shapes
    if len(marked) != len(gradients) or any(
        v is None or shapes[v] != shapes[g] for v, g in zip(marked, gradients, strict=True)
    ):
        return {}
    inputs_of_marks = (flow.input_ancestors([v], follow_aliases) for v in marked)
    pairs = ((g, found.pop()) for g, found in zip(gradients, inputs_of_marks, strict=True) if len(found) == 1)
    return {g: i for g, i in pairs if i in params}


def _subtrees_within(traced: Traced, flow: Flow, among: Collection[int]) -> Iterator[tuple[list[int], tuple]]:
    """Yield the subtrees with all leaves in `among`, largest first, each with the signature that a copy shares."""
    ins = flow.program.inputs
    whole = [(leaves, form) for leaves, form in subtrees(traced.in_paths, _DEPTHS) if {*leaves} <= {*among}]
    for leaves, form in sorted(whole, key=lambda tree: -len(tree[0])):
        yield leaves, (form, *(shape_and_dtype(flow, ins[i]) for i in leaves))


def _common_prefix_length(traced: Traced, a: int, b: int) -> int:
    """Return the length of the common prefix of two input paths."""
    alike = map(operator.eq, traced.in_paths[a], traced.in_paths[b])
    return sum(takewhile(bool, alike))


def _num_matching_uses(flow: Flow, copies: Mapping[int, int]) -> int:
    """Return the number of copied leaves with a product or look-up; 0 if a first use is not the original's."""
    inputs = flow.program.inputs
    uses = [(own, _product_uses(flow, inputs[p])) for i, p in copies.items() if (own := _product_uses(flow, inputs[i]))]
    return len(uses) if all(own[0] in theirs for own, theirs in uses) else 0


def _product_uses(flow: Flow, v: Value) -> list[tuple]:
    """Return products and look-ups that read an input, in order: name, operand position, contracted dimensions."""
    seen = flow.descendants([v], follow_aliases)
    readers = {e.index: e for w in seen for _, e in flow.successors[w] if e is not None}
    uses: list[tuple] = []
    for _, e in sorted(readers.items()):
        for k in (k for k, read in enumerate(e.operands) if read in seen):
            if (c := e.contraction) is not None:
                uses.append((e.name, k, tuple(ds[k] for ds in c.contracted)))
            elif k == 0 and e.primitive.kind is Kind.LOOKUP:
                uses.append((e.name,))
    return uses
