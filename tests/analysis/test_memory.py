"""Bytes of leaves, of arguments by role and of the peak: equal to XLA's own accounts, to the byte."""

import os

os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import contextlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard_magic.analysis.leaves import array_bytes, leaf, leaves
from jaxshard_magic.analysis.memory import memory
from jaxshard_magic.analysis.mesh_info import mesh_info
from jaxshard_magic.plan import LeafPlan
from jaxshard_magic.report import Memory
from jaxshard_magic.targets.device_memory import device_limit

with contextlib.suppress(RuntimeError):  # the backend is up, with the devices of the suite's conftest
    jax.config.update("jax_num_cpu_devices", 8)

KEY = jax.random.key(0).dtype


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    devices = np.array(jax.devices()[:8])[[3, 1, 0, 2, 7, 5, 6, 4]]
    return Mesh(devices.reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def planned(path: str, role: str, shape: tuple, dtype: Any, spec: P) -> LeafPlan:
    return LeafPlan(path, role, shape, dtype if dtype is KEY else jnp.dtype(dtype), spec, "because")


def compiled(fun, plans, mesh, donate=(), out_specs=None) -> jax.stages.Compiled:
    args = [jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=NamedSharding(mesh, p.spec)) for p in plans]
    out = None if out_specs is None else [NamedSharding(mesh, s) for s in out_specs]
    return jax.jit(fun, donate_argnums=donate, out_shardings=out).lower(*args).compile()


# ---- leaves


@pytest.mark.parametrize(
    ("shape", "dtype", "nbytes"),
    [
        ((3, 5), jnp.float32, 60),
        ((7,), jnp.bfloat16, 14),
        ((5,), jnp.bool_, 5),
        ((5,), jnp.int4, 3),
        ((5,), jnp.float8_e4m3fn, 5),
        ((2,), jnp.complex64, 16),
        ((), jnp.int32, 4),
        ((0, 4), jnp.float32, 0),
        ((3,), KEY, 3 * 2 * 4),
    ],
)
def test_an_array_has_the_bytes_that_xla_stores(shape, dtype, nbytes):
    assert array_bytes(shape, dtype) == nbytes


def test_a_leaf_says_what_one_device_stores(mesh):
    got = leaf(planned("params.w", "params", (16, 6, 10), jnp.float32, P(("data", "model"), None)), mesh)
    assert (got.bytes, got.bytes_per_device) == (16 * 6 * 10 * 4, 2 * 6 * 10 * 4)
    assert got.spec == (("data", "model"), None, None)
    assert (got.dtype, got.shape, got.path, got.role, got.why) == (
        "float32",
        (16, 6, 10),
        "params.w",
        "params",
        "because",
    )
    keys = leaf(planned("rngs", "rng", (8,), KEY, P(("data",))), mesh)
    assert (keys.spec, keys.dtype, keys.bytes, keys.bytes_per_device) == (("data",), "key<fry>", 64, 16)


def test_a_leaf_keeps_what_the_strategy_wanted_and_could_not_do(mesh):
    plan = LeafPlan("w", "params", (7,), jnp.dtype("float32"), P(), "7 does not divide", ("model",), 14)
    assert (leaf(plan, mesh).wanted, leaf(plan, mesh).lost) == (("model",), 14)


def test_a_spec_that_does_not_divide_is_refused(mesh):
    with pytest.raises(ValueError, match="partitioned 4 times"):
        leaf(planned("w", "params", (6,), jnp.float32, P("data")), mesh)


def test_a_mesh_is_described_in_its_own_order(mesh):
    got = mesh_info(mesh, "simulated")
    assert got.axes == {"data": 4, "model": 2}
    assert (got.platform, got.device_kind, got.source, got.processes) == ("cpu", "cpu", "simulated", 1)
    assert got.devices == (3, 1, 0, 2, 7, 5, 6, 4)


# ---- memory

STEP = [
    planned("params.w", "params", (64, 128), jnp.float32, P("data", "model")),
    planned("params.b", "params", (7,), jnp.bfloat16, P()),
    planned("opt.w", "optimizer", (64, 128), jnp.float32, P("data", "model")),
    planned("batch.x", "batch", (32, 64), jnp.float32, P("data")),
    planned("batch.mask", "batch", (32,), jnp.bool_, P("data")),
    planned("rng", "rng", (), KEY, P()),
    planned("step", "other", (), jnp.int32, P()),
    planned("codes", "other", (5,), jnp.int4, P()),
]
PARAMS = 64 * 128 * 4 // 8 + 7 * 2
OPTIMIZER = 64 * 128 * 4 // 8
BATCH = 32 * 64 * 4 // 4 + 32 // 4
OTHER = 8 + 4 + 3


def step(w, b, m, x, mask, rng, n, codes):
    def loss(w):
        y = jnp.tanh(x @ w) * mask[:, None] + b.astype(jnp.float32).sum() + codes.astype(jnp.float32).sum()
        return jnp.mean((y * jax.random.normal(rng, y.shape)) ** 2)

    m = 0.9 * m + jax.grad(loss)(w)
    return [w - 0.1 * m, m, n + 1]


