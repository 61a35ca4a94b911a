"""Positions that are dealt out once for all causal rings of a step, and where they can't be."""

from collections import Counter
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
from support.attentions import causal, einsum, window
from support.positions import ran
from support.rings import moves, permuted, sharded
from theory.expected import F32

from jaxshard_magic.strategies.regions.zigzag_region import ZigzagRegion
from jaxshard_magic.strategies.sharded_lowering import ShardedLowering

EXAMPLES, TIME, HEADS, HEAD, WORDS, LAYERS = 4, 64, 4, 8, 61, 2
WIDTH = HEADS * HEAD


def turned(x, at):
    """Rotary positions."""
    angles = at[..., None] * 1e4 ** (-jnp.arange(HEAD // 2) / (HEAD // 2))
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def nothing(h):
    return h


def decoder(*, between=nothing, end=nothing, seen=causal, rows=nothing, weighed=False, wrap=nothing):
    """A step of a decoder with shifted tokens, learned and rotary positions and documents that are told by a running
    sum, its layers scanned; it gives back the loss of each position.

    `between`, `end`: what becomes of activations in each layer and before the logits; `rows`: of logits and targets;
    `weighed`: positions have weights.
    """

    def loss(params, tokens, weights):
        x, y = tokens[:, :-1], tokens[:, 1:]
        document, at = jnp.cumsum(x == 3, 1), jnp.arange(x.shape[1])
        h = params["embed"][x] + params["positions"][: x.shape[1]]

        def layer(h, p):
            q, k, v = ((h @ p[name]).reshape(*h.shape[:2], HEADS, HEAD) for name in "qkv")
            mask = seen(h.shape[1]) & (document[:, :, None] == document[:, None])[:, None]
            mixed = einsum(turned(q, at), turned(k, at), v, mask).reshape(h.shape)
            return h + between(jnp.tanh(mixed @ p["o"])), None

        h, _ = jax.lax.scan(wrap(layer), h, params["layers"])
        logits, y = rows(end(h) @ params["embed"].T), rows(y)
        each = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)[..., 0]
        each = each * weights[:, 1:] if weighed else each
        return each.mean(), each

    def step(params, tokens, weights):
        (value, each), grads = jax.value_and_grad(loss, has_aux=True)(params, tokens, weights)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, each

    shapes = {"embed": (WORDS, WIDTH), "positions": (TIME + 16, WIDTH)}
    shapes |= dict.fromkeys("qkvo", (LAYERS, WIDTH, WIDTH))
    keys = jax.random.split(jax.random.key(0), len(shapes) + 2)
    made = {n: jax.random.normal(k, z) * z[-1] ** -0.5 for (n, z), k in zip(shapes.items(), keys, strict=False)}
    params = {n: made[n] for n in ("embed", "positions")} | {"layers": {n: made[n] for n in "qkvo"}}
    tokens = jax.random.randint(keys[-1], (EXAMPLES, TIME + 1), 0, WORDS)
    return step, params, tokens, jax.random.uniform(keys[-2], tokens.shape)


def flat(x):
    return x.reshape(-1, *x.shape[2:])


def dropped(h):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, h.shape), h, 0)


def dealt(ring, *args):
    run = ring.planned(*args).plan.run
    assert isinstance(run, ShardedLowering)
    return bool(run.region(ZigzagRegion).zigzag.attentions)


@pytest.mark.ci
def test_of_a_decoder_only_whole_numbers_are_dealt_out():
    """Tokens, and positions that are the same for all; learned positions and their gradient are on every device. What
    each position lost is put back at the end."""
    step, *args = decoder(wrap=jax.checkpoint)
    ring = ran(sharded(step, "fsdp+sp", "cpu:8 data=2 seq=4"), step, *args)
    part = EXAMPLES * TIME * WIDTH * F32 // 8
    found, told = permuted(ring, *args)
    assert found == told == Counter({part: 6 * 3 * LAYERS})


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kinds", "strategy", "axes", "options"),
    [
        pytest.param({"weighed": True}, "sp+tp", "seq=4 model=2", {}, marks=pytest.mark.full),
        ({"wrap": jax.checkpoint}, "fsdp+sp", "data=2 seq=4", {"microbatches": 2}),
        pytest.param({"end": lambda h: h + h.mean(1, keepdims=True)}, "sp", "seq=8", {}, marks=pytest.mark.full),
        ({"between": dropped, "wrap": jax.checkpoint}, "dp+sp", "data=2 seq=4", {}),
        pytest.param({}, "sp", "seq=8", {"precision": "bf16"}, marks=pytest.mark.full),
    ],
)
def test_dealt_positions_give_the_plain_numbers(kinds, strategy, axes, options):
    step, *args = decoder(**kinds)
    ring = sharded(step, strategy, f"cpu:8 {axes}", **options)
    assert dealt(ran(ring, step, *args, rtol=3e-2 if "precision" in options else 2e-4), *args)


