"""Matrices that each token looks up (`w[chosen]`): tokens sorted by the matrix that they meet, in the place of a matrix
for each token.

A look-up makes as many matrices as there are tokens, each a copy of an expert's, which lie where the tokens do. Sorted
by expert the tokens meet the experts' own, in one product of groups, and are put back.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from math import nan, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .counts import Counts
from .flow import Flow, by_alias
from .ir import Equation, Program, Scope, Value
from .lines import users_line
from .losses import Losses, WithLosses, run_anew
from .primitives import called, shape_of
from .replay import ByBody
from .trace import Traced

_FILLS = lax.GatherScatterMode.FILL_OR_DROP

Of = tuple[int | None, ...]  # by dimension of what was looked up: the operand's; None for one of the look-ups


@dataclass(frozen=True)
class Lookup:
    """An equation that takes slice `indices[..., place]` of dimension `dim` of its operand, whole in all others.
    `laid`: the equation that lays the numbers out as that place of `indices`; None where it isn't known. `chosen`: the
    numbers where they are known to be of slices, as an `argmax` or a `top_k` along as many gives them."""

    dim: int
    place: int
    of: Of
    laid: int | None = None
    chosen: Value | None = None


@dataclass(frozen=True)
class Found:
    """What a program looks up to multiply with it alone: the `lookups`, what is another form of these (`forms`), both
    by their equations' index, and the `products`, with the operand that was looked up. `lines`: where, for the user."""

    lookups: Mapping[int, Lookup]
    forms: frozenset[int]
    products: Mapping[int, int]
    lines: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.products)


@dataclass(frozen=True)
class Taken:
    """In the place of matrices that are looked up: those that there are, and the number of each one that is. `inside`:
    which numbers there are matrices of, where the look-up gives `fill` for others: NaN or 0."""

    matrices: jax.Array
    numbers: jax.Array
    lookup: Lookup
    inside: jax.Array | None = None
    fill: Any = nan


@dataclass(frozen=True)
class Order:
    """How rows are sorted by their `numbers`, and back; `sizes`: how many rows each matrix has."""

    numbers: jax.Array
    order: jax.Array
    back: jax.Array
    sizes: jax.Array


def lookups_sorted(captured: Traced) -> tuple[Traced | None, tuple[str, ...]]:
    """A captured step whose tokens are sorted by the matrices that they look up, and the lines that do; None and no
    lines where none does. Numbers differ from the step's by the order in which products are rounded."""
    by_sorting, found = run_anew(captured, find_lookups, _BySorting)
    return by_sorting, tuple(dict.fromkeys(line for f in found for line in f.lines))


def may_look_up(program: Program, weights: Container[Value | None]) -> bool:
    """Whether stacks of matrices among `weights` are looked up, one for each of several rows."""
    return any(_lookup(program, e) is not None for e in program.equations if e.ins and e.ins[0] in weights)


def find_lookups(program: Program, weights: Iterable[Value]) -> Found:
    """What a program looks up of `weights` and only multiplies with; cost: linear in the equations."""
    ruled = {
        e.index for rule in program.equations if rule.primitive.custom for e in rule.inside()
    }  # runs as it is
    found = ((e.index, _lookup(program, e)) for e in program.equations if e.index not in ruled)
    lookups = {i: lookup for i, lookup in found if lookup is not None}
    if not lookups:
        return Found({}, frozenset(), {}, ())
    own = Flow(program).forward(weights, by_alias)
    readers, counts, trails = _Readers(program), Counts(program), dict[int, _Trail]()
    for i, lookup in lookups.items():
        e = program.equations[i]
        trail = _trail(e, lookup, readers) if e.ins[0] in own else None
        if trail is not None:
            trails[i] = trail
            lookups[i] = _with_numbers(counts, e, lookup)
    twice = defaultdict[int, set[int]](set)
    for i, trail in trails.items():
        for product in trail.products:
            twice[product].add(i)
    for several in twice.values():
        if len(several) > 1:
            for i in several:
                trails.pop(i, None)
    products = {product: k for trail in trails.values() for product, k in trail.products.items()}
    return Found(
        {i: lookups[i] for i in trails},
        frozenset(form for trail in trails.values() for form in trail.forms),
        products,
        tuple(dict.fromkeys(users_line(program.equations[i].eqn) or "a library" for i in sorted(products))),
    )


@dataclass(frozen=True)
class _Trail:
    forms: tuple[int, ...]
    products: dict[int, int]


