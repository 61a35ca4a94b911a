"""How many rows of tokens each expert gets: where a step computes that, and how it is counted.

A layer chooses experts by a `top_k` or an `argmax` along them; several choices among the same products with the router
(the best, then the best of the rest) are one layer's. Where experts have places for what they are sent, a product with
a mask of (tokens, experts, places) brings tokens there: a row that the mask leaves out is dropped.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from math import prod
from operator import add
from typing import Any

import jax.numpy as jnp

from .dimensions import Dimensions, Storage
from .experts import stacked
from .flow import Flow, by_alias, by_no_product
from .ir import Equation, Value
from .lines import users_place
from .phases import FORWARD
from .primitives import scan_counts
from .products import Product, products
from .rankings import Ranking, rankings


@dataclass(frozen=True)
class Choice:
    """The result `out` of an equation, by index: numbers of experts. `groups`: its dimensions that count groups of
    tokens, each of which has places of its own; `rows`: those that count examples, or tokens of all of them."""

    equation: int
    out: int
    groups: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Mask:
    """The operand `operand` of a product, by index, that says which token has which place of which expert. `expert`:
    its dimension that counts experts; `places`: how many each has in a group, of which there are `groups`; `rows`: as
    of a `Choice`."""

    equation: int
    operand: int
    expert: int
    places: int
    groups: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """A layer that chooses among `number` experts, `best` of them for each token; `tokens` choose in one run of it.

    `loops`: of the scans that it is in, from outside, whether each trip is a layer of its own, and the trips. `file`
    and `line`: of the first choice, as Python knows them.
    """

    number: int
    best: int
    tokens: int
    choices: tuple[Choice, ...]
    mask: Mask | None
    loops: tuple[tuple[bool, int], ...] = ()
    file: str | None = None
    line: int | None = None

    @property
    def layers(self) -> int:
        """How many layers it is."""
        return prod(trips for each, trips in self.loops if each)

    @property
    def runs(self) -> int:
        """How often each of them runs in a step: once for every microbatch."""
        return prod(trips for each, trips in self.loops if not each)

    def real(self, share: Fraction) -> tuple[int, int]:
        """The tokens and the groups of a step, of whose rows this share are examples and the others were added."""
        of_rows = [set(c.rows) for c in self.choices]
        tokens = self.tokens * self.runs * (share if any(of_rows) else 1)
        if self.mask is None:
            return int(tokens), 1
        grouped = any(rows.intersection(c.groups) for rows, c in zip(of_rows, self.choices, strict=True))
        return int(tokens), int(self.mask.groups * self.runs * (share if grouped else 1))


def find_routes(
    dims: Dimensions,
    storage: Storage,
    flow: Flow,
    phases: Mapping[int, str],
    params: Collection[int],
    numbers: Collection[int],
    classes: Collection[int],
    places: Collection[int],
    rows: Collection[int],
    among: Collection[Value] = (),
) -> tuple[Route, ...]:
    """The layers of a step that choose experts, in their order, but for those in branches and loops without an end.

    Args:
        dims, storage, flow, phases: the step's.
        params: the parameters, by input.
        numbers: how many experts there are.
        classes: those of its dimensions that count experts.
        places: those that count the places of an expert.
        rows: those that count examples.
        among: values that are made of choices besides, such as the sizes of groups of sorted rows.
    """
    program, given = dims.program, set(params)
    behind = flow.back(among, by_no_product).keys()
    found = products(dims, storage)
    weighted = {p.equation.index for p in found if p.weights}
    layers = defaultdict[Any, list[Ranking]](list)
    used = _Used(dims, flow, phases, found, set(classes), set(rows))
    for r in rankings(program):
        e = r.equation
        if r.chosen is None or r.number not in numbers or phases.get(e.index) != FORWARD:
            continue
        counts = dims.of(r.operand)[r.dim] in classes and used(r)
        if (counts or not behind.isdisjoint(e.outs)) and _loops(flow, given, e) is not None:
            layers[r.number, _router(flow, weighted, r.operand) or e.index].append(r)
    masks = [m for p in found if not p.weights and (m := _mask(dims, p, phases, classes, places, rows))]
    return tuple(_route(dims, flow, given, rows, layer, masks) for layer in layers.values())


class _Used:
    """`used(ranking)`: does what is chosen, by token, meet what experts made? What a loss that evens out their load, or
    a figure beside it, makes of a choice of its own does not."""

    def __init__(
        self,
        dims: Dimensions,
        flow: Flow,
        phases: Mapping[int, str],
        found: Iterable[Product],
        classes: Set[int],
        rows: Set[int],
    ):
        self._dims, self._flow, self._phases, self._rows = dims, flow, phases, rows
        self._weighted = {p.equation.index for p in found if p.weights}
        experts = [p for p in found if any(_of_experts(p, k, classes) for k in p.weights)]
        made = (v for p in experts for v in p.equation.outs)
        self._made = flow.forward(made, lambda _v, _w, e: self._near(e))

    def __call__(self, r: Ranking) -> bool:
        by_token = self._flow.forward(r.equation.outs, lambda v, _w, e: self._near(e) and self._keeps(v))
        met = (e for v in by_token for _, e in self._flow.after[v] if e is not None and self._near(e))
        return any(not self._made.isdisjoint(v for v in e.ins if v is not None) for e in met)

    def _near(self, e: Equation | None) -> bool:
        """Is an equation of the forward pass, before the next weight?"""
        return e is None or (self._phases.get(e.index) == FORWARD and e.index not in self._weighted)

    def _keeps(self, v: Value) -> bool:
        return not self._rows or not self._rows.isdisjoint(self._dims.of(v))


def _of_experts(p: Product, k: int, classes: Set[int]) -> bool:
    """Whether operand `k` of a product has a matrix for each expert."""
    return any(p.tensors[k][d] in classes for d in stacked(p, k))


def _router(flow: Flow, weighted: Collection[int], logits: Value) -> frozenset[int]:
    """The products with a weight, by index, that logits are made of, not looking behind these."""

    def through(v: Value, _w: Value, e: Equation | None) -> bool:
        return e is None or e.index not in weighted

    makers = flow.program.maker
    met = flow.back([logits], through)
    return frozenset(makers[v].index for v in met if v in makers and makers[v].index in weighted)


def _route(
    dims: Dimensions,
    flow: Flow,
    params: set[int],
    rows: Collection[int],
    layer: Sequence[Ranking],
    masks: Sequence[Mask],
) -> Route:
    program, first = dims.program, layer[0].equation
    made = flow.forward((r.equation.outs[r.chosen] for r in layer if r.chosen is not None), by_no_product)
    mask = next((m for m in masks if program.equations[m.equation].ins[m.operand] in made), None)
    groups = frozenset[int]() if mask is None else _groups(dims, program.equations[mask.equation], mask)
    choices, best, tokens = [], 0, 0
    for r in layer:
        assert r.chosen is not None and r.best is not None
        v = r.equation.outs[r.chosen]
        of = dims.of(v)
        grouped, examples = (tuple(d for d, c in enumerate(of) if c in some) for some in (groups, rows))
        choices.append(Choice(r.equation.index, r.chosen, grouped, examples))
        best, tokens = best + r.best, prod(program.shapes[v]) // r.best
    loops = _loops(flow, params, first) or ()
    return Route(
        layer[0].number, best, tokens, tuple(choices), mask, loops, *(users_place(first.eqn) or (None, None))
    )


def _groups(dims: Dimensions, e: Equation, mask: Mask) -> frozenset[int]:
    """The classes of a mask's dimensions that count groups: all but those of tokens, experts and places."""
    v, c = e.ins[mask.operand], e.contraction
    assert v is not None and c is not None
    gone = {pair[mask.operand] for pair in c.contracted}
    tokens = {dims.of(v)[d] for d in gone}
    batch = {triple[mask.operand] for triple in c.batch}
    return frozenset(dims.of(v)[d] for d in batch) - tokens


