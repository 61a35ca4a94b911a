"""Values all of whose elements are one number, the same in every run of a program: what MLIR calls a splat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .ir import Equation, Program, Value
from .primitives import is_literal
from .primitives.primitive import Kind
from .solver import Domain, solve


class Constants:
    """The one number of each value of `program` that has one, through loops, branches and calls.

    `known`: inputs that are constants, by their value. Cost: one pass over the program; nothing is evaluated but
    conversions of single numbers. What arithmetic makes of constants is not known here.

    >>> program = Program(jax.make_jaxpr(lambda x: x * jnp.full((2, 4), 3.0).astype(jnp.int32))(jnp.ones((2, 4))))
    >>> multiplication = program.equations[-1]
    >>> Constants(program).operand(multiplication, 1), Constants(program).operand(multiplication, 0)
    (array(3., dtype=float32), None)
    """

    def __init__(self, program: Program, known: Mapping[Value, Any] | None = None):
        domain, given = _Numbers(), known or {}
        starts = [domain.constant(given[v]) if v in given else VARIOUS for v in program.inputs]
        self._facts = solve(program, domain, starts)

    def of(self, value: Value) -> np.ndarray | None:
        """Return the number of `value` as an array without dimensions, in its dtype; None where it has several."""
        return self._facts[value].array

    def operand(self, eqn: Equation, position: int) -> np.ndarray | None:
        """Return the number of an operand of `eqn`, which may be a literal; None where it has several."""
        value, variable = eqn.ins[position], eqn.eqn.invars[position]
        if value is None and is_literal(variable):
            return _converted(_number(variable.val), variable.aval).array
        return None if value is None else self.of(value)


@dataclass(frozen=True, slots=True)
class _Fact:
    """One number, by its bits: NaN is itself. Without a dtype, nothing yet (`UNREACHED`) or several (`VARIOUS`)."""

    dtype: Any
    bits: bytes

    @property
    def array(self) -> np.ndarray | None:
        return None if self.dtype is None else np.frombuffer(self.bits, self.dtype).reshape(())


UNREACHED, VARIOUS = _Fact(None, b""), _Fact(None, b"various")


def _number(x: Any) -> _Fact:
    """Return the fact of a constant: its number where it has one element, and is at hand."""
    dtype = jnp.result_type(x)
    if np.size(x) != 1 or not _is_plain(dtype) or not is_at_hand(x):
        return VARIOUS
    return _Fact(dtype, np.asarray(x).astype(dtype).tobytes())


def is_at_hand(constant: Any) -> bool:
    """Return whether the numbers of a constant can be read here and now."""
    if not isinstance(constant, jax.Array):
        return True
    return not isinstance(constant, Tracer) and not constant.is_deleted() and constant.is_fully_addressable


def _is_plain(dtype: Any) -> bool:
    """Return whether NumPy has it, too: not that of random keys, for example."""
    return not jnp.issubdtype(dtype, jax.dtypes.extended)


class _Numbers(Domain[_Fact]):
    """One number or several, as facts for `solver.solve`."""

    bottom: ClassVar[_Fact] = UNREACHED

    def join(self, first: _Fact, second: _Fact) -> _Fact:
        """Return the number of both; several where they differ."""
        if second in (first, UNREACHED):
            return first
        return second if first == UNREACHED else VARIOUS

    def constant(self, number: Any) -> _Fact:
        return _number(number)

    def transfer(self, eqn: Equation, operands: Sequence[_Fact]) -> Sequence[_Fact]:
        """Return the number of what hands on its operand's elements, repeats them or leaves some out."""
        known = eqn.primitive
        if known.kind is Kind.EACH:
            return operands
        same = known.part or (known.alias and (known.moves or eqn.primitive.casts))
        fact = _converted(operands[0], eqn.eqn.outvars[0].aval) if same else VARIOUS
        return [fact] * len(eqn.outs)


def _converted(fact: _Fact, aval: Any) -> _Fact:
    """Return a number in the dtype of `aval`."""
    if (number := fact.array) is None or aval.dtype == fact.dtype:
        return fact
    dtype = aval.dtype
    # What an infinite float becomes as an integer depends on the device.
    if not _is_plain(dtype) or (jnp.issubdtype(dtype, jnp.integer) and not np.isfinite(number)):
        return VARIOUS
    with np.errstate(over="ignore"):
        return _number(number.astype(dtype))
