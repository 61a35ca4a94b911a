"""Random expressions of arrays `c` and `t` of one shape: bodies of loops, branches and mapped functions."""

from random import Random

from .programs import Body

LEAVES = ("c", "t", "c", "0.3 * t", "-c")
# Elementwise and bounded, so that loops neither grow nor vanish.
UNARY = (
    "jnp.sin({})",
    "jnp.tanh({})",
    "0.5 * {} + 0.1",
    "jax.nn.sigmoid({})",
    "jnp.where({} > 0.123, c, 0.2 * t)",
    "own_gradient({})",
    "own_tangent({})",
    "jnp.exp(-jnp.abs({}))",
    "jax.nn.gelu({})",
)
BINARY = ("0.5 * ({} + {})", "{} * jnp.cos({})", "jnp.maximum({}, {})", "jnp.tanh({} - {})")
# Loops, branches and calls within a body. A `while` has no gradient, so that nothing flows back through it.
NESTED = (
    "lax.scan(lambda c, _: ({}, None), {}, None, length=2)[0]",
    "lax.fori_loop(0, 2, lambda _, c: {}, {})",
    "lax.cond(jnp.sum(c) > 0.123, lambda c: {}, lambda c: 0.5 * c, {})",
    "jax.checkpoint(lambda c: {})({})",
    "jax.jit(lambda c: {})({})",
    "lax.stop_gradient((lambda t: lax.while_loop(lambda s: (s[0] < 3) & (jnp.sum(s[1]) < 0.7), "
    "lambda s: (s[0] + 1, (lambda c: {})(s[1])), (0, lax.stop_gradient({})))[1])(lax.stop_gradient(t)))",
    "lax.switch(jnp.int32(jnp.sum(t) > 0.077), [lambda c: {}, lambda c: c * 0.3], {})",
)


def body(rng: Random, depth: int = 2) -> Body:
    """An expression of at most so many loops in each other."""
    kind = rng.random()
    if depth > 0 and kind < 0.3:
        return Body(rng.choice(NESTED), (body(rng, depth - 1), leaf(rng)))
    if kind < 0.6:
        return Body(rng.choice(BINARY), (leaf(rng), body(rng, depth - 1) if depth > 0 else leaf(rng)))
    return Body(rng.choice(UNARY), (body(rng, depth - 1) if depth > 0 else leaf(rng),))


def leaf(rng: Random) -> Body:
    return Body(rng.choice(LEAVES))
