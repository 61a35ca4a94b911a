"""Fusion of attention: each attention of a loss becomes a primitive with a derivative rule."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from ..program import control_flow
from ..program.attention.attention import (
    Attention,
    AttentionOperand,
    ExpressionLeaf,
    Unrecognised,
    align_dims,
    evaluate,
    leaves,
)
from ..program.attention.blockwise import accumulation_dtype, attention_form
from ..program.attention.detection import find_attentions
from ..program.attention.fused_attention import attention, attention_p
from ..program.emit import Replay, retrace, run_replay
from ..program.flow import Flow, live_roots
from ..program.ir import Equation, Program, SubJaxpr, Value

_IN_PLACE = ("jit", "pjit", "closed_call", "core_call")  # calls that `Replay` inlines


@dataclass(frozen=True)
class FusedLoss:
    """Loss with fused attentions.

    Attributes:
        closed: The loss.
        attentions: Attentions that were fused.
        others: Near misses: each would be an attention but for one operation.
    """

    closed: ClosedJaxpr
    attentions: tuple[Attention, ...]
    others: tuple[Unrecognised, ...]


def fuse_attention(
    loss: ClosedJaxpr, known: Mapping[int, Any] | None = None, moving: Collection[int] | None = None
) -> FusedLoss:
    """Replace each attention of a loss by a primitive.

    Args:
        loss: Jaxpr of flat arrays, not differentiated yet.
        known: Values of inputs that are constants, by position.
        moving: Positions of the inputs to differentiate; None for all others.
    """
    program = Program(loss)
    by = None if moving is None else {program.inputs[k] for k in moving}
    found = find_attentions(program, {program.inputs[k]: x for k, x in (known or {}).items()}, by)
    attentions = tuple(f for f in found if isinstance(f, Attention))
    closed = retrace(_Fusing(program, attentions)) if attentions else loss
    return FusedLoss(closed, attentions, tuple(f for f in found if isinstance(f, Unrecognised)))


def describe_attention(found: FusedLoss) -> list[str]:
    """Return messages about a loss: the number of attentions run as a ring, and the operations that prevent others."""
    n = len(found.attentions)
    said = [f"{n} attention{'s' * (n > 1)} as a ring over positions"] if n else []
    for other in found.others:
        line = f" ({other.line})" if other.line else ""
        said.append(
            f"keys and values of an attention are gathered: it has `{other.operation}`{line}, which no ring takes"
        )
    return said or ["no attention among positions was found, so that nothing goes round in a ring"]


def save_attention_results(loss: ClosedJaxpr) -> ClosedJaxpr:
    """Make the remat of a loss save the results of attention: to recompute them would send keys and values through the
    ring again."""
    return run_replay(loss, _Keeping)


class _Keeping(Replay):
    def run_equation(self, e: Equation, values: list) -> list:
        if not e.primitive.remat or not any(inner.jaxpr_eqn.primitive is attention_p for inner in e.nested()):
            return super().run_equation(e, values)
        policy = _keeping(e.params["policy"])
        return control_flow.checkpoint(e, self._as_function(e.bodies[0].sub_jaxpr), values, policy=policy)


def _keeping(policy: Callable[..., Any] | None) -> Callable[..., Any]:
    def keeps(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is attention_p:
            return True
        return policy is not None and policy(primitive, *avals, **params)

    return keeps


class _Fusing(Replay):
    """Run a loss with `attentions` fused, without the values that only attentions read."""

    def __init__(self, program: Program, attentions: tuple[Attention, ...]):
        super().__init__(program)
        self._fused = {a.equation_index: a for a in attentions}
        operands = {v for a in attentions for v in _read(a)}
        self._live = self._alive(operands)
        self._around = {e.index for v in operands for e in _around(program, v)}
        self._wanted, self._made = operands, dict[Value, Any]()

    def _alive(self, operands: set[Value]) -> set[Value]:
        """Return the values used for something other than scores."""
        bodies = (d.sub_jaxpr.outputs for e in self.program.equations if e.name not in _IN_PLACE for d in e.bodies)
        start = [*live_roots(self.program), *operands, *(v for outs in bodies for v in outs)]
        flow = Flow(self.program)
        return {*flow.ancestors(start, lambda _v, _w, e: e is None or e.index not in self._fused)}

    def run(self, scope: SubJaxpr, args: Any) -> list:
        self._note(scope.inputs, args)
        self._note(scope.const_values, scope.consts)
        return super().run(scope, args)

    def run_equation(self, e: Equation, values: list) -> list:
        if e.index in self._fused:
            outs = [self._attention(self._fused[e.index], e)]
        elif e.results and self._live.isdisjoint(e.results) and not e.jaxpr_eqn.effects and e.index not in self._around:
            # Scores and other values that only an attention reads are not computed.
            return [None] * len(e.results)
        else:
            outs = super().run_equation(e, values)
        self._note(e.results, outs)
        return outs

    def _note(self, values: Any, arrays: Any) -> None:
        pairs = zip(values, arrays, strict=True)
        self._made.update((v, x) for v, x in pairs if v in self._wanted)

    def _attention(self, a: Attention, e: Equation) -> Any:
        """Return the result of an attention in the dimensions of the result of `e`."""
        out = self.program.avals[e.results[0]]
        form = attention_form(a, out.dtype)
        query, key, value = (self._operand(operand) for operand in (a.query, a.key, a.value))
        masks = [self._mask(leaf, a) for leaf in form.leaves]
        for test, divides in a.query_factors:
            by = evaluate(test, lambda leaf: self._mask(leaf, a), dtype=accumulation_dtype(query.dtype))
            query = (query / by if divides else query * by).astype(query.dtype)
        if a.repeats is not None:
            query = _apart(query, *a.repeats, a.batch)
            masks = [_apart(mask, *a.repeats, a.batch) for mask in masks]
        made: Any = attention(form, query, key, value, *masks)
        if a.repeats is not None:
            at, times = a.repeats
            heads = made.shape[at] * times
            made = jnp.moveaxis(made, a.batch, at + 1)
            made = made.reshape(*made.shape[:at], heads, *made.shape[at + 2 :])
        return made.transpose([i for i in a.result_order if i is not None]).reshape(out.shape)

    def _operand(self, operand: AttentionOperand) -> Any:
        x, dims = self._made[operand.value], operand.dims
        left = [d for d in range(x.ndim) if d not in dims]
        return x.transpose(*dims, *left).reshape([x.shape[d] for d in dims])

    def _mask(self, leaf: ExpressionLeaf, a: Attention) -> Any:
        x = leaf.source if isinstance(leaf.source, np.ndarray) else self._made[leaf.source]
        return align_dims(jnp.asarray(x), leaf.dims, a.batch + a.groups + 2)


def _around(program: Program, v: Value) -> Iterator[Equation]:
    """Yield the equations with bodies around the equation that makes `v`, from the innermost outward."""
    e = program.producer.get(v)
    while e is not None and (e := e.parent) is not None:
        yield e


def _read(a: Attention) -> set[Value]:
    tests = [*(test for test, _ in a.query_factors), *(condition.expression for condition in a.visibility[1])]
    tests += [] if a.score_mod is None else [a.score_mod]
    sources = (leaf.source for test in tests for leaf in leaves(test))
    return {a.query.value, a.key.value, a.value.value, *(v for v in sources if not isinstance(v, np.ndarray))}


def _apart(x: Any, at: int, times: int, batch: int) -> Any:
    """Split query heads that share keys, `times` in succession, into a first dimension of groups."""
    parts = (x.shape[at] // times, times) if x.shape[at] > 1 else (1, 1)
    return jnp.moveaxis(x.reshape(*x.shape[:at], *parts, *x.shape[at + 1 :]), at + 1, batch)
