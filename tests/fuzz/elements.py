"""Elementwise operations, reductions, sorts, scans of sums, random numbers and dtypes."""

from .drafts import Draft, Pool, operation, ranked


@operation(6)
def elementwise(pool: Pool) -> Draft | None:
    if (x := pool.pick()) is None:
        return None
    text = pool.rng.choice(
        (
            "jnp.sin({0})", "jnp.tanh({0})", "jax.nn.relu({0})", "jax.nn.gelu({0})", "jnp.exp(-jnp.abs({0}))",
            "1 / (1 + {0} ** 2)", "jnp.log1p({0} ** 2)", "jnp.clip({0}, -1, 1)", "jnp.floor(4 * {0} + 0.123) / 4",
            "lax.stop_gradient({0})", "lax.erf({0})", "own_gradient({0})", "own_tangent({0})",
            "jnp.where({0} > 0.123, {0}, 0.1 * {0})", "jax.nn.softplus({0})", "jnp.sqrt(1 + {0} ** 2)",
        )
    )  # fmt: skip
    return Draft(text, (x,))


@operation(6)
def combined(pool: Pool) -> Draft | None:
    x = pool.pick(ranked(0))
    if x is None or (y := pool.pick(lambda t: t.floating and _broadcasts(t.shape, pool[x]))) is None:
        return None
    rng = pool.rng
    if rng.random() < 0.4:  # a bias or a scale
        shape = pool[x]
        y = pool.param(rng.choice((shape[-1:], shape[-2:], shape[-1:], (1,) * len(shape))))
    text = rng.choice(
        ("0.7 * ({0} + {1})", "{0} - 0.5 * {1}", "{0} * {1}", "jnp.maximum({0}, {1})",
         "jnp.where({0} > 0.123, {0}, {1})", "jnp.where({0} < {1} + 0.0123, 0.3 * {1}, {0})", "{0} / (1 + {1} ** 2)")
    )  # fmt: skip
    return Draft(text, (x, y))


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(a[::-1], b[::-1], strict=False))


@operation(6)
def reduction(pool: Pool) -> Draft | None:
    if (x := pool.pick(ranked(1))) is None:
        return None
    rng, axis = pool.rng, pool.axis(x)
    if pool[x][axis] == 0:
        return Draft(f"jnp.sum({{0}}, {axis})", (x,))
    text = rng.choice(
        (
            "jnp.mean({0}, {a})", "jnp.max({0}, {a})", "jnp.min({0}, {a})", "jax.nn.logsumexp({0}, {a})",
            "jnp.sqrt(0.1 + jnp.var({0}, {a}))", "jnp.prod(jnp.tanh({0}), {a})", "jax.nn.softmax({0}, {a})",
            "({0} - jnp.mean({0}, {a}, keepdims=True)) / jnp.sqrt(0.1 + jnp.var({0}, {a}, keepdims=True))",
            "{0} / (1 + jnp.max(jnp.abs({0}), {a}, keepdims=True))", "jnp.mean({0}, {a}, keepdims=True)",
            "jnp.mean({0})", "jnp.sum({0} * ({0} > 0.123), {a}) / {n}", "jax.nn.log_softmax({0}, {a}) / 3",
        )
    )  # fmt: skip
    return Draft(text.replace("{a}", str(axis)).replace("{n}", str(pool[x][axis])), (x,))


@operation(3)
def counted(pool: Pool) -> Draft | None:
    """Integers and booleans of floating values."""
    rng = pool.rng
    distinct = rng.random() < 0.4
    if (x := pool.pick(ranked(1), distinct=distinct)) is None or 0 in pool[x]:
        return None
    axis = pool.axis(x)
    choices = ("jnp.argmax({0}, {a})", "jnp.argsort({0}, {a})", "jnp.argmin({0}, {a})")
    if not distinct:
        choices = (
            "jnp.floor(4 * {0} + 0.123).astype(jnp.int32) % 8",
            "({0} > 0.123)",
            "jnp.sum({0} > 0.123, {a})",
            "jnp.any({0} > 1.123, {a})",
            "jnp.count_nonzero({0} > 0.123)",
        )
    return Draft(rng.choice(choices).replace("{a}", str(axis)), (x,))


