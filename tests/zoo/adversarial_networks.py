"""Networks against each other in one step: two losses, two optimizers, statistics of batches, critics ahead."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from .parts import BATCH, Draw, adam, linen_variables, mlp, mlp_params, state_roles
from .registry import Call, step

LATENT = 32


def bce(logits: jax.Array, target: float) -> jax.Array:
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, jnp.full_like(logits, target)))


class Generator(nn.Module):
    """From noise to pictures of 8 by 8 pixels, doubled twice."""

    @nn.compact
    def __call__(self, z):
        x = nn.relu(nn.Dense(2 * 2 * 64)(z)).reshape(z.shape[0], 2, 2, 64)
        for width in (32, 16):
            x = nn.ConvTranspose(width, (4, 4), strides=(2, 2), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        return jnp.tanh(nn.ConvTranspose(1, (3, 3))(x))


class Discriminator(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.leaky_relu(nn.Conv(32, (4, 4), strides=(2, 2))(x), 0.2)
        x = nn.Conv(64, (4, 4), strides=(2, 2), use_bias=False)(x)
        x = nn.leaky_relu(nn.BatchNorm(use_running_average=False)(x), 0.2)
        return nn.Dense(1)(x.reshape(x.shape[0], -1))


class NormState(TrainState):
    batch_stats: Any = None


GENERATOR, DISCRIMINATOR = Generator(), Discriminator()
dcgan_adam = optax.adam(2e-4, b1=0.5, eps=1e-5)


def forward(state: NormState, params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    variables = {"params": params, "batch_stats": state.batch_stats}
    made, changed = state.apply_fn(variables, x, mutable=["batch_stats"])
    return made, changed["batch_stats"]


@jax.jit
def dcgan_step(g_state, d_state, images, key):
    """The generator moves first; the discriminator is shown what the generator made for its own loss."""
    noise = jax.random.normal(jax.random.fold_in(key, g_state.step), (images.shape[0], LATENT))

    def generator_loss(params):
        fake, statistics = forward(g_state, params, noise)
        scores, _ = forward(d_state, d_state.params, fake)
        return bce(scores, 1.0), (fake, statistics)

    (g_loss, (fake, statistics)), grads = jax.value_and_grad(generator_loss, has_aux=True)(g_state.params)
    g_state = g_state.apply_gradients(grads=grads, batch_stats=statistics)

    def discriminator_loss(params):
        on_real, _ = forward(d_state, params, images)
        on_fake, statistics = forward(d_state, params, fake)
        return bce(on_real, 0.9) + bce(on_fake, 0.0), statistics

    (d_loss, statistics), grads = jax.value_and_grad(discriminator_loss, has_aux=True)(d_state.params)
    d_state = d_state.apply_gradients(grads=grads, batch_stats=statistics)
    return g_state, d_state, {"generator": g_loss, "discriminator": d_loss}


@step(
    "public linen gan cnn rng",
    batch={"images": 0},
    roles=state_roles("g_state", batch_stats="other")
    | state_roles("d_state", batch_stats="other")
    | {"images": "batch", "key": "rng"},
    feeds={"g_state": 0, "d_state": 1},
    tolerance=2e-3,
    notes="transposed convolutions, BatchNorm in both; the second loss reads what the first one made",
)
def linen_dcgan(seed: int = 0) -> Call:
    images = jnp.tanh(Draw(seed).normal(BATCH, 8, 8, 1))
    g = linen_variables(GENERATOR, seed, jnp.zeros((1, LATENT)))
    d = linen_variables(DISCRIMINATOR, seed + 1, images)
    states = (
        NormState.create(apply_fn=model.apply, tx=dcgan_adam, **variables)
        for model, variables in ((GENERATOR, g), (DISCRIMINATOR, d))
    )
    return Call(dcgan_step, (*states, images, jax.random.key(seed)))


class Perceptron(nnx.Module):
    def __init__(self, n_in: int, n_out: int, rngs: nnx.Rngs):
        self.inner = nnx.Linear(n_in, 128, rngs=rngs)
        self.middle = nnx.Linear(128, 128, rngs=rngs)
        self.outer = nnx.Linear(128, n_out, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.gelu(self.middle(nnx.gelu(self.inner(x)))))


@nnx.jit
def simultaneous_step(generator, discriminator, g_optimizer, d_optimizer, batch, rngs):
    """Both gradients are taken at the old networks, then both networks move."""
    noise = rngs.normal((batch.shape[0], LATENT))

    def g_loss_fn(g):
        return bce(discriminator(g(noise)), 1.0)

    def d_loss_fn(d):
        return (bce(d(batch), 1.0) + bce(d(jax.lax.stop_gradient(generator(noise))), 0.0)) / 2

    g_loss, g_grads = nnx.value_and_grad(g_loss_fn)(generator)
    d_loss, d_grads = nnx.value_and_grad(d_loss_fn)(discriminator)
    g_optimizer.update(generator, g_grads)
    d_optimizer.update(discriminator, d_grads)
    return {"g_loss": g_loss, "d_loss": d_loss}


@step(
    "public nnx gan rng",
    batch={"batch": 0},
    roles={"generator": "params", "discriminator": "params", "batch": "batch", "rngs": "rng"}
    | {f"{which}_optimizer": "optimizer" for which in "gd"}
    | {f"{which}_optimizer.step": None for which in "gd"},
    mutates=True,
)
def nnx_simultaneous_gan(seed: int = 0) -> Call:
    generator = Perceptron(LATENT, 64, nnx.Rngs(seed))
    discriminator = Perceptron(64, 1, nnx.Rngs(seed + 1))
    optimizers = (nnx.Optimizer(model, adam, wrt=nnx.Param) for model in (generator, discriminator))
    batch = Draw(seed).normal(BATCH, 64)
    return Call(simultaneous_step, (generator, discriminator, *optimizers, batch, nnx.Rngs(seed)))


CRITIC_STEPS = 2


@jax.jit
def critics_first_step(state, batch, rng):
    """WGAN-GP: the critic moves twice, with its gradient held to norm 1 between real and made, then the generator."""

    def critic_loss(critic, key):
        noise_key, mix_key = jax.random.split(key)
        fake = mlp(state["generator"], jax.random.normal(noise_key, (batch.shape[0], LATENT)))
        share = jax.random.uniform(mix_key, (batch.shape[0], 1))
        between = share * batch + (1 - share) * fake
        slopes = jax.grad(lambda x: mlp(critic, x).sum())(between)
        penalty = jnp.mean((jnp.linalg.norm(slopes, axis=1) - 1) ** 2)
        return mlp(critic, fake).mean() - mlp(critic, batch).mean() + 10.0 * penalty

    rng, generator_key, *critic_keys = jax.random.split(rng, 2 + CRITIC_STEPS)
    critic, c_state = state["critic"], state["c_state"]
    for key in critic_keys:
        c_loss, grads = jax.value_and_grad(critic_loss)(critic, key)
        updates, c_state = adam.update(grads, c_state, critic)
        critic = optax.apply_updates(critic, updates)

    noise = jax.random.normal(generator_key, (batch.shape[0], LATENT))
    g_loss, grads = jax.value_and_grad(lambda g: -mlp(critic, mlp(g, noise)).mean())(state["generator"])
    updates, g_state = adam.update(grads, state["g_state"], state["generator"])
    generator = optax.apply_updates(state["generator"], updates)
    new = {"critic": critic, "c_state": c_state, "generator": generator, "g_state": g_state}
    return new, rng, {"c_loss": c_loss, "g_loss": g_loss}


@step(
    "public gan rng",
    batch={"batch": 0},
    roles={"state.generator": "params", "state.critic": "params", "state.g_state": "optimizer"}
    | {"state.c_state": "optimizer", "batch": "batch", "rng": "rng"},
    feeds={"state": 0, "rng": 1},
    notes="losses that wait for each other's updates; the gradient of a sum over the batch within a loss",
)
def wasserstein_critics_first(seed: int = 0) -> Call:
    d = Draw(seed)
    generator, critic = mlp_params(d, LATENT, 128, 128, 64), mlp_params(d, 64, 128, 128, 1)
    state = {"generator": generator, "g_state": adam.init(generator)}
    state |= {"critic": critic, "c_state": adam.init(critic)}
    return Call(critics_first_step, (state, d.normal(BATCH, 64), jax.random.key(seed)))


class Painter(eqx.Module):
    """One picture from one piece of noise, channels first."""

    lift: eqx.nn.ConvTranspose2d
    norm: eqx.nn.BatchNorm
    draw: eqx.nn.ConvTranspose2d

    def __init__(self, key: jax.Array):
        lift, draw = jax.random.split(key)
        self.lift = eqx.nn.ConvTranspose2d(LATENT, 32, 4, use_bias=False, key=lift)
        self.norm = eqx.nn.BatchNorm(32, "batch", mode="batch")
        self.draw = eqx.nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1, key=draw)

    def __call__(self, z, state):
        x, state = self.norm(self.lift(z[:, None, None]), state)
        return jnp.tanh(self.draw(jax.nn.relu(x))), state


class Judge(eqx.Module):
    look: eqx.nn.Conv2d
    narrow: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        look, narrow, head = jax.random.split(key, 3)
        self.look = eqx.nn.Conv2d(1, 16, 4, stride=2, padding=1, key=look)
        self.narrow = eqx.nn.Conv2d(16, 32, 4, stride=2, padding=1, use_bias=False, key=narrow)
        self.norm = eqx.nn.BatchNorm(32, "batch", mode="batch")
        self.head = eqx.nn.Linear(32 * 4, 1, key=head)

    def __call__(self, x, state):
        x, state = self.norm(self.narrow(jax.nn.leaky_relu(self.look(x), 0.2)), state)
        return self.head(jnp.ravel(jax.nn.leaky_relu(x, 0.2))), state


def over_batch(model: Any, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
    return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


@eqx.filter_jit
def paint_step(painter, judge, p_state, j_state, p_opt, j_opt, real, key):
    noise = jax.random.normal(key, (real.shape[0], LATENT))

    @eqx.filter_value_and_grad(has_aux=True)
    def judge_loss(judge, j_state):
        fake, _ = over_batch(painter, noise, p_state)
        on_real, j_state = over_batch(judge, real, j_state)
        on_fake, j_state = over_batch(judge, fake, j_state)
        return bce(on_real, 1.0) + bce(on_fake, 0.0), j_state

    @eqx.filter_value_and_grad(has_aux=True)
    def painter_loss(painter, p_state):
        fake, p_state = over_batch(painter, noise, p_state)
        return bce(over_batch(judge, fake, j_state)[0], 1.0), p_state

    (j_loss, new_j_state), grads = judge_loss(judge, j_state)
    updates, j_opt = dcgan_adam.update(grads, j_opt, eqx.filter(judge, eqx.is_array))
    (p_loss, p_state), p_grads = painter_loss(painter, p_state)
    judge = eqx.apply_updates(judge, updates)
    updates, p_opt = dcgan_adam.update(p_grads, p_opt, eqx.filter(painter, eqx.is_array))
    return eqx.apply_updates(painter, updates), judge, p_state, new_j_state, p_opt, j_opt, (p_loss, j_loss)


@step(
    "public equinox gan cnn rng",
    batch={"real": 0},
    roles={"painter": "params", "judge": "params", "p_state": "other", "j_state": "other"}
    | {"p_opt": "optimizer", "j_opt": "optimizer", "real": "batch", "key": "rng"},
    feeds={name: i for i, name in enumerate(("painter", "judge", "p_state", "j_state", "p_opt", "j_opt"))},
    tolerance=2e-3,
    notes="convolutions of one example under vmap, BatchNorm by the name of an axis",
)
def equinox_dcgan(seed: int = 0) -> Call:
    painter, p_state = eqx.nn.make_with_state(Painter)(jax.random.key(seed))
    judge, j_state = eqx.nn.make_with_state(Judge)(jax.random.key(seed + 1))
    opts = (dcgan_adam.init(eqx.filter(model, eqx.is_array)) for model in (painter, judge))
    real = jnp.tanh(Draw(seed).normal(BATCH, 1, 8, 8))
    return Call(paint_step, (painter, judge, p_state, j_state, *opts, real, jax.random.key(seed)))
