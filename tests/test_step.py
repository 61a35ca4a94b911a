"""A sharded step is called as the user's: same numbers, nothing lost, nothing stale, and no other errors."""

import dataclasses
import functools
import gc
import itertools
import threading
import weakref
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard_magic.errors import ShardError
from jaxshard_magic.program.trace import path_name
from jaxshard_magic.step import ShardedStep, sharded
from jaxshard_magic.step.entry import _checked_call, strict_call


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))


def planner(traced, mesh, strategy, *, specs=None, rules=(), metadata=None):
    """Stands for the strategies: what is called batch is divided over `data`, everything else is replicated."""
    names = [path_name(p) for p in traced.in_paths]
    avals = traced.closed.in_avals
    ins = [P("data") if n.startswith("batch") and a.ndim else P() for n, a in zip(names, avals, strict=True)]
    for name, aval, spec in zip(names, avals, ins, strict=True):
        if spec and aval.shape[0] % 2:
            raise ShardError(f"{name} has {aval.shape[0]} examples, which 2 devices can't share")
    outs = [path_name(p).removeprefix("return.").removeprefix("0.") for p in traced.out_paths]
    tails = {n.partition(".")[2]: i for i, n in enumerate(names)} | {n: i for i, n in enumerate(names)}
    pairs = {o: tails[n] for o, n in enumerate(outs) if n in tails and not ins[tails[n]]}
    return SimpleNamespace(
        in_specs=tuple(ins),
        out_specs=(P(),) * len(outs),
        run=jaxpr_as_fun(traced.closed),
        state_pairs=pairs,
        metadata=metadata,
    )


@pytest.fixture
def shard(mesh):
    return lambda fn, **options: ShardedStep(fn, "dp", mesh, planner=planner, **options)


RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(8, 3)).astype("f"), "y": RNG.normal(size=(8, 2)).astype("f")}


def params():
    return {"w": jnp.full((3, 2), 0.5, jnp.float32), "b": jnp.zeros(2)}


def descend(params, batch):
    def loss(p):
        return jnp.mean((batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def same(one, other):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), one, other)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))


def net():
    model = Net(nnx.Rngs(0))
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), count=nnx.metrics.Average("one"))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), metrics


def train(model, optimizer, metrics, batch):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss, one=jnp.ones(()))


def numbers(*objects):
    leaves = jax.tree.leaves([nnx.state(x) for x in objects])
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in leaves]


def no_way_back(monkeypatch):
    """From here on a call that does not take the short way fails."""

    def fail(*_):
        raise AssertionError("the call was taken apart again")

    monkeypatch.setattr(sharded, "peel", fail)


# Same numbers, however the step is written


class Trainer:
    def __init__(self, rate):
        self.rate = rate

    @functools.partial(jax.jit, static_argnums=0)
    def jitted(self, params, batch):
        return descend(params, batch)

    def plain(self, params, batch):
        return descend(params, batch)


class Callable:
    def __call__(self, params, batch):
        return descend(params, batch)


