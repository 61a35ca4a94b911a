"""A notebook's values put together for hosts and bound in another namespace, as a host does: what they are there."""

import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest
from conftest import Notebook, shell
from IPython.core.compilerop import CachingCompiler

from jaxshard_magic.hosts.pickling import bind_transfer
from jaxshard_magic.hosts.transfer import Import
from jaxshard_magic.notebook.hosts_values import MAX_SENT_BYTES, NamePacker

CELLS = [
    """
import collections, dataclasses, enum, functools, threading
import jax, jax.numpy as jnp, numpy as np, optax, equinox as eqx
from flax import linen as nn, nnx, struct
from flax.training.train_state import TrainState
scale = 3.0
""",
    """
@dataclasses.dataclass(frozen=True)
class Config:
    lr: float = 0.1
    def twice(self):
        return self.lr * 2
class Net(nnx.Module):
    def __init__(self, rngs):
        self.a, self.drop = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
    def __call__(self, x):
        return self.drop(nnx.relu(self.a(x)))
class Dense(nn.Module):
    n: int = 4
    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.n)(x)
class Scaled(eqx.Module):
    w: jax.Array
    n: int = eqx.field(static=True)
@struct.dataclass
class State:
    w: jax.Array
@jax.tree_util.register_pytree_node_class
class Pair:
    def __init__(self, *parts): self.parts = parts
    def tree_flatten(self): return self.parts, None
    @classmethod
    def tree_unflatten(cls, _, parts): return cls(*parts)
class Box:
    def __init__(self, x): self.x = x
jax.tree_util.register_pytree_node(Box, lambda box: ((box.x,), None), lambda _, parts: Box(*parts))
class Outer:
    class Inner:
        pass
Point = collections.namedtuple("Point", "x y")
class Color(enum.Enum):
    RED = 1
""",
    """
config = Config(0.5)
model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(optax.cosine_decay_schedule(1e-2, 100)), wrt=nnx.Param)
dense = Dense()
params = dense.init(jax.random.key(0), jnp.ones((1, 4)))
state = TrainState.create(apply_fn=dense.apply, params=params, tx=optax.chain(optax.clip(1.0), optax.adam(1e-3)))
scaled, struct_state, pair, box = Scaled(jnp.ones(4), 2), State(jnp.ones(3)), Pair(jnp.ones(2)), Box(jnp.ones(2))
point, color, inner = Point(1, jnp.ones(2)), Color.RED, Outer.Inner()
key, keys = jax.random.key(3), jax.random.split(jax.random.key(4, impl="rbg"), 3)
generator = np.random.default_rng(0)
narrow = jnp.ones(3, jnp.bfloat16)
""",
    """
def twice(x, by=2): return x * by
def through(x): return twice(x) * scale
@jax.custom_vjp
def straight(x): return x * 2
straight.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 7,))
@jax.checkpoint
def recomputed(x): return jnp.sin(x) * scale
@functools.cache
def cached(x): return x + 1
@jax.jit
def jitted(x): return through(x)
@nnx.jit
def on_objects(model): return jnp.sum(model.a.kernel)
def make(k):
    def inner(x): return x * k + scale
    return inner
made = make(5)
bound = functools.partial(made, 2)
factorial = lambda n: 1 if n < 2 else n * factorial(n - 1)
class Trainer:
    def __init__(self, model, optimizer, config): self.model, self.optimizer, self.config = model, optimizer, config
trainer = Trainer(model, optimizer, config)
tangled = [1, trainer]; tangled.append(tangled)
lock = threading.Lock()
locked = {"lock": lock}
def locks(): return lock
large = np.zeros(10**7)
def sums(): return large.sum()
on_devices = jax.devices()[0]
twice_larger = {"a": large, "b": large}
""",
]


@dataclass
class Host:
    """The part of a host's shell that binds names."""

    user_ns: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    compile: Any = field(default_factory=CachingCompiler)

    def __getitem__(self, name: str) -> Any:
        return self.user_ns[name]


