"""A vision transformer, a mixer and a mixture of experts, on plain arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .parts import BATCH, Draw, cross_entropy, descend
from .registry import Call, step

WIDTH, HEADS, HIDDEN, CLASSES = 128, 8, 256, 32
LABELLED: dict[str, Any] = {
    "batch": {"batch.image": 0, "batch.label": 0},
    "roles": {"params": "params", "batch": "batch"},
    "feeds": {"params": 0},
}


def normalise(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5) * scale


def vit_params(d: Draw) -> dict[str, Any]:
    layer = {"qkv": (WIDTH, 3, HEADS, WIDTH // HEADS), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    layers = [
        {name: d.normal(*shape, scale=shape[0] ** -0.5) for name, shape in layer.items()}
        | {"out": d.weight(HEADS, WIDTH // HEADS, WIDTH), "norm1": jnp.ones(WIDTH), "norm2": jnp.ones(WIDTH)}
        for _ in range(2)
    ]
    return {
        "patch": d.weight(4, 4, 3, WIDTH),
        "class": d.normal(WIDTH, scale=0.1),
        "position": d.normal(17, WIDTH, scale=0.1),
        "layers": layers,
        "head": d.weight(WIDTH, CLASSES),
    }


def vit(params: dict[str, Any], images: jax.Array) -> jax.Array:
    """Patches by a convolution, a class token before them, attention over all, the class token's logits."""
    x = jax.lax.conv_general_dilated(
        images, params["patch"], (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = x.reshape(x.shape[0], -1, WIDTH)
    first = jnp.broadcast_to(params["class"], (x.shape[0], 1, WIDTH))
    x = jnp.concatenate([first, x], axis=1) + params["position"]
    for p in params["layers"]:
        q, k, v = jnp.einsum("btd,dchk->cbthk", normalise(x, p["norm1"]), p["qkv"])
        mixed = jax.nn.dot_product_attention(q, k, v)
        x = x + jnp.einsum("bthk,hkd->btd", mixed, p["out"])
        x = x + jax.nn.gelu(normalise(x, p["norm2"]) @ p["up"]) @ p["down"]
    return x[:, 0] @ params["head"]


@jax.jit
def vit_step(params, batch):
    def loss_fn(p):
        return cross_entropy(vit(p, batch["image"]), batch["label"])

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return descend(params, grads), loss


@step("plain transformer", **LABELLED)
def vision_transformer(seed: int = 0) -> Call:
    d = Draw(seed)
    batch = {"image": d.normal(BATCH, 16, 16, 3), "label": d.ids(CLASSES, BATCH)}
    return Call(vit_step, (vit_params(d), batch))


@jax.jit
def mixer_step(params, batch):
    def loss_fn(p):
        x = batch["image"] @ p["patch"]
        mixed = jax.nn.gelu(jnp.einsum("bsd,st->btd", x, p["rows"]))
        x = x + jnp.einsum("bsd,st->btd", mixed, p["rows2"])
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        return cross_entropy(x.mean(axis=1) @ p["head"], batch["label"])

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return descend(params, grads), loss


@step("plain", **LABELLED)
def mlp_mixer(seed: int = 0) -> Call:
    """A weight mixes the 16 patches: they are as many as the examples, and not the batch."""
    d = Draw(seed)
    shapes = {"patch": (48, WIDTH), "rows": (16, 16), "rows2": (16, 16), "up": (WIDTH, HIDDEN)}
    shapes |= {"down": (HIDDEN, WIDTH), "head": (WIDTH, CLASSES)}
    params = {name: d.weight(*shape) for name, shape in shapes.items()}
    return Call(mixer_step, (params, {"image": d.normal(BATCH, 16, 48), "label": d.ids(CLASSES, BATCH)}))


def experts(p: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All experts see all tokens; the two best of each token count. Also gives the load-balancing loss."""
    gates = jax.nn.softmax(x @ p["router"])
    best, chosen = jax.lax.top_k(gates, 2)
    weights = best / best.sum(axis=-1, keepdims=True)
    share = jnp.sum(jax.nn.one_hot(chosen, gates.shape[-1]) * weights[..., None], axis=-2)
    hidden = jax.nn.gelu(jnp.einsum("btd,edh->bteh", x, p["up"]))
    out = jnp.einsum("bteh,ehd,bte->btd", hidden, p["down"], share)
    balance = gates.shape[-1] * jnp.sum(jnp.mean(share, axis=(0, 1)) * jnp.mean(gates, axis=(0, 1)))
    return x + out, balance


@jax.jit
def experts_step(params, batch):
    def loss_fn(p):
        x, balance = experts(p, batch["x"])
        return jnp.mean((x @ p["head"] - batch["y"]) ** 2) + 0.01 * balance, balance

    (loss, balance), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return descend(params, grads), {"loss": loss, "balance": balance, "norm": optax.tree.norm(grads)}


@step(
    "plain moe",
    batch={"batch.x": 0, "batch.y": 0},
    roles={"params": "params", "batch": "batch"},
    feeds={"params": 0},
)
def mixture_of_experts(seed: int = 0) -> Call:
    d, number = Draw(seed), 8
    params = {
        "router": d.weight(64, number),
        "up": d.normal(number, 64, 128, scale=64**-0.5),
        "down": d.normal(number, 128, 64, scale=128**-0.5),
        "head": d.weight(64, 32),
    }
    return Call(experts_step, (params, {"x": d.normal(BATCH, 12, 64), "y": d.normal(BATCH, 12, 32)}))
