"""Inputs and small functions that many steps share."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

BATCH = 16

# With the usual 1e-8, an element whose gradient is next to nothing makes a full step of its rounding.
adam, adamw = optax.adam(1e-3, eps=1e-5), optax.adamw(1e-3, eps=1e-5)


class Draw:
    """Arrays drawn from one seed, always the same."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(self.rng.normal(size=shape) * scale, jnp.float32)

    def weight(self, *shape: int) -> jax.Array:
        """A weight that keeps the size of what it multiplies; the last dimension is its output."""
        return self.normal(*shape, scale=float(np.prod(shape[:-1])) ** -0.5)

    def ids(self, below: int, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.integers(0, below, shape), jnp.int32)

    def numpy(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape).astype(np.float32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def mlp_params(draw: Draw, *sizes: int) -> dict[str, dict[str, jax.Array]]:
    pairs = enumerate(itertools.pairwise(sizes))
    return {f"layer{i}": {"w": draw.weight(m, n), "b": jnp.zeros(n)} for i, (m, n) in pairs}


def mlp(params: Any, x: jax.Array) -> jax.Array:
    *hidden, last = params.values()
    for layer in hidden:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


@functools.partial(jax.jit, static_argnums=0)
def linen_variables(model: nn.Module, seed: int, example: jax.Array) -> Any:
    """The variables of a Linen module, compiled once for each module."""
    return model.init(jax.random.key(seed), example)


def descend(params: Any, gradients: Any, lr: float | jax.Array = 0.1) -> Any:
    return jax.tree.map(lambda p, g: p - lr * g, params, gradients)


def state_roles(name: str, **more: str | None) -> dict[str, str | None]:
    """What a person would say about a Linen TrainState of this name; `more`: about the fields of its own."""
    fields = {"params": "params", "opt_state": "optimizer", "step": None, **more}
    return {f"{name}.{field}": role for field, role in fields.items()}
