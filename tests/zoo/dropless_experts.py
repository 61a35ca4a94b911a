"""Mixtures of experts that drop no token: rows sorted by expert, or set at their place, and ragged products."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .parts import BATCH, Draw, cross_entropy, descend
from .registry import Call, step

WIDTH, HIDDEN, EXPERTS, BEST, LENGTH, WORDS = 32, 64, 8, 2, 12, 48
REGRESSED: dict[str, Any] = {
    "batch": {"batch.x": 0, "batch.y": 0},
    "roles": {"params": "params", "batch": "batch"},
    "feeds": {"params": 0},
}
ROUTED = "a rounded logit sends a row elsewhere; none of these is that close"


def expert_params(d: Draw, *lead: int) -> dict[str, jax.Array]:
    return {
        "route": d.normal(*lead, WIDTH, EXPERTS, scale=WIDTH**-0.5),
        "gate": d.normal(*lead, EXPERTS, WIDTH, HIDDEN, scale=WIDTH**-0.5),
        "up": d.normal(*lead, EXPERTS, WIDTH, HIDDEN, scale=WIDTH**-0.5),
        "down": d.normal(*lead, EXPERTS, HIDDEN, WIDTH, scale=HIDDEN**-0.5),
    }


def of_sorted(p: dict[str, jax.Array], rows: jax.Array, sizes: jax.Array) -> jax.Array:
    hidden = jax.nn.silu(lax.ragged_dot(rows, p["gate"], sizes)) * lax.ragged_dot(rows, p["up"], sizes)
    return lax.ragged_dot(hidden, p["down"], sizes)


def permuted(p: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As in MaxText: rows are looked up in the order of their experts, and back by the inverse permutation."""
    flat = x.reshape(-1, WIDTH)
    gates = jax.nn.softmax(flat @ p["route"])
    weights, chosen = lax.top_k(gates, BEST)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    experts = chosen.ravel()
    order = jnp.argsort(experts)
    sizes = jnp.bincount(experts, length=EXPERTS)
    made = of_sorted(p, jnp.take(flat, order // BEST, axis=0), sizes)
    back = jnp.take(made, jnp.argsort(order), axis=0).reshape(-1, BEST, WIDTH)
    share = sizes / experts.shape[0]
    balance = EXPERTS * jnp.sum(share * gates.mean(axis=0))
    return x + jnp.einsum("bkd,bk->bd", back, weights).reshape(x.shape), balance


@jax.jit
def permuted_step(params, batch):
    def loss_fn(p):
        x, balance = permuted(p["experts"], batch["x"])
        return jnp.mean((x @ p["head"] - batch["y"]) ** 2) + 0.01 * balance, balance

    (loss, balance), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return descend(params, grads), {"loss": loss, "balance": balance}


def regression(d: Draw) -> dict[str, jax.Array]:
    return {"x": d.normal(BATCH, LENGTH, WIDTH), "y": d.normal(BATCH, LENGTH, WIDTH)}


@step("plain moe", **REGRESSED, notes=ROUTED)
def dropless_permuted(seed: int = 0) -> Call:
    d = Draw(seed)
    params = {"experts": expert_params(d), "head": d.weight(WIDTH, WIDTH)}
    return Call(permuted_step, (params, regression(d)))


def added(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Rows of tokens, a token BEST times, multiplied by their gates and added up where they came from."""
    flat = x.reshape(-1, WIDTH)
    scores = jax.nn.softmax(flat @ p["route"])
    gates, chosen = lax.top_k(scores, BEST)
    experts = chosen.reshape(-1)
    order = jnp.argsort(experts, stable=True)
    rows = order // BEST
    sizes = jnp.sum(jax.nn.one_hot(experts, EXPERTS, dtype=jnp.int32), axis=0)
    made = of_sorted(p, flat[rows], sizes) * gates.reshape(-1)[order][:, None]
    return x + jnp.zeros_like(flat).at[rows].add(made).reshape(x.shape)


@jax.jit
def scanned_step(params, batch):
    def loss_fn(p):
        x, _ = lax.scan(jax.checkpoint(lambda x, layer: (added(layer, x), None)), batch["x"], p["layers"])
        return jnp.mean((x @ p["head"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return descend(params, grads), loss


@step("plain moe scan remat", **REGRESSED, notes=ROUTED)
def dropless_scanned(seed: int = 0) -> Call:
    d = Draw(seed)
    params = {"layers": expert_params(d, 2), "head": d.weight(WIDTH, WIDTH)}
    return Call(scanned_step, (params, regression(d)))


def placed(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The best expert alone; no sort: a row's place is how many of its expert came before it."""
    flat = x.reshape(-1, WIDTH)
    gates = jax.nn.softmax(flat @ p["route"])
    expert = jnp.argmax(gates, axis=-1)
    mine = jax.nn.one_hot(expert, EXPERTS, dtype=jnp.int32)
    sizes = mine.sum(axis=0)
    before = jnp.cumsum(sizes) - sizes
    place = jnp.sum(mine * (jnp.cumsum(mine, axis=0) - 1 + before), axis=-1)
    made = of_sorted(p, jnp.zeros_like(flat).at[place].set(flat), sizes)[place]
    return x + (made * jnp.max(gates, axis=-1, keepdims=True)).reshape(x.shape)


@jax.jit
def placed_step(params, batch):
    def loss_fn(p):
        x = batch["x"]
        for layer in p["layers"]:
            x = placed(layer, x)
        return jnp.mean((x @ p["head"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return descend(params, grads), loss


@step("plain moe", **REGRESSED, notes=ROUTED)
def dropless_placed(seed: int = 0) -> Call:
    d = Draw(seed)
    params = {"layers": [expert_params(d) for _ in range(2)], "head": d.weight(WIDTH, WIDTH)}
    return Call(placed_step, (params, regression(d)))


def mixed(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Causal attention of four heads, then experts; expert and row are sorted together."""
    heads = x.reshape(*x.shape[:2], 4, -1)
    q, k, v = (jnp.einsum("bthd,hde->bthe", heads, p[name]) for name in ("q", "k", "v"))
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
    flat = x.reshape(-1, WIDTH)
    scores = jax.nn.softmax(flat @ p["route"])
    gates, chosen = lax.top_k(scores, BEST)
    experts = chosen.reshape(-1)
    _, order = lax.sort_key_val(experts, jnp.arange(experts.shape[0]))
    sizes = jnp.sum(experts[:, None] == jnp.arange(EXPERTS), axis=0, dtype=jnp.int32)
    made = of_sorted(p, jnp.repeat(flat, BEST, axis=0)[order], sizes)
    back = jnp.zeros_like(made).at[order].set(made).reshape(-1, BEST, WIDTH)
    return x + jnp.sum(back * gates[..., None], axis=1).reshape(x.shape)


@jax.jit
def language_step(params, batch):
    def loss_fn(p):
        x = p["embedding"][batch["tokens"]]
        for layer in p["layers"]:
            x = mixed(layer, x)
        return cross_entropy(x @ p["embedding"].T, batch["next"])

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return descend(params, grads), loss


@step(
    "plain moe transformer",
    batch={"batch.tokens": 0, "batch.next": 0},
    roles={"params": "params", "batch": "batch"},
    feeds={"params": 0},
    notes=ROUTED,
)
def dropless_language_model(seed: int = 0) -> Call:
    d, each = Draw(seed), WIDTH // 4
    layers = [
        expert_params(d)
        | {name: d.normal(4, each, each, scale=each**-0.5) for name in ("q", "k", "v")}
        | {"out": d.weight(WIDTH, WIDTH)}
        for _ in range(2)
    ]
    batch = {"tokens": d.ids(WORDS, BATCH, LENGTH), "next": d.ids(WORDS, BATCH, LENGTH)}
    return Call(language_step, ({"embedding": d.normal(WORDS, WIDTH), "layers": layers}, batch))
