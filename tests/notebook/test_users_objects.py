"""Objects that a notebook holds and a step keeps need nothing that plain JAX does not ask them for."""

import pytest
from support.cells import LOOP, STEP

from jaxshard_magic.step import ShardedStep

LAZY = """
class Slow:
    def __init__(self):
        self.rate = 0.1
    def __call__(self, x):
        return self.rate * x
    def __getattr__(self, name):
        raise RuntimeError("only inside of a step")
    def __repr__(self):
        raise RuntimeError("only inside of a step")
    def __bool__(self):
        raise RuntimeError("only inside of a step")
class Proxy:
    def __getattribute__(self, name):
        raise RuntimeError("working outside of a context")
slow, proxy = Slow(), Proxy()
"""
WITH_SLOW = STEP.replace("p - 0.1 * g", "p - slow(g)")


@pytest.mark.parametrize("decorated", ["", "\n@jax.jit"])
def test_a_lazy_helper_of_a_step_is_called_and_asked_nothing(given, trained, decorated):
    given.run(LAZY)
    report = given.run("%%shard fsdp --check" + decorated + WITH_SLOW + LOOP)
    assert report.check.passed and report.timing.calls == 3
    given.run("%shard code")


def test_a_lazy_helper_that_changes_is_read(given):
    given.run(LAZY + "start = state")
    given.run("%%shard dp" + WITH_SLOW + LOOP)
    given.run("slow.rate = 0.0\nstate, _ = train_step(start, batch)")
    given.run("moved = float(jnp.abs(state['w'] - start['w']).max())")
    assert given["moved"] == 0


MODEL = """
import dataclasses, optax
from flax import nnx
@dataclasses.dataclass({options})
class Config:
    width: int = 8
    names: list = dataclasses.field(default_factory=list)
class Net(nnx.Module):
    def __init__(self, rngs):
        self.config = Config()
        self.up = nnx.Linear(16, self.config.width, rngs=rngs)
    def __call__(self, x):
        return self.up(x)
model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
"""
TRAIN = """
@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(batch["x"]) ** 2))(model)
    optimizer.update(model, grads)
    return loss
"""


@pytest.mark.parametrize("options", ["slots=True", "", "slots=True, frozen=True"])
def test_a_model_keeps_a_config_with_slots_and_a_list(given, options):
    given.run(MODEL.format(options=options))
    assert given.run("%%shard fsdp --check" + TRAIN).check.passed


def test_a_static_argument_with_slots_is_one(given):
    config = "import dataclasses, functools\n@dataclasses.dataclass(slots=True, frozen=True)\n"
    config += "class Config:\n    rate: float = 0.1\n"
    step = STEP.replace(
        "def train_step(state", "@functools.partial(jax.jit, static_argnums=0)\ndef train_step(config, state"
    )
    given.run(config + "config = Config()")
    loop = LOOP.replace("train_step(state", "train_step(config, state")
    assert given.run("%%shard fsdp --check" + step.replace("0.1 * g", "config.rate * g") + loop).check.passed
    assert isinstance(given["train_step"], ShardedStep)


def test_an_attribute_on_the_way_to_a_step_that_raises_is_one_line(given):
    given.run(LAZY)
    said = str(given.fails("%%shard dp --step slow.step\npass"))
    assert said == "--step slow.step: slow.step can't be read, which raises RuntimeError: only inside of a step"


@pytest.mark.parametrize("decorated", ["", "\n@jax.jit"])
def test_a_result_in_an_object_that_is_no_pytree_is_refused_in_a_line(given, decorated):
    given.run("import dataclasses\n@dataclasses.dataclass\nclass Out:\n    loss: object")
    error = given.fails("%%shard dp" + decorated + STEP.replace(", loss\n", ", Out(loss)\n") + LOOP)
    said = str(error)
    assert "train_step returns an object of Out" in said and "register_dataclass(Out)" in said and "\n" not in said


def test_a_plain_method_reads_arrays_of_its_own_object_in_each_call(given):
    given.run("""
class Trainer:
    def __init__(self): self.rate = jnp.ones(())
    def step(self, state, batch):
        grads = jax.grad(loss_fn)(state, batch)
        return jax.tree.map(lambda p, g: p - self.rate * g, state, grads)
trainer, start = Trainer(), state
""")
    given.run("%%shard dp --step trainer.step\nstate = trainer.step(state, batch)")
    assert len(given["state"]["w"].sharding.device_set) == 8
    given.run("trainer.rate = jnp.zeros(())\nmoved = float(abs(trainer.step(start, batch)['w'] - start['w']).max())")
    assert given["moved"] == 0
