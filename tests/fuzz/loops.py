"""Loops, branches, checkpoints and maps over rows, with bodies that hold more of them."""

from .bodies import body
from .drafts import Draft, Pool, operation, ranked


@operation(5)
def looped(pool: Pool) -> Draft | None:
    """Scans over a dimension, with the carry and with what comes out; a mapped body has predicates for each row."""
    if (x := pool.pick(ranked(1, 3))) is None or 0 in pool[x]:
        return None
    rng, axis = pool.rng, pool.axis(x)
    along = f"jnp.moveaxis({{0}}, {axis}, 0)" if axis else "{0}"
    reverse = rng.choice(("", "", ", reverse=True", ", unroll=2"))
    text = rng.choice(
        (
            f"lax.scan(lambda c, t: ({{body}}, c), jnp.zeros_like({along}[0]), {along}{reverse})[1]",
            f"lax.scan(lambda c, t: ({{body}}, None), jnp.zeros_like({along}[0]), {along}{reverse})[0]",
            "(lambda c, t: {body})({0}, jnp.cos({0}))",
            "jax.vmap(lambda c, t: {body})({0}, jnp.cos({0}))",
            "jax.vmap(lambda c, t: {body})({0}, jnp.cos({0}))",
            "jax.vmap(jax.vmap(lambda c, t: {body}))({0}, 0.5 * {0})",
            "jax.checkpoint(lambda c, t: {body})({0}, jnp.cos({0}))",
            "lax.map(lambda c: (lambda t: {body})(0.5 * c), {0})",
            f"jax.vmap(lambda r: lax.while_loop(lambda s: jnp.sum(s * s) > {rng.choice((0.3, 1.1))}, "
            "lambda c: 0.7 * c, r))(lax.stop_gradient({0}))",
            "jax.vmap(jax.vmap(lambda t: lax.while_loop(lambda s: (s[0] < 4) & (jnp.sum(s[1]) < 0.7), "
            "lambda s: (s[0] + 1, (lambda c: {body})(s[1])), (0, 0.5 * t))[1]))(lax.stop_gradient({0}))",
            "lax.map(lambda c: (lambda t: {body})(0.5 * c), {0}, batch_size=4)",
            "jax.lax.stop_gradient(jax.vmap(lambda c: (lambda t: {body})(0.5 * c), 1, 1)({0}))",
            f"lax.fori_loop(0, {rng.choice((1, 2, 3))}, lambda _, c: (lambda t: {{body}})({{0}}), 0.5 * {{0}})",
            "jax.vmap(jax.grad(lambda c: jnp.sum((lambda t: {body})(0.5 * c))))({0})",
            "jax.checkpoint(lambda c, t: {body}, policy=jax.checkpoint_policies.dots_saveable)({0}, jnp.cos({0}))",
        )
    )
    return Draft(text, (x,), body=body(rng))


@operation(2)
def recurrent(pool: Pool) -> Draft | None:
    """A scan over positions with a matrix in its body."""
    if (x := pool.pick(ranked(3, 3))) is None or 0 in pool[x]:
        return None
    d = pool[x][-1]
    w, u = pool.param((d, d)), pool.param((d, d))
    out = pool.rng.randrange(2)
    text = (
        f"lax.scan(lambda c, t: (jnp.tanh((c @ {{1}} + t @ {{2}}) / {d**0.5:.3f}), c), jnp.zeros_like({{0}}[:, 0]), "
        f"{{0}}.swapaxes(0, 1))[{out}]"
    )
    return Draft(text + (".swapaxes(0, 1)" if out else ""), (x, w, u))


@operation(2)
def mapped_collective(pool: Pool) -> Draft | None:
    """Collectives over the axes of a `vmap`, or of one in another."""
    if (x := pool.pick(ranked(2, 3))) is None or 0 in pool[x]:
        return None
    n, m = pool[x][:2]
    text = pool.rng.choice(
        (
            'jax.vmap(lambda r: r - lax.pmean(r, "i"), axis_name="i")({0})',
            'jax.vmap(lambda r: 0.5 * r + lax.pmax(r, "i"), 1, 1, axis_name="i")({0})',
            'jax.vmap(jax.vmap(lambda e: e - lax.pmean(e, ("i", "j")), axis_name="j"), axis_name="i")({0})',
            'jax.vmap(jax.vmap(lambda e: e * lax.pmean(e, "i"), axis_name="j"), axis_name="i")({0})',
            'jax.vmap(lambda r: jnp.mean(lax.all_gather(r, "i"), 0) + r, axis_name="i")({0})',
            f'jax.vmap(lambda r: lax.ppermute(r, "i", [(k, (k + 1) % {n}) for k in range({n})]), axis_name="i")({{0}})',
            'jax.vmap(lambda r: r * (1 + lax.axis_index("i")) / 8, axis_name="i")({0})',
            f'jax.vmap(jax.vmap(lambda e: lax.psum(e, "j") / {m}, axis_name="j"), axis_name="i")({{0}})',
            "jax.vmap(jax.vmap(lambda a, b: a * b, (0, None)), (None, 0))({0}, {0})",
        )
    )
    return Draft(text, (x,))
