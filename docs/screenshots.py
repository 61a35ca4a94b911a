"""The README's pictures: `python docs/screenshots.py`, with the package's extra `test` and a Chromium installed.

A small transformer runs sharded on 8 simulated devices; its report is drawn in a real browser, in light and dark.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import jax
import jax.numpy as jnp
import optax
from browsing import Stage, chromium, stage
from flax import nnx
from jax.sharding import PartitionSpec

import jaxshard_magic
from jaxshard_magic.report import Report

IMAGES = Path(__file__).parent / "images"
WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 256, 8, 6, 5003, 128


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm_1, self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

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


def report() -> Report:
    """A real run of a few steps, checked against the plain step."""
    model = GPT(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)
    tokens = jax.random.randint(jax.random.key(0), (16, LENGTH), 0, VOCABULARY)
    mesh = jaxshard_magic.mesh("cpu:8 data=4 model=2")
    step = jaxshard_magic.shard(
        train_step, "fsdp+tp", mesh=mesh, check=True, specs={"tokens": PartitionSpec("data")}
    )
    for _ in range(6):
        step(model, optimizer, tokens)
    return step.report()


PICTURES: dict[str, dict[str, Any]] = {
    "layout": {"tab": "layout", "leaf": "model.blocks.0.attention.out.kernel", "device": 5},
    "memory": {"tab": "memory", "only": ["memory"]},
    "communication": {"tab": "communication", "only": ["communication"]},
}


def take(on: Stage, shown: Report, name: str, theme: str, only: Any = None, **traits: Any) -> Path:
    path = IMAGES / f"{name}-{theme}.png"
    on(shown, only, theme=theme, **traits)
    on.page.locator("main").evaluate("main => main.style.padding = '12px 16px'")
    on.page.mouse.move(0, 0)
    on.page.wait_for_timeout(300)
    on.page.locator("main").screenshot(path=path)
    return path


def main() -> None:
    shown = report()
    with chromium() as browser, stage(browser) as on:
        for name, traits in PICTURES.items():
            for theme in ("light", "dark"):
                print(take(on, shown, name, theme, **traits))


if __name__ == "__main__":
    main()
