"""Values with one number in all elements, equal in every run of a program: splats, in the words of MLIR."""

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


class SplatConstants:
    """Scalars of all splat values of a program, through loops, branches and calls.

    Arithmetic on constants is not evaluated; only conversions of single numbers are. Cost: one pass over the program.

    Args:
        program: The program.
        known_inputs: Inputs that are constants, with their values.

    >>> program = Program(jax.make_jaxpr(lambda x: x * jnp.full((2, 4), 3.0).astype(jnp.int32))(jnp.ones((2, 4))))
    >>> multiplication = program.equations[-1]
    >>> splats = SplatConstants(program)
    >>> splats.operand_scalar(multiplication, 1), splats.operand_scalar(multiplication, 0)
    (array(3., dtype=float32), None)
    """

    def __init__(self, program: Program, known_inputs: Mapping[Value, Any] | None = None):
        domain, given = _SplatDomain(), known_inputs or {}
        starts = [domain.constant(given[v]) if v in given else NOT_SPLAT for v in program.inputs]
        self._facts = solve(program, domain, starts)

    def scalar(self, value: Value) -> np.ndarray | None:
        """Return the number of `value` as an array of shape () in the value's dtype; None where elements may differ."""
        return self._facts[value].array

    def operand_scalar(self, eqn: Equation, position: int) -> np.ndarray | None:
        """Return the number of an operand of `eqn`, literals included; None where elements may differ.

        Args:
            eqn: The equation.
            position: Index of the operand.
        """
        value, variable = eqn.operands[position], eqn.jaxpr_eqn.invars[position]
        # A literal may be a Python number; its aval has the dtype.
        if value is None and is_literal(variable):
            return _cast_splat(_splat_of(variable.val), variable.aval).array
        return None if value is None else self.scalar(value)


@dataclass(frozen=True, slots=True)
class _Splat:
    """One number, compared by its bits, so that NaN equals NaN.

    Attributes:
        dtype: NumPy dtype of the number; None for `UNREACHED` (no fact yet) and `NOT_SPLAT` (several numbers).
        bits: Bytes of the number.
    """

    dtype: Any
    bits: bytes

    @property
    def array(self) -> np.ndarray | None:
        """The number as an array of shape (); None without a dtype."""
        return None if self.dtype is None else np.frombuffer(self.bits, self.dtype).reshape(())


UNREACHED, NOT_SPLAT = _Splat(None, b""), _Splat(None, b"various")


def _splat_of(x: Any) -> _Splat:
    """Return the fact of a constant: its number where the constant has one element and can be read."""
    dtype = jnp.result_type(x)
    if np.size(x) != 1 or not _is_numpy_dtype(dtype) or not is_readable(x):
        return NOT_SPLAT
    return _Splat(dtype, np.asarray(x).astype(dtype).tobytes())


def is_readable(constant: Any) -> bool:
    """Return whether the numbers of a constant can be read now: not traced, not deleted, not on other hosts."""
    if not isinstance(constant, jax.Array):
        return True
    return not isinstance(constant, Tracer) and not constant.is_deleted() and constant.is_fully_addressable


def _is_numpy_dtype(dtype: Any) -> bool:
    """Return whether NumPy has the dtype too; extended dtypes such as random keys are JAX's alone."""
    return not jnp.issubdtype(dtype, jax.dtypes.extended)


class _SplatDomain(Domain[_Splat]):
    """Lattice for `solver.solve`: no fact, one number, several numbers."""

    bottom: ClassVar[_Splat] = UNREACHED

    def join(self, first: _Splat, second: _Splat) -> _Splat:
        """Return the number common to both facts; `NOT_SPLAT` where they differ."""
        if second in (first, UNREACHED):
            return first
        return second if first == UNREACHED else NOT_SPLAT

    def constant(self, number: Any) -> _Splat:
        """Return the fact of a literal."""
        return _splat_of(number)

    def transfer(self, eqn: Equation, operands: Sequence[_Splat]) -> Sequence[_Splat]:
        """Return the facts of the results: numbers survive repetition, rearrangement, casts and selection."""
        known = eqn.primitive
        if known.kind is Kind.PASS_THROUGH:
            return operands
        same = known.selects_elements or (known.alias and (known.data_movement or eqn.primitive.changes_dtype))
        fact = _cast_splat(operands[0], eqn.jaxpr_eqn.outvars[0].aval) if same else NOT_SPLAT
        return [fact] * len(eqn.results)


def _cast_splat(fact: _Splat, aval: Any) -> _Splat:
    """Return the fact of a number cast to the dtype of `aval`."""
    if (number := fact.array) is None or aval.dtype == fact.dtype:
        return fact
    dtype = aval.dtype
    # What an infinite float becomes as an integer depends on the device.
    if not _is_numpy_dtype(dtype) or (jnp.issubdtype(dtype, jnp.integer) and not np.isfinite(number)):
        return NOT_SPLAT
    with np.errstate(over="ignore"):
        return _splat_of(number.astype(dtype))