WAYS = {
    "function": descend,
    "jit": jax.jit(descend),
    "donating jit": jax.jit(descend, donate_argnums=0),
    "filter_jit": eqx.filter_jit(descend),
    "donating filter_jit": eqx.filter_jit(descend, donate="all-except-first"),
    "method": Trainer(0.1).plain,
    "jitted method": Trainer(0.1).jitted,
    "object": Callable(),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_a_step_gives_the_plain_numbers(shard, way, monkeypatch):
    step = shard(WAYS[way])
    state, plain = params(), params()
    for call in range(4):
        state, loss = step(state, BATCH)
        plain, expected = descend(plain, BATCH)
        same((state, loss), (plain, expected))
        if call == 0:
            no_way_back(monkeypatch)
    assert step.calls == 4 and len(step._entries) == 1


@pytest.mark.parametrize("donate", [None, True])
@pytest.mark.parametrize(
    "fn", [train, nnx.jit(train), nnx.jit(train, donate_argnames=("model", "optimizer"))]
)
def test_nnx_objects_are_updated_in_place(shard, fn, donate, monkeypatch):
    step, mine, plain = shard(fn, donate=donate), net(), net()
    for call in range(4):
        assert step(*mine, BATCH) is None
        nnx.jit(train)(*plain, BATCH)
        if call == 0:
            no_way_back(monkeypatch)
    same(numbers(*mine), numbers(*plain))
    assert mine[0].dropout.rngs.count[...] == plain[0].dropout.rngs.count[...] == 4
    same(mine[2].compute(), plain[2].compute())


def test_partials_bind_arrays_and_keywords(shard, monkeypatch):
    def step(rate, params, batch, *, power):
        new, loss = descend(params, batch)
        return jax.tree.map(lambda p, n: p + rate * (n - p), params, new), loss**power

    bound = functools.partial(step, jnp.float32(0.5), power=2)
    sharded_step = shard(bound)
    same(sharded_step(params(), BATCH), bound(params(), BATCH))
    no_way_back(monkeypatch)
    same(sharded_step(params(), BATCH), bound(params(), BATCH))


def test_results_may_be_gradients_nothing_or_python_values(shard, monkeypatch):
    def gradients(params, batch):
        return jax.grad(lambda p: descend(p, batch)[1])(params)

    same(shard(gradients)(params(), BATCH), gradients(params(), BATCH))
    assert shard(lambda params, batch: None)(params(), BATCH) is None
    step = shard(lambda params, batch, kind: {"kind": kind, "loss": params["b"].sum(), "none": None})
    for _ in range(2):
        assert step(params(), BATCH, "mse") == {"kind": "mse", "loss": 0.0, "none": None}
        no_way_back(monkeypatch)


def test_keys_old_and_new_and_a_callback_inside(shard):
    seen = []

    def step(key, old, batch):
        jax.debug.callback(lambda x: seen.append(float(x)), batch["x"].sum())
        return jax.random.split(key)[0], jax.random.normal(key, (3,)) + jax.random.uniform(old, (3,))

    sharded_step, args = shard(step), (jax.random.key(1), jax.random.PRNGKey(2), BATCH)
    for _ in range(3):
        key, drawn = sharded_step(*args)
    assert jax.random.key_data(key).tolist() == jax.random.key_data(step(*args)[0]).tolist()
    same(drawn, step(*args)[1])
    jax.effects_barrier()
    assert len(seen) >= 4


# What tells calls apart


def test_another_batch_size_makes_another_program_and_both_stay(shard, monkeypatch):
    step = shard(jax.jit(descend))
    small = jax.tree.map(lambda x: x[:4], BATCH)
    step(params(), BATCH)
    step(params(), small)
    no_way_back(monkeypatch)
    for batch in (BATCH, small, BATCH):
        same(step(params(), batch), descend(params(), batch))
    assert len(step._entries) == 2


def test_weak_types_are_told_apart_as_jit_does(shard):
    fn = jax.jit(lambda p, rate: p * rate)
    step, p = shard(fn), jnp.ones(3, jnp.bfloat16)
    for rate in (0.5, jnp.float32(0.5), 0.5, np.float32(0.5), jnp.asarray(0.5), 2):
        assert step(p, rate).dtype == fn(p, rate).dtype


def test_a_python_counter_makes_one_more_program_at_most(shard):
    step = shard(jax.jit(lambda count, batch: count + 1))
    count = 0
    for _ in range(4):
        count = step(count, BATCH)
    assert int(count) == 4 and len(step._entries) <= 2


def test_strict_calls_work_without_jaxs_private_names(mesh):
    p = NamedSharding(mesh, P())
    spec = jax.ShapeDtypeStruct((), jnp.float32, weak_type=True)
    compiled = jax.jit(lambda x: x + 1, in_shardings=p).lower(spec).compile()
    for call in (
        strict_call(compiled, (True,)),
        strict_call(lambda x: compiled(x), (True,)),
        functools.partial(_checked_call, compiled, (True,)),
    ):
        assert call(1.0) == 2.0
        with pytest.raises(TypeError, match="weak types differ"):
            call(jnp.float32(1))


def test_a_plain_functions_numbers_stay_python(shard):
    def step(params, batch, layers, flag):
        for _ in range(layers):
            params = jax.tree.map(lambda p: 2 * p, params)
        return params if flag else None

    sharded_step = shard(step)
    for layers, flag in itertools.product((1, 2, 3), (True, False)):
        one, other = sharded_step(params(), BATCH, layers, flag), step(params(), BATCH, layers, flag)
        assert one is other is None or same(one, other) is None
    assert len(sharded_step._entries) == 6


def test_a_plain_functions_changing_number_is_traced_where_it_can_be(shard):
    def step(params, batch, epoch):
        return jax.tree.map(lambda p: p * 0.5**epoch, params)

    sharded_step = shard(step)
    for epoch in range(6):
        same(sharded_step(params(), BATCH, epoch), step(params(), BATCH, epoch))
    assert len(sharded_step._entries) == 2


def test_modes_and_static_attributes_are_never_stale(shard):
    def apply(model, batch):
        return model(batch["x"])

    model = net()[0]
    step, plain = shard(apply), net()[0]
    for change in ("eval", "train", "eval", "train"):
        for m in (model, plain):
            getattr(m, change)()
        same(step(model, BATCH), apply(plain, BATCH))
    model.dropout.rate = plain.dropout.rate = 0.0
    same(step(model, BATCH), apply(plain, BATCH))
    same(numbers(model), numbers(plain))


def test_replaced_layers_and_variables_are_seen(shard):
    def apply(model, batch):
        return model(batch["x"])

    model = net()[0]
    model.eval()
    step = shard(apply)
    step(model, BATCH)
    model.outer = nnx.Linear(8, 2, rngs=nnx.Rngs(5))
    same(step(model, BATCH), apply(model, BATCH))
    model.outer.kernel = nnx.Param(jnp.ones((8, 2)))
    same(step(model, BATCH), apply(model, BATCH))
    model.outer.kernel[...] = jnp.full((8, 2), 3.0)
    same(step(model, BATCH), apply(model, BATCH))
    model.outer = nnx.Linear(8, 5, rngs=nnx.Rngs(5))
    assert step(model, BATCH).shape == (8, 5)


def test_metadata_that_changes_is_seen(shard):
    seen = []

    def apply(model, batch):
        seen.append(model.kernel.get_metadata("note", None))
        return model(batch["x"])

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    step = shard(apply)
    step(model, BATCH)
    step(model, BATCH)
    model.kernel.set_metadata(note="frozen")
    step(model, BATCH)
    assert seen == [None, "frozen"]


# NNX structure


def test_variables_that_a_step_creates_and_removes_are_there_and_gone(shard):
    def note(model, batch):
        model.noted = nnx.Intermediate(batch["x"].mean())
        model.calls = getattr(model, "calls", 0) + 1
        return model.noted[...]

    def forget(model, batch):
        del model.noted

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    step = shard(note)
    for calls in (1, 2, 3):
        same(step(model, BATCH), BATCH["x"].mean())
        same(model.noted[...], BATCH["x"].mean())
        assert model.calls == calls and isinstance(model.noted, nnx.Intermediate)
    shard(forget)(model, BATCH)
    assert not hasattr(model, "noted")


def test_objects_stay_the_ones_they_were_and_share_what_they_shared(shard):
    class Owner(nnx.Module):
        def __init__(self):
            self.model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
            self.optimizer = nnx.ModelAndOptimizer(self.model, optax.sgd(0.1))

    def step(owner, models, batch):
        grads = nnx.grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(owner.model)
        owner.optimizer.update(grads)
        owner.best = owner.model
        return models["again"]

    owner, plain = Owner(), Owner()
    kernel, sharded_step = owner.model.kernel, shard(step)
    for _ in range(3):
        back = sharded_step(owner, {"again": owner.model}, BATCH)
        step(plain, {"again": plain.model}, BATCH)
    assert back is owner.model is owner.best is owner.optimizer.model and owner.model.kernel is kernel
    same(numbers(owner), numbers(plain))


def test_new_objects_and_gradients_come_back(shard, monkeypatch):
    def step(model, batch):
        grads = nnx.grad(lambda m: m(batch["x"]).mean())(model)
        return grads, nnx.Linear(2, 2, rngs=nnx.Rngs(1))

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    sharded_step, (expected, plain) = shard(step), step(nnx.clone(model), BATCH)
    for _ in range(2):
        grads, made = sharded_step(model, BATCH)
        same(grads["kernel"][...], expected["kernel"][...])
        same(made(jnp.ones((1, 2))), plain(jnp.ones((1, 2))))
        no_way_back(monkeypatch)


def test_objects_that_other_nnx_transforms_used_meanwhile_are_still_right(shard):
    mine, plain = net(), net()
    step, jitted = shard(train), nnx.jit(train)
    for _ in range(3):
        step(*mine, BATCH)
        jitted(*mine, BATCH)
        jitted(*plain, BATCH)
        jitted(*plain, BATCH)
    same(numbers(*mine), numbers(*plain))
    assert len(step._entries) == 1


def test_bare_arrays_trees_in_variables_and_python_counters_are_updated(shard):
    class Odd(nnx.Module):
        def __init__(self):
            self.raw = nnx.data(jnp.zeros(3))
            self.tree = nnx.Variable({"a": jnp.zeros(2), "b": [jnp.ones(1)]})
            self.count = nnx.Variable(0)

    def step(odd, batch):
        odd.raw = odd.raw + batch["x"].mean(0)
        odd.tree.set_value({"a": odd.tree.get_value()["a"] + 1, "b": odd.tree.get_value()["b"]})
        odd.count.set_value(odd.count.get_value() + 1)

    odd, plain = Odd(), Odd()
    sharded_step = shard(step)
    for _ in range(3):
        sharded_step(odd, BATCH)
        step(plain, BATCH)
    same(odd.raw, plain.raw)
    same(odd.tree.get_value(), plain.tree.get_value())
    assert int(odd.count.get_value()) == 3


def test_variables_and_states_may_be_arguments_themselves(shard):
    def step(variable, state, batch):
        variable[...] = variable[...] + 1
        state["kernel"][...] = state["kernel"][...] * 2

    variable, state = nnx.Param(jnp.zeros(2)), nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    before = np.asarray(state["kernel"][...])
    sharded_step = shard(step)
    for _ in range(3):
        sharded_step(variable, state, BATCH)
    same((variable[...], state["kernel"][...]), (np.full(2, 3.0), before * 8))


def test_a_forgotten_model_is_let_go(shard):
    step = shard(nnx.jit(train))
    objects = net()
    step(*objects, BATCH)
    step(*objects, BATCH)
    gone = weakref.ref(objects[0]), weakref.ref(objects[0].outer.kernel[...])
    del objects
    gc.collect()
    assert gone[0]() is None and gone[1]() is None


def test_two_models_take_turns_on_the_short_way(shard, monkeypatch):
    step, first, second = shard(train), net(), net()
    for objects in (first, second):
        step(*objects, BATCH)
    no_way_back(monkeypatch)
    for objects in (first, second, first, second):
        step(*objects, BATCH)
    same(numbers(*first), numbers(*second))


# Nothing lost


def test_the_users_own_arrays_are_never_donated(shard):
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


def test_the_step_gives_its_own_state_up_only_when_asked(shard):
    plain, jitted = shard(descend), shard(jax.jit(descend, donate_argnums=0))
    never = shard(jax.jit(descend, donate_argnums=0), donate=False)
    for step, donates in ((plain, False), (jitted, True), (never, False)):
        state, _ = step(params(), BATCH)
        step(state, BATCH)
        assert [x.is_deleted() for x in jax.tree.leaves(state)] == [donates, donates]
    assert not any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(BATCH))


