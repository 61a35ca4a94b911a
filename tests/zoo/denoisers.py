"""Models that take noise away: DDPM with averages, flow matching, score matching with a key for each example."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from .parts import BATCH, Draw, adam, state_roles
from .registry import Call, step

BETAS = np.linspace(1e-4, 0.02, 50, dtype=np.float32)
KEPT = np.cumprod(1 - BETAS)


def sinusoids(t: jax.Array, width: int) -> jax.Array:
    """Features (..., width) of times (...)."""
    angles = t[..., None] * jnp.exp(-jnp.log(1e4) * jnp.arange(width // 2) / (width // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class TimedBlock(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, time):
        h = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(num_groups=8)(x)))
        h = h + nn.Dense(self.width)(time)[:, None, None]
        h = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(num_groups=8)(h)))
        return h + (x if x.shape[-1] == self.width else nn.Conv(self.width, (1, 1))(x))


class UNet(nn.Module):
    """Down once, a block with attention over the pixels, up again beside what was wide before."""

    @nn.compact
    def __call__(self, x, t):
        time = nn.silu(nn.Dense(64)(sinusoids(t.astype(jnp.float32), 32)))
        wide = TimedBlock(16)(nn.Conv(16, (3, 3))(x), time)
        deep = TimedBlock(32)(nn.Conv(32, (3, 3), strides=(2, 2))(wide), time)
        b, h, w, c = deep.shape
        pixels = nn.LayerNorm()(deep).reshape(b, h * w, c)
        deep = deep + nn.MultiHeadDotProductAttention(4, use_bias=False)(pixels).reshape(deep.shape)
        up = jax.image.resize(TimedBlock(32)(deep, time), (b, 2 * h, 2 * w, c), "nearest")
        joined = jnp.concatenate([wide, nn.Conv(16, (3, 3))(up)], axis=-1)
        return nn.Conv(x.shape[-1], (3, 3))(TimedBlock(16)(joined, time))


class DiffusionState(TrainState):
    ema_params: Any = None
    key: Any = None


UNET = UNet()


@jax.jit
def ddpm_step(state, images):
    key, time_key, noise_key = jax.random.split(state.key, 3)
    t = jax.random.randint(time_key, (images.shape[0],), 0, len(BETAS))
    noise = jax.random.normal(noise_key, images.shape)
    kept = jnp.asarray(KEPT)[t][:, None, None, None]
    noisy = jnp.sqrt(kept) * images + jnp.sqrt(1 - kept) * noise

    def loss_fn(params):
        return jnp.mean((state.apply_fn({"params": params}, noisy, t) - noise) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads, key=key)
    return state.replace(ema_params=optax.incremental_update(state.params, state.ema_params, 0.01)), loss


@step(
    "public linen cnn rng",
    batch={"images": 0},
    roles=state_roles("state", ema_params="other", key="rng") | {"images": "batch"},
    feeds={"state": 0},
    tolerance=2e-3,
    notes="a U-Net with times and attention; averages of the parameters in the state",
)
def linen_ddpm(seed: int = 0) -> Call:
    images = jnp.tanh(Draw(seed).normal(BATCH, 8, 8, 1))
    params = jax.jit(UNET.init)(jax.random.key(seed), images[:1], jnp.zeros(1, jnp.int32))["params"]
    more = {"ema_params": jax.tree.map(jnp.copy, params), "key": jax.random.key(seed + 1)}
    return Call(ddpm_step, (DiffusionState.create(apply_fn=UNET.apply, params=params, tx=adam, **more), images))


class Velocity(nnx.Module):
    """Where a point moves at a time; layers in a list, the time added to each."""

    def __init__(self, rngs: nnx.Rngs):
        self.lift = nnx.Linear(32, 128, rngs=rngs)
        self.times = nnx.List([nnx.Linear(16, 128, rngs=rngs) for _ in range(3)])
        self.layers = nnx.List([nnx.Linear(128, 128, rngs=rngs) for _ in range(3)])
        self.out = nnx.Linear(128, 32, rngs=rngs)

    def __call__(self, x, t):
        x, time = self.lift(x), sinusoids(100 * t, 16)
        for inner, layer in zip(self.times, self.layers, strict=True):
            x = x + layer(nnx.silu(x + inner(time)))
        return self.out(x)


@nnx.jit
def flow_step(model, optimizer, rngs, data):
    """Straight paths from noise to data; the model says how fast they go."""
    start = rngs.noise.normal(data.shape)
    t = rngs.time.uniform((data.shape[0],))
    between = t[:, None] * data + (1 - t[:, None]) * start

    def loss_fn(model):
        return jnp.square(model(between, t) - (data - start)).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@step(
    "public nnx rng",
    batch={"data": 0},
    roles={"model": "params", "optimizer": "optimizer", "optimizer.step": None, "rngs": "rng"} | {"data": "batch"},
    mutates=True,
)
def nnx_flow_matching(seed: int = 0) -> Call:
    model, rngs = Velocity(nnx.Rngs(seed)), nnx.Rngs(noise=seed, time=seed + 1)
    return Call(flow_step, (model, nnx.Optimizer(model, adam, wrt=nnx.Param), rngs, Draw(seed).normal(BATCH, 32)))


class Mixer(eqx.Module):
    """The score of one point at one time."""

    lift: eqx.nn.Linear
    blocks: list[eqx.nn.MLP]
    norms: list[eqx.nn.LayerNorm]
    out: eqx.nn.Linear
    t1: float

    def __init__(self, key: jax.Array):
        lift, out, *blocks = jax.random.split(key, 5)
        self.lift, self.out = eqx.nn.Linear(33, 64, key=lift), eqx.nn.Linear(64, 32, key=out)
        self.blocks = [eqx.nn.MLP(64, 64, 128, depth=1, activation=jax.nn.gelu, key=k) for k in blocks]
        self.norms = [eqx.nn.LayerNorm(64) for _ in blocks]
        self.t1 = 10.0

    def __call__(self, t, y):
        y = self.lift(jnp.concatenate([y, t[None] / self.t1]))
        for norm, block in zip(self.norms, self.blocks, strict=True):
            y = y + block(norm(y))
        return self.out(y)


def single_loss(model, y, t, key):
    decay = jnp.exp(-0.5 * t)
    std = jnp.sqrt(jnp.maximum(1 - decay**2, 1e-5))
    noise = jax.random.normal(key, y.shape)
    return (1 - decay) * jnp.mean((model(t, decay * y + std * noise) + noise / std) ** 2)


def batch_loss(model, data, key):
    """Times spread evenly over the batch, a key for each example."""
    n = data.shape[0]
    time_key, loss_key = jax.random.split(key)
    t = jax.random.uniform(time_key, (n,), minval=0, maxval=model.t1 / n) + (model.t1 / n) * jnp.arange(n)
    return jnp.mean(jax.vmap(lambda y, s, k: single_loss(model, y, s, k))(data, t, jax.random.split(loss_key, n)))


@eqx.filter_jit
def score_step(model, data, key, opt_state):
    loss, grads = eqx.filter_value_and_grad(batch_loss)(model, data, key)
    updates, opt_state = adam.update(grads, opt_state)
    return loss, eqx.apply_updates(model, updates), jax.random.split(key, 1)[0], opt_state


@step(
    "public equinox rng",
    batch={"data": 0},
    roles={"model": "params", "model.t1": None, "data": "batch", "key": "rng", "opt_state": "optimizer"},
    feeds={"model": 1, "key": 2, "opt_state": 3},
    notes="a Python number among the model's leaves; times from the number of examples",
)
def equinox_score_matching(seed: int = 0) -> Call:
    model = Mixer(jax.random.key(seed))
    opt_state = adam.init(eqx.filter(model, eqx.is_inexact_array))
    return Call(score_step, (model, Draw(seed).normal(BATCH, 32), jax.random.key(seed + 1), opt_state))