def _mask(
    dims: Dimensions,
    p: Product,
    phases: Mapping[int, str],
    classes: Collection[int],
    places: Collection[int],
    rows: Collection[int],
) -> Mask | None:
    """The mask of a product that brings tokens to the places of experts; None for others."""
    e, c = p.equation, p.equation.contraction
    if c is None or c.ragged is not None or phases.get(e.index) != FORWARD:
        return None
    for k, tensor in enumerate((p.left, p.right)):
        expert = [d for d, x in enumerate(tensor) if x in classes]
        place = [d for d, x in enumerate(tensor) if x in places]
        gone = {pair[k] for pair in c.contracted}
        other = set((p.right, p.left)[k])
        if len(expert) != 1 or not place or gone & {*expert, *place} or other & {*classes, *places}:
            continue
        v = e.ins[k]
        if v is None:
            continue
        shape = dims.program.shapes[v]
        rest = [d for d in range(len(shape)) if d not in gone and d not in (*expert, *place)]
        examples = tuple(d for d, x in enumerate(tensor) if x in rows)
        return Mask(
            e.index, k, expert[0], prod(shape[d] for d in place), prod(shape[d] for d in rest), examples
        )
    return None


def _loops(flow: Flow, params: set[int], e: Equation) -> tuple[tuple[bool, int], ...] | None:
    """The scans that an equation is in, as `Route.loops` has them: one that steps over parameters goes through layers.
    None in a branch, or in a loop without an end."""
    found, at = list[tuple[bool, int]](), e.outer
    while at is not None:
        if at.is_cond or at.is_while:
            return None
        if at.is_scan:
            stepped = at.ins[sum(scan_counts(at.params)) :]
            found.append((not params.isdisjoint(flow.inputs_behind(stepped, by_alias)), at.params["length"]))
        at = at.outer
    return tuple(reversed(found))


