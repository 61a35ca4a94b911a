"""Shapes in the place of arrays: what becomes of the notebook's names, and that a step is prepared from them alike."""

import doctest
import gc
import weakref
from collections import namedtuple
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import zoo
from flax import linen as nn
from flax import nnx
from zoo import equinox_steps, linen_steps, nnx_steps

import jaxshard_magic
from jaxshard_magic.errors import ShardError
from jaxshard_magic.notebook import abstract_line as _abstract
from jaxshard_magic.notebook.abstract_line import abstract, abstract_names

Shape = jax.ShapeDtypeStruct
KIB = "\u202fKiB"
ROWS, WIDTH = 32, 64
BATCH = {"x": Shape((ROWS, WIDTH), np.float32), "y": Shape((ROWS,), np.int32)}


def arrays(tree) -> list:
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array | np.ndarray)]


def kib(n: int = 4) -> jax.Array:
    """An array of so many KiB."""
    return jnp.zeros(256 * n, jnp.float32)


def refusal(namespace: dict, *names: str) -> str:
    """The message of the error, which is one line and changes nothing."""
    before = dict(namespace)
    with pytest.raises(ShardError) as caught:
        abstract_names(namespace, names)
    assert len(str(caught.value).splitlines()) == 1
    assert namespace == before
    assert all(namespace[name] is before[name] for name in before)
    return str(caught.value)


# What becomes of a value


def test_every_array_becomes_its_shape_and_all_else_stays():
    Pair = namedtuple("Pair", "left right")
    value = {
        "a": Pair(jnp.ones((2, 3), jnp.bfloat16), 7),
        "b": [np.zeros(4), "text", None, True],
        "c": (jnp.float32(1), jax.random.key(0), jax.random.PRNGKey(0)),
    }
    assert abstract(value) == {
        "a": Pair(Shape((2, 3), jnp.bfloat16), 7),
        "b": [Shape((4,), np.float32), "text", None, True],  # as jax takes it without x64
        "c": (Shape((), np.float32), Shape((), jax.random.key(0).dtype), Shape((2,), np.uint32)),
    }


def test_a_weak_type_stays_and_a_sharding_does_not():
    mesh = jaxshard_magic.mesh("data=8")
    placed = jax.device_put(jnp.zeros(8), jax.NamedSharding(mesh, jax.P("data")))
    assert abstract(placed).sharding is None
    weak = jnp.asarray(2.0)
    assert abstract(weak).weak_type == weak.weak_type
    assert abstract(jnp.zeros((), jnp.float32)).weak_type is False


def test_what_no_device_can_hold_is_no_array():
    words = np.array(["a", "b"])
    assert abstract([words, 1])[0] is words


def test_library_states_keep_their_types():
    boxed = nn.Partitioned(jnp.zeros((4, 8)), names=("data", None))
    assert abstract(boxed) == nn.Partitioned(Shape((4, 8), jnp.float32), names=("data", None))
    model = equinox_steps.Net(jax.random.key(0))
    shaped = abstract(model)
    assert type(shaped) is type(model)
    assert shaped.activation is model.activation
    assert not arrays(shaped)
    opt_state = optax.adam(1e-3).init({"w": jnp.zeros(3)})
    assert jax.tree.structure(abstract(opt_state)) == jax.tree.structure(opt_state)


def test_an_nnx_module_is_made_anew_and_the_given_one_stays():
    model = nnx_steps.MLP(nnx.Rngs(0))
    shaped = abstract(model)
    assert type(shaped) is nnx_steps.MLP
    assert shaped.inner.kernel.get_value() == Shape((64, 256), jnp.float32)
    assert isinstance(model.inner.kernel.get_value(), jax.Array)


def test_objects_of_several_names_stay_one_graph():
    class Tied(nnx.Module):
        def __init__(self, inner):
            self.inner, self.again = inner, inner

    inner = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    namespace = {"model": Tied(inner), "kernel_of": {"inner": inner}}
    abstract_names(namespace, ["model", "kernel_of"])
    assert namespace["model"].inner is namespace["model"].again is namespace["kernel_of"]["inner"]


# What is said and freed


