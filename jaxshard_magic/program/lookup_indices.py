"""Origins of look-up indices: row numbers (iota), or integer inputs."""

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .ir import Equation, Program, Value
from .primitives import called_body, is_literal
from .primitives.factors import Factors
from .primitives.primitive import Kind

_VALUE_PRESERVING = (Kind.ELEMENTWISE, Kind.SHAPE, Kind.SLICE)


@dataclass(frozen=True, eq=False)
class LookupIndices:
    """Origins of the indices of a program.

    Attributes:
        program: The program.
    """

    program: Program

    def iota_dim(self, value: Value | None, column: int | None = None) -> int | None:
        """Return the dimension of `value` along which element i is the number i; None where there is none.

        `logits[jnp.arange(n), labels]` looks up at indices of shape (n, 2), where column 0 counts dimension 0.

        Args:
            value: A value, None for a literal.
            column: Consider this position of the last dimension only; None for all.
        """
        if value is None:
            return None
        e = self.program.producer.get(value)
        if e is None:
            return self.iota_dim(self.program.outer_value(value), column)
        if called_body(e.jaxpr_eqn) is not None:
            return self.iota_dim(next(a for a, b, _ in e.bodies[0].outputs if b == value), column)
        rank = len(self.program.shapes[value])
        if e.name == "iota":
            d = e.params["dimension"]
            return d if column is None or d < rank - 1 else None
        # JAX's indexing concatenates one column for each index array.
        if e.name == "concatenate":
            return self._iota_dim_of_concatenate(e, column) if e.params["dimension"] == rank - 1 else None
        # JAX's indexing wraps negative indices and may clamp. Neither changes row numbers.
        if e.name == "select_n":
            return self.iota_dim(e.operands[1], column) if is_negative_index_wrap(self.program, e) else None
        if e.name == "clamp":
            return self.iota_dim(e.operands[1], column)
        if e.factors is not None:
            return self._iota_dim_of_rearranged(e, e.factors, column)
        return self.iota_dim(e.operands[0], column) if e.primitive.alias and e.primitive.is_elementwise else None

    def input_origins(self, value: Value | None) -> Set[Value]:
        """Return the program inputs whose numbers, or some of them, an index has.

        Inputs that only sorted or sampled the numbers don't count. Empty where row numbers contribute too (`row *
        length + place`), as such an index stays within its rows. Cost: each value is visited once, over all calls.

        Args:
            value: A value, None for a literal.
        """
        known, stack = self._origins_by_value, [] if value is None else [value]
        while stack:
            v = stack[-1]
            sources = self._direct_sources(v)
            if unknown := [] if v in known else [a for a in sources if a not in known]:
                stack += unknown
                continue
            stack.pop()
            e = self.program.producer.get(v)
            source_origins = [known[a] for a in sources]
            counts_rows = None in source_origins or (e is not None and e.primitive.kind is Kind.SOURCE)
            own = {v} & self._program_inputs
            known[v] = None if counts_rows else own.union(*(each for each in source_origins if each is not None))
        return (None if value is None else known[value]) or frozenset()

    @cached_property
    def _origins_by_value(self) -> dict[Value, Set[Value] | None]:
        """Input origins by value, as far as asked for; None where row numbers contribute."""
        return {}

    @cached_property
    def _program_inputs(self) -> frozenset[Value]:
        return frozenset(self.program.inputs)

    def _direct_sources(self, value: Value) -> list[Value]:
        """Return the values with a value's numbers: operands, or the value across the boundary of a body."""
        e = self.program.producer.get(value)
        if e is None:
            sources: list[Value | None] = [self.program.outer_value(value)]
        elif called_body(e.jaxpr_eqn) is not None:
            sources = [a for a, b, _ in e.bodies[0].outputs if b == value]
        else:
            sources = e.operands if e.primitive.kind in _VALUE_PRESERVING else []
        return [v for v in sources if v is not None]

    def _iota_dim_of_concatenate(self, e: Equation, column: int | None) -> int | None:
        """Return the iota dimension of one column of a concatenation along the last dimension."""
        if column is None:
            return None
        offset = 0
        for v in e.operands:
            width = 0 if v is None else self.program.shapes[v][-1]
            if offset <= column < offset + width:
                return self.iota_dim(v, column - offset)
            offset += width
        return None

    def _iota_dim_of_rearranged(self, e: Equation, factors: Factors, column: int | None) -> int | None:
        """Return the iota dimension of a reshaped, broadcast or transposed value.

        A column stays a column where the last dimension stays. A broadcast along the last dimension makes all columns
        equal.
        """
        if column is not None:
            last = len(factors.result_shape) - 1
            if last in factors.repeated_dims:
                column = None
            elif factors.inverse.unsplit_dim(last) != len(factors.operand_shape) - 1:
                return None
        d = self.iota_dim(e.operands[0], column)
        return None if d is None else factors.unsplit_dim(d)


def is_negative_index_wrap(program: Program, e: Equation) -> bool:
    """Return whether `e` selects between an index and the same index counted from the end, by the sign of the index.

    Args:
        program: The program.
        e: A `select_n`.
    """
    test = None if e.operands[0] is None else program.producer.get(e.operands[0])
    if test is None or test.name != "lt" or test.operands[0] is None or test.operands[0] != e.operands[1]:
        return False
    zero = test.jaxpr_eqn.invars[1]
    return is_literal(zero) and bool(np.all(zero.val == 0))