def unrolled(*, after=jnp.add, seen=lambda h: causal(TIME)):
    """A step of two layers of attention of activations, which it gives back. `after`: what becomes of those before an
    attention and what it gives; `seen`: its mask, of those before."""

    def step(params, x):
        def loss(params):
            h = x
            for p in params:
                q, k, v = ((h @ p[name]).reshape(*h.shape[:2], HEADS, HEAD) for name in "qkv")
                h = after(h, einsum(q, k, v, seen(h)).reshape(h.shape))
            return jnp.mean(flat(h) ** 2), h

        (value, out), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, out

    keys = jax.random.split(jax.random.key(0), 4)
    params = [{n: jax.random.normal(k, (WIDTH, WIDTH)) / 8 for n, k in zip("qkv", keys, strict=False)}] * 2
    return step, params, jax.random.normal(keys[3], (EXAMPLES, TIME, WIDTH))


@pytest.mark.ci
def test_activations_that_come_in_or_leave_are_dealt_out_and_put_back():
    step, params, x = unrolled()
    ring = ran(sharded(step), step, params, x)
    half = x.nbytes // 16
    assert [m.bytes for m in moves(ring, params, x) if m.kind == "all-gather"] == [x.nbytes]  # back, of a CPU
    found, told = permuted(ring, params, x)
    assert found == told == Counter({2 * half: 6 * 7 * 2, half: 2})


@pytest.mark.ci
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_tpu_deals_out_in_bfloat16_what_it_multiplies():
    """Activations that products alone read; what leaves the step is put back in float32. Keys and values go round in
    bfloat16, too, their gradients in float32."""
    step, *args = unrolled(after=lambda before, made: made)
    found, told = permuted(sharded(step, axes="v5e:2x4 seq=8"), *args)
    part = args[1].nbytes // 8
    assert found == told == Counter({part: 2 * 7 * 2, part // 2: 4 * 7 * 2 + 2, part // 4: 2})


@pytest.mark.parametrize(
    "kinds",
    [
        {"between": lambda h: h + jnp.cumsum(h, 1) / TIME},
        {"between": lambda h: jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1]},
        pytest.param({"end": lambda h: h + jnp.flip(h, 1)}, marks=pytest.mark.full),
        pytest.param({"rows": lambda x: x[:, 1:]}, marks=pytest.mark.full),
        pytest.param({"seen": lambda n: window(n, 12)}, marks=pytest.mark.ci),
    ],
)
def test_what_needs_positions_in_their_order_keeps_them_there(kinds):
    step, *args = decoder(**kinds)
    assert not dealt(sharded(step), *args)


def test_a_mask_of_activations_is_not_dealt_out():
    """Which keys are seen is read in order, and depends on what the first attention made."""

    def seen(h):
        return causal(TIME) & (h[..., 0] > 0)[:, None, None, :]

    step, params, x = unrolled(seen=seen)
    ring = sharded(lambda *args: step(*args)[:2])
    assert not dealt(ring, params, x)
    assert dealt(ring, params[:1], x)


@pytest.mark.parametrize(("axes", "times"), [("cpu:8 seq=8", 64), ("v5e:2x4 seq=8", 16)])
def test_dealing_out_is_left_to_each_attention_where_it_sends_more(axes, times):
    """Numbers drawn for dropout are dealt out, too: more than what one layer's attention moves, of which a TPU sends
    the most in bfloat16."""

    def often(h):
        kept = jax.random.bernoulli(jax.random.key(0), 0.9, (times, *h.shape))
        return h * jnp.mean(kept, 0)

    step, *args = decoder(between=often)
    assert not dealt(sharded(step, axes=axes), *args)
