"""Histograms in a program: `bincount`, sums of `one_hot`, `segment_sum` of ones, and the keys counted by each."""

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import jax.numpy as jnp

from .ir import Equation, Program, Value
from .primitives import called_body, shape_of
from .primitives.primitive import Kind
from .splat_constants import SplatConstants
from .topk_sites import find_topk_sites


@dataclass(frozen=True, eq=False)
class Histograms:
    """Histograms of a program and the keys counted by each.

    Attributes:
        program: The program.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> def f(x):
    ...     keys = jnp.argmax(x, -1)
    ...     return keys, jnp.bincount(keys, length=4), jnp.bincount(keys + 1, length=4)
    >>> program = Program(jax.make_jaxpr(f)(jnp.ones((6, 4))))
    >>> keys, counts, others = program.outputs
    >>> histograms = Histograms(program)
    >>> histograms.counted_keys(counts) == histograms.root(keys), histograms.counted_keys(others)
    (True, None)
    """

    program: Program

    def root(self, value: Value | None) -> Value | None:
        """Return the earliest value with the same numbers as `value`, in another form or in an outer or inner body.

        None for a literal.
        """
        root, loop_dims = value, 0  # leading loop dimensions that `value` has and the first value has not
        while value is not None:
            e = self.program.producer.get(value)
            before, more = self._outer_value(value) if e is None else self._preceding_value(e, value)
            if before is None or (before, more) == (value, 0) or loop_dims + more < 0:
                break
            value, loop_dims = before, loop_dims + more
            # A value in a loop is a slice of a stacked value: only a value with equal loop dimensions can be the root.
            root = root if loop_dims else value
        return root

    def are_equal(self, a: Value | None, b: Value | None) -> bool:
        """Return whether two values are computed from the same values in the same way, as under rematerialization."""
        first, second = (self.root(v) for v in (a, b))
        if first is None or second is None or first == second:
            return first == second is not None
        if (first, second) not in self._equal_pairs:
            # Assumed while the producers are compared, which ends the recursion.
            self._equal_pairs[first, second] = False
            self._equal_pairs[first, second] = self._computed_equally(first, second)
        return self._equal_pairs[first, second]

    def _computed_equally(self, a: Value, b: Value) -> bool:
        """Return whether two values are the same result of equal, effect-free equations on equal operands."""
        e, f = (self.program.producer.get(v) for v in (a, b))
        if e is None or f is None or e.bodies or f.bodies or e.name != f.name or e.jaxpr_eqn.effects:
            return False
        if e.results.index(a) != f.results.index(b) or str(e.params) != str(f.params):
            return False
        return all(self._operands_equal(e, f, k) for k in range(len(e.operands)))

    def _operands_equal(self, e: Equation, f: Equation, k: int) -> bool:
        """Return whether operand `k` of both equations is equal: as a value, or as a literal number."""
        if e.operands[k] is None or f.operands[k] is None:
            numbers = (self._operand_scalar(e, k), self._operand_scalar(f, k))
            return None not in numbers and bool(numbers[0] == numbers[1])
        return self.are_equal(e.operands[k], f.operands[k])

    @cached_property
    def _equal_pairs(self) -> dict[tuple[Value, Value], bool]:
        """Equality of pairs of values compared so far."""
        return {}

    def counted_keys(self, value: Value | None) -> Value | None:
        """Return the root of the keys whose occurrences `value` counts.

        Element i of such a value is the number of keys equal to i; keys beyond the length are not counted. None where
        `value` is no histogram, or where keys may be negative.
        """
        e = self._root_producer(value)
        if e is not None and e.primitive.changes_dtype:  # counts added up as floats, exact up to 2**24
            e = self._root_producer(e.operands[0])
        if e is None:
            return None
        root = self.root(self._scatter_add_keys(e) if e.primitive.is_additive else self._one_hot_keys(e))
        return root if self.index_producer(root) is not None or self._is_clipped_at_zero(root) else None

    def index_producer(self, value: Value | None) -> Equation | None:
        """Return the equation that produced all numbers of `value` as indices, none of them negative.

        `argmax` and `top_k` give indices along a dimension. None where the origin is not known.
        """
        value, e = self._superset_source(value)
        given = None if e is None else e.primitive.index_result
        return e if e is not None and given is not None and e.results[given] == value else None

    def _is_clipped_at_zero(self, value: Value | None) -> bool:
        """Return whether a value is clipped from below at 0, as `min(max(x, 0), n)`."""
        _, e = self._superset_source(value)
        if e is None or e.name != "min":
            return False
        for k in (0, 1):
            inner, most = self.resolve_calls(e.operands[k]), self._operand_scalar(e, 1 - k)
            below = None if inner is None else self.program.producer.get(inner)
            if below is not None and below.name == "max" and most is not None and most >= 0:
                return 0 in (self._operand_scalar(below, 0), self._operand_scalar(below, 1))
        return False

    def _superset_source(self, value: Value | None) -> tuple[Value | None, Equation | None]:
        """Return a source with all numbers of `value`, a part or repetition of the source, and its producer."""
        e = self._root_producer(value)
        while e is not None and (e.primitive.selects_elements or e.factors is not None):
            value = e.operands[0]
            e = self._root_producer(value)
        return self.root(value), e

    def _root_producer(self, value: Value | None) -> Equation | None:
        """Return the equation that produced the root of a value."""
        root = self.root(value)
        return None if root is None else self.program.producer.get(root)

    def _outer_value(self, value: Value) -> tuple[Value | None, int]:
        """Return the value outside of a body that enters as `value`, and its number of additional loop dimensions."""
        entrance = self.program.body_inputs.get(value)
        return (None, 0) if entrance is None else entrance[1:]

    def _preceding_value(self, e: Equation, value: Value) -> tuple[Value | None, int]:
        """Return the value from which result `value` of `e` has its numbers, and the change in loop dimensions.

        The source is an operand, or a result of the body; (None, 0) where there is none.
        """
        if e.is_scan or called_body(e.jaxpr_eqn) is not None:
            sources = ((a, -lead) for a, b, lead in e.bodies[0].outputs if b == value)
            carried = {out for out, _ in e.bodies[0].carries}
            inner, lead = next(sources)
            # A carry's result comes from the last trip only.
            return (None, 0) if e.is_scan and (inner in carried and not lead) else (inner, lead)
        if e.primitive.kind is Kind.PASS_THROUGH:
            return e.operands[e.results.index(value)], 0
        same = (
            e.primitive.is_elementwise
            and e.primitive.alias
            and (e.primitive.data_movement or self._is_lossless_integer_cast(e))
        )
        if same or (e.factors is not None and not e.factors.has_repeats):
            return e.operands[0], 0
        if e.name == "max":  # max(keys, 0) are the same keys, as none is negative
            zero = next((k for k in (0, 1) if self._operand_scalar(e, k) == 0), None)
            return (None, 0) if zero is None else (e.operands[1 - zero], 0)
        if e.name == "select_n" and self._is_negative_index_wrap(e):
            return e.operands[1], 0
        return None, 0

    def rearranged_operand(self, e: Equation) -> Value | None:
        """Return the operand of which the result of `e` has each number equally often, under other dimensions.

        Clipping at 0 from below counts too, as keys are not negative. None for equations of any other kind.

        Args:
            e: The equation.
        """
        return None if e.bodies or e.primitive.kind is Kind.PASS_THROUGH else self._preceding_value(e, e.results[0])[0]

    def _is_lossless_integer_cast(self, e: Equation) -> bool:
        """Return whether `e` keeps all integers: integer operand and result, the result dtype wide enough."""
        dtypes = [self.program.avals[v].dtype for v in (*e.operands, *e.results) if v is not None]
        if not all(jnp.issubdtype(d, jnp.integer) for d in dtypes):
            return False
        before, after = (jnp.iinfo(dtypes[k]).max for k in (0, -1))
        return after >= before or after >= self._upper_bound(e.operands[0])

    def _upper_bound(self, value: Value | None) -> float:
        """Return the largest possible key; infinity where not known."""
        made = self.index_producer(value)
        return inf if made is None else self.largest_indices[made.index]

    @cached_property
    def largest_indices(self) -> dict[int, int]:
        """Largest index that each equation with indices along a dimension can return, by equation index."""
        return {r.equation.index: r.size - 1 for r in find_topk_sites(self.program) if r.indices_result is not None}

    def _is_negative_index_wrap(self, e: Equation) -> bool:
        """Return whether `e` selects its second operand unless that operand is negative."""
        test = self._root_producer(e.operands[0])
        return (
            test is not None
            and test.name == "lt"
            and self._operand_scalar(test, 1) == 0
            and e.operands[1] is not None
            and self.resolve_calls(test.operands[0]) == self.resolve_calls(e.operands[1])
        )

    def resolve_calls(self, value: Value | None) -> Value | None:
        """Return the value behind `value` once calls are looked through, both into and out of their bodies.

        Args:
            value: A value, None for a literal.
        """
        while value is not None:
            e = self.program.producer.get(value)
            if e is None:
                before = self.program.outer_value(value)
            elif called_body(e.jaxpr_eqn) is not None:
                before = next(a for a, b, _ in e.bodies[0].outputs if b == value)
            else:
                break
            if before is None:
                break
            value = before
        return value

    def unwrapped_index(self, value: Value | None) -> Value | None:
        """Return the value behind `value`, before calls and before negative indices were wrapped to count from the end.

        Args:
            value: A value, None for a literal.
        """
        while (found := self.resolve_calls(value)) is not None:
            e = self.program.producer.get(found)
            if e is None or e.name != "select_n" or not self._is_negative_index_wrap(e):
                break
            value = e.operands[1]
        return found

    @cached_property
    def constants(self) -> SplatConstants:
        """Scalars of the program's splat values."""
        return SplatConstants(self.program)

    def _operand_scalar(self, e: Equation, k: int) -> Any:
        """Return the number in all elements of operand `k` of `e`; None where elements may differ."""
        return self.constants.operand_scalar(e, k)

    def _scatter_add_keys(self, e: Equation) -> Value | None:
        """Return the indices at which a scatter adds ones to zeros, where the result has one dimension."""
        if not e.primitive.is_scatter or len(self.program.shapes[e.results[0]]) != 1:
            return None
        ones = self._operand_scalar(e, 0) == 0 and self._operand_scalar(e, 2) == 1
        index = None if e.operands[1] is None else self.resolve_calls(e.operands[1])
        return index if ones else None

    def _one_hot_keys(self, e: Equation) -> Value | None:
        """Return the keys compared with an iota, where `e` sums over all dimensions except the iota's."""
        if len(self.program.shapes[e.results[0]]) != 1:
            return None
        eqn: Equation | None = e
        dim = 0
        while eqn is not None and eqn.name == "reduce_sum":
            kept_dims = [d for d in range(len(shape_of(eqn.jaxpr_eqn.invars[0]))) if d not in eqn.params["axes"]]
            value, dim = self._trace_dim(eqn.operands[0], kept_dims[dim])
            while (eqn := self._producer(value)) is not None and eqn.primitive.changes_dtype:
                value, dim = self._trace_dim(eqn.operands[0], dim)  # bools are cast before the sum
        if eqn is None or eqn.name != "eq":
            return None
        iota_operands = [k for k in (0, 1) if self._is_iota_along(eqn.operands[k], dim)]
        return self._broadcast_source(eqn.operands[1 - iota_operands[0]], dim) if len(iota_operands) == 1 else None

    def _is_iota_along(self, value: Value | None, dim: int) -> bool:
        """Return whether a value is an iota along dimension `dim`, whatever its other dimensions."""
        value, dim = self._trace_dim(value, dim, through_broadcasts=True)
        e = self._producer(value)
        return e is not None and e.name == "iota" and e.params["dimension"] == dim

    def _broadcast_source(self, value: Value | None, dim: int) -> Value | None:
        """Return the value that is broadcast along dimension `dim` alone to make `value`."""
        value, dim = self._trace_dim(value, dim)
        e = self._producer(value)
        if e is None or e.factors is None or dim not in e.factors.repeated_dims:
            return None
        return e.operands[0] if all(e.factors.result_shape[d] == 1 for d in e.factors.repeated_dims - {dim}) else None

    def _trace_dim(
        self, value: Value | None, dim: int, *, through_broadcasts: bool = False
    ) -> tuple[Value | None, int]:
        """Trace dimension `dim` of a value back through other forms of the value.

        Args:
            value: A value, None for a literal.
            dim: Dimension.
            through_broadcasts: Continue where the value is broadcast along other dimensions.

        Returns:
            The earliest value that still has the dimension, and the dimension there.
        """
        while (e := self._producer(value := self.resolve_calls(value))) is not None and value is not None:
            before, lead, d = *self._preceding_value(e, value), dim
            if (factors := e.factors) is not None:
                others = any(factors.result_shape[k] > 1 for k in factors.repeated_dims)
                before = e.operands[0] if through_broadcasts or not others else None
                d = factors.inverse.unsplit_dim(dim)
            if before is None or lead or d is None:
                break
            value, dim = before, d
        return value, dim

    def _producer(self, value: Value | None) -> Equation | None:
        """Return the equation that produced exactly `value`."""
        return None if value is None else self.program.producer.get(value)
