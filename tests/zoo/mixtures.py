"""Mixtures of experts in the forms that people write: tokens dispatched by one-hot products, all at once or in groups;
a loop over the experts, unrolled or scanned; `vmap` over them. The dense form is in `vision_and_experts`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .parts import BATCH, Draw, descend
from .registry import Call, step

EXPERTS, BEST, TIME, WIDTH, HIDDEN, OUT = 8, 2, 12, 64, 128, 32
CAPACITY = 2  # times the rows that an expert has when all have as many
Mixture = Callable[[dict[str, jax.Array], jax.Array], jax.Array]
KNOWN: dict[str, Any] = {
    "batch": {"batch.x": 0, "batch.y": 0},
    "roles": {"params": "params", "batch": "batch"},
    "feeds": {"params": 0},
}


def slots(gates: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """GShard's masks: (..., tokens, experts, capacity), which token has which place of which expert, and the same with
    the token's share. What an expert has no place for is dropped."""
    best, chosen = lax.top_k(gates, BEST)
    one = jax.nn.one_hot(chosen, EXPERTS)
    in_order = one.swapaxes(-3, -2)  # all first choices before all second ones
    before = jnp.cumsum(in_order.reshape(*one.shape[:-3], -1, EXPERTS), axis=-2).reshape(in_order.shape) - 1
    place = (before.swapaxes(-3, -2) * one).sum(-1).astype(jnp.int32)
    taken = one[..., None] * jax.nn.one_hot(place, capacity)[..., None, :]
    share = best / best.sum(axis=-1, keepdims=True)
    return taken.sum(-3), (taken * share[..., None, None]).sum(-3)


def grouped(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Each example is a group with places of its own."""
    gates = jax.nn.softmax(x @ p["router"])
    dispatch, combine = slots(gates, CAPACITY * BEST * x.shape[1] // EXPERTS)
    rows = jnp.einsum("gsec,gsm->egcm", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("egcm,emh->egch", rows, p["up"]) + p["bias"][:, None, None])
    return jnp.einsum("gsec,egcm->gsm", combine, jnp.einsum("egch,ehm->egcm", hidden, p["down"]))


def flat(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The tokens of all examples share the places."""
    tokens = x.reshape(-1, WIDTH)
    gates = jax.nn.softmax(tokens @ p["router"])
    dispatch, combine = slots(gates, CAPACITY * BEST * len(tokens) // EXPERTS)
    rows = jnp.einsum("sec,sm->ecm", dispatch, tokens)
    hidden = jax.nn.gelu(jnp.einsum("ecm,emh->ech", rows, p["up"]) + p["bias"][:, None])
    made = jnp.einsum("ech,ehm->ecm", hidden, p["down"])
    return jnp.einsum("sec,ecm->sm", combine, made).reshape(x.shape)


def shares(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """What each expert counts for each token, 0 for those that it does not choose."""
    best, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), BEST)
    return (jax.nn.one_hot(chosen, EXPERTS) * (best / best.sum(-1, keepdims=True))[..., None]).sum(-2)


def expert(x: jax.Array, up: jax.Array, bias: jax.Array, down: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ up + bias) @ down


def unrolled(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """As Mixtral's reference: one expert after the other, its result masked."""
    share, out = shares(p, x), jnp.zeros_like(x)
    for e in range(EXPERTS):
        out = out + share[..., e, None] * expert(x, p["up"][e], p["bias"][e], p["down"][e])
    return out


def scanned(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    share = shares(p, x)

    def add(out, one):
        up, bias, down, counts = one
        return out + counts[..., None] * expert(x, up, bias, down), None

    each = p["up"], p["bias"], p["down"], jnp.moveaxis(share, -1, 0)
    return lax.scan(add, jnp.zeros_like(x), each)[0]


def mapped(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    made = jax.vmap(expert, (None, 0, 0, 0))(x, p["up"], p["bias"], p["down"])
    return jnp.einsum("bte,ebtd->btd", shares(p, x), made)


def of_experts(mixture: Mixture, layers: int = 1, *, remat: bool = False) -> Callable[..., Any]:
    """A train step of one mixture, or of several that a loop goes through."""

    def block(x, p):
        return x + mixture(p, x), None

    @jax.jit
    def train_step(params, batch):
        def loss_fn(p):
            if layers == 1:
                x, _ = block(batch["x"], p["mixture"])
            else:
                x, _ = lax.scan(jax.checkpoint(block) if remat else block, batch["x"], p["mixture"])
            return jnp.mean((x @ p["head"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return descend(params, grads), loss

    return train_step


def arguments(seed: int, layers: int = 1) -> tuple[Any, Any]:
    d, stacked = Draw(seed), (layers,) if layers > 1 else ()
    mixture = {
        "router": d.normal(*stacked, WIDTH, EXPERTS, scale=WIDTH**-0.5),
        "up": d.normal(*stacked, EXPERTS, WIDTH, HIDDEN, scale=WIDTH**-0.5),
        "bias": d.normal(*stacked, EXPERTS, HIDDEN, scale=0.1),
        "down": d.normal(*stacked, EXPERTS, HIDDEN, WIDTH, scale=HIDDEN**-0.5),
    }
    batch = {"x": d.normal(BATCH, TIME, WIDTH), "y": d.normal(BATCH, TIME, OUT)}
    return {"mixture": mixture, "head": d.weight(WIDTH, OUT)}, batch


@step("plain moe", **KNOWN)
def dispatched_in_groups(seed: int = 0) -> Call:
    return Call(of_experts(grouped), arguments(seed))


@step("plain moe", **KNOWN)
def dispatched_together(seed: int = 0) -> Call:
    return Call(of_experts(flat), arguments(seed))


@step("plain moe", **KNOWN)
def experts_in_turn(seed: int = 0) -> Call:
    return Call(of_experts(unrolled), arguments(seed))


@step("plain moe scan", **KNOWN)
def experts_scanned(seed: int = 0) -> Call:
    return Call(of_experts(scanned), arguments(seed))


@step("plain moe", **KNOWN)
def experts_mapped(seed: int = 0) -> Call:
    return Call(of_experts(mapped), arguments(seed))


@step("plain moe scan remat", **KNOWN)
def layers_of_experts(seed: int = 0) -> Call:
    """Two layers of dispatched experts in a loop, computed again for the backward pass."""
    return Call(of_experts(grouped, 2, remat=True), arguments(seed, 2))
