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


def sent(report):
    """The collectives of a report that are not of single numbers, each with the bytes of all of them."""
    return sorted((c.kind, c.axes, c.count * c.bytes) for c in report.collectives if c.bytes > 4)


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
@pytest.mark.parametrize("step", [with_slices, with_split, in_a_loop, in_a_scan, in_two_loops])
def test_pieces_that_do_not_divide_are_computed_by_every_device_and_that_is_told(step, strategy):
    weights, rows = arguments(16)
    sharded = jaxshard_magic.shard(step, strategy, mesh="cpu:8 data=8")
    planned, made = sharded.plan(weights, rows), sharded(weights, rows)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), made, step(weights, rows))
    report = sharded.report()
    assert sent(planned) == sent(report) == [("all-gather", ("data",), rows.nbytes)], "the rows, once"
    (told,) = [a for a in report.advice if a.code == "pieces-not-divided"]
    assert told.level == "warning" and "16 examples are taken in pieces of 4 (" in told.message
    assert "data=8 does not divide" in told.message and "Pieces of 8 would be divided" in told.message


def test_pieces_at_places_that_a_loop_computes_are_of_rows_that_are_gathered_once():
    weights, rows = arguments(64)
    sharded = jaxshard_magic.shard(in_a_loop, "dp", mesh="cpu:8 data=8")
    planned, made = sharded.plan(weights, rows), sharded(weights, rows)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), made, in_a_loop(weights, rows))
    gradients = PIECES * (weights["up"].nbytes + weights["down"].nbytes)
    report = sharded.report()
    assert sent(planned) == sent(report)
    found = {kind: nbytes for kind, _, nbytes in sent(report)}
    assert found["all-gather"] == rows.nbytes
    assert sum(n for kind, _, n in sent(report) if kind == "all-reduce") == gradients
    assert not [a for a in report.advice if a.code == "pieces-not-divided"], "16 rows a piece divide"


def test_a_few_rows_that_are_looked_at_are_no_pieces():
    def step(weights, rows):
        grads = jax.grad(loss)(weights, rows)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), rows[:2]

    weights, rows = arguments(16)
    sharded = jaxshard_magic.shard(step, "dp", mesh="cpu:8 data=8")
    sharded(weights, rows)
    assert not [a for a in sharded.report().advice if a.code == "pieces-not-divided"]
