"""What works along a dimension, or takes its elements apart, gives the plain step's numbers where that dimension is
divided: by rows, by positions, by columns, with its gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxshard_magic
from jaxshard_magic.strategies.sharded_lowering import ShardedLowering
from jaxshard_magic.strategies.unsharded_dims import guarded_lines

SIZE = 16  # of each dimension
MESHES = {
    "dp": "cpu:8 data=8",
    "fsdp": "cpu:8 data=8",
    "tp": "cpu:8 model=8",
    "fsdp+tp": "cpu:8 data=4 model=2",
    "sp": "cpu:8 seq=8",
    "dp+sp": "cpu:8 data=2 seq=4",
}

# Windows along examples or positions leave few products that carry the positions: sp asks which they are.
POSITIONS = {"sp": {"x": "P(None, 'seq')"}, "dp+sp": {"x": "P('data', 'seq')"}}


def windows(y, op, init, dim, size, stride=1, padding="VALID"):
    sizes, strides = ([n if d == dim else 1 for d in range(3)] for n in (size, stride))
    return lax.reduce_window(y, init, op, sizes, strides, padding)


def first(fun):
    """`fun` of the dimension that is divided, as the first."""
    return lambda y, dim: jnp.swapaxes(fun(jnp.swapaxes(y, 0, dim)), 0, dim)


def linear(a, b):
    return a[0] * b[0], a[1] * b[0] + b[1]


def recurrence(y, dim, *, reverse=False):
    return lax.associative_scan(linear, (jax.nn.sigmoid(y), jnp.tanh(y)), axis=dim, reverse=reverse)[1]


def counted(y, dim):
    return lax.broadcasted_iota(jnp.float32, y.shape, dim)


def convolved(y, stride=1, spread=1, dilation=1):
    """Along the first dimension, of columns as features."""
    kernel = jnp.sin(jnp.arange(3.0 * SIZE * SIZE)).reshape(3, SIZE, SIZE) / SIZE
    return lax.conv_general_dilated(
        jnp.swapaxes(y, 0, 1), kernel, (stride,), [(2, 1)], (spread,), (dilation,), ("NWC", "WIO", "NWC")
    )


Kind = Callable[[Any, int], Any]
STRIDES: dict[str, Kind] = {
    "every second": first(lambda y: y[::2]),
    "every second from the second": first(lambda y: y[1::2]),
    "every third": first(lambda y: y[::3]),
    "every second of an odd number": first(lambda y: y[1::2][:-1][::2]),
    "interleaved": first(lambda y: jnp.stack([y[::2] * 2, y[1::2] * 3], 1).reshape(y.shape)),
    "repeated": lambda y, dim: jnp.repeat(y, 2, dim),
    "inserted": lambda y, dim: jnp.insert(y, 3, 1.0, dim),
    "differences": lambda y, dim: jnp.diff(y, axis=dim),
    "two paddings": first(
        lambda y: jnp.pad(y, ((1, 0), (0, 0), (0, 0))) * jnp.pad(y, ((1, 0), (0, 0), (0, 0)), constant_values=0.5)
    ),
    "shifted": first(lambda y: y * lax.pad(y, 0.0, [(-1, 1, 0), (0, 0, 0), (0, 0, 0)])),
    "rolled and flipped": lambda y, dim: jnp.roll(y, 3, dim) * jnp.flip(y, dim),
}
RUNNING: dict[str, Kind] = {
    "cumsum": lambda y, dim: jnp.cumsum(y, dim),
    "cumsum, from the end": lambda y, dim: lax.cumsum(y, dim, reverse=True),
    "cumprod": lambda y, dim: jnp.cumprod(jnp.cos(y), dim),
    "cummax": lambda y, dim: lax.cummax(y, dim),
    "cummin, from the end": lambda y, dim: lax.cummin(y, dim, reverse=True),
    "cumlogsumexp": lambda y, dim: lax.cumlogsumexp(y, axis=dim),
    "without a gradient": lambda y, dim: (
        y
        * lax.stop_gradient(
            lax.cumprod(jnp.cos(y), dim, reverse=True)
            + lax.cummax(y, dim)
            + lax.cummin(y, dim)
            + lax.cumlogsumexp(y, axis=dim, reverse=True)
            + jnp.cumsum(y > 0, dim)
        )
    ),
    "recurrence": recurrence,
    "recurrence, from the end": lambda y, dim: recurrence(y, dim, reverse=True),
}
WINDOWS: dict[str, Kind] = {
    "overlapping maxima": lambda y, dim: windows(y, lax.max, -jnp.inf, dim, 3),
    "overlapping minima": lambda y, dim: windows(y, lax.min, jnp.inf, dim, 2, 1, "SAME"),
    "maxima side by side": lambda y, dim: windows(y, lax.max, -jnp.inf, dim, 2, 2),
    "averages with strides": lambda y, dim: windows(y, lax.add, 0.0, dim, 3, 2, "SAME"),
    "sums and maxima": lambda y, dim: (
        windows(y, lax.add, 0.0, dim, 3, 1, "SAME") * windows(y, lax.max, -jnp.inf, dim, 3, 1, "SAME")
    ),
    "convolved": first(convolved),
    "convolved with strides": first(lambda y: convolved(y, stride=2)),
    "convolved, dilated": first(lambda y: convolved(y, dilation=2)),
    "convolved, transposed": first(lambda y: convolved(y, spread=2)),
}
ORDERS: dict[str, Kind] = {
    "sorted": lambda y, dim: jnp.sort(y, dim) * counted(y, dim),
    "put in order": lambda y, dim: jnp.take_along_axis(y, jnp.argsort(y, dim), dim) ** 3,
    "largest": lambda y, dim: lax.top_k(jnp.moveaxis(y, dim, -1), 3)[0],
    "fft": lambda y, dim: jnp.abs(jnp.fft.fft(y, axis=dim)),
    "ifft": lambda y, dim: jnp.abs(jnp.fft.ifft(y * (1 + 1j), axis=dim)),
    "rfft": lambda y, dim: jnp.abs(jnp.fft.rfft(y, axis=dim)),
    "irfft": lambda y, dim: jnp.fft.irfft(y * (1 + 1j), axis=dim),
    "fft2": lambda y, dim: jnp.abs(jnp.fft.fft2(y, axes=(dim, (dim + 1) % 3))),
}
GROUPS = {"strides": STRIDES, "running": RUNNING, "windows": WINDOWS, "orders": ORDERS}


def training(kinds, dim):
    """A step whose loss has a term for each kind: it gives the parameters, the terms and the gradients."""

    @jax.jit
    def step(params, x):
        def loss(params):
            into, out = params
            y = jnp.tanh(x @ into)
            made = [kind(y, dim) for kind in kinds.values()]
            terms = jnp.stack([jnp.mean(m**2) + jnp.mean(m * jnp.cos(m)) for m in made])
            return terms.sum() + jnp.mean((y @ out) ** 2), terms

        (_, terms), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), terms, grads

    return step


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    into, out = (jax.random.normal(key, (SIZE, SIZE)) / 2 for key in keys[:2])
    return (into, out), np.asarray(jax.random.normal(keys[2], (SIZE, SIZE, SIZE)))


def the_same(group, dim, strategy):
    kinds = GROUPS[group]
    step = training(kinds, dim)
    specs = POSITIONS.get(strategy, {}) if group == "windows" and dim < 2 else {}
    sharded = jaxshard_magic.shard(step, strategy, mesh=MESHES[strategy], specs=specs)
    (_, terms, grads), (_, wanted, theirs) = (run(*arguments()) for run in (sharded, step))
    off = {name: abs(a / b - 1) for name, a, b in zip(kinds, terms, wanted, strict=True)}
    assert max(off.values()) < 1e-4, off
    for a, b in zip(grads, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()))


OWN = {"dp": 0, "fsdp": 0, "sp": 1, "dp+sp": 1, "tp": 2, "fsdp+tp": 2}  # the dimension that it divides
SHORT = [("strides", "tp"), ("running", "dp"), ("windows", "fsdp"), ("orders", "dp+sp")]
ALL = [(group, dim, strategy) for group in GROUPS for dim in range(3) for strategy in MESHES]


@pytest.mark.parametrize(("group", "strategy"), SHORT)
def test_along_a_divided_dimension_the_numbers_are_the_plain_steps(group, strategy):
    the_same(group, OWN[strategy], strategy)


@pytest.mark.full
@pytest.mark.parametrize(
    ("group", "dim", "strategy"), [a for a in ALL if (a[0], a[2]) not in SHORT or OWN[a[2]] != a[1]]
)
def test_along_any_dimension_the_numbers_are_the_plain_steps(group, dim, strategy):
    the_same(group, dim, strategy)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "rfft": lambda y: jnp.abs(jnp.fft.rfft(y, axis=0)),
    "irfft": lambda y: jnp.fft.irfft(y * (1 + 1j), axis=0),
    "hfft": lambda y: jnp.fft.hfft(y * (1 + 1j), axis=0),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_real_transform_of_the_examples_alone_has_the_plain_numbers(name):
    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.sin(TRANSFORMS[name](x @ w))))(w)
        return w - 0.1 * gradient, loss

    w, x = (
        jax.random.normal(jax.random.key(0), (4, 4)),
        np.asarray(jax.random.normal(jax.random.key(1), (16, 8, 4))),
    )
    for got, want in zip(jaxshard_magic.shard(step, "dp", mesh="data=8")(w, x), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def sorted_and_pooled(params, x):
    """The largest of each two sorted features that lie side by side: the sort leaves XLA free to divide them."""
    y = jnp.sort(x[:, 0, :2] @ params[0], 1)
    return jnp.sum(jnp.sin(lax.reduce_window(y, -jnp.inf, lax.max, (1, 2), (1, 1), "SAME")))


def pooled_with_an_edge(params, x):
    """Maxima over an odd number of features, convolved, beside a sort."""
    y = x @ params[1] / 2.8
    best = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "SAME")
    numbers = ("NHC", "HIO", "NHC")
    made = lax.conv_general_dilated(best, params[2], (1,), "SAME", dimension_numbers=numbers)
    return jnp.sum(jnp.sin(made)) / 32 + jnp.sum(jnp.sin(jnp.sort(y, 1))) / 192


@pytest.mark.parametrize("running", [lax.cumsum, lax.cummin, lax.cumprod])
@pytest.mark.parametrize(("strategy", "specs", "dim"), [("dp", {}, 0), ("sp", {"empty": "P(None, 'seq')"}, 1)])
def test_a_running_reduction_of_rows_without_columns_is_empty(running, strategy, specs, dim):
    def step(w, rows, empty):
        def loss(w):
            return jnp.mean((rows @ w) ** 2) + jnp.sum(running(empty, dim, reverse=True))

        value, grads = jax.value_and_grad(loss)(w)
        return w - 0.1 * grads, value, running(empty, dim)

    rows = np.random.default_rng(0).normal(size=(SIZE, SIZE)).astype(np.float32)
    given = np.ones((SIZE, SIZE), np.float32), rows, np.zeros((SIZE, 0), np.float32)
    sharded = jaxshard_magic.shard(step, strategy, mesh=MESHES[strategy], specs=specs)
    _, value, made = sharded(*given)
    assert made.shape == (SIZE, 0)
    np.testing.assert_allclose(value, jax.jit(step)(*given)[1], rtol=1e-6)


@pytest.mark.parametrize("loss", [sorted_and_pooled, pooled_with_an_edge])
def test_xla_does_not_divide_windows_that_the_plan_leaves_whole(loss):
    """It chose to where nothing was pinned: wrong gradients, and an abort."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (2, 4), (8, 3), (2, 2, 1)
    params = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]
    x = jax.random.normal(keys[3], (8, 8, 8))

    @jax.jit
    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    sharded = jaxshard_magic.shard(step, "tp", mesh="cpu:8 data=4 model=2")
    pairs = zip(jax.tree.leaves(sharded(params, x)), jax.tree.leaves(step(params, x)), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy, mesh", [("dp", "cpu:8 data=8"), ("tp", "cpu:8 data=4 model=2")])
def test_a_convolution_in_groups_of_nothing_is_zeros(strategy, mesh):
    """XLA divided by zero, and the kernel died."""

    @jax.jit
    def step(params, x):
        def loss(params):
            kernel, into = params
            made = lax.conv_general_dilated(
                x[..., :0],
                kernel,
                (1,),
                "VALID",
                feature_group_count=2,
                dimension_numbers=("NHC", "HIO", "NHC"),
            )
            return jnp.sum(made) + jnp.sum(jnp.sin(x @ into))

        return jax.value_and_grad(loss)(params)

    params, x = (jnp.ones((1, 0, 8)), jnp.ones((8, 4))), jnp.ones((16, 8, 8))
    got, want = jaxshard_magic.shard(step, strategy, mesh=mesh)(params, x), step(params, x)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(got[1][1], want[1][1], rtol=1e-6)


@pytest.mark.parametrize("strategy", ["tp", "fsdp+tp"])
def test_a_product_over_dimensions_that_lie_crosswise_has_the_plain_numbers(strategy):
    def step(weights, rows):
        def loss(weights):
            hidden = rows @ weights
            return jnp.sin(jnp.einsum("abc,cba->", hidden, hidden) / 32)

        value, grads = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * grads, value

    draw = np.random.default_rng(0)
    weights, rows = (draw.normal(size=s).astype(np.float32) / 2 for s in ((4, 8), (8, 4, 4)))
    sharded = jaxshard_magic.shard(step, strategy, mesh="cpu:8 data=4 model=2")
    for mine, plain in zip(sharded(weights, rows), jax.jit(step)(weights, rows), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["tp", "fsdp+tp"])
def test_a_convolution_in_groups_of_what_no_example_makes_has_the_plain_numbers(strategy):
    """XLA chose to divide its groups, and aborted."""

    def step(params, x):
        def loss(params):
            gate, up, down, kernel = params
            rows = jnp.ones((13, 8, 4))
            chances = jax.nn.softmax(rows @ gate, -1)
            hidden = jnp.tanh(jnp.einsum("...d,edf->...ef", rows, up))
            mixed = jnp.einsum("...ef,efd,...e->...d", hidden, down, chances)
            numbers = ("NHC", "HIO", "NHC")
            made = lax.conv_general_dilated(
                mixed, kernel, (2,), "VALID", feature_group_count=2, dimension_numbers=numbers
            )
            return jnp.mean(jnp.sin(made)) + jnp.mean(x)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    draw = np.random.default_rng(0)
    shapes = (4, 4), (4, 4, 8), (4, 8, 4), (2, 2, 4)
    params = [draw.normal(size=shape).astype(np.float32) / 2 for shape in shapes]
    x = draw.normal(size=(16, 8)).astype(np.float32)
    sharded = jaxshard_magic.shard(step, strategy, mesh="cpu:8 data=4 model=2")
    pairs = zip(jax.tree.leaves(sharded(params, x)), jax.tree.leaves(jax.jit(step)(params, x)), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def descended(kernels, batch, strides, dimensions):
    """One step of a net of convolutions: its kernels, less their gradients, and its loss."""

    def loss(kernels):
        x = batch["x"]
        for kernel in kernels:
            x = jnp.tanh(lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=dimensions))
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(kernels)
    return jax.tree.map(lambda w, g: w - g, kernels, grads), value


LINE = ("NHC", "HIO", "NHC")
PLANE = ("NHWC", "HWIO", "NHWC")


@pytest.mark.parametrize(
    ("strategy", "mesh", "spec", "strides"),
    [
        ("sp", "data=2 seq=2 model=2", "P('data', 'seq')", (1,)),
        ("dp", "data=2 model=4", "P(None, 'data')", (1,)),
        ("tp", "data=2 model=4", "P(None, 'data')", (1,)),
        ("fsdp+tp", "data=2 fsdp=2 model=2", "P('fsdp', 'data')", (1,)),
        ("dp+sp", "data=4 seq=2", "P(None, 'seq', 'data')", (2, 1)),
        ("spmd", "data=2 model=4", "P(None, 'data')", (1,)),
        ("spmd", "data=4 seq=2", "P(None, 'seq', 'data')", (2, 1)),
    ],
)
def test_convolutions_along_divided_dimensions_have_the_plain_numbers(strategy, mesh, spec, strides):
    n, draw = len(strides), np.random.default_rng(0)
    kernels = [jnp.asarray(draw.normal(size=(*(3,) * n, 8, 8)), jnp.float32) / 4**n for _ in range(3)]
    batch = {"x": draw.normal(size=(8, *(SIZE,) * n, 8)).astype(np.float32)}

    def train_step(kernels, batch):
        return descended(kernels, batch, strides, LINE if n == 1 else PLANE)

    step = jaxshard_magic.shard(train_step, strategy, mesh=f"cpu:8 {mesh}", specs={"batch.x": spec})
    want, got = jax.jit(train_step)(kernels, batch), step(kernels, batch)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-4, atol=2e-5)
    plan = step.planned(kernels, batch).plan
    whole = any(finding.code == "kept-whole" for finding in plan.findings)
    lines = guarded_lines(plan.run.layout) if isinstance(plan.run, ShardedLowering) else ()
    assert bool(lines) == whole  # what constraints in code to take home can't say


