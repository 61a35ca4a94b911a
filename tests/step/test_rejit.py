"""A trainer that jits a method of its own trains sharded, in the cell and in later ones; other jits are as ever."""

import sys
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support.stand_in import BATCH, descend, params, same, shard

from jaxshard_magic.step import ShardedStep
from jaxshard_magic.step.rejit import ShardedJits

TRAINER = """
import functools, jax, jax.numpy as jnp, optax
import equinox as eqx
from flax import nnx
from flax.nnx import jit as imported_before
class Trainer:
    def __init__(self):
        self.model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)
        self.jitted = None
        {early}
    def _train_step(self, model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(model)
        optimizer.update(model, grads)
        return loss
    def train(self, batches):
        if self.jitted is None:
            {late}
        for batch in batches:
            loss = self.jitted(batch)
        return loss
"""
PARTIAL = "self.jitted = functools.partial({}(self._train_step), self.model, self.optimizer)"
USE = "\nloss = trainer.train([batch] * 3)"


def sharded(given, name="trainer"):
    return len(given[name].model.kernel[...].sharding.device_set) == 8


@pytest.fixture
def plain(given):
    given.run(TRAINER.format(early="pass", late=PARTIAL.format("nnx.jit")) + "trainer = Trainer()" + USE)
    return given["loss"]