def test_memory_is_freed_and_counted():
    namespace = {"state": {"w": kib(4), "m": kib(8), "step": 3}}
    gone = weakref.ref(namespace["state"]["w"])
    assert abstract_names(namespace, ["state"]) == [f"state: 2 arrays, 12.0{KIB} freed (now shapes)"]
    assert gone() is None
    assert namespace["state"] == {"w": Shape((1024,), np.float32), "m": Shape((2048,), np.float32), "step": 3}


def test_bytes_are_those_of_all_devices():
    mesh = jaxshard_magic.mesh("data=8")
    everywhere, split = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("data")))
    namespace = {"a": jax.device_put(kib(4), everywhere), "b": jax.device_put(kib(4), split)}
    told = abstract_names(namespace, ["a", "b"])
    assert [line.split(", ")[1] for line in told] == [
        f"32.0{KIB} freed (now shapes)",
        f"4.00{KIB} freed (now shapes)",
    ]


def test_an_array_under_two_names_is_counted_once():
    shared = kib()
    namespace = {"params": [shared], "state": {"params": [shared, shared], "m": np.zeros(1024, np.float32)}}
    del shared
    assert abstract_names(namespace, ["params", "state"]) == [
        f"params: 1 array, 4.00{KIB} freed (now shapes)",
        f"state: 3 arrays, 4.00{KIB} freed (now shapes)",
    ]


def test_who_still_holds_an_array_is_named():
    params = {"w": kib()}
    namespace = {"params": params, "state": {"params": params, "m": kib(8)}}
    del params
    assert abstract_names(namespace, ["state"]) == [
        f"state: 2 arrays, 8.00{KIB} freed (now shapes); 4.00{KIB} still held by params: "
        "%shard abstract params frees it"
    ]
    assert abstract_names(namespace, ["params"]) == [f"params: 1 array, 4.00{KIB} freed (now shapes)"]


def test_closures_objects_and_views_hold_arrays_too():
    class Trainer:
        def __init__(self, *parts):
            self.parts = parts

    def closure(x):
        return lambda: x

    big, numbers = kib(), np.zeros(1024)
    namespace = {"x": big, "n": numbers, "trainer": Trainer(big), "loss": closure(big), "row": numbers[:4]}
    del big, numbers
    told = abstract_names(namespace, ["x", "n"])
    assert told[0].endswith("held by trainer, loss: del trainer and del loss frees it")
    assert told[1].endswith("still held by row: %shard abstract row frees it")


def test_the_output_of_a_cell_holds_arrays_and_what_is_said_frees_them(notebook):
    notebook.run("import jax.numpy as jnp; x = {'w': jnp.zeros(1024)}")
    notebook.run("x")
    gone = weakref.ref(notebook["x"]["w"])
    (line,) = abstract_names(notebook.shell.user_ns, ["x"])
    remedy = "%xdel _2"
    assert line.endswith(f"{KIB} still held by outputs of cells: {remedy} frees it")
    assert gone() is not None
    notebook.run(remedy)
    gc.collect()
    assert gone() is None


def test_what_is_held_out_of_sight_is_said():
    keep = kib()
    (line,) = abstract_names({"x": keep}, ["x"])
    assert line == f"x: 1 array, 0{chr(0x202F)}B freed (now shapes); 4.00{KIB} still held outside the notebook's names"


def test_shapes_already_are_said():
    namespace = {"state": {"w": Shape((2,), np.float32)}}
    state = namespace["state"]
    assert abstract_names(namespace, ["state"]) == ["state: 1 shape already, nothing to free"]
    assert namespace["state"] is state


def test_nothing_is_changed_where_a_name_is_wrong():
    assert "Did you mean 'state'?" in refusal({"state": {"w": kib()}}, "state", "stat")
    assert "'epochs' is a int and holds no arrays that jax knows of" in refusal(
        {"state": kib(), "epochs": 3}, "state", "epochs"
    )
    assert "%shard abstract state batch" in refusal({"state": kib()})


def test_arrays_that_no_pytree_shows_are_refused():
    @dataclass
    class State:
        w: jax.Array

    assert "'s' has arrays in a State, which jax does not know as a pytree" in refusal({"s": State(kib())}, "s")
    assert "in a State" in refusal({"x": kib(), "s": {"deep": [State(kib())]}}, "x", "s")


# A step prepared from shapes


def report(step, *args, **kwargs):
    sharded = jaxshard_magic.shard(step, "fsdp", mesh=jaxshard_magic.mesh("cpu:8 data=8"))
    sharded.prepare(*args, **kwargs)
    return sharded.report()


