"""Nothing of the user's is lost, and no other errors come up than those that help."""

import gc
import re
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.stand_in import BATCH, descend, params, same, shard

from jaxshard_magic.errors import ShardError
from jaxshard_magic.program.trace import path_name


def test_the_users_own_arrays_are_never_donated():
    step, own = shard(jax.jit(descend), donate=True), params()
    placed = jax.device_put(own, NamedSharding(jax.sharding.Mesh(jax.devices()[:1], "x"), P()))
    on_mesh = jax.device_put(own, NamedSharding(step.mesh, P()))
    for start in (own, placed, on_mesh):
        state, _ = step(start, BATCH)
        later, _ = step(state, BATCH)
        assert all(x.is_deleted() for x in jax.tree.leaves(state))
        step(later, BATCH)
    for kept in (own, placed, on_mesh):
        same(kept, params())


def test_the_step_gives_its_own_state_up_only_when_asked():
    plain, jitted = shard(descend), shard(jax.jit(descend, donate_argnums=0))
    never = shard(jax.jit(descend, donate_argnums=0), donate=False)
    for step, donates in ((plain, False), (jitted, True), (never, False)):
        state, _ = step(params(), BATCH)
        step(state, BATCH)
        assert [x.is_deleted() for x in jax.tree.leaves(state)] == [donates, donates]
    assert not any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(BATCH))


def test_one_array_in_two_places_is_not_given_up_twice():
    def step(online, target, batch):
        new, _ = descend(online, batch)
        return {"online": new, "target": jax.tree.map(lambda t, p: t + p, target, new)}

    sharded_step = shard(jax.jit(step, donate_argnums=(0, 1)))
    out = sharded_step(params(), params(), BATCH)
    same(sharded_step(out["online"], out["online"], BATCH), step(*[params_after_one()] * 2, BATCH))


def params_after_one():
    return descend(params(), BATCH)[0]


def test_arrays_that_lie_elsewhere_are_moved():
    step = shard(jax.jit(descend))
    there = jax.device_put(params(), jax.devices()[1])
    divided = jax.device_put(BATCH, NamedSharding(step.mesh, P("data")))
    for state, batch in ((there, BATCH), (params(), divided), (there, divided), (params(), BATCH)):
        same(step(state, batch), descend(params(), BATCH))
    assert len(step.programs.entries) == 1


def test_closed_over_arrays_are_placed_once():
    data = jnp.asarray(BATCH["x"])
    step = shard(jax.jit(lambda params: params + (data @ jnp.ones((3, 2))).sum()))
    for _ in range(3):
        out = step(jnp.zeros(()))
    same(out, (BATCH["x"] @ np.ones((3, 2))).sum())
    assert path_name(step.entry.traced.in_paths[0]) == "closure.0"
    assert len(step.entry.consts) == 1 and step.entry.consts[0].sharding.mesh == step.mesh


def test_no_argument_is_kept_alive():
    for fn in (descend, jax.jit(descend, donate_argnums=0)):
        step, state = shard(fn), params()
        step(step(state, BATCH)[0], BATCH)
        gone = weakref.ref(state["w"])
        del state
        gc.collect()
        assert gone() is None


def test_a_plan_is_refused_before_anything_is_given_up():
    step = shard(jax.jit(descend), donate=True)
    state, _ = step(params(), BATCH)
    with pytest.raises(ShardError, match=r"batch.x: dimension 0 of \(3, 3\) has size 3"):
        step(state, jax.tree.map(lambda x: x[:3], BATCH))
    same(step(state, BATCH), descend(params_after_one(), BATCH))


BAD = {
    "if loss > 1": "branches on the value of an array; use jnp.where",
    "float(loss)": "reads the value of an array; return the array",
    "np.asarray(loss)": "hands an array of the step to numpy",
    "range(int(loss))": "reads the value of an array",
    "x[x > 0]": "picks elements by a mask",
    "loss.block_until_ready()": "asks an array of the step for what only finished arrays have",
}


