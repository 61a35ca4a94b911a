"""Fits of science: equations with Hessians, splines on NumPy arrays, differential equations, kernels, rays, forces."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .parts import BATCH, Draw, adam, descend, mlp, mlp_params
from .registry import Call, step


@jax.jit
def burgers_step(params, opt_state, points, starts, values):
    """A network u(t, x) with u_t + u u_x = nu u_xx at points inside, and values at the start."""

    def u(p, point):
        return mlp(p, 2 * point - 1).squeeze()

    def residual(p, point):
        slopes = jax.jacfwd(u, argnums=1)(p, point)
        curves = jax.hessian(u, argnums=1)(p, point)
        return slopes[0] + u(p, point) * slopes[1] - 0.01 / jnp.pi * curves[1, 1]

    def loss_fn(p):
        inside = jax.vmap(residual, in_axes=(None, 0))(p, points)
        begin = jax.vmap(u, in_axes=(None, 0))(p, starts) - values
        return jnp.mean(inside**2) + 10.0 * jnp.mean(begin**2), (inside, begin)

    (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


@step(
    "public",
    batch={"points": 0, "starts": 0, "values": 0},
    roles={"params": "params", "opt_state": "optimizer", "points": "batch", "starts": "batch"} | {"values": "batch"},
    feeds={"params": 0, "opt_state": 1},
    tolerance=2e-3,
    notes="second derivatives of the network by its inputs, within the loss; two batches of different sizes",
)
def burgers_equation(seed: int = 0) -> Call:
    d = Draw(seed)
    params = mlp_params(d, 2, 64, 64, 1)
    starts = np.stack([np.zeros(BATCH), np.linspace(0, 1, BATCH)], axis=1).astype(np.float32)
    points = d.rng.uniform(size=(2 * BATCH, 2)).astype(np.float32)
    values = -np.sin(np.pi * starts[:, 1]).astype(np.float32)
    return Call(burgers_step, (params, adam.init(params), points, starts, values))


KNOTS = np.linspace(0.0, 1.0, 24, dtype=np.float32)


def hats(x: Any) -> Any:
    """Linear B-splines (points, knots)."""
    return jnp.maximum(0.0, 1.0 - jnp.abs(x[:, None] - KNOTS) * (len(KNOTS) - 1))


@jax.jit
def spline_step(params, opt_state, x, y, weights):
    """A weighted least squares fit; second differences of the coefficients stay small."""

    def loss_fn(p):
        off = hats(x) @ p["coefficients"] + p["offset"] - y
        rough = jnp.diff(p["coefficients"], n=2, axis=0)
        return jnp.sum(weights * jnp.sum(off**2, axis=1)) / jnp.sum(weights) + 1e-2 * jnp.sum(rough**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


@step(
    "public",
    batch={"x": 0, "y": 0, "weights": 0},
    roles={"params": "params", "opt_state": "optimizer", "x": "batch", "y": "batch", "weights": "batch"},
    feeds={"params": 0, "opt_state": 1},
    notes="everything begins as NumPy arrays, the parameters too; a constant table inside",
)
def spline_fit(seed: int = 0) -> Call:
    d = Draw(seed)
    x = np.sort(d.rng.uniform(size=4 * BATCH)).astype(np.float32)
    y = np.sin(6 * x)[:, None] * np.arange(1, 5, dtype=np.float32) + 0.1 * d.numpy(4 * BATCH, 4)
    params = {"coefficients": np.zeros((len(KNOTS), 4), np.float32), "offset": np.zeros(4, np.float32)}
    return Call(spline_step, (params, adam.init(params), x, y, np.ones(4 * BATCH, np.float32)))


class Field(eqx.Module):
    mlp: eqx.nn.MLP

    def __call__(self, t, y):
        return self.mlp(y)


class NeuralODE(eqx.Module):
    field: Field

    def __init__(self, width: int, key: jax.Array):
        self.field = Field(eqx.nn.MLP(width, width, 64, depth=2, activation=jax.nn.softplus, key=key))

    def __call__(self, ts, y0):
        """States (times, width) by the classical Runge-Kutta method."""

        def tick(y, span):
            t, dt = span[0], span[1] - span[0]
            k1 = self.field(t, y)
            k2 = self.field(t + dt / 2, y + dt / 2 * k1)
            k3 = self.field(t + dt / 2, y + dt / 2 * k2)
            k4 = self.field(t + dt, y + dt * k3)
            y = y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            return y, y

        _, ys = jax.lax.scan(tick, y0, jnp.stack([ts[:-1], ts[1:]], axis=1))
        return jnp.concatenate([y0[None], ys])


@eqx.filter_value_and_grad
def path_loss(model, ti, yi):
    predicted = jax.vmap(model, in_axes=(None, 0))(ti, yi[:, 0])
    return jnp.mean((yi - predicted) ** 2)


@eqx.filter_jit
def path_step(ti, yi, model, opt_state):
    loss, grads = path_loss(model, ti, yi)
    updates, opt_state = adam.update(grads, opt_state)
    return loss, eqx.apply_updates(model, updates), opt_state


@step(
    "public equinox scan",
    batch={"yi": 0, "ti": None},
    roles={"ti": None, "yi": "batch", "model": "params", "opt_state": "optimizer"},
    feeds={"model": 1, "opt_state": 2},
    notes="times are shared by all examples; the model comes after the data",
)
def equinox_neural_ode(seed: int = 0) -> Call:
    model, ts = NeuralODE(8, jax.random.key(seed)), jnp.linspace(0.0, 1.0, 10)
    opt_state = adam.init(eqx.filter(model, eqx.is_inexact_array))
    return Call(path_step, (ts, Draw(seed).normal(BATCH, 10, 8, scale=0.5), model, opt_state))


@jax.jit
def kernel_step(params, opt_state, x, y):
    """A Gaussian process: the likelihood of all points at once, by a Cholesky factor of their kernel."""

    def loss_fn(p):
        z = x / jax.nn.softplus(p["lengths"])
        apart = jnp.sum(z**2, 1)[:, None] + jnp.sum(z**2, 1) - 2 * z @ z.T
        kernel = jax.nn.softplus(p["scale"]) * jnp.exp(-0.5 * jnp.maximum(apart, 0.0))
        factor = jnp.linalg.cholesky(kernel + (jax.nn.softplus(p["noise"]) + 1e-3) * jnp.eye(x.shape[0]))
        solved = jax.scipy.linalg.cho_solve((factor, True), y)
        return 0.5 * y @ solved + jnp.sum(jnp.log(jnp.diag(factor))) + 0.5 * len(y) * jnp.log(2 * jnp.pi)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


@step(
    "public",
    batch={"x": 0, "y": 0},
    roles={"params": "params", "opt_state": "optimizer", "x": "batch", "y": "batch"},
    feeds={"params": 0, "opt_state": 1},
    tolerance=2e-3,
    notes="no example has a loss of its own",
)
def gaussian_process(seed: int = 0) -> Call:
    d = Draw(seed)
    params = {"lengths": jnp.ones(4), "scale": jnp.asarray(1.0), "noise": jnp.asarray(0.0)}
    x = d.normal(2 * BATCH, 4)
    return Call(kernel_step, (params, adam.init(params), x, jnp.sin(x.sum(1)) + 0.1 * d.normal(2 * BATCH)))


SAMPLES = 12


@jax.jit
def radiance_step(params, opt_state, key, rays):
    """NeRF: points along each ray, jittered; colours summed by how much light comes through."""
    near, far = 1.0, 3.0
    cells = jnp.linspace(near, far, SAMPLES + 1)
    jitter = jax.random.uniform(key, (rays["origin"].shape[0], SAMPLES))
    depth = cells[:-1] + jitter * (far - near) / SAMPLES

    def loss_fn(p):
        points = rays["origin"][:, None] + depth[..., None] * rays["direction"][:, None]
        angles = points[..., None] * 2.0 ** jnp.arange(4)
        features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*points.shape[:2], -1)
        colour, density = jnp.split(mlp(p, features), [3], axis=-1)
        gaps = jnp.diff(depth, axis=-1, append=jnp.full((depth.shape[0], 1), far))
        alpha = 1 - jnp.exp(-jax.nn.softplus(density[..., 0]) * gaps)
        through = jnp.cumprod(jnp.concatenate([jnp.ones_like(alpha[:, :1]), 1 - alpha[:, :-1] + 1e-10], -1), -1)
        seen = jnp.sum((alpha * through)[..., None] * jax.nn.sigmoid(colour), axis=1)
        return jnp.mean((seen - rays["colour"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, {"loss": loss, "psnr": -10 * jnp.log10(loss)}


@step(
    "public rng",
    batch={"rays.origin": 0, "rays.direction": 0, "rays.colour": 0},
    roles={"params": "params", "opt_state": "optimizer", "key": "rng", "rays": "batch"},
    feeds={"params": 0, "opt_state": 1},
)
def radiance_field(seed: int = 0) -> Call:
    d = Draw(seed)
    params = mlp_params(d, 24, 64, 64, 64, 4)
    rays = {name: d.numpy(2 * BATCH, 3) for name in ("origin", "direction")}
    rays["colour"] = d.rng.uniform(size=(2 * BATCH, 3)).astype(np.float32)
    return Call(radiance_step, (params, adam.init(params), jax.random.key(seed), rays))


@jax.jit
def forces_step(params, molecules):
    """A potential: energies of molecules and, by the gradient over positions within the loss, forces on their atoms."""

    def energy(p, positions, kinds):
        apart = positions[:, None] - positions[None]
        distance = jnp.sqrt(jnp.sum(apart**2, axis=-1) + jnp.eye(len(kinds)))
        waves = jnp.exp(-((distance[..., None] - jnp.linspace(0.5, 4, 16)) ** 2))
        around = jnp.sum(waves * (1 - jnp.eye(len(kinds)))[..., None], axis=1)
        return mlp(p["mlp"], jnp.concatenate([around, p["kinds"][kinds]], axis=-1)).sum()

    def loss_fn(p):
        both = jax.vmap(jax.value_and_grad(energy, argnums=1), in_axes=(None, 0, 0))
        energies, slopes = both(p, molecules["positions"], molecules["kinds"])
        off = jnp.mean((energies - molecules["energy"]) ** 2)
        return off + 10.0 * jnp.mean((slopes + molecules["forces"]) ** 2), off

    (loss, off), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return descend(params, grads, 1e-3), {"loss": loss, "energy": off}


@step(
    "public",
    batch={f"molecules.{name}": 0 for name in ("positions", "kinds", "energy", "forces")},
    roles={"params": "params", "molecules": "batch"},
    feeds={"params": 0},
    tolerance=1e-3,
    notes="the gradient of a gradient by other arguments, under vmap",
)
def molecular_forces(seed: int = 0) -> Call:
    d, atoms = Draw(seed), 6
    params = {"kinds": d.normal(8, 16), "mlp": mlp_params(d, 32, 64, 64, 1)}
    molecules = {"positions": 1.5 * d.normal(BATCH, atoms, 3), "kinds": d.ids(8, BATCH, atoms)}
    molecules |= {"energy": d.normal(BATCH), "forces": d.normal(BATCH, atoms, 3)}
    return Call(forces_step, (params, molecules))
