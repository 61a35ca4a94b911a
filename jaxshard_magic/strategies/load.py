"""How many rows of tokens each expert gets, counted while a step is emitted as far as its last layer that chooses."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..program import control_flow
from ..program.flow import needed
from ..program.ir import Door, Equation, Value
from ..program.primitives import scan_counts
from ..program.routing import Route, chosen, kept, summed
from .hold import Hold
from .layout import Layout

Key = tuple[int, int]  # a choice or a mask: its equation, and which result or operand


class Loads(Hold):
    """`Loads(layout, routes, real)(*arrays)` gives, of each of `routes`, what `program.routing.summed` tells; None of
    one whose choices the plan makes in another form. `real`: of each microbatch which rows are examples, bool of each;
    None where none were added."""

    def __init__(self, layout: Layout, routes: Sequence[Route], real: np.ndarray | None = None):
        super().__init__(layout)
        self.routes, self.real = routes, real
        self._choices = {(c.equation, c.out): (r, c) for r in routes for c in r.choices}
        self._masks = {(r.mask.equation, r.mask.operand): r.mask for r in routes if r.mask is not None}
        self._counted = {i for i, _ in (*self._choices, *self._masks)}
        self._around = {outer for i in self._counted for outer in _outer(self.program.equations[i])}
        parts = [] if real is None or len(real) == 1 else [(False, len(real))]
        cut = (c.equation for r in routes for c in r.choices if parts and [*r.loops[:1]] == parts)
        self._over_parts = {_outer(self.program.equations[i])[-1] for i in cut}

    def __call__(self, *args: Any) -> list:
        self.begin()
        self._found: dict[Key, Any] = {}
        self._real = None if self.real is None else jnp.arange(self.real.size) < self.real.sum()
        top = self.program.top
        equations = [self.program.equations[i] for i in sorted(self._counted)]
        wanted = {v for e in equations for v in (*e.outs, *e.ins) if v is not None}
        wanted |= {v for i in self._around for v in self.program.equations[i].outs}
        run = needed(top, wanted, ())
        self.through([e for e in top.equations if e.index in run], top.env(args))
        return [self._of(route) for route in self.routes]

    def _of(self, route: Route) -> tuple[Any, Any, Any] | None:
        counts, mask = [self._found.get((c.equation, c.out)) for c in route.choices], route.mask
        if any(x is None for x in counts):
            return None
        return summed(route, counts, None if mask is None else self._found.get((mask.equation, mask.operand)))

    def equation(self, e: Equation, values: list) -> list:
        given = list(values)
        outs = super().equation(e, values)
        if e.index in self._counted:
            for k, v in enumerate(e.outs):
                if (e.index, k) in self._choices and self._is(outs[k], v):
                    self._found[e.index, k] = chosen(*self._choices[e.index, k], outs[k], self._real)
            for k, v in enumerate(e.ins):
                if (e.index, k) in self._masks and self._is(given[k], v):
                    self._found[e.index, k] = kept(self._masks[e.index, k], given[k], self._real)
        return outs

    def _is(self, x: Any, v: Value | None) -> bool:
        """Is `x` the value itself, and no other form of it?"""
        return v is not None and getattr(x, "shape", None) == self.program.shapes[v]

    def _scan(self, e: Equation, values: list, door: Door) -> list:
        """What is counted in a trip is stacked beside what the loop stacks itself."""
        if e.index not in self._around:
            return super()._scan(e, values, door)
        consts, carried = scan_counts(e.params)
        fixed, start, xs = values[:consts], values[consts : consts + carried], values[consts + carried :]
        outside, real = self._found, self._real

        def trip(carry: tuple, given: tuple) -> tuple:
            x, part = given
            self._found, self._real = {}, real if part is None else part
            outs = self.body(door.scope, [*fixed, *carry, *x])
            return tuple(outs[:carried]), (tuple(outs[carried:]), self._found)

        parts = jnp.asarray(self.real) if e.index in self._over_parts else None
        carry, (ys, counted) = control_flow.scan(e, trip, start, (tuple(xs), parts))
        self._found, self._real = outside | counted, real
        return [*carry, *ys]


def _outer(e: Equation) -> list[int]:
    """The equations, by index, whose bodies an equation is in."""
    found, at = [], e.outer
    while at is not None:
        found.append(at.index)
        at = at.outer
    return found
