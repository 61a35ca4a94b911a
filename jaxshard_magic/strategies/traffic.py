"""The collectives that a layout takes, read off the traced step before anything is compiled.

Weights that rest divided are gathered where activations meet them (`Hold`), and what contracts a divided dimension is a
sum that devices add up: activations under tensor parallelism, gradients over the examples. Compiled steps send this,
and now and then a little more: scalars, what the compiler lays out anew.
"""

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from jax.version import __version_info__ as jax_version

from ..plan import Sent
from ..program.ir import Door, Equation, Scope, Value
from ..program.phases import phases
from ..program.primitives.primitive import Kind
from ..program.sizes import nbytes
from .changes import changes_sent, multiplied_narrow
from .hold import Hold
from .layout import Axes, Spec, without
from .reductions import activation_sum, gradient_sum, summed_over
from .regions import Region
from .regions.deferred import find_deferred
from .stepwise import gathers_sent
from .undivided import summed_before


def traffic(hold: Hold, equations: Container[int] | None = None) -> tuple[Sent, ...]:
    """The collectives of one step, in the order of the program; those of loops with all their trips. Along axes of one
    device nothing is sent. `equations`: those of the top level, by index, that are a program of their own, whose
    collectives are wanted; None for all of the step."""
    found = _Traffic(hold)
    sent = tuple(found.all() if equations is None else found.part(equations))
    alone = {axis for axis, n in hold.layout.mesh.shape.items() if n == 1}
    if not alone:
        return sent
    return tuple(
        replace(each, axes=tuple(axis for axis in each.axes if axis not in alone))
        for each in sent
        if each.group_size > 1
    )


@dataclass
class _Body:
    """Weights that are whole in one body, by the value that they were gathered from, with their bytes; and activations
    that were `brought` where they are wanted, with how they lie there."""

    is_loop: bool
    kept: dict[Value, int] = field(default_factory=dict)
    brought: set[tuple[Value, tuple[Axes, ...]]] = field(default_factory=set)


