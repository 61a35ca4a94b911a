"""Llama 3 and Qwen3 in Flax NNX: layers made by vmap, run by scan, computed again in the backward pass.

Grattafiori et al., "The Llama 3 herd of models", 2024, table 3; Yang et al., "Qwen3 technical report", 2025, table 1.
Qwen3 has a norm on queries and keys, and its small models use their embedding as the head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from .parts import Call, clipped_adamw, count, next_token_loss, texts


@dataclass(frozen=True)
class Size:
    """`groups`: heads of keys and values; `tied`: the embedding is the head, too; `head_norms`: on queries and keys."""

    layers: int
    width: int
    heads: int
    groups: int
    head: int
    hidden: int
    vocabulary: int
    base: float
    tied: bool = False
    head_norms: bool = False


LLAMA3_8B = Size(32, 4096, 32, 8, 128, 14_336, 128_256, 5e5)
LLAMA3_70B = Size(80, 8192, 64, 8, 128, 28_672, 128_256, 5e5)
QWEN3_600M = Size(28, 1024, 16, 8, 128, 3072, 151_936, 1e6, tied=True, head_norms=True)


def rotated(x: jax.Array, base: float) -> jax.Array:
    """Rotary positions on [examples, length, heads, head]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.q = linear(size.width, size.heads * size.head)
        self.k = linear(size.width, size.groups * size.head)
        self.v = linear(size.width, size.groups * size.head)
        self.out = linear(size.heads * size.head, size.width)
        if size.head_norms:
            self.q_norm = nnx.RMSNorm(size.head, dtype=jnp.bfloat16, rngs=rngs)
            self.k_norm = nnx.RMSNorm(size.head, dtype=jnp.bfloat16, rngs=rngs)
        self.size = size

    def __call__(self, x):
        size = self.size
        q, k, v = (f(x).reshape(*x.shape[:2], -1, size.head) for f in (self.q, self.k, self.v))
        if size.head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotated(q, size.base), rotated(k, size.base)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.reshape(*x.shape[:2], -1))


class Layer(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        norm = partial(nnx.RMSNorm, size.width, dtype=jnp.bfloat16, rngs=rngs)
        self.norm1, self.norm2 = norm(), norm()
        self.attention = Attention(size, rngs)
        self.gate, self.up = linear(size.width, size.hidden), linear(size.width, size.hidden)
        self.down = linear(size.hidden, size.width)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Decoder(nnx.Module):
    """bf16[examples, length, vocabulary] of tokens, i32[examples, length]. `keeps`: what of a layer is not computed
    again, as `jax.checkpoint_policies` has it; nothing by default."""

    def __init__(self, size: Size, rngs: nnx.Rngs, keeps: Callable[..., bool] | None = None):
        @nnx.split_rngs(splits=size.layers)
        @nnx.vmap
        def stack(rngs: nnx.Rngs):
            return Layer(size, rngs)

        self.embed = nnx.Embed(size.vocabulary, size.width, dtype=jnp.bfloat16, rngs=rngs)
        self.layers = stack(rngs)
        self.norm = nnx.RMSNorm(size.width, dtype=jnp.bfloat16, rngs=rngs)
        if not size.tied:
            self.head = nnx.Linear(size.width, size.vocabulary, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.tied, self.keeps = size.tied, keeps

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @partial(nnx.remat, policy=self.keeps)
        def run(x, layer):
            return layer(x)

        x = self.norm(run(self.embed(tokens), self.layers))
        return self.embed.attend(x) if self.tied else self.head(x)


@partial(nnx.jit, donate_argnums=(0, 1))
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: next_token_loss(m(batch["tokens"]), batch["next"]))(model)
    optimizer.update(model, grads)
    return loss


def call(size: Size, examples: int, length: int, keeps: Callable[..., bool] | None = None) -> Call:
    """A step on so many texts of `length` tokens; `keeps`: see `Decoder`."""
    model = nnx.eval_shape(lambda: Decoder(size, nnx.Rngs(0), keeps))
    optimizer = nnx.eval_shape(lambda m: nnx.Optimizer(m, clipped_adamw(3e-4), wrt=nnx.Param), model)
    parameters = count(nnx.state(model, nnx.Param))
    return Call(train_step, (model, optimizer, texts(examples, length)), parameters)
