"""Attention in Linen, with scanned layers, and in Equinox, sentence by sentence."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState

from .parts import BATCH, Draw, adam, cross_entropy, linen_variables
from .registry import Call, step

VOCAB, WIDTH, HEADS, HIDDEN, LAYERS, TIME = 128, 128, 8, 256, 2, 12


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(HEADS, use_bias=False)(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(HIDDEN)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h), None


class LinenDecoder(nn.Module):
    """Layers under nn.scan, each computed again on the way back."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCAB, WIDTH)
        scan = functools.partial(nn.scan, variable_axes={"params": 0}, split_rngs={"params": True})
        x, _ = scan(nn.remat(LinenBlock), length=LAYERS)()(embed(tokens), None)
        return embed.attend(nn.LayerNorm()(x))


DECODER = LinenDecoder()


@functools.partial(jax.jit, donate_argnames="state")
def linen_step(state, tokens):
    def loss_fn(params):
        return cross_entropy(state.apply_fn({"params": params}, tokens[:, :-1]), tokens[:, 1:])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


@step(
    "linen transformer scan remat",
    batch={"tokens": 0},
    roles={"state.params": "params", "state.opt_state": "optimizer", "state.step": None, "tokens": "batch"},
    feeds={"state": 0},
)
def linen_scanned_transformer(seed: int = 0) -> Call:
    tokens = Draw(seed).ids(VOCAB, BATCH, TIME + 1)
    params = linen_variables(DECODER, seed, tokens[:1])["params"]
    return Call(linen_step, (TrainState.create(apply_fn=DECODER.apply, params=params, tx=adam), tokens))


class Reader(eqx.Module):
    """Reads one sentence and names its class."""

    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        embed, attention, mlp = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=embed)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, 32, HIDDEN, depth=1, activation=jax.nn.gelu, key=mlp)

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h)
        return self.mlp(jnp.mean(x, axis=0))


@eqx.filter_jit
def reader_step(model, opt_state, tokens, labels):
    loss, grads = eqx.filter_value_and_grad(lambda m: cross_entropy(jax.vmap(m)(tokens), labels))(model)
    updates, opt_state = adam.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, loss


@step(
    "equinox transformer",
    batch={"tokens": 0, "labels": 0},
    roles={"model": "params", "opt_state": "optimizer", "tokens": "batch", "labels": "batch"},
    feeds={"model": 0, "opt_state": 1},
)
def equinox_attention(seed: int = 0) -> Call:
    d, model = Draw(seed), Reader(jax.random.key(seed))
    opt_state = adam.init(eqx.filter(model, eqx.is_inexact_array))
    return Call(reader_step, (model, opt_state, d.ids(VOCAB, BATCH, TIME), d.ids(32, BATCH)))
