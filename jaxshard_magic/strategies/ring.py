"""Attention of positions that are divided over the devices of a ring: what one of them does, inside a `shard_map`.

Queries stay. Keys and values go round, a device further at each turn, and meet the queries of every device: after
`turns` of them, one less of which is sent for, a device has its result. Of the gradient, those of keys and values go
round behind these, and home in the last turn.

Where each query sees only what comes before it, the first device would be done at once, and the last work at every
turn. There positions are dealt out in another order ("zig-zag"): of 2n parts, device d takes the parts d and 2n-1-d, so
that all work alike at every turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..program.attention import form as blocks
from ..program.attention.attention import Span
from ..program.attention.form import Form, State
from ..program.attention.fused import settled
from ..program.labels import DEAL, TURN

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Ring:
    """`axes`: the mesh axes of its `devices`. `positions`: how many there are in all. `turns`: the keys of how many
    devices each meets. `zigzag`: its positions are two parts that are not neighbours; `dealt`: and come and go as such.
    `grids`: which arrays of the mask have a dimension of queries and one of keys.

    `ordered`: what it sends is to go in the order of the program, which XLA for the CPU does not see to: it runs what
    stands beside a loop meanwhile, and takes one collective of a `shard_map` for another. `early`: the operands of a
    gradient, by place, that are there before it is asked for."""

    axes: Axes
    devices: int
    positions: int
    turns: int
    zigzag: bool
    grids: tuple[bool, ...] = ()
    dealt: bool = False
    ordered: bool = False
    early: tuple[int, ...] = ()

    @property
    def parts(self) -> int:
        """Into how many parts the positions of a device are cut, each of positions in succession."""
        return 2 if self.zigzag else 1

    @property
    def size(self) -> int:
        """Positions of a part."""
        return self.positions // self.devices // self.parts


def ring_of(form: Form, axes: Axes, devices: int, positions: int, masks: Sequence[Sequence[int]]) -> Ring:
    """The ring for an attention, whose mask has arrays of these shapes: as many turns as its distances need, and
    zig-zag where keys to one side of a query are not seen."""
    low, high = form.span.low, form.span.high
    each, turns = positions // devices, devices
    if low is not None and low >= 0 and high is not None:
        turns = min(devices, 1 + -(-high // each))
    grids = tuple(shape[-2] > 1 and shape[-1] > 1 for shape in masks)
    uneven = low is not None and turns == devices > 1 and each % 2 == 0
    return Ring(axes, devices, positions, turns, uneven and not any(grids), grids)


def forward(form: Form, ring: Ring, query: Any, key: Any, value: Any, *masks: Any) -> list:
    """`attention` on one device.

    Args:
        query, key, value: its positions of them, in their order.
        masks: the arrays of the form's leaves: of queries and keys the queries of the device, else of all positions.

    Gives its positions of the results.
    """
    axis = _Axis(ring)
    query, key, value = (axis.dealt(x, -2) for x in (query, key, value))
    queries = axis.cut(query, -2)
    states = [blocks.start(form, q, value) for q in queries]
    at = starts(ring, axis.me)

    def meet(states: list[State], keys: tuple, turn: Any) -> list[State]:
        k, v = (axis.cut(x, -2) for x in keys)
        for j, start in enumerate(starts(ring, axis.at(turn))):
            for i, first in enumerate(at):

                def work(state, i=i, j=j, first=first, start=start):
                    block = _block(form, ring, masks, i, first, start)
                    return blocks.forward(form, state, queries[i], k[j], v[j], block)

                states[i] = _where_seen(form, ring, first, start, work, states[i])
        return states

    def turn(carry, s):
        states, keys = carry
        coming = axis.sent(keys)  # on its way while this turn is computed
        return (meet([*states], keys, s), coming), None

    carry, _ = lax.scan(turn, (states, (key, value)), jnp.arange(ring.turns - 1))
    states = meet([*carry[0]], carry[1], ring.turns - 1)
    mean = None
    if form.uniform:
        added = axis.after(value.astype(blocks.wide(value.dtype)).sum(-2), states[0][1])
        mean = lax.psum(added, ring.axes) / ring.positions
    outs = zip(*(blocks.result(form, state, mean) for state in states), strict=True)
    out, *numbers = (jnp.concatenate(parts, axis=d) for parts, d in zip(outs, (-2, -1, -1), strict=True))
    numbers = [axis.back(x, -1) for x in numbers]
    return [axis.back(axis.after(out, *numbers), -2), *numbers]


def gradient(
    form: Form,
    ring: Ring,
    query: Any,
    key: Any,
    value: Any,
    given: Any,
    largest: Any,
    total: Any,
    delta: Any,
    *masks: Any,
) -> list:
    """`attention_gradient` on one device; operands and results are its positions, `masks` as of `forward`."""
    axis, operands = _Axis(ring), (query, key, value)
    before = [axis.after(x, given) if k in ring.early else x for k, x in enumerate(operands)]
    query, key, value, given = (axis.dealt(x, -2) for x in (*before, given))
    largest, total, delta = (axis.dealt(axis.after(x, given), -1) for x in (largest, total, delta))
    numbers = zip(*(axis.cut(x, -1) for x in (largest, total, delta)), strict=True)
    rows = list(zip(axis.cut(query, -2), axis.cut(given, -2), numbers, strict=True))
    at = starts(ring, axis.me)
    dtype = blocks.wide(query.dtype)

    def meet(of_queries: list, of_keys: tuple, keys: tuple, turn: Any) -> tuple[list, tuple]:
        k, v = (axis.cut(x, -2) for x in keys)
        sums: list[Any] = list(zip(*(axis.cut(x, -2) for x in of_keys), strict=True))
        for j, start in enumerate(starts(ring, axis.at(turn))):
            for i, first in enumerate(at):

                def work(state, i=i, j=j, first=first, start=start):
                    block = _block(form, ring, masks, i, first, start)
                    q, back, of_each = rows[i]
                    found = blocks.backward(form, q, k[j], v[j], back, of_each, block)
                    return tuple(x + more for x, more in zip(state, found, strict=True))

                state = (of_queries[i], *sums[j])
                of_queries[i], *sums[j] = _where_seen(form, ring, first, start, work, state)
        return of_queries, tuple(jnp.concatenate(parts, axis=-2) for parts in zip(*sums, strict=True))

    def turn(carry, s):
        of_queries, of_keys, keys = carry
        coming = axis.sent(keys)
        of_queries, of_keys = meet([*of_queries], of_keys, keys, s)
        return (of_queries, axis.sent(of_keys), coming), None

    nothing = tuple(jnp.zeros(x.shape, dtype) for x in (key, value))
    of_queries = [jnp.zeros(q.shape, dtype) for q, *_ in rows]
    keys = (axis.after(key, given), axis.after(value, given))
    coming = axis.sent(keys) if ring.turns > 1 else keys
    of_queries, own = meet(of_queries, nothing, keys, 0)
    if ring.turns > 1:
        carry = (of_queries, nothing, coming)
        carry, _ = lax.scan(turn, carry, jnp.arange(1, ring.turns - 1))
        of_queries, of_keys = meet([*carry[0]], carry[1], carry[2], ring.turns - 1)
        home = axis.sent(of_keys, 1 - ring.turns)
        own = tuple(x + more for x, more in zip(own, home, strict=True))
    found = jnp.concatenate(of_queries, axis=-2), *own
    blind = None
    if form.uniform:
        blind = lax.psum(axis.after(blocks.blind_sum(form, given, total), found[0]), ring.axes)
        blind = blind / ring.devices  # `settled` divides it among the keys of one device
    return [axis.back(x, -2) for x in settled(form, operands, found, blind)]


def _block(form: Form, ring: Ring, masks: Sequence[Any], part: int, first: Any, start: Any) -> blocks.Block:
    """The queries of the device's part `part`, from position `first` on, with the keys of the part from `start` on."""
    rows, size = form.batch + form.groups, ring.size
    found = []
    for own, x in zip(ring.grids, masks, strict=True):  # of a grid a device has its own queries
        if x.shape[rows] > 1:
            x = lax.dynamic_slice_in_dim(x, part * size if own else first, size, rows)
        if x.shape[rows + 1] > 1:
            x = lax.dynamic_slice_in_dim(x, start, size, rows + 1)
        found.append(x)
    return blocks.block(form, found, first, start, (size, size))


