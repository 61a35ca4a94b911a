"""Detection of experts that a program runs one after the other, and the order of execution of the batched bodies.

Experts run one after the other in a Python loop, or in a loop that takes their matrices by the index of the trip
(`jax.lax.fori_loop`, scans over `jnp.arange`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

import numpy as np

from ..flow import Flow, follow_aliases, stop_at_products
from ..ir import Equation, Program, SubJaxpr, Value
from ..primitives import has_visible_effects, is_literal, scan_counts
from ..primitives.primitive import Kind
from ..source_lines import user_line
from ..topk_sites import find_topk_sites
from .array_parts import ArrayPart, ArrayParts
from .equation_equality import EquationComparison
from .expert_groups import (
    SEQUENTIAL_EXPERTS,
    BatchedEquation,
    Combination,
    ExpertConcat,
    ExpertFamily,
    ExpertGroup,
    ExpertGroupSearch,
    ExpertSelect,
    ExpertSum,
)


@dataclass(frozen=True)
class IndexedLoop:
    """Scan whose trips take consecutive parts of arrays.

    Attributes:
        counter_carry: Index of the carry that counts trips; None for a scan over the indices themselves.
        parts: Values of the body that are such parts, each with the first part. The source is an input of the body.
    """

    counter_carry: int | None
    parts: Mapping[Value, ArrayPart]


def _find_indexed_loops(
    program: Program, weights: Set[Value], expert_counts: Set[int], parts: ArrayParts
) -> dict[int, IndexedLoop]:
    """Return the scans that take matrices of weights by the trip's index, by equation index.

    Args:
        program: The program.
        weights: Values that are weights, or other forms of weights.
        expert_counts: Possible numbers of experts; the length of the scan must be among them.
        parts: Parts of arrays in the program's bodies.
    """
    loops: dict[int, IndexedLoop] = {}
    for e in program.equations:
        if not e.is_scan or e.params["length"] not in expert_counts:
            continue
        scope, trips = e.bodies[0].sub_jaxpr, e.params["length"]
        n, k = scan_counts(e.params)
        # In a reverse scan a carry still counts up, while the indices that replace it would run down.
        counter_carry = None if e.params["reverse"] else _find_counter_carry(e, n, k)
        counters = [] if counter_carry is None else [scope.inputs[n + counter_carry]]
        counters += [
            v
            for v, elements in zip(scope.inputs[n + k :], e.operands[n + k :], strict=True)
            if _is_iota(program, elements)
        ]
        if not counters:
            continue
        outside = {b: a for a, b, _ in e.bodies[0].inputs[:n] if a is not None}
        loop_parts = {
            v: part
            for v, part in parts.in_loop(scope, counters, trips).items()
            if part.source in outside and program.shapes[part.source][part.dim] == trips * part.size
        }
        if any(outside[p.source] in weights and len(program.shapes[p.source]) > 2 for p in loop_parts.values()):
            loops[e.index] = IndexedLoop(counter_carry, loop_parts)
    return loops


def _find_counter_carry(e: Equation, n: int, k: int) -> int | None:
    """Return the index of the carry that is 0 at the first trip and grows by 1; None for no such carry."""
    scope = e.bodies[0].sub_jaxpr
    producers = {v: inner for inner in scope.equations for v in inner.results}
    for i in range(k):
        start, carry_input, carry_output = e.jaxpr_eqn.invars[n + i], scope.inputs[n + i], scope.outputs[i]
        inner = None if carry_output is None else producers.get(carry_output)
        if inner is None or inner.name != "add" or carry_input not in inner.operands or not _is_integer(start, 0):
            continue
        if any(_is_integer(v, 1) for v in inner.jaxpr_eqn.invars):
            return i
    return None


def _is_integer(var: object, number: int) -> bool:
    if not is_literal(var):
        return False
    value = np.asarray(var.val)  # pyright: ignore[reportAttributeAccessIssue]
    return value.dtype.kind in "iu" and value.size == 1 and value.item() == number


def _is_iota(program: Program, v: Value | None) -> bool:
    """Return whether a value is a vector 0, 1, 2, ..."""
    maker = None if v is None else program.producer.get(v)
    return maker is not None and maker.name == "iota" and len(maker.params["shape"]) == 1


@dataclass(frozen=True, eq=False)
class ExpertElement:
    """Value of one expert, taken out of a family.

    Attributes:
        value: The value.
        family: Family with the value.
        expert: Index of the expert.
    """

    value: Value
    family: ExpertFamily
    expert: int


_SLICING_PRIMITIVES = ("slice", "dynamic_slice", "gather", "split", "unstack")
ExecutionUnit = Equation | BatchedEquation | ExpertFamily | Combination | ExpertElement


@dataclass(frozen=True)
class UnrolledExperts:
    """Unrolled experts of a program; false where none can be batched.

    Attributes:
        orders: Units of execution of each body with batched experts, by the body's jaxpr.
        obstacles: Line of text for each routed group that can't be batched.
        unrouted_obstacles: The same for groups not known to be routed.
        indexed_loops: Loops that take experts by the trip's index, by equation index.
        batched_lines: Source line of each group and loop that is batched.
    """

    orders: Mapping[SubJaxpr, list[ExecutionUnit]]
    obstacles: tuple[str, ...]
    unrouted_obstacles: tuple[str, ...]
    indexed_loops: Mapping[int, IndexedLoop] = field(default_factory=dict)
    batched_lines: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.batched_lines)


def may_have_unrolled_experts(program: Program) -> bool:
    """Return whether matrices are taken one by one out of an array, as many as a routing choice has alternatives.

    A quick test before `find_unrolled_experts`.
    """
    choices, slice_counts = _choices_by_count(program), Counter[tuple[int, ...]]()
    for e in program.equations if choices else ():
        source = e.operands[0] if e.name in _SLICING_PRIMITIVES else None
        if source is None or len(shape := program.shapes[source]) < 3 or choices.keys().isdisjoint(shape):
            continue
        slice_counts[shape] += max(len(e.results), e.trip_count)
        if slice_counts[shape] >= min(choices.keys() & {*shape}):
            return True
    return False


def find_unrolled_experts(program: Program, weights: Iterable[Value]) -> UnrolledExperts:
    """Return the experts of a program that have consecutive parts of weights as their matrices.

    Cost: linear in the number of equations.

    Args:
        program: The program.
        weights: Weights of the program.
    """
    choices = _RoutingChoices(program)
    if not choices.expert_counts:
        return UnrolledExperts({}, (), ())
    parts, comparison, orders, obstacles = (
        ArrayParts(program),
        EquationComparison(),
        dict[SubJaxpr, list[ExecutionUnit]](),
        list[tuple[bool, str]](),
    )
    weight_values, batched_lines = choices.flow.descendants(weights, follow_aliases), list[str]()
    # A custom derivative rule replaces the gradient of its body, so such bodies stay as written.
    custom_rule_indices = {
        e.index for rule in program.equations if rule.primitive.custom_derivative for e in (rule, *rule.nested())
    }
    custom_rule_bodies = {
        body.sub_jaxpr for e in program.equations if e.index in custom_rule_indices for body in e.bodies
    }
    for scope in program.sub_jaxprs():
        body_parts = {} if scope in custom_rule_bodies else parts.in_body(scope)
        if weight_values.isdisjoint(part.source for part in body_parts.values()):
            continue
        search = ExpertGroupSearch(program, scope, body_parts, weight_values, comparison)
        groups = search.find_groups(choices.expert_counts, choices.is_routed)
        batchable = [g for g in groups if g.obstacle is None]
        order = None
        # Groups on a cycle can't be batched; without them the remaining ones may have an order.
        while batchable and order is None:
            order, cyclic_groups = _ExecutionOrder(program, scope, search, batchable).units()
            for group in cyclic_groups:
                group.obstacle = SEQUENTIAL_EXPERTS
            batchable = [g for g in batchable if g.obstacle is None]
        if batchable and order is not None:
            orders[scope] = order
            batched_lines += [_source_line(group.first_equation) for group in batchable]
        obstacles += [(not group.is_routed, _describe_obstacle(group)) for group in groups if group.obstacle]
    lines = tuple(why for _, why in sorted(obstacles, key=lambda found: found[0]))
    routed_count = sum(not unsure for unsure, _ in obstacles)
    indexed_loops = _find_indexed_loops(program, weight_values, choices.expert_counts, parts)
    indexed_loops = {i: loop for i, loop in indexed_loops.items() if i not in custom_rule_indices}
    batched_lines += [_source_line(program.equations[i]) for i in indexed_loops]
    return UnrolledExperts(orders, lines[:routed_count], lines[routed_count:], indexed_loops, tuple(batched_lines))


def _source_line(e: Equation) -> str:
    return user_line(e.jaxpr_eqn) or "in a library"


def _describe_obstacle(group: ExpertGroup) -> str:
    where = f"the {group.expert_count} experts that a Python loop goes through ({_source_line(group.first_equation)})"
    return f"{where} can't be put side by side: {group.obstacle}"


def _choices_by_count(program: Program) -> Mapping[int, list[Value]]:
    """Return the results of all routing choices, by the number of alternatives (at least 2)."""
    choices = defaultdict[int, list[Value]](list)
    for r in find_topk_sites(program):
        choices[r.size].extend(r.equation.results)
    return {n: values for n, values in choices.items() if n > 1}


def result_equation(combination: Combination) -> Equation:
    """Return the equation whose result is the sum, the concatenation or the selection."""
    return (
        combination.root
        if isinstance(combination, ExpertSum)
        else combination.last
        if isinstance(combination, ExpertSelect)
        else combination.equation
    )


class _RoutingChoices:
    """Values that depend on routing choices without a product in between, by the number of alternatives.

    Args:
        program: The program.
    """

    def __init__(self, program: Program):
        self._program, self.flow = program, Flow(program)
        self._choices, self._routed_cache = _choices_by_count(program), dict[int, Set[Value]]()

    @property
    def expert_counts(self) -> Set[int]:
        return self._choices.keys()

    def _routed_values(self, count: int) -> Set[Value]:
        if count not in self._routed_cache:
            start = self._choices[count]
            self._routed_cache[count] = self.flow.descendants(start, stop_at_products)
        return self._routed_cache[count]

    def is_routed(self, group: ExpertGroup) -> bool:
        """Return whether a choice among as many alternatives as experts weighs or selects the results of a group."""
        values = self._routed_values(group.expert_count)
        for family in group.families.values():
            part = family.part
            if part and not family.from_weights and part.source in values:
                return True
        for batched in group.batched.values():
            for e in batched.equations[:1]:
                has_expert_numbers = any(f is not None and f.reads and f.values[0] is None for f in batched.operands)
                if has_expert_numbers and any(v in values for v in e.operands if v is not None):
                    return True
        concatenated = [end.equation.results[0] for end in group.combinations if isinstance(end, ExpertConcat)]
        readers = (
            (v, e) for v in self.flow.descendants(concatenated, stop_at_products) for _, e in self.flow.successors[v]
        )
        return any(self._is_weighed_by_choice(e, v, group.expert_count, values) for v, e in readers if e is not None)

    def _is_weighed_by_choice(self, e: Equation, v: Value, number: int, values: Set[Value]) -> bool:
        """Return whether `e` combines `v` with a value that depends on a choice among `number` alternatives."""
        looks_up, shapes = e.primitive.kind is Kind.LOOKUP, self._program.shapes
        if not (e.primitive.is_product or looks_up or e.name == "mul"):
            return False
        others = [w for w in e.operands if w is not None and w != v]
        return any(w in values and (looks_up or number in shapes[w]) for w in others)


class _ExecutionOrder:
    """Topological order of a body's units, in the order of the step where dependencies leave a choice."""

    def __init__(self, program: Program, scope: SubJaxpr, search: ExpertGroupSearch, groups: list[ExpertGroup]):
        self._scope, self._canonical, self._groups = scope, search.canonical, groups
        self._producer: dict[Value, ExecutionUnit] = {v: e for e in scope.equations for v in e.results}
        self._family_producer = dict[ExpertFamily, ExecutionUnit]()
        self._group_of_unit = dict[ExecutionUnit, ExpertGroup]()
        elements = dict[Value, ExpertElement]()
        for group in groups:
            for batched in {id(t): t for t in group.batched.values()}.values():
                self._group_of_unit[batched] = group
                for family in batched.results:
                    self._family_producer[family] = batched
                    elements |= {v: ExpertElement(v, family, i) for i, v in enumerate(family.values) if v is not None}
            for family in group.families.values():
                self._family_producer.setdefault(family, family)
                self._group_of_unit[family] = group
        self._producer |= elements
        for group in groups:
            for combination in group.combinations:
                self._producer[result_equation(combination).results[0]] = combination
                self._group_of_unit[combination] = group
        for element in elements.values():
            self._group_of_unit[element] = next(g for g in groups if element.family in g.families.values())

    def units(self) -> tuple[list[ExecutionUnit] | None, list[ExpertGroup]]:
        """Return the units that the body needs, in order, and no groups.

        Where dependencies form a cycle: None, and the groups on the cycle.
        """
        # With an explicit stack: a chain of equations can be longer than Python's recursion limit.
        seen, done, ordered = set[ExecutionUnit](), set[ExecutionUnit](), list[ExecutionUnit]()
        roots = [v for v in self._scope.outputs if v is not None]
        # Equations with effects run even where no result of theirs is read.
        effects = [e for e in self._scope.equations if has_visible_effects(e.jaxpr_eqn)]
        for root in [*effects, *(u for v in roots for u in self._producers_of(v))]:
            stack = [(root, iter(self._dependencies(root)))] if root not in seen else []
            seen.add(root)
            while stack:
                unit, dependencies = stack[-1]
                dependency = next((u for u in dependencies if u not in done), None)
                if dependency is None:
                    done.add(unit)
                    ordered.append(unit)
                    stack.pop()
                elif dependency in seen:
                    path = [u for u, _ in stack]
                    cyclic_groups = {
                        self._group_of_unit[u] for u in path[path.index(dependency) :] if u in self._group_of_unit
                    }
                    return None, list(cyclic_groups)
                else:
                    seen.add(dependency)
                    stack.append((dependency, iter(self._dependencies(dependency))))
        return ordered, []

    def _producers_of(self, v: Value | None) -> list[ExecutionUnit]:
        maker = None if v is None else self._producer.get(v) or self._producer.get(self._canonical(v))
        return [] if maker is None else [maker]

    def _dependencies(self, unit: ExecutionUnit) -> list[ExecutionUnit]:
        """Return the units that must run before `unit`."""
        if isinstance(unit, ExpertElement):
            return [self._family_producer[unit.family]]
        if isinstance(unit, ExpertConcat):
            return [self._family_producer[unit.family]]
        if isinstance(unit, ExpertSelect):
            e, k = unit.other
            return [
                self._family_producer[unit.family],
                self._family_producer[unit.mask],
                *self._producers_of(e.operands[k]),
            ]
        if isinstance(unit, ExpertSum):
            others = [u for e, k in unit.others for u in self._producers_of(e.operands[k])]
            return [*others, *(self._family_producer[f] for f in unit.families)]
        if isinstance(unit, BatchedEquation):
            first = unit.equations[0]
            columns = zip(unit.operands, first.operands, strict=True)
            return [
                u for f, v in columns for u in ([self._family_producer[f]] if f is not None else self._producers_of(v))
            ]
        if isinstance(unit, ExpertFamily):
            if unit.part is not None:
                return self._producers_of(unit.part.source)
            return [u for e, k in unit.reads for u in self._producers_of(e.operands[k])]
        return [u for v in unit.operands for u in self._producers_of(v)]
