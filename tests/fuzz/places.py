"""Gathers, scatters and other shapes."""

from .drafts import Draft, Pool, operation, ranked


@operation(4)
def gathered(pool: Pool) -> Draft | None:
    rng = pool.rng
    i = pool.ints()
    if i is None or (x := pool.pick(ranked(1, 3))) is None:
        return None
    if rng.random() < 0.4:
        x = pool.param((8, rng.choice((2, 4, 8))))
    shape, axis = pool[x], pool.axis(x)
    if not shape[axis]:
        return None
    n = shape[axis]
    mode = rng.choice(("", "", ', mode="clip"', ', mode="fill", fill_value=0'))
    text = rng.choice(
        (
            f"jnp.take({{0}}, {{1}} % {n}, {axis}{mode})",
            f"{{0}}[{{1}} % {shape[0] or 1}]",
            f'jnp.take({{0}}, {{1}}, {axis}, mode="clip")',
            f"{{0}}[..., {{1}} % {shape[-1] or 1}]",
            f"jnp.take_along_axis({{0}}, {{1}} % {n}, {axis})",
            f"jnp.take_along_axis({{0}}, {{1}}[..., None] % {shape[-1] or 1}, -1)",
            f"lax.dynamic_index_in_dim({{0}}, jnp.max({{1}}) % {n}, {axis}, keepdims={rng.random() < 0.5})",
            f"lax.dynamic_slice_in_dim({{0}}, jnp.sum({{1}}) % {n}, {max(1, n // 2)}, {axis})",
            f"jax.vmap(lambda r, i: r[i % {shape[1] if len(shape) > 1 and shape[1] else 1}])({{0}}, {{1}})",
        )
    )
    return Draft(text, (x, i))


@operation(4)
def scattered(pool: Pool) -> Draft | None:
    rng = pool.rng
    i, x = pool.ints(), pool.pick(ranked(1, 3))
    if i is None or x is None or not pool[x][0]:
        return None
    n, tail = pool[x][0], pool[x][1:]
    text = rng.choice(
        (
            f"jnp.zeros({(8, *tail)}, {{0}}.dtype).at[{{1}} % 8].add({{0}}) / 3",
            "jax.ops.segment_sum({0}, {1} % 4, 4) / 3",
            f"{{0}}.at[{{1}} % {n}].multiply(0.5)",
            f"{{0}}.at[jnp.sum({{1}}) % {n}].set(0.5)",
            "{0}.at[:, 0].add(0.3)",
            f"jnp.zeros({(8, *tail)}, {{0}}.dtype).at[{{1}} % 8].max({{0}})",
            # Not a part of {0} itself: XLA for one CPU device (jaxlib 0.10) may read it after it is written over.
            f"lax.dynamic_update_slice_in_dim({{0}}, jnp.full_like({{0}}[:{max(1, n // 2)}], 0.5) * jnp.mean({{0}}), "
            f"jnp.max({{1}}) % {n}, 0)",
            f"jnp.zeros(({n}, 8), {{0}}.dtype).at[jnp.arange({n}), {{1}} % 8].add(jnp.ones(({n},), {{0}}.dtype) * 0.5)"
            f" + jnp.sum({{0}}) / 50",
            f"jax.vmap(lambda r, i: r.at[i % {tail[0] if tail and tail[0] else 1}].add(0.3))({{0}}, {{1}})",
        )
    )
    return Draft(text, (x, i))


@operation(4)
def shaped(pool: Pool) -> Draft | None:
    if (x := pool.pick(ranked(1))) is None:
        return None
    rng, shape, axis = pool.rng, pool[x], pool.axis(x)
    rank, n = len(shape), shape[axis]
    merged = (*shape[: rank - 2], shape[-1] * shape[-2]) if rank > 1 else shape
    order = [*range(rank)]
    rng.shuffle(order)
    pads = tuple((rng.choice((0, 1, -1)), rng.choice((0, 2)), rng.choice((0, 0, 1))) for _ in shape)
    keeps = x in pool.distinct
    texts = (
        (f"{{0}}.reshape{merged}", keeps),
        ("{0}.ravel()", keeps),
        (f"{{0}}.reshape{(*shape[:axis], 2, n // 2, *shape[axis + 1 :])}", keeps),
        (f"{{0}}.reshape({shape[0] * (shape[1] if rank > 1 else 1)}, -1)", keeps),
        (f"{{0}}.transpose({tuple(order)})", keeps),
        (f"{{0}}[{':, ' * axis}None]", keeps),
        (f"jnp.flip({{0}}, {axis})", keeps),
        (f"jnp.roll({{0}}, {rng.choice((1, -1, 2))}, {axis})", keeps),
        (f"{{0}}[{':, ' * axis}{rng.choice(('1:', ':-1', '::2', '1::2', '::-1', ':0', '0', '-1'))}]", keeps),
        (f"lax.pad({{0}}, jnp.zeros((), {{0}}.dtype), {pads})", False),
        ("jnp.tile({0}, 2)", False),
        (f"jnp.repeat({{0}}, 2, {axis})", False),
        (f"jnp.broadcast_to({{0}}, {(2, *shape)})", False),
        ("jnp.tril({0})", False),
        ("{0}.squeeze()", keeps),
        (f"jnp.diff({{0}}, axis={axis})", False),
        (f"jnp.stack([{{0}}, 0.5 * {{0}}], {axis})", False),
        (f"jnp.split({{0}}, 2, {axis})[{rng.randrange(2)}]", keeps),
    )
    text, distinct = rng.choice(texts)
    return Draft(text, (x,), distinct)


@operation(2)
def joined(pool: Pool) -> Draft | None:
    if (x := pool.pick(ranked(1, 3))) is None:
        return None
    y = pool.pick(lambda t: t.floating and len(t.shape) == len(pool[x]))
    assert y is not None
    how = pool.rng.choice(("concatenate", "concatenate", "stack"))
    return Draft(f"jnp.{how}([{{0}}, {{1}}], {pool.axis(x)})", (x, y))
