"""A loss whose attentions are one primitive each, with a derivative of its own, in the place of what is written out."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from ..program import control_flow
from ..program.attention.attention import Attention, Leaf, Operand, Unrecognised
from ..program.attention.evaluate import evaluated, leaves, placed
from ..program.attention.find import find
from ..program.attention.form import form_of, wide
from ..program.attention.fused import attention, attention_p
from ..program.flow import Flow, results
from ..program.ir import Equation, Program, Scope, Value
from ..program.replay import Replay, replayed, retraced

_IN_PLACE = ("jit", "pjit", "closed_call", "core_call")  # whose bodies are run where they are called


@dataclass(frozen=True)
class Fused:
    """`closed`: the loss with its `attentions` fused. `others`: what is none but for an operation."""

    closed: ClosedJaxpr
    attentions: tuple[Attention, ...]
    others: tuple[Unrecognised, ...]


def fused(
    loss: ClosedJaxpr, known: Mapping[int, Any] | None = None, moving: Collection[int] | None = None
) -> Fused:
    """`loss`: flat arrays -> arrays; not differentiated yet. `known`: those of its inputs that are constants; `moving`:
    those that it is differentiated by, None for all others."""
    program = Program(loss)
    by = None if moving is None else {program.inputs[k] for k in moving}
    found = find(program, {program.inputs[k]: x for k, x in (known or {}).items()}, by)
    attentions = tuple(f for f in found if isinstance(f, Attention))
    closed = retraced(_Fusing(program, attentions)) if attentions else loss
    return Fused(closed, attentions, tuple(f for f in found if isinstance(f, Unrecognised)))


def told(found: Fused) -> list[str]:
    """What is to be said of a loss: how many attentions go round, and what stands in the way of others."""
    n = len(found.attentions)
    said = [f"{n} attention{'s' * (n > 1)} as a ring over positions"] if n else []
    for other in found.others:
        line = f" ({other.line})" if other.line else ""
        said.append(
            f"keys and values of an attention are gathered: it has `{other.operation}`{line}, which no ring takes"
        )
    return said or ["no attention among positions was found, so that nothing goes round in a ring"]


def keeping_attention(loss: ClosedJaxpr) -> ClosedJaxpr:
    """A loss whose remat keeps the results of `attention`, which it would send round once more to have again."""
    return replayed(loss, _Keeping)


class _Keeping(Replay):
    def equation(self, e: Equation, values: list) -> list:
        if not e.primitive.remat or not any(inner.eqn.primitive is attention_p for inner in e.inside()):
            return super().equation(e, values)
        policy = _keeping(e.params["policy"])
        return control_flow.checkpoint(e, self._function(e.doors[0].scope), values, policy=policy)


def _keeping(policy: Callable[..., Any] | None) -> Callable[..., Any]:
    def keeps(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is attention_p:
            return True
        return policy is not None and policy(primitive, *avals, **params)

    return keeps


class _Fusing(Replay):
    """Runs a loss with `attentions` fused, and without what only they have read."""

    def __init__(self, program: Program, attentions: tuple[Attention, ...]):
        super().__init__(program)
        self._fused = {a.equation: a for a in attentions}
        operands = {v for a in attentions for v in _read(a)}
        self._live = self._alive(operands)
        self._around = {e.index for v in operands for e in _around(program, v)}
        self._wanted, self._made = operands, dict[Value, Any]()

    def _alive(self, operands: set[Value]) -> set[Value]:
        """The values that are made for something other than scores."""
        bodies = (d.scope.outs for e in self.program.equations if e.name not in _IN_PLACE for d in e.doors)
        start = [*results(self.program), *operands, *(v for outs in bodies for v in outs)]
        flow = Flow(self.program)
        return {*flow.back(start, lambda _v, _w, e: e is None or e.index not in self._fused)}

    def run(self, scope: Scope, args: Any) -> list:
        self._note(scope.ins, args)
        self._note(scope.const_values, scope.consts)
        return super().run(scope, args)

    def equation(self, e: Equation, values: list) -> list:
        if e.index in self._fused:
            outs = [self._attention(self._fused[e.index], e)]
        elif e.outs and self._live.isdisjoint(e.outs) and not e.eqn.effects and e.index not in self._around:
            return [None] * len(e.outs)
        else:
            outs = super().equation(e, values)
        self._note(e.outs, outs)
        return outs

    def _note(self, values: Any, arrays: Any) -> None:
        pairs = zip(values, arrays, strict=True)
        self._made.update((v, x) for v, x in pairs if v in self._wanted)

    def _attention(self, a: Attention, e: Equation) -> Any:
        """The result of an attention, with the dimensions of that of `e`."""
        out = self.program.avals[e.outs[0]]
        form = form_of(a, out.dtype)
        query, key, value = (self._operand(operand) for operand in (a.query, a.key, a.value))
        masks = [self._mask(leaf, a) for leaf in form.leaves]
        for test, divides in a.factors:
            by = evaluated(test, lambda leaf: self._mask(leaf, a), dtype=wide(query.dtype))
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
        return made.transpose([i for i in a.order if i is not None]).reshape(out.shape)

    def _operand(self, operand: Operand) -> Any:
        x, dims = self._made[operand.value], operand.dims
        left = [d for d in range(x.ndim) if d not in dims]
        return x.transpose(*dims, *left).reshape([x.shape[d] for d in dims])

    def _mask(self, leaf: Leaf, a: Attention) -> Any:
        x = leaf.source if isinstance(leaf.source, np.ndarray) else self._made[leaf.source]
        return placed(jnp.asarray(x), leaf.dims, a.batch + a.groups + 2)


def _around(program: Program, v: Value) -> Iterator[Equation]:
    """The equations in whose bodies `v` is made."""
    e = program.maker.get(v)
    while e is not None and (e := e.outer) is not None:
        yield e


def _read(a: Attention) -> set[Value]:
    tests = [*(test for test, _ in a.factors), *(condition.test for condition in a.left_out[1])]
    tests += [] if a.change is None else [a.change]
    sources = (leaf.source for test in tests for leaf in leaves(test))
    return {a.query.value, a.key.value, a.value.value, *(v for v in sources if not isinstance(v, np.ndarray))}


def _apart(x: Any, at: int, times: int, batch: int) -> Any:
    """Heads that meet the same keys, `times` in succession, as the first dimension of groups."""
    parts = (x.shape[at] // times, times) if x.shape[at] > 1 else (1, 1)
    return jnp.moveaxis(x.reshape(*x.shape[:at], *parts, *x.shape[at + 1 :]), at + 1, batch)