def chosen(route: Route, choice: Choice, numbers: Any, real: Any) -> Any:
    """How many tokens of each group chose each expert: (groups, experts). `real`: which rows are examples, bool of
    each; None where all are."""
    rest = tuple(d for d in range(numbers.ndim) if d not in choice.groups)
    each = numbers[..., None] == jnp.arange(route.number, dtype=numbers.dtype)
    return _of_examples(each, choice.rows, real).sum(rest, dtype=jnp.int32).reshape(-1, route.number)


def kept(mask: Mask, places: Any, real: Any) -> Any:
    """How many places of each expert have a token: (experts,). `real` as of `chosen`."""
    rest = tuple(d for d in range(places.ndim) if d != mask.expert)
    return _of_examples(places != 0, mask.rows, real).sum(rest, dtype=jnp.int32)


def _of_examples(x: Any, rows: Iterable[int], real: Any) -> Any:
    """`x`, bool, with False in the place of what is of no example."""
    if real is None:
        return x
    for d in rows:
        of = jnp.arange(x.shape[d]) * len(real) // x.shape[d]
        x &= jnp.expand_dims(real[of], [i for i in range(x.ndim) if i != d])
    return x


def summed(route: Route, counts: Iterable[Any], masked: Any) -> tuple[Any, Any, Any]:
    """By layer and expert the tokens that chose it, the most of them in one group, and those that have a place: each
    (layers, experts); the last None without `masked`.

    Args:
        route: the layer.
        counts: what `chosen` gave of each of its choices, stacked by its loops.
        masked: what `kept` gave, stacked so; None without a mask.
    """
    total = reduce(add, counts)
    trips = tuple(n for _, n in route.loops)
    over = tuple(i for i, (each, _) in enumerate(route.loops) if not each)

    def by_layer(x: Any, how: Any) -> Any:
        return how(x.reshape(*trips, route.number), over).reshape(-1, route.number)

    most = by_layer(total.max(-2), jnp.max)
    places = None if masked is None else by_layer(masked, jnp.sum)
    return by_layer(total.sum(-2), jnp.sum), most, places
