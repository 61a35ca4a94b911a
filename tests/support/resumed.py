"""A step whose loops are saved and gone on with, and what a loop of it gives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard_magic

CALLS = 14
TX = optax.adam(1e-2)


def train_step(state, batch):
    """With dropout, whose key is part of the state."""
    params, opt_state, key = state
    key, sub = jax.random.split(key)

    def loss_fn(params):
        hidden = jnp.tanh(batch @ params["up"])
        hidden = hidden * jax.random.bernoulli(sub, 0.9, hidden.shape)
        return jnp.mean((hidden @ params["down"] - 1) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, key), {"loss": loss}


def new_state():
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(16, 32)).astype("f"), "down": rng.normal(size=(32, 8)).astype("f")}
    return params, TX.init(params), jax.random.key(1)


def new_step(strategy="fsdp", mesh="data=8", step=train_step, **options):
    return jaxshard_magic.shard(step, strategy, mesh=mesh, **options)


def trained(step, calls=CALLS, stop=None, folder=None, **saving):
    """The state after the loop, its losses, and what it drew of the data."""
    state, rng, losses, drawn = new_state(), np.random.default_rng(3), [], []
    keeper = step.checkpoint(folder, **saving) if folder is not None else None
    for i in range(calls):
        if i == stop:
            keeper._store.close()  # as the end of the process does
            return None
        batch = rng.normal(size=(16, 16)).astype("f")
        drawn.append(float(batch[0, 0]))
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    if keeper is not None:
        keeper.end()
    return numbers(state), [float(x) for x in losses], drawn


def numbers(state):
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state)]
    leaves = [jax.random.key_data(x) if key else x for x, key in zip(jax.tree.leaves(state), keys, strict=True)]
    return [np.asarray(x) for x in leaves]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a[0], b[0], strict=True)) and a[1:] == b[1:]
