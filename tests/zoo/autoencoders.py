"""Autoencoders and guides: keys in the state, a beta, a codebook of averages, an ELBO over particles, a flow."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from .parts import BATCH, Draw, adam, mlp, mlp_params, state_roles
from .registry import Call, step

LATENT = 16


class VAE(nn.Module):
    @nn.compact
    def __call__(self, x, key):
        h = nn.relu(nn.Dense(128)(x))
        mean, log_var = nn.Dense(LATENT, name="mean")(h), nn.Dense(LATENT, name="log_var")(h)
        z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(key, mean.shape)
        return nn.Dense(x.shape[-1])(nn.relu(nn.Dense(128)(z))), mean, log_var


class KeyState(TrainState):
    key: Any = None


VAE_MODEL = VAE()


@jax.jit
def vae_step(state, batch):
    key, z_key = jax.random.split(state.key)

    def loss_fn(params):
        logits, mean, log_var = state.apply_fn({"params": params}, batch, z_key)
        bce = optax.sigmoid_binary_cross_entropy(logits, batch).sum(axis=-1).mean()
        kld = -0.5 * jnp.sum(1 + log_var - jnp.square(mean) - jnp.exp(log_var), axis=-1).mean()
        return bce + kld, {"bce": bce, "kld": kld}

    (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, key=key), metrics | {"loss": loss}


@step(
    "public linen rng",
    batch={"batch": 0},
    roles=state_roles("state", key="rng") | {"batch": "batch"},
    feeds={"state": 0},
    notes="the key lies in the state and moves on",
)
def linen_vae_key_in_state(seed: int = 0) -> Call:
    batch = jax.nn.sigmoid(Draw(seed).normal(BATCH, 64))
    params = VAE_MODEL.init(jax.random.key(seed), batch, jax.random.key(0))["params"]
    key = jax.random.PRNGKey(seed + 1)
    return Call(vae_step, (KeyState.create(apply_fn=VAE_MODEL.apply, params=params, tx=adam, key=key), batch))


class ConvVAE(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.down1 = nnx.Conv(3, 16, (3, 3), strides=2, rngs=rngs)
        self.down2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.code = nnx.Linear(2 * 2 * 32, 2 * LATENT, rngs=rngs)
        self.spread = nnx.Linear(LATENT, 2 * 2 * 32, rngs=rngs)
        self.up1 = nnx.ConvTranspose(32, 16, (3, 3), strides=(2, 2), rngs=rngs)
        self.up2 = nnx.ConvTranspose(16, 3, (3, 3), strides=(2, 2), rngs=rngs)
        self.rngs = rngs

    def __call__(self, x):
        h = nnx.silu(self.down2(nnx.silu(self.down1(x)))).reshape(x.shape[0], -1)
        mean, log_var = jnp.split(self.code(h), 2, axis=-1)
        z = mean + jnp.exp(0.5 * log_var) * self.rngs.noise.normal(mean.shape)
        h = nnx.silu(self.spread(z)).reshape(x.shape[0], 2, 2, 32)
        return self.up2(nnx.silu(self.up1(h))), mean, log_var


@nnx.jit
def beta_step(model, optimizer, images, beta):
    def loss_fn(model):
        made, mean, log_var = model(images)
        off = jnp.sum(jnp.square(made - images), axis=(1, 2, 3)).mean()
        divergence = 0.5 * jnp.sum(jnp.exp(log_var) + mean**2 - 1 - log_var, axis=-1).mean()
        return off + beta * divergence, divergence

    (loss, divergence), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return loss, divergence


@step(
    "public nnx cnn rng",
    batch={"images": 0},
    roles={"model": "params", "model.rngs": "rng", "optimizer": "optimizer", "optimizer.step": None}
    | {"images": "batch", "beta": "other"},
    mutates=True,
    notes="the weight of the divergence is a number that changes from call to call",
)
def nnx_beta_vae(seed: int = 0) -> Call:
    model = ConvVAE(nnx.Rngs(params=seed, noise=seed + 1))
    images = Draw(seed).normal(BATCH, 8, 8, 3)
    return Call(beta_step, (model, nnx.Optimizer(model, adam, wrt=nnx.Param), images, 4.0))


CODES, PLACES, DECAY = 64, 4, 0.95


@jax.jit
def averaged_codebook_step(params, book, opt_state, x):
    """VQ-VAE: the decoder sees the nearest codes, whose gradient the encoder gets; averages of codes are the book."""

    def loss_fn(p):
        z = mlp(p["encoder"], x).reshape(-1, LATENT)
        table = book["codes"]
        distance = jnp.sum(z**2, 1, keepdims=True) - 2 * z @ table.T + jnp.sum(table**2, 1)
        ids = jnp.argmin(distance, axis=1)
        quantised = table[ids]
        commitment = jnp.mean((z - jax.lax.stop_gradient(quantised)) ** 2)
        through = (z + jax.lax.stop_gradient(quantised - z)).reshape(x.shape[0], -1)
        return jnp.mean((mlp(p["decoder"], through) - x) ** 2) + 0.25 * commitment, (z, ids)

    (loss, (z, ids)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = adam.update(grads, opt_state)
    chosen = jax.nn.one_hot(ids, CODES)
    counts = DECAY * book["counts"] + (1 - DECAY) * chosen.sum(0)
    sums = DECAY * book["sums"] + (1 - DECAY) * chosen.T @ z
    smooth = (counts + 1e-5) / (counts.sum() + CODES * 1e-5) * counts.sum()
    book = {"counts": counts, "sums": sums, "codes": sums / smooth[:, None]}
    perplexity = jnp.exp(-jnp.sum(chosen.mean(0) * jnp.log(chosen.mean(0) + 1e-10)))
    return optax.apply_updates(params, updates), book, opt_state, {"loss": loss, "perplexity": perplexity}


@step(
    "public",
    batch={"x": 0},
    roles={"params": "params", "book": "other", "opt_state": "optimizer", "x": "batch"},
    feeds={"params": 0, "book": 1, "opt_state": 2},
    notes="each example has four codes; the book is what sums and counts of all calls make of it",
)
def codebook_of_averages(seed: int = 0) -> Call:
    d = Draw(seed)
    codes = d.normal(CODES, LATENT)
    params = {
        "encoder": mlp_params(d, 64, 128, PLACES * LATENT),
        "decoder": mlp_params(d, PLACES * LATENT, 128, 64),
    }
    book = {"codes": codes, "counts": jnp.ones(CODES), "sums": codes}
    return Call(averaged_codebook_step, (params, book, adam.init(params), d.normal(BATCH, 64)))


class SVIState(NamedTuple):
    optim_state: Any
    rng_key: jax.Array


FEATURES, DATA_SIZE, PARTICLES = 64, 1024, 4


def log_normal(x: jax.Array, mean: Any = 0.0, scale: Any = 1.0) -> jax.Array:
    return jnp.sum(-0.5 * ((x - mean) / scale) ** 2 - jnp.log(scale) - 0.5 * jnp.log(2 * jnp.pi))


def elbo(params: Any, key: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Of one particle: a logistic regression whose weights' guide is a diagonal normal; the rows are some of many."""
    scale = jax.nn.softplus(params["auto_scale"])
    weights = params["auto_loc"] + scale * jax.random.normal(key, scale.shape)
    likelihood = -optax.sigmoid_binary_cross_entropy(x @ weights[:-1] + weights[-1], y).sum()
    prior = log_normal(weights) - log_normal(weights, params["auto_loc"], scale)
    return likelihood * (DATA_SIZE / x.shape[0]) + prior


