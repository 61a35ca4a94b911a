"""Rows sorted by expert, and what programs make of them and of how many each expert has."""

from .drafts import Draft, Pool, operation

# The results of `sorted_by_expert`, a name for each.
_NAMES = "back, made, rows, order, sizes, keys"
_BACK = (
    "back",
    "back",
    "back * sizes[keys][:, None] / sizes.sum()",
    "back + (sizes / keys.size)[keys][:, None]",
    "jnp.where((sizes[keys] > 2)[:, None], back, -back)",
    "jnp.cos(back) + jnp.max(sizes) / keys.size",
    "lax.cond(sizes[0] > sizes[1], jnp.sin, jnp.cos, back)",
    "jnp.zeros_like(back).at[order].set(made)",
)
_OTHERS = (
    "made",
    "made[:3]",
    "made[::-1] * back",
    "jnp.cumsum(made, 0) / keys.size",
    "jnp.sort(made, 0)",
    "made.sum(0) / keys.size",
    "made.max(0)",
    "jnp.tanh(made) @ made.T",
    "jnp.diff(made, axis=0)",
    "lax.scan(lambda c, r: (0.5 * c + r, c), jnp.zeros_like(made[0]), made)[1]",
    "rows + back",
    "rows * jnp.arange(keys.size)[:, None] / keys.size",
    "lax.dynamic_slice_in_dim(made, sizes[0], 1)",
    "jax.ops.segment_sum(rows, keys[order], 4) / keys.size",
)
_NUMBERS = (
    "sizes",
    "sizes",
    "order",
    "keys[order]",
    "jnp.argsort(order)",
    "jnp.cumsum(sizes)",
    "sizes[keys]",
    "lax.fori_loop(0, 3, lambda i, n: n + sizes, sizes)",
    "jnp.stack([sizes, sizes[::-1]])",
    "lax.scan(lambda n, k: (n.at[k].add(1), n[k]), jnp.zeros_like(sizes), keys)[1]",
    "lax.scan(lambda n, _: (n + sizes, n), jnp.zeros_like(sizes), None, length=2)[1]",
    "lax.while_loop(lambda n: n[0] < 9, lambda n: n + 1, sizes)",
)


def _rows(pool: Pool) -> str | None:
    """The name of two rows or more, all different, that have elements."""
    return pool.pick(
        lambda t: t.dtype == "float32" and len(t.shape) == 2 and t.shape[0] > 1 and t.shape[1] > 0,
        distinct=True,
    )


@operation(3)
def routed(pool: Pool) -> Draft | None:
    """Each row of the batch goes to one of four experts."""
    rng, x = pool.rng, _rows(pool)
    if x is None:
        return None
    width, hidden = pool[x][1], rng.choice((2, 4, 8))
    route, up, down = pool.param((width, 4)), pool.param((4, width, hidden)), pool.param((4, hidden, width))
    texts = rng.choice((_BACK, _BACK, _OTHERS, _NUMBERS))
    values = "sorted_by_expert({0}, {1}, {2}, {3})"
    if rng.random() < 0.2:
        values = "jax.checkpoint(lambda *arrays: sorted_by_expert(*arrays))({0}, {1}, {2}, {3})"
    return Draft(f"(lambda {_NAMES}: {rng.choice(texts)})(*{values})", (x, route, up, down))


@operation(1)
def routed_layers(pool: Pool) -> Draft | None:
    """Two layers of experts in a scan."""
    rng, x = pool.rng, _rows(pool)
    if x is None:
        return None
    width = pool[x][1]
    route, up, down = pool.param((2, width, 4)), pool.param((2, 4, width, 4)), pool.param((2, 4, 4, width))
    beside = rng.choice(("sizes", "keys", "rows", "made.sum()", "back"))
    layer = f"lambda x, w: (lambda {_NAMES}: (x + {rng.choice(_BACK)}, {beside}))(*sorted_by_expert(x, *w))"
    text = f"lax.scan({layer}, {{0}}, ({{1}}, {{2}}, {{3}}))[{rng.choice((0, 0, 1))}]"
    return Draft(text, (x, route, up, down))
