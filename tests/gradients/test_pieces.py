"""A batch that a step takes piece by piece, to add up gradients of its own accord."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard_magic

WIDTH, PIECES = 16, 4


def loss(weights, rows):
    return jnp.mean((jax.nn.relu(rows @ weights["up"]) @ weights["down"]) ** 2)


def updated(weights, total):
    return jax.tree.map(lambda w, g: w - 0.1 * g / PIECES, weights, total)


def with_slices(weights, rows):
    total, size = jax.tree.map(jnp.zeros_like, weights), rows.shape[0] // PIECES
    for k in range(PIECES):
        total = jax.tree.map(jnp.add, total, jax.grad(loss)(weights, rows[k * size : (k + 1) * size]))
    return updated(weights, total)


def with_split(weights, rows):
    total = jax.tree.map(jnp.zeros_like, weights)
    for piece in jnp.split(rows, PIECES):
        total = jax.tree.map(jnp.add, total, jax.grad(loss)(weights, piece))
    return updated(weights, total)


def in_a_loop(weights, rows):
    size = rows.shape[0] // PIECES

    def add(k, total):
        piece = jax.lax.dynamic_slice_in_dim(rows, k * size, size)
        return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, piece))

    return updated(weights, jax.lax.fori_loop(0, PIECES, add, jax.tree.map(jnp.zeros_like, weights)))


def in_a_scan(weights, rows):
    def add(total, piece):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, piece)), None

    pieces = rows.reshape(PIECES, -1, WIDTH)
    return updated(weights, jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), pieces)[0])


def in_two_loops(weights, rows):
    return jax.lax.fori_loop(0, 2, lambda _, weights: in_a_loop(weights, rows), weights)


def arguments(rows):
    draw = np.random.default_rng(0)
    weights = {"up": draw.normal(size=(WIDTH, 32)), "down": draw.normal(size=(32, WIDTH))}
    return jax.tree.map(partial(np.asarray, dtype=np.float32), (weights, draw.normal(size=(rows, WIDTH))))


close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def sent(report):
    """The collectives of a report that are not of single numbers, each with the bytes of all of them."""
    return sorted((c.kind, c.axes, c.count * c.bytes) for c in report.collectives if c.bytes > 4)


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
@pytest.mark.parametrize("step", [with_slices, with_split, in_a_loop, in_a_scan, in_two_loops])
def test_pieces_that_do_not_divide_are_computed_by_every_device_and_that_is_told(step, strategy):
    weights, rows = arguments(16)
    sharded = jaxshard_magic.shard(step, strategy, mesh="cpu:8 data=8")
    planned, made = sharded.plan(weights, rows), sharded(weights, rows)
    jax.tree.map(close, made, step(weights, rows))
    report = sharded.report()
    assert sent(planned) == sent(report) == [("all-gather", ("data",), rows.nbytes)], "the rows, once"
    (told,) = [a for a in report.advice if a.code == "pieces-not-divided"]
    assert told.level == "warning" and "16 examples are taken in pieces of 4 (" in told.message
    assert "data=8 does not divide" in told.message and "Pieces of 8 would be divided" in told.message


@pytest.mark.parametrize("shape", [(64, WIDTH), (128, WIDTH)])
@pytest.mark.parametrize("step", [with_slices, with_split, in_a_loop, in_a_scan, in_two_loops])
def test_pieces_that_divide_move_each_row_twice_and_no_more(step, shape):
    weights, rows = arguments(shape[0])
    sharded = jaxshard_magic.shard(step, "dp", mesh="cpu:8 data=8")
    planned, made = sharded.plan(weights, rows), sharded(weights, rows)
    jax.tree.map(close, made, step(weights, rows))
    report, rounds = sharded.report(), 2 if step is in_two_loops else 1
    assert sent(planned) == sent(report)
    gradients = rounds * PIECES * (weights["up"].nbytes + weights["down"].nbytes)
    assert sum(n for kind, _, n in sent(report) if kind == "all-reduce") == gradients
    moved = sum(n for kind, _, n in sent(report) if kind != "all-reduce")
    assert moved == (1 + rounds) * rows.nbytes / 8, "dealt out over features, and each piece back over rows"
    assert not [a for a in report.advice if a.code == "pieces-not-divided"]


def test_rows_without_another_dimension_that_divides_are_gathered_once():
    def step(weights, labels):
        def add(k, total):
            piece = jax.lax.dynamic_slice_in_dim(labels, k * 16, 16)
            return total + jax.grad(lambda w: jnp.mean((piece * w[0] + w[1]) ** 2))(weights)

        return weights - 0.1 * jax.lax.fori_loop(0, 4, add, jnp.zeros_like(weights))

    weights, labels = np.ones(2, np.float32), np.linspace(0, 1, 64, dtype=np.float32)
    sharded = jaxshard_magic.shard(step, "dp", mesh="cpu:8 data=8")
    planned, made = sharded.plan(weights, labels), sharded(weights, labels)
    np.testing.assert_allclose(made, step(weights, labels), rtol=1e-5)
    assert ("all-gather", ("data",), labels.nbytes) in sent(planned)
    assert sent(planned) == sent(sharded.report())


def test_a_batch_that_is_cut_out_of_a_data_set_leaves_the_data_set_divided():
    def step(weights, data, i):
        rows = jax.lax.dynamic_slice_in_dim(data, i * 16, 16)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, rows))

    weights, data = arguments(256)
    sharded = jaxshard_magic.shard(step, "dp", mesh="cpu:8 data=8", specs={"data": ("data", None)})
    planned, made = sharded.plan(weights, data, 3), sharded(weights, data, 3)
    jax.tree.map(close, made, step(weights, data, 3))
    report = sharded.report()
    assert sent(planned) == sent(report)
    moved = sum(n for kind, _, n in sent(report) if kind != "all-reduce")
    assert moved == (data.nbytes + data[:16].nbytes) / 8, "an eighth of what a gather of the data set sends"


def fused(weights, rows):
    """Two layers whose weights make q, k and v at once."""

    def loss(weights):
        x = rows
        for w in weights:
            q, k, v = jnp.split(x @ w["qkv"], 3, axis=-1)
            q, k, v = (part.reshape(*part.shape[:2], 8, -1) for part in (q, k, v))
            scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
            x = x + jnp.einsum("bhts,bshd->bthd", scores, v).reshape(x.shape) @ w["out"]
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def test_parts_of_a_fused_weights_result_are_dealt_out_and_back():
    draw = np.random.default_rng(0)
    weights = [{"qkv": draw.normal(size=(64, 192)) / 8, "out": draw.normal(size=(64, 64)) / 8} for _ in range(2)]
    weights, rows = jax.tree.map(partial(np.asarray, dtype=np.float32), (weights, draw.normal(size=(4, 16, 64))))
    sharded = jaxshard_magic.shard(fused, "tp", mesh="cpu:8 model=8")
    planned, made = sharded.plan(weights, rows), sharded(weights, rows)
    jax.tree.map(close, made, fused(weights, rows))
    assert sent(planned) == sent(sharded.report())
    found = {kind for kind, _, _ in sent(planned)}
    assert "collective-permute" not in found and "all-to-all" in found


@pytest.mark.parametrize("over", ["rows", "features"])
def test_a_roll_by_one_stays_the_compilers_which_sends_that_one_alone(over):
    axis, strategy, mesh = (0, "dp", "data=8") if over == "rows" else (1, "tp", "model=8")

    def step(weights, rows):
        def loss(weights):
            hidden = jnp.tanh(rows @ weights["up"])
            return jnp.mean((jnp.roll(hidden, 1, axis) @ weights["down"]) ** 2)

        return updated(weights, jax.grad(loss)(weights))

    weights, rows = arguments(256)
    sharded = jaxshard_magic.shard(step, strategy, mesh=f"cpu:8 {mesh}")
    jax.tree.map(close, sharded(weights, rows), step(weights, rows))
    kinds = {c.kind for c in sharded.report().collectives if c.bytes > 4}
    assert "all-to-all" not in kinds and "all-gather" not in kinds


def test_a_few_rows_that_are_looked_at_are_no_pieces():
    def step(weights, rows):
        grads = jax.grad(loss)(weights, rows)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), rows[:2]

    weights, rows = arguments(16)
    sharded = jaxshard_magic.shard(step, "dp", mesh="cpu:8 data=8")
    sharded(weights, rows)
    assert not [a for a in sharded.report().advice if a.code == "pieces-not-divided"]
