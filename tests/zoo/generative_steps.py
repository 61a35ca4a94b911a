"""Networks that make things: autoencoders, diffusion with noise drawn inside, a GAN in two gradient calls."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .parts import BATCH, Draw, adam, mlp, mlp_params
from .registry import Call, step

STATE: dict[str, Any] = {
    "roles": {"params": "params", "opt_state": "optimizer", "key": "rng", "x": "batch"},
    "batch": {"x": 0},
    "feeds": {"params": 0, "opt_state": 1},
}


@jax.jit
def vae_step(params, opt_state, key, x):
    def loss_fn(p):
        mean, log_var = jnp.split(mlp(p["encoder"], x), 2, axis=-1)
        code = mean + jnp.exp(0.5 * log_var) * jax.random.normal(key, mean.shape)
        likelihood = jnp.sum((mlp(p["decoder"], code) - x) ** 2, axis=-1)
        divergence = 0.5 * jnp.sum(jnp.exp(log_var) + mean**2 - 1 - log_var, axis=-1)
        return jnp.mean(likelihood + divergence), {"likelihood": likelihood.mean(), "kl": divergence.mean()}

    (_, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, metrics


@step("plain rng", **STATE)
def variational_autoencoder(seed: int = 0) -> Call:
    d = Draw(seed)
    params = {"encoder": mlp_params(d, 64, 256, 32), "decoder": mlp_params(d, 16, 256, 64)}
    return Call(vae_step, (params, adam.init(params), jax.random.key(seed), d.normal(BATCH, 64)))


KEPT = np.cumprod(1 - np.linspace(1e-3, 0.1, 20)).astype(np.float32)


@jax.jit
def diffusion_step(params, opt_state, key, x):
    """Noise and times are drawn here; the share of signal kept at each time is a constant of the program."""
    time_key, noise_key = jax.random.split(key)
    time = jax.random.randint(time_key, x.shape[:1], 0, len(KEPT))
    noise = jax.random.normal(noise_key, x.shape)
    kept = jnp.asarray(KEPT)[time][:, None]
    noisy = jnp.sqrt(kept) * x + jnp.sqrt(1 - kept) * noise
    angles = time[:, None] * 2.0 ** -jnp.arange(8)
    features = jnp.concatenate([noisy, jnp.sin(angles), jnp.cos(angles)], axis=-1)
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((mlp(p, features) - noise) ** 2))(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


@step("plain rng", **STATE)
def diffusion(seed: int = 0) -> Call:
    d = Draw(seed)
    params = mlp_params(d, 64 + 16, 256, 256, 64)
    return Call(diffusion_step, (params, adam.init(params), jax.random.key(seed), d.normal(BATCH, 64)))


@jax.jit
def gan_step(generator, discriminator, states, batch, key):
    """The generator moves first, the discriminator sees what the new one makes."""
    real, noise = batch["real"], jax.random.normal(key, (batch["real"].shape[0], 32))

    def generator_loss(g):
        return jnp.mean(optax.sigmoid_binary_cross_entropy(mlp(discriminator, mlp(g, noise)), 1.0))

    def discriminator_loss(d):
        fake = jax.lax.stop_gradient(mlp(generator, noise))
        logits = jnp.concatenate([mlp(d, real), mlp(d, fake)])
        targets = jnp.concatenate([jnp.ones((len(real), 1)), jnp.zeros((len(fake), 1))])
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, targets))

    g_loss, grads = jax.value_and_grad(generator_loss)(generator)
    updates, g_state = adam.update(grads, states["generator"])
    generator = optax.apply_updates(generator, updates)
    d_loss, grads = jax.value_and_grad(discriminator_loss)(discriminator)
    updates, d_state = adam.update(grads, states["discriminator"])
    discriminator = optax.apply_updates(discriminator, updates)
    return generator, discriminator, {"generator": g_state, "discriminator": d_state}, (g_loss, d_loss)


@step(
    "plain gan rng",
    batch={"batch.real": 0},
    roles={"generator": "params", "discriminator": "params", "states": "optimizer"} | {"batch": "batch", "key": "rng"},
    feeds={"generator": 0, "discriminator": 1, "states": 2},
)
def gan(seed: int = 0) -> Call:
    d = Draw(seed)
    generator, discriminator = mlp_params(d, 32, 256, 64), mlp_params(d, 64, 256, 1)
    states = {"generator": adam.init(generator), "discriminator": adam.init(discriminator)}
    batch = {"real": d.normal(BATCH, 64)}
    return Call(gan_step, (generator, discriminator, states, batch, jax.random.key(seed)))


class Perceptron(nnx.Module):
    def __init__(self, n_in: int, n_out: int, rngs: nnx.Rngs):
        self.inner = nnx.Linear(n_in, 256, rngs=rngs)
        self.outer = nnx.Linear(256, n_out, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.gelu(self.inner(x)))


CRITIC_TREES = ("critic", "c_optimizer.opt_state.0.mu", "c_optimizer.opt_state.0.nu")


@nnx.jit
def nnx_gan_step(generator, critic, g_optimizer, c_optimizer, rngs, real):
    """A Wasserstein critic with a penalty on its gradient between real and made examples."""
    made = generator(rngs.normal((len(real), 32)))
    share = rngs.uniform((len(real), 1))

    def critic_loss(c):
        slopes = jax.vmap(jax.grad(lambda x: c(x)[0]))(share * real + (1 - share) * made)
        penalty = jnp.mean((jnp.sqrt(jnp.sum(slopes**2, axis=-1) + 1e-8) - 1) ** 2)
        return jnp.mean(c(made)) - jnp.mean(c(real)) + 10 * penalty

    c_loss, grads = nnx.value_and_grad(critic_loss)(critic)
    c_optimizer.update(critic, grads)
    noise = rngs.normal((len(real), 32))
    g_loss, grads = nnx.value_and_grad(lambda g: -jnp.mean(critic(g(noise))))(generator)
    g_optimizer.update(generator, grads)
    return c_loss, g_loss


@step(
    "nnx gan rng",
    batch={"real": 0},
    roles={"generator": "params", "critic": "params", "rngs": "rng", "real": "batch"}
    | {f"{which}_optimizer": "optimizer" for which in "gc"}
    | {f"{which}_optimizer.step": None for which in "gc"},
    mutates=True,
    noise=tuple(f"{tree}.outer.bias" for tree in CRITIC_TREES),
    notes="a gradient of examples within the loss; a constant added to the critic changes nothing",
)
def nnx_wasserstein_gan(seed: int = 0) -> Call:
    generator, critic = Perceptron(32, 64, nnx.Rngs(seed)), Perceptron(64, 1, nnx.Rngs(seed + 1))
    optimizers = (nnx.Optimizer(model, adam, wrt=nnx.Param) for model in (generator, critic))
    return Call(nnx_gan_step, (generator, critic, *optimizers, nnx.Rngs(seed), Draw(seed).normal(BATCH, 64)))
