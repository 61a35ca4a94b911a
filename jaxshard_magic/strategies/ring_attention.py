"""Ring attention: the part of one device, inside a `shard_map` over sharded positions.

Queries stay. Keys and values travel to the next device at each step and meet the queries of every device. The result is
complete after `steps` steps, with a send in all but the last. In the backward pass the gradients of keys and values
travel behind keys and values, and return to their device in the last step.

Under a causal mask the first device would finish at once, and the last would work at every step. Positions are
therefore permuted (zig-zag): of 2n chunks, device d takes the chunks d and 2n-1-d. Every device then has equal work at
every step.

Footguns:
- XLA for the CPU starts a collective that does not depend on a loop while other devices are still in the loop. All
  collectives of `shard_map`s share one number there. Two independent collectives, one in a loop, are therefore taken
  for each other, and the process stops after 40 seconds. `ordered` adds the missing data dependences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..program.attention import blockwise as blocks
from ..program.attention.attention import DistanceSpan
from ..program.attention.blockwise import AttentionForm, SoftmaxState
from ..program.attention.fused_attention import finish_gradients
from ..program.op_labels import RING_SHIFT, ZIGZAG

Axes = tuple[str, ...]


@dataclass(frozen=True)
class RingSpec:
    """Ring over the devices of one sharded attention.

    Attributes:
        axes: Mesh axes of the devices.
        devices: Number of devices.
        positions: Number of positions, over all devices.
        steps: Number of devices whose keys each query block meets.
        zigzag: Whether a device has two chunks that are not neighbours.
        mask_is_grid: For each array of the mask, whether both queries and keys have a dimension.
        already_zigzag: Whether operands and results are in zig-zag order outside the ring as well.
        ordered: Whether collectives need data dependences to keep the order of the program (XLA for the CPU).
        early_operands: Positions of a gradient's operands available before the cotangent.
    """

    axes: Axes
    devices: int
    positions: int
    steps: int
    zigzag: bool
    mask_is_grid: tuple[bool, ...] = ()
    already_zigzag: bool = False
    ordered: bool = False
    early_operands: tuple[int, ...] = ()

    @property
    def chunk_count(self) -> int:
        """Number of chunks of consecutive positions on a device."""
        return 2 if self.zigzag else 1

    @property
    def chunk_size(self) -> int:
        """Positions in a chunk."""
        return self.positions // self.devices // self.chunk_count


def make_ring(
    form: AttentionForm, axes: Axes, devices: int, positions: int, mask_shapes: Sequence[Sequence[int]]
) -> RingSpec:
    """Return the ring of an attention: as many steps as its distances need, zig-zag where queries do not see keys on
    one side.

    Args:
        form: Form of the attention.
        axes: Mesh axes of the ring.
        devices: Number of devices along them.
        positions: Number of positions, over all devices.
        mask_shapes: Shapes of the arrays of the mask.
    """
    low, high = form.span.low, form.span.high
    per_device, turns = positions // devices, devices
    if low is not None and low >= 0 and high is not None:
        # Keys at most `high` positions back are on the device itself and on the few before it.
        turns = min(devices, 1 + -(-high // per_device))
    grids = tuple(shape[-2] > 1 and shape[-1] > 1 for shape in mask_shapes)
    # Zigzag balances a causal mask over all steps. Mask arrays with queries and keys have these in sequential order.
    is_causal = low is not None and turns == devices > 1 and per_device % 2 == 0
    return RingSpec(axes, devices, positions, turns, is_causal and not any(grids), grids)


def forward(form: AttentionForm, ring: RingSpec, query: Any, key: Any, value: Any, *masks: Any) -> list:
    """Compute `attention` on one device.

    Args:
        form: Form of the attention.
        ring: The ring.
        query, key, value: The device's shards, with positions in their sharded order.
        masks: Arrays of the mask: those with queries and keys have the queries of the device, others all positions.

    Returns:
        The device's shards of the results.
    """
    axis = _RingDevice(ring)
    query, key, value = (axis.to_zigzag(x, -2) for x in (query, key, value))
    queries = axis.chunks(query, -2)
    states = [blocks.initial_state(form, q, value) for q in queries]
    query_starts = chunk_starts(ring, axis.index)

    def attend(states: list[SoftmaxState], keys: tuple, turn: Any) -> list[SoftmaxState]:
        k, v = (axis.chunks(x, -2) for x in keys)
        for j, start in enumerate(chunk_starts(ring, axis.source_of_keys(turn))):
            for i, first in enumerate(query_starts):

                def work(state, i=i, j=j, first=first, start=start):
                    block = _block(form, ring, masks, i, first, start)
                    return blocks.accumulate_block(form, state, queries[i], k[j], v[j], block)

                states[i] = _if_in_span(form, ring, first, start, work, states[i])
        return states

    def ring_step(carry, s):
        states, keys = carry
        # Sent before the computation, so that the collective-permute overlaps it.
        coming = axis.send(keys)
        return (attend([*states], keys, s), coming), None

    carry, _ = lax.scan(ring_step, (states, (key, value)), jnp.arange(ring.steps - 1))
    # The last step is outside of the scan: nothing is sent after it.
    states = attend([*carry[0]], carry[1], ring.steps - 1)
    mean = None
    if form.mean_if_fully_masked:
        added = axis.delay_until(value.astype(blocks.accumulation_dtype(value.dtype)).sum(-2), states[0][1])
        mean = lax.psum(added, ring.axes) / ring.positions
    outs = zip(*(blocks.attention_result(form, state, mean) for state in states), strict=True)
    out, *numbers = (jnp.concatenate(parts, axis=d) for parts, d in zip(outs, (-2, -1, -1), strict=True))
    numbers = [axis.from_zigzag(x, -1) for x in numbers]
    # XLA for the CPU must not start these permutations at the same time: that of `out` waits for the others.
    return [axis.from_zigzag(axis.delay_until(out, *numbers), -2), *numbers]


def gradient(
    form: AttentionForm,
    ring: RingSpec,
    query: Any,
    key: Any,
    value: Any,
    cotangent: Any,
    largest: Any,
    total: Any,
    delta: Any,
    *masks: Any,
) -> list:
    """Compute `attention_gradient` on one device.

    Operands and results are the device's shards; `masks` as in `forward`.
    """
    axis, operands = _RingDevice(ring), (query, key, value)
    ordered = [axis.delay_until(x, cotangent) if k in ring.early_operands else x for k, x in enumerate(operands)]
    query, key, value, cotangent = (axis.to_zigzag(x, -2) for x in (*ordered, cotangent))
    largest, total, delta = (axis.to_zigzag(axis.delay_until(x, cotangent), -1) for x in (largest, total, delta))
    numbers = zip(*(axis.chunks(x, -1) for x in (largest, total, delta)), strict=True)
    rows = list(zip(axis.chunks(query, -2), axis.chunks(cotangent, -2), numbers, strict=True))
    query_starts = chunk_starts(ring, axis.index)
    dtype = blocks.accumulation_dtype(query.dtype)

    def attend(of_queries: list, of_keys: tuple, keys: tuple, turn: Any) -> tuple[list, tuple]:
        k, v = (axis.chunks(x, -2) for x in keys)
        sums: list[Any] = list(zip(*(axis.chunks(x, -2) for x in of_keys), strict=True))
        for j, start in enumerate(chunk_starts(ring, axis.source_of_keys(turn))):
            for i, first in enumerate(query_starts):

                def work(state, i=i, j=j, first=first, start=start):
                    block = _block(form, ring, masks, i, first, start)
                    q, back, of_each = rows[i]
                    found = blocks.block_gradients(form, q, k[j], v[j], back, of_each, block)
                    return tuple(x + more for x, more in zip(state, found, strict=True))

                state = (of_queries[i], *sums[j])
                of_queries[i], *sums[j] = _if_in_span(form, ring, first, start, work, state)
        return of_queries, tuple(jnp.concatenate(parts, axis=-2) for parts in zip(*sums, strict=True))

    def ring_step(carry, s):
        of_queries, of_keys, keys = carry
        coming = axis.send(keys)
        of_queries, of_keys = attend([*of_queries], of_keys, keys, s)
        return (of_queries, axis.send(of_keys), coming), None

    nothing = tuple(jnp.zeros(x.shape, dtype) for x in (key, value))
    of_queries = [jnp.zeros(q.shape, dtype) for q, *_ in rows]
    keys = (axis.delay_until(key, cotangent), axis.delay_until(value, cotangent))
    coming = axis.send(keys) if ring.steps > 1 else keys
    # The first step is outside of the scan: the gradients of a device's own keys need not travel.
    of_queries, own = attend(of_queries, nothing, keys, 0)
    if ring.steps > 1:
        carry = (of_queries, nothing, coming)
        carry, _ = lax.scan(ring_step, carry, jnp.arange(1, ring.steps - 1))
        of_queries, of_keys = attend([*carry[0]], carry[1], carry[2], ring.steps - 1)
        # In the last step the gradients are `steps - 1` devices past the device of their keys.
        home = axis.send(of_keys, 1 - ring.steps)
        own = tuple(x + more for x, more in zip(own, home, strict=True))
    found = jnp.concatenate(of_queries, axis=-2), *own
    blind = None
    if form.mean_if_fully_masked:
        blind = lax.psum(axis.delay_until(blocks.fully_masked_cotangent(form, cotangent, total), found[0]), ring.axes)
        # `finish_gradients` divides by the number of keys on one device; the mean is over the keys of all devices.
        blind = blind / ring.devices
    return [axis.from_zigzag(x, -2) for x in finish_gradients(form, operands, found, blind)]


def _block(
    form: AttentionForm, ring: RingSpec, masks: Sequence[Any], chunk: int, first: Any, start: Any
) -> blocks.ScoreBlock:
    """Return the mask block of one pair of chunks: queries from position `first` on, keys from position `start` on.

    Args:
        form: Form of the attention.
        ring: The ring.
        masks: Arrays of the mask.
        chunk: Number of the query chunk on the device.
        first: Position of the first query.
        start: Position of the first key.
    """
    rows, size = form.batch + form.groups, ring.chunk_size
    found = []
    # A mask array with queries and keys is sharded by queries; of the others each device has all positions.
    for own, x in zip(ring.mask_is_grid, masks, strict=True):
        if x.shape[rows] > 1:
            x = lax.dynamic_slice_in_dim(x, chunk * size if own else first, size, rows)
        if x.shape[rows + 1] > 1:
            x = lax.dynamic_slice_in_dim(x, start, size, rows + 1)
        found.append(x)
    return blocks.score_block(form, found, first, start, (size, size))


def _if_in_span(form: AttentionForm, ring: RingSpec, first: Any, start: Any, compute: Any, state: Any) -> Any:
    """Return `compute(state)`, or `state` where no query of one chunk sees a key of the other."""
    if form.span.low is None and form.span.high is None:
        return compute(state)
    return lax.cond(is_in_span(form.span, ring, first, start), compute, lambda x: x, state)


def is_in_span(span: DistanceSpan, ring: RingSpec, first: Any, start: Any) -> Any:
    """Return whether a query of the chunk from position `first` on is at a distance in `span` from a key of the chunk
    from `start` on."""
    distance, reach, is_near = first - start, ring.chunk_size - 1, True
    if span.low is not None:
        is_near = is_near & (distance + reach >= span.low)
    if span.high is not None:
        is_near = is_near & (distance - reach <= span.high)
    return is_near


def chunk_starts(ring: RingSpec, device: Any) -> list:
    """Return the first position of each chunk of a device."""
    if not ring.zigzag:
        return [device * ring.chunk_size]
    far = 2 * ring.devices - 1 - device
    # In zigzag order the even chunk comes first, so that chunks move between devices without a local reordering.
    even = device % 2 == 0
    return [jnp.where(even, a, b) * ring.chunk_size for a, b in ((device, far), (far, device))]


def to_zigzag(ring: RingSpec, x: Any, dim: int) -> Any:
    """Return an array with positions permuted to zig-zag order, on one device.

    Args:
        ring: The ring.
        x: The device's shard in sharded order.
        dim: Dimension of positions.
    """
    return _RingDevice(ring).to_zigzag(x, dim)


def from_zigzag(ring: RingSpec, x: Any, dim: int) -> Any:
    """Undo `to_zigzag`."""
    return _RingDevice(ring).from_zigzag(x, dim)


def zigzag_order(devices: int) -> list[int]:
    """Return the chunks in zig-zag order, two for each device in turn.

    >>> zigzag_order(3)
    [0, 5, 4, 1, 2, 3]
    """
    pairs = ((d, 2 * devices - 1 - d) for d in range(devices))
    return [part for pair in pairs for part in sorted(pair, key=lambda part: part % 2)]


class _RingDevice:
    """The ring seen from one device."""

    def __init__(self, ring: RingSpec):
        self.ring = ring
        self.index = lax.axis_index(ring.axes)

    def send(self, arrays: tuple, by: int = 1) -> tuple:
        """Return the arrays of the device `by` positions before this one in the ring."""
        n = self.ring.devices
        way = [(d, (d + by) % n) for d in range(n)]
        with jax.named_scope(RING_SHIFT):
            return tuple(lax.ppermute(x, self.ring.axes, way) for x in arrays)

    def delay_until(self, x: Any, *others: Any) -> Any:
        """Return `x` with a data dependence on `others`, if the ring is `ordered`."""
        # XLA for the CPU drops optimization barriers before it schedules, but keeps a sum with a zero computed from the
        # other value.
        for other in others if self.ring.ordered else ():
            x = x + jnp.minimum(jnp.abs(other.reshape(-1)[0]), 0).astype(x.dtype)
        return x

    def source_of_keys(self, step: Any) -> Any:
        """Return the device whose keys this device has at a step."""
        return (self.index - step) % self.ring.devices

    def chunks(self, x: Any, dim: int) -> list:
        """Return the chunks of a shard."""
        return jnp.split(x, self.ring.chunk_count, axis=dim)

    def to_zigzag(self, x: Any, dim: int) -> Any:
        """Return a shard of the sharded order permuted to zig-zag order."""
        if not self.ring.zigzag or self.ring.already_zigzag:
            return x
        # A device's first chunk has an even number, the second an odd one. Chunks of one parity go to different
        # devices, so that one collective-permute for each parity suffices.
        return self._permute_chunks(self._zigzag_permutations(), x, dim)

    def from_zigzag(self, x: Any, dim: int) -> Any:
        """Return a shard in zig-zag order permuted back to the sharded order."""
        if not self.ring.zigzag or self.ring.already_zigzag:
            return x
        ways = [[(b, a) for a, b in way] for way in self._zigzag_permutations()]
        return self._permute_chunks(ways, x, dim)

    def _permute_chunks(self, permutations: list[list[tuple[int, int]]], x: Any, dim: int) -> Any:
        """Send each chunk of `x` by its own permutation and concatenate the received chunks."""
        parts = zip(self.chunks(x, dim), permutations, strict=True)
        with jax.named_scope(ZIGZAG):
            return jnp.concatenate([lax.ppermute(p, self.ring.axes, way) for p, way in parts], axis=dim)

    def _zigzag_permutations(self) -> list[list[tuple[int, int]]]:
        """Return the (source, target) pairs of devices, for even and for odd chunks."""
        n = self.ring.devices
        return [[(d, min(part, 2 * n - 1 - part)) for d in range(n) for part in [2 * d + k]] for k in (0, 1)]
