"""A sharded step in the place of a function: copied, pickled, and in the tracebacks of the user's errors."""

import copy
import dataclasses
import functools
import pickle
import sys
import traceback

import cloudpickle
import jax
import jax.numpy as jnp
import pytest
from support.cells import LOOP, STEP
from support.refusals import refusal
from support.stand_in import BATCH, descend, params, same, shard

from jaxshard_magic.errors import ShardError

W, X = jnp.ones((3, 2)), jnp.ones((4, 3))


class Trainer:
    def __init__(self):
        self.rate = 0.1

    def step(self, w, x):
        return w - self.rate * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


class Called(Trainer):
    def __call__(self, w, x):
        return self.step(w, x)


def trainer():
    of = Trainer()
    of.step = shard(of.step)
    of.step(W, X)
    return of


named = shard(descend)
descend_here = descend


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_object_has_a_step_of_its_own(copied):
    of = trainer()
    other = copied(of)
    other.rate = 0.0
    same(other.step(W, X), W)
    assert float(jnp.abs(of.step(W, X) - W).max()) > 0


def test_a_deep_copy_of_a_method_is_sharded_and_of_a_function_is_itself():
    of = trainer()
    other = copy.deepcopy(of)
    assert other.step.strategy == of.step.strategy and other.step is not of.step
    held = {"step": named, "partial": functools.partial(named, params())}
    assert copy.deepcopy(held)["step"] is copy.copy(named) is named
    assert copy.deepcopy(held)["partial"].func is named
    jitted = shard(jax.jit(descend))
    assert copy.deepcopy(jitted) is jitted
    called = shard(Called())
    assert copy.deepcopy(called).__wrapped__ is not called.__wrapped__


def test_records_keep_the_step_that_they_hold():
    record = dataclasses.make_dataclass("Record", ["rate", "step"])
    assert dataclasses.replace(record(0.1, named), rate=0.2).step is named
    assert copy.deepcopy(record(0.1, named)).step is named


def test_a_step_is_pickled_by_its_name_and_by_value_as_the_plain_function(monkeypatch):
    module = sys.modules[__name__]
    monkeypatch.setattr(named, "__module__", __name__)
    monkeypatch.setattr(named, "__qualname__", "named")
    assert pickle.loads(pickle.dumps(named)) is module.named
    same(pickle.loads(cloudpickle.dumps(shard(lambda w: w * 2)))(W), W * 2)
    with pytest.raises((AttributeError, pickle.PicklingError)) as plain:
        pickle.dumps(lambda w: w)
    with pytest.raises(type(plain.value)):
        pickle.dumps(shard(lambda w: w))


def failing(w, x):
    def loss(w):
        if x.shape[0] != 4:
            raise ValueError("of the user")
        return jnp.mean((x @ w) ** 2)

    return jax.grad(loss)(w)


def files(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def test_a_traceback_has_the_users_frames_alone():
    step = shard(failing)
    step(W, X)
    with pytest.raises(ValueError, match="of the user") as caught:
        step(W, X[:2])
    assert not [file for file in files(caught.value) if "jaxshard_magic/" in file]
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names == ["test_a_traceback_has_the_users_frames_alone", "failing", "loss"]


def test_a_refusal_has_the_users_frames_alone_and_so_has_what_it_comes_from():
    step = shard(lambda w, x: jnp.sum(w) if x.sum() > 0 else x)
    with pytest.raises(ShardError) as caught:
        step(W, X)
    error = caught.value
    while error is not None:
        assert not [file for file in files(error) if "jaxshard_magic/" in file]
        error = error.__cause__


def test_jax_shows_all_frames_where_it_is_asked_to():
    with jax._src.config.traceback_filtering("off"), pytest.raises(ValueError, match="of the user") as caught:
        shard(failing)(W, X[:2])
    assert [file for file in files(caught.value) if "jaxshard_magic/" in file]


def test_a_later_cell_shows_the_users_own_lines(given, capsys):
    bad = STEP.replace("return", "if batch['x'].shape[0] == 4: raise ValueError('of the user')\n    return")
    given.run("%%shard dp" + bad + LOOP)
    given.fails("train_step(state, jax.tree.map(lambda x: x[:4], batch))")
    shown = capsys.readouterr().out
    assert "raise ValueError('of the user')" in shown and "jaxshard_magic" not in shown
    given.fails("train_step(state)")
    assert "jaxshard_magic" not in capsys.readouterr().out


def test_an_array_that_was_given_away_is_told_by_its_name():
    for step in (shard(descend, donate=True), shard(jax.jit(descend, donate_argnums=0))):
        first, _ = step(params(), BATCH)
        step(first, BATCH)
        said = refusal(step, first, BATCH)
        assert said.startswith("descend: params.") and "was donated to an earlier call" in said
    gone = params()
    jax.tree.map(lambda x: x.delete(), gone)
    assert "has been deleted" in refusal(step, gone, BATCH)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_without_jit_a_step_is_told_before_and_after_it_has_run(jit):
    step = shard(jit(descend))
    for _ in range(3):
        with jax.disable_jit():
            assert refusal(step, params(), BATCH).startswith("jax_disable_jit is set")
        step(params(), BATCH)
    assert step.calls == 3
