"""--check tells an error from rounding noise: errors are named, noise is named and passes."""

import inspect
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxshard_magic
from jaxshard_magic import strategies
from jaxshard_magic.analysis.check import compare, limit_of
from jaxshard_magic.compilation import planned_call
from jaxshard_magic.config.request import make_request
from jaxshard_magic.program.trace import path_name
from jaxshard_magic.report import MeshInfo, Report
from jaxshard_magic.step import ShardedStep

RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(16, 6)).astype("f"), "y": RNG.normal(size=(16, 4)).astype("f")}


def shard(fn, spoil=None, **options):
    """`fn` with its batch over 4 devices; `spoil(name, value)` is what a wrong plan makes of each output."""

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    batch = {"batch": P("data")} if "batch" in inspect.signature(fn).parameters else {}
    request = make_request("dp", mesh, specs=batch, check=True, **options)
    step = ShardedStep(fn, request)
    if spoil is not None:
        plan_wrongly(step, spoil)
    return step


def plan_wrongly(step, spoil):
    """From here on the plans of `step` are wrong."""
    compile_call = step.programs._compile

    def compile_spoiled(flat_call, request, **how):
        def spoiled(facts, request):
            right, names = strategies.plan(facts, request), [path_name(p) for p in facts.traced.out_paths]
            return replace(right, run=lambda *xs: list(map(spoil, names, right.run(*xs))))

        with mock.patch.object(planned_call, "plan", spoiled):
            return compile_call(flat_call, request, **how)

    step.programs._compile = compile_spoiled


adam = optax.adam(1e-2)


