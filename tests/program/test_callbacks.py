"""A function of the host that raises in a sharded step: its error at once, as plain, and the process goes on."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P
from support.followed import normal
from support.thinned import thinned

import jaxshard_magic
from jaxshard_magic.program.callbacks import has_raising_callbacks

W, X = {"a": normal(1, 8, 8), "b": normal(2, 8, 8)}, normal(3, 8, 8)
ONE = jax.ShapeDtypeStruct((), jnp.float32)


def refuse(value):
    if np.isnan(value):
        raise ValueError("not a number, says the test")
    return np.float32(0)


def tell(value):
    refuse(value)


CHECKS = {
    "pure_callback": lambda w, x: x + jax.pure_callback(refuse, ONE, w.sum()),
    "io_callback": lambda w, x: x + io_callback(refuse, ONE, w.sum()),
    "io_callback without a result": lambda w, x: (io_callback(tell, None, w.sum()), x)[1],
    "debug.callback": lambda w, x: (jax.debug.callback(tell, w.sum()), x)[1],
    "error_if": lambda w, x: eqx.error_if(x, jnp.isnan(w).any(), "nan in w"),
    "a result of another shape": lambda w, x: (
        x + jax.pure_callback(lambda v: np.zeros(3 if np.isnan(v) else (), np.float32), ONE, w.sum())
    ),
    "a condition": lambda w, x: jax.lax.cond(
        jnp.isnan(w).any(), lambda x: x + jax.pure_callback(refuse, ONE, w.sum()), lambda x: x, x
    ),
    "a loop": lambda w, x: jax.lax.fori_loop(0, 2, lambda _, x: x + jax.pure_callback(refuse, ONE, w.sum()), x),
}


def step_of(check, inside=False):
    def loss(params, x):
        h = jnp.tanh(x @ params["a"])
        h = check(params["b"], h) if inside else h
        return jnp.square(h @ params["b"] - x).mean()

    def step(params, x):
        x = x if inside else check(params["b"], x)
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def raised(call, *args):
    with pytest.raises(Exception) as caught:
        jax.block_until_ready(call(*args))
    return type(caught.value), str(caught.value).strip().splitlines()[-1]


NAN = {**W, "b": W["b"] * np.nan}


def notes(error):
    return getattr(error, "__notes__", [])


def raises_as_plain(step, strategy="fsdp", mesh="data=2", **options):
    sharded = jaxshard_magic.shard(step, strategy, mesh=mesh, **options)
    assert raised(sharded, NAN, X) == raised(step, NAN, X)
    for got, want in zip(jax.tree.leaves(sharded(W, X)), jax.tree.leaves(step(W, X)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    return sharded


@pytest.mark.parametrize("check", thinned(CHECKS, ("pure_callback", "debug.callback", "a result of another shape")))
def test_the_error_is_that_of_the_plain_step_and_the_next_call_runs(check):
    raises_as_plain(jax.jit(step_of(CHECKS[check])))


@pytest.mark.parametrize("jitted", [eqx.filter_jit, pytest.param(lambda step: step, marks=pytest.mark.full)])
def test_error_if_is_told_as_equinox_tells_it_with_the_line_of_the_step(jitted):
    sharded = raises_as_plain(jitted(step_of(CHECKS["error_if"])))
    with pytest.raises(Exception) as caught:
        sharded(NAN, X)
    assert type(caught.value).__name__ == "EquinoxRuntimeError"
    stack = str(caught.value).partition("\nequinox.")[0]
    assert "test_callbacks.py" in stack and "jaxshard_magic" not in stack and "pytest" not in stack


@pytest.mark.parametrize(
    ("strategy", "mesh", "options"),
    thinned(
        [
            ("dp", "data=2", {"microbatches": 2}),
            ("fsdp+tp", "data=2 model=2", {"remat": "full"}),
            ("pp", "pipe=2", {}),
            ("pp+dp", "pipe=2 data=2", {}),
        ],
        [("pp+dp", "pipe=2 data=2", {})],
    ),
)
def test_it_may_be_raised_inside_of_the_loss_under_every_strategy(strategy, mesh, options):
    raises_as_plain(eqx.filter_jit(step_of(CHECKS["error_if"], inside=True)), strategy, mesh, **options)


def test_a_stage_on_several_devices_says_which_it_is_and_leaves_a_donated_state():
    step = eqx.filter_jit(step_of(CHECKS["error_if"], inside=True))
    piped = jaxshard_magic.shard(step, "pp+dp", mesh="pipe=2 data=2", donate=True)
    state, _ = piped(W, X)
    bad = {**state, "b": state["b"] * np.nan}
    with pytest.raises(Exception) as caught:
        piped(bad, X)
    assert "in rank 0 of the pipeline" in notes(caught.value)
    assert not state["a"].is_deleted()
    piped(state, X)


def test_a_branch_not_taken_around_a_pipelines_gradient_calls_nothing():
    raises_as_plain(eqx.filter_jit(step_of(CHECKS["error_if"])), "pp", "pipe=2")


def test_each_device_of_a_shard_map_may_raise():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    each = jax.shard_map(CHECKS["pure_callback"], mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    raises_as_plain(jax.jit(step_of(each)), "dp")


def test_printing_an_array_as_a_number_raises_and_good_prints_never_wait():
    def prints(text):
        return jax.jit(step_of(lambda w, x: (jax.debug.print(text, x=w[0]), x)[1]))

    sharded = jaxshard_magic.shard(prints("{x:.2f}"), "dp", mesh="data=2")
    assert raised(sharded, W, X) == raised(prints("{x:.2f}"), W, X)
    assert [has_raising_callbacks(jax.make_jaxpr(prints(text))(W, X)) for text in ("{x:.2f}", "{x}")] == [
        True,
        False,
    ]
    jaxshard_magic.shard(prints("{x}"), "dp", mesh="data=2")(W, X)


def test_after_one_has_raised_no_other_function_of_the_step_is_called():
    seen = []

    def check(w, x):
        x = x + io_callback(refuse, ONE, w.sum(), ordered=False)
        io_callback(lambda v: seen.append(float(v)), None, x.sum())
        return x

    sharded = jaxshard_magic.shard(jax.jit(step_of(check)), "fsdp", mesh="data=2")
    raised(sharded, NAN, X)
    assert seen == []
    sharded(W, X)
    assert len(seen) == 1


@pytest.mark.parametrize("donate", [None, True])
def test_the_old_state_stays_or_the_error_says_that_it_is_gone(donate):
    def check(w, x):
        return eqx.error_if(x, jnp.abs(x).max() > 100, "too large")

    sharded = jaxshard_magic.shard(eqx.filter_jit(step_of(check)), "fsdp", mesh="data=2", donate=donate)
    state, _ = sharded(W, X)
    with pytest.raises(Exception) as caught:
        sharded(state, X * 1000)
    gone = state["a"].is_deleted()
    assert gone == bool(donate)
    assert (
        notes(caught.value)
        == ["The step had taken over the memory of params.a, params.b: these arrays are gone. --no-donate keeps them."]
        * gone
    )


def test_a_check_that_seldom_calls_is_no_call_in_each_run():
    sharded = jaxshard_magic.shard(eqx.filter_jit(step_of(CHECKS["error_if"])), "fsdp", mesh="data=2")
    sharded(W, X)
    assert "host-call" not in [advice.code for advice in sharded.report().advice]


def test_a_cell_that_ends_so_shows_the_lines_of_the_cell_alone(given, capsys):
    given.run("import equinox as eqx")
    cell = (
        "%%shard fsdp\n@eqx.filter_jit\ndef train_step(state, batch):\n"
        "    state = eqx.error_if(state, jnp.isnan(state['w']).any(), 'nan in w')\n"
        "    loss, grads = jax.value_and_grad(loss_fn)(state, batch)\n"
        "    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss\n"
        "state, loss = train_step(jax.tree.map(lambda x: x * jnp.nan, state), batch)"
    )
    capsys.readouterr()
    error = given.fails(cell)
    told = capsys.readouterr().out
    assert type(error).__name__ == "EquinoxRuntimeError" and "nan in w" in told
    assert "----> 7 state, loss = train_step(" in told and "jaxshard_magic" not in told
    given.run("print(jnp.ones(3).sum())")


@pytest.mark.parametrize(("strategy", "mesh"), [("fsdp+tp", "cpu:8 data=4 model=2"), ("spmd", "cpu:8 data=8")])
def test_a_print_of_no_array_is_made_once(strategy, mesh, capfd):
    def step(w, x):
        jax.debug.print("a step begins")
        jax.debug.callback(lambda: None)
        loss, gradient = jax.value_and_grad(lambda w: ((x @ w["a"] @ w["b"]) ** 2).mean())(w)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, gradient), loss

    sharded = jaxshard_magic.shard(step, strategy, mesh=mesh)
    got, want = sharded(W, X), step(W, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("a step begins") == 2
