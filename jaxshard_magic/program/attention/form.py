"""`Form`: what an attention is beside its operands; and its arithmetic, of a block of queries with a block of keys.

Arrays have the dimensions (batch..., groups..., position, width), keys and values without groups. Scores, their
exponentials and all sums are float32 (float64 for operands of it); the operands of products stay as they are given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .attention import Attention, Condition, Leaf, Span, Test
from .evaluate import evaluated, leaves, met


@dataclass(frozen=True, eq=False)
class Form:
    """`batch`, `groups`: how many dimensions these are. `uniform`: whether a query that sees nothing has the mean of
    all values; else it has nan. `span`, `conditions`: by which keys are left out. `dtype`: of the result. The other
    fields as of an `Attention`; the arrays of masks and of what else is made of scores are those of `leaves`, with the
    dimensions (batch..., groups..., query, key)."""

    batch: int
    groups: int
    scale: float
    span: Span
    conditions: tuple[Condition, ...]
    uniform: bool
    change: Test | None
    precision: tuple[Any, Any]
    dtype: Any

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The operands of masks and of the change, in the order of their arrays."""
        tests = [condition.test for condition in self.conditions]
        tests += [] if self.change is None else [self.change]
        return tuple(leaf for test in tests for leaf in leaves(test))

    @cached_property
    def names(self) -> tuple[str, str]:
        """Letters for the dimensions of the batch and of groups."""
        return "ABCDEFGH"[: self.batch], "PQRSTUVW"[: self.groups]

    def product(self, left: str, right: str, out: str, x: Any, y: Any, *, scores: bool) -> Any:
        """A product in the type of sums; its dimensions named with t (queries), s (keys), d, e (widths), those of batch
        and groups left out: "*" stands for both, "." for the batch."""
        batch, groups = self.names
        text = f"{left},{right}->{out}".replace("*", batch + groups).replace(".", batch)
        precision = self.precision[0 if scores else 1]
        return jnp.einsum(text, x, y, precision=precision, preferred_element_type=wide(x.dtype))


def form_of(attention: Attention, dtype: Any) -> Form:
    """The form of an attention whose result has this type, with groups for keys that were repeated."""
    span, conditions = attention.left_out
    blind = bool(conditions) or not span.has_zero
    return Form(
        attention.batch,
        attention.groups + (attention.repeats is not None),
        attention.scale,
        span,
        conditions,
        blind and bool(np.isfinite(attention.fill)),
        attention.change,
        attention.precision,
        dtype,
    )


def wide(dtype: Any) -> Any:
    """The type of sums."""
    return jnp.promote_types(dtype, jnp.float32)


Rows = tuple[Any, Any, Any]  # numbers of each query
State = Rows  # the largest score of each query so far, the sum of exponentials, that with values


@dataclass(frozen=True)
class Block:
    """A block of queries with one of keys: which of these each of those sees (`visible`), None for all, and the arrays
    of the form's leaves, by their ids."""

    visible: Any
    arrays: Mapping[int, Any]


def block(form: Form, masks: Sequence[Any], queries: Any, keys: Any, sizes: tuple[int, int]) -> Block:
    """The block of the queries from position `queries` on with the keys from `keys` on.

    `masks`: the arrays of the form's leaves, for these positions. `sizes`: how many queries and keys.
    """
    arrays = dict(zip(map(id, form.leaves), masks, strict=True))
    found = met(form.conditions, lambda leaf: arrays[id(leaf)]) if form.conditions else None
    low, high = form.span.low, form.span.high
    if low is None and high is None:
        return Block(found, arrays)
    distance = (queries + jnp.arange(sizes[0]))[:, None] - (keys + jnp.arange(sizes[1]))
    for within in (None if low is None else distance >= low, None if high is None else distance <= high):
        if within is not None:
            found = within if found is None else found & within
    return Block(found, arrays)


def start(form: Form, query: Any, value: Any) -> State:
    """Before any block."""
    dtype = wide(query.dtype)
    rows = query.shape[:-1]
    sums = jnp.zeros((*rows, value.shape[-1]), dtype)
    return jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), sums


def forward(form: Form, state: State, query: Any, key: Any, value: Any, at: Block) -> State:
    """The state with one more block of keys."""
    largest, total, sums = state
    scores = _masked(at, _changed(form, at, _scores(form, query, key)))
    most = jnp.maximum(largest, scores.max(-1))
    finite = jnp.where(most == -jnp.inf, 0, most)
    weights, before = jnp.exp(scores - finite[..., None]), jnp.exp(largest - finite)
    added = form.product("*ts", ".se", "*te", weights.astype(value.dtype), value, scores=False)
    return most, total * before + weights.sum(-1), sums * before[..., None] + added


def result(form: Form, state: State, mean: Any) -> tuple[Any, Any, Any]:
    """Attention of all blocks, the largest score of each query and the sum of its exponentials, relative to it: 0 and
    inf where a query saw nothing. `mean`: of all values, where the form is uniform."""
    largest, total, sums = state
    out, blind = sums / total[..., None], total == 0
    if form.uniform:
        out = jnp.where(blind[..., None], along_queries(form, mean), out)
    return out.astype(form.dtype), jnp.where(blind, 0, largest), jnp.where(blind, jnp.inf, total)


def along_queries(form: Form, x: Any) -> Any:
    """An array (batch..., width) under the dimensions of a result."""
    return x.reshape(*x.shape[:-1], *(1,) * (form.groups + 1), x.shape[-1])


def backward(
    form: Form, query: Any, key: Any, value: Any, given: Any, rows: Rows, at: Block
) -> tuple[Any, Any, Any]:
    """The gradients of one block's queries, keys and values, in the type of sums.

    Args:
        given: the gradient of the result.
        rows: of each query what `result` gave beside that, and the sum over the width of the result times its gradient.
    """
    largest, total, delta = (x[..., None] for x in rows)
    scores, changed = jax.vjp(partial(_changed, form, at), _scores(form, query, key))
    weights = jnp.exp(_masked(at, scores) - largest) / total
    change = form.product("*te", ".se", "*ts", given, value, scores=False)
    (of_scores,) = changed(weights * (change - delta))
    if form.change is not None and at.visible is not None:
        of_scores = jnp.where(at.visible, of_scores, 0)
    of_scores = (of_scores * form.scale).astype(query.dtype)
    return (
        form.product("*ts", ".sd", "*td", of_scores, key, scores=True),
        form.product("*ts", "*td", ".sd", of_scores, query, scores=True),
        form.product("*ts", "*te", ".se", weights.astype(given.dtype), given, scores=False),
    )


def blind_sum(form: Form, given: Any, total: Any) -> Any:
    """The sum of the result's gradient over the queries that saw nothing: (batch..., width)."""
    gone = jnp.where(jnp.isposinf(total)[..., None], given.astype(total.dtype), 0)
    return gone.sum(tuple(range(form.batch, gone.ndim - 1)))


def _scores(form: Form, query: Any, key: Any) -> Any:
    return form.product("*td", ".sd", "*ts", query, key, scores=True) * form.scale


def _changed(form: Form, at: Block, scores: Any) -> Any:
    if form.change is None:
        return scores
    found = evaluated(form.change, lambda leaf: at.arrays[id(leaf)], scores, scores.dtype)
    return jnp.broadcast_to(found, scores.shape)


def _masked(at: Block, scores: Any) -> Any:
    return scores if at.visible is None else jnp.where(at.visible, scores, -jnp.inf)
