"""Mixed precision: a loss run again with its products in a narrower type, before its gradients are taken."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from ..errors import ShardError, none_of, one_of
from ..program.ir import Equation, Program, Scope, Value
from ..program.primitives import bind_as, is_float
from ..program.primitives.primitive import Runs
from ..program.replay import ByBody, Replay, replayed, retraced
from .autocast import NARROW, Types, lowered, raised, visible

TYPES = {"bf16": jnp.dtype(jnp.bfloat16), "fp16": jnp.dtype(jnp.float16), "f32": jnp.dtype(jnp.float32)}


@dataclass(frozen=True)
class Cast:
    """A loss in another precision, and what runs in which type, in words.

    `changed`: how many products run in another type than they were written in; with none, `closed` may be the loss as
    it was.
    """

    closed: ClosedJaxpr
    note: str
    changed: int


def precision(closed: ClosedJaxpr, how: str) -> Cast:
    """A loss with the same inputs and outputs, computed in another precision (Micikevicius et al. 2018, section 3).

    `closed`: a jaxpr of flat arrays without constants, not differentiated yet. With `how` "bf16" or "fp16" its
    products run in that type, and the rest as `autocast` says; inputs are cast where they are used, so that the
    gradients of float32 weights are summed in float32. With "f32" all that was written in a narrower type runs in
    float32. Raises ShardError for any other `how`.

    >>> import jax
    >>> loss = jax.make_jaxpr(lambda w, x: jnp.square(x @ w).mean())(jnp.ones((4, 2)), jnp.ones((8, 4)))
    >>> precision(loss, "bf16").note
    '1 of 1 product in bfloat16; the loss and 1 reduction in float32'
    """
    flat, types = typed(closed, how)
    note = _note(flat, types, TYPES[how])
    if not types.runs:
        return Cast(closed, note, 0)
    return Cast(retraced(_Cast(flat, types)), note, types.changed)


def typed(closed: ClosedJaxpr, how: str) -> tuple[Program, Types]:
    """A loss without its jits, and the types that its values are held in and its equations run in. Raises ShardError as
    `precision` does."""
    if how not in TYPES:
        raise ShardError(
            none_of(f"--precision does not take {how!r}", how, TYPES, f"it takes {one_of(TYPES)}")
        )
    flat, dtype = Program(replayed(closed, Replay)), TYPES[how]
    return flat, lowered(flat, dtype) if dtype in NARROW else raised(flat)


def wanted(e: Equation, types: Types) -> list:
    """The types that an equation is to see its operands in; None for what is no float."""
    if e.doors and not e.primitive.custom:
        inside = {k: types.of[b] for door in e.doors for k, b in _entered(e, door)}
        return [inside.get(k) for k in range(len(e.ins))]
    dtype, traced = types.runs.get(e.index), [getattr(v.aval, "dtype", None) for v in e.eqn.invars]
    return traced if dtype is None else [dtype if is_float(t) else t for t in traced]


class _Cast(ByBody):
    """Re-emits a program with every value held, and every equation run, in the type that `types` gives it."""

    def __init__(self, program: Program, types: Types):
        super().__init__(program)
        self.types = types
        self._given = _given(program)
        self._ends = {  # the types that the results of bodies leave them in
            door.scope: [types.of[v] for v in e.outs] if door.out else [None] * len(door.scope.outs)
            for e in program.equations
            for door in (() if e.primitive.custom else e.doors)
        }

    def __call__(self, *args: Any) -> list:
        outs = super().__call__(*args)
        return [_as(x, aval.dtype) for x, aval in zip(outs, self.program.closed.out_avals, strict=True)]

    def body(self, scope: Scope, args: Any) -> list:
        outs = super().body(scope, args)
        return [_as(x, dtype) for x, dtype in zip(outs, self._ends[scope], strict=True)]

    def equation(self, e: Equation, values: list) -> list:
        dtype = self.types.runs.get(e.index)
        seen_in = wanted(e, self.types)
        values = [self._operand(v, x, t) for v, x, t in zip(e.ins, values, seen_in, strict=True)]
        outs = super().equation(e, values) if dtype is None else bind_as(e.eqn, values, dtype)
        return [_as(x, self.types.of[v]) for v, x in zip(e.outs, outs, strict=True)]

    def _operand(self, v: Value | None, x: Any, dtype: Any) -> Any:
        """An operand in another type, cast once for all that read it.

        An input is cast anew for each: so its gradient is summed in its own type.
        """
        if v is None or v in self._given or x.dtype == dtype:
            return _as(x, dtype)
        if (v, dtype) not in self.made:
            self.made[v, dtype] = _as(x, dtype)
        return self.made[v, dtype]


def _given(program: Program) -> set[Value]:
    """The inputs, also where they enter a body and no loop changes them."""
    given = set(program.inputs)
    for e in program.equations:
        for door in e.doors:
            changed = {first for _, first in door.loop}
            given.update(b for a, b, _ in door.into if a in given and b not in changed)
    return given


def _entered(e: Equation, door: Any) -> list[tuple[int, Value]]:
    """The operands of an equation that enter through a door, by position, and the values that they become."""
    inside = [b for _, b, _ in door.into]
    if e.is_while:
        asked, fixed = e.params["cond_nconsts"], e.params["body_nconsts"]
        places = [*range(asked), *range(asked + fixed, len(e.ins))]
        return list(zip(places if door is e.doors[1] else range(asked, len(e.ins)), inside, strict=True))
    return list(enumerate(inside, int(e.is_cond)))


def _as(x: Any, dtype: Any) -> Any:
    """A float in another type; a literal stays one."""
    if not (is_float(dtype) and is_float(x.dtype)) or x.dtype == dtype:
        return x
    is_number = not isinstance(x, jax.Array) and not x.shape
    return dtype.type(x) if is_number else lax.convert_element_type(x, dtype)


def _note(program: Program, types: Types, dtype: Any) -> str:
    written = [e for e in program.equations if e.primitive.runs is Runs.PRODUCT]
    total = _count(len(written), "product")
    if not types.runs:
        there = written and all(program.avals[e.outs[0]].dtype == dtype for e in written)
        return f"{total} in {dtype} as written; nothing changed" if there else f"nothing to run in {dtype}"
    changed = f"{types.changed} of {total} in {dtype}"
    if dtype in NARROW:
        sums = sum(e.primitive.rounds for e in visible(program.top))
        return f"{changed}; the loss and {_count(sums, 'reduction')} in float32"
    custom = (e for e in visible(program.top) if e.primitive.custom)
    own = sum(any(program.avals[v].dtype in NARROW for v in e.outs) for e in custom)
    return changed + f"; {_count(own, 'function')} with a derivative rule as written" * bool(own)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"
