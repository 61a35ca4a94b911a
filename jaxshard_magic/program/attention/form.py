"""`Form`: what an attention is beside its operands; and its arithmetic, of a block of queries with a block of keys.

Arrays have the dimensions (batch..., groups..., position, width), keys and values without groups. Scores, their
exponentials and all sums are float32 (float64 for operands of it); the operands of products stay as they are given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from .attention import Attention, Condition, Leaf, Span
from .masks import leaves, met


@dataclass(frozen=True, eq=False)
class Form:
    """`batch`, `groups`: how many dimensions these are. `uniform`: whether a query that sees nothing has the mean of
    all values; else it has nan. `added`: what scores of keys that are not seen have added to them, None where they are
    left out. `dtype`: of the result. The other fields as of an `Attention`; the arrays of a mask are
    those of `leaves`, with the dimensions (batch..., groups..., query, key)."""

    batch: int
    groups: int
    scale: float
    span: Span
    conditions: tuple[Condition, ...]
    uniform: bool
    added: float | None
    precision: tuple[Any, Any]
    dtype: Any

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The operands of the mask, in the order of their arrays."""
        return tuple(leaf for condition in self.conditions for leaf in leaves(condition.test))

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
    blind = bool(attention.conditions) or not attention.span.has_zero
    return Form(
        attention.batch,
        attention.groups + (attention.repeats is not None),
        attention.scale,
        attention.span,
        attention.conditions,
        blind and bool(np.isfinite(attention.fill)) and not attention.added,
        attention.fill if blind and attention.added else None,
        attention.precision,
        dtype,
    )


def wide(dtype: Any) -> Any:
    """The type of sums."""
    return jnp.promote_types(dtype, jnp.float32)


Rows = tuple[Any, Any, Any]  # numbers of each query
State = Rows  # the largest score of each query so far, the sum of exponentials, that with values


def seen(form: Form, masks: Sequence[Any], queries: Any, keys: Any, sizes: tuple[int, int]) -> Any:
    """Which of the keys from position `keys` on each query from `queries` on sees; None for all of them.

    `masks`: the arrays of the form's leaves, for these positions. `sizes`: how many queries and keys.
    """
    arrays = dict(zip(map(id, form.leaves), masks, strict=True))
    found = met(form.conditions, lambda leaf: arrays[id(leaf)]) if form.conditions else None
    low, high = form.span.low, form.span.high
    if low is None and high is None:
        return found
    distance = (queries + jnp.arange(sizes[0]))[:, None] - (keys + jnp.arange(sizes[1]))
    for within in (None if low is None else distance >= low, None if high is None else distance <= high):
        if within is not None:
            found = within if found is None else found & within
    return found


def start(form: Form, query: Any, value: Any) -> State:
    """Before any block."""
    dtype = wide(query.dtype)
    rows = query.shape[:-1]
    sums = jnp.zeros((*rows, value.shape[-1]), dtype)
    return jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), sums


def forward(form: Form, state: State, query: Any, key: Any, value: Any, visible: Any) -> State:
    """The state with one more block of keys."""
    largest, total, sums = state
    scores = _scores(form, query, key, visible)
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
    form: Form, query: Any, key: Any, value: Any, given: Any, rows: Rows, visible: Any
) -> tuple[Any, Any, Any]:
    """The gradients of one block's queries, keys and values, in the type of sums.

    Args:
        given: the gradient of the result.
        rows: of each query what `result` gave beside that, and the sum over the width of the result times its gradient.
    """
    largest, total, delta = (x[..., None] for x in rows)
    weights = jnp.exp(_scores(form, query, key, visible) - largest) / total
    change = form.product("*te", ".se", "*ts", given, value, scores=False)
    of_scores = (weights * (change - delta) * form.scale).astype(query.dtype)
    return (
        form.product("*ts", ".sd", "*td", of_scores, key, scores=True),
        form.product("*ts", "*td", ".sd", of_scores, query, scores=True),
        form.product("*ts", "*te", ".se", weights.astype(given.dtype), given, scores=False),
    )


def blind_sum(form: Form, given: Any, total: Any) -> Any:
    """The sum of the result's gradient over the queries that saw nothing: (batch..., width)."""
    gone = jnp.where(jnp.isposinf(total)[..., None], given.astype(total.dtype), 0)
    return gone.sum(tuple(range(form.batch, gone.ndim - 1)))


def _scores(form: Form, query: Any, key: Any, visible: Any) -> Any:
    scores = form.product("*td", ".sd", "*ts", query, key, scores=True) * form.scale
    if visible is None:
        return scores
    return jnp.where(visible, scores, -jnp.inf if form.added is None else scores + form.added)
