"""What the tests of divided positions share."""

import jax
import jax.numpy as jnp
import numpy as np

RS = "reduce-scatter"


def same(got, want, rtol=2e-4):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10 * float(jnp.max(jnp.abs(b))))