@jax.jit
def svi_update(svi_state, x, y):
    rng_key, step_key = jax.random.split(svi_state.rng_key)
    i, (params, opt_state) = svi_state.optim_state

    def loss_fn(params):
        keys = jax.random.split(step_key, PARTICLES)
        return -jnp.mean(jax.vmap(lambda k: elbo(params, k, x, y))(keys))

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = adam.update(grads, opt_state, params)
    return SVIState((i + 1, (optax.apply_updates(params, updates), opt_state)), rng_key), loss


@step(
    "public rng",
    batch={"x": 0, "y": 0},
    roles={"svi_state.optim_state.0": None, "svi_state.optim_state.1.0": "params"}
    | {"svi_state.optim_state.1.1": "optimizer", "svi_state.rng_key": "rng", "x": "batch", "y": "batch"},
    feeds={"svi_state": 0},
    notes="parameters, moments and a counter in nested tuples; a likelihood summed and scaled to all rows",
)
def variational_inference(seed: int = 0) -> Call:
    d = Draw(seed)
    params = {"auto_loc": d.normal(FEATURES + 1, scale=0.1), "auto_scale": jnp.full(FEATURES + 1, -2.0)}
    state = SVIState((jnp.array(0), (params, adam.init(params))), jax.random.PRNGKey(seed))
    return Call(svi_update, (state, d.normal(BATCH, FEATURES), d.ids(2, BATCH).astype(jnp.float32)))


@jax.jit
def flow_step(params, opt_state, x):
    """RealNVP: coupling layers whose halves change places; the loss is a negative log likelihood."""

    def log_likelihood(p, x):
        a, b = jnp.split(x, 2, axis=-1)
        log_det = jnp.zeros(x.shape[0])
        for coupling in p:
            shift, log_scale = jnp.split(mlp(coupling, a), 2, axis=-1)
            log_scale = jnp.tanh(log_scale)
            a, b = b * jnp.exp(log_scale) + shift, a
            log_det = log_det + log_scale.sum(-1)
        z = jnp.concatenate([a, b], axis=-1)
        return -0.5 * jnp.sum(z**2 + jnp.log(2 * jnp.pi), axis=-1) + log_det

    loss, grads = jax.value_and_grad(lambda p: -log_likelihood(p, x).mean())(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


@step(
    "public",
    batch={"x": 0},
    roles={"params": "params", "opt_state": "optimizer", "x": "batch"},
    feeds={"params": 0, "opt_state": 1},
    notes="two values and a sum run through all layers",
)
def normalising_flow(seed: int = 0) -> Call:
    d = Draw(seed)
    params = [mlp_params(d, 16, 64, 32) for _ in range(4)]
    return Call(flow_step, (params, adam.init(params), d.normal(BATCH, 32)))