def test_one_array_in_two_places_is_not_given_up_twice(shard):
    def step(online, target, batch):
        new, _ = descend(online, batch)
        return {"online": new, "target": jax.tree.map(lambda t, p: t + p, target, new)}

    sharded_step = shard(jax.jit(step, donate_argnums=(0, 1)))
    out = sharded_step(params(), params(), BATCH)
    same(sharded_step(out["online"], out["online"], BATCH), step(*[params_after_one()] * 2, BATCH))


def params_after_one():
    return descend(params(), BATCH)[0]


def test_unchanged_variables_survive_donation(shard):
    def step(model, frozen, batch):
        model.kernel[...] = model.kernel[...] + frozen.kernel[...] * batch["x"].sum()

    model, frozen = (nnx.Linear(3, 2, rngs=nnx.Rngs(i)) for i in (0, 1))
    sharded_step = shard(nnx.jit(step, donate_argnums=(0, 1)))
    before = np.asarray(frozen.kernel[...])
    for _ in range(3):
        sharded_step(model, frozen, BATCH)
    same(frozen.kernel[...], before)


def test_arrays_that_lie_elsewhere_are_moved(shard):
    step = shard(jax.jit(descend))
    there = jax.device_put(params(), jax.devices()[1])
    divided = jax.device_put(BATCH, NamedSharding(step.mesh, P("data")))
    for state, batch in ((there, BATCH), (params(), divided), (there, divided), (params(), BATCH)):
        same(step(state, batch), descend(params(), BATCH))
    assert len(step._entries) == 1


