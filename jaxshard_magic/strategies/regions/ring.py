"""Ring attention over sharded positions: keys and values travel, and no device has all scores, keys or values."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import jax

from ...plan import PlannedCollective
from ...program.attention.blockwise import accumulation_dtype
from ...program.ir import Equation, Value
from ...program.permutation_equivariance import first_mask_slot
from ...program.sizes import array_bytes
from ..layout import Layout, Spec, partition_spec, without_axes
from ..ring_attention import RingSpec, forward, gradient
from ..ring_layout import (
    as_zigzag,
    find_rings,
    is_gradient,
    ring_bytes,
    ring_spec,
    ring_specs,
    shared_operands,
    zigzag_bytes,
)
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class RingAttention(Region):
    """Attentions, and gradients of attentions, with sharded positions.

    Attributes:
        layout: The layout.
        shared_operands: Operands, by equation and position, already resharded by an earlier member.
        zigzag_members: Indices of members that find their positions in zig-zag order.
    """

    layout: Layout
    shared_operands: frozenset[tuple[int, int]]
    zigzag_members: frozenset[int] = frozenset()

    def emit(self, e: Equation, values: list, default: Callable[[list], list], lowering: Emission) -> list:
        specs = [partition_spec(spec) for spec in ring_specs(self.layout, e)]
        # Operands shared with an earlier ring have been permuted there, and need no delay.
        early = tuple(k for k in range(3) if (e.index, k) not in self.shared_operands)
        ring = replace(self.ring(e), ordered=self.layout.is_cpu, early_operands=early)
        around = jax.shard_map(
            partial(gradient if is_gradient(e) else forward, e.params["form"], ring),
            mesh=self.layout.mesh,
            in_specs=tuple(specs[: len(values)]),
            out_specs=specs[len(values) :],
            check_vma=False,
        )
        return lowering.after(e, around(*lowering.before(e, values)))

    def ring(self, e: Equation) -> RingSpec:
        """Return the ring of a member."""
        plain_ring = ring_spec(self.layout, e)
        return (as_zigzag(plain_ring) or plain_ring) if e.index in self.zigzag_members else plain_ring

    def step_bytes(self, e: Equation) -> int:
        """Return the bytes of a device's keys and values, all sent at each step."""
        return sum(ring_bytes(self.layout, e)[1:3])

    def gradient_step_bytes(self, e: Equation) -> int | None:
        """Return the bytes of the gradients of keys and values, all sent at each step; None for a forward attention."""
        if not is_gradient(e):
            return None
        return sum(
            self._sum_bytes(v, spec) for v, spec in zip(e.operands[1:3], ring_specs(self.layout, e)[1:3], strict=True)
        )

    def collectives(
        self, e: Equation, operand_collectives: Iterable[PlannedCollective], default: Iterable[PlannedCollective]
    ) -> Iterable[PlannedCollective]:
        yield from operand_collectives
        layout, ring, specs, sizes = (self.layout, self.ring(e), ring_specs(self.layout, e), ring_bytes(self.layout, e))
        form, axes, n = e.params["form"], ring.axes, ring.devices
        steps, has_gradient = ring.steps - 1, is_gradient(e)
        summed = [self._sum_bytes(v, spec) for v, spec in zip(e.operands[:3], specs, strict=False)]

        def permute(size: int, count: int) -> PlannedCollective:
            return PlannedCollective("collective-permute", axes, n, size, count * e.trip_count)

        # Keys and values travel, and in the backward pass their gradients with them.
        for k in (1, 2) if steps else ():
            yield permute(sizes[k], steps)
            if has_gradient:
                yield permute(summed[k], steps)
        if not ring.already_zigzag:
            for size in zigzag_bytes(layout, e, self.shared_operands):
                # One collective-permute for each half of the positions.
                yield permute(size // 2, 2)
        if form.mean_if_fully_masked:
            made = e.results[2] if has_gradient else e.operands[2]
            assert made is not None
            lead = specs[2][: form.batch]
            shape = layout.program.shapes[made]
            count = prod(shape[: form.batch]) // prod(map(layout.device_count, lead)) * shape[-1]
            width = array_bytes((count,), accumulation_dtype(layout.program.avals[made].dtype))
            yield PlannedCollective("all-reduce", axes, n, width, e.trip_count)
        for k, v in enumerate(e.operands[first_mask_slot(e) :]):
            is_shared = (e.index, first_mask_slot(e) + k) in self.shared_operands
            if v is not None and layout.is_activation(v) and not ring.mask_is_grid[k] and not is_shared:
                active_spec = layout.activation_spec(v)
                gone = tuple(a for has in active_spec for a in has if a in axes)
                if gone:
                    size = layout.transfer_bytes(v, without_axes(active_spec, gone))
                    yield PlannedCollective("all-gather", gone, layout.device_count(gone), size, e.trip_count)

    def scratch_bytes(self, e: Equation, default: Callable[[], int]) -> int:
        """Return the bytes of score blocks, sums and travelling keys and values.

        Score blocks count with their exponentials, in the backward pass with their gradients, and with the scores
        before a change of scores.
        """
        ring, specs, has_gradient = self.ring(e), ring_specs(self.layout, e), is_gradient(e)
        query, key, value = e.operands[:3]
        assert query is not None and key is not None and value is not None
        rows = prod(self.layout.program.shapes[query][:-2]) // prod(map(self.layout.device_count, specs[0][:-2]))
        scores = array_bytes(
            (rows, ring.chunk_size, ring.chunk_size), accumulation_dtype(self.layout.program.avals[query].dtype)
        )
        summed = [self._sum_bytes(v, spec) for v, spec in zip(e.operands[:3], specs, strict=False)]
        moving = sum(self.layout.shard_bytes(v, spec) for v, spec in zip((key, value), specs[1:3], strict=True))
        sums = sum(summed) + 2 * sum(summed[1:]) if has_gradient else summed[0]
        changed = e.params["form"].score_mod is not None
        # Keys and values are there twice: in use, and on their way to the next device.
        return (4 if has_gradient else 2) * scores + changed * (2 if has_gradient else 1) * scores + sums + 2 * moving

    def _sum_bytes(self, v: Value | None, spec: Spec) -> int:
        """Return the bytes of a device's shard of an accumulator for `v`."""
        if v is None:
            return 0
        shape = self.layout.program.shapes[v]
        dtype = accumulation_dtype(self.layout.program.avals[v].dtype)
        return array_bytes(shape, dtype) // prod(map(self.layout.device_count, spec))


def find_ring_attention(context: Context) -> RingAttention:
    layout, members = context.layout, find_rings(context.layout)
    dealt = context.zigzag.attentions
    return RingAttention({e.index for e in members}, layout, shared_operands(layout, members), dealt)
