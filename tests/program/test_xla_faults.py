"""The table of what XLA gets wrong: each fault in plain JAX, without the package, as long as XLA has it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.forked import ran

import jaxshard_magic
from jaxshard_magic.program.xla_faults import (
    CROSSED_PRODUCT,
    DIVIDED_CONVOLUTION,
    FAULTS,
    FURTHER_DIVIDED_SUM,
)

TABLE = {fault.name: fault for fault in FAULTS}
# A race: it comes once in many runs, and a test that waits for it would be as long.
UNSEEN = {"two collectives that do not wait for each other, one in a loop"}
ALONE = """
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
last = NamedSharding(mesh, P(None, None, ("data", "model")))
"""


def on(*spec):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, P(*spec))


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def same(fun, *args, **shardings) -> bool:
    """Does a function give divided what it gives on one device?"""
    try:
        got = jax.jit(fun, **shardings)(*args)
        got = jax.block_until_ready(got)
    except jax.errors.JaxRuntimeError:
        return False
    want = jax.jit(fun)(*args)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(np.allclose(a, b, rtol=1e-3, atol=1e-3 * float(jnp.abs(b).max())) for a, b in pairs)


def padding_between() -> bool:
    def spread(x, low, high, inner):
        return lax.pad(x, 0.0, [(low, high, inner)])

    x, divided = drawn(4), {"out_shardings": on("data")}
    return same(lambda x: spread(x, 1, 0, 1), x, **divided) and same(lambda x: spread(x, -1, 5, 0), x, **divided)


def two_paddings() -> bool:
    return same(lambda x: [lax.pad(x, fill, [(1, 0, 0)]) for fill in (0.0, 1.0)], drawn(16), in_shardings=on("data"))


def overlapping_maxima() -> bool:
    def maxima(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "VALID")

    return same(jax.grad(lambda x: (maxima(x) ** 2).sum()), drawn(16, 24), in_shardings=on("data"))


def dilated_windows() -> bool:
    def average(x):
        x = lax.with_sharding_constraint(1.5 * x, on("data"))
        return lax.with_sharding_constraint(lax.reduce_window(x, 0.0, lax.add, (3, 1), (3, 1), "VALID"), on())

    return same(jax.grad(lambda x: (average(x) ** 2).sum()), drawn(16, 24))


def strided_kernels() -> bool:
    def loss(kernel, x):
        made = lax.conv_general_dilated(x, kernel, (2,), [(1, 2)], dimension_numbers=("NWC", "WIO", "NWC"))
        return (made**2).sum()

    return same(jax.grad(loss), drawn(2, 3, 4), drawn(2, 16, 3), in_shardings=(on(), on(None, "data")))


def memory_of_transforms() -> bool:
    def loss(w, x):
        return jnp.abs(jnp.fft.fft(lax.with_sharding_constraint(x @ w, on(None, "data")))).mean()

    return same(jax.grad(loss), drawn(64, 32), drawn(16, 64), in_shardings=(on(None, "data"), on()))


def narrow_products() -> bool:
    def product(a, b):
        return lax.dot_general(a, b, (((0,), (2,)), ((), ())), preferred_element_type=jnp.float32)

    return same(product, drawn(8, 2).astype(jnp.bfloat16), drawn(2, 16, 8).astype(jnp.bfloat16))


def late_slices() -> bool:
    def late(x, start):
        whole = lax.with_sharding_constraint(lax.dynamic_slice(x, (start, 0), (8, 3)), on())
        return lax.with_sharding_constraint(whole, on("data"))

    x = drawn(16, 3)
    return bool((jax.jit(late)(x, jnp.int32(11)) == x[8:]).all())


def late_updates() -> bool:
    def late(x, update, start):
        return lax.dynamic_update_slice(x, update, (start, 0))

    args = drawn(16, 3), drawn(1, 3), jnp.int32(17)
    return same(late, *args, in_shardings=(on("data"), on(), on()))


def one_place() -> bool:
    def scattered(x, place):
        x = lax.with_sharding_constraint(lax.with_sharding_constraint(-x, on()), on("data"))
        return x.at[place].set(0.5)

    x = drawn(16, 3)
    return bool((jax.jit(scattered)(x, jnp.int32(1)) == (-x).at[1].set(0.5)).all())


def divided_groups() -> bool:
    """The gradient of each example, which are the groups of a convolution."""

    def loss(kernel, x):
        made = lax.conv_general_dilated(x[None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return (made**2).sum()

    each = jax.vmap(jax.grad(loss), (None, 0))
    return same(each, drawn(3, 4, 8), drawn(16, 8, 4), in_shardings=(on(), on("data")))


def ends_well(text: str) -> bool:
    return ran(ALONE + text)[0] == 0


def crossed_products() -> bool:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    divided = (NamedSharding(mesh, P("model", "data")), NamedSharding(mesh, P(None, "data", "model")))
    x, y = drawn(8, 4, 8), drawn(8, 4, 8) ** 2
    return same(lambda x, y: jnp.einsum("abc,abc->", x, y), x, y, in_shardings=divided)


def summed_and_divided_further() -> bool:
    """The gradient of a stack of matrices that lies over the axis of its products and one of two that it is summed
    along."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)
    rows = NamedSharding(mesh, P(("data", "fsdp"), "model"))
    x, y = drawn(8, 8, 3), drawn(8, 8, 5)
    rest = NamedSharding(mesh, P(("model", "fsdp")))
    return same(lambda x, y: jnp.einsum("bed,bef->edf", x, y), x, y, in_shardings=(rows, rows), out_shardings=rest)


