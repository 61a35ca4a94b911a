"""Sums over the axis of a `jax.vmap`, such as the statistics of a batch norm, are sums over the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxshard_magic
from jaxshard_magic.program.ir import Program

PARAMS = {
    "w": 0.5 * jax.random.normal(jax.random.key(0), (4, 32)),
    "a": jnp.linspace(0.3, 0.9, 32),
    "v": 0.3 * jax.random.normal(jax.random.key(1), (32, 4)),
}
X = jax.random.normal(jax.random.key(2), (16, 24, 4)) + 1


def recurrence(a, h):
    return lax.scan(lambda c, x: (a * c + x,) * 2, jnp.zeros_like(h[0]), h)[1]


def associative(a, h):
    def op(s, c):
        return s[0] * c[0], c[0] * s[1] + c[1]

    return lax.associative_scan(op, (jnp.broadcast_to(a, h.shape), h))[1]


def normed(h, axes="batch"):
    mean = lax.pmean(h.mean(0), axes)
    return (h - mean) * lax.rsqrt(lax.pmean((h**2).mean(0), axes) - mean**2 + 1e-3)


@jax.custom_vjp
def with_rule(h):
    return normed(h)


with_rule.defvjp(lambda h: jax.vjp(normed, h), lambda back, g: back(g))  # the rule keeps jax's own function


def gathered(h):
    return h - lax.all_gather(h.mean(0), "batch").mean(0)


def shifted(h):
    return h + 0.1 * lax.ppermute(h, "batch", [(i, (i + 1) % 16) for i in range(16)])


NORMS = {
    "plain": normed,
    "in a scan": lambda h: lax.scan(lambda c, _: (normed(c) + 0.1 * c, None), h, None, length=2)[0],
    "of each time step": lambda h: lax.scan(lambda c, x: (c, x - lax.pmean(x, "batch")), 0.0, h)[1],
    "in a branch": lambda h: lax.cond(h.sum() > -1e9, normed, lambda h: h, h),
    "in a checkpoint": jax.checkpoint(normed),
    "in a function with a rule": with_rule,
    "by number": lambda h: h * (1 + 0.1 * lax.axis_index("batch")) / lax.psum(1, "batch"),
    "gathered": gathered,
    "shifted": shifted,
}


def step_of(norm, mixer=recurrence):
    def step(params, x):
        def loss(p):
            def one(x):
                return jnp.mean((norm(mixer(p["a"], x @ p["w"])) @ p["v"] - x) ** 2)

            return jax.vmap(one, axis_name="batch")(x).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def same(step, strategy, mesh, **options):
    sharded = jaxshard_magic.shard(step, strategy, mesh=mesh, **options)
    got, want = (jax.tree.leaves(f(PARAMS, X)) for f in (sharded, jax.jit(step)))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
    plan = sharded.entry.plan
    return plan, {leaf.path: tuple(leaf.spec) for leaf in plan.leaves}["x"]


QUICK = {"plain", "in a function with a rule", "of each time step", "gathered"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in NORMS])
def test_rows_are_divided_and_the_numbers_are_the_plain_ones(name):
    _, spec = same(step_of(NORMS[name]), "dp", "data=4")
    assert spec == ("data", None, None)


@pytest.mark.parametrize("strategy", ["dp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_a_scan_by_halves_is_a_loop_over_time(strategy):
    _, spec = same(step_of(normed, associative), strategy, "data=4")
    assert spec == ("data", None, None)


@pytest.mark.parametrize("strategy", ["pp", pytest.param("fsdp+tp", marks=pytest.mark.full)])
def test_statistics_are_the_whole_batch_s_under(strategy):
    same(step_of(normed), strategy, {"pp": "pipe=2", "fsdp+tp": "data=4 model=2"}[strategy])


def test_microbatches_tell_that_they_have_statistics_of_their_own():
    sharded = jaxshard_magic.shard(step_of(normed), "dp", mesh="data=4", microbatches=2)
    sharded(PARAMS, X)
    (finding,) = (f for f in sharded.entry.plan.findings if f.code == "microbatches")
    assert "no sum over examples" in finding.message and "test_mapped_statistics.py" in finding.message


def test_a_sum_over_mapped_axes_is_a_sum_over_dimensions():
    def fun(x):
        inner = jax.vmap(lambda x: (lax.pmean(x, ("a", "b")), lax.pmax(x, "b"), lax.pmin(x, "a")), axis_name="a")
        return jax.vmap(inner, axis_name="b")(x)

    program = Program(jax.make_jaxpr(fun)(X))
    reductions = {e.name: sorted(e.params["axes"]) for e in program.equations if e.primitive.is_combinable}
    assert reductions == {"reduce_sum": [0, 1], "reduce_max": [0], "reduce_min": [1]}


def test_of_mapped_and_of_device_axes_the_mapped_ones_are_summed_first():
    def fun(x):
        return jax.vmap(lambda x: lax.psum(x, ("a", "devices")), axis_name="a", out_axes=None)(x)

    program = Program(jax.make_jaxpr(fun, axis_env=[("devices", 2)])(X))
    first, second = program.equations
    assert (first.name, first.params["axes"]) == ("reduce_sum", (0,))
    assert (second.name, second.params["axes"], second.operands) == ("psum", ("devices",), first.results)