@dataclass
class Sender:
    """A notebook, and what becomes of its names on a host of their own."""

    notebook: Notebook

    def packed(self, names: str, host: Host, words: str = "", sent: Sequence[str] = ()) -> NamePacker:
        space = self.notebook.shell.user_ns
        lacking = [name for name in space if name not in host.user_ns and not name.startswith("_")]
        packing = NamePacker(self.notebook.shell, lacking, sent, words.split(), {})
        self.transfer = packing.transfer(names.split())
        return packing

    def send(self, names: str, words: str = "", host: Host | None = None, sent: Sequence[str] = ()) -> Host:
        host = Host() if host is None else host
        self.packed(names, host, words, sent)
        assert self.transfer is not None
        _, failed = bind_transfer(self.transfer, host)
        assert not failed, failed
        return host


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sender]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        with shell() as found:
            notebook = Notebook(found)
            for cell in CELLS:
                notebook.run(cell)
            yield Sender(notebook)


def test_objects_are_of_the_classes_that_their_text_defines_there(sender: Sender):
    there = sender.send("model dense scaled struct_state pair box point color inner config")
    for name, kind in (
        ("model", "Net"),
        ("dense", "Dense"),
        ("scaled", "Scaled"),
        ("struct_state", "State"),
        ("pair", "Pair"),
        ("box", "Box"),
        ("config", "Config"),
    ):
        assert type(there[name]) is there[kind] is not sender.notebook[kind], name
    assert there["color"] is there["Color"].RED
    assert type(there["point"]).__name__ == "Point" and there["point"].x == 1
    assert type(there["inner"]) is there["Outer"].Inner and there["config"].twice() == 1.0


def test_pytrees_are_registered_there_by_decorators_bases_and_calls(sender: Sender):
    there = sender.send("scaled struct_state pair box point state")
    for name in ("scaled", "struct_state", "pair", "box", "point", "state"):
        leaves = jax.tree.leaves(jax.tree.map(lambda x: x + 1, there[name]))
        own = jax.tree.leaves(sender.notebook[name])
        assert [np.asarray(x).tolist() for x in leaves] == [(np.asarray(x) + 1).tolist() for x in own], name


def test_a_state_trains_on_there(sender: Sender):
    there = sender.send("state params jnp jax optax nnx model optimizer")
    exec(
        "loss = lambda p: jnp.sum(state.apply_fn(p, jnp.ones((1, 4))) ** 2)\n"
        "after = state.apply_gradients(grads=jax.grad(loss)(params))\n"
        "grads = nnx.grad(lambda m: jnp.sum(m(jnp.ones((1, 4))) ** 2))(model)\n"
        "optimizer.update(model, grads)",
        there.user_ns,
    )
    assert int(there["after"].step) == 1 and int(there["optimizer"].step[...]) == 1


def test_keys_and_generators_go_on_as_here(sender: Sender):
    there = sender.send("key keys generator narrow")
    assert jax.random.uniform(there["key"]) == jax.random.uniform(sender.notebook["key"])
    assert there["keys"].dtype == sender.notebook["keys"].dtype and there["narrow"].dtype == "bfloat16"
    assert there["generator"].random() == np.random.default_rng(0).random()


def test_functions_read_the_names_of_the_host(sender: Sender):
    there = sender.send("through made bound factorial jitted")
    assert (there["through"](2), there["made"](1), there["bound"](), there["factorial"](5)) == (
        12,
        8,
        13,
        120,
    )
    assert there["twice"].__globals__ is there.user_ns and there["scale"] == 3.0
    there.user_ns["scale"] = 10.0
    assert (there["through"](2), there["made"](1), float(there["jitted"](2.0))) == (40, 15, 40)


def test_what_can_not_be_pickled_of_a_decorated_function_goes_as_text(sender: Sender):
    there = sender.send("straight recomputed cached")
    assert jax.grad(there["straight"])(1.0) == 7, "with the rule that a later line gives it"
    assert float(jax.grad(there["recomputed"])(0.0)) == 3 and there["cached"](1) == 2


def test_the_code_of_a_function_has_the_cell_and_the_line_that_it_has_here(sender: Sender):
    sender.notebook.run(
        "\n\ndef raises():\n    pass\n    raise ValueError('no')\nclass Raises:\n\n    def do(self): 1 / 0"
    )
    number = len(sender.notebook["In"]) - 1
    there = sender.send("raises Raises")
    for call, line in ((there["raises"], 3), (lambda: there["Raises"]().do(), 6)):
        with pytest.raises((ValueError, ZeroDivisionError)) as failed:
            call()
        frame = traceback.extract_tb(failed.tb)[-1]
        assert (frame.lineno, there.compile._filename_map[frame.filename]) == (line, number)


