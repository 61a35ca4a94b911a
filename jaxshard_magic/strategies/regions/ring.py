"""Attention over divided positions as a ring: keys and values go round, and nobody has all scores, keys or values."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp

from ...plan import Sent
from ...program.attention.form import wide
from ...program.ir import Equation, Value
from ...program.permuted import first_mask
from ...program.primitives import shape_of
from ...program.sizes import array_bytes
from ..changes import at_default, read_narrow
from ..layout import Layout, Spec, partition_spec, without
from ..ring import Ring, forward, gradient
from ..rings import in_dealt_order, is_gradient, ring, rings, there
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
        specs = [partition_spec(spec) for spec in self.specs(e)]
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
        sizes = [self._moved(v, spec) for v, spec in zip(e.ins[:3], self.specs(e), strict=False)]
        return sum(size // self._narrowed(e, v) for size, v in zip(sizes[1:], e.ins[1:3], strict=True))

    def turn_of_gradients(self, e: Equation) -> int | None:
        """Bytes of their gradients that a device sends in a turn; None of a member that is no gradient."""
        if not is_gradient(e):
            return None
        return sum(self._summed(v, spec) for v, spec in zip(e.ins[1:3], self.specs(e)[1:3], strict=True))

    def specs(self, e: Equation) -> list[Spec]:
        """How the operands and the results of a member lie: positions divided, but for those of masks that have no
        dimension of queries besides; examples and heads as elsewhere."""
        form, layout, ring, at = e.params["form"], self.layout, self.ring(e), first_mask(e)
        lead, back = _lead(layout, e), is_gradient(e)
        rows: Spec = [*lead, layout.sequence_axes]
        columns: Spec = [*lead[: form.batch], layout.sequence_axes]
        operands = [[*rows, ()], [*columns, ()], [*columns, ()]]
        if back:
            operands += [[*rows, ()], rows, rows, rows]
        for grid, v, var in zip(ring.grids, e.ins[at:], e.eqn.invars[at:], strict=True):
            sized = zip((*lead, (), ()), shape_of(var), strict=True)
            whole: Spec = [axes if size > 1 and v is not None else () for axes, size in sized]
            if grid:
                whole[-2] = layout.sequence_axes
            operands.append(whole)
        results = operands[:3] if back else [[*rows, ()], rows, rows]
        return [*operands, *results]

    def sent(self, e: Equation, operands: Iterable[Sent], rest: Iterable[Sent]) -> Iterable[Sent]:
        yield from operands
        ring, specs, layout = self.ring(e), self.specs(e), self.layout
        form, axes, n = e.params["form"], ring.axes, ring.devices
        turns, back = ring.turns - 1, is_gradient(e)
        sizes = [self._moved(v, spec) for v, spec in zip((*e.ins, *e.outs), specs, strict=True)]
        arrays = 4 if back else 3  # queries, keys, values, and the result's gradient
        for k in range(arrays):
            sizes[k] //= self._narrowed(e, e.ins[k])
        results = [
            size // (2 if read_narrow(layout, v, layout.active(v)) else 1)
            for size, v in zip(sizes[len(e.ins) :], e.outs, strict=True)
        ]
        summed = [self._summed(v, spec) for v, spec in zip(e.ins[:3], specs, strict=False)]

        def permute(size: int, count: int) -> Sent:
            return Sent("collective-permute", axes, n, size, count * e.trips)

        for k in (1, 2) if turns else ():
            yield permute(sizes[k], turns)
            if back:
                yield permute(summed[k], turns)
        if ring.zigzag and not ring.dealt:
            own = [size for k, size in enumerate(sizes[: first_mask(e)]) if (e.index, k) not in self.there]
            for size in (*own, *results):
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
        ring, specs, back = self.ring(e), self.specs(e), is_gradient(e)
        query, key, value = e.ins[:3]
        assert query is not None and key is not None and value is not None
        rows = prod(self.layout.program.shapes[query][:-2]) // prod(map(self.layout.count, specs[0][:-2]))
        scores = array_bytes((rows, ring.size, ring.size), wide(self.layout.program.avals[query].dtype))
        summed = [self._summed(v, spec) for v, spec in zip(e.ins[:3], specs, strict=False)]
        moving = sum(self.layout.bytes_of(v, spec) for v, spec in zip((key, value), specs[1:3], strict=True))
        sums = sum(summed) + 2 * sum(summed[1:]) if back else summed[0]
        changed = e.params["form"].change is not None
        return (4 if back else 2) * scores + changed * (2 if back else 1) * scores + sums + 2 * moving

    def _moved(self, v: Value | None, spec: Spec) -> int:
        return 0 if v is None else self.layout.moving(v, spec)

    def _narrowed(self, e: Equation, v: Value | None) -> int:
        """By what is shorter on its way that attention multiplies: a TPU does so with float32 as bfloat16, unless more
        precision is asked for, and sends it so."""
        if v is None or self.layout.platform != "tpu" or self.layout.program.avals[v].dtype != jnp.float32:
            return 1
        return 2 if at_default(*e.params["form"].precision) else 1

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


def _lead(layout: Layout, e: Equation) -> Spec:
    """How examples, heads and groups are divided."""
    form, query = e.params["form"], e.ins[0]
    assert query is not None
    spec = layout.active(query)[: form.batch + form.groups]
    return [tuple(a for a in axes if a not in layout.sequence_axes) for axes in spec]
