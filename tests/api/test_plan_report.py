"""`step.plan(...)`: the report of a step that nothing has compiled, beside that of the compiled one."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard_magic
from jaxshard_magic import ShardError
from jaxshard_magic.compilation import single_program
from jaxshard_magic.report import Report

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="no TPU compiler: libtpu is not installed")
STRATEGIES = {"dp": "data=8", "fsdp": "data=8", "tp": "model=8", "fsdp+tp": "data=4 model=2"}


def train_step(state, batch):
    def loss(p):
        return jnp.mean((jax.nn.gelu(batch @ p["up"]) @ p["down"] - batch) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def arguments():
    state = {"up": np.ones((64, 256), np.float32), "down": np.ones((256, 64), np.float32)}
    return state, np.ones((32, 64), np.float32)


def shapes():
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments())


def sharded(strategy, **more):
    return jaxshard_magic.shard(train_step, strategy, mesh=f"cpu:8 {STRATEGIES[strategy]}", **more)


def rows(report):
    """The communication of a report, but for names of activations, which a plan does not tell."""
    return sorted(
        (c.kind, c.axes, c.bytes, c.count, c.wire_bytes, c.phase, c.line, c.source, c.what)
        for c in report.collectives
        if c.bytes > 4 and c.what is not None and "activation" not in c.what
    )


@pytest.fixture
def no_compiler(monkeypatch):
    def refused(*_, **__):
        raise AssertionError("something was compiled")

    monkeypatch.setattr(single_program, "compile_in_thread", refused)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plan_tells_the_communication_of_the_compiled_step_with_its_lines(strategy):
    step = sharded(strategy)
    planned = step.plan(*shapes())
    step.prepare(*shapes())
    compiled = step.report()
    assert planned.leaves == compiled.leaves
    assert rows(planned) == rows(compiled)
    assert sum(c.wire_bytes for c in planned.collectives) == sum(c.wire_bytes for c in compiled.collectives)
    assert {c.line for c in planned.collectives} == {c.line for c in compiled.collectives}


def test_lines_within_a_loop_are_those_of_its_body():
    def step(weights, x):
        def loss(weights):
            def layer(h, w):
                return jnp.tanh(h @ w), None

            return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * grads, value

    report = jaxshard_magic.shard(step, "fsdp", mesh="cpu:8 data=8").plan(jnp.ones((4, 512, 512)), jnp.ones((16, 512)))
    gathers = [c for c in report.collectives if c.kind == "all-gather"]
    assert gathers and {c.source for c in gathers} == {"return jnp.tanh(h @ w), None"}
    assert [c.count for c in gathers] == [4, 4]  # once a layer, in each pass


@pytest.mark.parametrize("given", [arguments, shapes])
def test_a_plan_compiles_and_runs_nothing(no_compiler, given):
    step = sharded("fsdp")
    state, batch = given()
    report = step.plan(state, batch=batch)
    assert report == step.plan(state, batch=batch)
    assert step.calls == 0 and report.timing.compile_s is None
    assert report.memory.source == "planned" and report.memory.per_device[0].peak > 0
    assert "Nothing is compiled: every figure is predicted from the plan." in report.to_text()
    assert "exact for the program compiled" not in report.to_text()
    assert Report.from_json(report.to_json()) == report
    with pytest.raises(ShardError, match="has not run yet"):
        step.report()


def test_a_plan_predicts_a_chip_that_is_not_attached(no_compiler):
    report = sharded("fsdp", on="v5e").plan(*shapes())
    assert report.timing.predicted_low_s < report.timing.predicted_step_s < report.timing.predicted_high_s
    assert all(c.seconds > 0 for c in report.collectives)
    assert report.memory.per_device[0].limit > 15 * 2**30


@needs_libtpu
def test_a_plan_for_a_slice_says_that_nothing_is_compiled():
    report = jaxshard_magic.shard(train_step, "fsdp", mesh="v5e:2x4 data=8").plan(*shapes())
    text = report.to_text()
    assert "Would fit, by its plan" in text and "Nothing is compiled" in text
    assert "compiled, not run" not in text


def test_what_cannot_be_planned_is_refused_as_by_a_call():
    with pytest.raises(ShardError, match="do not divide by data=8"):
        sharded("dp").plan(arguments()[0], np.ones((31, 64), np.float32))
