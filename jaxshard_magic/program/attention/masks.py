"""Which keys a query sees: a mask as it is written, read as distances between positions and conditions on inputs.

What a mask is made of is followed back to where it no longer has a dimension of queries and one of keys: to positions
(`arange`), whose comparisons are distances, and to inputs such as lengths, padding and segment numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ir import Value
from ..primitives.primitive import Kind
from .attention import Apply, Condition, Leaf, Span, Test
from .evaluate import evaluated, is_known, is_truth, leaves, met, placed, ways
from .trail import Labels, Trail, number

UNSEEN = -1e4  # scores from here down are none: their exponentials are 0 beside another
_FEW = 256  # of a mask of more positions than `_WHOLE`, how many queries, and keys, are looked at
_WHOLE = 2048
_DEEP = 32  # equations that are opened one behind the other


@dataclass(frozen=True)
class Masked:
    """`span` and `conditions` as of an `Attention`."""

    span: Span
    conditions: tuple[Condition, ...]


def test_of(trail: Trail, v: Value, labels: Labels, rank: int, *, deep: bool = False) -> Test | None:
    """What a value tells of each query and key.

    Args:
        trail: of the program that makes it.
        v: of any type.
        labels: the place of each of its dimensions among (batch..., groups..., query, key), `rank` in all.
        rank: how many these are.
        deep: back to truth values, also where a value has no longer a dimension of queries and one of keys.

    None for a value that has dimensions besides.
    """
    return _Reading(trail, rank, deep).test(v, labels)


def masked(conditions: Sequence[Condition], rank: int) -> Masked:
    """What a mask of such conditions says, of scores of so many dimensions."""
    span, others = Span(), []
    for condition in (part for whole in conditions for part in _all_of(whole)):
        distances = _distances(condition, rank)
        if distances is None:
            others.append(condition)
        else:
            span &= distances
    return Masked(span, tuple(others))


def hides(test: Test, times: float) -> tuple[list[Condition], float] | None:
    """Of numbers, so many `times` of which are added to scores: the conditions that keys are seen under, where it is 0,
    and what is added elsewhere, which is very small; None for other numbers."""
    found = ways(test)
    if found is None:
        return None
    truths, numbers = found
    seen = [way for way, x in numbers.items() if x == 0]
    lows = [x * times for x in numbers.values() if x != 0]
    if not seen or not lows or not all(x <= UNSEEN for x in lows):
        return None
    if len(seen) > 1:
        return [Condition(test, False)], max(lows)
    return [Condition(truth, holds) for truth, holds in zip(truths, seen[0], strict=True)], max(lows)


def keeps(test: Test) -> list[Condition] | None:
    """Of numbers that exponentials are multiplied by: the conditions under which they are 1, where they are 0 or 1."""
    found = ways(test)
    if found is None or not set(found[1].values()) <= {0.0, 1.0}:
        return None
    ones = [way for way, x in found[1].items() if x == 1]
    if len(ones) != 1:
        return [Condition(test)]
    return [Condition(truth, holds) for truth, holds in zip(found[0], ones[0], strict=True)]


def bounds(test: Test, rank: int) -> tuple[float, float] | None:
    """The least and the greatest number that `test` makes of scores of 0, as a few queries tell; None where it depends
    on inputs."""
    found = list(leaves(test))
    if not all(map(is_known, found)):
        return None
    arrays = {id(leaf): placed(leaf.source, leaf.dims, rank) for leaf in found}
    queries = max((x.shape[-2] for x in arrays.values()), default=1)
    rows = np.unique([0, queries // 2, queries - 1])
    cut = {k: x[..., rows, :] if x.shape[-2] > 1 else x for k, x in arrays.items()}
    with jax.ensure_compile_time_eval():
        numbers = np.asarray(evaluated(test, lambda leaf: cut[id(leaf)], jnp.zeros(()), jnp.float32))
    return float(numbers.min()), float(numbers.max())


@dataclass(frozen=True)
class _Reading:
    trail: Trail
    rank: int
    deep: bool

    def test(self, v: Value, labels: Labels, depth: int = 0) -> Test | None:
        trail, shapes = self.trail, self.trail.program.shapes
        while (e := trail.maker(v)) is not None and e.primitive.kind is Kind.SHAPE:
            if e.ins[0] is None:
                return _number(e.eqn.invars[0])
            if (back := trail.moved(e, labels)) is None:
                break
            v, labels = e.ins[0], back
        v = trail.up(v)
        has = {x for x, z in zip(labels, shapes[v], strict=True) if z > 1}
        dims = tuple(x if isinstance(x, int) else None for x in labels)
        if not all(isinstance(x, int) for x in has):
            return None
        truth = trail.program.avals[v].dtype == bool
        opened = {self.rank - 2, self.rank - 1} <= has or (self.deep and not truth and depth < _DEEP)
        if opened and e is not None:
            if e.name == "iota":
                d = e.params["dimension"]
                return Leaf(np.arange(shapes[v][d], dtype=e.params["dtype"]), (dims[d],))
            if e.primitive.elementwise and not e.eqn.effects:
                operands = [
                    _number(var) if w is None else self.test(w, labels if shapes[w] else (), depth + 1)
                    for w, var in zip(e.ins, e.eqn.invars, strict=True)
                ]
                if None not in operands:
                    return Apply(e.eqn, tuple(operands))  # pyright: ignore[reportArgumentType]
        known = trail.constant(v)
        return Leaf(v if known is None else known, dims, truth)


def _number(literal: Any) -> Leaf:
    return Leaf(number(literal), ())


def _all_of(condition: Condition) -> Iterator[Condition]:
    """The conditions that have to be met for a condition to be."""
    test, holds = condition.test, condition.holds
    if isinstance(test, Leaf):
        known = test.source if isinstance(test.source, np.ndarray) else None
        if known is None or known.ndim or bool(known) != holds:
            yield condition
        return
    if not isinstance(test, Apply):
        return
    name, operands = test.eqn.primitive.name, test.operands
    truths = is_truth(test)
    if name == "convert_element_type" and is_truth(operands[0]):
        yield from _all_of(Condition(operands[0], holds))
    elif name == "not" and truths:
        yield from _all_of(Condition(operands[0], not holds))
    elif (name == "and" and truths and holds) or (name == "or" and truths and not holds):
        for operand in operands:
            yield from _all_of(Condition(operand, holds))
    elif (
        name in ("ne", "gt")
        and _is_zero(operands[1])
        and (parts := _truths(operands[0]))
        and (holds or len(parts) == 1)
    ):
        for part in parts:
            yield from _all_of(Condition(part, holds))
    elif name == "select_n" and truths and holds and len(operands) == 3 and _is_zero(operands[1]):
        yield from _all_of(Condition(operands[0]))
        yield from _all_of(Condition(operands[2]))
    else:
        yield condition


def _truths(test: Test) -> list[Test]:
    """The truth values whose product, as numbers, a test is; empty for another."""
    if not isinstance(test, Apply):
        return []
    name = test.eqn.primitive.name
    if name == "convert_element_type":
        return [test.operands[0]] if is_truth(test.operands[0]) else _truths(test.operands[0])
    if name == "mul":
        parts = [_truths(operand) for operand in test.operands]
        return [t for part in parts for t in part] if all(parts) else []
    return []


def _is_zero(test: Test) -> bool:
    return isinstance(test, Leaf) and isinstance(test.source, np.ndarray) and not test.source.any()


def _distances(condition: Condition, rank: int) -> Span | None:
    """The distances at which a condition is met, whatever the query; None where it depends on more than the distance.

    Of many positions a few queries and a few keys are looked at, where positions are all that is compared.
    """
    found = list(leaves(condition.test))
    if not all(map(is_known, found)):
        return None
    arrays = {id(leaf): placed(leaf.source, leaf.dims, rank) for leaf in found}
    sizes = np.broadcast_shapes(*(x.shape for x in arrays.values()))
    *others, queries, keys = (1,) * (rank - len(sizes)) + sizes
    if max(others, default=1) > 1 or queries != keys:
        return None
    every = few = np.arange(queries)
    if queries > _WHOLE and all(map(_is_counted, arrays.values())):
        few = np.unique(np.linspace(0, queries - 1, _FEW).astype(int))

    def looked_at(rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of these keys those queries see, and their distances."""
        cut = {k: _of_places(_of_places(x, -2, rows), -1, columns) for k, x in arrays.items()}
        with jax.ensure_compile_time_eval():
            seen = met([condition], lambda leaf: jnp.asarray(cut[id(leaf)]))
        sizes = len(rows), len(columns)
        return np.broadcast_to(np.asarray(seen), (*others, *sizes)).reshape(sizes), rows[:, None] - columns

    looks = [looked_at(few, every), *([] if few is every else [looked_at(every, few)])]
    seen, distance = looks[0]
    if not seen.any():
        return None
    low, high = int(distance[seen].min()), int(distance[seen].max())
    if not all((seen == ((distance >= low) & (distance <= high))).all() for seen, distance in looks):
        return None
    return Span(low if low > 1 - keys else None, high if high < queries - 1 else None)


def _of_places(x: np.ndarray, dim: int, places: np.ndarray) -> np.ndarray:
    return x.take(places, dim) if x.shape[dim] > 1 else x


def _is_counted(x: np.ndarray) -> bool:
    """Is it one number, or consecutive ones?"""
    flat = x.reshape(-1)
    return flat.size == 1 or (x.shape.count(1) == x.ndim - 1 and bool((np.diff(flat.astype(int)) == 1).all()))
