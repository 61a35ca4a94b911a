"""Sums over the examples that wait, as arrays in parts. Where a loop ends, what it added up in parts is reduced, once
for all its trips."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ...plan import Sent
from ...program.ir import Equation, Value
from ...program.labels import GRADIENT
from ...program.phases import BACKWARD
from ...program.primitives import scan_counts
from ...program.xla_faults import bind_mended
from ..layout import Layout, Spec, without
from ..reductions import gradient_sum, summed_over
from .deferred import BatchDims, Deferred, joint, summands
from .parts import Parts
from .region import Context, Emission, Region
from .sum_types import sum_type


@dataclass(frozen=True)
class LoopSum:
    """A sum that is reduced where a loop ends. `path`: the equation in the loop that made the parts, or the first of
    them, after those whose bodies it is in, from the loop inwards. `gradient`: it belongs to the backward pass."""

    path: tuple[Equation, ...]
    gradient: bool


@dataclass(frozen=True, eq=False)
class Unreduced(Region):
    """The equations that make, pass on and reduce the sums over the examples that wait.

    `values`: those that are in parts. `makers`: the equations that sum over the batch and make them, by index, with the
    batch dimension of each operand. `loop_sums`: what is reduced where a loop ends, by the index of the loop's equation
    and the position among its results. `sum_dtype`: the type in which devices add up there, None for each in its own.
    """

    layout: Layout
    values: frozenset[Value]
    makers: Mapping[int, BatchDims]
    loop_sums: Mapping[tuple[int, int], LoopSum]
    sum_dtype: Any

    @property
    def parts(self) -> Parts:
        return Parts(self.layout)

    def emit(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        if e.index in self.makers:
            return [self.parts.made(e, hold.before(e, values), self.makers[e.index], kept=self.values)]
        return self._loop(e, values, rest, hold) if e.doors else self._passed_on(e, values)

    def sent(self, e: Equation, operands: Iterable[Sent], rest: Iterable[Sent]) -> Iterable[Sent]:
        if e.index in self.makers:
            yield from operands
            yield from self._sums_at_once(e)
        else:
            yield from rest
        for i, v in enumerate(e.outs):
            if (loop_sum := self.loop_sums.get((e.index, i))) is not None:
                for sent in gradient_sum(self.layout, v, self.layout.adding(v), e.trips, by_hand=True):
                    yield replace(sent, equation=loop_sum.path[-1].index)

    def _sums_at_once(self, e: Equation) -> Iterable[Sent]:
        """What a part is itself the sum of: over the devices that share the positions of the examples."""
        by_dim = without(summed_over(self.layout, e), self.layout.adding(e.outs[0]))
        over = tuple(a for axes in by_dim for a in axes)
        return gradient_sum(self.layout, e.outs[0], over, e.trips, whole=True, by_dim=by_dim)

    def lies(self, value: Value) -> Spec | None:
        return self.parts.lies(value) if value in self.values else None

    def _loop(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        """A carry in parts starts so, and is summed after the last trip unless the rest of the step waits as well."""
        n, k = scan_counts(e.params)
        for i, v in enumerate(e.doors[0].scope.ins[n : n + k], n):
            if v in self.values and e.ins[i] not in self.values:
                values[i] = self.parts.spread(values[i], v, v)
        outs = rest(values)
        for i, v in enumerate(e.outs):
            if i >= k and v in self.values:  # what a loop stacked has its trips first
                outs[i] = self.parts.pin(jnp.moveaxis(outs[i], 1, 0), v)
            elif (e.index, i) in self.loop_sums:
                loop_sum = self.loop_sums[e.index, i]
                with hold.at(loop_sum.path):
                    dtype = sum_type(self.sum_dtype, outs[i].dtype, gradient=loop_sum.gradient)
                    outs[i] = self.parts.reduced(outs[i], v, dtype)
        return outs

    def _passed_on(self, e: Equation, values: list) -> list:
        """The results of the linear equation `e`, in parts, some of whose operands are."""
        parted = {k for k in summands(e) if e.ins[k] in self.values}
        if joint(e):
            for k in set(summands(e)) - parted:
                values[k] = self.parts.spread(values[k], e.ins[k], e.outs[0])
            parted = set(summands(e))
        in_axes = [0 if k in parted else None for k in range(len(values))]
        divided, cpu = self.layout.divided_in(e), self.layout.simulated
        outs = jax.vmap(lambda *xs: bind_mended(e, list(xs), divided, cpu=cpu), in_axes)(*values)
        return [self.parts.pin(x, v) for x, v in zip(outs, e.outs, strict=True)]


def unreduced(context: Context) -> Unreduced:
    """The sums that wait for the end of a loop, or for whoever takes outputs in parts."""
    layout, deferred = context.layout, context.deferred
    members = {*deferred.makers}
    for e in layout.program.equations if deferred.values else ():
        ends = (v for door in e.doors for v in (*door.scope.ins, *door.scope.outs)) if e.is_scan else ()
        if not deferred.values.isdisjoint(ends if e.doors else e.outs):
            members.add(e.index)
    loop_sums = _loop_sums(context, deferred)
    return Unreduced(members, layout, deferred.values, deferred.makers, loop_sums, context.sum_dtype)


def _loop_sums(context: Context, deferred: Deferred) -> dict[tuple[int, int], LoopSum]:
    """What loops add up in parts and the rest of the step needs whole. An equation whose gradient is known by its label
    is a better path than another."""
    flow, program = context.layout.flow, context.layout.program
    sums: dict[tuple[int, int], LoopSum] = {}
    if not deferred.makers:
        return sums
    made_by = {program.equations[i].outs[0]: program.equations[i] for i in deferred.makers}
    phase = context.phases

    def rank(e: Equation) -> tuple[bool, bool]:
        return not context.labels.get(e.index, "").startswith(GRADIENT), phase.get(e.index) != BACKWARD

    for e in (e for e in program.equations if e.is_scan):
        for k, (inside, outside, _) in enumerate(e.doors[0].out):
            if inside in deferred.values and outside not in deferred.values:
                before = flow.back([inside], lambda _v, w, _e: w in deferred.values)
                maker = min((made_by[v] for v in before if v in made_by), key=rank)
                path = [maker]
                while (outer := path[0].outer) is not e and outer is not None:
                    path.insert(0, outer)
                sums[e.index, k] = LoopSum(tuple(path), phase.get(maker.index) == BACKWARD)
    return sums
