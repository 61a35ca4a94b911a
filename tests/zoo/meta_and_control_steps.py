"""Gradients inside gradients, gradients of single examples, and learning from rewards."""

import functools

import jax
import jax.numpy as jnp
import optax

from .parts import BATCH, Draw, adam, cross_entropy, descend, mlp, mlp_params
from .registry import Call, step

SIZES = (64, 256, 32)


def loss_fn(params, x, y):
    return cross_entropy(mlp(params, x), y)


@functools.partial(jax.jit, static_argnames="size")
def adversarial_step(params, x, y, *, size):
    """The fast gradient sign method: train on the examples moved uphill."""
    worse = x + size * jnp.sign(jax.grad(loss_fn, argnums=1)(params, x, y))
    loss, grads = jax.value_and_grad(loss_fn)(params, jax.lax.stop_gradient(worse), y)
    return descend(params, grads), loss


@step(
    "plain",
    batch={"x": 0, "y": 0},
    roles={"params": "params", "x": "batch", "y": "batch"},
    feeds={"params": 0},
    notes="the batch is differentiated, too",
)
def adversarial(seed: int = 0) -> Call:
    d = Draw(seed)
    args = mlp_params(d, *SIZES), d.normal(BATCH, 64), d.ids(32, BATCH)
    return Call(adversarial_step, args, {"size": 0.1})


@jax.jit
def meta_step(params, opt_state, tasks):
    """Model-agnostic meta-learning: one step within each task, the loss after it, averaged over tasks."""

    def after_adapting(p, task):
        adapted = descend(p, jax.grad(loss_fn)(p, task["x"], task["y"]))
        return loss_fn(adapted, task["x_query"], task["y_query"])

    def meta_loss(p):
        return jnp.mean(jax.vmap(after_adapting, in_axes=(None, 0))(p, tasks))

    loss, grads = jax.value_and_grad(meta_loss)(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


@step(
    "plain meta",
    batch={f"tasks.{name}": 0 for name in ("x", "y", "x_query", "y_query")},
    roles={"params": "params", "opt_state": "optimizer", "tasks": "batch"},
    feeds={"params": 0, "opt_state": 1},
    notes="16 tasks of 5 examples; the batch is the tasks",
)
def meta_learning(seed: int = 0) -> Call:
    d = Draw(seed)
    params = mlp_params(d, *SIZES)
    tasks = {name: d.normal(BATCH, 5, 64) for name in ("x", "x_query")}
    tasks |= {name: d.ids(32, BATCH, 5) for name in ("y", "y_query")}
    return Call(meta_step, (params, adam.init(params), tasks))


@jax.jit
def private_step(params, key, batch):
    """Each example's gradient is clipped to norm 1, noise is added to their mean (DP-SGD)."""

    def clipped(p, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(p, x[None], y[None])
        scale = jnp.minimum(1.0, 1.0 / optax.tree.norm(grads))
        return loss, jax.tree.map(lambda g: g * scale, grads)

    losses, grads = jax.vmap(clipped, in_axes=(None, 0, 0))(params, batch["x"], batch["y"])
    leaves, tree = jax.tree.flatten(grads)
    keys = jax.random.split(key, len(leaves))
    noisy = [g.mean(0) + 0.01 * jax.random.normal(k, g.shape[1:]) for g, k in zip(leaves, keys, strict=True)]
    return descend(params, jax.tree.unflatten(tree, noisy)), losses


@step(
    "plain rng",
    batch={"batch.x": 0, "batch.y": 0},
    roles={"params": "params", "key": "rng", "batch": "batch"},
    feeds={"params": 0},
)
def private_per_example(seed: int = 0) -> Call:
    d = Draw(seed)
    batch = {"x": d.normal(BATCH, 64), "y": d.ids(32, BATCH)}
    return Call(private_step, (mlp_params(d, *SIZES), jax.random.key(seed), batch))


@functools.partial(jax.jit, static_argnames="discount", donate_argnames="opt_state")
def q_step(target, online, opt_state, replay, *, discount):
    """Double Q-learning; the target follows slowly and comes back last."""

    def temporal_difference(p):
        values = jnp.take_along_axis(mlp(p, replay["state"]), replay["action"][:, None], axis=1)[:, 0]
        best = jnp.argmax(mlp(p, replay["next_state"]), axis=1)
        future = jnp.take_along_axis(mlp(target, replay["next_state"]), best[:, None], axis=1)[:, 0]
        goal = replay["reward"] + discount * jnp.where(replay["done"], 0.0, future)
        return jnp.mean(optax.huber_loss(values, jax.lax.stop_gradient(goal)))

    loss, grads = jax.value_and_grad(temporal_difference)(online)
    updates, opt_state = adam.update(grads, opt_state)
    online = optax.apply_updates(online, updates)
    return loss, opt_state, online, optax.incremental_update(online, target, 0.01)


REPLAY = ("state", "action", "reward", "next_state", "done")


@step(
    "plain rl",
    batch={f"replay.{name}": 0 for name in REPLAY},
    roles={"target": "other", "online": "params", "opt_state": "optimizer", "replay": "batch"},
    feeds={"opt_state": 1, "online": 2, "target": 3},
    notes="target and online network look the same; a boolean leaf",
)
def q_learning(seed: int = 0) -> Call:
    d = Draw(seed)
    online = mlp_params(d, *SIZES)
    values = d.normal(BATCH, 64), d.ids(32, BATCH), d.normal(BATCH), d.normal(BATCH, 64), d.ids(2, BATCH) == 1
    args = (jax.tree.map(jnp.copy, online), online, adam.init(online))
    return Call(q_step, args, {"replay": dict(zip(REPLAY, values, strict=True)), "discount": 0.9})


@functools.partial(jax.jit, static_argnums=3)
def policy_step(params, opt_state, rollout, clip):
    """Proximal policy optimisation, advantages normalised over the batch; actor and critic in one network."""

    def objective(p):
        out = mlp(p, rollout["observation"])
        logits, value = out[:, :-1], out[:, -1]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), rollout["action"][:, None], axis=1)[:, 0]
        ratio = jnp.exp(chosen - rollout["log_probability"])
        advantage = jax.nn.standardize(rollout["return"] - jax.lax.stop_gradient(value), axis=0)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)
        return -jnp.mean(gain) + 0.5 * jnp.mean((value - rollout["return"]) ** 2)

    loss, grads = jax.value_and_grad(objective)(params)
    updates, opt_state = adam.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), loss


@step(
    "plain rl",
    batch={f"rollout.{name}": 0 for name in ("observation", "action", "log_probability", "return")},
    roles={"params": "params", "opt_state": "optimizer", "rollout": "batch"},
    feeds={"params": (0, 0), "opt_state": (0, 1)},
)
def policy_optimisation(seed: int = 0) -> Call:
    d = Draw(seed)
    params = mlp_params(d, 64, 256, 33)
    rollout = {"observation": d.normal(BATCH, 64), "action": d.ids(32, BATCH)}
    rollout |= {"log_probability": d.normal(BATCH, scale=0.1) - 3.5, "return": d.normal(BATCH)}
    return Call(policy_step, (params, adam.init(params), rollout, 0.2))