def _where_seen(form: Form, ring: Ring, first: Any, start: Any, work: Any, state: Any) -> Any:
    """`work(state)`, or `state` where no query of a part sees a key of another."""
    if form.span.low is None and form.span.high is None:
        return work(state)
    return lax.cond(near(form.span, ring, first, start), work, lambda x: x, state)


def near(span: Span, ring: Ring, first: Any, start: Any) -> Any:
    """Whether a query of the part from position `first` on is at a distance in `span` from a key of that from `start`
    on."""
    distance, reach, within = first - start, ring.size - 1, True
    if span.low is not None:
        within = within & (distance + reach >= span.low)
    if span.high is not None:
        within = within & (distance - reach <= span.high)
    return within


def starts(ring: Ring, device: Any) -> list:
    """The first position of each part of a device; in zig-zag of an even one first, so that positions are dealt out
    between devices without being moved in one."""
    if not ring.zigzag:
        return [device * ring.size]
    far = 2 * ring.devices - 1 - device
    even = device % 2 == 0
    return [jnp.where(even, a, b) * ring.size for a, b in ((device, far), (far, device))]


def dealt(ring: Ring, x: Any, dim: int) -> Any:
    """On one device: its positions of an array, as the ring wants them, in the place of those that it has."""
    return _Axis(ring).dealt(x, dim)


