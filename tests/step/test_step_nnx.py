"""NNX objects are changed by a sharded step as by the plain one: in place, structure and all, never stale."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from support.stand_in import BATCH, descend, no_way_back, params, same, shard

import jaxshard_magic
from jaxshard_magic.errors import ShardError


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


@pytest.mark.parametrize(
    ("fn", "donate"),
    [
        (train, None),
        pytest.param(train, True, marks=pytest.mark.full),
        pytest.param(nnx.jit(train), None, marks=pytest.mark.full),
        (nnx.jit(train), True),
        pytest.param(nnx.jit(train, donate_argnames=("model", "optimizer")), None, marks=pytest.mark.ci),
        pytest.param(nnx.jit(train, donate_argnames=("model", "optimizer")), True, marks=pytest.mark.full),
    ],
)
def test_nnx_objects_are_updated_in_place(fn, donate, monkeypatch):
    step, mine, plain = shard(fn, donate=donate), net(), net()
    for call in range(4):
        assert step(*mine, BATCH) is None
        nnx.jit(train)(*plain, BATCH)
        if call == 0:
            no_way_back(monkeypatch)
    same(numbers(*mine), numbers(*plain))
    assert mine[0].dropout.rngs.count[...] == plain[0].dropout.rngs.count[...] == 4
    same(mine[2].compute(), plain[2].compute())


@pytest.mark.ci
def test_modes_and_static_attributes_are_never_stale():
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


@pytest.mark.ci
def test_replaced_layers_and_variables_are_seen():
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


def test_metadata_that_changes_is_seen():
    seen = []

    def apply(model, batch):
        seen.append(model.kernel.get_metadata("note", None))
        return model(batch["x"])

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    step = shard(nnx.jit(apply))
    step(model, BATCH)
    step(model, BATCH)
    model.kernel.set_metadata(note="frozen")
    step(model, BATCH)
    assert seen == [None, "frozen"]


def test_variables_that_a_step_creates_and_removes_are_there_and_gone():
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


def test_objects_stay_the_ones_they_were_and_share_what_they_shared():
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


def test_new_objects_and_gradients_come_back(monkeypatch):
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


@pytest.mark.ci
def test_objects_that_other_nnx_transforms_used_meanwhile_are_still_right():
    mine, plain = net(), net()
    step, jitted = shard(train), nnx.jit(train)
    for _ in range(3):
        step(*mine, BATCH)
        jitted(*mine, BATCH)
        jitted(*plain, BATCH)
        jitted(*plain, BATCH)
    same(numbers(*mine), numbers(*plain))
    assert len(step.programs.entries) == 1


def test_bare_arrays_trees_in_variables_and_python_counters_are_updated():
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


def test_variables_and_states_may_be_arguments_themselves():
    def step(variable, state, batch):
        variable[...] = variable[...] + 1
        state["kernel"][...] = state["kernel"][...] * 2

    variable, state = nnx.Param(jnp.zeros(2)), nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    before = np.asarray(state["kernel"][...])
    sharded_step = shard(step)
    for _ in range(3):
        sharded_step(variable, state, BATCH)
    same((variable[...], state["kernel"][...]), (np.full(2, 3.0), before * 8))


def test_a_forgotten_model_is_let_go():
    step = shard(nnx.jit(train))
    objects = net()
    step(*objects, BATCH)
    step(*objects, BATCH)
    gone = weakref.ref(objects[0]), weakref.ref(objects[0].outer.kernel[...])
    del objects
    gc.collect()
    assert gone[0]() is None and gone[1]() is None


@pytest.mark.ci
def test_two_models_take_turns_on_the_short_way(monkeypatch):
    step, first, second = shard(train), net(), net()
    for objects in (first, second):
        step(*objects, BATCH)
    no_way_back(monkeypatch)
    for objects in (first, second, first, second):
        step(*objects, BATCH)
    same(numbers(*first), numbers(*second))


def test_unchanged_variables_survive_donation():
    def step(model, frozen, batch):
        model.kernel[...] = model.kernel[...] + frozen.kernel[...] * batch["x"].sum()

    model, frozen = (nnx.Linear(3, 2, rngs=nnx.Rngs(i)) for i in (0, 1))
    sharded_step = shard(nnx.jit(step, donate_argnums=(0, 1)))
    before = np.asarray(frozen.kernel[...])
    for _ in range(3):
        sharded_step(model, frozen, BATCH)
    same(frozen.kernel[...], before)


def test_changing_an_object_from_outside_the_arguments_is_named():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def step(batch):
        model.kernel[...] = model.kernel[...] * 2

    with pytest.raises(ShardError, match="changes an NNX object that is not among the step's arguments"):
        shard(step)(BATCH)


@pytest.mark.parametrize("fn", [descend, train, nnx.jit(train, donate_argnums=(0, 1))])
def test_repeat_times_the_step_and_updates_nothing(fn):
    step = shard(fn)
    with pytest.raises(ShardError, match="set keep_arguments before"):
        step.repeat(2)
    step.keep_arguments = True
    args = (params(),) if fn is descend else net()
    step(*args, BATCH)
    before = numbers(*args) if fn is not descend else None
    step.repeat(3)
    assert len(step.entry.clock.repeated_s) == 3 and step.calls == 1
    if before:
        same(numbers(*args), before)
        step(*args, BATCH)


def test_the_partitioning_that_flax_keeps_is_followed_by_spmd():
    init = nnx.with_partitioning(nnx.initializers.ones, (None, "model"), eager_sharding=False)
    model = nnx.Linear(3, 2, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))
    step = jaxshard_magic.shard(lambda model, batch: model(batch["x"]), "spmd", mesh="cpu:8 data=4 model=2")
    step(model, BATCH)
    assert [leaf.spec for leaf in step.entry.plan.leaves] == [P(None, "model"), P(), P()]


def test_a_step_without_objects_may_give_one_back():
    def step(batch):
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        model.kernel[...] = model.kernel[...] * batch["x"].sum()
        return {"model": model, "again": [model]}

    sharded_step, expected = shard(step), step(BATCH)["model"]
    for _ in range(2):
        out = sharded_step(BATCH)
        assert out["model"] is out["again"][0] and isinstance(out["model"], nnx.Linear)
        same(out["model"].kernel[...], expected.kernel[...])