def test_closed_over_arrays_are_placed_once(shard):
    data = jnp.asarray(BATCH["x"])
    step = shard(jax.jit(lambda params: params + (data @ jnp.ones((3, 2))).sum()))
    for _ in range(3):
        out = step(jnp.zeros(()))
    same(out, (BATCH["x"] @ np.ones((3, 2))).sum())
    assert path_name(step.entry.traced.in_paths[0]) == "closure.0"
    assert len(step.entry.consts) == 1 and step.entry.consts[0].sharding.mesh == step.mesh


def test_no_argument_is_kept_alive(shard):
    for fn in (descend, jax.jit(descend, donate_argnums=0)):
        step, state = shard(fn), params()
        step(step(state, BATCH)[0], BATCH)
        gone = weakref.ref(state["w"])
        del state
        gc.collect()
        assert gone() is None


# Errors and other traces


def test_the_planner_refuses_before_anything_is_given_up(shard):
    step = shard(jax.jit(descend), donate=True)
    state, _ = step(params(), BATCH)
    with pytest.raises(ShardError, match=r"batch.x has 3 examples"):
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
def test_a_step_that_cannot_be_traced_is_named_with_its_line(shard, what):
    vjp = jax.vjp
    with pytest.raises(ShardError) as caught:
        shard(bad_step(what))(jnp.ones((3, 2)), BATCH)
    message = str(caught.value)
    assert message.startswith("step can't be compiled: line ") and " of test_step.py, `" in message
    assert what.removesuffix(":") in message and BAD[what] in message and "\n" not in message
    assert jax.vjp is vjp