def put_back(ring: Ring, x: Any, dim: int) -> Any:
    """What `dealt` dealt out, in order again."""
    return _Axis(ring).back(x, dim)


def parts_in_order(devices: int) -> list[int]:
    """The parts of a zig-zag, of which device after device has two.

    >>> parts_in_order(3)
    [0, 5, 4, 1, 2, 3]
    """
    pairs = ((d, 2 * devices - 1 - d) for d in range(devices))
    return [part for pair in pairs for part in sorted(pair, key=lambda part: part % 2)]


class _Axis:
    """The ring as one of its devices sees it, which is number `me`."""

    def __init__(self, ring: Ring):
        self.ring = ring
        self.me = lax.axis_index(ring.axes)

    def sent(self, arrays: tuple, by: int = 1) -> tuple:
        """Arrays of the device `by` places before."""
        n = self.ring.devices
        way = [(d, (d + by) % n) for d in range(n)]
        with jax.named_scope(TURN):
            return tuple(lax.ppermute(x, self.ring.axes, way) for x in arrays)

    def after(self, x: Any, *others: Any) -> Any:
        """`x`, once others are there, where the ring is `ordered`: XLA leaves out barriers, but not such a sum."""
        for other in others if self.ring.ordered else ():
            x = x + jnp.minimum(jnp.abs(other.reshape(-1)[0]), 0).astype(x.dtype)
        return x

    def at(self, turn: Any) -> Any:
        """Whose keys a device has at a turn."""
        return (self.me - turn) % self.ring.devices

    def cut(self, x: Any, dim: int) -> list:
        """The parts of an array of the device's positions."""
        return jnp.split(x, self.ring.parts, axis=dim)

    def dealt(self, x: Any, dim: int) -> Any:
        """Positions as they are divided in their order, in that of the ring: of each device's two parts, the first have
        even numbers and go to one device each, the second have odd ones."""
        if not self.ring.zigzag or self.ring.dealt:
            return x
        return self._sent_by(self._ways(), x, dim)

    def back(self, x: Any, dim: int) -> Any:
        """What `dealt` took apart, in order again."""
        if not self.ring.zigzag or self.ring.dealt:
            return x
        ways = [[(b, a) for a, b in way] for way in self._ways()]
        return self._sent_by(ways, x, dim)

    def _sent_by(self, ways: list[list[tuple[int, int]]], x: Any, dim: int) -> Any:
        """Each part of `x` by its own of `ways`."""
        parts = zip(self.cut(x, dim), ways, strict=True)
        with jax.named_scope(DEAL):
            return jnp.concatenate([lax.ppermute(p, self.ring.axes, way) for p, way in parts], axis=dim)

    def _ways(self) -> list[list[tuple[int, int]]]:
        n = self.ring.devices
        return [[(d, min(part, 2 * n - 1 - part)) for d in range(n) for part in [2 * d + k]] for k in (0, 1)]
