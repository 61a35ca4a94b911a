"""Ten train steps in plain JAX, float32, SGD with momentum: `step(state, batch) -> (state, loss)`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

EXAMPLES, TIME, WIDTH, HEADS, HIDDEN, VOCAB, LAYERS = 32, 16, 128, 4, 512, 256, 2
SIDE, CHANNELS, CLASSES = 8, (16, 64, 128), 128


class Call(NamedTuple):
    step: Callable[..., Any]
    state: Any
    batch: Any


def _weights(shapes: dict) -> dict:
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(tree, [0.05 * jax.random.normal(k, s) for k, s in zip(keys, leaves, strict=True)])


def _call(loss: Callable[..., jax.Array], params: dict, batch: Any) -> Call:
    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - 0.01 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, value

    return Call(step, {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}, batch)


def mlp(gated: bool = False) -> Call:
    """Two residual blocks; the mean squared error."""
    block = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)} | ({"gate": (WIDTH, HIDDEN)} if gated else {})
    params = _weights({f"block{i}": block for i in range(LAYERS)})

    def loss(params, batch):
        x = batch["x"]
        for p in params.values():
            hidden = jax.nn.silu(x @ p["gate"]) * (x @ p["up"]) if gated else jax.nn.gelu(x @ p["up"])
            x = x + hidden @ p["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    x = jax.random.normal(jax.random.key(1), (2, EXAMPLES, WIDTH))
    return _call(loss, params, {"x": x[0], "y": x[1]})


def cnn() -> Call:
    """Two convolutions, the mean over the pixels, one dense layer; the mean squared error."""
    a, b, c = CHANNELS
    params = _weights({"conv0": (3, 3, a, b), "conv1": (3, 3, b, c), "dense": (c, CLASSES)})
    conv = partial(
        lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )

    def loss(params, batch):
        x = jax.nn.gelu(conv(batch["image"], params["conv0"]))
        x = jax.nn.gelu(conv(x, params["conv1"]))
        return jnp.mean((x.mean((1, 2)) @ params["dense"] - batch["y"]) ** 2)

    image = jax.random.normal(jax.random.key(1), (EXAMPLES, SIDE, SIDE, a))
    return _call(loss, params, {"image": image, "y": jax.random.normal(jax.random.key(2), (EXAMPLES, CLASSES))})


def transformer(
    *,
    fused: bool = False,
    tied: bool = False,
    scan: bool = False,
    remat: bool = False,
    vocabulary: int = VOCAB,
) -> Call:
    """Pre-norm blocks of attention and MLP; next-token cross entropy. `fused`: one weight for q, k and v, laid out by
    head so that a shard holds whole heads."""
    head = WIDTH // HEADS
    qkv = {"qkv": (WIDTH, 3 * WIDTH)} if fused else {"q": (WIDTH,) * 2, "k": (WIDTH,) * 2, "v": (WIDTH,) * 2}
    shapes = {"norm0": (WIDTH,), "norm1": (WIDTH,), "out": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)} | qkv
    blocks = {k: (LAYERS, *s) for k, s in shapes.items()} if scan else {f"block{i}": shapes for i in range(LAYERS)}
    params = _weights(
        {"embed": (vocabulary, WIDTH), "blocks": blocks} | ({} if tied else {"head": (WIDTH, vocabulary)})
    )

    def norm(x, gain):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain

    def block(x, p):
        shape = (*x.shape[:2], HEADS, head)
        y = norm(x, p["norm0"])
        if fused:
            q, k, v = jnp.split((y @ p["qkv"]).reshape(*x.shape[:2], HEADS, 3 * head), 3, -1)
        else:
            q, k, v = ((y @ p[n]).reshape(shape) for n in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * head**-0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        x = x + mixed.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(norm(x, p["norm1"]) @ p["up"]) @ p["down"], None

    def loss(params, batch):
        x = params["embed"][batch["token"]]
        body = jax.checkpoint(block) if remat else block
        if scan:
            x, _ = lax.scan(body, x, params["blocks"])
        else:
            for p in params["blocks"].values():
                x, _ = body(x, p)
        logits = x @ (params["embed"].T if tied else params["head"])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["next"][..., None], -1)
        return -jnp.mean(picked)

    token = jax.random.randint(jax.random.key(1), (2, EXAMPLES, TIME), 0, vocabulary)
    return _call(loss, params, {"token": token[0], "next": token[1]})


STEPS: dict[str, Callable[[], Call]] = {
    "mlp": mlp,
    "gated mlp": partial(mlp, gated=True),
    "cnn": cnn,
    "transformer": transformer,
    "transformer, fused qkv": partial(transformer, fused=True),
    "transformer, tied": partial(transformer, tied=True),
    "transformer, scanned": partial(transformer, scan=True),
    "transformer, fused qkv, scanned": partial(transformer, fused=True, scan=True),
    "transformer, tied, scanned": partial(transformer, tied=True, scan=True),
    "transformer, remat": partial(transformer, scan=True, remat=True),
}
