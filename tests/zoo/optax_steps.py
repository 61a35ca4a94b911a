"""Steps that differ by their optimizer: chains, masks, schedules, averages, L-BFGS, mixed precision."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .parts import BATCH, Draw, adam, cross_entropy, mlp, mlp_params
from .registry import Call, step

SIZES = (64, 256, 32)
STATE: dict[str, Any] = {
    "batch": {"batch.x": 0, "batch.y": 0},
    "roles": {"params": "params", "opt_state": "optimizer", "batch": "batch"},
    "feeds": {"params": 0, "opt_state": 1},
}


def loss_fn(params, batch):
    return cross_entropy(mlp(params, batch["x"]), batch["y"])


def inputs(seed: int, tx: optax.GradientTransformation) -> tuple[Any, Any, dict[str, jax.Array]]:
    d = Draw(seed)
    params = mlp_params(d, *SIZES)
    return params, tx.init(params), {"x": d.normal(BATCH, 64), "y": d.ids(32, BATCH)}


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


chain = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 5, 50), weight_decay=0.1, mask=matrices),
)


@jax.jit
def chain_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = chain.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


@step("optax", **STATE)
def clip_schedule_masked_decay(seed: int = 0) -> Call:
    """A norm over all gradients, a rate from the counter, weight decay on matrices only."""
    return Call(chain_step, inputs(seed, chain))


every_second = optax.MultiSteps(adam, every_k_schedule=2).gradient_transformation()


@jax.jit
def multi_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = every_second.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


@step("optax", notes="the parameters move in every second call: a cond inside", **STATE)
def multi_steps(seed: int = 0) -> Call:
    return Call(multi_step, inputs(seed, every_second))


momentum = optax.sgd(0.1, momentum=0.9, nesterov=True)


@jax.jit
def average_step(params, opt_state, average, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = momentum.update(grads, opt_state)
    params = optax.apply_updates(params, updates)
    return params, opt_state, optax.incremental_update(params, average, 0.1), loss


@step(
    "optax",
    batch=STATE["batch"],
    roles=STATE["roles"] | {"average": "other"},
    feeds=STATE["feeds"] | {"average": 2},
)
def average_of_parameters(seed: int = 0) -> Call:
    params, opt_state, batch = inputs(seed, momentum)
    return Call(average_step, (params, opt_state, jax.tree.map(jnp.copy, params), batch))


lbfgs = optax.lbfgs(memory_size=4, linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=5))


@jax.jit
def lbfgs_step(params, opt_state, batch):
    def value_fn(p):
        return jnp.mean((mlp(p, batch["x"]) - batch["y"]) ** 2)

    value, grads = optax.value_and_grad_from_state(value_fn)(params, state=opt_state)
    updates, opt_state = lbfgs.update(grads, opt_state, params, value=value, grad=grads, value_fn=value_fn)
    return optax.apply_updates(params, updates), opt_state, value


@step("optax", tolerance=1e-3, notes="the line search calls the loss in a while loop", **STATE)
def lbfgs_line_search(seed: int = 0) -> Call:
    d = Draw(seed)
    params = mlp_params(d, *SIZES)
    batch = {"x": d.normal(BATCH, 64), "y": d.normal(BATCH, 32)}
    return Call(lbfgs_step, (params, lbfgs.init(params), batch))


momentum_bf16 = optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16)


@jax.jit
def mixed_step(params, opt_state, batch):
    def mixed_loss(p):
        half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)
        logits = mlp(half, batch["x"].astype(jnp.bfloat16)).astype(jnp.float32)
        return 128.0 * cross_entropy(logits, batch["y"])

    loss, grads = jax.value_and_grad(mixed_loss)(params)
    grads = jax.tree.map(lambda g: g / 128.0, grads)
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
    updates, new_state = momentum_bf16.update(grads, opt_state)
    new, old = (optax.apply_updates(params, updates), new_state), (params, opt_state)
    params, opt_state = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    return params, opt_state, loss / 128.0


@step("optax", tolerance=3e-2, notes="float32 weights, bfloat16 work and momentum, a scaled loss", **STATE)
def mixed_precision(seed: int = 0) -> Call:
    return Call(mixed_step, inputs(seed, momentum_bf16))
