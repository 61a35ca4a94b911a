"""What the tests of divided positions share."""

import jax
import jax.numpy as jnp
import numpy as np

RS = "reduce-scatter"


def same(got, want, rtol=2e-4):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10 * float(jnp.max(jnp.abs(b))))


def ran(sharded, step, params, *batch, rtol=2e-4):
    """`sharded`, which has run five times with the numbers of the plain `step`: what each gives, and the parameters
    that the last has."""
    plain, ours, theirs = jax.jit(step), params, params
    for _ in range(5):
        ours, *found = sharded(ours, *batch)
        theirs, *wanted = plain(theirs, *batch)
        same(found, wanted, rtol)
    same(ours, theirs, max(1e-3, 2 * rtol))
    return sharded
