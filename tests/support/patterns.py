"""A step of each library to write patterns around, its data, and what a sharded one is compared by."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from zoo.parts import Draw, cross_entropy

WIDTH, HIDDEN, CLASSES, EXAMPLES = 64, 256, 16, 32
TIME, HEADS = 8, 4
DEVICES = 8


def labelled(seed=0):
    d = Draw(seed)
    return {"x": d.normal(EXAMPLES, WIDTH), "y": d.ids(CLASSES, EXAMPLES)}


def sequences(seed=0):
    d = Draw(seed)
    return {"x": d.normal(EXAMPLES, TIME, WIDTH), "y": d.normal(EXAMPLES, TIME, WIDTH)}


def per_device(batch, devices=DEVICES):
    return jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), batch)


def thrice(step, state, batch):
    for _ in range(3):
        state, told = step(state, batch)
    return state, told


def alike(got, want, rtol=2e-4):
    """The same arrays but for rounding; NNX objects by their state."""
    got, want = (jax.tree.leaves(nnx.state(x) if isinstance(x, nnx.Pytree) else x) for x in (got, want))
    for a, b in zip(map(jnp.asarray, got), map(jnp.asarray, want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(np.max(np.abs(b), initial=0)))


def layout(sharded):
    """Where each input of a step that has run lies, by its path."""
    return {leaf.path: leaf.spec for leaf in sharded.entry.plan.leaves}


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(HIDDEN)(x))
        return nn.Dense(CLASSES)(x)


momentum = optax.sgd(0.1, momentum=0.9)


def train_state():
    model = Classifier()
    params = model.init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=momentum)


def loss_and_accuracy(state, params, batch):
    logits = state.apply_fn({"params": params}, batch["x"])
    return cross_entropy(logits, batch["y"]), jnp.mean(logits.argmax(-1) == batch["y"])


def linen_step(state, batch, reduce=lambda x: x):
    def loss(params):
        return loss_and_accuracy(state, params, batch)

    (value, accuracy), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=reduce(grads)), reduce({"loss": value, "accuracy": accuracy})


@cache
def plain_linen():
    return thrice(jax.jit(linen_step), train_state(), labelled())


def nnx_made(model):
    made = model(nnx.Rngs(0))
    return made, nnx.Optimizer(made, momentum, wrt=nnx.Param)
