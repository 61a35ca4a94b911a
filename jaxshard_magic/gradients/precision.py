"""Mixed precision: a loss retraced with its products in a narrower dtype, before its gradients are taken."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from ..errors import ShardError, list_names, unknown_name
from ..program.emit import PerBodyReplay, Replay, retrace, run_replay
from ..program.ir import Equation, Program, SubJaxpr, Value
from ..program.primitives import bind_with_dtype, is_float
from ..program.primitives.primitive import AutocastPolicy
from .autocast import NARROW, DtypeAssignment, float32_dtypes, mixed_precision_dtypes, visible_equations

TYPES = {"bf16": jnp.dtype(jnp.bfloat16), "fp16": jnp.dtype(jnp.float16), "f32": jnp.dtype(jnp.float32)}


@dataclass(frozen=True)
class CastLoss:
    """Loss in another precision.

    Attributes:
        closed: The loss. May be the original where nothing changed.
        note: Summary of the dtypes, in words.
        changed: Number of products that run in another dtype than written.
    """

    closed: ClosedJaxpr
    note: str
    changed: int


def cast_loss(closed: ClosedJaxpr, how: str) -> CastLoss:
    """Return a loss with the same inputs and outputs, computed in another precision.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3. Inputs are cast where they are used, so
    that the gradients of float32 weights are summed in float32.

    Args:
        closed: Jaxpr of flat arrays without constants, not differentiated yet.
        how: "bf16" or "fp16": products run in this dtype, other equations by the rules of `autocast`. "f32": everything
            written in a narrower dtype runs in float32.

    Raises:
        ShardError: Any other `how`.

    >>> import jax
    >>> loss = jax.make_jaxpr(lambda w, x: jnp.square(x @ w).mean())(jnp.ones((4, 2)), jnp.ones((8, 4)))
    >>> cast_loss(loss, "bf16").note
    '1 of 1 product in bfloat16; the loss and 1 reduction in float32'
    """
    flat, types = assign_dtypes(closed, how)
    note = _note(flat, types, TYPES[how])
    if not types.equation_dtypes:
        return CastLoss(closed, note, 0)
    return CastLoss(retrace(_Cast(flat, types)), note, types.changed)


def assign_dtypes(closed: ClosedJaxpr, how: str) -> tuple[Program, DtypeAssignment]:
    """Return a loss without jits, and the dtypes of values and equations.

    Args:
        closed: Jaxpr of flat arrays without constants, not differentiated yet.
        how: "bf16", "fp16" or "f32".

    Raises:
        ShardError: Any other `how`.
    """
    if how not in TYPES:
        raise ShardError(
            unknown_name(f"--precision does not take {how!r}", how, TYPES, f"it takes {list_names(TYPES)}")
        )
    flat, dtype = Program(run_replay(closed, Replay)), TYPES[how]
    return flat, mixed_precision_dtypes(flat, dtype) if dtype in NARROW else float32_dtypes(flat)


def operand_dtypes(e: Equation, types: DtypeAssignment) -> list:
    """Return the dtype in which an equation reads each operand; None where it has none. Only floats are cast.

    Args:
        e: The equation.
        types: Dtypes of its program.
    """
    if e.bodies and not e.primitive.custom_derivative:
        inside = {k: types.value_dtypes[b] for body in e.bodies for k, b in _entered(e, body)}
        return [inside.get(k) for k in range(len(e.operands))]
    dtype, traced = (types.equation_dtypes.get(e.index), [getattr(v.aval, "dtype", None) for v in e.jaxpr_eqn.invars])
    return traced if dtype is None else [dtype if is_float(t) else t for t in traced]


class _Cast(PerBodyReplay):
    """Replay of a program with every value and equation in the dtype that `types` assigns."""

    def __init__(self, program: Program, types: DtypeAssignment):
        super().__init__(program)
        self.types = types
        self._given = _given(program)
        self._ends = {  # dtypes in which results leave each body
            body.sub_jaxpr: [types.value_dtypes[v] for v in e.results]
            if body.outputs
            else [None] * len(body.sub_jaxpr.outputs)
            for e in program.equations
            for body in (() if e.primitive.custom_derivative else e.bodies)
        }

    def __call__(self, *args: Any) -> list:
        outs = super().__call__(*args)
        return [_as(x, aval.dtype) for x, aval in zip(outs, self.program.closed.out_avals, strict=True)]

    def enter_body(self, scope: SubJaxpr, args: Any) -> list:
        outs = super().enter_body(scope, args)
        return [_as(x, dtype) for x, dtype in zip(outs, self._ends[scope], strict=True)]

    def run_equation(self, e: Equation, values: list) -> list:
        dtype = self.types.equation_dtypes.get(e.index)
        seen_in = operand_dtypes(e, self.types)
        values = [self._operand(v, x, t) for v, x, t in zip(e.operands, values, seen_in, strict=True)]
        outs = super().run_equation(e, values) if dtype is None else bind_with_dtype(e.jaxpr_eqn, values, dtype)
        return [_as(x, self.types.value_dtypes[v]) for v, x in zip(e.results, outs, strict=True)]

    def _operand(self, v: Value | None, x: Any, dtype: Any) -> Any:
        """Cast an operand, once for all its readers."""
        # An input is cast anew for each reader, so that its gradient is summed in the input's own dtype.
        if v is None or v in self._given or x.dtype == dtype:
            return _as(x, dtype)
        if (v, dtype) not in self.cache:
            self.cache[v, dtype] = _as(x, dtype)
        return self.cache[v, dtype]


def _given(program: Program) -> set[Value]:
    """Return the inputs, and the values that they have in bodies where no loop changes them."""
    given = set(program.inputs)
    for e in program.equations:
        for body in e.bodies:
            changed = {first for _, first in body.carries}
            given.update(b for a, b, _ in body.inputs if a in given and b not in changed)
    return given


def _entered(e: Equation, body: Any) -> list[tuple[int, Value]]:
    """Return position and inner value of the operands that enter a body."""
    inside = [b for _, b, _ in body.inputs]
    # Operands of `while`: constants of the condition, constants of the body, carry.
    if e.is_while:
        asked, fixed = e.params["cond_nconsts"], e.params["body_nconsts"]
        places = [*range(asked), *range(asked + fixed, len(e.operands))]
        return list(zip(places if body is e.bodies[1] else range(asked, len(e.operands)), inside, strict=True))
    return list(enumerate(inside, int(e.is_cond)))


def _as(x: Any, dtype: Any) -> Any:
    """Cast a float; a literal stays a literal."""
    if not (is_float(dtype) and is_float(x.dtype)) or x.dtype == dtype:
        return x
    is_number = not isinstance(x, jax.Array) and not x.shape
    return dtype.type(x) if is_number else lax.convert_element_type(x, dtype)


def _note(program: Program, types: DtypeAssignment, dtype: Any) -> str:
    written = [e for e in program.equations if e.primitive.autocast is AutocastPolicy.COMPUTE_DTYPE]
    total = _count(len(written), "product")
    if not types.equation_dtypes:
        there = written and all(program.avals[e.results[0]].dtype == dtype for e in written)
        return f"{total} in {dtype} as written; nothing changed" if there else f"nothing to run in {dtype}"
    changed = f"{types.changed} of {total} in {dtype}"
    if dtype in NARROW:
        sums = sum(e.primitive.sums_many for e in visible_equations(program.top))
        return f"{changed}; the loss and {_count(sums, 'reduction')} in float32"
    custom = (e for e in visible_equations(program.top) if e.primitive.custom_derivative)
    own = sum(any(program.avals[v].dtype in NARROW for v in e.results) for e in custom)
    return changed + f"; {_count(own, 'function')} with a derivative rule as written" * bool(own)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"
