"""Experts of a step, recognised by the use of weights and tokens, not by names: dimensions that count them, and loops.

An expert is a matrix with which some of the tokens are multiplied. A dimension counts experts where two conditions
hold. A parameter has it besides the two dimensions of a matrix, in a product that does not sum over it. Tokens choose
along it: a `top_k`, an `argmax`, a sort or the maximum of a softmax works along the dimension, or the dimension is
compared with a choice. Weights have head dimensions too, but nothing chooses among heads.

A loop over experts applies one expert to all tokens in each trip and adds the result to the sum of all experts. It is a
scan with independent trips: a carry either passes through unchanged or is only added to. The scan steps over
parameters, and tokens choose among as many alternatives as it has trips, in its operands or where its stacked results
are used.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass

from .dimensions import Dimensions, StorageClasses
from .flops import Product, find_products
from .flow import Flow, follow_aliases, stop_at_products
from .ir import Equation, Program, SubJaxpr, Value
from .primitives import scan_counts
from .roles import InputRoles
from .topk_sites import find_topk_sites


@dataclass(frozen=True)
class ExpertDims:
    """Expert dimensions of a step.

    Attributes:
        classes: Dimension classes that count experts.
        counts: Numbers of experts: as many as products have matrices.
        weights: Parameters with a matrix for each expert, by input.
        group_slots: Classes of capacity slots, where tokens are dispatched: slots for the tokens of one group.
        shared_slots: Classes of capacity slots for the tokens of all examples.
    """

    classes: frozenset[int]
    counts: frozenset[int]
    weights: tuple[int, ...]
    group_slots: frozenset[int]
    shared_slots: frozenset[int]


def find_experts(dims: Dimensions, storage: StorageClasses, flow: Flow, roles: InputRoles) -> ExpertDims:
    """Return the expert dimensions of a step; without classes where the step has no experts.

    Args:
        dims: Logical dimensions.
        storage: Storage classes.
        flow: Dataflow.
        roles: Roles of the inputs.
    """
    inputs = dims.program.inputs
    params = roles.weights
    matmuls = find_products(dims, storage)
    # By value, as several products may read one weight.
    params_of_operand = {
        v: params & flow.input_ancestors([v], follow_aliases)
        for v in {p.equation.operands[k] for p in matmuls for k in p.weight_operands}
        if v is not None
    }
    weight_operands = [
        (p, k, params_of_operand.get(v))
        for p in matmuls
        for k in p.weight_operands
        if (v := p.equation.operands[k]) is not None
    ]
    stacks = [(p, k, inputs, d) for p, k, inputs in weight_operands if inputs for d in stack_dims(p, k)]
    chosen = _chosen_classes(dims, flow, {p.dim_classes[k][d] for p, k, _, d in stacks})
    stacks = [(p, k, inputs, d) for p, k, inputs, d in stacks if p.dim_classes[k][d] in chosen]
    classes = frozenset(chosen) if stacks else frozenset()
    weights = sorted({i for _, _, inputs, _ in stacks for i in inputs})
    param_classes = {c for i in params for c in dims.classes_of(inputs[i])}
    data_classes = {c for i in roles.data for c in dims.nontrivial_classes(inputs[i]) if c is not None}
    token_classes = frozenset().union(
        *(dims.related_classes(c, lambda a: a not in param_classes) for c in data_classes)
    )
    places = {c for p, k, *_ in stacks for c in _free_classes_of_other(p, k)} - param_classes - token_classes
    slots_without_batch = [
        _free_classes_of_other(p, k)
        for p, k, *_ in stacks
        if (storage.batch & data_classes).isdisjoint(p.dim_classes[1 - k])
    ]
    # Where the other operand has no batch dimension of the data, slots hold tokens of all examples.
    shared = places & set().union(*slots_without_batch)
    return ExpertDims(
        classes,
        frozenset(dims.program.shapes[v][d] for p, k, _, d in stacks if (v := p.equation.operands[k]) is not None),
        tuple(weights),
        frozenset(places - shared),
        frozenset(shared),
    )


def stack_dims(p: Product, k: int) -> set[int]:
    """Return the dimensions of operand `k` that may count matrices.

    The product keeps such a dimension and at least one other, and sums over a third.

    Args:
        p: The product.
        k: Operand, 0 or 1.
    """
    e, c = p.equation, p.equation.contraction
    v = e.operands[k]
    if c is None or v is None or c.windowed or c.ragged_dim is not None:
        return set()
    summed = [pair[k] for pair in c.contracted]
    free = [d for d, _ in (c.left_free, c.right_free)[k]]
    beside = [triple[k] for triple in c.batch]
    classes = p.dim_classes[k]
    if not summed or not free or len(free) + len(beside) < 2:
        return set()
    summed_classes = {classes[d] for d in summed}
    return {d for d in (*free, *beside) if classes[d] not in summed_classes}


def _free_classes_of_other(p: Product, k: int) -> set[int]:
    """Return the classes of the free dimensions of the operand that is not `k`."""
    c = p.equation.contraction
    return set() if c is None else {p.dim_classes[1 - k][d] for d, _ in (c.left_free, c.right_free)[1 - k]}


def _chosen_classes(dims: Dimensions, flow: Flow, among: set[int]) -> set[int]:
    """Return the classes of `among` along which something is chosen, and the classes of the choices themselves."""
    if not among:
        return set()
    found, results_by_size, classes_by_size = (
        set[int](),
        defaultdict[int, list[Value]](list),
        defaultdict[int, set[int]](set),
    )
    for r in find_topk_sites(dims.program):
        c = dims.classes_of(r.operand)[r.dim]
        found |= {c} & among
        if r.ranking_results:
            results_by_size[r.size] += r.ranking_results
            classes_by_size[r.size].add(c)
    # The logits of a router need not be linked to the values made from the choice, so both are matched by size.
    for size, start in results_by_size.items():
        met = _classes_of_choice(dims, flow, start, size) & among
        found |= met | (classes_by_size[size] if met else set())
    return found


def _classes_of_choice(dims: Dimensions, flow: Flow, start: Iterable[Value], size: int) -> set[int]:
    """Return the classes of dimensions of size `size` in values derived from `start` without another product."""
    made = flow.descendants(start, stop_at_products)
    shapes = dims.program.shapes
    return {
        c for v in made if size in shapes[v] for c, z in zip(dims.classes_of(v), shapes[v], strict=True) if z == size
    }


@dataclass(frozen=True)
class ExpertLoop:
    """A scan over experts.

    Attributes:
        equation: The scan.
        accumulators: Positions of the carries that are added to; all other carries pass through unchanged.
        stacked_values: Stacked operands and results, with the experts as first dimension.
    """

    equation: Equation
    accumulators: frozenset[int]
    stacked_values: tuple[Value, ...]

    @property
    def sub_jaxpr(self) -> SubJaxpr:
        """Body of the scan."""
        return self.equation.bodies[0].sub_jaxpr


def find_expert_loops(dims: Dimensions, flow: Flow, roles: InputRoles) -> list[ExpertLoop]:
    """Return the loops over experts of a program, forward and backward.

    Args:
        dims: Logical dimensions.
        flow: Dataflow.
        roles: Roles of the inputs.
    """
    program = dims.program
    params = {program.inputs[i] for i in roles.weights}
    loops = [loop for e in program.equations if e.is_scan and (loop := _as_expert_loop(e)) is not None]
    if not loops:
        return []
    choices_by_length = {
        length: _values_of_choice(program, flow, length) for length in {e.equation.params["length"] for e in loops}
    }
    expert_loops: list[ExpertLoop] = []
    stacked = set[Value]()
    for loop in loops:
        e = loop.equation
        n, k = scan_counts(e.params)
        xs = {v for v in e.operands[n + k :] if v is not None}
        weights = _reads_params(params, flow, xs)
        choice = choices_by_length[e.params["length"]]
        expert_classes = {dims.classes_of(v)[0] for v in loop.stacked_values}
        chosen = not choice.isdisjoint(e.operands) or any(
            expert_classes.intersection(dims.classes_of(v)) for v in choice
        )
        # A backward loop makes no choice. It is recognised by the residuals that it reads, stacked by its forward loop.
        if (weights and chosen) or xs & stacked:
            expert_loops.append(loop)
            stacked.update(e.results[k:])
    return expert_loops


def find_dependent_expert_loop(dims: Dimensions, flow: Flow, roles: InputRoles) -> Equation | None:
    """Return a loop over experts with dependent trips, None where there is none.

    Such a loop has a carry that is no sum of the experts' results.

    Args:
        dims: Logical dimensions.
        flow: Dataflow.
        roles: Roles of the inputs.
    """
    program = dims.program
    params = {program.inputs[i] for i in roles.weights}
    for e in program.equations:
        if e.is_scan and _as_expert_loop(e) is None:
            xs = e.operands[sum(scan_counts(e.params)) :]
            weights = _reads_params(params, flow, xs)
            if weights and not _values_of_choice(program, flow, e.params["length"]).isdisjoint(e.operands):
                return e
    return None


def _reads_params(params: Set[Value], flow: Flow, values: Iterable[Value | None]) -> bool:
    """Return whether one of `values` is made of a parameter."""
    return any(params & flow.ancestors([v], follow_aliases).keys() for v in values)


def _as_expert_loop(e: Equation) -> ExpertLoop | None:
    """Return the scan `e` as a loop over experts; None where its trips depend on each other, or nothing is stacked."""
    n, k = scan_counts(e.params)
    scope = e.bodies[0].sub_jaxpr
    sums, stacks = set[int](), (*(v for v in e.operands[n + k :] if v is not None), *e.results[k:])
    for i in range(k):
        carry, next_carry = scope.inputs[n + i], scope.outputs[i]
        if _is_passed_through(scope, carry, next_carry):
            continue
        if not _is_accumulated(scope, carry, next_carry):
            return None
        sums.add(i)
    return ExpertLoop(e, frozenset(sums), stacks) if stacks else None


def _is_passed_through(scope: SubJaxpr, start: Value, end: Value | None) -> bool:
    """Return whether output `end` is the input `start`, unchanged, also through calls."""
    if start == end:
        return True
    for e in scope.equations:
        for inside, outside, _ in e.bodies[0].outputs if _is_inlined_call(e) else ():
            if outside == end and inside is not None:
                ins = [b for a, b, _ in e.bodies[0].inputs if a == start]
                return any(_is_passed_through(e.bodies[0].sub_jaxpr, b, inside) for b in ins)
    return False


def _is_accumulated(scope: SubJaxpr, start: Value, end: Value | None) -> bool:
    """Return whether output `end` is the input `start` with terms added, and `start` is used for nothing else."""
    readers = Counter(v for e in scope.equations for v in e.operands if v is not None)
    readers.update(v for v in scope.outputs if v is not None)
    v, added = start, False
    while v != end:
        e = next((e for e in scope.equations if v in e.operands), None)
        # A carry with another reader is used for more than the sum.
        if readers[v] != 1 or e is None:
            return False
        # Functions of jax.numpy are jits, so the addition may be inside of a call.
        if _is_inlined_call(e):
            body = e.bodies[0]
            inside = next(b for a, b, _ in body.inputs if a == v)
            ends = [b for a, b, _ in body.outputs if a is not None and _is_accumulated(body.sub_jaxpr, inside, a)]
            if len(ends) != 1 or ends[0] is None:
                return False
            v = ends[0]
        elif e.primitive.is_elementwise and e.primitive.is_additive:
            v = e.results[0]
        else:
            return False
        added = True
    return added and readers[v] == 1


def _is_inlined_call(e: Equation) -> bool:
    """Return whether `e` runs one body exactly once."""
    return len(e.bodies) == 1 and not e.is_control_flow


def _values_of_choice(program: Program, flow: Flow, length: int) -> Set[Value]:
    """Return the values derived, without a product, from a choice among `length` alternatives."""
    choices = (v for r in find_topk_sites(program) if r.size == length for v in r.ranking_results)
    return flow.descendants(choices, stop_at_products)
