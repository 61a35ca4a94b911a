"""Which sums of which loops wait for their reduction between devices: over time, of convolutions, of any type."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.deferring import (
    AG,
    AR,
    EXAMPLES,
    F32,
    HIDDEN,
    RS,
    TIME,
    TRIPS,
    VOCAB,
    WIDTH,
    accumulating,
    deferred,
    descend,
    drawn,
    halves,
    held,
    moved,
    ran,
    reductions,
    same,
)

import jaxshard_magic
from jaxshard_magic.strategies.planned_collectives import planned_collectives


def recurrent():
    params = drawn({"w": (WIDTH, WIDTH), "u": (WIDTH, WIDTH), "bias": (WIDTH,), "out": (WIDTH, WIDTH)})

    def loss(params, batch):
        def cell(h, x):
            return jnp.tanh(x @ params["w"] + h @ params["u"] + params["bias"]), None

        h, _ = lax.scan(cell, jnp.zeros((batch["x"].shape[0], WIDTH)), batch["x"].swapaxes(0, 1))
        return jnp.mean((h @ params["out"]) ** 2)

    return loss, params, {"x": jax.random.normal(jax.random.key(1), (EXAMPLES, TIME, WIDTH))}


def test_a_recurrent_net_reduces_once_for_all_its_time_steps():
    loss, params, batch = recurrent()

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return descend(params, grads), value

    entry, got = ran(step, "fsdp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch))
    weight = WIDTH * WIDTH * F32
    loop = {(RS, weight): 2, (AR, WIDTH * F32): 1}
    assert reductions(entry) == Counter({**loop, (AR, weight): 1, (AR, F32): 1})  # `out` is used after it


@pytest.mark.parametrize("inside", [lambda f: f, jax.jit])
def test_a_recurrent_net_gathers_each_weight_once_for_both_its_passes(inside):
    loss, params, batch = recurrent()

    @inside
    def step(params, batch):
        value, grads = jax.value_and_grad(inside(loss))(params, batch)
        return descend(params, grads), value

    entry, got = ran(step, "fsdp", "data=8", "once-gathered", params, batch)
    same(got, jax.jit(step)(params, batch))
    weight = WIDTH * WIDTH * F32
    assert {k: n for k, n in moved(entry).items() if k[0] == AG} == {(AG, weight): 3}  # `out` is used after the loop
    sent = [each for each in planned_collectives(entry.plan.run) if each.kind == AG]
    assert sum(each.count * each.bytes for each in sent) == 3 * weight


def test_a_loop_over_time_in_a_loop_over_microbatches_reduces_once_for_both():
    loss, params, batch = recurrent()
    step = accumulating(loss)
    entry, got = ran(step, "fsdp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch))
    weight = WIDTH * WIDTH * F32
    assert reductions(entry) == Counter({(RS, weight): 3, (AR, WIDTH * F32): 1, (AR, F32): 1})


@pytest.mark.ci
def test_convolutions_wait_too():
    params = drawn({"conv": (3, 3, 8, 32), "bias": (32,), "dense": (32, 16)})

    def loss(params, batch):
        numbers = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(batch["x"], params["conv"], (1, 1), "SAME", dimension_numbers=numbers)
        return jnp.mean((jnp.tanh(x + params["bias"]).mean((1, 2)) @ params["dense"]) ** 2)

    batch = {"x": jax.random.normal(jax.random.key(1), (EXAMPLES, 6, 6, 8))}
    step = accumulating(loss)
    entry, got = ran(step, "dp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch))
    sizes = [F32 * x.size for x in jax.tree.leaves(params)]
    assert reductions(entry) == Counter([(AR, F32), *((AR, b) for b in sizes)])


def regression(dtype=jnp.float32):
    params = jax.tree.map(lambda x: x.astype(dtype), drawn({"a": (WIDTH, HIDDEN), "c": (HIDDEN, WIDTH)}))

    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["c"] - 1) ** 2)

    return loss, params, {"x": jax.random.normal(jax.random.key(1), (EXAMPLES, WIDTH), dtype)}


@pytest.mark.ci
def test_a_table_looked_up_at_every_time_step_is_reduced_once():
    def step(params, batch):
        def loss(params):
            def cell(h, i):
                return jnp.tanh(h + params["table"][i]), None

            h, _ = lax.scan(cell, jnp.zeros((EXAMPLES, WIDTH)), batch["i"].T)
            return jnp.sum(h**2)

        value, grads = jax.value_and_grad(loss)(params)
        return descend(params, grads), value

    params = drawn({"table": (VOCAB, WIDTH)})
    batch = {"i": jax.random.randint(jax.random.key(1), (EXAMPLES, TIME), 0, VOCAB)}
    entry, got = ran(step, "fsdp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch))
    assert reductions(entry) == Counter({(RS, VOCAB * WIDTH * F32): 1, (AR, F32): 1})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_table_in_a_narrow_type_has_its_gradient_in_that_type(dtype):
    def step(table, batch):
        value, grad = jax.value_and_grad(lambda table: jnp.mean(table[batch].astype(jnp.float32) ** 2))(table)
        return table - 64 * grad, value

    table = jax.random.normal(jax.random.key(0), (512, 128), dtype)
    batch = jax.random.randint(jax.random.key(1), (EXAMPLES, TIME), 0, 512)
    sharded = jaxshard_magic.shard(step, "fsdp", mesh="cpu:8 data=8")
    got, wanted = sharded(table, batch), jax.jit(step)(table, batch)
    assert got[0].dtype == dtype and got[0].sharding.spec == P("data", None)
    assert jnp.allclose(got[0], wanted[0], rtol=0, atol=8 * float(jnp.finfo(dtype).eps))
    assert jnp.allclose(got[1], wanted[1], rtol=1e-5)


@pytest.mark.ci
def test_a_term_that_is_no_sum_over_examples_counts_once_and_moves_nothing():
    loss, params, batch = regression()

    def decayed(params, batch):
        return loss(params, batch) + sum(jnp.sum(p**2) for p in params.values())

    step = accumulating(decayed)
    entry, got = ran(step, "fsdp", "data=8", "once-gathered", params, batch)
    same(got, jax.jit(step)(params, batch))
    assert {k: n for k, n in moved(entry).items() if k[0] == AG} == {(AG, WIDTH * HIDDEN * F32): 2}


def test_a_loop_may_start_from_what_an_earlier_step_left():
    loss, params, batch = regression()

    def step(state, batch):
        def add(momentum, piece):
            grads = jax.grad(loss)(state["params"], piece)
            return jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, momentum, grads), None

        momentum, _ = lax.scan(add, state["momentum"], jax.tree.map(halves, batch))
        return {"params": descend(state["params"], momentum), "momentum": momentum}

    state = {"params": params, "momentum": jax.tree.map(jnp.ones_like, params)}
    entry, got = ran(step, "fsdp", "data=8", "once-gathered", state, batch)
    same(got, jax.jit(step)(state, batch))
    weight = WIDTH * HIDDEN * F32
    assert reductions(entry) == Counter({(RS, weight): 2})
    assert moved(entry)[AG, weight] == 2  # the weights, not the momentum


def clipped(grads):
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g * jnp.minimum(1, 0.01 / norm), grads)


def test_what_is_not_linear_in_the_gradient_is_reduced_at_every_trip():
    loss, params, batch = regression()
    step = accumulating(loss, change=clipped)
    entry, got = ran(step, "fsdp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch))
    assert deferred(held(entry)) == 0
    assert reductions(entry)[AR, WIDTH * HIDDEN * F32] == 2 * TRIPS


def test_one_sum_may_wait_while_another_cannot():
    loss, params, batch = regression()

    def first_clipped(grads):
        return {
            "a": clipped({"a": grads["a"]})["a"],
            "c": jnp.where(grads["c"].shape[0] > 1, 2 * grads["c"], 0),
        }

    step = accumulating(loss, change=first_clipped)
    entry, got = ran(step, "dp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch))
    assert deferred(held(entry)) == 1
    assert reductions(entry)[AR, WIDTH * HIDDEN * F32] == TRIPS + 1


def test_counts_and_flags_come_out_exactly():
    loss, params, batch = regression()

    def step(params, batch):
        def add(total, piece):
            grads, positive = jax.grad(loss)(params, piece), jnp.sum(piece["x"] > 0)
            seen = total[1] + jnp.sum(
                jnp.where(piece["x"][:, 0] > -100, piece["n"], 0)
            )  # more than float32 counts one by one
            halved, large = total[2] + positive // 2, total[3] | (jnp.sum(piece["x"] > 2) > 170)
            return (jax.tree.map(jnp.add, total[0], grads), seen, halved, large), positive

        zeros = jax.tree.map(jnp.zeros_like, params), jnp.int32(0), jnp.int32(0), jnp.bool_(False)
        (grads, *rest), each = lax.scan(add, zeros, jax.tree.map(halves, batch))
        return descend(params, grads), rest, each

    batch = {**batch, "n": jnp.full(batch["x"].shape[0], 2**22, jnp.int32).at[0].add(1)}
    _, got = ran(step, "fsdp", "data=8", "once", params, batch)
    want = jax.jit(step)(params, batch)
    same(got[0], want[0])
    same(got[1:], want[1:], rtol=0)


def test_bfloat16_gradients_are_added_up_and_reduced_in_the_carrys_type():
    loss, params, batch = regression(jnp.bfloat16)
    step = accumulating(loss, dtype=jnp.float32)
    entry, got = ran(step, "fsdp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch), rtol=2**-7)
    assert reductions(entry)[RS, WIDTH * HIDDEN * F32] == 2


def test_a_loop_that_never_runs_gives_its_start():
    loss, params, batch = regression()

    def step(params, batch):
        def add(total, _):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, batch)), None

        total, _ = lax.scan(add, jax.tree.map(jnp.ones_like, params), None, length=0)
        return descend(params, total)

    _, got = ran(step, "fsdp", "data=8", "once-gathered", params, batch)
    same(got, jax.jit(step)(params, batch))


def test_microbatches_that_do_not_divide_over_the_shards_are_reduced_as_before():
    loss, params, batch = regression()
    batch = {"x": batch["x"][: TRIPS * 6].repeat(2, 0)[: TRIPS * 8].reshape(-1, WIDTH)}
    step = accumulating(loss, lambda x: x.reshape(8, -1, WIDTH))
    entry, got = ran(step, "fsdp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch))
    assert deferred(held(entry)) == 0
