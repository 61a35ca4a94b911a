"""Flax Linen steps: a TrainState in, a TrainState out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.training.train_state import TrainState

from .parts import BATCH, Draw, adam, cross_entropy, linen_variables
from .registry import Call, step

STATE = {"state.params": "params", "state.opt_state": "optimizer", "state.step": None, "batch": "batch"}
LABELLED = {"batch.image": 0, "batch.label": 0}


class Dense(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.gelu(nn.Dense(256)(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(32)(x)


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        for width in (32, 64):
            x = nn.Conv(width, (3, 3), use_bias=False)(x)
            x = nn.gelu(nn.BatchNorm(use_running_average=not train)(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(32)(x.reshape(x.shape[0], -1))


PLAIN, NOISY, DROPPED, CONV = Dense(), Dense(dropout=0.1), Dense(dropout=0.5), ConvNet()


def labelled(seed: int, *shape: int) -> dict[str, Any]:
    d = Draw(seed)
    return {"image": d.numpy(BATCH, *shape), "label": d.rng.integers(0, 32, BATCH).astype(np.int32)}


@jax.jit
def state_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["image"])
        return cross_entropy(logits, batch["label"]), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
    return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}


@step("linen", batch=LABELLED, roles=STATE, feeds={"state": 0})
def linen_train_state(seed: int = 0) -> Call:
    params = linen_variables(PLAIN, seed, jnp.zeros((1, 8, 8)))["params"]
    state = TrainState.create(apply_fn=PLAIN.apply, params=params, tx=adam)
    return Call(state_step, (state, labelled(seed, 8, 8)))


class NormState(TrainState):
    batch_stats: Any = None


@jax.jit
def norm_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
        decay = sum(jnp.sum(p**2) for p in jax.tree.leaves(params) if p.ndim > 1)
        return cross_entropy(logits, batch["label"]) + 1e-4 * decay, changed["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


@step("linen cnn", batch=LABELLED, roles=STATE | {"state.batch_stats": "other"}, feeds={"state": 0})
def linen_batch_statistics(seed: int = 0) -> Call:
    variables = linen_variables(CONV, seed, jnp.zeros((1, 8, 8, 3)))
    state = NormState.create(apply_fn=CONV.apply, tx=adam, **variables)
    return Call(norm_step, (state, labelled(seed, 8, 8, 3)))


class KeyState(TrainState):
    key: Any = None


@jax.jit
def key_step(state, batch):
    dropout = jax.random.fold_in(state.key, state.step)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["image"], train=True, rngs={"dropout": dropout})
        return cross_entropy(logits, batch["label"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@step(
    "linen rng",
    batch=LABELLED,
    roles=STATE | {"state.key": "rng"},
    feeds={"state": 0},
    notes="the key stays; the step counter is folded in",
)
def linen_key_inside(seed: int = 0) -> Call:
    params = linen_variables(NOISY, seed, jnp.zeros((1, 8, 8)))["params"]
    state = KeyState.create(apply_fn=NOISY.apply, params=params, tx=adam, key=jax.random.key(seed + 1))
    return Call(key_step, (state, labelled(seed, 8, 8)))


@jax.jit
def dropout_step(state, batch, dropout_key):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["image"], train=True, rngs={"dropout": dropout_key})
        return cross_entropy(logits, batch["label"])

    grads = jax.grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads)


@step("linen rng", batch=LABELLED, roles=STATE | {"dropout_key": "rng"}, feeds={"state": ()})
def linen_dropout(seed: int = 0) -> Call:
    """The old kind of key comes as an argument; only the state comes back."""
    params = linen_variables(DROPPED, seed, jnp.zeros((1, 8, 8)))["params"]
    state = TrainState.create(apply_fn=DROPPED.apply, params=params, tx=adam)
    return Call(dropout_step, (state, labelled(seed, 8, 8), jax.random.PRNGKey(seed + 1)))
