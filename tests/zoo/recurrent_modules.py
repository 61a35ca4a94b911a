"""Recurrent cells of the libraries: NNX and Linen over a batch, Equinox scanned within each example."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from .parts import BATCH, Draw, adam, cross_entropy, linen_variables
from .registry import Call, step

IN, HIDDEN, CLASSES, TIME = 64, 128, 32, 8


class Tagger(nnx.Module):
    """A label for each word, by a network that reads the words in order."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(128, IN, rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(IN, HIDDEN, rngs=rngs))
        self.head = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, words):
        states: Any = self.rnn(self.embed(words))
        return self.head(states)


@nnx.jit
def tagger_step(model, optimizer, words, tags):
    loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(words), tags))(model)
    optimizer.update(model, grads)
    return loss


@step(
    "nnx rnn scan",
    batch={"words": 0, "tags": 0},
    roles={"model": "params", "model.rnn.cell.rngs": "rng", "model.rnn.rngs": "rng"}
    | {"optimizer": "optimizer", "optimizer.step": None, "words": "batch", "tags": "batch"},
    mutates=True,
)
def nnx_gru(seed: int = 0) -> Call:
    d, model = Draw(seed), Tagger(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
    return Call(tagger_step, (model, optimizer, d.ids(128, BATCH, TIME), d.ids(CLASSES, BATCH, TIME)))


class Forecaster(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(IN)(nn.RNN(nn.OptimizedLSTMCell(HIDDEN))(x))


FORECASTER = Forecaster()


@jax.jit
def forecast_step(state, series):
    def loss_fn(params):
        return jnp.mean((state.apply_fn({"params": params}, series[:, :-1]) - series[:, 1:]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@step(
    "linen rnn scan",
    batch={"series": 0},
    roles={"state.params": "params", "state.opt_state": "optimizer", "state.step": None, "series": "batch"},
    feeds={"state": 0},
)
def linen_lstm(seed: int = 0) -> Call:
    """Each step of a series from the ones before."""
    series = Draw(seed).normal(BATCH, TIME + 1, IN)
    params = linen_variables(FORECASTER, seed, series[:1])["params"]
    return Call(forecast_step, (TrainState.create(apply_fn=FORECASTER.apply, params=params, tx=adam), series))


class Listener(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        cell, head = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(IN, HIDDEN, key=cell)
        self.head = eqx.nn.Linear(HIDDEN, 1, key=head)

    def __call__(self, xs):
        last, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(HIDDEN), xs)
        return self.head(last)[0]


@eqx.filter_jit
def listener_step(model, xs, ys, opt_state):
    @eqx.filter_value_and_grad
    def loss_fn(m):
        return jnp.mean(optax.sigmoid_binary_cross_entropy(jax.vmap(m)(xs), ys))

    loss, grads = loss_fn(model)
    updates, opt_state = adam.update(grads, opt_state)
    return loss, eqx.apply_updates(model, updates), opt_state


@step(
    "equinox rnn scan",
    batch={"xs": 0, "ys": 0},
    roles={"model": "params", "opt_state": "optimizer", "xs": "batch", "ys": "batch"},
    feeds={"model": 1, "opt_state": 2},
)
def equinox_gru(seed: int = 0) -> Call:
    d, model = Draw(seed), Listener(jax.random.key(seed))
    opt_state = adam.init(eqx.filter(model, eqx.is_inexact_array))
    ys = jnp.asarray(d.ids(2, BATCH), jnp.float32)
    return Call(listener_step, (model, d.normal(BATCH, TIME, IN), ys, opt_state))