def test_what_objects_share_stays_shared(sender: Sender):
    there = sender.send("trainer tangled")
    assert there["trainer"].model is there["model"] and there["trainer"].optimizer is there["optimizer"]
    assert there["trainer"].config is there["config"]
    assert there["tangled"][1] is there["trainer"] and there["tangled"][2] is there["tangled"]


def test_an_object_that_was_sent_before_is_the_one_that_a_later_one_has(sender: Sender):
    there = sender.send("model")
    model = there["model"]
    sender.send("trainer", host=there, sent=["model"])
    assert there["trainer"].model is model is there["model"]


def test_modules_come_with_the_submodules_that_the_cell_reads(sender: Sender):
    sender.notebook.run("import xml.dom.minidom, json as encoder, xml")
    sender.packed("xml encoder", Host(), words="xml dom minidom parse")
    assert sender.transfer is not None
    assert set(sender.transfer.items) == {
        Import("xml", "xml", ("xml.dom", "xml.dom.minidom")),
        Import("encoder", "json"),
    }


@pytest.mark.parametrize("name", ["lock", "locked", "on_devices", "large", "twice_larger"])
def test_what_can_not_be_pickled_or_is_large_is_left(sender: Sender, name: str):
    packing = sender.packed(name, Host())
    assert sender.transfer is None and not packing.labels
    size = packing.unsendable[name]
    assert size is None if name in ("lock", "locked", "on_devices") else size > MAX_SENT_BYTES


def test_a_function_goes_without_what_it_reads_where_that_can_not(sender: Sender):
    there = sender.send("locks sums")
    assert {"locks", "sums"} <= there.user_ns.keys() and not {"lock", "large"} & there.user_ns.keys()


def test_an_object_of_a_class_that_was_defined_anew_since_is_left(sender: Sender):
    sender.notebook.run("class Old:\n    def f(self): pass\nold = Old()")
    sender.notebook.run("class Old:\n    def g(self): pass")
    packing = sender.packed("old", Host())
    assert sender.transfer is None and packing.unsendable == {"old": None}


def test_a_step_that_a_cell_has_sharded_goes_as_its_line_and_its_definition_alone(sender: Sender):
    sender.notebook.run("%load_ext jaxshard_magic\n%mesh data=8;\n%config ShardSession.options_limit = 0")
    step = "\ndef train_step(w):\n    return w - jax.grad(jnp.sum)(w) * rate\n"
    sender.notebook.run(f"%%shard dp --microbatches 1;\nrate = 0.5{step}w = train_step(jnp.ones(8))")
    packing = sender.packed("train_step w", Host())
    number = len(sender.notebook["In"]) - 1
    assert packing.unsendable == {}
    assert packing.step_cells == [(number, f"%%shard dp --microbatches 1\n{step}\n\nNone;")]
    assert {*packing.labels} == {"train_step under %%shard dp --microbatches 1", "w", "jnp", "jax", "rate"}
    sender.notebook.run("holder = [train_step]")
    assert sender.packed("holder", Host()).unsendable == {"holder": None}


def test_a_step_that_was_sharded_without_a_cell_does_not_go(sender: Sender):
    sender.notebook.run("import jaxshard_magic\nother = jaxshard_magic.shard(lambda w: w / 2, 'dp', mesh='data=8')")
    assert sender.packed("other", Host()).unsendable == {"other": None} and sender.transfer is None


def test_what_a_host_can_not_make_is_named_with_the_reason(sender: Sender, monkeypatch: pytest.MonkeyPatch):
    sender.notebook.run("import http.cookies as only_here")
    sender.packed("scale only_here", Host())
    assert sender.transfer is not None
    monkeypatch.setitem(sys.modules, "http.cookies", None)
    host = Host()
    values, failed = bind_transfer(sender.transfer, host)
    assert [*failed] == ["only_here"] and failed["only_here"].startswith("ModuleNotFoundError")
    assert set(values) <= {"scale"}
