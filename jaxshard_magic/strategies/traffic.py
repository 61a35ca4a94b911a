"""The collectives that a layout takes, read off the traced step before anything is compiled.

Weights that rest divided are gathered where activations meet them (`Hold`), and what contracts a divided dimension is a
sum that devices add up: activations under tensor parallelism, gradients over the examples. Compiled steps send this,
and now and then a little more: scalars, what the compiler lays out anew.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..plan import Sent
from ..program.ir import Door, Equation, Scope, Value
from ..program.sizes import nbytes
from .hold import Hold
from .layout import Axes, Spec, partition_spec, without
from .reductions import activation_sum, gradient_sum
from .regions import Region
from .stepwise import gathers_sent


def traffic(hold: Hold) -> tuple[Sent, ...]:
    """The collectives of one step, in the order of the program; those of loops with all their trips."""
    return tuple(_Traffic(hold).all())


@dataclass
class _Body:
    """Weights that are whole in one body, by the value that they were gathered from, with their bytes; and activations
    that were `brought` to experts (True) or back."""

    is_loop: bool
    kept: dict[Value, int] = field(default_factory=dict)
    brought: set[tuple[Value, bool]] = field(default_factory=set)


class _Traffic:
    def __init__(self, hold: Hold):
        self._hold, self._layout = hold, hold.layout
        self._program = hold.program
        self._used = self._layout.flow.used
        self._gathered: set[tuple[Value, Axes]] = set()
        self._moved: set[tuple[Value, PartitionSpec]] = set()
        self._partners = self._linked() if self._layout.sequence else {}

    def all(self) -> Iterator[Sent]:
        yield from self._inside(self._program.top, _Body(False), {})
        for region in self._hold.regions:
            yield from region.sent_leaving()

    def _inside(self, scope: Scope, body: _Body, same: dict[Value, Value]) -> Iterator[Sent]:
        """`same`: what a value inside is outside of the bodies that are run in place."""
        for e in scope.equations:
            if e.doors or not self._used.isdisjoint(e.outs):
                yield from self._of(e, self._hold.regions_of(e), body, same)

    def _of(
        self, e: Equation, regions: tuple[Region, ...], body: _Body, same: dict[Value, Value]
    ) -> Iterator[Sent]:
        if regions:
            rest = self._of(e, regions[1:], body, same)
            yield from regions[0].sent(e, self._operands(e, body, same), rest)
            return
        for door in e.doors:
            yield from self._inside(door.scope, *self._entered(e, door, body, same))
        if not e.doors:
            yield from self._operands(e, body, same)
            yield from self._summed(e)

    def _operands(self, e: Equation, body: _Body, same: dict[Value, Value]) -> Iterator[Sent]:
        """What brings the operands of an equation without bodies to where it uses them."""
        yield from self._weights(e, body, same)
        yield from self._resharded(e)
        yield from self._to_experts(e, body, same)

    def _entered(
        self, e: Equation, door: Door, body: _Body, same: dict[Value, Value]
    ) -> tuple[_Body, dict[Value, Value]]:
        again = e.primitive.remat and e.params.get("differentiated") and e.params.get("prevent_cse")
        if again or e.name in ("scan", "while", "cond"):
            return _Body(True), {}
        return body, {b: same.get(a, a) for a, b, _ in door.into if a is not None}

    def _weights(self, e: Equation, body: _Body, same: dict[Value, Value]) -> Iterator[Sent]:
        """All-gathers of weights that `e` reads, as `Hold` keeps them for the next one that does."""
        layout = self._layout
        if not layout.storage.batchy_equation(e) or e.primitive.scatters:
            return
        for v in e.ins:
            if v is None or layout.batchy(v) or not self._program.shapes[v]:
                continue
            over = self._hold.gathers(v)
            source = same.get(v, v)
            laid = self._hold.relaid.get(source)
            if not over or source in body.kept or (laid is not None and same.get(laid, laid) in body.kept):
                continue
            yield from gathers_sent(layout, v, e.trips, narrowed=self._narrowed(e, v))
            body.kept[source] = nbytes(self._program.avals[v])
            while not body.is_loop and len(body.kept) > 1 and sum(body.kept.values()) > self._hold.cap:
                body.kept.pop(next(iter(body.kept)))

    def _narrowed(self, e: Equation, v: Value) -> bool:
        """Whether an operand is sent in bfloat16, as which a TPU multiplies float32 at its default precision; those of
        ragged products are not (v5e)."""
        if e.contraction is not None and e.contraction.ragged is not None:
            return False
        wide = self._layout.platform == "tpu" and self._program.avals[v].dtype == jnp.float32
        return wide and e.primitive.product and _at_default(e)

    def _multiplied(self, v: Value) -> bool:
        """Whether an activation, in whatever layout, is read by products that a TPU takes it in bfloat16 for, and by
        nothing else: what a body gives, or hands to another, is kept as it is."""
        if self._layout.platform != "tpu" or self._program.avals[v].dtype != jnp.float32:
            return False
        readers = [(w, e) for w, e in self._layout.flow.after[v] if w in self._used]
        return bool(readers) and all(
            e is not None
            and (self._multiplied(w) if e.primitive.alias else e.primitive.product and _at_default(e))
            for w, e in readers
        )

    def _summed(self, e: Equation) -> Iterator[Sent]:
        over, out = self._contracted(e), e.outs[0]
        if over and self._layout.batchy(out):
            yield activation_sum(self._layout, out, over, e.trips)
        elif over:  # a lookup's gradient is added up whole; of a TPU's it is not certain
            whole = e.primitive.scatters and self._layout.platform != "tpu"
            yield from gradient_sum(self._layout, out, over, e.trips, whole=whole, rows=self._rows(e, over))

    def _rows(self, e: Equation, over: Axes) -> int:
        """How many products each device adds up for an element of what `e` makes; 0 where it is no product."""
        if (c := e.contraction) is None or e.ins[0] is None:
            return 0
        shape = self._program.shapes[e.ins[0]]
        return math.prod(shape[i] for i, _ in c.contracted) // self._layout.count(over)

    def _contracted(self, e: Equation) -> Axes:
        """The mesh axes that `e` leaves a sum over: they divide what it contracts, reduces or looks up."""
        layout = self._layout
        if (c := e.contraction) is not None:
            left, right = (layout.at(e, v) for v in e.ins[:2])
            return _unique(a for i, j in c.contracted for a in left[i] if a in right[j])
        if e.primitive.reduces:
            spec = layout.at(e, e.ins[0])
            return _unique(a for d in e.params["axes"] for a in spec[d])
        if (
            e.primitive.scatters
            and e.primitive.adds
            and not layout.batchy(e.ins[0])
            and layout.batchy(e.ins[2])
        ):
            window = e.params["dimension_numbers"].update_window_dims
            return _unique(
                a for d, axes in enumerate(self._layout.used(e.ins[2])) if d not in window for a in axes
            )
        if e.name == "gather" and layout.batchy(e.outs[0]):
            spec = self._layout.used(e.ins[0])
            along = e.params["dimension_numbers"].start_index_map
            return _unique(a for d in along for a in spec[d] if d < len(spec))
        return ()

    def _resharded(self, e: Equation) -> Iterator[Sent]:
        """Activations whose positions `e` needs whole, or which change their division where attention begins or
        ends."""
        layout = self._layout
        if not layout.sequence:
            return
        yield from self._exchanged(e)
        into = self._partners.get(e.index, {})
        for v in dict.fromkeys(e.ins):
            if v is None or not layout.batchy(v) or (e.index, v) in layout.exchanges.reads:
                continue
            spec = layout.active(v)
            nodes = self._program.nodes(v)
            gone = _unique(
                a
                for n, axes in zip(nodes, spec, strict=True)
                for a in axes
                if a in layout.sequence_axes and n in into and a not in into[n]
            )
            if gone and (v, gone) not in self._gathered:
                self._gathered.add((v, gone))
                size = self._layout.bytes_of(v, without(spec, gone))
                if e.primitive.reduces:  # what is left of it is gathered
                    size = min(size, self._layout.bytes_of(e.outs[0], layout.at(e, e.outs[0])))
                yield self._sent("all-gather", gone, size, e.trips)

    def _to_experts(self, e: Equation, body: _Body, same: dict[Value, Value]) -> Iterator[Sent]:
        """Activations that lie by expert, or by token, and that `e` reads the other way, each once in a body."""
        layout, experts = self._layout, self._layout.experts
        if experts is None:
            return
        for v in e.ins:
            if v is None or not layout.batchy(v) or (lies := layout.active(v)) == (wanted := layout.at(e, v)):
                continue
            at = same.get(v, v), e.index in experts.equations
            if at not in body.brought:
                body.brought.add(at)
                size = layout.bytes_of(v, wanted)
                kind = "all-gather" if size > layout.bytes_of(v, lies) else "all-to-all"
                size //= 2 if self._narrowed(e, v) else 1
                yield self._sent(kind, experts.axes, size, e.trips)

    def _exchanged(self, e: Equation) -> Iterator[Sent]:
        layout, exchanges = self._layout, self._layout.exchanges
        for v in dict.fromkeys(e.ins):
            if v is not None and (e.index, v) in exchanges.reads:
                wanted = layout.at(e, v)
                if (v, partition_spec(wanted)) not in self._moved:
                    self._moved.add((v, partition_spec(wanted)))
                    yield from self._change(v, layout.active(v), wanted, e.trips)
        for v in e.outs:
            if v in exchanges.makes:
                yield from self._change(v, [*exchanges.makes[v]], layout.active(v), e.trips)

    def _change(self, v: Value, lies: Spec, wanted: Spec, trips: int) -> Iterator[Sent]:
        """What brings an activation from one division to another: what divides another dimension then is dealt out
        anew, what divides none gathered."""
        has = {a for axes in wanted for a in axes}
        moved = _unique(
            a for was, is_now in zip(lies, wanted, strict=True) for a in was if a in has and a not in is_now
        )
        gone = _unique(a for axes in lies for a in axes if a not in has)
        narrowed = 2 if self._multiplied(v) else 1
        if moved:
            yield self._sent("all-to-all", moved, self._layout.bytes_of(v, lies) // narrowed, trips)
        if gone:
            size = self._layout.bytes_of(v, without(lies, gone)) // narrowed
            yield self._sent("all-gather", gone, size, trips)

    def _linked(self) -> dict[int, dict[int, set[str]]]:
        """By equation and by dimension of what it touches: the axes of the dimensions that are the same there."""
        program, axes_of = self._program, defaultdict[int, dict[int, set[str]]](dict)
        value_of = [v for v in range(len(program.avals)) for _ in program.nodes(v)]
        for link in self._layout.dims.links.links:
            if link.equation is None:
                continue
            for a, b in ((link.a, link.b), (link.b, link.a)):
                v = value_of[b]
                spec = self._layout.at(program.equations[link.equation], v)
                axes_of[link.equation].setdefault(a, set()).update(spec[b - program.first[v]])
        return axes_of

    def _sent(self, kind: str, axes: Axes, size: int, count: int) -> Sent:
        return Sent(kind, axes, self._layout.count(axes), size, count)


def _at_default(e: Equation) -> bool:
    """Whether a product leaves it to the hardware in which precision it multiplies."""
    precision = e.params.get("precision")
    given = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, lax.Precision.DEFAULT) for p in given)


def _unique(axes: Iterable[str]) -> Axes:
    return tuple(dict.fromkeys(axes))
