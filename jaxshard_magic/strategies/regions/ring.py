"""Attention over divided positions as a ring: keys and values go round, and nobody has all scores, keys or values."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import jax

from ...plan import Sent
from ...program.attention.form import wide
from ...program.ir import Equation, Value
from ...program.permuted import first_mask
from ...program.sizes import array_bytes
from ..layout import Layout, Spec, partition_spec, without
from ..ring import Ring, forward, gradient
from ..rings import dealt_by_itself, in_dealt_order, is_gradient, lying, moving, ring, rings, there
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class RingAttention(Region):
    """The attentions, and gradients of attentions, whose positions are divided. `there`: operands, by equation and
    place, that a member before has brought to where this one needs them. `dealt`: those, by index, that find their
    positions dealt out."""

    layout: Layout
    there: frozenset[tuple[int, int]]
    dealt: frozenset[int] = frozenset()

    def emit(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        specs = [partition_spec(spec) for spec in lying(self.layout, e)]
        early = tuple(k for k in range(3) if (e.index, k) not in self.there)
        ring = replace(self.ring(e), ordered=self.layout.simulated, early=early)
        around = jax.shard_map(
            partial(gradient if is_gradient(e) else forward, e.params["form"], ring),
            mesh=self.layout.mesh,
            in_specs=tuple(specs[: len(values)]),
            out_specs=specs[len(values) :],
            check_vma=False,
        )
        return hold.after(e, around(*hold.before(e, values)))

    def ring(self, e: Equation) -> Ring:
        """The ring of a member."""
        found = ring(self.layout, e)
        return (in_dealt_order(found) or found) if e.index in self.dealt else found

    def turn(self, e: Equation) -> int:
        """Bytes of the keys and values of a device of a member, all of which it sends in a turn."""
        return sum(moving(self.layout, e)[1:3])

    def turn_of_gradients(self, e: Equation) -> int | None:
        """Bytes of their gradients that a device sends in a turn; None of a member that is no gradient."""
        if not is_gradient(e):
            return None
        return sum(
            self._summed(v, spec) for v, spec in zip(e.ins[1:3], lying(self.layout, e)[1:3], strict=True)
        )

    def sent(self, e: Equation, operands: Iterable[Sent], rest: Iterable[Sent]) -> Iterable[Sent]:
        yield from operands
        layout, ring, specs, sizes = self.layout, self.ring(e), lying(self.layout, e), moving(self.layout, e)
        form, axes, n = e.params["form"], ring.axes, ring.devices
        turns, back = ring.turns - 1, is_gradient(e)
        summed = [self._summed(v, spec) for v, spec in zip(e.ins[:3], specs, strict=False)]

        def permute(size: int, count: int) -> Sent:
            return Sent("collective-permute", axes, n, size, count * e.trips)

        for k in (1, 2) if turns else ():
            yield permute(sizes[k], turns)
            if back:
                yield permute(summed[k], turns)
        if not ring.dealt:
            for size in dealt_by_itself(layout, e, self.there):
                yield permute(size // 2, 2)
        if form.uniform:
            made = e.outs[2] if back else e.ins[2]
            assert made is not None
            lead = specs[2][: form.batch]
            shape = layout.program.shapes[made]
            count = prod(shape[: form.batch]) // prod(map(layout.count, lead)) * shape[-1]
            width = array_bytes((count,), wide(layout.program.avals[made].dtype))
            yield Sent("all-reduce", axes, n, width, e.trips)
        for k, v in enumerate(e.ins[first_mask(e) :]):
            there = (e.index, first_mask(e) + k) in self.there
            if v is not None and layout.batchy(v) and not ring.grids[k] and not there:
                lies = layout.active(v)
                gone = tuple(a for has in lies for a in has if a in axes)
                if gone:
                    size = layout.moving(v, without(lies, gone))
                    yield Sent("all-gather", gone, layout.count(gone), size, e.trips)

    def held(self, e: Equation, rest: Callable[[], int]) -> int:
        """Scores of a block and their exponentials, of a gradient theirs as well; what scores were before a change;
        sums; keys on their way."""
        ring, specs, back = self.ring(e), lying(self.layout, e), is_gradient(e)
        query, key, value = e.ins[:3]
        assert query is not None and key is not None and value is not None
        rows = prod(self.layout.program.shapes[query][:-2]) // prod(map(self.layout.count, specs[0][:-2]))
        scores = array_bytes((rows, ring.size, ring.size), wide(self.layout.program.avals[query].dtype))
        summed = [self._summed(v, spec) for v, spec in zip(e.ins[:3], specs, strict=False)]
        moving = sum(self.layout.bytes_of(v, spec) for v, spec in zip((key, value), specs[1:3], strict=True))
        sums = sum(summed) + 2 * sum(summed[1:]) if back else summed[0]
        changed = e.params["form"].change is not None
        return (4 if back else 2) * scores + changed * (2 if back else 1) * scores + sums + 2 * moving

    def _summed(self, v: Value | None, spec: Spec) -> int:
        """Bytes of a sum of arrays that lie as `v`."""
        if v is None:
            return 0
        shape = self.layout.program.shapes[v]
        dtype = wide(self.layout.program.avals[v].dtype)
        return array_bytes(shape, dtype) // prod(map(self.layout.count, spec))


def ring_attention(context: Context) -> RingAttention:
    """The rings of a step."""
    layout, members = context.layout, rings(context.layout)
    dealt = context.dealing.attentions
    return RingAttention({e.index for e in members}, layout, there(layout, members), dealt)