def _lookup(program: Program, e: Equation) -> Lookup | None:
    """How `e` looks up whole slices of a stack of matrices, one for each of several rows; None where it does not."""
    if not e.primitive.gathers or e.ins[0] is None or e.ins[1] is None:
        return None
    numbers, sizes, mode = e.params["dimension_numbers"], e.params["slice_sizes"], e.params["mode"]
    shape, rows = program.shapes[e.ins[0]], len(program.shapes[e.ins[1]]) - 1
    parts = [d for d, size in enumerate(sizes) if size != shape[d]]
    if len(shape) < 3 or not rows or len(parts) != 1 or sizes[parts[0]] != 1 or numbers.operand_batching_dims:
        return None
    if parts[0] not in numbers.start_index_map:
        return None
    if mode == _FILLS and (len(numbers.start_index_map) > 1 or not (np.isnan(_fill(e)) or _fill(e) == 0)):
        return None
    kept = iter(d for d in range(len(shape)) if d not in numbers.collapsed_slice_dims)
    of = tuple(
        next(kept) if d in numbers.offset_dims else None for d in range(len(program.shapes[e.outs[0]]))
    )
    return Lookup(parts[0], numbers.start_index_map.index(parts[0]), of)


def _fill(e: Equation) -> Any:
    """What a look-up gives for numbers of no matrix, where it fills these."""
    fill = e.params["fill_value"]
    return nan if fill is None else fill


def _with_numbers(counts: Counts, e: Equation, lookup: Lookup) -> Lookup:
    """The same, with what is known of its numbers."""
    program = counts.program
    laid = program.maker.get(e.ins[1]) if e.ins[1] is not None else None
    if laid is not None and laid.name == "concatenate":
        one = all(shape_of(v)[-1] == 1 for v in laid.eqn.invars)
        v = laid.ins[lookup.place] if one and len(laid.ins) > lookup.place else None
        laid = None if v is None else program.maker.get(v)
    if laid is None or laid.name != "broadcast_in_dim" or (numbers := counts.relaid_from(laid)) is None:
        return lookup
    made, slices = counts.choosing(numbers), shape_of(e.eqn.invars[0])[lookup.dim]
    fit = made is not None and counts.last_places[made.index] < slices
    return replace(lookup, laid=laid.index, chosen=counts.unwrapped(numbers) if fit else None)


class _Readers:
    """What reads the values of a program: equations, with the operand that they are; the same values under other
    numbers, inside of jits that read them and outside of those that make them; and `out`, those that bodies give that
    stay bodies."""

    def __init__(self, program: Program):
        self.of = defaultdict[Value, list[tuple[Equation, int]]](list)
        self.same = defaultdict[Value, list[Value]](list)
        opened = set[Scope]()
        for e in program.equations:
            if called(e.eqn) is None or e.primitive.remat or e.primitive.custom:
                for k, v in enumerate(e.ins):
                    if v is not None:
                        self.of[v].append((e, k))
                continue
            opened.add(e.doors[0].scope)
            for a, b, _ in (*e.doors[0].into, *e.doors[0].out):
                if a is not None:
                    self.same[a].append(b)
        self.out = {v for scope in program.scopes() if scope not in opened for v in scope.outs}


def _trail(e: Equation, lookup: Lookup, readers: _Readers) -> _Trail | None:
    """What becomes of what `e` looks up; None where something else than a product reads it."""
    forms, products = list[int](), dict[int, int]()
    todo: list[tuple[Value, Of]] = [(e.outs[0], lookup.of)]
    while todo:
        v, of = todo.pop()
        if v in readers.out:
            return None
        todo += [(w, of) for w in readers.same[v]]
        for reader, k in readers.of[v]:
            if (after := _form(reader, of)) is not None:
                forms.append(reader.index)
                todo.append((reader.outs[0], after))
            elif not _multiplies(reader, k, of, lookup) or products.setdefault(reader.index, k) != k:
                return None
    return _Trail(tuple(forms), products) if products else None


def _form(e: Equation, of: Of) -> Of | None:
    """Whose dimensions another form of what was looked up has; None where `e` makes something else."""
    if e.primitive.casts:
        return of
    if e.name == "squeeze" and all(of[d] is not None for d in e.params["dimensions"]):
        return tuple(c for d, c in enumerate(of) if d not in e.params["dimensions"])
    return None


def _multiplies(e: Equation, k: int, of: Of, lookup: Lookup) -> bool:
    """Is operand `k` of `e` a matrix for each row, by which these are multiplied?"""
    c = e.contraction
    if e.name != "dot_general" or c is None or lookup.dim in of:
        return False
    return any(of[pair[k]] is not None for pair in c.contracted) and all(
        of[triple[k]] is None for triple in c.batch
    )


