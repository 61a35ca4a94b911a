"""A decoder on plain arrays, two layers, in the forms that people write it in."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .parts import BATCH, Draw, adamw, cross_entropy
from .registry import Call, step

VOCAB, WIDTH, HEADS, HIDDEN, LAYERS, TIME = 128, 128, 8, 256, 2, 16


@dataclass(frozen=True)
class Form:
    """How the same network is written down."""

    fused: bool = False
    gated: bool = False
    tied: bool = False
    scanned: bool = False
    remat: Callable[..., Any] | None = None


def layer_params(d: Draw, form: Form) -> dict[str, jax.Array]:
    square = {name: d.weight(WIDTH, WIDTH) for name in ("q", "k", "v")}
    projections = {"qkv": jnp.concatenate(list(square.values()), axis=1)} if form.fused else square
    gate = {"gate": d.weight(WIDTH, HIDDEN)} if form.gated else {}
    mlp = gate | {"up": d.weight(WIDTH, HIDDEN), "down": d.weight(HIDDEN, WIDTH)}
    norms = {"norm1": jnp.ones(WIDTH), "norm2": jnp.ones(WIDTH)}
    return projections | {"out": d.weight(WIDTH, WIDTH)} | mlp | norms


def decoder_params(d: Draw, form: Form) -> dict[str, Any]:
    layers = [layer_params(d, form) for _ in range(LAYERS)]
    head = {} if form.tied else {"head": d.weight(WIDTH, VOCAB)}
    return head | {
        "embed": d.normal(VOCAB, WIDTH, scale=WIDTH**-0.5),
        "position": d.normal(TIME, WIDTH, scale=0.1),
        "layers": jax.tree.map(lambda *x: jnp.stack(x), *layers) if form.scanned else layers,
        "norm": jnp.ones(WIDTH),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * scale * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Causal attention over (batch, time, width)."""
    q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1) if "qkv" in p else (x @ p["q"], x @ p["k"], x @ p["v"])
    q, k, v = (a.reshape(*a.shape[:-1], HEADS, WIDTH // HEADS) for a in (q, k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * (WIDTH // HEADS) ** -0.5
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ p["out"]


def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    x = x + attention(p, rms_norm(x, p["norm1"]))
    h = rms_norm(x, p["norm2"])
    h = jax.nn.silu(h @ p["gate"]) * (h @ p["up"]) if "gate" in p else jax.nn.gelu(h @ p["up"])
    return x + h @ p["down"]


def decode(params: dict[str, Any], tokens: jax.Array, form: Form) -> jax.Array:
    """Logits (batch, time, vocabulary) of the next token."""
    layer = jax.checkpoint(block, policy=form.remat) if form.remat else block
    x = params["embed"][tokens] + params["position"]
    if form.scanned:
        x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params["layers"])
    else:
        for p in params["layers"]:
            x = layer(p, x)
    x = rms_norm(x, params["norm"])
    return x @ (params["embed"].T if form.tied else params["head"])


@functools.cache
def language_step(form: Form) -> Callable[..., Any]:
    @jax.jit
    def train_step(params, opt_state, tokens):
        def loss_fn(p):
            return cross_entropy(decode(p, tokens[:, :-1], form), tokens[:, 1:])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = adamw.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


def call(form: Form, seed: int) -> Call:
    d = Draw(seed)
    params = decoder_params(d, form)
    return Call(language_step(form), (params, adamw.init(params), d.ids(VOCAB, BATCH, TIME + 1)))


DECODER: dict[str, Any] = {
    "batch": {"tokens": 0},
    "roles": {"params": "params", "opt_state": "optimizer", "tokens": "batch"},
    "feeds": {"params": 0, "opt_state": 1},
}


@step("plain transformer", **DECODER)
def transformer_unrolled(seed: int = 0) -> Call:
    """Separate query, key and value; the head is its own matrix. Batch, time and head width are all 16."""
    return call(Form(), seed)


@step("plain transformer", **DECODER)
def transformer_fused_tied(seed: int = 0) -> Call:
    """One matrix for query, key and value; the embedding is the head, too."""
    return call(Form(fused=True, tied=True), seed)


@step("plain transformer", **DECODER)
def transformer_gated(seed: int = 0) -> Call:
    return call(Form(gated=True), seed)


@step("plain transformer scan", **DECODER)
def transformer_scanned(seed: int = 0) -> Call:
    """The layers are stacked and scanned over; separate projections, a gated MLP."""
    return call(Form(gated=True, scanned=True), seed)


@step("plain transformer remat", **DECODER)
def transformer_remat(seed: int = 0) -> Call:
    """Each unrolled layer keeps nothing and is computed again."""
    return call(Form(fused=True, remat=jax.checkpoint_policies.nothing_saveable), seed)


@step("plain transformer scan remat", **DECODER)
def transformer_scanned_remat(seed: int = 0) -> Call:
    """Scanned layers that keep their matrix products only."""
    return call(Form(fused=True, tied=True, scanned=True, remat=jax.checkpoint_policies.dots_saveable), seed)
