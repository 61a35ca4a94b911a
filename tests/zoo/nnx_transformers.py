"""Transformers of NNX's own parts: unrolled with dropout, and with layers made by vmap and run by scan."""

from typing import Any

import jax
from flax import nnx

from .parts import BATCH, Draw, adam, cross_entropy
from .registry import Call, step

VOCAB, WIDTH, HEADS, HIDDEN, LAYERS, TIME = 128, 128, 8, 256, 2, 12


def sentences(seed: int) -> dict[str, jax.Array]:
    tokens = Draw(seed).ids(VOCAB, BATCH, TIME + 1)
    return {"tokens": tokens[:, :-1], "next": tokens[:, 1:]}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dropout: float):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class Decoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, dropout=0.1) for _ in range(LAYERS)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


class ScannedDecoder(nnx.Module):
    """The layers are made by vmap and run by scan."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def stack(rngs: nnx.Rngs):
            return Block(rngs, dropout=0.0)

        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = stack(rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return block(x)

        return self.head(run(self.embed(tokens), self.blocks))


@nnx.jit
def nnx_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(batch["tokens"]), batch["next"]))(model)
    optimizer.update(model, grads)
    return loss


IN_PLACE: dict[str, Any] = {
    "batch": {"batch.tokens": 0, "batch.next": 0},
    "roles": {"model": "params", "optimizer": "optimizer", "optimizer.step": None, "batch": "batch"},
    "mutates": True,
}
TREES = ("model", "optimizer.opt_state.0.mu", "optimizer.opt_state.0.nu")


@step(
    "nnx transformer rng",
    batch=IN_PLACE["batch"],
    roles=IN_PLACE["roles"] | {f"model.blocks.{i}.dropout": "rng" for i in range(LAYERS)},
    mutates=True,
    noise=tuple(f"{tree}.blocks.{i}.attention.key.bias" for tree in TREES for i in range(LAYERS)),
    notes="tied embedding; a key's bias changes no attention weight, so its gradient is rounding",
)
def nnx_transformer(seed: int = 0) -> Call:
    model = Decoder(nnx.Rngs(seed))
    return Call(nnx_step, (model, nnx.Optimizer(model, adam, wrt=nnx.Param), sentences(seed)))


@step(
    "nnx transformer scan",
    batch=IN_PLACE["batch"],
    roles=IN_PLACE["roles"] | {"model.blocks.dropout": "rng"},
    mutates=True,
    noise=tuple(f"{tree}.blocks.attention.key.bias" for tree in TREES),
)
def nnx_scanned_transformer(seed: int = 0) -> Call:
    model = ScannedDecoder(nnx.Rngs(seed))
    return Call(nnx_step, (model, nnx.Optimizer(model, adam, wrt=nnx.Param), sentences(seed)))