def bad_step(what):
    def step(w, batch):
        x = batch["x"]
        loss = (x @ w).sum()
        if what == "if loss > 1":
            if loss > 1:
                return w
        elif what == "float(loss)":
            print(float(loss))
        elif what == "np.asarray(loss)":
            np.asarray(loss)
        elif what == "range(int(loss))":
            range(int(loss))
        elif what == "x[x > 0]":
            x[x > 0]
        else:
            loss.block_until_ready()
        return w

    return step


@pytest.mark.parametrize("what", BAD)
def test_a_step_that_cannot_be_traced_is_named_with_its_line(what):
    vjp = jax.vjp
    with pytest.raises(ShardError) as caught:
        shard(bad_step(what))(jnp.ones((3, 2)), BATCH)
    message = str(caught.value)
    assert re.match(r"step can't be compiled: test_step_safety.py, line \d+, `", message)
    assert what.removesuffix(":") in message and BAD[what] in message and "\n" not in message
    assert jax.vjp is vjp


def test_errors_of_the_users_own_pass_through():
    def step(params, batch):
        return jax.grad(lambda p: batch["z"].sum())(params)

    vjp = jax.vjp
    sharded_step = shard(step)
    for _ in range(2):
        with pytest.raises(KeyError, match="z"):
            sharded_step(params(), BATCH)
    assert jax.vjp is vjp
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        shard(descend)(params())


def test_under_another_trace_the_plain_step_is_called():
    step = shard(jax.jit(descend))
    same(jax.jit(step)(params(), BATCH), descend(params(), BATCH))
    same(jax.grad(lambda p: step(p, BATCH)[1])(params()), jax.grad(lambda p: descend(p, BATCH)[1])(params()))
    assert jax.eval_shape(step, params(), BATCH)[1].shape == ()
    assert step.calls == 0


def test_a_step_inside_a_step_is_part_of_it():
    inner = shard(jax.jit(descend))
    outer = shard(lambda params, batch: inner(inner(params, batch)[0], batch))
    same(outer(params(), BATCH), descend(params_after_one(), BATCH))
    assert inner.calls == 0 and outer.calls == 1


def test_threads_may_call_one_step():
    step, errors = shard(jax.jit(descend)), []
    sizes = [BATCH, jax.tree.map(lambda x: x[:4], BATCH)]

    def work(batch):
        try:
            for _ in range(20):
                same(step(params(), batch), descend(params(), batch))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(batch,)) for batch in sizes * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and step.calls == 80 and len(step.programs.entries) == 2


def test_another_mesh_that_the_user_has_set_is_left_alone():
    other = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    step = shard(jax.jit(descend))
    with jax.set_mesh(other):
        for _ in range(2):
            same(step(params(), BATCH), descend(params(), BATCH))
        assert jax.sharding.get_mesh() == other


class Positive:
    """A user's own class, which refuses what it is given, as many do."""

    def __init__(self, x):
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x < 0:
            raise ValueError(f"not positive: {x}")
        self.x = x


jax.tree_util.register_pytree_node(Positive, lambda p: ([p.x], None), lambda _, xs: Positive(*xs))


def counting(ran):
    """A step that notes each time that it runs."""

    def step(x, batch):
        seen = jax.pure_callback(lambda b: ran.append(1) or b, jax.ShapeDtypeStruct((), x.dtype), x)
        return Positive(seen - batch.sum()), jax.grad(lambda x: (x * batch).mean())(x)

    return step


def test_a_step_that_ran_and_then_raised_does_not_run_again():
    ran = []
    step = shard(counting(ran))
    for _ in range(2):
        step(jnp.ones(()), jnp.zeros(8))
    with pytest.raises(ValueError, match="not positive"):
        step(jnp.ones(()), jnp.ones(8))
    jax.effects_barrier()
    assert len(ran) == 3
