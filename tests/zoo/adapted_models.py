"""Parts that stay: low-rank factors beside a frozen base, a teacher, a network that follows as an average."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .parts import BATCH, Draw, adam, adamw, cross_entropy, mlp, mlp_params
from .registry import Call, step
from .transformers import TIME, VOCAB, Form, decode, decoder_params

RANK, FORM = 4, Form(fused=True)
ADAPTED = ("qkv", "out", "up", "down")


def merged(base: Any, factors: Any) -> Any:
    """The base with the products of the factors added to its matrices."""

    def layer(weights, low):
        return weights | {name: weights[name] + 2.0 * low[name]["a"] @ low[name]["b"] for name in ADAPTED}

    return base | {"layers": [layer(w, f) for w, f in zip(base["layers"], factors, strict=True)]}


@jax.jit
def low_rank_step(base, factors, opt_state, tokens):
    def loss_fn(factors):
        return cross_entropy(decode(merged(base, factors), tokens[:, :-1], FORM), tokens[:, 1:])

    loss, grads = jax.value_and_grad(loss_fn)(factors)
    updates, opt_state = adamw.update(grads, opt_state, factors)
    return optax.apply_updates(factors, updates), opt_state, loss


@step(
    "public transformer",
    batch={"tokens": 0},
    roles={"base": None, "factors": "params", "opt_state": "optimizer", "tokens": "batch"},
    feeds={"factors": 0, "opt_state": 1},
    notes="LoRA by hand: most of the weights never come back; one factor of each pair begins at zero",
)
def low_rank_factors(seed: int = 0) -> Call:
    d = Draw(seed)
    base = decoder_params(d, FORM)
    factors = [
        {
            name: {"a": d.weight(layer[name].shape[0], RANK), "b": jnp.zeros((RANK, layer[name].shape[1]))}
            for name in ADAPTED
        }
        for layer in base["layers"]
    ]
    return Call(low_rank_step, (base, factors, adamw.init(factors), d.ids(VOCAB, BATCH, TIME + 1)))


class Adapted(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.LoRALinear(64, 128, lora_rank=RANK, rngs=rngs)
        self.middle = nnx.LoRALinear(128, 128, lora_rank=RANK, rngs=rngs)
        self.head = nnx.Linear(128, 32, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.gelu(self.middle(nnx.gelu(self.inner(x)))))


@nnx.jit
def lora_step(model, optimizer, batch):
    def loss_fn(model):
        return cross_entropy(model(batch["x"]), batch["y"])

    loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    optimizer.update(model, grads)
    return loss


@step(
    "public nnx",
    batch={"batch.x": 0, "batch.y": 0},
    roles={"model": None, "optimizer": "optimizer", "optimizer.step": None, "batch": "batch"},
    mutates=True,
    notes="the library's own low-rank layers; gradients of one kind of variable",
)
def nnx_lora(seed: int = 0) -> Call:
    d, model = Draw(seed), Adapted(nnx.Rngs(seed))
    batch = {"x": d.normal(BATCH, 64), "y": d.ids(32, BATCH)}
    return Call(lora_step, (model, nnx.Optimizer(model, adam, wrt=nnx.LoRAParam), batch))


@jax.jit
def distil_step(student, teacher, opt_state, batch):
    """A small network learns the scores of a large one, at a temperature, and the labels."""
    heat = 4.0
    goal = jax.nn.softmax(jax.lax.stop_gradient(mlp(teacher, batch["x"])) / heat)

    def loss_fn(p):
        logits = mlp(p, batch["x"])
        soft = optax.softmax_cross_entropy(logits / heat, goal).mean() * heat**2
        return 0.7 * soft + 0.3 * cross_entropy(logits, batch["y"])

    loss, grads = jax.value_and_grad(loss_fn)(student)
    updates, opt_state = adam.update(grads, opt_state, student)
    return optax.apply_updates(student, updates), opt_state, loss


@step(
    "public",
    batch={"batch.x": 0, "batch.y": 0},
    roles={"student": "params", "teacher": None, "opt_state": "optimizer", "batch": "batch"},
    feeds={"student": 0, "opt_state": 1},
    notes="the teacher runs before the gradient call",
)
def distillation(seed: int = 0) -> Call:
    d = Draw(seed)
    student, teacher = mlp_params(d, 64, 64, 64, 32), mlp_params(d, 64, 256, 256, 32)
    batch = {"x": d.normal(BATCH, 64), "y": d.ids(32, BATCH)}
    return Call(distil_step, (student, teacher, adam.init(student), batch))


def unit(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)


@jax.jit
def own_latent_step(online, target, opt_state, key, images):
    """BYOL: each view is told from the other, which an average of the network has seen."""
    first, second = (images + 0.1 * jax.random.normal(k, images.shape) for k in jax.random.split(key))

    def loss_fn(p):
        def regression(view, other):
            told = unit(mlp(p["predictor"], mlp(p["encoder"], view)))
            seen = jax.lax.stop_gradient(unit(mlp(target, other)))
            return jnp.mean(jnp.sum((told - seen) ** 2, axis=-1))

        return regression(first, second) + regression(second, first)

    loss, grads = jax.value_and_grad(loss_fn)(online)
    updates, opt_state = adam.update(grads, opt_state, online)
    online = optax.apply_updates(online, updates)
    return online, optax.incremental_update(online["encoder"], target, 0.01), opt_state, loss


@step(
    "public contrastive rng",
    batch={"images": 0},
    roles={"online": "params", "target": "other", "opt_state": "optimizer", "key": "rng", "images": "batch"},
    feeds={"online": 0, "target": 1, "opt_state": 2},
)
def bootstrap_own_latent(seed: int = 0) -> Call:
    d = Draw(seed)
    online = {"encoder": mlp_params(d, 64, 128, 128, 32), "predictor": mlp_params(d, 32, 64, 32)}
    target = jax.tree.map(jnp.copy, online["encoder"])
    return Call(own_latent_step, (online, target, adam.init(online), jax.random.key(seed), d.normal(BATCH, 64)))
