"""Loops, branches and checkpoints that are run again, alone and in sharded steps, are what JAX makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from support.refusals import refusal

import jaxshard_magic
from jaxshard_magic.program.emit import Emitter, Replay, retrace
from jaxshard_magic.program.ir import Program

ROWS = jax.random.normal(jax.random.key(0), (8, 4))


def halved(row):
    return lax.while_loop(lambda c: jnp.sum(c**2) > 0.1, lambda c: c * 0.7, row)


def halved_twice(row):
    def inner(c):
        return lax.while_loop(lambda d: jnp.max(d) > 0.5, lambda d: d * 0.9, c) * 0.8

    return lax.while_loop(lambda c: jnp.sum(c**2) > 0.1, inner, row)


def counted(row):
    """A count by a reference, which a row that has stopped leaves as it is."""
    trips = jax.new_ref(0)

    def trip(c):
        trips[...] += 1
        return c * 0.5

    return lax.while_loop(lambda c: c > 0.1, trip, jnp.abs(row).max()), trips[...]


def stepped(c, x):
    return c * 0.5 + x, c


def of_platform(x):
    return lax.platform_dependent(x, tpu=jnp.tanh, cpu=lambda x: x * 3, default=jnp.sin)


def summed(x):
    total = jax.new_ref(jnp.zeros(4))

    def trip(i, c):
        total[...] += x[i]
        return c

    lax.fori_loop(0, 8, trip, 0)
    return total[...]


KINDS = {
    "while": lambda x: lax.while_loop(lambda c: c[0] < x.shape[0], lambda c: (c[0] + 1, c[1] * 0.9), (0, x)),
    "while that reads around": lambda x: lax.while_loop(lambda c: c < x.max(), lambda c: c + x.sum() ** 2, 0.0),
    "while by row": jax.vmap(halved),
    "while by row and column": jax.vmap(jax.vmap(lambda y: lax.while_loop(lambda c: c > 0.1, lambda c: c / 2, y))),
    "while by row in a while by row": jax.vmap(halved_twice),
    "while by row in a scan": lambda x: lax.scan(lambda c, _: (jax.vmap(halved)(c) + 1, None), x, None, 2),
    "tangents of a while by row": lambda x: jax.jvp(jax.vmap(halved), (x,), (x,)),
    "references in a while by row": jax.vmap(counted),
    "references in a loop": summed,
    "trips by value": lambda x: lax.fori_loop(0, jnp.int32(x.max() * 3), lambda i, c: c + i, x),
    "scan": lambda x: lax.scan(stepped, jnp.zeros(4), x),
    "scan back, unrolled": lambda x: lax.scan(stepped, jnp.zeros(4), x, reverse=True, unroll=3),
    "scan without a carry": lambda x: lax.scan(lambda c, x: (c, jnp.tanh(x)), (), x),
    "scan over nothing": lambda x: lax.scan(stepped, x, jnp.zeros((0, 8, 4))),
    "scan of numbers": lambda x: lax.scan(lambda c, _: (c * 0.5, c), 1.0, None, 3),
    "cond": lambda x: lax.cond(x.sum() > 0, jnp.tanh, lambda x: x * 2, x),
    "cond by row": jax.vmap(lambda x: lax.cond(x.sum() > 0, jnp.tanh, lambda x: x * 2, x)),
    "switch": lambda x: lax.switch(jnp.int32(x.max()), [jnp.tanh, lambda x: x * 2, jnp.sin], x),
    "switch that reads around": lambda x: lax.switch(jnp.int32(x.max()), [lambda: x, lambda: x.T.T * 2]),
    "platform": of_platform,
    "platform by row": jax.vmap(of_platform),
    "platform in a branch": lambda x: lax.cond(x.sum() > 0, of_platform, lambda x: x, x),
    "checkpoint": jax.checkpoint(lambda x: jnp.tanh(x) * 2),
    "gradient of a checkpoint": jax.grad(lambda x: jax.checkpoint(jnp.tanh)(x).sum()),
}


def same(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        np.testing.assert_allclose(a, b, rtol=1e-6)


def again(fun, kind, x=ROWS):
    return jax.jit(lambda x: kind(Program(jax.make_jaxpr(fun)(x)))(x))(x)


@pytest.mark.parametrize("kind", [Emitter, Replay])
@pytest.mark.parametrize("fun", KINDS.values(), ids=KINDS)
def test_a_program_run_again_gives_the_same(fun, kind):
    same(again(fun, kind), jax.jit(fun)(ROWS))


def kept(e):
    """What an equation with bodies says beside them."""
    beside = {"jaxpr", "cond_jaxpr", "body_jaxpr", "branches", "num_consts", "cond_nconsts", "body_nconsts"}
    conditions = [d.sub_jaxpr.jaxpr.outvars[0].aval.shape for d in e.bodies[1:]] if e.name == "while" else []
    return e.name, conditions, {k: v for k, v in e.params.items() if k not in beside | {"ft_in", "ft_out"}}


def bodies(closed):
    called = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr")
    return [kept(e) for e in Program(closed).equations if e.bodies and e.name not in called]


@pytest.mark.parametrize("fun", KINDS.values(), ids=KINDS)
def test_a_replay_keeps_what_jax_says_of_loops_and_branches(fun):
    closed = retrace(Replay(Program(jax.make_jaxpr(fun)(ROWS))))  # references become arrays
    assert bodies(retrace(Replay(Program(closed)))) == bodies(closed)


def test_a_checkpoint_keeps_which_operands_are_not_merged():
    def fun(x, y):
        return jax.checkpoint(lambda x, y: jnp.tanh(x * y + ROWS), prevent_cse=(True, False))(x, y)

    program = Program(retrace(Replay(Program(jax.make_jaxpr(fun)(ROWS, ROWS)))))
    (e,) = (e for e in program.equations if e.primitive.remat)
    prevented = dict(zip(e.operands, e.params["prevent_cse"], strict=True))
    assert [prevented[v] for v in program.inputs] == [True, False]


@pytest.mark.parametrize("name", ["scan", "scan back, unrolled", "cond", "switch", "platform", "checkpoint"])
def test_gradients_of_a_replay_are_those_of_the_function(name):
    def loss(run):
        return lambda x: sum(jnp.sum(y**2) for y in jax.tree.leaves(run(x)))

    def run(x):
        return Replay(Program(jax.make_jaxpr(KINDS[name])(x)))(x)

    same(jax.jit(jax.grad(loss(run)))(ROWS), jax.jit(jax.grad(loss(KINDS[name])))(ROWS))


@jax.custom_vjp
def noted(ref, x):
    return x


def written(ref, g):
    ref[...] = jnp.abs(g).mean()
    return None, g


noted.defvjp(lambda ref, x: (x, ref), written)


def test_a_reference_passes_the_barrier_of_a_checkpoint():
    def fun(x):
        seen = jax.new_ref(0.0)
        grads = jax.grad(lambda x: jax.checkpoint(lambda x: jnp.tanh(noted(seen, x)))(x).sum())(x)
        return grads, seen[...]

    same(again(fun, Emitter), jax.jit(fun)(ROWS))


def test_callbacks_run_as_often_and_in_the_same_order():
    seen = []

    def fun(x):
        def trip(c, _):
            io_callback(lambda c: seen.append(float(c)), None, c, ordered=True)
            return c * 0.5, None

        return lax.scan(trip, x.max(), None, length=3)[0]

    jax.block_until_ready(jax.jit(fun)(ROWS))
    jax.effects_barrier()
    wanted = seen.copy()
    jax.block_until_ready(again(fun, Emitter))
    jax.effects_barrier()
    assert len(wanted) == 3 and seen == wanted * 2


# In sharded steps.

PARAMS = {"w": 0.3 * jax.random.normal(jax.random.key(1), (8, 32)), "v": jnp.ones((32, 4)) / 8}
X, Y = jax.random.normal(jax.random.key(2), (32, 8)), jax.random.normal(jax.random.key(3), (32, 4))


def step_of(before=lambda p, x: x, inside=lambda p, h: h, after=lambda p, g, x: g):
    """A train step that calls one of these before, in or after its loss."""

    def step(params, x, y):
        x = before(params, x)

        def loss(p):
            return jnp.mean((inside(p, jax.nn.softplus(x @ p["w"])) @ p["v"] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, after(params, grads, x)), value

    return step


def by_weights(p, x):
    def one(row):
        def small(c):
            return (jnp.sum(jnp.tanh(c[0] @ p["w"]) ** 2) > 1) & (c[1] < 9)

        return lax.while_loop(small, lambda c: (c[0] - jnp.tanh(c[0] @ p["w"]) @ p["w"].T / 9, c[1] + 1), (row, 0))

    return jax.vmap(one)(x)[0]


def searched(p, grads, x):
    """A step length for each row, as a line search under `jax.vmap` has it."""

    def one(row):
        def at(t):
            return jnp.mean(jnp.tanh(row @ (p["w"] - t * grads["w"])))

        return lax.while_loop(lambda c: (at(c[0]) > at(0.0)) & (c[1] < 8), lambda c: (c[0] / 2, c[1] + 1), (1.0, 0))[0]

    return jax.tree.map(lambda g: g * jax.vmap(one)(x).mean(), grads)


def on_tpu(x):
    """Only a TPU can compile this."""

    def kernel(given, out):
        out[...] = given[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def kernel_or_not(p, x):
    return lax.platform_dependent(x, tpu=on_tpu, default=lambda x: x * 2)


def guarded(p, x):
    """A loop that would not end where the condition does not hold."""
    return lax.cond(x.max() > 1e9, lambda x: lax.while_loop(lambda c: c.max() > -1, jnp.abs, x), lambda x: x, x)


def settled(p, h):
    return h + lax.stop_gradient(jax.vmap(halved)(lax.stop_gradient(h)))


STEPS = {
    "rows that stop by weights": step_of(before=by_weights),
    "a line search by row": step_of(after=searched),
    "rows that stop in the loss": step_of(inside=settled),
    "a branch for a platform": step_of(inside=lambda p, h: of_platform(h)),
    "a kernel of another platform": step_of(before=kernel_or_not),
    "a loop for some values": step_of(before=guarded),
    "a loop over nothing": step_of(inside=lambda p, h: lax.scan(stepped, h, jnp.zeros((0, *h.shape)))[0]),
}
WAYS = {
    "fsdp": ("data=8", {}),
    "fsdp+tp": ("data=4 model=2", {"remat": "dots"}),
    "dp": ("data=4", {"microbatches": 2}),
    "pp": ("pipe=2", {}),
}
PAIRS = {
    ("rows that stop by weights", "fsdp"),
    ("a line search by row", "fsdp+tp"),
    ("rows that stop in the loss", "dp"),
    ("a branch for a platform", "dp"),
    ("a kernel of another platform", "fsdp"),
    ("a kernel of another platform", "pp"),
    ("a loop for some values", "pp"),
    ("a loop over nothing", "fsdp"),
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [pytest.param(n, s, marks=() if (n, s) in PAIRS else pytest.mark.full) for n in STEPS for s in WAYS],
)
def test_a_sharded_step_has_the_plain_numbers(name, strategy):
    mesh, options = WAYS[strategy]
    step = jaxshard_magic.shard(STEPS[name], strategy, mesh=mesh, **options)
    for a, b in zip(
        jax.tree.leaves(step(PARAMS, X, Y)), jax.tree.leaves(jax.jit(STEPS[name])(PARAMS, X, Y)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    assert not [f for f in step.entry.plan.findings if "no sum over examples" in f.message]


def test_a_print_in_order_is_refused_with_its_line():
    def shown(p, h):
        jax.debug.print("{}", h.mean(), ordered=True)
        return h

    line = refusal(jaxshard_magic.shard(step_of(inside=shown), "dp", mesh="data=4"), PARAMS, X, Y)
    assert "debug_print at test_control_flow.py, line" in line and "leave ordered out" in line


def test_a_check_that_leaves_the_loss_is_refused_where_gradients_are_taken_anew():
    from jax.experimental import checkify

    def checked(p, h):
        checkify.check(h.max() < 100, "too large")
        return h

    def step(params, x, y):
        error, out = checkify.checkify(step_of(inside=checked))(params, x, y)
        return out, error

    jaxshard_magic.shard(step, "dp", mesh="data=4")(PARAMS, X, Y)[1].throw()
    line = refusal(jaxshard_magic.shard(step, "dp", mesh="data=4", microbatches=2), PARAMS, X, Y)
    assert "checkify.checkify(loss)" in line