@operation(2)
def integers(pool: Pool) -> Draft | None:
    if (i := pool.ints()) is None:
        return None
    rng, rank = pool.rng, len(pool[i])
    axis = rng.randrange(rank) if rank else 0
    text = rng.choice(
        (
            "({0} * 3 + 1) % 8", "jnp.cumsum({0}, {a}) % 8", "{0} // 2", "{0} ^ 3", "jnp.sort({0}, {a})",
            "jax.nn.one_hot({0}, 8)", "{0}.astype(jnp.float32) / 8", "{0} % 2 == 0",
            "jnp.bincount({0}.ravel(), length=8)",
            "jnp.max({0}, {a})", "({0} << 1) & 7", "jnp.roll({0}, 1, {a})",
        )
    )  # fmt: skip
    return Draft(text.replace("{a}", str(axis)), (i,))


@operation(3)
def sorted_values(pool: Pool) -> Draft | None:
    if (x := pool.pick(ranked(1, 3), distinct=True)) is None or 0 in pool[x]:
        return None
    axis, n = pool.axis(x), pool[x][-1]
    text = pool.rng.choice(
        (
            "jnp.sort({0}, {a})", "-jnp.sort(-{0}, {a})", f"lax.top_k({{0}}, {max(1, n // 2)})[0]",
            f"lax.top_k({{0}}, {max(1, n // 2)})[1]", "jnp.take_along_axis(jnp.sin({0}), jnp.argsort({0}, {a}), {a})",
            "lax.sort(({0}, jnp.cos({0})), dimension={a}, num_keys=1)[1]", "jnp.median({0}, {a})",
            "{0}[jnp.argsort({0}.reshape({0}.shape[0], -1)[:, 0])]",
        )
    )  # fmt: skip
    return Draft(text.replace("{a}", str(axis)), (x,))


@operation(3)
def cumulative(pool: Pool) -> Draft | None:
    if (x := pool.pick(ranked(1))) is None:
        return None
    axis = pool.axis(x)
    n = max(1, pool[x][axis])
    text = pool.rng.choice(
        (
            f"jnp.cumsum({{0}}, {axis}) / {n**0.5:.3f}",
            f"jnp.cumprod(jax.nn.sigmoid({{0}}), {axis})",
            f"lax.cummax({{0}}, {axis})",
            f"lax.cummin({{0}}, {axis}, reverse=True)",
            f"lax.cumsum({{0}}, {axis}, reverse=True) / {n**0.5:.3f}",
            f"lax.cumlogsumexp({{0}}, {axis}) / 2",
            f"blocks_scanned({{0}}, {axis})",
        )
    )
    return Draft(text, (x,))


@operation(3)
def drawn(pool: Pool) -> Draft | None:
    if not pool.keyed or (x := pool.pick(ranked(1))) is None:
        return None
    rng, n = pool.rng, pool.rng.randrange(100)
    key = f"jax.random.fold_in(key, {n})"
    text = rng.choice(
        (
            f"{{0}} + 0.3 * jax.random.normal({key}, {{0}}.shape, {{0}}.dtype)",
            f"jnp.where(jax.random.bernoulli({key}, 0.8, {{0}}.shape), {{0}}, 0)",
            f"{{0}} * jax.random.uniform({key}, {{0}}.shape[-1:], {{0}}.dtype)",
            f"jax.random.permutation({key}, {{0}}, axis={pool.axis(x)})",
            f"jax.random.randint({key}, {{0}}.shape[:1], 0, 8)",
            f"jax.vmap(lambda k, r: r + 0.1 * jax.random.normal(k, r.shape, r.dtype))(jax.random.split({key}, "
            f"{{0}}.shape[0]), {{0}})",
            f"{{0}}[jax.random.randint({key}, (4,), 0, {max(1, pool[x][0])})]",
        )
    )
    return Draft(text, (x,))


@operation(2)
def converted(pool: Pool) -> Draft | None:
    if (x := pool.pick()) is None:
        return None
    back = "jnp.float32" if pool.types[x].dtype == "bfloat16" else "jnp.bfloat16"
    return Draft(f"{{0}}.astype({back})", (x,))