@jax.jit
def step(params, moments, batch, key):
    def loss(p):
        return jnp.mean((jnp.tanh(batch["x"] @ p["inner"]) @ p["outer"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, moments = adam.update(grads, moments)
    return optax.apply_updates(params, updates), moments, value, jax.random.split(key)[0]


def arguments():
    rng = np.random.default_rng(1)
    params = {k: jnp.asarray(rng.normal(size=s), "float32") for k, s in {"inner": (6, 8), "outer": (8, 4)}.items()}
    return params, adam.init(params), BATCH, jax.random.key(0)


def test_a_right_step_passes_with_its_largest_difference():
    sharded = shard(step)
    sharded(*arguments())
    check = sharded.checked
    assert check.passed and not check.failed and not check.noise
    assert check.limit == 1e-4 and check.max_rel_diff < 1e-5 and check.max_abs_diff < 1e-5
    assert check.reference == "the plain step on one device"


@pytest.mark.parametrize("name, factor", [("return.1.0.mu.outer", 1.01), ("return.0.inner", 0.999), ("return.2", 4.0)])
def test_a_wrong_number_fails_and_is_named(name, factor):
    sharded = shard(step, lambda n, x: x * factor if n == name else x)
    sharded(*arguments())
    assert not sharded.checked.passed and sharded.checked.failed == (name,)
    assert sharded.checked.max_rel_diff == pytest.approx(abs(factor - 1), rel=0.05)


def test_a_gradient_summed_where_it_should_be_averaged_is_named_in_the_moments():
    sharded = shard(step, lambda n, x: x * 4 if ".mu." in n else x * 16 if ".nu." in n else x)
    sharded(*arguments())
    assert set(sharded.checked.failed) == {f"return.1.0.{m}.{k}" for m in ("mu", "nu") for k in ("inner", "outer")}


def test_a_wrong_key_or_counter_fails():
    for name in ("return.1.0.count", "return.3"):

        def spoil(n, x, name=name):
            if n != name:
                return x
            return jax.random.fold_in(x, 1) if n == "return.3" else x + 1

        sharded = shard(step, spoil)
        sharded(*arguments())
        assert sharded.checked.failed == (name,)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(6, 8, rngs=rngs)  # its bias comes before a norm: no true gradient
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.outer = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.norm(self.inner(x))))


@nnx.jit
def train(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def net():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, adam, wrt=nnx.Param)


def test_a_bias_before_a_norm_is_named_noise_and_passes():
    sharded, objects = shard(train), net()
    sharded(*objects, BATCH)
    check = sharded.checked
    assert check.passed and "model.inner.bias" in check.noise
    assert all("inner.bias" in name for name in check.noise)
    assert check.max_rel_diff < 1e-4


@pytest.mark.ci
def test_noise_does_not_cover_an_error_in_another_leaf_or_the_same_one():
    for name in ("model.inner.kernel", "optimizer.opt_state.0.mu.outer.kernel"):
        sharded = shard(train, lambda n, x, name=name: x * 1.01 if n == name else x)
        sharded(*net(), BATCH)
        assert sharded.checked.failed == (name,)
    sharded = shard(train, lambda n, x: x + 1 if n == "model.inner.bias" else x)
    sharded(*net(), BATCH)
    assert sharded.checked.failed == ("model.inner.bias",)


def test_the_check_leaves_the_users_objects_one_step_on():
    checked, plain = net(), net()
    shard(train)(*checked, BATCH)
    train(*plain, BATCH)
    for one, other in zip(*(jax.tree.leaves(nnx.state(o[1])) for o in (checked, plain)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_only_the_first_call_is_checked_and_another_when_asked():
    sharded = shard(step)
    params, moments, batch, key = arguments()
    params, moments, _, key = sharded(params, moments, batch, key)
    first = sharded.checked
    params, moments, _, key = sharded(params, moments, batch, key)
    assert sharded.checked is first
    sharded.check = True
    sharded(params, moments, batch, key)
    assert sharded.checked is not first and sharded.checked.passed


def test_donated_inputs_are_copied_before_they_are_gone():
    sharded = shard(step, donate=True)
    args = arguments()
    params, moments, _, key = sharded(*args)
    sharded.check = True
    sharded(params, moments, BATCH, key)
    assert sharded.checked.passed


def test_half_precision_inside_loosens_the_limit():
    def half(params, batch):
        x = batch["x"].astype(jnp.bfloat16)
        return jax.grad(lambda p: jnp.mean((x @ p.astype(jnp.bfloat16)).astype("float32") ** 2))(params)

    sharded = shard(half)
    sharded(jnp.ones((6, 4)), BATCH)
    assert sharded.checked.passed and sharded.checked.limit == 4 * 2.0**-7


def test_closed_over_arrays_and_numbers_take_part():
    data = jnp.asarray(BATCH["x"])
    sharded = shard(jax.jit(lambda w, rate: w - rate * jax.grad(lambda w: jnp.mean((data @ w) ** 2))(w)))
    sharded(jnp.ones((6, 4)), 0.5)
    assert sharded.checked.passed


# The comparison by itself, with numbers worked out by hand


def _runs(*runs):
    """A plain step that gives `runs` one after the other, the last one ever again."""
    left = [np.asarray(r, np.float32) for r in runs]
    return lambda _: [left.pop(0) if left[1:] else left[0]]


def result(sharded, *runs):
    """Compare one leaf; the plain step gives `runs` one after the other (the last one again and again)."""
    check = compare(["x"], [np.asarray(sharded, np.float32)], _runs(*runs), [])
    return check.passed, check.noise, check.max_rel_diff


def test_differences_are_relative_to_the_leafs_largest_number():
    passed, noise, off = result([4.0, 0.0001], [4.0, 0.0])
    assert passed and not noise and off == pytest.approx(2.5e-5)
    passed, _, off = result([4.0, 0.004], [4.0, 0.0])
    assert not passed and off == pytest.approx(1e-3)


def test_noise_reaches_as_far_as_the_plain_steps_own():
    assert result([1.0, 0.02], [1.0, 0.0], [1.0, 0.01])[:2] == (True, ("x",))
    found = compare(["x"], [np.float32([1.0, 0.02])], _runs([1.0, 0.0], [1.0, 0.01]), [])
    assert found.noise_in == ((1, 2),), "how many of its numbers are noise"
    assert result([1.0, 0.20], [1.0, 0.0], [1.0, 0.01])[:2] == (False, ())


def test_noise_in_one_number_does_not_excuse_all_of_them():
    plain = np.concatenate([[1.0], np.zeros(99)])
    moved = plain + 0.01 * (np.arange(100) == 5)
    assert result(plain + 0.01 * (np.arange(100) == 7), plain, moved)[0]
    assert not result(plain + 0.01 * (np.arange(100) > 7), plain, moved)[0]


def test_what_is_not_a_number_must_be_so_in_both():
    nan, inf = float("nan"), float("inf")
    assert result([nan, inf, 1.0], [nan, inf, 1.0]) == (True, (), 0.0)
    assert not result([nan, 1.0], [0.0, 1.0])[0]
    assert not result([inf, 1.0], [-inf, 1.0])[0]
    assert not result([0.0, 1.0, 2.0], [0.0, 1.0])[0]


def test_limits_follow_the_dtype():
    found = [limit_of(d) for d in ("float64", "float32", "complex64", jnp.bfloat16, "float16")]
    assert found == [1e-9, 1e-4, 1e-4, 4 * 2.0**-7, 4 * 2.0**-10]


def test_products_of_8_bit_numbers_allow_half_a_unit_in_their_last_place():
    # 1 + 3 and 1 + 2 bits of a number are stored: units of 1/8 and 1/4.
    assert [limit_of(d) for d in (jnp.float8_e4m3fn, jnp.float8_e5m2)] == [1 / 16, 1 / 8]

    def step(w, x):
        def loss(w):
            scale = jnp.max(jnp.abs(w)) / 448
            h = (x.astype(jnp.float8_e4m3fn) @ (w / scale).astype(jnp.float8_e4m3fn)).astype(jnp.float32) * scale
            return jnp.mean(h**2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    w, x = (jax.random.normal(k, (64, 64)) for k in jax.random.split(jax.random.key(0)))
    sharded = jaxshard_magic.shard(step, "fsdp", mesh="data=8", check=True)
    sharded(w, x)
    found = sharded.report().check
    assert found.passed and found.limit == 1 / 16
    # A tenth of a number is no rounding of an operand.
    assert not compare(["w"], [np.float32([1.0, 0.1])], _runs([1.0, 0.0], [1.0, 0.0]), [], found.limit).passed
    assert compare(["w"], [np.float32([1.0, 0.05])], _runs([1.0, 0.0], [1.0, 0.0]), [], found.limit).passed


def test_a_leaf_that_is_off_is_named_with_how_much():
    def step(params, batch):
        return {k: v * 0.5 for k, v in params.items()}, batch["x"].sum()

    sharded = shard(step, lambda name, value: value * 1.25 if name.endswith("wrong") else value)
    sharded({"right": np.ones(3, "f"), "wrong": np.ones(3, "f")}, BATCH)
    check = sharded.checked
    assert check.failed == ("return.0.wrong",)
    assert check.failed_by == pytest.approx((0.25,))
    report = Report("r", "dp", {}, MeshInfo({}, "cpu", "cpu", "simulated", (0,), 1), check=check)
    assert "return.0.wrong by 0.25" in report.to_text(80)


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.LoRALinear(6, 8, lora_rank=2, rngs=rngs)
        self.outer = nnx.LoRALinear(8, 4, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.inner(x)))


def test_parameters_that_no_gradient_touches_are_the_plain_steps_as_well():
    model = Adapted(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.LoRAParam)

    @nnx.jit
    def adapt(model, optimizer, batch):
        def loss(model):
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, grads)
        return value

    sharded = shard(adapt)
    sharded(model, optimizer, BATCH)
    assert sharded.checked.passed and not sharded.checked.noise


def summed(dtype, order):
    def run(inputs):
        (x,) = inputs
        total = np.zeros((), dtype)
        for number in x.astype(dtype)[::order]:
            total = dtype(total + number)
        return [np.asarray(total, np.float32), np.asarray(2 * total, np.float32)]

    return run


def test_a_sum_in_another_order_in_float16_is_rounding_and_another_sum_is_not():
    x = np.linspace(0.1, 1.5, 1500).astype(np.float16).astype("f")  # an ulp of float32 more is the same in float16
    forwards, backwards, wide = summed(np.float16, 1), summed(np.float16, -1), summed(np.float32, 1)
    limit, off = limit_of(jnp.float16), backwards([x])
    assert abs(off[0] - forwards([x])[0]) > limit * forwards([x])[0]
    assert compare(["a", "b"], off, forwards, [x], limit).failed == ("a", "b")
    found = compare(["a", "b"], [off[0], off[1] * 2], forwards, [x], limit, float32_run=wide)
    assert found.noise == ("a",) and found.failed == ("b",)


def test_whose_fault_a_wrong_number_is_is_found_out():
    sharded = shard(step, lambda n, x: x * 1.01 if n == "return.0.inner" else x)
    sharded(*arguments())
    assert sharded.checked.compiler is False


def test_a_number_that_jax_jit_alone_gets_wrong_as_well_is_the_compilers():
    """XLA divides a convolution of which the examples are groups, and is wrong, in the versions that were tried."""

    @jax.jit
    def each(params, batch):
        def gradient(x, y):
            def loss(w):
                out = jax.lax.conv_general_dilated(x[None], w, (1, 1), "VALID")
                return jnp.mean((out.mean((2, 3)) - y) ** 2)

            return jax.grad(loss)(params)

        return jax.vmap(gradient)(batch["x"], batch["y"])

    batch = {"x": RNG.normal(size=(4, 4, 8, 8)).astype("f"), "y": RNG.normal(size=(4, 6)).astype("f")}
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    sharded = ShardedStep(each, make_request("spmd", mesh, specs={"batch": P("data")}, check=True))
    sharded(jnp.asarray(RNG.normal(size=(6, 4, 2, 2)), "float32"), batch)
    assert sharded.checked.passed or sharded.checked.compiler
