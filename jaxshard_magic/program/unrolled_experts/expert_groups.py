"""Groups of equations of one body that differ only by the expert.

A group begins where a Python loop takes the matrix of one expert out of a weight, `w[e]`. It grows forwards as long as
the equations of all experts do the same with operands of the group and with common operands. Other operands that differ
between experts (a column of the gates, the number in a comparison) are resolved backwards. A group ends where results
are added up, selected by masks, or concatenated by the step itself.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

import jax.numpy as jnp
import numpy as np

from ..flow import dependents, transitive_closure
from ..ir import Equation, Program, SubJaxpr, Value
from ..primitives import is_literal
from ..source_lines import user_line
from .array_parts import ArrayPart
from .equation_equality import EquationComparison

OperandRef = tuple[Equation, int]  # (equation, index of the operand)
_MAX_DEPTH = 100  # equations followed backwards from an operand


@dataclass(eq=False)
class ExpertFamily:
    """Indexed family of values: one for each expert.

    Attributes:
        values: The values, in the order of the experts; None for a literal.
        from_weights: Whether the values depend on the experts' weights.
        part: Part of an array that is the first value, where the values are consecutive parts; else None.
        reads: Operands to stack, where the values are literals or results of unequal equations.
    """

    values: tuple[Value | None, ...]
    from_weights: bool
    part: ArrayPart | None = None
    reads: tuple[OperandRef, ...] = ()


@dataclass(eq=False)
class BatchedEquation:
    """Equal equations, one for each expert, run as one batched equation.

    Attributes:
        equations: The equations, in the order of the experts.
        operands: Family of each operand; None for an operand common to all experts.
        results: Families of the results.
    """

    equations: tuple[Equation, ...]
    operands: list[ExpertFamily | None]
    results: list[ExpertFamily]


@dataclass(eq=False)
class ExpertSum:
    """Sum over experts.

    Attributes:
        families: Addends, one family each.
        others: Further addends.
        additions: All equations of the sum.
        root: Last of these, whose result is the sum.
    """

    families: list[ExpertFamily]
    others: list[OperandRef]
    additions: set[Equation]
    root: Equation


@dataclass(eq=False)
class ExpertConcat:
    """Concatenation of the values of all experts.

    Attributes:
        family: The values.
        equation: The concatenation.
    """

    family: ExpertFamily
    equation: Equation


@dataclass(eq=False)
class ExpertSelect:
    """Selection among experts by masks: element by element the value of the last expert with a mask equal to
    `select_if`.

    Attributes:
        family: Values of the experts.
        mask: Masks of the experts.
        select_if: Value of a mask that selects the expert.
        other: Operand for elements that no mask selects.
        last: Last of the selections, whose result is the whole.
    """

    family: ExpertFamily
    mask: ExpertFamily
    select_if: bool
    other: OperandRef
    last: Equation


Combination = ExpertSum | ExpertConcat | ExpertSelect


@dataclass(eq=False)
class ExpertGroup:
    """All equations in one body that follow from the weights of a set of experts.

    Attributes:
        expert_count: Number of experts.
        weight: Weight from which the experts' matrices are taken.
        first_equation: Equation that takes the first matrix.
        families: Families of values, by the values, or by the operands that read them.
        batched: Batched equations, by the index of each of their equations.
        combinations: Sums, concatenations and selections over experts.
        obstacle: Reason why the group can't be batched; None for none, "" where another group states it.
        is_routed: Whether the results are known to be weighed or selected by a routing choice.
        equal_values: Values that are equal for all experts, although each expert computes its own.
    """

    expert_count: int
    weight: Value
    first_equation: Equation
    families: dict[tuple, ExpertFamily] = field(default_factory=dict)
    batched: dict[int, BatchedEquation] = field(default_factory=dict)
    combinations: list[Combination] = field(default_factory=list)
    obstacle: str | None = None
    is_routed: bool = False
    equal_values: set[tuple[Value | None, ...]] = field(default_factory=set)


SEQUENTIAL_EXPERTS = "each reads what the one before it made"


class _NotBatchable(Exception):
    """Reason why a group can't be batched."""


