"""Steps that keep numbers in a `jax.Ref` while they run: what is written there is read, by us as well."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.refusals import refusal

import jaxshard_magic
from jaxshard_magic.codegen.expression_marks import ExpressionMarks
from jaxshard_magic.program.flow import Flow
from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.trace import mark_arrays, trace

W = jax.random.normal(jax.random.key(1), (64, 32))
X = jax.random.normal(jax.random.key(0), (16, 64))


def step_of(layer):
    def step(w, x):
        value, grads = jax.value_and_grad(lambda w: jnp.mean(layer(x @ w) ** 2))(w)
        return w - 0.1 * grads, value

    return step


def added(h):
    total = jax.new_ref(jnp.zeros_like(h))

    def trip(c, _):
        total[...] += jnp.tanh(h * c)
        return c * 0.5, None

    lax.scan(trip, 1.0, None, length=3)
    return total[...]


def by_column(h):
    out = jax.new_ref(jnp.zeros_like(h))

    def trip(i, c):
        out[:, i] = jnp.tanh(h[:, i])
        return c

    lax.fori_loop(0, h.shape[1], trip, 0)
    return out[...]


@jax.custom_vjp
def with_rule(h):
    out = jax.new_ref(jnp.zeros_like(h))
    out[...] += jnp.tanh(h)
    return out[...]


def backward(out, g):
    given = jax.new_ref(jnp.zeros_like(g))
    given[...] += 3 * g * (1 - out**2)  # not the derivative: the rule is to be kept
    return (given[...],)


with_rule.defvjp(lambda h: (with_rule(h),) * 2, backward)


def in_a_jit(h):
    out = jax.new_ref(jnp.zeros_like(h))

    @jax.jit
    def write(h):
        out[...] = jnp.tanh(h)

    write(h)
    return out[...]


def beside_the_loss(w, x):
    """The gradients of parts of the batch, added up in one."""
    total = jax.new_ref(jnp.zeros_like(w))

    def part(value, rows):
        v, grads = jax.value_and_grad(lambda w: jnp.mean((rows @ w) ** 2))(w)
        total[...] += grads
        return value + v, None

    value, _ = lax.scan(part, 0.0, x.reshape(4, -1, 64))
    return w - 0.1 * total[...] / 4, value / 4


def out_of_the_loss(w, x):
    """A number that the loss writes and the step reads after it."""
    seen = jax.new_ref(jnp.zeros(()))

    def loss(w):
        h = x @ w
        seen[...] += lax.stop_gradient(jnp.abs(h).mean())
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(w)
    return w - 0.1 * grads, value, seen[...]


def by_gradients(w, x):
    """Two backward passes that add to the same references."""
    value, back = jax.vjp(lambda w: jnp.mean((x @ w) ** 2), w)
    total = jax.new_ref(jnp.zeros_like(w))
    for _ in range(2):
        back.with_refs(total)(jnp.ones_like(value))
    return w - 0.1 * total[...], value


STEPS = {
    "added up in a scan": step_of(added),
    "written by column": step_of(by_column),
    "in a function with a rule": step_of(with_rule),
    "in a jit": step_of(in_a_jit),
    "gradients added up": beside_the_loss,
    "out of the loss": out_of_the_loss,
    "by a backward pass": by_gradients,
}
WAYS = {
    "fsdp": ("data=8", {}),
    "fsdp+tp": ("data=4 model=2", {}),
    "dp": ("data=4", {"microbatches": 2}),
    "pp": ("pipe=2", {}),
}
LINES = {  # what has no place there
    ("gradients added up", "dp"): "in a loop of its own",
    ("gradients added up", "pp"): "in a loop of its own",
    ("by a backward pass", "dp"): "with_refs",
    ("by a backward pass", "pp"): "with_refs",
}
PAIRS = {("gradients added up", "fsdp+tp"), ("added up in a scan", "fsdp"), ("added up in a scan", "dp")}
PAIRS |= {("in a function with a rule", "dp"), ("written by column", "pp"), ("by a backward pass", "dp")}
PAIRS |= {("out of the loss", "dp"), ("out of the loss", "pp")}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [pytest.param(n, s, marks=() if (n, s) in PAIRS else pytest.mark.full) for n in STEPS for s in WAYS],
)
def test_a_sharded_step_has_the_plain_numbers(name, strategy):
    mesh, options = WAYS[strategy]
    step = jaxshard_magic.shard(STEPS[name], strategy, mesh=mesh, **options)
    if (name, strategy) in LINES:
        assert LINES[name, strategy] in refusal(step, W, X)
        return
    for a, b in zip(step(W, X), jax.jit(STEPS[name])(W, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_a_result_depends_on_what_a_loop_wrote():
    traced = trace(lambda w, x: (list(beside_the_loss(w, x)), ()), (W, X), ())
    program = Program(traced.closed)
    back = Flow(program).ancestors([program.outputs[0]])
    assert program.inputs[1] in back


@jax.custom_vjp
def noted(ref, x):
    return x


def written(ref, g):
    ref[...] = jnp.abs(g).mean()
    return None, g


noted.defvjp(lambda ref, x: (x, ref), written)


def test_a_rule_that_writes_in_the_backward_pass():
    def step(w, x):
        seen = jax.new_ref(jnp.zeros(()))
        layer = jax.checkpoint(lambda h: jnp.tanh(noted(seen, h)))
        return *step_of(layer)(w, x), seen[...]

    for a, b in zip(jaxshard_magic.shard(step, "tp", mesh="model=4")(W, X), jax.jit(step)(W, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    line = refusal(jaxshard_magic.shard(step, "dp", mesh="data=4", microbatches=2), W, X)
    assert "test_references.py, line" in line and "derivative rule of its own" in line


@pytest.mark.parametrize("given", [True, False])
def test_a_reference_of_the_caller_s_is_an_argument_or_refused(given):
    importlib.import_module("flax.nnx")  # it takes a reference for an object of its own
    total = jax.new_ref(jnp.zeros(()))

    def step(w, x, ref):
        ref[...] += x.mean()
        return step_of(jnp.tanh)(w, x)

    sharded = jaxshard_magic.shard(step if given else lambda w, x: step(w, x, total), "dp", mesh="data=4")
    if not given:
        assert "closes over" in refusal(sharded, W, X)
        return
    for _ in range(2):
        sharded(W, X, total)
    np.testing.assert_allclose(total[...], 2 * X.mean(), rtol=1e-4)


def test_a_reference_gets_no_name():
    def fun(x):
        ref = jax.new_ref(x)
        named = (
            jaxshard_magic.cut({"ref": ref})["ref"],
            ExpressionMarks().mark_value(0, ref),
            mark_arrays(ref, "some"),
        )
        assert all(found is ref for found in named)
        return ref[...]

    jax.make_jaxpr(fun)(X)