@pytest.mark.parametrize("jit", ["nnx.jit", "imported_before", "nnx.jit(donate_argnames='optimizer')"])
@pytest.mark.parametrize("early", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_method_that_its_object_jits_runs_sharded(given, plain, jit, early):
    made = PARTIAL.format(jit)
    source = TRAINER.format(early=made if early else "pass", late="pass" if early else made)
    report = given.run("%%shard fsdp --check --step Trainer._train_step\n" + source + "trainer = Trainer()" + USE)
    assert report.check.passed and report.timing.calls == 3 and sharded(given)
    assert jnp.allclose(given["loss"], plain, rtol=1e-5)


def test_a_trainer_of_a_module_is_found_without_its_name_and_without_its_text(given, plain):
    given.shell.user_ns["source"] = TRAINER.format(early="pass", late=PARTIAL.format("nnx.jit"))
    given.run("import sys, types\nlibrary = types.ModuleType('library'); sys.modules['library'] = library")
    given.run("exec(compile(source, 'library.py', 'exec'), library.__dict__)\ntrainer = library.Trainer()")
    report = given.run("%%shard fsdp" + USE)
    assert (report.name, report.timing.calls) == ("trainer._train_step", 3) and sharded(given)


LIBRARY = """
import functools, jax.numpy as jnp, optax
from flax import nnx
class Trainer:
    def __init__(self):
        self.model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)
        self.jitted = None
    def _train_step(self, model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(model)
        optimizer.update(model, grads)
        return loss
    def create_step(self):
        return self._train_step
    def jit_step(self, skip, cache):
        step = self.create_step()
        if skip:
            return functools.partial(step, self.model, self.optimizer)
        if self.jitted is None:
            self.jitted = nnx.jit(step, donate_argnames=("optimizer",))
            def bound(f, *args):
                return functools.partial(nnx.cached_partial(f, *args)) if cache else functools.partial(f, *args)
            self.jitted = bound(self.jitted, self.model, self.optimizer)
        return self.jitted
    def train(self, batches, skip=False, cache=True):
        train_step = self.jit_step(skip, cache)
        if not skip:
            train_step.func.jitted_fn._cache_size()
        for batch in batches:
            loss = train_step(batch)
        return loss
"""


@pytest.mark.parametrize(
    "how", ["", *(pytest.param(how, marks=pytest.mark.full) for how in ("cache=False", "skip=True"))]
)
@pytest.mark.parametrize("line", ["", " --step trainer._train_step"])
def test_a_trainer_of_an_installed_library_runs_sharded(given, plain, tmp_path, monkeypatch, how, line):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "library_of_trainers.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "library_of_trainers", raising=False)
    given.run("import library_of_trainers\ntrainer = library_of_trainers.Trainer()")
    report = given.run(f"%%shard dp{line}\nloss = trainer.train([batch] * 3, {how})")
    assert (report.name, report.timing.calls) == ("trainer._train_step", 3) and sharded(given)
    assert jnp.allclose(given["loss"], plain, rtol=1e-5)


def test_what_jax_traced_whole_is_told_by_the_name_that_shards_it(given, capsys):
    source = TRAINER.format(early="pass", late=PARTIAL.format("nnx.jit")).replace(
        "lambda m: jnp.mean", "lambda m: loss_of"
    )
    loss = "\ndef loss_of(x): return jnp.mean(x)\ntrainer = Trainer()"
    given.run(source)
    assert given.run("%%shard dp --step loss_of" + loss + USE) is None
    assert "--step trainer._train_step shards that" in capsys.readouterr().out
    given.run("trainer = Trainer()")
    given.run("%%shard dp --step trainer._train_step" + USE)
    assert sharded(given)


def test_a_later_cell_that_jits_it_runs_sharded(given):
    source = TRAINER.format(early="pass", late=PARTIAL.format("nnx.jit"))
    given.run("%%shard dp --step trainer._train_step\n" + source + "trainer = Trainer()")
    given.run(USE)
    assert sharded(given) and given.run("%shard").timing.calls == 3


@pytest.mark.parametrize("jit", ["jax.jit", "eqx.filter_jit"])
def test_a_function_that_is_jitted_later_stays_sharded(given, jit):
    given.run("import equinox as eqx")
    step = "\ndef train_step(state, batch):\n    g = jax.grad(loss_fn)(state, batch)\n"
    step += "    return jax.tree.map(lambda p, g: p - 0.1 * g, state, g)\n"
    given.run("%%shard dp" + step + "state = train_step(state, batch)")
    given.run(f"train_step = {jit}(train_step)\nfor _ in range(2): state = train_step(state, batch)")
    assert isinstance(given["train_step"], ShardedStep) and given["train_step"].calls == 2


@pytest.mark.parametrize("cell", ["train_step(state, batch)", "jax.jit(lambda s, b: train_step(s, b))(state, batch)"])
def test_a_step_inside_of_another_function_is_told_with_the_line(given, capsys, cell):
    given.run("outer = jax.jit(lambda state, batch: train_step(state, batch))")
    step = "\ndef train_step(state, batch):\n    return jax.grad(loss_fn)(state, batch)\n"
    assert given.run("%%shard dp --step train_step" + step + "_ = outer(state, batch)") is None
    said = capsys.readouterr().out
    assert said.startswith("train_step ran unsharded, as another function called it (cell [") and said.count("\n") == 1
    given.run("jax.clear_caches()\n" + cell.replace("train_step(state, batch)", "outer(state, batch)", 1))
    assert "train_step ran unsharded" in capsys.readouterr().out


def test_all_other_jits_are_as_ever_and_nothing_stays():
    before = jax._src.pjit.make_jit, vars(jax)["jit"]
    rejits, step = ShardedJits(), shard(descend)
    step.rejit = lambda jitted: ("sharded", jitted)
    with rejits, rejits:
        assert jax.jit(step)[0] == nnx.jit(types.MethodType(step, object()))[0] == "sharded"
        jitted = jax.jit(descend)
        same(jitted(params(), BATCH), descend(params(), BATCH))
        assert isinstance(nnx.jit(descend), type(nnx.jit(lambda: 0)))
        assert type(jitted) is type(jax.jit(lambda: 0))
    assert (jax._src.pjit.make_jit, vars(jax)["jit"]) == before


def test_what_an_interrupt_left_in_place_the_next_takes_out(monkeypatch):
    ShardedJits().revert()  # of a cell of another test that never ended
    before = jax._src.pjit.make_jit
    ShardedJits().apply()  # and no end
    rejits = ShardedJits()
    rejits.apply()
    assert jax._src.pjit.make_jit is not before
    rejits.revert()
    rejits.revert()
    assert jax._src.pjit.make_jit is before
