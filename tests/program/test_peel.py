"""Every way to write a step comes down to flat arrays with names, and to what is held beside them."""

import dataclasses
import functools
import math

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxshard_magic.errors import ShardError
from jaxshard_magic.program.flatten_call import cache_key, flatten_call
from jaxshard_magic.program.trace import path_name
from jaxshard_magic.program.unwrap import unwrap_step

X = np.ones((4, 3), np.float32)


def names(fn, *args, **kwargs):
    return [path_name(path) for path, _, _ in flatten_call(unwrap_step(fn), args, kwargs).inputs]


def outputs(fn, *args, **kwargs):
    peeled = flatten_call(unwrap_step(fn), args, kwargs)
    paths = []

    def flat(*leaves):
        outs, paths[:], _ = peeled.flat_function(*leaves)
        return outs

    jax.eval_shape(flat, *peeled.leaves)
    return [path_name(path) for path in paths]


def key(fn, *args, **kwargs):
    return flatten_call(unwrap_step(fn), args, kwargs).key


# What is under the wrappers


def test_static_and_donated_arguments_are_read_from_the_jit():
    @functools.partial(jax.jit, static_argnames="n", donate_argnums=0)
    def step(state, batch, n):
        return state

    found = unwrap_step(step)
    assert found.static == {2, "n"}
    assert found.donates(0) and found.donates("state") and not found.donates(1)


def test_nnx_jit_brings_its_static_and_donated_arguments():
    step = nnx.jit(lambda model, flag: None, static_argnums=1, donate_argnames="model")
    found = unwrap_step(step)
    assert found.static >= {1} and found.donates(0) and found.graph


def test_filter_jit_donates_all_or_all_but_the_first():
    def step(a, b, c):
        return a

    assert not unwrap_step(eqx.filter_jit(step)).donates(0)
    assert [unwrap_step(eqx.filter_jit(step, donate="all")).donates(i) for i in range(3)] == [True] * 3
    rest = unwrap_step(eqx.filter_jit(step, donate="all-except-first"))
    assert [rest.donates(i) for i in range(3)] == [False, True, True]


def test_partials_and_methods_put_their_arguments_in_front():
    class Trainer:
        @functools.partial(jax.jit, static_argnums=0)
        def step(self, rate, batch):
            return batch * rate

    trainer = Trainer()
    found = unwrap_step(functools.partial(trainer.step, 0.5))
    assert found.bound == (trainer, 0.5) and found.static == {0, "self"}
    assert names(functools.partial(trainer.step, 0.5), X) == ["rate", "batch"]


def test_cached_partial_gives_up_the_objects_it_holds():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    cached = nnx.cached_partial(nnx.jit(lambda model, x: model(x)), model)
    assert names(cached, X) == ["model.bias", "model.kernel", "x"]


def test_jit_partial_gives_up_the_variables_it_holds():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    step = nnx.jit_partial(lambda model, x: model(x), model, graph=False)
    assert len(flatten_call(unwrap_step(step), (X,), {}).leaves) == 3


def test_a_callable_object_is_its_own_first_argument():
    class Loss(eqx.Module):
        scale: jax.Array

        def __call__(self, x):
            return self.scale * x

    assert names(Loss(jnp.ones(3)), X) == ["self.scale", "x"]


def test_what_cannot_be_called_is_no_step():
    with pytest.raises(ShardError, match="a step must be callable, got dict"):
        unwrap_step({})


# Names


def test_the_first_key_is_the_parameters_name():
    def step(state, *batches, rate, **more):
        return state

    found = names(step, {"w": X}, X, [X, X], rate=jnp.float32(1), extra=X)
    assert found == ["state.w", "0", "1.0", "1.1", "extra", "rate"]


def test_static_arguments_do_not_shift_the_names():
    step = jax.jit(lambda a, kind, b: a + b, static_argnums=1)
    assert names(step, X, "sum", X) == ["a", "b"]
    assert names(jax.jit(lambda a, kind, b: a, static_argnums=-2), X, "sum", X) == ["a", "b"]


def test_variables_and_boxes_leave_no_value_in_a_path():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    _graphdef, state = nnx.split(model)
    assert names(lambda model, x: model(x), model, X) == ["model.bias", "model.kernel", "x"]
    assert names(jax.jit(lambda state: state), state) == ["state.bias", "state.kernel"]
    boxed = {"kernel": nn.Partitioned(X, names=("data", None))}
    assert names(jax.jit(lambda params: params), boxed) == ["params.kernel"]


def test_what_is_updated_in_place_keeps_its_path():
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: m(x).mean())(model)
        optimizer.update(model, grads)
        return {"loss": loss}

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    found = outputs(step, model, optimizer, X)
    assert found == ["return.loss", "model.bias", "model.kernel", "optimizer.step"]


def test_what_the_step_leaves_alone_is_no_output():
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    assert outputs(lambda model, x: model(x), model, X) == ["return", "model.mean", "model.var"]


