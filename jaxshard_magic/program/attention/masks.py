"""Which keys a query sees: a mask as it is written, read as distances between positions and conditions on inputs.

What a mask is made of is followed back to where it no longer has a dimension of queries and one of keys: to positions
(`arange`), whose comparisons are distances, and to inputs such as lengths, padding and segment numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ir import Value
from ..primitives import bind
from ..primitives.primitive import Kind
from .attention import Apply, Condition, Leaf, Span, Test
from .trail import Labels, Trail, number

_ROWS = 256  # of a mask of more positions than `_WHOLE`, how many queries are looked at
_WHOLE = 2048


@dataclass(frozen=True)
class Masked:
    """`span` and `conditions` as of an `Attention`."""

    span: Span
    conditions: tuple[Condition, ...]


def masked(trail: Trail, mask: Value, labels: Labels, rank: int, seen: bool) -> Masked | None:
    """What a mask says.

    Args:
        trail: of the program that makes it.
        mask: the truth values, or what is true where it is not 0.
        labels: the place of each of its dimensions among (batch..., groups..., query, key), `rank` in all.
        rank: how many these are.
        seen: whether it is true where keys are seen, or where they aren't.

    None for a mask that has dimensions besides.
    """
    test = _Reading(trail, rank).test(mask, labels)
    if test is None:
        return None
    span, conditions = Span(), []
    for condition in _all_of(Condition(test, seen)):
        distances = _distances(condition, rank)
        if distances is None:
            conditions.append(condition)
        else:
            span &= distances
    return Masked(span, tuple(conditions))


def leaves(test: Test) -> Iterator[Leaf]:
    """The operands of a test, in order."""
    if isinstance(test, Leaf):
        yield test
    else:
        for operand in test.operands:
            yield from leaves(operand)


def evaluated(test: Test, array: Callable[[Leaf], Any]) -> Any:
    """The numbers of a test, whose leaves are such arrays that broadcast against each other."""
    if isinstance(test, Leaf):
        return array(test)
    operands = jnp.broadcast_arrays(*(evaluated(operand, array) for operand in test.operands))
    return bind(test.eqn, operands)[0]


def met(conditions: Sequence[Condition], array: Callable[[Leaf], Any]) -> Any:
    """Where all conditions are met; True without any."""
    found: Any = True
    for condition in conditions:
        truth = evaluated(condition.test, array).astype(bool)
        found = found & (truth if condition.holds else ~truth)
    return found


def placed(x: Any, dims: Sequence[int | None], rank: int) -> Any:
    """An array with its dimensions at the places `dims` of `rank`, those of None (size 1) left out, others of size 1.

    >>> placed(np.ones((3, 1, 2)), (2, None, 0), 4).shape
    (2, 1, 3, 1)
    """
    sizes = dict(zip(dims, x.shape, strict=True))
    at = sorted((d, k) for k, d in enumerate(dims) if d is not None)
    order = [*(k for _, k in at), *(k for k, d in enumerate(dims) if d is None)]
    return x.transpose(order).reshape([sizes.get(d, 1) for d in range(rank)])


@dataclass(frozen=True)
class _Reading:
    trail: Trail
    rank: int

    def test(self, v: Value, labels: Labels) -> Test | None:
        trail, shapes = self.trail, self.trail.program.shapes
        while (e := trail.maker(v)) is not None and e.primitive.kind is Kind.SHAPE:
            if e.ins[0] is None:
                return _number(e.eqn.invars[0])
            if (back := trail.moved(e, labels)) is None:
                break
            v, labels = e.ins[0], back
        v = trail.up(v)
        has = {x for x, z in zip(labels, shapes[v], strict=True) if z > 1}
        if None in has:
            return None
        both = {self.rank - 2, self.rank - 1} <= has
        if both and e is not None:
            if e.name == "iota":
                d = e.params["dimension"]
                return Leaf(np.arange(shapes[v][d], dtype=e.params["dtype"]), (labels[d],))
            if e.primitive.elementwise and not e.eqn.effects:
                operands = [
                    _number(var) if w is None else self.test(w, labels if shapes[w] else ())
                    for w, var in zip(e.ins, e.eqn.invars, strict=True)
                ]
                if None not in operands:
                    return Apply(e.eqn, tuple(operands))  # pyright: ignore[reportArgumentType]
        known = trail.constant(v)
        return Leaf(v if known is None else known, labels)


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
    name, operands = test.eqn.primitive.name, test.operands
    truths = _is_truth(test)
    if name == "convert_element_type" and _is_truth(operands[0]):
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
    if isinstance(test, Leaf):
        return []
    name = test.eqn.primitive.name
    if name == "convert_element_type":
        return [test.operands[0]] if _is_truth(test.operands[0]) else _truths(test.operands[0])
    if name == "mul":
        parts = [_truths(operand) for operand in test.operands]
        return [t for part in parts for t in part] if all(parts) else []
    return []


def _is_known(leaf: Leaf) -> bool:
    return isinstance(leaf.source, np.ndarray)


def _is_truth(test: Test) -> bool:
    if isinstance(test, Apply):
        return str(getattr(test.eqn.outvars[0].aval, "dtype", "")) == "bool"
    return isinstance(test.source, np.ndarray) and test.source.dtype == bool


def _is_zero(test: Test) -> bool:
    return isinstance(test, Leaf) and isinstance(test.source, np.ndarray) and not test.source.any()


def _distances(condition: Condition, rank: int) -> Span | None:
    """The distances at which a condition is met, whatever the query; None where it depends on more than the distance.

    Of many positions a few queries are looked at, where positions are all that is compared.
    """
    found = list(leaves(condition.test))
    if not all(map(_is_known, found)):
        return None
    arrays = {id(leaf): placed(leaf.source, leaf.dims, rank) for leaf in found}
    sizes = np.broadcast_shapes(*(x.shape for x in arrays.values()))
    *others, queries, keys = (1,) * (rank - len(sizes)) + sizes
    if max(others, default=1) > 1 or queries != keys:
        return None
    rows = np.arange(queries)
    if queries > _WHOLE and all(map(_is_counted, arrays.values())):
        rows = np.unique(np.linspace(0, queries - 1, _ROWS).astype(int))
    cut = {k: x[..., rows, :] if x.shape[-2:][0] > 1 else x for k, x in arrays.items() if x.ndim == rank}
    with jax.ensure_compile_time_eval():
        seen = met([condition], lambda leaf: jnp.asarray(cut.get(id(leaf), arrays[id(leaf)])))
    seen = np.broadcast_to(np.asarray(seen), (*others, len(rows), keys)).reshape(len(rows), keys)
    distance = rows[:, None] - np.arange(keys)[None]
    if not seen.any():
        return None
    low, high = int(distance[seen].min()), int(distance[seen].max())
    if not (seen == ((distance >= low) & (distance <= high))).all():
        return None
    return Span(low if low > 1 - keys else None, high if high < queries - 1 else None)


def _is_counted(x: np.ndarray) -> bool:
    """Is it one number, or consecutive ones?"""
    flat = x.reshape(-1)
    return flat.size == 1 or (x.shape.count(1) == x.ndim - 1 and bool((np.diff(flat.astype(int)) == 1).all()))
