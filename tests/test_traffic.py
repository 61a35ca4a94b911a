"""What a plan says that devices send and hold, before anything is compiled, beside the compiled step: that they send
what theory says is in `test_communication.py`."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from theory.steps import STEPS

import jaxshard_magic
from jaxshard_magic.analysis.collectives import wire_bytes
from jaxshard_magic.strategies.footprint import Footprint, footprint
from jaxshard_magic.strategies.hold import Hold
from jaxshard_magic.strategies.traffic import traffic

F32, WIDTH, HIDDEN, EXAMPLES = 4, 64, 256, 32


def planned(step, args, strategy: str, mesh: str, **options) -> Hold:
    found = jaxshard_magic.shard(step, strategy, mesh=jaxshard_magic.mesh(mesh), **options).planned(*args)
    assert isinstance(found.plan.run, Hold)
    return found.plan.run


def sent(plan: Hold) -> Counter:
    """Without sums of a single number, which compilers merge."""
    moves = Counter()
    for move in traffic(plan):
        if move.bytes > F32:
            moves[move.kind, move.axes, move.bytes] += move.count
    return moves


@pytest.mark.parametrize("strategy, axes", [("dp+sp", "data=4 seq=2"), ("fsdp+tp+sp", "data=4 model=2")])
def test_with_divided_positions_a_plan_sends_no_more_than_the_compiled_step(strategy, axes):
    call = STEPS["transformer"]()
    args, mesh = (call.state, call.batch), f"cpu:8 {axes}"
    moves = traffic(planned(call.step, args, strategy, mesh))
    told = sum(wire_bytes(m.kind, m.group_size, m.bytes * m.count) for m in moves)
    step = jaxshard_magic.shard(call.step, strategy, mesh=jaxshard_magic.mesh(mesh))
    step.prepare(*args)
    measured = sum(c.wire_bytes for c in step.report().collectives or ())
    assert 0.7 * measured <= told <= 1.01 * measured


def layers(params, batch):
    def loss(params):
        hidden = jnp.tanh(batch @ params["up"])
        return jnp.square(hidden @ params["down"]).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments():
    shape = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {k: jnp.ones(s) for k, s in shape.items()}, jnp.ones((EXAMPLES, WIDTH))


WEIGHT, ACTIVATION = WIDTH * HIDDEN * F32, EXAMPLES * HIDDEN * F32


def test_microbatches_gather_weights_and_add_up_gradients_at_every_trip():
    once = sent(planned(layers, arguments(), "fsdp", "cpu:8 data=8"))
    assert once["all-reduce", ("data",), WEIGHT] == 2
    parts = sent(planned(layers, arguments(), "fsdp", "cpu:8 data=8", microbatches=4))
    assert parts["all-reduce", ("data",), WEIGHT] == 8
    waiting = sent(planned(layers, arguments(), "dp", "cpu:8 data=8", microbatches=4, reduce="once"))
    assert waiting["all-reduce", ("data",), WEIGHT] == 2  # those of a whole step


@pytest.mark.ci
def test_for_a_tpu_weights_are_gathered_as_it_multiplies_them():
    step = jaxshard_magic.shard(layers, "fsdp", mesh=jaxshard_magic.mesh("v5e:2x4 data=8"))
    entry = step.prepare(*arguments())
    assert isinstance(entry.plan.run, Hold)
    told = sum(wire_bytes(m.kind, m.group_size, m.bytes * m.count) for m in traffic(entry.plan.run))
    measured = sum(c.wire_bytes for c in step.report().collectives or ())
    assert told == measured
    gathers = [m.bytes for m in traffic(entry.plan.run) if m.kind == "all-gather"]
    assert set(gathers) == {WEIGHT // 2}  # of float32, in bfloat16


def held(strategy: str, mesh: str, donated: tuple[int, ...] = (), **options) -> Footprint:
    return footprint(planned(layers, arguments(), strategy, mesh, **options), donated)


def test_arrays_are_counted_as_they_lie_and_new_ones_beside_the_old_unless_these_are_donated():
    batch, loss = EXAMPLES * WIDTH * F32, F32
    assert held("dp", "cpu:8 data=8").arrays == 2 * 2 * WEIGHT + batch // 8 + loss
    assert held("dp", "cpu:8 data=8", (0, 1)).arrays == 2 * WEIGHT + batch // 8 + loss
    assert held("fsdp", "cpu:8 data=8", (0, 1)).arrays == 2 * WEIGHT // 8 + batch // 8 + loss


def test_between_the_arrays_lie_what_products_made_and_the_gradients_until_they_are_used():
    """With the old state donated: hidden, the result, its gradient and that of hidden, one beside the other at most
    with both gradients of the weights."""
    found = held("dp", "cpu:8 data=8", (0, 1))
    result = EXAMPLES * WIDTH * F32 // 8
    assert 2 * WEIGHT <= found.between <= 2 * WEIGHT + 2 * ACTIVATION // 8 + 2 * result


def test_microbatches_hold_the_gradients_so_far_beside_the_new_ones():
    whole, parts = (held("dp", "cpu:2 data=2", (0, 1), microbatches=m) for m in (1, 4))
    assert parts.arrays == whole.arrays
    assert whole.between < parts.between < whole.between + 2 * WEIGHT
