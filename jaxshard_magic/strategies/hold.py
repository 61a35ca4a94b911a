"""The constraints that hold a layout inside the step, so that it moves what theory says and nothing else.

With only in and out shardings set, the compiler moves activations under fsdp and its sums. Here the traced step is
re-emitted, after its gradients were taken, with weights gathered where activations meet them, activations pinned where
they are made, and gradients pinned to where their parameters lie; loop bodies and remat likewise.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
from jax import lax
from jax._src.source_info_util import current_name_stack  # jax has no public form
from jax.sharding import NamedSharding

from ..program.emit import Emitter
from ..program.ir import Door, Equation, Scope, Value
from ..program.labels import PIN, weight_label
from ..program.lines import user_context
from ..program.primitives import LAYOUT, scan_counts
from ..program.sizes import nbytes
from .ahead import Ahead, find_ahead
from .deferred import Deferred, find_deferred
from .layout import Axes, Layout, Spec, partition_spec
from .loop_sums import loop_sums
from .partials import PartialSums
from .sp import made_as, read_whole
from .sum_types import OWN_TYPES, SumTypes, summed_as
from .unreduced import Unreduced

MAKES_ACTIVATIONS = frozenset({"dot_general", "conv_general_dilated", "gather", "concatenate", "pad"})
_KEPT_SHARE = 64  # of all state: gathered weights that straight-line code may keep without gathering again


class Hold(Emitter):
    """Re-emits a program under a `Layout`; `labels` as `Emitter` takes them.

    `reduce`: when devices reduce the gradients that a loop adds up (over microbatches, over time): at each trip
    ("each"), once after the loop ("once"), or so and with the weights that the loop reads gathered once before it
    ("once-gathered"). `sums`: the type in which they do. `handed_on`: values that another program reads, beside the
    outputs. `waiting`: gradients among the outputs that somebody else sums, so that they may come in parts, as
    `parts_spec` says: those that every device stores whole. `deferred`: how many gradients wait for the end of a loop.
    """

    def __init__(
        self,
        layout: Layout,
        labels: Mapping[int, str] | None = None,
        reduce: str = "each",
        sums: SumTypes = OWN_TYPES,
        handed_on: Collection[Value] = (),
        waiting: Collection[Value] = (),
    ):
        super().__init__(layout.program, labels)
        self.layout, self._sum_types = layout, sums
        parts = self._in_parts(reduce, handed_on, waiting)
        self._parts, self._makers = parts.values, parts.makers
        self._unreduced = Unreduced(layout, parts)
        self._loop_sums = loop_sums(layout, parts, labels or {})
        self._ahead = find_ahead(layout, parts.values) if reduce == "once-gathered" else Ahead()
        self.deferred = sum(s.gradient for s in self._loop_sums.values())
        self._readers = _readers(self.program.scopes(), handed_on)
        self.partial_sums = PartialSums(layout, self._readers)
        self.cap = self._bytes_kept()  # bytes of gathered weights that straight-line code keeps
        self._weights: dict[Value, str | None] = {}

    def __call__(self, *args: Any) -> list:
        self._bodies = [_Body(is_loop=False)]
        self._unpinned: set[Value] = set()  # gradients that are pinned after the layout change that follows
        return super().__call__(*args)

    def _in_parts(self, reduce: str, handed_on: Collection[Value], waiting: Collection[Value]) -> Deferred:
        layout = self.layout
        if reduce != "each":
            return find_deferred(layout, waiting, handed_on)
        if not waiting:
            return Deferred()
        batch = {*layout.batch_axes}
        values = (v for v in range(len(self.program.avals)) if not layout.batchy(v))
        shared = [v for v in values if any(batch.intersection(axes) for axes in layout.at_rest(v))]
        return find_deferred(layout, waiting, {*handed_on, *shared})

    def gathers(self, weight: Value) -> Axes:
        """The mesh axes over which a weight is gathered where an activation meets it."""
        return self._gathered_axes(self._rest(weight))

    def waits(self, e: Equation) -> bool:
        """Whether the sum over the examples that `e` makes stays in parts until a loop ends."""
        return e.index in self._makers

    def summed_after(self, e: Equation, result: int) -> bool:
        """Whether devices add up this result of the loop `e`, where it ends."""
        return (e.index, result) in self._loop_sums

    def parts_spec(self, value: Value) -> Spec | None:
        """Where the parts of an output lie, along a dimension before its own; None where it comes summed."""
        return self._unreduced.spec(value) if value in self._parts else None

    def summed(self, x: Any, value: Value) -> Any:
        """The parts of an output summed, where it lies at rest."""
        return self._unreduced.reduced(x, value, x.dtype)

    def _bytes_kept(self) -> int:
        stored = [self.program.inputs[i] for i in self.layout.roles.stored]
        size = {v: nbytes(self.program.avals[v]) for v in stored}
        gathered = [size[v] for v in stored if self._gathered_axes(self.layout.at_rest(v))]
        return max([*gathered, sum(size.values()) // _KEPT_SHARE])

    def _gathered_axes(self, spec: Spec) -> Axes:
        tensor = {a for axes in self.layout.tensor.values() for a in axes}
        return tuple(a for axes in spec for a in axes if a not in tensor)

    def _pin(self, x: Any, spec: Spec) -> Any:
        return lax.with_sharding_constraint(x, NamedSharding(self.layout.mesh, partition_spec(spec)))

    def equation(self, e: Equation, values: list) -> list:
        if e.index in self._makers:
            return [self._unreduced.made(e, values)]
        if not e.doors and any(v in self._parts for v in e.outs):
            return self._unreduced.passed_on(e, values)
        if e.index not in self.partial_sums.members:
            return super().equation(e, values)
        partial = self.partial_sums.join(e, self.before(e, values))
        if e.index not in self.partial_sums.roots:
            return [partial]
        return [self._pin(self.partial_sums.reduce(e, partial), self.layout.active(e.outs[0]))]

    def _scan(self, e: Equation, values: list, door: Door) -> list:
        """A carry in parts starts so, and is summed after the last trip unless the rest of the step waits as well."""
        n, k = scan_counts(e.params)
        for i in self._ahead.operands.get(e.index, ()):
            if (v := e.ins[i]) is not None:
                with self._of_weight(v):
                    values[i] = self._gathered(values[i], v)
        for i, v in enumerate(door.scope.ins[n : n + k], n):
            if v in self._parts and e.ins[i] not in self._parts:
                values[i] = self._unreduced.spread(values[i], v)
        outs = super()._scan(e, values, door)
        for i, v in enumerate(e.outs):
            if i >= k and v in self._parts:
                outs[i] = self._unreduced.stacked(outs[i], v)
            elif (e.index, i) in self._loop_sums:
                found = self._loop_sums[e.index, i]
                with self._made_at(found.path):
                    dtype = self._sum_types.of(outs[i].dtype, gradient=found.gradient)
                    outs[i] = self._unreduced.reduced(outs[i], v, dtype)
        return outs

    @contextmanager
    def _made_at(self, path: tuple[Equation, ...]) -> Iterator[None]:
        """The name and the line of the last equation of `path`, inside the loop that is being emitted."""
        names, lines = current_name_stack(), self._caller
        for e in path:
            names = names + e.eqn.source_info.name_stack
            lines = self._calls.join(lines, e.eqn.source_info.traceback)
        label = self._scopes.get(path[-1].index)
        with user_context(lines, name_stack=names if label is None else names + label):
            yield

    def body(self, scope: Scope, args: Any) -> list:
        """Carries, slices and results are pinned at both ends: the compiler chooses a loop's layouts as a whole."""
        self._bodies.append(_Body(is_loop=True))
        try:
            outs = self.run(scope, self._pin_ends(scope.ins, args))
        finally:
            self._bodies.pop()
        return self._pin_ends(scope.outs, outs)

    def _pin_ends(self, values: list, arrays: Any) -> list:
        with jax.named_scope(PIN):
            return [x if v is None else self._pin_end(v, x) for v, x in zip(values, arrays, strict=True)]

    def _pin_end(self, v: Value, x: Any) -> Any:
        if v in self._parts:
            return self._unreduced.pin(x, v)
        if self.layout.batchy(v):
            return self._pin(x, self.layout.active(v))
        spec = self._rest(v)
        return self._pin(x, spec) if any(spec) or v in self._ahead.values else x

    def _rest(self, v: Value) -> Spec:
        """Where a weight or a gradient lies between uses."""
        return self.layout.in_use(v) if v in self._ahead.values else self.layout.at_rest(v)

    def result(self, e: Equation, values: list) -> list:
        changed = e.index in self._sum_types.made
        return summed_as(e, values, self._sum_types.dtype) if changed else super().result(e, values)

    def before(self, e: Equation, values: list) -> list:
        """Weights go from where they rest to where they are used, right at the equation that uses them."""
        layout = self.layout
        for k, spec in read_whole(layout, e).items():
            values[k] = self._pin(values[k], spec)
        if not layout.storage.batchy_equation(e) or e.name.startswith("scatter"):
            return values
        reads = ((k, v) for k, v in enumerate(e.ins) if v is not None and self.program.shapes[v])
        for k, v in list(reads):
            if not layout.batchy(v) and any(self._rest(v)):
                with self._of_weight(v):
                    values[k] = self._fetch(e, values, k, v)
        return values

    def after(self, e: Equation, outs: list) -> list:
        layout = self.layout
        touches = layout.storage.batchy_equation(e)
        follows = e.name in LAYOUT and any(v in self._unpinned for v in e.ins if v is not None)
        if not touches and not follows:
            return outs
        for k, v in enumerate(e.outs):
            if not self.program.shapes[v]:
                continue
            if layout.batchy(v):
                if e.name in MAKES_ACTIVATIONS:
                    for spec in made_as(layout, e, v):
                        outs[k] = self._pin(outs[k], spec)
            elif any(layout.at_rest(v)) or outs[k].dtype != self.program.avals[v].dtype:
                outs[k] = self._pin_gradient(e, v, outs[k])
        return outs

    def _pin_gradient(self, e: Equation, v: Value, x: Any) -> Any:
        """A sum over examples: partial sums go straight to where the parameter rests."""
        if e.name.startswith("scatter"):  # else the updates, activations, would be gathered
            x = self._pin(x, self.layout.in_use(v))
        readers = self._readers.get(v, [])
        if len(readers) == 1 and readers[0] in LAYOUT:  # XLA folds the two: pin after the second
            self._unpinned.add(v)
            return x
        x = self._pin(x, self.layout.at_rest(v))
        return x if x.dtype == (dtype := self.program.avals[v].dtype) else x.astype(dtype)

    def _of_weight(self, v: Value) -> AbstractContextManager[Any]:
        """The scope of a weight on its way to where it is used."""
        if v not in self._weights:
            self._weights[v] = weight_label(self.program, self.layout.flow, v)
        label = self._weights[v]
        return jax.named_scope(label) if label else nullcontext()

    def _fetch(self, e: Equation, values: list, k: int, v: Value) -> Any:
        """One weight, gathered for use.

        In a body one layer lives at a time. In straight-line code a later use gathers again, behind a barrier
        tied to an earlier activation, once more than `cap` bytes are kept: else XLA merges it with the first gather
        and every full weight stays alive from forward to backward.
        """
        layout, body, x = self.layout, self._bodies[-1], values[k]
        rest, use = self._rest(v), layout.in_use(v)
        if not self._gathered_axes(rest):
            return self._pin(x, use)
        activation = next((values[q] for q, w in enumerate(e.ins) if layout.batchy(w)), None)
        tie = body.last_activation if body.last_activation is not None else activation
        if activation is not None:
            body.last_activation = activation
        if id(x) in body.kept:
            body.kept[id(x)] = body.kept.pop(id(x))  # now the most recent
            return body.kept[id(x)].gathered
        source, kind = x, frozenset(c for c, axes in zip(layout.storage.of(v), rest, strict=True) if axes)
        if not body.is_loop and kind in body.fetched and tie is not None:
            x, _ = lax.optimization_barrier((self._pin(x, rest), tie))
        body.fetched.add(kind)
        body.keep(source, self._gathered(x, v), nbytes(self.program.avals[v]), self.cap)
        return body.kept[id(source)].gathered

    def _gathered(self, x: Any, v: Value) -> Any:
        """A weight at rest, brought to where it is used."""
        rest, use = self.layout.at_rest(v), self.layout.in_use(v)
        gathered_axes = self._gathered_axes(rest)
        between = [tuple(a for a in axes if a not in gathered_axes) for axes in rest]
        if between != use:  # gather over data first, then move the tensor shard
            x = self._pin(x, between)
        return self._pin(x, use)