class _BySorting(WithLosses, ByBody):
    """Runs a program with the products of `found` by sorted rows."""

    def __init__(self, program: Program, found: Found, losses: Losses):
        super().__init__(program, losses)
        self._found = found
        self._laid = {f.laid for f in found.lookups.values()}
        self._numbers = dict[int, Any]()  # by the equation that lays them out

    def equation(self, e: Equation, values: list) -> list:
        if e.index in self._laid:
            self._numbers[e.index] = values[0]
        if (lookup := self._found.lookups.get(e.index)) is not None:
            return [self._taken(e, lookup, *values)]
        if e.index in self._found.forms:
            return [_formed(e, values[0])]
        k = self._found.products.get(e.index)
        if k is None:
            return super().equation(e, values)
        return [_product(e, k, values[k], values[1 - k], self._order)]

    def _order(self, taken: Taken, shape: tuple[int, ...], matrices: int) -> "Order":
        """That of numbers repeated to a shape; the same for all products of what is looked up by the same."""
        numbers, chosen = taken.numbers, taken.lookup.chosen
        lead = numbers.reshape(*numbers.shape, *(1,) * (len(shape) - numbers.ndim))
        key = id(numbers) if chosen is None else ("chosen", chosen), shape, matrices
        if key not in self.made:
            repeated = jnp.broadcast_to(lead, shape).reshape(-1)
            order, sizes = jnp.argsort(repeated), jnp.bincount(repeated, length=matrices)
            self.made[key] = Order(numbers, order, jnp.argsort(order), sizes)
        return self.made[key]

    def _taken(self, e: Equation, lookup: Lookup, matrices: jax.Array, indices: jax.Array) -> Taken:
        rows, count = indices.shape[:-1], matrices.shape[lookup.dim]
        if lookup.laid is None:
            numbers = indices[..., lookup.place]
        else:
            numbers = jnp.asarray(self._numbers[lookup.laid]).reshape(rows)
        if lookup.chosen is not None:
            return Taken(matrices, numbers, lookup)
        inside = (numbers >= 0) & (numbers < count) if e.params["mode"] == _FILLS else None
        return Taken(matrices, jnp.clip(numbers, 0, count - 1), lookup, inside, _fill(e))


def _formed(e: Equation, taken: Taken) -> Taken:
    of = _form(e, taken.lookup.of)
    assert of is not None
    matrices = taken.matrices
    if e.primitive.casts:
        matrices = matrices.astype(e.params["new_dtype"])
    return replace(taken, matrices=matrices, lookup=replace(taken.lookup, of=of))


def _product(e: Equation, k: int, taken: Taken, x: jax.Array, ordered: Callable[..., Order]) -> jax.Array:
    """The product of `x` with what `taken` stands for, operand `k`: rows are the look-ups, each with the free
    dimensions of `x`; sorted by matrix, multiplied in groups, put back."""
    c, of, lookup = e.contraction, taken.lookup.of, taken.lookup
    assert c is not None
    rows = [d for d, parent in enumerate(of) if parent is None]
    pairs = [(pair[k], pair[1 - k]) for pair in (*c.contracted, *c.batch)]
    where = dict(pairs)  # of each dimension of what was looked up, that of `x` that it meets
    summed = [pair[k] for pair in c.contracted if of[pair[k]] is None]
    depth = [pair[k] for pair in c.contracted if of[pair[k]] is not None]
    wide = [d for d, parent in enumerate(of) if parent is not None and d not in depth]
    free = [d for d, _ in (c.left, c.right)[1 - k]]

    lead = [where[d] for d in rows if d in where]
    x = jnp.transpose(x, (*lead, *free, *(where[d] for d in depth)))
    x = jnp.expand_dims(x, tuple(n for n, d in enumerate(rows) if d not in where))
    inner = x.shape[len(rows) + len(free) :]
    outer = (*taken.numbers.shape, *x.shape[len(rows) : len(rows) + len(free)])
    x = jnp.broadcast_to(x, (*outer, *inner)).reshape(prod(outer), prod(inner))
    parents = [of[d] for d in (*depth, *wide)]
    matrices = jnp.transpose(taken.matrices, (lookup.dim, *parents))  # pyright: ignore[reportArgumentType]
    sizes = matrices.shape[1 + len(depth) :]
    matrices = matrices.reshape(len(matrices), prod(inner), prod(sizes))

    found = ordered(taken, outer, len(matrices))
    made = lax.ragged_dot(
        jnp.take(x, found.order, axis=0),
        matrices,
        found.sizes,
        precision=e.params["precision"],
        preferred_element_type=e.eqn.outvars[0].aval.dtype,  # pyright: ignore[reportAttributeAccessIssue]
    )
    made = jnp.take(made, found.back, axis=0).reshape(*outer, *sizes)
    if taken.inside is not None:
        inside = taken.inside.reshape(*taken.inside.shape, *(1,) * (made.ndim - len(rows)))
        made = jnp.where(inside, made, jnp.asarray(taken.fill, made.dtype))
    labels: list[Any] = [*rows, *((d,) for d in free), *wide]
    made = jnp.sum(made, axis=tuple(labels.index(d) for d in summed), dtype=made.dtype)
    labels = [label for label in labels if label not in summed]
    own, others = [d for d, _ in (c.left, c.right)[k]], [(d,) for d in free]
    wanted = [triple[k] for triple in c.batch] + (own + others if k == 0 else others + own)
    return jnp.transpose(made, [labels.index(label) for label in wanted])
