"""A step whose host function fails when a test says so."""

import jax
import numpy as np


class Fuse:
    """Lets arrays through, until it is lit: then it fails once so many have come through."""

    def __init__(self):
        self.left: int | None = None

    def __call__(self, x):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise ZeroDivisionError("in the user's layer")
        return np.asarray(x)

    def through(self, x):
        return jax.pure_callback(self, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def fused(fuse, when):
    """A layer that is a fuse, in its forward or its backward pass."""

    @jax.custom_vjp
    def layer(x):
        return fuse.through(x) if when == "forward" else x

    def backward(_, g):
        return (fuse.through(g) if when == "backward" else g,)

    layer.defvjp(lambda x: (layer(x), None), backward)
    return layer