class _Kept:
    __slots__ = ("bytes", "gathered", "source")

    def __init__(self, source: Any, gathered: Any, size: int):
        self.source, self.gathered, self.bytes = (
            source,
            gathered,
            size,
        )  # the source is held so that its id stays taken


class _Body:
    """What is gathered in one body while it is re-emitted."""

    def __init__(self, *, is_loop: bool):
        self.is_loop = is_loop
        self.kept: dict[int, _Kept] = {}
        self.fetched: set[frozenset[int]] = set()
        self.last_activation: Any = None

    def keep(self, source: Any, gathered: Any, size: int, cap: int) -> None:
        self.kept[id(source)] = _Kept(source, gathered, size)
        while not self.is_loop and len(self.kept) > 1 and sum(x.bytes for x in self.kept.values()) > cap:
            self.kept.pop(next(iter(self.kept)))


def _readers(scopes: Any, handed_on: Collection[Value]) -> dict[Value, list[str]]:
    readers: dict[Value, list[str]] = {v: ["out"] for v in handed_on}
    for scope in scopes:
        for e in scope.equations:
            for v in e.ins:
                if v is not None:
                    readers.setdefault(v, []).append(e.name)
        for v in scope.outs:
            if v is not None:
                readers.setdefault(v, []).append("out")
    return readers