class ExpertGroupSearch:
    """Search for expert groups in one body of a program.

    Args:
        program: The program.
        scope: The body.
        parts: Values of the body that are parts of arrays.
        weights: Values that are weights, or other forms of weights.
        comparison: Comparison of equations.
    """

    def __init__(
        self,
        program: Program,
        scope: SubJaxpr,
        parts: Mapping[Value, ArrayPart],
        weights: Set[Value],
        comparison: EquationComparison,
    ):
        self._program, self._scope, self._parts, self._comparison = program, scope, parts, comparison
        self._weights = weights
        # A step may slice `w[e]` more than once; all slices of the same part count as one value.
        first = dict[ArrayPart, Value]()
        self._canonical = {v: first.setdefault(part, v) for v, part in parts.items()}
        self._value_of_part = first
        self._producers = {v: e for e in scope.equations for v in e.results}
        self._readers = defaultdict[Value, list[OperandRef]](list)
        for e in scope.equations:
            for k, v in enumerate(e.operands):
                if v is not None:
                    self._readers[self.canonical(v)].append((e, k))
        self._body_outputs = {self.canonical(v) for v in scope.outputs if v is not None}
        self._grouped = set[Value | None]()

    def canonical(self, v: Value) -> Value:
        """Return the first value of the body that is the same part of the same array."""
        return self._canonical.get(v, v)

    def find_groups(self, expert_counts: Set[int], is_routed: Callable[[ExpertGroup], bool]) -> list[ExpertGroup]:
        """Return the groups that can be batched and are routed, and those with an obstacle.

        Args:
            expert_counts: Possible numbers of experts.
            is_routed: Predicate for groups whose results are weighed or selected by a routing choice.
        """
        groups = []
        for source, dim, size in {(p.source, p.dim, p.size): None for p in self._value_of_part}:
            # Weights of experts are stacked matrices, with 3 dimensions or more.
            if source not in self._weights or len(shape := self._program.shapes[source]) < 3:
                continue
            count = shape[dim] // size
            if count < 2 or count not in expert_counts:
                continue
            parts = [ArrayPart(source, dim, e * size, size) for e in range(count)]
            if count * size != shape[dim] or not all(part in self._value_of_part for part in parts):
                continue
            values = tuple(self._value_of_part[part] for part in parts)
            if not any(v in self._grouped for v in values):
                group = self._build_group(count, values)
                group.is_routed = is_routed(group)
                if group.is_routed or group.obstacle is not None:
                    groups.append(group)
                    families = group.families.values()
                    self._grouped.update(v for f in families if f.from_weights and f.part for v in f.values)
        for blocked_group in [group for group in groups if group.obstacle is not None]:
            self._spread_obstacle(blocked_group, groups)
        return groups

    def _spread_obstacle(self, blocked_group: ExpertGroup, groups: list[ExpertGroup]) -> None:
        """Mark groups that depend on the results of a group with an obstacle."""
        first = next(iter(blocked_group.families.values()))
        # Tested on two experts: a family follows this group expert by expert if the second expert's part reaches the
        # family's second value and not its first.
        dependent_values = dependents(self._scope, [v for v in first.values[1:2] if v is not None])
        for group in groups:
            for family in group.families.values() if group.obstacle is None else ():
                if family.reads and family.values[1] in dependent_values and family.values[0] not in dependent_values:
                    group.obstacle = ""

    def _build_group(self, count: int, values: tuple[Value, ...]) -> ExpertGroup:
        part = self._parts[values[0]]
        group = ExpertGroup(count, part.source, self._producers[values[0]])
        pending = [self._add_family(group, values, from_weights=True, part=part)]
        try:
            for family in pending:  # `pending` grows in the loop
                family_count = len(group.families)
                try:
                    self._group_readers(group, family)
                except _NotBatchable as reason:
                    # If each expert reads the result of the one before, all other differences follow from that.
                    raise (_NotBatchable(SEQUENTIAL_EXPERTS) if self._is_sequential(family) else reason) from None
                pending += [f for f in [*group.families.values()][family_count:] if f.from_weights and f not in pending]
        except _NotBatchable as reason:
            group.obstacle = str(reason)
        return group

    def _add_family(
        self, group: ExpertGroup, values: tuple[Value | None, ...], *, from_weights: bool, part: ArrayPart | None = None
    ) -> ExpertFamily:
        group.families[values] = family = ExpertFamily(values, from_weights, part)
        return family

    def _group_readers(self, group: ExpertGroup, family: ExpertFamily) -> None:
        """Group all readers of a family."""
        readers = [self._readers[v] for v in family.values if v is not None]
        n = min(map(len, readers))
        for k in range(n):
            operand_refs = [r[k] for r in readers]
            equations = tuple(e for e, _ in operand_refs)
            if self._match_concat(group, family, equations):
                continue
            if self._match_select(group, family, equations):
                continue
            if equations[0].name in ("add", "add_any") and self._match_sum(group, family, equations):
                continue
            if len({i for _, i in operand_refs}) > 1:
                raise _NotBatchable(self._describe_difference(equations))
            if (existing := group.batched.get(equations[0].index)) is not None and existing.equations == equations:
                continue
            if (reason := self._batch_equations(group, equations, 0)) is not None:
                raise _NotBatchable(reason)
        if (extra_reader := next((r[n] for r in readers if len(r) > n), None)) is not None:
            raise _NotBatchable(
                f"what one of them makes is read by {_describe_equation(extra_reader[0])}, and that of others is not"
            )

    def _match_concat(self, group: ExpertGroup, family: ExpertFamily, equations: tuple[Equation, ...]) -> bool:
        """Record a concatenation of the whole family; return whether `equations` is one."""
        e = equations[0]
        if e.name not in ("concatenate", "stack") or any(other is not e for other in equations):
            return False
        if tuple(v if v is None else self.canonical(v) for v in e.operands) != family.values:
            return False
        if not any(
            isinstance(combination, ExpertConcat) and combination.equation is e for combination in group.combinations
        ):
            group.combinations.append(ExpertConcat(family, e))
        return True

    def _match_sum(self, group: ExpertGroup, family: ExpertFamily, equations: tuple[Equation, ...]) -> bool:
        """Record a sum over experts; return whether `equations`, additions of each expert's value, are part of one."""
        paths = [self._addition_path(e) for e in equations]
        indices = [{e.index for e in path} for path in paths]
        first_indices = [e.index for e in equations]
        are_separate = all(
            f not in other for i, f in enumerate(first_indices) for j, other in enumerate(indices) if i != j
        )
        if are_separate and len(set(first_indices)) == len(first_indices):
            return False  # each expert's value is added to something else
        common = set[int].intersection(*indices)
        root = next((e for e in paths[0] if e.index in common), None)
        if root is None:
            raise _NotBatchable(self._describe_difference(equations))
        additions = {e for path in paths for e in path[: path.index(root) + 1]}
        expert_sum = next(
            (
                combination
                for combination in group.combinations
                if isinstance(combination, ExpertSum) and combination.additions & additions
            ),
            None,
        )
        if expert_sum is None:
            expert_sum = ExpertSum([], [(e, k) for e in additions for k in range(len(e.operands))], additions, root)
            inner = {e.results[0] for e in additions if e is not root}
            expert_sum.others = sorted(
                ((e, k) for e, k in expert_sum.others if e.operands[k] not in inner), key=lambda r: (r[0].index, r[1])
            )
            group.combinations.append(expert_sum)
        elif family in expert_sum.families:
            return True
        elif not additions <= expert_sum.additions:
            raise _NotBatchable(f"{_describe_equation(root)} adds up several things that they make in another order")
        family_refs = [(e, k) for e, k in expert_sum.others if self._canonical_operand(e, k) in family.values]
        if sorted(self._canonical_operand(*r) or 0 for r in family_refs) != sorted(v or 0 for v in family.values):
            raise _NotBatchable(self._describe_difference(equations))
        expert_sum.others = [r for r in expert_sum.others if r not in family_refs]
        expert_sum.families.append(family)
        return True

    def _match_select(self, group: ExpertGroup, family: ExpertFamily, equations: tuple[Equation, ...]) -> bool:
        """Record a selection by masks; return whether `equations` are `where(mask, value, previous result)`, one after
        the other."""
        first = equations[0]
        if first.name == "select_n" and len(first.operands) == 3:
            if_false, if_true = 1, 2
        elif first.name in ("jit", "pjit") and first.params["name"] == "_where" and len(first.operands) == 3:
            if_false, if_true = 2, 1
        else:
            return False
        pairs = [*pairwise(equations)]
        previous_index = next(
            (k for k in (if_false, if_true) if all(b.operands[k] == a.results[0] for a, b in pairs)), None
        )
        value_index = if_true if previous_index == if_false else if_false
        if previous_index is None or tuple(self._canonical_operand(e, value_index) for e in equations) != family.values:
            return False
        shapes, out = self._program.shapes, first.results[0]
        # Batching skips the intermediate selections, so nothing else may read them.
        unread_elsewhere = all(
            len(self._readers[a.results[0]]) == 1 and a.results[0] not in self._body_outputs for a, _ in pairs
        )
        if not unread_elsewhere or not all(
            self._comparison.are_equivalent(first.jaxpr_eqn, e.jaxpr_eqn) for e in equations
        ):
            raise _NotBatchable(self._describe_difference(equations))
        mask = self._operand_family(group, [(e, 0) for e in equations], 0)
        avals = self._program.avals
        dtypes = avals[out].dtype, avals[first.operands[0]].dtype if first.operands[0] is not None else None
        is_supported = jnp.issubdtype(dtypes[0], jnp.inexact) and dtypes[1] == jnp.bool_
        if mask is None or not is_supported or any(v is None or shapes[v] != shapes[out] for v in family.values):
            raise _NotBatchable(f"{_describe_equation(first)} takes them one by one")
        group.combinations.append(
            ExpertSelect(family, mask, previous_index == if_false, (first, previous_index), equations[-1])
        )
        return True

    def _is_sequential(self, family: ExpertFamily) -> bool:
        """Return whether the second expert's value depends on the first one's."""
        first, second = family.values[:2]
        if first is None or second is None or first not in self._producers:
            return False
        first_index = self._producers[first].index

        def later_operands(v: Value) -> Iterator[Value]:
            e = self._producers.get(v)
            return (w for w in (e.operands if e and e.index > first_index else ()) if w is not None)

        return first in transitive_closure([second], later_operands)

    def _addition_path(self, e: Equation) -> list[Equation]:
        """Return the additions from `e` on, as long as each result has one reader, the next addition."""
        path = [e]
        while True:
            out = path[-1].results[0]
            readers = self._readers[out]
            if len(readers) != 1 or out in self._body_outputs or readers[0][0].name not in ("add", "add_any"):
                return path
            path.append(readers[0][0])

    def _canonical_operand(self, e: Equation, k: int) -> Value | None:
        v = e.operands[k]
        return None if v is None else self.canonical(v)

    def _batch_equations(self, group: ExpertGroup, equations: tuple[Equation, ...], depth: int) -> str | None:
        """Batch equations, one for each expert; return the reason why they can't be batched, None on success."""
        first = equations[0]
        if len(set(equations)) < len(equations) or any(e.index in group.batched for e in equations):
            return self._describe_difference(equations)
        if not all(self._comparison.are_equivalent(first.jaxpr_eqn, e.jaxpr_eqn) for e in equations[1:]):
            return self._describe_difference(equations)
        batched = BatchedEquation(equations, [], [])
        group.batched |= dict.fromkeys((e.index for e in equations), batched)
        for k in range(len(first.operands)):
            batched.operands.append(self._operand_family(group, [(e, k) for e in equations], depth))
        from_weights = any(family is not None and family.from_weights for family in batched.operands)
        for outs in zip(*(e.results for e in equations), strict=True):
            batched.results.append(self._add_family(group, outs, from_weights=from_weights))
        return None

    def _operand_family(self, group: ExpertGroup, operand_refs: list[OperandRef], depth: int) -> ExpertFamily | None:
        """Return the family of one operand of each expert's equation; None where the operand is the same for all."""
        values = tuple(self._canonical_operand(e, k) for e, k in operand_refs)
        if None in values:
            if any(values):
                return self._add_read_family(group, operand_refs, values)
            numbers = [np.asarray(_literal_value(r)) for r in operand_refs]
            if all(np.array_equal(numbers[0], x, equal_nan=x.dtype.kind == "f") for x in numbers):
                return None
            return self._add_read_family(group, operand_refs, values)
        if len(set(values)) == 1 or values in group.equal_values:
            return None
        if values in group.families:
            return group.families[values]
        part = self._first_of_parts(values)
        if part is not None:
            n = self._program.shapes[part.source][part.dim]
            is_all_of_array = part.start == 0 and len(values) * part.size == n
            return self._add_family(
                group, values, from_weights=is_all_of_array and part.source in self._weights, part=part
            )
        if depth < _MAX_DEPTH and all(v in self._producers for v in values):
            producers = tuple(self._producers[v] for v in values if v is not None)
            result_indices = {e.results.index(v) for e, v in zip(producers, values, strict=True) if v is not None}
            if len(result_indices) == 1 and self._batch_equations(group, producers, depth + 1) is None:
                batched = group.batched[producers[0].index]
                # Equal equations on common operands make equal values: one of them serves all experts, without a batch.
                if any(batched.operands):
                    return group.families[values]
                for e in producers:
                    del group.batched[e.index]
                for family in batched.results:
                    del group.families[family.values]
                group.equal_values.add(values)
                return None
        return self._add_read_family(group, operand_refs, values)

    def _add_read_family(
        self, group: ExpertGroup, operand_refs: list[OperandRef], values: tuple[Value | None, ...]
    ) -> ExpertFamily:
        """Add a family of literals, or of values made by unequal equations."""
        key = values if None not in values else tuple((e.index, k) for e, k in operand_refs)
        group.families[key] = family = ExpertFamily(values, False, reads=tuple(operand_refs))
        return family

    def _first_of_parts(self, values: Sequence[Value | None]) -> ArrayPart | None:
        """Return the first of the consecutive parts of one array that the values are; None for other values."""
        first = self._parts.get(values[0]) if values[0] is not None else None
        if first is None:
            return None
        consecutive = [
            ArrayPart(first.source, first.dim, first.start + e * first.size, first.size) for e in range(len(values))
        ]
        return first if [v is not None and self._parts.get(v) for v in values] == consecutive else None

    def _describe_difference(self, equations: Sequence[Equation]) -> str:
        """Describe the first difference between the experts' equations, for a message."""
        first = equations[0]
        i = next(
            (i for i, e in enumerate(equations) if not self._comparison.are_equivalent(first.jaxpr_eqn, e.jaxpr_eqn)),
            None,
        )
        if i is None:
            return f"{_describe_equation(first)} takes them one by one"
        if i == 0:
            return f"{_describe_equation(first)} has an effect of its own"
        return f"expert {i} has {_describe_equation(equations[i])} where expert 0 has {_describe_equation(first)}"


def _literal_value(read: OperandRef) -> object:
    var = read[0].jaxpr_eqn.invars[read[1]]
    return var.val if is_literal(var) else None


def _describe_equation(e: Equation) -> str:
    line = user_line(e.jaxpr_eqn)
    return f"`{e.params.get('name', e.name)}`" + (f" ({line})" if line else "")
