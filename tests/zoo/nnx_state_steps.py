"""Flax NNX steps written as functions: the modules travel as states beside a graph definition."""

import functools
from typing import Any

import jax
import optax
from flax import nnx

from .nnx_steps import MLP, vectors
from .parts import adam, adamw, cross_entropy
from .registry import Call, step

XY: dict[str, Any] = {"batch.x": 0, "batch.y": 0}


@jax.jit
def merged_step(graphdef, state, batch):
    model, optimizer, metrics = nnx.merge(graphdef, state)

    def loss_fn(m):
        logits = m(batch["x"])
        return cross_entropy(logits, batch["y"]), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=loss, logits=logits, labels=batch["y"])
    optimizer.update(model, grads)
    return nnx.state((model, optimizer, metrics)), loss


@step(
    "nnx",
    batch=XY,
    roles={"state.0": "params", "state.0.dropout": "rng", "state.1": "optimizer", "state.1.step": None}
    | {"state.2": "other", "batch": "batch"},
    feeds={"state": 0},
    notes="model, optimizer and metrics in one state; merged inside jax.jit",
)
def nnx_graphdef_and_state(seed: int = 0) -> Call:
    model = MLP(nnx.Rngs(seed), dropout=0.1)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    graphdef, state = nnx.split((model, nnx.Optimizer(model, adam, wrt=nnx.Param), metrics))
    return Call(merged_step, (graphdef, state, vectors(seed)))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2, 3))
def split_step(graphdef, params, rest, opt_state, batch):
    def loss_fn(p, r):
        model = nnx.merge(graphdef, p, r, copy=True)
        loss = cross_entropy(model(batch["x"]), batch["y"])
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, rest)
    updates, opt_state = adam.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), rest, opt_state, loss


@step(
    "nnx",
    batch=XY,
    roles={"params": "params", "rest": "rng", "opt_state": "optimizer", "batch": "batch"},
    feeds={"params": 0, "rest": 1, "opt_state": 2},
    notes="parameters apart from the rest; a static graph definition, an Optax state, donation",
)
def nnx_split_states(seed: int = 0) -> Call:
    graphdef, params, rest = nnx.split(MLP(nnx.Rngs(seed), dropout=0.1), nnx.Param, ...)
    return Call(split_step, (graphdef, params, rest, adam.init(params), vectors(seed)))


@nnx.jit
def owning_step(batch, optimizer):
    loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(batch["x"]), batch["y"]))(optimizer.model)
    optimizer.update(grads)
    return loss


@step(
    "nnx",
    batch=XY,
    roles={"optimizer": "optimizer", "optimizer.model": "params", "optimizer.model.dropout": "rng"}
    | {"optimizer.step": None, "batch": "batch"},
    mutates=True,
    notes="the optimizer owns the model",
)
def nnx_model_in_optimizer(seed: int = 0) -> Call:
    optimizer = nnx.ModelAndOptimizer(MLP(nnx.Rngs(seed)), adamw)
    return Call(owning_step, (vectors(seed), optimizer))


HEAD = nnx.All(nnx.Param, nnx.PathContains("head"))


@nnx.jit
def head_step(model, optimizer, batch):
    def loss_fn(m):
        return cross_entropy(m(batch["x"]), batch["y"])

    loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, HEAD))(model)
    optimizer.update(model, grads)
    return loss


@step(
    "nnx",
    batch=XY,
    roles={"model": "params", "model.inner": None, "model.dropout": "rng"}
    | {"optimizer": "optimizer", "optimizer.step": None, "batch": "batch"},
    mutates=True,
    notes="only the head is trained: no gradient reaches the frozen layer",
)
def nnx_frozen_layer(seed: int = 0) -> Call:
    model = MLP(nnx.Rngs(seed))
    return Call(head_step, (model, nnx.Optimizer(model, adam, wrt=HEAD), vectors(seed)))