def held(program: jax.stages.Compiled, mesh: Mesh, limit: int | None = None) -> Memory:
    kept = program.in_tree.flatten_up_to(program.input_shardings)
    read = [leaf for leaf, sharding in zip(leaves(STEP, mesh), kept, strict=True) if sharding is not None]
    return memory(program.memory_analysis(), read, mesh, limit)


OUTS = [P("data", "model"), P("data", "model"), P()]
STATE_OUT = 2 * OPTIMIZER  # the new w and m
TUPLE = 8 * len(OUTS)  # CPU returns a tuple: a pointer for each output


def test_arguments_by_role_are_xla_s_arguments_to_the_byte(mesh):
    program = compiled(step, STEP, mesh, out_specs=OUTS)
    stats: Any = program.memory_analysis()
    assert sum(x.bytes_per_device for x in leaves(STEP, mesh)) == stats.argument_size_in_bytes
    got = held(program, mesh)
    assert got.source == "compiled"
    assert [d.device for d in got.per_device] == [3, 1, 0, 2, 7, 5, 6, 4]
    one = got.per_device[0]
    assert all(
        (d.params, d.optimizer, d.batch, d.other) == (PARAMS, OPTIMIZER, BATCH, one.other) for d in got.per_device
    )
    assert stats.argument_size_in_bytes == PARAMS + OPTIMIZER + BATCH + OTHER
    assert one.other == OTHER + STATE_OUT + 4 + TUPLE
    assert one.temporaries == stats.temp_size_in_bytes


def test_donated_arguments_are_not_counted_again_as_outputs(mesh):
    program = compiled(step, STEP, mesh, donate=(0, 2, 6), out_specs=OUTS)
    one = held(program, mesh).per_device[0]
    assert (one.params, one.optimizer, one.batch) == (PARAMS, OPTIMIZER, BATCH)
    assert one.other == OTHER + TUPLE


@pytest.mark.parametrize("donate", [(), (0, 2)])
def test_the_parts_add_up_to_the_peak(mesh, donate):
    program = compiled(step, STEP, mesh, donate=donate, out_specs=OUTS)
    for d in held(program, mesh, 2**30).per_device:
        assert d.temporaries is not None
        assert d.peak == d.params + d.optimizer + d.batch + d.other + d.temporaries
        assert d.limit == 2**30


def test_arguments_that_the_step_does_not_read_are_not_counted(mesh):
    def reads_two(w, b, m, x, *_):
        return [x @ w]

    program = compiled(reads_two, STEP, mesh, out_specs=[P("data")])
    one = held(program, mesh).per_device[0]
    assert (one.params, one.optimizer, one.batch) == (OPTIMIZER, 0, 32 * 64 * 4 // 4)
    stats: Any = program.memory_analysis()
    assert stats.argument_size_in_bytes == one.params + one.batch
    assert one.other == 32 * 128 * 4 // 4  # a single output is no tuple


def stats_of(**kw: int) -> Any:
    names = ("argument", "output", "alias", "temp", "generated_code")
    sizes = {f"{name}_size_in_bytes": kw.get(name, 0) for name in names}
    return SimpleNamespace(**sizes, **({"peak_memory_in_bytes": kw["peak"]} if "peak" in kw else {}))


PAIR = [
    planned("w", "params", (300, 500), jnp.float32, P()),
    planned("x", "batch", (128, 256), jnp.float32, P()),
]


def pair_memory(stats, mesh) -> Any:
    return memory(stats, leaves(PAIR, mesh), mesh, None).per_device[0]


def test_padded_arguments_and_a_peak_beyond_the_listed_temporaries_are_told_apart(mesh):
    # As a TPU reports: 300 rows lie in tiles of 8, so 304 x 512; most temporaries only in the peak.
    padded = 304 * 512 * 4 - 300 * 500 * 4
    arguments = 304 * 512 * 4 + 128 * 256 * 4
    one = pair_memory(stats_of(argument=arguments, output=512, temp=387072, generated_code=561152, peak=6099968), mesh)
    assert (one.params, one.batch) == (300 * 500 * 4, 128 * 256 * 4)
    assert one.other == padded + 512 + 561152
    assert one.peak == 6099968
    assert one.temporaries == 6099968 - arguments - 512 - 561152


def test_a_peak_that_leaves_out_the_temporaries_is_not_believed(mesh):
    arguments = 300 * 500 * 4 + 128 * 256 * 4
    for extra in ({}, {"peak": arguments + 100}):
        one = pair_memory(stats_of(argument=arguments, output=100, temp=7000, **extra), mesh)
        assert (one.peak, one.temporaries, one.other) == (arguments + 100 + 7000, 7000, 100)


def test_without_xlas_accounts_the_peak_is_unknown_but_not_the_arguments(mesh):
    one = pair_memory(None, mesh)
    assert (one.peak, one.temporaries) == (None, None)
    assert (one.params, one.batch, one.other) == (300 * 500 * 4, 128 * 256 * 4, 0)


def test_the_limit_is_what_the_backend_says_or_unknown(mesh):
    class Unattached:
        def memory_stats(self):
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: MemoryStats is only supported for addressable devices")

    assert device_limit(mesh.devices.flat[0]) is None
    assert device_limit(SimpleNamespace(memory_stats=lambda: {"bytes_limit": 17 * 2**30})) == 17 * 2**30
    assert device_limit(SimpleNamespace(memory_stats=dict)) is None
    assert device_limit(Unattached()) is None
