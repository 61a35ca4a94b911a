"""The pictures of the README and the book: `python docs/screenshots.py`, with the extras `test` and `tpu` and Chromium.

A small transformer runs sharded on 8 simulated devices; a large one is compiled for 8 TPU chips that aren't attached,
under two strategies. Their reports are drawn in a real browser, in light and dark. Names choose some of the pictures.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec
from support.browsing import Stage, chromium, stage

import jaxshard_magic
from jaxshard_magic.report import Report

IMAGES = Path(__file__).parent / "images"


@dataclass(frozen=True)
class Size:
    """Of a transformer and its batch."""

    width: int
    heads: int
    layers: int
    vocabulary: int
    length: int
    examples: int


SMALL = Size(width=256, heads=8, layers=6, vocabulary=5003, length=128, examples=16)
LARGE = Size(width=4096, heads=32, layers=5, vocabulary=32_000, length=512, examples=16)  # a billion parameters


class Block(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        width = size.width
        self.norm_1, self.norm_2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(size.heads, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class GPT(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(size.vocabulary, size.width, rngs=rngs)
        self.places = nnx.Embed(size.length, size.width, rngs=rngs)
        self.blocks = nnx.List([Block(size, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.tokens.attend(self.norm(x))


@nnx.jit
def train_step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    def loss_fn(model: GPT) -> jax.Array:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def made(size: Size) -> tuple[GPT, nnx.Optimizer]:
    model = GPT(size, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)


@cache
def ran() -> Report:
    """A real run of a few steps, checked against the plain step."""
    model, optimizer = made(SMALL)
    tokens = jax.random.randint(jax.random.key(0), (SMALL.examples, SMALL.length), 0, SMALL.vocabulary)
    mesh = jaxshard_magic.mesh("cpu:8 data=4 model=2")
    step = jaxshard_magic.shard(train_step, "fsdp+tp", mesh=mesh, check=True, specs={"tokens": PartitionSpec("data")})
    for _ in range(6):
        step(model, optimizer, tokens)
    return step.report()


def compiled(strategy: str) -> Report:
    """What the compiler of a TPU says that isn't there, of shapes alone."""
    model, optimizer = nnx.eval_shape(partial(made, LARGE))
    tokens = jax.ShapeDtypeStruct((LARGE.examples, LARGE.length), jnp.int32)
    step = jaxshard_magic.shard(train_step, strategy, mesh="v5e:2x4 data=8")
    step.prepare(model, optimizer, tokens)
    return step.report()


PICTURES: dict[str, tuple[Callable[[], Report], dict[str, Any]]] = {
    "layout": (ran, {"tab": "layout", "leaf": "model.blocks.0.attention.out.kernel", "device": 5}),
    "memory": (ran, {"tab": "memory", "only": ["memory"]}),
    "communication": (ran, {"tab": "communication", "only": ["communication"]}),
    "does-not-fit": (partial(compiled, "dp"), {"only": ["header"]}),
    "fits": (partial(compiled, "fsdp"), {"only": ["header"]}),
}


def take(on: Stage, shown: Report, name: str, theme: str, only: Any = None, **traits: Any) -> Path:
    path = IMAGES / f"{name}-{theme}.png"
    on(shown, only, theme=theme, **traits)
    on.page.locator("main").evaluate("main => main.style.padding = '12px 16px'")
    on.page.mouse.move(0, 0)
    on.page.wait_for_timeout(300)
    on.page.locator("main").screenshot(path=path)
    return path


def main(*names: str) -> None:
    if not set(names) <= set(PICTURES):
        sys.exit(f"pictures: {', '.join(PICTURES)}")
    chosen = {name: (of(), traits) for name, (of, traits) in PICTURES.items() if name in names or not names}
    with chromium() as browser, stage(browser) as on:
        for name, (shown, traits) in chosen.items():
            for theme in ("light", "dark"):
                print(take(on, shown, name, theme, **traits))


if __name__ == "__main__":
    main(*sys.argv[1:])
