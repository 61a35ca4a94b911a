"""Loops over experts: each trip applies one expert to all tokens and adds the result to the sum of all experts.

Such a loop is a scan with independent trips: a carry either passes through unchanged or is only added to. The scan
steps over parameters, and tokens choose among as many alternatives as it has trips, in its operands or where its
stacked results are used.
"""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass

from .dimensions import Dimensions
from .flow import Flow, follow_aliases, stop_at_products
from .ir import Equation, Program, SubJaxpr, Value
from .primitives import scan_counts
from .roles import PARAMS, InputRoles
from .topk_sites import find_topk_sites


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
    params = {program.inputs[i] for i, role in enumerate(roles.by_input) if role == PARAMS}
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
        weights = any(params & flow.ancestors([v], follow_aliases).keys() for v in xs)
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
    params = {program.inputs[i] for i, role in enumerate(roles.by_input) if role == PARAMS}
    for e in program.equations:
        if e.is_scan and _as_expert_loop(e) is None:
            xs = e.operands[sum(scan_counts(e.params)) :]
            weights = any(params & flow.ancestors([v], follow_aliases).keys() for v in xs)
            if weights and not _values_of_choice(program, flow, e.params["length"]).isdisjoint(e.operands):
                return e
    return None


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
