"""The constraints that hold a layout inside the step, so that it moves what theory says and nothing else.

With only in and out shardings set, the compiler moves activations under fsdp and its sums. Here the traced step is
re-emitted, after its gradients were taken, with weights gathered where activations meet them, activations pinned where
they are made, and gradients pinned to where their parameters lie; loop bodies and remat likewise.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax
from jax._src.source_info_util import current_name_stack  # jax has no public form

from ..program.emit import Emitter, caller
from ..program.ir import Equation, Scope, Value
from ..program.labels import COMBINE, DISPATCH, PIN, weight_label
from ..program.lines import user_context
from ..program.primitives import bind
from ..program.primitives.table import primitive_of
from ..program.sizes import nbytes
from ..program.xla_faults import bind_mended
from .changes import changes
from .layout import Axes, Layout, Spec, without
from .regions import KINDS, Context, Region
from .sp import made_as, read_whole
from .stepwise import gathered
from .undivided import chosen_wrongly, summed_before

_KEPT_SHARE = 64  # of all state: gathered weights that straight-line code may keep without gathering again
Kind = TypeVar("Kind", bound=Region)


class Hold(Emitter):
    """Re-emits a program under a `Layout`, but for what its `regions` emit; `labels` as `Emitter` takes them.

    `reduce`: when devices reduce the gradients that a loop adds up (over microbatches, over time): at each trip
    ("each"), once after the loop ("once"), or so and with the weights that the loop reads gathered once before it
    ("once-gathered"). `sum_dtype`: the type in which they do, None for that in which each is computed. `handed_on`:
    values that another program reads, beside the outputs. `waiting`: gradients among the outputs that somebody else
    sums, so that they may come in parts (see `regions.unreduced`): those that every device stores whole.
    """

    def __init__(
        self,
        layout: Layout,
        labels: Mapping[int, str] | None = None,
        reduce: str = "each",
        sum_dtype: Any = None,
        handed_on: Collection[Value] = (),
        waiting: Collection[Value] = (),
    ):
        super().__init__(layout.program, labels)
        self.layout = layout
        context = Context(layout, labels or {}, reduce, sum_dtype, handed_on, waiting)
        self.regions = tuple(find(context) for find in KINDS)
        self._regions_of: dict[int, tuple[Region, ...]] = {}
        for region in self.regions:
            for i in region.members:
                self._regions_of[i] = (*self._regions_of.get(i, ()), region)
        self._gathered = frozenset[Value]().union(*(region.gathered for region in self.regions))
        self._readers = context.readers
        self.cap = self._bytes_kept()  # bytes of gathered weights that straight-line code keeps
        self._weights: dict[Value, str | None] = {}
        self.relaid = _relaid(layout)
        self._moved = _moved(layout)

    def __call__(self, *args: Any) -> list:
        self.begin()
        return super().__call__(*args)

    def run(self, scope: Scope, args: Any) -> list:
        outs = super().run(scope, args)
        if scope is self.program.top:
            for region in self.regions:
                outs = region.leave(outs)
        return outs

    def begin(self) -> None:
        """Forget what was gathered in a run before."""
        self._bodies = [_Body(is_loop=False)]
        self._unpinned: set[Value] = set()  # gradients that are pinned after the layout change that follows
        self._laid: dict[int, _Laid] = {}

    def region(self, kind: type[Kind]) -> Kind:
        """The one of `regions` that is of a kind."""
        return next(region for region in self.regions if isinstance(region, kind))

    def regions_of(self, e: Equation) -> tuple[Region, ...]:
        """Those that `e` is a member of, the one that is asked first before the others."""
        return self._regions_of.get(e.index, ())

    def gathers(self, weight: Value) -> Axes:
        """The mesh axes over which a weight is gathered where an activation meets it."""
        return () if weight in self._gathered else self.layout.gathered_over(weight)

    def _bytes_kept(self) -> int:
        stored = [self.program.inputs[i] for i in self.layout.roles.stored]
        size = {v: nbytes(self.program.avals[v]) for v in stored}
        gathered = [size[v] for v in stored if self.layout.gathered_over(v)]
        return max([*gathered, sum(size.values()) // _KEPT_SHARE])

    def equation(self, e: Equation, values: list) -> list:
        if e.doors:
            values = [self._read_otherwise(e, v, x) for v, x in zip(e.ins, values, strict=True)]
        outs = self._emit(e, values, self.regions_of(e))
        if e.doors and not self._moved.isdisjoint(e.outs):
            outs = [self._pin_end(v, x) if v in self._moved else x for v, x in zip(e.outs, outs, strict=True)]
        if e.outs and e.outs[0] in self.relaid:
            self._laid[id(outs[0])] = _Laid(e, values[0], outs[0])
        return outs

    def _emit(self, e: Equation, values: list, regions: tuple[Region, ...]) -> list:
        if not regions:
            return super().equation(e, values)
        return regions[0].emit(e, values, lambda xs: self._emit(e, xs, regions[1:]), self)

    @contextmanager
    def at(self, path: Iterable[Equation]) -> Iterator[None]:
        """Under the name and the line of the last equation of `path`, inside the loop that is being emitted."""
        names, lines, label = current_name_stack(), caller(), None
        for e in path:
            names = names + e.eqn.source_info.name_stack
            lines = self._calls.join(lines, e.eqn.source_info.traceback)
            label = self._scopes.get(e.index)
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
        for region in self.regions:
            if (spec := region.lies(v)) is not None:
                return self.layout.pin(x, spec)
        if self.layout.batchy(v):
            return self.layout.pin(x, self.layout.active(v))
        spec = self.layout.at_rest(v)
        if not any(spec):
            return x
        with self._of_weight(
            v
        ):  # jax 0.12 keeps what a loop takes out of a stack of weights for its backward pass
            return self.layout.pin(x, spec)

    def result(self, e: Equation, values: list) -> list:
        """What `e` makes of its operands, in a form that XLA gets right where they are divided."""
        divided = self.layout.divided_in(e)
        if not chosen_wrongly(self.layout, e):
            return bind_mended(e, values, divided, cpu=self.layout.simulated)
        # Where the plan divides nothing it pins nothing, and XLA may still choose to divide what it gets wrong.
        values = [self._as_planned(e, v, x) for v, x in zip(e.ins, values, strict=True)]
        outs = bind_mended(e, values, divided, cpu=self.layout.simulated)
        return [self._as_planned(e, v, x) for v, x in zip(e.outs, outs, strict=True)]

    def _as_planned(self, e: Equation, v: Value | None, x: Any) -> Any:
        """An activation held as the plan has `e` read or make it, and whole what is made of no example; weights that
        activations meet as they are."""
        if v is None or not self.program.shapes[v]:
            return x
        if self.layout.batchy(v):
            return self.layout.pin(x, self.layout.within(e, v))
        if self.layout.storage.batchy_equation(e):
            return x
        return self.layout.pin(x, [()] * len(self.program.shapes[v]))

    def _rest(self, v: Value) -> Spec:
        """Where a weight or a gradient lies between uses."""
        return self.layout.in_use(v) if v in self._gathered else self.layout.at_rest(v)

    def before(self, e: Equation, values: list) -> list:
        """Weights go from where they rest to where they are used, right at the equation that uses them."""
        layout = self.layout
        for k, spec in read_whole(layout, e).items():
            values[k] = self.layout.pin(values[k], spec)
        for k, v in enumerate(e.ins):
            relaid = layout.experts is not None and layout.batchy(v)
            if v is not None and relaid:
                with self._on_its_way(v):
                    values[k] = self._brought(values[k], layout.between(v), layout.at(e, v))
            else:
                values[k] = self._read_otherwise(e, v, values[k])
        if not layout.storage.batchy_equation(e) or e.primitive.scatters:
            return values
        reads = ((k, v) for k, v in enumerate(e.ins) if v is not None and self.program.shapes[v])
        for k, v in list(reads):
            if not layout.batchy(v) and any(self._rest(v)):
                with self._of_weight(v):
                    values[k] = self._fetch(e, values, k, v)
        return values

    def _read_otherwise(self, e: Equation, v: Value | None, x: Any) -> Any:
        """An operand where `exchanges` have `e` read it; anything else as it is."""
        if v is None or (e.index, v) not in self.layout.exchanges.reads:
            return x
        with self._on_its_way(v):
            return self._brought(x, self.layout.between(v), self.layout.at(e, v))

    def _on_its_way(self, v: Value) -> AbstractContextManager[Any]:
        """The scope of what goes to experts, or comes back from them."""
        experts = self.layout.experts
        if experts is None or v in self.layout.exchanges.lies:
            return nullcontext()
        return jax.named_scope(COMBINE if v in experts.made else DISPATCH)

    def _brought(self, x: Any, lies: Spec, wanted: Spec) -> Any:
        """An activation from where it lies to where it is wanted: pinned at both, and in between, else the compiler may
        gather it; once in a body, however many read it there."""
        if lies == wanted:
            return x
        brought, at = self._bodies[-1].brought, (id(x), tuple(wanted))
        if at not in brought:
            there = x
            for spec in changes(lies, wanted):
                there = self.layout.pin(there, spec)
            brought[at] = x, there
        return brought[at][1]

    def after(self, e: Equation, outs: list) -> list:
        layout = self.layout
        touches = layout.storage.batchy_equation(e)
        follows = e.primitive.relaid and any(v in self._unpinned for v in e.ins if v is not None)
        if not touches:
            outs = [self._brought_back(e, v, x) for v, x in zip(e.outs, outs, strict=True)]
        if not touches and not follows:
            return outs
        for k, v in enumerate(e.outs):
            if not self.program.shapes[v]:
                continue
            if layout.batchy(v):
                moved = v in layout.exchanges.makes or v in self._moved
                if e.primitive.pinned or moved or self._undivided(v):
                    for spec in made_as(layout, e, v):
                        outs[k] = self.layout.pin(outs[k], spec)
            elif any(layout.at_rest(v)) or outs[k].dtype != self.program.avals[v].dtype:
                outs[k] = self._pin_gradient(e, v, outs[k])
        return outs

    def _brought_back(self, e: Equation, v: Value, x: Any) -> Any:
        """What `e` makes whole beside the examples, where it lies between uses."""
        if v in self.layout.exchanges.makes:
            for spec in self.layout.made_by(e, v):
                x = self.layout.pin(x, spec)
        return x

    def _undivided(self, v: Value) -> bool:
        """Does an activation lie on several devices alike, for all places that experts have? The compiler would divide
        its tokens, and gather them again."""
        experts = self.layout.experts
        return experts is not None and bool(experts.shared) and v in experts.made

    def _pin_gradient(self, e: Equation, v: Value, x: Any) -> Any:
        """A sum over examples: partial sums go straight to where the parameter rests, but for what XLA gets wrong so,
        and scatters, whose updates, activations, would be gathered."""
        if e.primitive.scatters or summed_before(self.layout, e):
            x = self.layout.pin(x, self.layout.in_use(v))
        readers = self._readers.get(v, [])
        if len(readers) == 1 and primitive_of(readers[0]).relaid:  # XLA folds the two: pin after the second
            self._unpinned.add(v)
            return x
        x = self.layout.pin(x, self.layout.at_rest(v))
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
        if not self.gathers(v):
            return self.layout.pin(x, use)
        activation = next((values[q] for q, w in enumerate(e.ins) if layout.batchy(w)), None)
        tie = body.last_activation if body.last_activation is not None else activation
        if activation is not None:
            body.last_activation = activation
        if id(x) in body.kept:
            body.kept[id(x)] = body.kept.pop(id(x))  # now the most recent
            return body.kept[id(x)].gathered
        if (laid := self._laid.get(id(x))) is not None and id(laid.source) in body.kept:
            return self.layout.pin(bind(laid.equation.eqn, [body.kept[id(laid.source)].gathered])[0], use)
        source, kind = x, frozenset(c for c, axes in zip(layout.storage.of(v), rest, strict=True) if axes)
        if not body.is_loop and kind in body.fetched and tie is not None:
            x, _ = lax.optimization_barrier((self.layout.pin(x, rest), tie))
        body.fetched.add(kind)
        body.keep(source, self._to_use(x, v), nbytes(self.program.avals[v]), self.cap)
        return body.kept[id(source)].gathered

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once in a body for a key."""
        made = self._bodies[-1].made
        if key not in made:
            made[key] = make()
        return made[key]

    def gather(self, x: Any, weight: Value) -> Any:
        """A weight at rest, brought to where it is used, under its own name."""
        with self._of_weight(weight):
            return self._to_use(x, weight)

    def _to_use(self, x: Any, v: Value) -> Any:
        """A weight at rest, brought to where it is used."""
        rest, use = self.layout.at_rest(v), self.layout.in_use(v)
        between = without(rest, self.layout.gathered_over(v))
        if (in_steps := gathered(self.layout, x, v)) is not None:
            x = in_steps
        if between != use:  # gather over data first, then move the tensor shard
            x = self.layout.pin(x, between)
        return self.layout.pin(x, use)


