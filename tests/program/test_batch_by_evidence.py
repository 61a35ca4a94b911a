"""The dimension that is divided as the batch, for steps in which more than one could be."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard_magic
from jaxshard_magic.program.batching.batch import Batch

ROWS, TIME, WIDTH, WORDS = 8, 32, 16, 64
KEYS = jax.random.split(jax.random.key(0), 8)
MLP = {"up": jnp.ones((24, 32)), "down": jnp.ones((32, 24))}


def batch_of(step: Callable, *args: object) -> Batch:
    sharded = jaxshard_magic.shard(step, "dp", mesh=jaxshard_magic.mesh("cpu:4 data=4"))
    return sharded.planned(*args).plan.run.layout.batch


def trained(loss: Callable) -> Callable:
    def step(params, *data):
        value, gradients = jax.value_and_grad(loss)(params, *data)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def language_model(positions: Callable, loss: Callable) -> Callable:
    def of(params, tokens):
        x = params["words"][tokens] + positions(params["positions"])
        scores = jnp.einsum("bqd,bkd->bqk", x @ params["query"], x @ params["key"])
        scores = jnp.where(jnp.tril(jnp.ones((TIME, TIME), bool)), scores, -1e9)
        return loss(jax.nn.softmax(scores) @ x @ params["words"].T, tokens)

    return of


def next_word(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, 1)).mean()


def model_of(length: int) -> dict[str, jax.Array]:
    square = jnp.ones((WIDTH, WIDTH))
    table = jnp.ones((length, WIDTH))
    return {"words": jnp.ones((WORDS, WIDTH)), "positions": table, "query": square, "key": square}


POSITIONS = {
    "looked up": (lambda table: jnp.take(table, jnp.arange(TIME), axis=0), TIME),
    "looked up in a longer table": (lambda table: jnp.take(table, jnp.arange(TIME), axis=0), 4 * TIME),
    "sliced from a longer table": (lambda table: table[:TIME], 4 * TIME),
}


@pytest.mark.parametrize("how", POSITIONS)
def test_rows_are_the_batch_where_targets_are_rolled_and_positions(how):
    positions, length = POSITIONS[how]
    tokens = jnp.zeros((ROWS, TIME), jnp.int32)
    batch = batch_of(trained(language_model(positions, next_word)), model_of(length), tokens)
    assert (batch.size, batch.unambiguous) == (ROWS, True)
    assert list(batch.input_dims.values()) == [(0,)]


def test_a_prediction_divides_rows_and_no_weights():
    model = language_model(lambda table: table, lambda logits, _: logits)
    batch = batch_of(model, model_of(TIME), jnp.zeros((ROWS, TIME), jnp.int32))
    assert batch.size == ROWS
    assert batch.input_dims == {4: (0,)}


def trained_from(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A whole training, whose data is made from its key."""
    x = jax.random.normal(jax.random.fold_in(key, 1), (4, WIDTH))

    def update(w, _):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2))(w)
        return w - 0.1 * gradient, value

    return jax.lax.scan(update, jax.random.normal(key, (WIDTH, WIDTH)), None, 3)


@pytest.mark.parametrize("made", [jax.random.key, jax.random.PRNGKey])
def test_a_training_mapped_over_keys_divides_the_keys(made):
    batch = batch_of(jax.vmap(trained_from), jax.random.split(made(0), ROWS))
    assert (batch.size, batch.input_dims) == (ROWS, {0: (0,)})


@pytest.mark.parametrize("back", [True, False])
def test_rows_that_are_put_into_chunks_are_the_batch(back):
    def loss(params, x):
        layers = jax.checkpoint(lambda rows: jnp.tanh(rows @ params["up"]) @ params["down"])
        chunks = jax.lax.map(layers, x.reshape(-1, 64, 24))
        return jnp.mean((chunks.reshape(x.shape) if back else chunks) ** 2)

    batch = batch_of(trained(loss), MLP, jnp.ones((32, 16, 24)))
    assert (batch.size, list(batch.input_dims.values())) == (32, [(0,)])


def test_rows_are_the_batch_of_a_loss_that_compares_them_with_each_other():
    def loss(params, x, y):
        a, b = (jnp.tanh(z.mean(1) @ params["up"]) @ params["down"] for z in (x, y))
        return optax.softmax_cross_entropy_with_integer_labels(a @ b.T, jnp.arange(len(a))).mean()

    x = jnp.ones((16, 8, 24))
    assert set(batch_of(trained(loss), MLP, x, x).input_dims.values()) == {(0,)}


def test_a_batch_that_does_not_divide_is_told_and_no_other_dimension_taken():
    tokens = jnp.zeros((6, TIME), jnp.int32)
    step = trained(language_model(POSITIONS["looked up"][0], next_word))
    with pytest.raises(jaxshard_magic.ShardError, match="6 examples"):
        batch_of(step, model_of(TIME), tokens)


def test_two_dimensions_that_cost_the_same_are_told():
    def loss(params, x):
        return jnp.mean(jnp.tanh(x @ params["up"]) @ params["down"])

    batch = batch_of(trained(loss), MLP, jnp.ones((8, 16, 24)))
    assert (batch.unambiguous, batch.size) == (False, 8)