def assert_alike(shaped, whole):
    assert shaped.leaves == whole.leaves
    assert shaped.memory == whole.memory
    assert shaped.collectives == whole.collectives
    assert shaped.advice == whole.advice


SOME = ("linen_train_state", "equinox_filter_jit", "nnx_rngs")


def check(name: str) -> None:
    call = zoo.STEPS[name].make()
    args, kwargs = abstract((call.args, call.kwargs))
    assert_alike(report(call.fn, *args, **kwargs), report(call.fn, *call.args, **call.kwargs))


@pytest.mark.parametrize("name", SOME)
def test_a_step_is_prepared_from_shapes_as_from_arrays(name):
    check(name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in zoo.TRACED if name in zoo.OFTEN and name not in SOME])
def test_every_step_is_prepared_from_shapes_as_from_arrays(name):
    check(name)


def nnx_state():
    model = nnx_steps.MLP(nnx.Rngs(0), dropout=0.1)
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def linen_state(key):
    params = linen_steps.PLAIN.init(key, jnp.zeros((1, 8, 8)))["params"]
    return linen_steps.TrainState.create(apply_fn=linen_steps.PLAIN.apply, params=params, tx=optax.adam(1e-3))


def filled(tree):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


@pytest.mark.ci
def test_nnx_objects_built_by_eval_shape():
    step = nnx_steps.loss_step
    assert_alike(report(step, *nnx.eval_shape(nnx_state), BATCH), report(step, *nnx_state(), filled(BATCH)))


@pytest.mark.ci
def test_an_nnx_optimizer_built_abstractly_over_an_abstract_module():
    model = nnx.eval_shape(lambda: nnx_state()[0])
    optimizer = nnx.eval_shape(lambda m: nnx.Optimizer(m, optax.adam(1e-3), wrt=nnx.Param), model)
    step = nnx_steps.loss_step
    assert not arrays((model, optimizer))
    assert_alike(report(step, model, optimizer, BATCH), report(step, *nnx_state(), filled(BATCH)))


@pytest.mark.ci
def test_a_linen_train_state_by_eval_shape():
    key, step = jax.random.key(0), linen_steps.state_step
    batch = {"image": Shape((ROWS, 8, 8), np.float32), "label": Shape((ROWS,), np.int32)}
    whole = report(step, linen_state(key), filled(batch))
    assert_alike(report(step, jax.eval_shape(linen_state, key), batch), whole)


def test_an_equinox_model_by_filter_eval_shape():
    key, step, adam = jax.random.key(0), equinox_steps.filter_step, equinox_steps.adam
    model = eqx.filter_eval_shape(equinox_steps.Net, key)
    opt_state = eqx.filter_eval_shape(lambda m: adam.init(eqx.filter(m, eqx.is_array)), model)
    real = equinox_steps.Net(key)
    whole = report(step, real, adam.init(eqx.filter(real, eqx.is_array)), filled(BATCH["x"]), filled(BATCH["y"]))
    assert_alike(report(step, model, opt_state, BATCH["x"], BATCH["y"]), whole)


def noisy(params, key, x):
    grads = jax.grad(lambda p: jnp.mean(((x + jax.random.normal(key, x.shape)) @ p["w"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), jax.random.split(key)[0]


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_key_by_eval_shape(make):
    params = {"w": Shape((WIDTH, WIDTH), jnp.bfloat16)}
    whole = report(noisy, filled(params), make(0), filled(BATCH["x"]))
    assert_alike(report(noisy, params, jax.eval_shape(make, 0), BATCH["x"]), whole)


@pytest.mark.filterwarnings("error")
def test_a_shape_of_64_bits_stands_for_the_array_that_jax_would_make_of_it():
    step = jaxshard_magic.shard(noisy, "fsdp", mesh=jaxshard_magic.mesh("cpu:8 data=8"))
    params, key = {"w": jnp.zeros((WIDTH, WIDTH))}, jax.random.key(0)
    shaped = step.prepare(params, key, Shape((ROWS, WIDTH), np.float64))
    assert step.prepare(params, key, np.zeros((ROWS, WIDTH))) is shaped


def test_the_example_runs():
    assert doctest.testmod(_abstract).failed == 0