def test_flax_partitioning_comes_with_the_leaves():
    def noted(fn, *args):
        return [note for _, note, _ in flatten_call(unwrap_step(fn), args, {}).inputs]

    init = nnx.with_partitioning(nnx.initializers.ones, (None, "model"), eager_sharding=False)
    model = nnx.Linear(3, 2, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))
    assert noted(lambda model: None, model) == [P(None, "model")]
    assert noted(jax.jit(lambda state: None), nnx.state(model)) == [P(None, "model")]
    assert noted(jax.jit(lambda p: None), [nn.Partitioned(X, names=("data", None)), X]) == [
        P("data", None),
        None,
    ]
    logical = nn.LogicallyPartitioned(X, names=("batch", "embed"), rules=(("batch", "data"), ("embed", None)))
    assert noted(jax.jit(lambda p: None), logical) == [P("data", None)]


# What is held, and when two calls are of one kind


def test_a_plain_function_holds_numbers_and_a_jitted_one_traces_them():
    def step(x, rate):
        return x * rate

    assert key(step, X, 1.0) != key(step, X, 2.0)
    jitted = jax.jit(step)
    assert key(jitted, X, 1.0) == key(jitted, X, 2.0)
    assert key(jitted, X, 1.0) != key(jitted, X, 1)


@pytest.mark.parametrize("one, other", [(1, True), (1, 1.0), (0.0, -0.0), ((1, 2), (1, 2.5)), ("a", "b")])
def test_different_values_have_different_keys(one, other):
    assert cache_key(one) != cache_key(other)


@pytest.mark.parametrize("value", [math.nan, [1, [2]], {"a": [1]}, None, jnp.float32, {1, 2}])
def test_equal_values_have_equal_keys(value):
    assert cache_key(value) == cache_key(value)
    assert hash(cache_key(value)) == hash(cache_key(value))


def test_weak_types_shapes_and_dtypes_tell_calls_apart():
    step = jax.jit(lambda x: x)
    found = [key(step, x) for x in (1.0, jnp.float32(1), jnp.ones(1), jnp.ones(2), jnp.ones(2, int))]
    assert len(set(found)) == 5
    assert key(step, np.ones(2, np.float64)) == key(step, jnp.ones(2))


def test_a_list_among_a_modules_attributes_is_seen_to_change():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    model.sizes = [1, 2]

    def step(model, x):
        return model(x)

    before = key(step, model, X)
    assert key(step, model, X) == before
    model.sizes.append(3)
    assert key(step, model, X) != before


def test_shared_objects_are_opened_once():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    assert names(lambda a, b: None, model, [model, nnx.List([model])]) == ["a.bias", "a.kernel"]


@dataclasses.dataclass
class Batch:
    x: np.ndarray


def test_arrays_in_an_unknown_object_are_refused_with_the_line_that_helps():
    with pytest.raises(ShardError, match="step: batch is a Batch, which jax does not know as a pytree") as caught:

        def step(batch):
            return batch.x

        key(step, Batch(X))
    assert caught.value.fix == "jax.tree_util.register_dataclass(Batch)"


def test_what_no_device_can_hold_is_refused():
    with pytest.raises(ShardError, match=r"batch.text is a numpy array of dtype <U1"):
        key(jax.jit(lambda batch: None), {"text": np.array(["a"]), "x": X})
    with pytest.raises(ShardError, match="the static argument 0 is a list, which can't be hashed"):
        key(jax.jit(lambda sizes: None, static_argnums=0), [1, 2])
    with pytest.raises(ShardError, match="buffer is a bytearray, neither an array nor hashable"):
        key(lambda buffer: None, bytearray(b"x"))


def test_variables_with_references_are_refused():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    model.extra = nnx.Variable(jnp.ones(2), ref=True)
    with pytest.raises(ShardError, match=r"model.extra is a Variable with ref=True or hijax=True"):
        key(lambda model: None, model)


class Settings:
    def __init__(self, rate):
        self.rate, self.log, self.owner = rate, [], self


def test_an_objects_attributes_count_where_the_step_reads_them():
    def scale(settings, x):
        return settings.rate * x

    def step(settings, x):
        return scale(settings, x)

    settings = Settings(0.1)
    first = key(step, settings, X)
    settings.log.append("called")
    assert key(step, settings, X) == first != key(step, Settings(0.1), X)
    settings.rate = 0.2
    assert key(step, settings, X) != first


def test_a_methods_object_counts_by_what_its_methods_read():
    class Trainer:
        def __init__(self):
            self.settings, self.epoch = Settings(0.1), 0

        def scale(self, x):
            return x * self.settings.rate

        def step(self, x):
            return self.scale(x)

    trainer = Trainer()
    first = key(trainer.step, X)
    trainer.epoch = 1
    assert key(trainer.step, X) == first
    trainer.settings.rate = 0.2
    assert key(trainer.step, X) != first


@pytest.mark.parametrize(
    ("step", "args", "kwargs", "given"),
    [
        (lambda a, b, c=1: a, (1.0, 2.0), {}, (2, ())),
        (lambda a, b, c=1: a, (1.0,), {"b": {"x": 2.0}}, (1, ("b",))),
        (jax.jit(lambda a, n, b: a, static_argnums=1), (1.0, 3, 2.0), {}, (3, ())),
        (jax.jit(lambda a, b, n: a, static_argnames="n"), (1.0, 2.0), {"n": 3}, (2, ("n",))),
        (functools.partial(lambda rate, a, b: a, 0.1, b=2.0), (1.0,), {}, (1, ())),
    ],
)
def test_a_calls_own_arguments_are_known_without_those_of_its_wrappers(step, args, kwargs, given):
    assert flatten_call(unwrap_step(step), args, kwargs).call_signature == given