@pytest.mark.parametrize("strategy, mesh", [("dp", "cpu:4 data=4"), ("fsdp+tp", "cpu:8 data=4 model=2")])
@pytest.mark.parametrize("start", [2, 11, -3])
@pytest.mark.parametrize("dtype", [np.int32, np.int8])
def test_a_window_of_rows_that_begins_too_late_is_the_last_one(strategy, mesh, start, dtype):
    """As `dynamic_slice` has it on one device, of a data set and in the gradient of what is set into a batch."""

    def step(params, data, start):
        def loss(params):
            rows = jax.lax.dynamic_slice_in_dim(data, start, 8)
            made = rows @ params
            late = jax.lax.dynamic_update_slice_in_dim(made, made[:4].mean() * made[4:], start, 0)
            return (rows.T @ late).sum() + jnp.sin(late).sum()

        value, gradient = jax.value_and_grad(loss)(params)
        return params - 0.01 * gradient, value

    params, data = (np.random.default_rng(0).normal(size=size).astype(np.float32) for size in ((4, 6), (16, 4)))
    got = jaxshard_magic.shard(step, strategy, mesh=mesh)(params, data, dtype(start))
    with jax.disable_jit():
        want = step(params, data, dtype(start))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_start_of_a_type_that_holds_no_number_as_large_as_the_array_is_kept():
    def step(params, data, start):
        rows = jax.lax.dynamic_slice_in_dim(data, start, 96)
        return params + (rows * params).sum(), rows

    data = np.arange(1200, dtype=np.float32).reshape(300, 4)
    args = np.ones(4, np.float32), data, np.int8(100)
    got = jaxshard_magic.shard(step, "spmd", mesh="cpu:4 data=4")(*args)
    np.testing.assert_array_equal(got[1], data[100:196])
