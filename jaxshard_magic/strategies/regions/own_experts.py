"""Loops over experts, of which each device does the trips of its own experts.

A scan of E trips becomes one of E/n, its body mapped over the n parts of the expert axes, each with experts of its own.
What it reads of tokens is brought to where experts see them all; what it adds up, each part adds up by itself, and
devices add up the parts after the last trip.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax

from ...plan import Sent
from ...program import control_flow
from ...program.expert_loops import ExpertLoop
from ...program.ir import Equation, Value
from ...program.labels import COMBINE, DISPATCH
from ...program.primitives import scan_counts
from ..changes import changes_sent
from ..layout import Axes, Layout, Spec
from ..reductions import activation_sum
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class OwnExperts(Region):
    """`loops`: by the index of their equation. `axes`: those that divide experts."""

    layout: Layout
    loops: Mapping[int, ExpertLoop]
    axes: Axes

    def emit(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        loop, parts = self.loops[e.index], self.layout.count(self.axes)
        n, k = scan_counts(e.params)
        inside, summed = loop.scope.ins, sorted(loop.sums)
        read = {i: self._brought(e.ins[i], jnp.asarray(values[i])) for i in self._read(loop)}
        trips = e.params["length"] // parts
        stacks = [
            self._pin(read[i].reshape(parts, trips, *read[i].shape[1:]).swapaxes(0, 1), inside[i], lead=1)
            for i in range(n + k, len(values))
        ]
        start = [jnp.asarray(values[n + i]) for i in summed]
        zeros = [jnp.zeros((parts, *x.shape), x.dtype) for x in start]
        sums = [self._pin(x, inside[n + i]) for i, x in zip(summed, zeros, strict=True)]
        mapped = [0 if i - n in loop.sums or i >= n + k else None for i in range(len(values))]
        body = jax.vmap(lambda *xs: tuple(hold.body(loop.scope, xs)), mapped, spmd_axis_name=self.axes)

        def trip(carry: tuple, xs: tuple) -> tuple[tuple, tuple]:
            given = read | {n + i: x for i, x in zip(summed, carry, strict=True)}
            given |= dict(enumerate(xs, n + k))
            outs = body(*(given[i] for i in range(len(values))))
            return tuple(outs[i] for i in summed), tuple(outs[k:])

        carried, made = control_flow.scan(e, trip, sums, tuple(stacks), trips)
        added = {i: self._added(e.outs[i], x, own) for i, x, own in zip(summed, start, carried, strict=True)}
        wholes = (lax.collapse(jnp.moveaxis(x, 0, 1), 0, 2) for x in made)
        return [
            *(added.get(i, values[n + i]) for i in range(k)),
            *(self.layout.pin(x, self._lies(v)) for x, v in zip(wholes, e.outs[k:], strict=True)),
        ]

    def sent(self, e: Equation, operands: Iterable[Sent], rest: Iterable[Sent]) -> Iterable[Sent]:
        layout, loop, parts = self.layout, self.loops[e.index], self.layout.count(self.axes)
        for v in dict.fromkeys(e.ins[i] for i in self._read(loop)):
            if self._moves(v):
                yield from changes_sent(layout, v, layout.active(v), layout.lying(v, True), e.trips)
        for move in rest:
            yield replace(move, count=move.count // parts)
        for v in (e.outs[i] for i in sorted(loop.sums)):
            if layout.batchy(v):
                yield from activation_sum(layout, v, self.axes, e.trips)

    def _read(self, loop: ExpertLoop) -> list[int]:
        """The operands that trips read: all but what they add to."""
        n = scan_counts(loop.equation.params)[0]
        return [i for i in range(len(loop.equation.ins)) if i - n not in loop.sums]

    def _moves(self, v: Value | None) -> TypeGuard[Value]:
        """Is an operand brought to where experts are?"""
        return v is not None and self.layout.batchy(v) and self.layout.active(v) != self.layout.lying(v, True)

    def _brought(self, v: Value | None, x: Any) -> Any:
        """An operand as the loop reads it: tokens as experts see them, and what it steps over by expert."""
        if not self._moves(v):
            return x
        with jax.named_scope(DISPATCH):
            return self.layout.pin(self.layout.pin(x, self.layout.active(v)), self.layout.lying(v, True))

    def _pin(self, x: Any, inside: Value, lead: int = 0) -> Any:
        """Parts of a body's value, each on the devices of its experts."""
        layout = self.layout
        spec = layout.active(inside) if layout.batchy(inside) else layout.at_rest(inside)
        return layout.pin(x, [*([()] * lead), self.axes, *spec])

    def _added(self, v: Value, start: Any, x: Any) -> Any:
        layout, total = self.layout, x.sum(0).astype(x.dtype)
        if layout.batchy(v):
            with jax.named_scope(COMBINE):
                total = layout.pin(layout.pin(total, layout.lying(v, True)), layout.active(v))
        else:
            total = layout.pin(total, layout.at_rest(v))
        return start + total

    def _lies(self, v: Value) -> Spec:
        """What trips stacked: by expert also what the backward pass reads of matrices, which no parameter places."""
        if self.layout.batchy(v):
            return self.layout.active(v)
        spec = self.layout.at_rest(v)
        placed = any(a in axes for axes in spec for a in self.axes)
        return spec if placed else [self.axes, *spec[1:]]


def own_experts(context: Context) -> OwnExperts:
    """The loops over experts that are divided."""
    experts = context.layout.experts
    loops = {} if experts is None else experts.loops
    return OwnExperts(loops.keys(), context.layout, loops, () if experts is None else experts.axes)
