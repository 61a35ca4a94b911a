"""Steps that are recorded, and whether their times add up."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxshard_magic.report import Measured

WIDTH, LAYERS = 32, 3


def transformer_like(scan: bool, remat: bool):
    """A step of a few layers, adam behind them."""
    optimizer = optax.adam(1e-3)

    def train_step(state, batch):
        params, moments = state

        def loss_of(params):
            def layer(x, w):
                return x + jax.nn.relu(x @ w["up"]) @ w["down"], None

            layer = jax.checkpoint(layer) if remat else layer
            x = batch["x"]
            if scan:
                x, _ = jax.lax.scan(layer, x, params)
            else:
                for i in range(LAYERS):
                    x, _ = layer(x, jax.tree.map(lambda a, i=i: a[i], params))
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    params = {
        "up": jnp.full((LAYERS, WIDTH, 2 * WIDTH), 0.01),
        "down": jnp.full((LAYERS, 2 * WIDTH, WIDTH), 0.01),
    }
    x = jnp.ones((16, WIDTH))
    return train_step, (params, optimizer.init(params)), {"x": x, "y": x}


def ran(step, *args):
    """The step, called once with its arguments kept."""
    step.keep_arguments = True
    jax.block_until_ready(step(*args))
    return step


def adds_up(found: Measured) -> None:
    rows = [*found.lines, *filter(None, (found.others, found.unknown))]
    window = sum(row.seconds for row in rows) + found.mean.idle
    mean = found.mean
    assert window == pytest.approx(mean.compute + mean.moving + (mean.waiting or 0) + mean.idle, rel=1e-4)
    assert found.step_s.min <= window * 1.0001 and window <= found.step_s.max * 1.0001
    lost = 0.0 if found.unknown is None else found.unknown.seconds
    assert lost <= 0.01 * sum(row.seconds for row in rows)
