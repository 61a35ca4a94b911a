"""Count of the tokens that each expert gets, while a step is emitted as far as its last router."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..program import control_flow
from ..program.flow import required_equations
from ..program.ir import Body, Equation, Value
from ..program.primitives import scan_counts
from ..program.routing import RoutedLayer, filled_slots, load_by_layer, tokens_per_expert
from .layout import Layout
from .sharded_lowering import ShardedLowering

# Index of an equation, and the position of a choice among its results or of a mask among its operands.
Key = tuple[int, int]


class ExpertLoads(ShardedLowering):
    """Emitter that counts the tokens of each expert; called with a step's arrays it returns an entry for each route.

    An entry is the result of `load_by_layer` for the route, or None where the plan makes its choices in another form.

    Args:
        layout: The layout of the step.
        routes: The layers that choose among experts.
        is_example: For each microbatch, which rows are examples and no padding: bool, (microbatches, rows). None
            without padding.
    """

    def __init__(self, layout: Layout, routes: Sequence[RoutedLayer], is_example: np.ndarray | None = None):
        super().__init__(layout)
        self.routes, self.is_example = routes, is_example
        self._choices = {(c.equation, c.out): (r, c) for r in routes for c in r.choices}
        self._masks = {(r.mask.equation, r.mask.operand): r.mask for r in routes if r.mask is not None}
        self._counted_equations = {i for i, _ in (*self._choices, *self._masks)}
        self._enclosing = {
            outer for i in self._counted_equations for outer in _enclosing_equations(self.program.equations[i])
        }
        microbatch_loop = [] if is_example is None or len(is_example) == 1 else [(False, len(is_example))]
        cut = (c.equation for r in routes for c in r.choices if microbatch_loop and [*r.loops[:1]] == microbatch_loop)
        self._microbatch_loops = {_enclosing_equations(self.program.equations[i])[-1] for i in cut}

    def __call__(self, *args: Any) -> list:
        self.reset()
        self._counts: dict[Key, Any] = {}
        # Outside of the loop over microbatches the rows are those of the whole batch, with the padding last.
        self._is_example_now = (
            None if self.is_example is None else jnp.arange(self.is_example.size) < self.is_example.sum()
        )
        top = self.program.top
        equations = [self.program.equations[i] for i in sorted(self._counted_equations)]
        needed_values = {v for e in equations for v in (*e.results, *e.operands) if v is not None}
        needed_values |= {v for i in self._enclosing for v in self.program.equations[i].results}
        needed_equations = required_equations(top, needed_values, ())
        self.run_equations([e for e in top.equations if e.index in needed_equations], top.bind_inputs(args))
        return [self._route_load(route) for route in self.routes]

    def _route_load(self, route: RoutedLayer) -> tuple[Any, Any, Any] | None:
        counts, mask = [self._counts.get((c.equation, c.out)) for c in route.choices], route.mask
        if any(x is None for x in counts):
            return None
        return load_by_layer(route, counts, None if mask is None else self._counts.get((mask.equation, mask.operand)))

    def run_equation(self, e: Equation, values: list) -> list:
        # A copy, as the lowering writes resharded operands into `values`.
        given = list(values)
        outs = super().run_equation(e, values)
        if e.index in self._counted_equations:
            for k, v in enumerate(e.results):
                if (e.index, k) in self._choices and self._is_array_of(outs[k], v):
                    self._counts[e.index, k] = tokens_per_expert(
                        *self._choices[e.index, k], outs[k], self._is_example_now
                    )
            for k, v in enumerate(e.operands):
                if (e.index, k) in self._masks and self._is_array_of(given[k], v):
                    self._counts[e.index, k] = filled_slots(self._masks[e.index, k], given[k], self._is_example_now)
        return outs

    def _is_array_of(self, x: Any, v: Value | None) -> bool:
        """Return whether `x` is the array of `v` itself and no other representation of it."""
        return v is not None and getattr(x, "shape", None) == self.program.shapes[v]

    def _scan(self, e: Equation, values: list, body: Body) -> list:
        """Run a scan, and stack the counts of its trips along with its results."""
        if e.index not in self._enclosing:
            return super()._scan(e, values, body)
        consts, carried = scan_counts(e.params)
        fixed, start, xs = values[:consts], values[consts : consts + carried], values[consts + carried :]
        outer_counts, outer_is_example = self._counts, self._is_example_now

        def trip(carry: tuple, given: tuple) -> tuple:
            x, part = given
            self._counts, self._is_example_now = {}, outer_is_example if part is None else part
            outs = self.enter_body(body.sub_jaxpr, [*fixed, *carry, *x])
            # The counts are tracers of the loop's body: they can leave it only as results of the scan.
            return tuple(outs[:carried]), (tuple(outs[carried:]), self._counts)

        parts = jnp.asarray(self.is_example) if e.index in self._microbatch_loops else None
        carry, (ys, counted) = control_flow.scan(e, trip, start, (tuple(xs), parts))
        self._counts, self._is_example_now = outer_counts | counted, outer_is_example
        return [*carry, *ys]


def _enclosing_equations(e: Equation) -> list[int]:
    """Return the equations, by index, with bodies around `e`, innermost first."""
    found, at = [], e.parent
    while at is not None:
        found.append(at.index)
        at = at.parent
    return found
