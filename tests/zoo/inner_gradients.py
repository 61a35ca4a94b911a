"""Gradients within and beside gradients: attacks, tasks of several steps, SAM, norms of examples, whole L-BFGS runs."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .parts import BATCH, Draw, adam, cross_entropy, descend, mlp, mlp_params
from .registry import Call, step

SIZES = (64, 128, 128, 32)
STATE: dict[str, Any] = {
    "batch": {"batch.image": 0, "batch.label": 0},
    "roles": {"params": "params", "opt_state": "optimizer", "batch": "batch"},
    "feeds": {"params": 0, "opt_state": 1},
}
momentum = optax.sgd(0.05, momentum=0.9)


def loss_fn(params, batch):
    return cross_entropy(mlp(params, batch["image"]), batch["label"])


def inputs(seed: int, tx: optax.GradientTransformation) -> tuple[Any, Any, dict[str, jax.Array]]:
    d = Draw(seed)
    params = mlp_params(d, *SIZES)
    return params, tx.init(params), {"image": d.normal(BATCH, 64), "label": d.ids(32, BATCH)}


@jax.jit
def attacked_step(params, opt_state, batch):
    """Projected gradient descent on the images, in a loop, then one step on the worst of them."""
    images, reach = batch["image"], 0.1

    def worse(_, moved):
        slopes = jax.grad(lambda x: loss_fn(params, {**batch, "image": x}))(moved)
        return jnp.clip(moved + 0.04 * jnp.sign(slopes), images - reach, images + reach)

    attacked = jax.lax.fori_loop(0, 4, worse, images)
    loss, grads = jax.value_and_grad(loss_fn)(params, {**batch, "image": attacked})
    updates, opt_state = momentum.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


@step("public", tolerance=5e-3, notes="gradients of the batch in a loop, whose result the loss reads", **STATE)
def projected_attack(seed: int = 0) -> Call:
    return Call(attacked_step, inputs(seed, momentum))


@jax.jit
def sinusoid_step(params, opt_state, tasks):
    """MAML: three inner steps within each task, and the gradient through all of them."""

    def fit(p, x, y):
        return jnp.mean((mlp(p, x) - y) ** 2)

    def after(p, task):
        def inner(p, _):
            loss, grads = jax.value_and_grad(fit)(p, task["x1"], task["y1"])
            return descend(p, grads, 0.01), loss

        p, losses = jax.lax.scan(inner, p, None, 3)
        return fit(p, task["x2"], task["y2"]), losses

    def meta_loss(p):
        each, losses = jax.vmap(after, in_axes=(None, 0))(p, tasks)
        return each.mean(), losses.mean(0)

    (loss, inner), grads = jax.value_and_grad(meta_loss, has_aux=True)(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, (loss, inner)


@step(
    "public meta scan",
    batch={f"tasks.{name}": 0 for name in ("x1", "y1", "x2", "y2")},
    roles={"params": "params", "opt_state": "optimizer", "tasks": "batch"},
    feeds={"params": 0, "opt_state": 1},
    tolerance=1e-3,
)
def meta_of_sinusoids(seed: int = 0) -> Call:
    d = Draw(seed)
    params = mlp_params(d, 1, 64, 64, 1)
    height, phase = d.normal(BATCH, 1, 1), d.normal(BATCH, 1, 1)
    tasks = {name: 2 * d.normal(BATCH, 10, 1) for name in ("x1", "x2")}
    tasks |= {f"y{i}": height * jnp.sin(tasks[f"x{i}"] + phase) for i in (1, 2)}
    return Call(sinusoid_step, (params, adam.init(params), tasks))


@jax.jit
def sharpness_step(params, opt_state, batch):
    """SAM: the gradient at the weights that the first gradient leads up to."""
    grads = jax.grad(loss_fn)(params, batch)
    norm = optax.tree.norm(grads)
    above = jax.tree.map(lambda p, g: p + 0.05 * g / (norm + 1e-12), params, grads)
    loss, grads = jax.value_and_grad(loss_fn)(above, batch)
    updates, opt_state = momentum.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


@step("public", notes="two gradient calls of one loss, the second at weights made of the first's", **STATE)
def sharpness_aware(seed: int = 0) -> Call:
    return Call(sharpness_step, inputs(seed, momentum))


@jax.jit
def noise_scale_step(params, opt_state, batch):
    """The step of the mean, beside how much the examples' own gradients differ from it."""
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    one = jax.vmap(lambda b: jax.grad(loss_fn)(params, jax.tree.map(lambda x: x[None], b)))(batch)
    squares = sum(jnp.sum(g.reshape(g.shape[0], -1) ** 2, axis=1) for g in jax.tree.leaves(one))
    updates, opt_state = momentum.update(grads, opt_state)
    told = {"loss": loss, "norms": jnp.sqrt(squares), "noise": squares.mean() - optax.tree.norm(grads) ** 2}
    return optax.apply_updates(params, updates), opt_state, told


@step("public", notes="gradients of single examples beside that of the batch", **STATE)
def gradient_noise_scale(seed: int = 0) -> Call:
    return Call(noise_scale_step, inputs(seed, momentum))


lbfgs = optax.lbfgs(memory_size=5, linesearch=optax.scale_by_backtracking_linesearch(10, store_grad=True))


@jax.jit
def fitting_run(params, x, y):
    """Iterations of L-BFGS until the gradient is small or there were four: one call is a whole fit."""

    def fun(p):
        return jnp.mean((mlp(p, x) - y) ** 2)

    value_and_grad = optax.value_and_grad_from_state(fun)

    def iterate(carry):
        params, state = carry
        value, grads = value_and_grad(params, state=state)
        updates, state = lbfgs.update(grads, state, params, value=value, grad=grads, value_fn=fun)
        return optax.apply_updates(params, updates), state

    def goes_on(carry):
        _, state = carry
        count, grads = optax.tree.get(state, "count"), optax.tree.get(state, "grad")
        return (count == 0) | ((count < 4) & (optax.tree.norm(grads) >= 1e-3))

    params, state = jax.lax.while_loop(goes_on, iterate, (params, lbfgs.init(params)))
    return params, optax.tree.get(state, "value")


@step(
    "public optax",
    batch={"x": 0, "y": 0},
    roles={"params": "params", "x": "batch", "y": "batch"},
    feeds={"params": 0},
    tolerance=2e-2,
    notes="the loop over steps lies inside; a line search in each",
)
def lbfgs_whole_fit(seed: int = 0) -> Call:
    d = Draw(seed)
    return Call(fitting_run, (mlp_params(d, 16, 64, 8), d.normal(2 * BATCH, 16), d.normal(2 * BATCH, 8)))