def windowed_beside_channels() -> bool:
    """The gradient of a kernel where an axis divides nothing, or a convolution where one divides output channels."""
    mesh = jax.make_mesh((4, 2), ("other", "seq"), axis_types=(AxisType.Auto,) * 2)
    image, kernel = drawn(3, 8, 4), drawn(3, 4, 8)

    def convolved(x, w):
        return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))

    def lies(*spec):
        return NamedSharding(mesh, P(*spec))

    def gradient(x, result):
        return jax.vjp(lambda w: convolved(x, w), kernel)[1](result)[0]

    whole, places = lies(), lies(None, "seq")
    one = same(gradient, image, drawn(3, 8, 8), in_shardings=(places, places), out_shardings=whole)
    divided = (places, lies(None, None, "other"))
    return one or same(convolved, image, kernel, in_shardings=divided, out_shardings=lies(None, "seq", "other"))


RIGHT: dict[str, Callable[[], bool]] = {
    "padding between elements": padding_between,
    "two paddings of one array": two_paddings,
    "the gradient of a maximum over overlapping windows": overlapping_maxima,
    "windows over a dilated array, as in the gradient of an average with strides,": dilated_windows,
    "a dilated convolution, or the gradient of a strided one,": strided_kernels,
    "a Fourier transform": lambda: ends_well(
        "transform = jax.jit(jnp.fft.fft, in_shardings=last, out_shardings=last)\n"
        "assert 'all-gather' not in transform.lower(jnp.ones((4, 32, 16), complex)).compile().as_text()"
    ),
    "the layout in memory of a Fourier transform's operand and result": memory_of_transforms,
    "a product of several matrices in bfloat16 with a result in float32": narrow_products,
    "a slice that would reach beyond the end, and is divided afterwards,": late_slices,
    "an update that would reach beyond the end of a divided dimension": late_updates,
    "a scatter to one place on a device, of an array that was whole before,": one_place,
    "a convolution whose groups are divided": divided_groups,
    CROSSED_PRODUCT.name: crossed_products,
    FURTHER_DIVIDED_SUM.name: summed_and_divided_further,
    DIVIDED_CONVOLUTION.name: windowed_beside_channels,
    "a convolution in groups of arrays without an element": lambda: ends_well(
        "rows = NamedSharding(mesh, P(('data', 'model')))\n"
        "jax.jit(lambda x, kernel: lax.conv_general_dilated(x, kernel, (1,), 'VALID', feature_group_count=2, "
        "dimension_numbers=('NHC', 'HIO', 'NHC')), in_shardings=(rows, NamedSharding(mesh, P())))"
        ".lower(jnp.ones((16, 8, 0)), jnp.ones((1, 0, 8))).compile()"
    ),
    "a sum in bfloat16 over manual axes of a mesh that has automatic ones": lambda: ends_well(
        "summed = jax.shard_map(lambda x: lax.psum(x, 'data'), mesh=mesh, in_specs=P('data'), out_specs=P(), "
        "axis_names={'data'}, check_vma=False)\n"
        "jax.jit(summed)(jnp.ones((8, 16), jnp.bfloat16)).block_until_ready()"
    ),
}


@pytest.mark.parametrize(
    "changed",
    [
        lambda x, i: x.at[jnp.sum(i) % 4].set(0.5),
        lambda x, i: jax.vmap(lambda row, place: row.at[place].add(0.5))(x, i),
        lambda x, i: lax.dynamic_update_slice_in_dim(x, jnp.full_like(x[:, :1], 0.5), 9, 1),
    ],
    ids=["one place", "one place of each example", "beyond the end"],
)
def test_a_step_that_changes_places_of_what_is_divided_has_the_plain_numbers(changed):
    def train_step(w, batch):
        def loss(w):
            best = lax.top_k(batch["x"] @ w, 2)[0]  # for the CPU made whole, and then divided
            return jnp.sin(made := changed(best, batch["i"])).mean(), made

        (value, made), gradient = jax.value_and_grad(loss, has_aux=True)(w)
        return w - gradient, value, made

    batch = {"x": drawn(4, 6, 8), "i": jnp.arange(4) + 1}
    sharded = jaxshard_magic.shard(train_step, "sp", mesh="cpu:8 data=4 seq=2")
    for got, want in zip(sharded(drawn(8, 4), batch), train_step(drawn(8, 4), batch), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_concatenated_matrices_over_tp_and_fsdp_train_as_on_one_device():
    def train_step(w, x):
        def loss(w):
            h = jnp.tanh(jnp.einsum("bd,edf->bef", x, w["into"]))
            return jnp.mean(jnp.einsum("bef,efd->bed", h, w["out"]) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda w, g: w - g, w, gradient), value

    w, x = {"into": drawn(4, 3, 8), "out": drawn(4, 8, 3)}, drawn(16, 3)
    both = "P(('model', 'fsdp'))"
    sharded = jaxshard_magic.shard(
        train_step, "fsdp+tp", mesh="data=2 fsdp=2 model=2", specs={"w.into": both, "w.out": both}
    )
    got, want = sharded(w, x), train_step(w, x)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


def test_every_fault_has_a_program():
    assert RIGHT.keys() | UNSEEN == TABLE.keys()


@pytest.mark.parametrize("name", RIGHT)
def test_xla_has_the_faults_of_the_table(name):
    fault = TABLE[name]
    if fault.is_present:
        assert not RIGHT[name](), (
            f"XLA is right now: {name}. Say since when (`mended`), and take the row out of program/xla_faults.py with "
            "what guards it once no supported jax has the fault"
        )
    else:
        assert RIGHT[name](), f"XLA has it again, or still: {name}"


@pytest.mark.parametrize("name", TABLE)
def test_every_fault_is_guarded(name):
    fault = TABLE[name]
    package = Path(jaxshard_magic.__file__).parent
    assert fault.replicated_dims or fault.rewrite or (package / str(fault.guard)).is_file()