def test_changing_an_object_from_outside_the_arguments_is_named(shard):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def step(batch):
        model.kernel[...] = model.kernel[...] * 2

    with pytest.raises(ShardError, match="changes an NNX object that is not among the step's arguments"):
        shard(step)(BATCH)


def test_errors_of_the_users_own_pass_through(shard):
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


def test_under_another_trace_the_plain_step_is_called(shard):
    step = shard(jax.jit(descend))
    same(jax.jit(step)(params(), BATCH), descend(params(), BATCH))
    same(jax.grad(lambda p: step(p, BATCH)[1])(params()), jax.grad(lambda p: descend(p, BATCH)[1])(params()))
    assert jax.eval_shape(step, params(), BATCH)[1].shape == ()
    assert step.calls == 0


def test_a_step_inside_a_step_is_part_of_it(shard):
    inner = shard(jax.jit(descend))
    outer = shard(lambda params, batch: inner(inner(params, batch)[0], batch))
    same(outer(params(), BATCH), descend(params_after_one(), BATCH))
    assert inner.calls == 0 and outer.calls == 1


def test_threads_may_call_one_step(shard):
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
    assert not errors and step.calls == 80 and len(step._entries) == 2


# Preparing, timing, checking


def test_prepare_compiles_for_shapes_alone(shard):
    step = shard(jax.jit(descend))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params(), BATCH))
    entry = step.prepare(*shapes)
    assert entry is step.entry and step.calls == 0 and entry.compile_s > 0
    step(params(), BATCH)
    assert step.entry is entry and entry.calls == 1