def _moved(layout: Layout) -> frozenset[Value]:
    """Activations, where they are made, that some equation reads as they do not lie: held as they lie where they are
    made, as else the compiler (Shardy, where it applies constraints) has all later readers read what that one does."""
    program, counts = layout.program, layout.flow.orders.counts
    loops = {} if layout.experts is None else layout.experts.loops
    found = set[Value | None]()
    for e in program.equations if layout.experts is not None or layout.exchanges.reads else ():
        for v in e.ins if not e.doors or e.index in loops else ():
            if v is not None and layout.batchy(v):
                read = layout.lying(v, True) if e.doors else layout.at(e, v)
                found |= {counts.inner(v)} if read != layout.active(v) else set()
    return frozenset(v for v in found if v is not None)


def _relaid(layout: Layout) -> dict[Value, Value]:
    """Weights that are others in another layout, such as the transposed table of an embedding, and which these are."""
    found: dict[Value, Value] = {}
    for e in layout.program.equations:
        if e.primitive.relaid and len(e.ins) == 1 and (v := e.ins[0]) is not None and not layout.batchy(v):
            found[e.outs[0]] = v
    return found


class _Laid(NamedTuple):
    equation: Equation
    source: Any
    made: Any  # kept so that its id stays taken


class _Kept(NamedTuple):
    source: Any  # kept so that its id stays taken
    gathered: Any
    bytes: int


class _Body:
    """What is gathered, or brought to experts and back, in one body while it is re-emitted."""

    def __init__(self, *, is_loop: bool):
        self.is_loop = is_loop
        self.kept: dict[int, _Kept] = {}
        self.fetched: set[frozenset[int]] = set()
        self.last_activation: Any = None
        self.made: dict[Hashable, Any] = {}
        self.brought: dict[tuple[int, tuple[Axes, ...]], tuple[Any, Any]] = {}  # with what the id is of

    def keep(self, source: Any, gathered: Any, size: int, cap: int) -> None:
        self.kept[id(source)] = _Kept(source, gathered, size)
        while not self.is_loop and len(self.kept) > 1 and sum(x.bytes for x in self.kept.values()) > cap:
            self.kept.pop(next(iter(self.kept)))
