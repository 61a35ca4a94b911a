"""Losses that divide, sum or weigh in their own way, and batches that are mixed, picked or made inside."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .parts import BATCH, Draw, adam, cross_entropy, descend, mlp, mlp_params
from .registry import Call, step

SIZES = (64, 128, 64, 32)
STATE: dict[str, Any] = {
    "batch": {"x": 0, "y": 0},
    "roles": {"params": "params", "opt_state": "optimizer", "x": "batch", "y": "batch"},
    "feeds": {"params": 0, "opt_state": 1},
}
each = optax.softmax_cross_entropy_with_integer_labels


def moved(loss: Any, params: Any, opt_state: Any) -> tuple[Any, Any, jax.Array]:
    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = adam.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def labelled(seed: int) -> tuple[Any, ...]:
    d = Draw(seed)
    params = mlp_params(d, *SIZES)
    return params, adam.init(params), d.normal(BATCH, 64), d.ids(32, BATCH)


@jax.jit
def divided_step(params, opt_state, x, y):
    return moved(lambda p: jnp.sum(each(mlp(p, x), y)) / BATCH, params, opt_state)


@step("public", notes="a sum, divided by a number that is how many examples there are", **STATE)
def divided_by_a_number(seed: int = 0) -> Call:
    return Call(divided_step, labelled(seed))


@jax.jit
def length_step(params, opt_state, x, y):
    def loss_fn(p):
        penalty = 1e-4 * sum(jnp.sum(w["w"] ** 2) for w in p.values())
        return jnp.sum(each(mlp(p, x), y)) / x.shape[0] + penalty

    return moved(loss_fn, params, opt_state)


@step("public", notes="a sum divided by the length of its batch, which is a number too once traced", **STATE)
def divided_by_the_length(seed: int = 0) -> Call:
    return Call(length_step, labelled(seed))


@jax.jit
def summed_step(params, opt_state, x, y):
    return moved(lambda p: each(mlp(p, x), y).sum(), params, opt_state)


@step("public", notes="the loss is a sum over the batch", **STATE)
def summed_over_the_batch(seed: int = 0) -> Call:
    return Call(summed_step, labelled(seed))


TASKS = {"kind": 8, "age": 1, "words": 16}


class Heads(nnx.Module):
    """One trunk, three tasks, and how uncertain each is."""

    def __init__(self, rngs: nnx.Rngs):
        self.trunk = nnx.Sequential(nnx.Linear(64, 128, rngs=rngs), nnx.gelu, nnx.Linear(128, 64, rngs=rngs), nnx.gelu)
        self.heads = nnx.Dict({name: nnx.Linear(64, n, rngs=rngs) for name, n in TASKS.items()})
        self.log_variance = nnx.Param(jnp.zeros(len(TASKS)))

    def __call__(self, x):
        h = self.trunk(x)
        return {name: head(h) for name, head in self.heads.items()}


@nnx.jit
def tasks_step(model, optimizer, batch):
    def loss_fn(model):
        out = model(batch["x"])
        losses = {
            "kind": cross_entropy(out["kind"], batch["kind"]),
            "age": optax.huber_loss(out["age"][:, 0], batch["age"]).mean(),
            "words": optax.sigmoid_binary_cross_entropy(out["words"], batch["words"]).mean(),
        }
        log_variance = model.log_variance[...]
        weighted = jnp.exp(-log_variance) * jnp.stack([losses[name] for name in TASKS]) + log_variance
        return weighted.sum(), losses

    (loss, losses), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return losses | {"loss": loss}


@step(
    "public nnx",
    batch={f"batch.{name}": 0 for name in ("x", *TASKS)},
    roles={"model": "params", "optimizer": "optimizer", "optimizer.step": None, "batch": "batch"},
    mutates=True,
    notes="three losses of one trunk, weighted by parameters",
)
def nnx_several_tasks(seed: int = 0) -> Call:
    d, model = Draw(seed), Heads(nnx.Rngs(seed))
    batch = {"x": d.normal(BATCH, 64), "kind": d.ids(8, BATCH), "age": d.normal(BATCH)}
    batch["words"] = d.ids(2, BATCH, 16).astype(jnp.float32)
    return Call(tasks_step, (model, nnx.Optimizer(model, adam, wrt=nnx.Param), batch))


@jax.jit
def mixed_step(params, opt_state, rng, batch):
    """Mixup: each image with its mirror in the batch, in a drawn share; labels smoothed and mixed alike; dropout."""
    rng, mix_rng, drop_rng = jax.random.split(rng, 3)
    share = jax.random.beta(mix_rng, 0.2, 0.2)
    labels = optax.smooth_labels(jax.nn.one_hot(batch["labels"], 32), 0.1)
    images, labels = (share * x + (1 - share) * jnp.flip(x, axis=0) for x in (batch["images"], labels))

    def loss_fn(p):
        h = jax.nn.gelu(images @ p["layer0"]["w"] + p["layer0"]["b"])
        h = h * jax.random.bernoulli(drop_rng, 0.9, h.shape) / 0.9
        return optax.softmax_cross_entropy(mlp({k: p[k] for k in ("layer1", "layer2")}, h), labels).mean()

    params, opt_state, loss = moved(loss_fn, params, opt_state)
    return params, opt_state, rng, {"loss": loss, "share": share}


@step(
    "public rng",
    batch={"batch.images": 0, "batch.labels": 0},
    roles={"params": "params", "opt_state": "optimizer", "rng": "rng", "batch": "batch"},
    feeds={"params": 0, "opt_state": 1, "rng": 2},
    tolerance=1e-3,
    notes="examples are mixed with each other before the loss",
)
def mixup_and_smoothing(seed: int = 0) -> Call:
    params, opt_state, x, y = labelled(seed)
    batch = {"images": np.asarray(x), "labels": np.asarray(y)}
    return Call(mixed_step, (params, opt_state, jax.random.PRNGKey(seed), batch))


MIXING = np.random.default_rng(7).normal(size=(8, 64)).astype(np.float32)


@jax.jit
def drawn_step(params, opt_state, key):
    """The batch is drawn here: features of hidden causes, from which the sum of the causes is to be told."""
    key, batch_key = jax.random.split(key)
    causes = jax.random.normal(batch_key, (2 * BATCH, 8))
    x, y = jnp.tanh(causes @ MIXING), causes.sum(axis=-1)
    params, opt_state, loss = moved(lambda p: jnp.mean((mlp(p, x)[:, 0] - y) ** 2), params, opt_state)
    return params, opt_state, key, loss


@step(
    "public rng",
    roles={"params": "params", "opt_state": "optimizer", "key": "rng"},
    feeds={"params": 0, "opt_state": 1, "key": 2},
    notes="no batch among the arguments",
)
def batch_drawn_inside(seed: int = 0) -> Call:
    params = mlp_params(Draw(seed), *SIZES)
    return Call(drawn_step, (params, adam.init(params), jax.random.key(seed)))


ROWS = 128


def picking_step(seed: int) -> Any:
    """A step that closes over a data set, of which each call picks rows."""
    d = Draw(seed)
    images, labels = d.numpy(ROWS, 64), d.rng.integers(0, 32, ROWS)

    @jax.jit
    def train_step(params, opt_state, rows):
        x, y = jnp.asarray(images)[rows], jnp.asarray(labels)[rows]
        return moved(lambda p: cross_entropy(mlp(p, x), y), params, opt_state)

    return train_step


@step(
    "public",
    batch={"rows": 0},
    roles={"params": "params", "opt_state": "optimizer", "rows": "batch"},
    feeds={"params": 0, "opt_state": 1},
    notes="the batch is row numbers; the data lie in the program as NumPy arrays",
)
def rows_of_captured_data(seed: int = 0) -> Call:
    d = Draw(seed + 1)
    params = mlp_params(d, *SIZES)
    return Call(picking_step(seed), (params, adam.init(params), d.ids(ROWS, BATCH)))


@jax.jit
def sliced_step(params, data, i):
    """The i-th slice of a data set that comes along with each call."""
    x, y = (jax.lax.dynamic_slice_in_dim(a, i * BATCH, BATCH) for a in (data["x"], data["y"]))
    loss, grads = jax.value_and_grad(lambda p: cross_entropy(mlp(p, x), y))(params)
    return descend(params, grads), data, (i + 1) % (ROWS // BATCH), loss


@step(
    "public",
    roles={"params": "params", "data": None, "i": "other"},
    feeds={"params": 0, "i": 2},
    notes="the batch is a slice at a place that each call moves",
)
def slice_of_a_data_set(seed: int = 0) -> Call:
    d = Draw(seed)
    data = {"x": d.normal(ROWS, 64), "y": d.ids(32, ROWS)}
    return Call(sliced_step, (mlp_params(d, *SIZES), data, jnp.asarray(0)))
