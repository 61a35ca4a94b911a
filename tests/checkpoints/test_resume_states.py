"""States and steps of every kind go on where they were, with the numbers of a loop that was never stopped."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from support.resumed import new_step, numbers

from jaxshard_magic import ShardError

TX = optax.adam(1e-2)
CALLS, EVERY, STOP = 9, 3, 5


def loss_of(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - 1) ** 2)


def params_of():
    rng = np.random.default_rng(0)
    return {"up": rng.normal(size=(16, 32)).astype("f") / 4, "down": rng.normal(size=(32, 8)).astype("f") / 4}


def updated(tx, state, x, steep=1):
    params, opt = state
    loss, grads = jax.value_and_grad(lambda params, x: steep * loss_of(params, x))(params, x)
    updates, opt = tx.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), loss


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dropout(0.2, deterministic=not train)(nn.relu(nn.Dense(32)(x)))
        return nn.Dense(8)(x)


MODEL = Model()


def linen():
    """Whose count of steps is a number of Python's until the first call."""
    params = MODEL.init(jax.random.key(0), np.ones((1, 16), "f"), False)["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=TX)


def linen_step(state, x):
    def loss_fn(params):
        rngs = {"dropout": jax.random.fold_in(jax.random.key(9), state.step)}
        return jnp.mean((state.apply_fn({"params": params}, x, True, rngs=rngs) - 1) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def counting():
    return {"params": params_of(), "n": 0, "mean": 0.0}


def counting_step(state, x):
    loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
    params = jax.tree.map(lambda p, g: p - 0.1 * g / (1 + state["n"]), state["params"], grads)
    return {"params": params, "n": state["n"] + 1, "mean": 0.9 * state["mean"] + 0.1 * loss}, loss


def plain(tx=TX):
    return params_of(), tx.init(params_of())


SUMS = optax.MultiSteps(TX, 2)
RATED = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)


def with_rate(i, state):
    """The loop sets the rate, at some calls as a number of Python's."""
    state[1].hyperparams["learning_rate"] = 0.01 * 0.9**i if i % 2 else jnp.asarray(0.01 * 0.9**i)
    return state


def step_of(tx, steep=1):
    return lambda state, x: updated(tx, state, x, steep)


STEPS = {
    "linen": (linen, linen_step, {}, None),
    "numbers of Python's": (counting, counting_step, {}, None),
    "gradients summed over calls": (partial(plain, SUMS), step_of(SUMS), {}, None),
    "a rate that the loop sets": (partial(plain, RATED), step_of(RATED), {}, with_rate),
    "its own jit donates": (plain, jax.jit(step_of(TX), donate_argnums=0), {}, None),
    # Its gradients overflow until the loss scale is down.
    "fp16": (plain, step_of(TX, steep=1000), {"precision": "fp16"}, None),
    "microbatches": (plain, step_of(TX), {"microbatches": 2}, None),
}
ALWAYS = {"fp16"}


def trained(kind, folder=None, calls=CALLS, stop=None):
    """What a loop ends with: its state and losses; None where it was stopped."""
    make, function, options, before = STEPS[kind]
    step, state, losses = new_step(step=function, **options), make(), []
    keeper = step.checkpoint(folder, every=EVERY, resume=True) if folder is not None else None
    for i in range(calls):
        if i == stop:
            keeper._store.close()  # as the end of the process does
            return None
        state = state if before is None else before(i, state)
        state, loss = step(state, np.random.default_rng(i).normal(size=(16, 16)).astype("f"))
        losses.append(float(loss))
    if keeper is not None:
        keeper.end()
    return numbers(jax.tree.map(jnp.asarray, state)), losses


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a[0], b[0], strict=True)) and a[1] == b[1]


@pytest.mark.parametrize("kind", [pytest.param(x, marks=[] if x in ALWAYS else pytest.mark.full) for x in STEPS])
def test_a_step_of_any_kind_goes_on_where_it_was(tmp_path, kind):
    trained(kind, tmp_path, stop=STOP)
    assert same(trained(kind, tmp_path), trained(kind))


@pytest.mark.ci
@pytest.mark.parametrize("calls", [pytest.param(1, marks=pytest.mark.full), CALLS])
def test_a_loop_that_ended_goes_on_with_more_steps(tmp_path, calls):
    """After one call, too: the state that goes into the second has numbers that were Python's."""
    trained("linen", tmp_path, calls)
    assert same(trained("linen", tmp_path, calls + 2), trained("linen", calls=calls + 2))


def test_some_steps_of_fp16_overflow_and_others_do_not():
    """So that the test above would see a loss scale that begins anew: more of its steps would change nothing."""
    [whole, _] = trained("fp16")
    counts = [x for x in whole if x.shape == () and x.dtype == np.int32]
    assert 0 < counts[0] < CALLS, "some overflow, and not all"


def test_a_model_that_lost_a_number_is_told_before_its_first_step_is_computed(tmp_path):
    def scaled(state, x):
        return {**state, "w": state["w"] - state["rate"] * jnp.mean(x), "rate": state["rate"] * 0.9}

    def bare(state, x):
        return {"w": state["w"] - jnp.mean(x)}

    state, x = {"w": jnp.ones(64), "rate": jnp.ones(())}, np.ones((16, 4), "f")
    step = new_step(step=scaled)
    keeper = step.checkpoint(tmp_path, every=2)
    for _ in range(3):
        state = step(state, x)
    keeper._store.close()
    step = new_step(step=bare)
    step.checkpoint(tmp_path, resume=True)
    state = {"w": jnp.ones(64)}
    with pytest.raises(ShardError, match=r"call 2 of the step returns other arrays than it did"):
        for _ in range(3):
            state = step(state, x)
    assert step.calls == 0


CELL = """
state, losses = jnp.ones((16, 16)), []
for i in range(9):
    if i == stop:
        raise KeyboardInterrupt
    state, loss = train_step(state, np.full((8, 16), i, "f"))
    losses.append(float(loss))
"""
STEP = """
import numpy as np, jax, jax.numpy as jnp
def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - 1) ** 2))(w)
    return w - 0.1 * grad, loss
"""


def test_a_cell_stopped_before_it_has_caught_up_says_so_and_loses_nothing(notebook, tmp_path):
    notebook.run(STEP + "stop = 7")
    line = f"%%shard dp --checkpoint {tmp_path}/run --every 3 --resume"
    notebook.fails(line + CELL)
    losses = notebook["losses"]
    notebook.run(STEP + "stop = 2")
    error = notebook.fails(line + CELL)
    assert str(error) == (
        f"Stopped; --resume: the loop ended after 2 calls, before step 7 of the checkpoint in {tmp_path}/run: nothing "
        "was computed"
    )
    notebook.run(STEP + "stop = None")
    report = notebook.run(line + CELL)
    assert report.checkpoints.resumed == 7 and notebook["losses"][:7] == losses