def test_some_calls_are_waited_for_and_timed(shard):
    step = shard(jax.jit(descend))
    state = params()
    for _ in range(40):
        state, _ = step(state, BATCH)
    assert step.calls == 40
    assert len(step.entry.timings) == 8 + 2  # calls 2 to 9, then 18 and 36
    assert all(0 < seconds < 60 for seconds in step.entry.timings)


@pytest.mark.parametrize("fn", [descend, train, nnx.jit(train, donate_argnums=(0, 1))])
def test_repeat_times_the_step_and_updates_nothing(shard, fn):
    step = shard(fn)
    with pytest.raises(ShardError, match="set keep_arguments before"):
        step.repeat(2)
    step.keep_arguments = True
    args = (params(),) if fn is descend else net()
    step(*args, BATCH)
    before = numbers(*args) if fn is not descend else None
    step.repeat(3)
    assert len(step.entry.timings) == 3 and step.calls == 1
    if before:
        same(numbers(*args), before)
        step(*args, BATCH)


def test_progress_says_what_takes_long(shard):
    step, said = shard(jax.jit(descend)), []
    step.progress = said.append
    step(params(), BATCH)
    step(params(), BATCH)
    assert said == ["tracing", "planning dp", "compiling for 2 devices", "first run"]


def test_a_report_needs_a_call(shard):
    with pytest.raises(ShardError, match="descend has not run yet"):
        shard(descend).report()


def test_it_keeps_the_steps_name_and_works_as_a_method(shard):
    step = shard(descend)
    assert step.__name__ == step.name == "descend" and step.__wrapped__ is descend

    class Owner:
        step = shard(lambda self, params, batch: descend(params, batch))

    same(Owner().step(params(), BATCH), descend(params(), BATCH))


def test_the_planner_is_given_the_partitioning_that_flax_keeps(shard):
    init = nnx.with_partitioning(nnx.initializers.ones, (None, "model"), eager_sharding=False)
    model = nnx.Linear(3, 2, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))
    step = shard(lambda model, batch: model(batch["x"]))
    step(model, BATCH)
    assert step.entry.plan.metadata == (P(None, "model"), None, None)


@dataclasses.dataclass(frozen=True)
class Config:
    scale: float
    sizes: list = dataclasses.field(default_factory=list)


def test_objects_without_arrays_are_held_by_value(shard):
    def step(params, batch, config):
        return jax.tree.map(lambda p: p * config.scale + len(config.sizes), params)

    sharded_step, config = shard(step), Config(2.0)
    for _ in range(2):
        same(sharded_step(params(), BATCH, config), step(params(), BATCH, config))
    config.sizes.append(1)
    same(sharded_step(params(), BATCH, config), step(params(), BATCH, config))
    assert len(sharded_step._entries) == 2
