"""How far two states lie apart."""

import jax
import numpy as np

WITHIN = 2e-5  # of Adam's steps: rounding of a gradient near zero turns into more


def furthest(got, want):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(
        float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)), initial=0)) for a, b in pairs
    )
