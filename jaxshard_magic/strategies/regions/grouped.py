"""Convolutions in groups whose groups are divided: each device convolves its own.

A step that takes the gradient of each example by itself has the examples as the groups of a convolution, one with
several models has these. XLA's partitioner gets that wrong, of a plain `jax.jit` as well; in a `shard_map` there is
nothing to partition.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
from jax import lax

from ...program.ir import Equation, Value
from ...program.primitives import bind
from ...program.xla_faults import GROUP_COUNTS
from ..layout import Axes, Layout, Spec, partition_spec, without
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class Grouped(Region):
    """The convolutions whose groups are divided. Where their number does not divide over the devices, each has all."""

    layout: Layout

    def emit(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        layout, c = self.layout, e.contraction
        assert c is not None and c.grouped is not None
        used = [layout.used(v) for v in (*e.ins, *e.outs)]
        groups = max(e.params[k] for k in GROUP_COUNTS)
        axes = next((spec[d] for spec, d in zip(used, c.grouped, strict=True) if spec[d]), ())
        if groups % layout.count(axes):
            axes: Axes = ()
        whole: list[Spec] = [[()] * len(spec) for spec in used]
        (left, right, out), summed = whole, ()
        for spec, d in zip((left, right, out), c.grouped, strict=True):
            spec[d] = axes
        for d, o in c.left:
            left[d] = out[o] = _others(used[0][d], axes)
        for a, b in c.contracted:
            over = _others(used[0][a], (*axes, *summed))
            if over and over == used[1][b]:
                left[a] = right[b] = over
                summed += over
        counts = {k: e.params[k] // layout.count(axes) for k in GROUP_COUNTS if e.params[k] > 1}
        own = e.eqn.replace(params={**e.params, **counts})

        def on_device(*operands):
            part = bind(own, list(operands))[0]
            return lax.psum(part, summed) if summed else part

        convolved = jax.shard_map(
            on_device,
            mesh=layout.mesh,
            in_specs=(partition_spec(left), partition_spec(right)),
            out_specs=partition_spec(out),
            check_vma=False,
        )
        return hold.after(e, [convolved(*hold.before(e, values))])


def _others(axes: Axes, taken: Iterable[str]) -> Axes:
    return without([axes], {*taken})[0]


def grouped(context: Context) -> Grouped:
    """The convolutions of which an operand, or the result, has its groups divided, and those that add up over examples
    or places that only some mesh axes divide, in the image or in the gradient of the result: XLA's partitioner gets the
    gradient of a kernel wrong then (seen with jaxlib 0.10 and 0.12)."""
    layout = context.layout

    def divided(e: Equation) -> bool:
        c = e.contraction
        if (
            c is None
            or c.grouped is None
            or any(0 in layout.program.shapes[v] for v in e.ins if v is not None)
        ):
            return False
        ends: list[Value | None] = [*e.ins, *e.outs]
        if any(layout.used(v)[d : d + 1] not in ([], [()]) for v, d in zip(ends, c.grouped, strict=True)):
            return True
        image, window, out = (layout.used(v) for v in ends)
        along = [*c.contracted, *((i, w) for i, w, k in c.windowed if not out[k])]
        summed = {axis for d, _ in along for axis in image[d]}, {axis for _, d in along for axis in window[d]}
        return any(summed) and min(layout.count(tuple(axes)) for axes in summed) < layout.mesh.size

    return Grouped({e.index for e in layout.program.equations if divided(e)}, layout)
