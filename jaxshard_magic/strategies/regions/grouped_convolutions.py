"""Grouped convolutions with sharded groups: each device convolves its own groups.

Per-example gradients turn examples into groups of a convolution, and a step with several models has these as groups.
XLA's partitioner gets such convolutions wrong, in a plain `jax.jit` as well; in a `shard_map` nothing is left to
partition.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
from jax import lax

from ...program.ir import Equation, Value
from ...program.primitives import bind
from ...program.xla_faults import GROUP_COUNTS
from ..layout import Axes, Layout, Spec, partition_spec, without_axes
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class GroupedConvolutions(Region):
    """Convolutions with sharded groups. If the number of groups does not divide over the devices, each device has all
    groups."""

    layout: Layout

    def emit(self, e: Equation, values: list, default: Callable[[list], list], lowering: Emission) -> list:
        layout, c = self.layout, e.contraction
        assert c is not None and c.grouped is not None
        used = [layout.spec_in_use(v) for v in (*e.operands, *e.results)]
        groups = max(e.params[k] for k in GROUP_COUNTS)
        axes = next((spec[d] for spec, d in zip(used, c.grouped, strict=True) if spec[d]), ())
        if groups % layout.device_count(axes):
            axes: Axes = ()
        whole: list[Spec] = [[()] * len(spec) for spec in used]
        (left, right, out), summed = whole, ()
        for spec, d in zip((left, right, out), c.grouped, strict=True):
            spec[d] = axes
        for d, o in c.left_free:
            left[d] = out[o] = _remaining_axes(used[0][d], axes)
        for a, b in c.contracted:
            over = _remaining_axes(used[0][a], (*axes, *summed))
            # A device can sum its own part only if both operands are sharded alike.
            if over and over == used[1][b]:
                left[a] = right[b] = over
                summed += over
        # A device convolves only its own groups.
        counts = {k: e.params[k] // layout.device_count(axes) for k in GROUP_COUNTS if e.params[k] > 1}
        own = e.jaxpr_eqn.replace(params={**e.params, **counts})

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
        return lowering.after(e, [convolved(*lowering.before(e, values))])


def _remaining_axes(axes: Axes, taken: Iterable[str]) -> Axes:
    return without_axes([axes], {*taken})[0]


def find_grouped_convolutions(context: Context) -> GroupedConvolutions:
    """Find convolutions that XLA's partitioner gets wrong.

    These have sharded groups in an operand or the result, or sum over examples or positions that only some mesh axes
    shard, in the image or in the gradient of the result. In the second case the gradient of a kernel is wrong (seen
    with jaxlib 0.10 and 0.12).
    """
    layout = context.layout

    def divided(e: Equation) -> bool:
        c = e.contraction
        if c is None or c.grouped is None or any(0 in layout.program.shapes[v] for v in e.operands if v is not None):
            return False
        ends: list[Value | None] = [*e.operands, *e.results]
        if any(layout.spec_in_use(v)[d : d + 1] not in ([], [()]) for v, d in zip(ends, c.grouped, strict=True)):
            return True
        image, window, out = (layout.spec_in_use(v) for v in ends)
        along = [*c.contracted, *((i, w) for i, w, k in c.windowed if not out[k])]
        summed = {axis for d, _ in along for axis in image[d]}, {axis for _, d in along for axis in window[d]}
        return any(summed) and min(layout.device_count(tuple(axes)) for axes in summed) < layout.mesh.size

    return GroupedConvolutions({e.index for e in layout.program.equations if divided(e)}, layout)
