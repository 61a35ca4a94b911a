"""Small train steps on images with BatchNorm, each as `make() -> (step, args)`, to be run as pipelines."""

from itertools import pairwise

import flax.linen as nn
import jax
import optax
from flax import nnx
from support.pipelined_steps import EXAMPLES, Made, normal


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (4, 8, 8):
            x = nn.Conv(features, (3, 3), strides=2)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        return nn.Dense(10)(x.mean((1, 2)))


def images():
    return normal(40, EXAMPLES, 16, 16, 3, scale=1), jax.random.randint(jax.random.key(41), (EXAMPLES,), 0, 10)


def batch_norm() -> Made:
    model, optimizer, (x, y) = Convolutions(), optax.adam(1e-2), images()
    variables = model.init(jax.random.key(0), x)

    def loss(params, stats, x, y):
        out, new = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(out, y).mean(), new["batch_stats"]

    def step(params, stats, state, x, y):
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, stats, x, y)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), stats, state, value

    params, stats = variables["params"], variables["batch_stats"]
    return step, (params, stats, optimizer.init(params), x, y)


class Net(nnx.Module):
    def __init__(self, rngs):
        sizes = (3, 4, 8, 8)
        self.convs = nnx.List([nnx.Conv(a, b, (3, 3), strides=2, rngs=rngs) for a, b in pairwise(sizes)])
        self.norms = nnx.List([nnx.BatchNorm(b, rngs=rngs) for b in sizes[1:]])
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.head(self.drop(x.mean((1, 2))))


def nnx_batch_norm() -> Made:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return step, (model, optimizer, *images())