class _Traffic:
    def __init__(self, hold: Hold):
        self._hold, self._layout = hold, hold.layout
        self._program = hold.program
        self._used = self._layout.flow.used
        self._gathered: set[tuple[Value, Axes, str | None]] = set()
        self._partners = self._linked() if self._layout.sequence else {}

    @cached_property
    def _phases(self) -> dict[int, str]:
        return phases(self._program, self._layout.flow)

    def all(self) -> Iterator[Sent]:
        yield from self._inside(self._program.top, _Body(False), {})
        for region in self._hold.regions:
            yield from region.sent_leaving()

    def part(self, equations: Container[int]) -> Iterator[Sent]:
        """The collectives of some equations of the top level, which gather their own weights."""
        top = self._program.top
        chosen = [e for e in top.equations if e.index in equations]
        yield from self._inside(replace(top, equations=chosen), _Body(False), {})

    def _inside(self, scope: Scope, body: _Body, same: dict[Value, Value]) -> Iterator[Sent]:
        """`same`: what a value inside is outside of the bodies that are run in place."""
        for e in scope.equations:
            if e.doors or not self._used.isdisjoint(e.outs):
                for sent in self._of(e, self._hold.regions_of(e), body, same):
                    yield sent if sent.equation is not None else replace(sent, equation=e.index)

    def _of(
        self, e: Equation, regions: tuple[Region, ...], body: _Body, same: dict[Value, Value]
    ) -> Iterator[Sent]:
        if regions:
            rest = self._of(e, regions[1:], body, same)
            yield from regions[0].sent(e, self._operands(e, body, same), rest)
            return
        if e.doors:
            yield from self._brought(e, body, same)
        for door in e.doors:
            yield from self._inside(door.scope, *self._entered(e, door, body, same))
        if not e.doors:
            yield from self._operands(e, body, same)
            yield from self._summed(e)

    def _operands(self, e: Equation, body: _Body, same: dict[Value, Value]) -> Iterator[Sent]:
        """What brings the operands of an equation without bodies to where it uses them."""
        yield from self._weights(e, body, same)
        yield from self._resharded(e)
        yield from self._brought(e, body, same)

    def _entered(
        self, e: Equation, door: Door, body: _Body, same: dict[Value, Value]
    ) -> tuple[_Body, dict[Value, Value]]:
        again = e.primitive.remat and e.params.get("differentiated") and e.params.get("prevent_cse")
        if again or e.is_control_flow:
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
            for sent in gathers_sent(layout, v, e.trips, narrowed=multiplied_narrow(layout, e, v)):
                yield replace(sent, value=v)
            body.kept[source] = nbytes(self._program.avals[v])
            while not body.is_loop and len(body.kept) > 1 and sum(body.kept.values()) > self._hold.cap:
                body.kept.pop(next(iter(body.kept)))

    def _summed(self, e: Equation) -> Iterator[Sent]:
        by_dim, out = summed_over(self._layout, e), e.outs[0]
        over = _unique(a for axes in by_dim for a in axes)
        if over and self._layout.batchy(out):
            made = self._layout.at(e, out)
            yield from activation_sum(self._layout, out, over, e.trips, by_dim=by_dim, made=made)
        elif over:  # a lookup's gradient is added up whole; of a TPU's it is not certain
            added = e.primitive.scatters and self._layout.platform != "tpu"
            whole = added or summed_before(self._layout, e)
            rows = self._rows(e, over)
            sums = gradient_sum(self._layout, out, over, e.trips, whole=whole, rows=rows, by_dim=by_dim)
            yield from (self._behind_loops(e, sent) for sent in sums)

    def _behind_loops(self, e: Equation, sent: Sent) -> Sent:
        """Return the gradient sum of `e` as often as it is made.

        XLA for TPUs moves an all-reduce of what a loop does nothing to but add it up behind that loop, and since libtpu
        0.0.50, which goes with jax 0.12, behind loops around it; 0.0.42 left it there. Reduce-scatters stay where they
        are; XLA for CPUs and GPUs moves neither.
        """
        if self._layout.platform != "tpu" or sent.kind != "all-reduce" or e.trips < 2:
            return sent
        flow, count, outer = self._layout.flow, sent.count, e.outer
        added_up = flow.forward((v for v in e.outs if v in self._deferrable), self._only_adds)
        while outer is not None:
            if outer.is_scan:
                carries = outer.doors[0].loop
                if not any(b in added_up and b in flow.forward([a], self._only_adds) for b, a in carries):
                    break
                count //= outer.params["length"]
                if jax_version < (0, 12):
                    break
            outer = outer.outer
        return replace(sent, count=count)

    def _only_adds(self, made: Value, _of: Value, e: Equation | None) -> bool:
        """Return whether a value is made of another by sums, casts, and parts that are taken or put together."""
        if e is not None and not (e.primitive.alias or e.primitive.kind is Kind.CUT):
            return e.primitive.adds and e.primitive.elementwise and made in self._deferrable
        return made in self._deferrable

    @cached_property
    def _deferrable(self) -> Set[Value]:
        """The values of which devices may keep parts until a loop has added them up."""
        return find_deferred(self._layout).values

    def _rows(self, e: Equation, over: Axes) -> int:
        """How many products each device adds up for an element of what `e` makes; 0 where it is no product."""
        if (c := e.contraction) is None or e.ins[0] is None:
            return 0
        shape = self._program.shapes[e.ins[0]]
        return math.prod(shape[i] for i, _ in c.contracted) // self._layout.count(over)

    def _brought(self, e: Equation, body: _Body, same: dict[Value, Value]) -> Iterator[Sent]:
        """Values that change their division where experts, or attention by heads, begin or end, or where all of a
        dimension is needed: each once in a body, as `Hold` brings them."""
        layout = self._layout
        for v in dict.fromkeys(e.ins):
            if v is None:
                continue
            moves = layout.experts is not None and layout.batchy(v) and not e.doors
            if not moves and (e.index, v) not in layout.exchanges.reads:
                continue
            lies, wanted = layout.between(v), layout.at(e, v)
            if lies != wanted and (at := (same.get(v, v), tuple(wanted))) not in body.brought:
                body.brought.add(at)
                for sent in changes_sent(layout, v, lies, wanted, e.trips):
                    yield replace(sent, value=v)
        for v in e.outs:
            if v in layout.exchanges.makes:
                made = [*layout.exchanges.makes[v]]
                yield from changes_sent(layout, v, made, layout.between(v), e.trips)

    def _resharded(self, e: Equation) -> Iterator[Sent]:
        """Activations whose positions `e` needs whole."""
        layout = self._layout
        if not layout.sequence:
            return
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
            narrow = multiplied_narrow(layout, e, v)
            # what a TPU takes in bfloat16 it gathers for the backward pass anew
            at = v, gone, self._phases.get(e.index) if narrow else None
            if gone and at not in self._gathered:
                self._gathered.add(at)
                size = layout.moving(v, without(spec, gone)) // (2 if narrow else 1)
                if e.primitive.reduces:  # what is left of it is gathered
                    size = min(size, layout.moving(e.outs[0], layout.at(e, e.outs[0])))
                yield self._sent("all-gather", gone, size, e.trips)

    def _linked(self) -> dict[int, dict[int, set[str]]]:
        """By equation and by dimension of what it touches: the axes of the dimensions that are the same there."""
        program, axes_of = self._program, defaultdict[int, dict[int, set[str]]](dict)
        lying: dict[tuple[int, Value], Spec] = {}
        value_of = [v for v in range(len(program.avals)) for _ in program.nodes(v)]
        for link in self._layout.dims.links.links:
            if link.equation is None:
                continue
            for a, b in ((link.a, link.b), (link.b, link.a)):
                at = link.equation, (v := value_of[b])
                if at not in lying:
                    lying[at] = self._layout.at(program.equations[link.equation], v)
                axes_of[link.equation].setdefault(a, set()).update(lying[at][b - program.first[v]])
        return axes_of

    def _sent(self, kind: str, axes: Axes, size: int, count: int) -> Sent:
        return Sent(kind, axes, self._layout.count(axes), size, count)


def _unique(axes: Iterable[str]) -> Axes:
    return tuple(dict.fromkeys(axes))
