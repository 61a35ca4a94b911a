"""Collectives of compiled programs: kind, axes, count and bytes against figures derived by hand."""

import math
import os

os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import contextlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.mesh_draws import meshes_and_axes

from jaxshard_magic.analysis.collectives import collectives, module_collectives
from jaxshard_magic.analysis.hlo import parse_module
from jaxshard_magic.plan import wire_bytes
from jaxshard_magic.report import Collective

with contextlib.suppress(RuntimeError):  # the backend is up, with the devices of the suite's conftest
    jax.config.update("jax_num_cpu_devices", 8)

DATA, MODEL = {"data": 8}, {"data": 4, "model": 2}
CUBE = {"data": 2, "fsdp": 2, "model": 2}


def mesh_of(axes: dict[str, int], order=None) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(axes.values())])
    devices = devices if order is None else devices[list(order)]
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def compiled(fun, *shapes, axes, order=None, dtype=jnp.float32) -> Any:
    """HLO text of `fun` on every device's own arrays of these shapes."""
    mesh = mesh_of(axes, order)
    n, names = math.prod(axes.values()), tuple(axes)
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=P(names), out_specs=P(names), check_vma=False)
    args = [jax.ShapeDtypeStruct((n * s[0], *s[1:]), dtype, sharding=NamedSharding(mesh, P(names))) for s in shapes]
    return jax.jit(mapped).lower(*args).compile().as_text()


def found(fun, *shapes, axes, **kw) -> tuple[Collective, ...]:
    return collectives(compiled(fun, *shapes, axes=axes, **kw), axes)


# One device holds x: f32[16, 8], 512 bytes.
X, BYTES = (16, 8), 16 * 8 * 4


@pytest.mark.parametrize(
    ("axes", "over"),
    [
        (DATA, ("data",)),
        (MODEL, ("data",)),
        (MODEL, ("model",)),
        (MODEL, ("data", "model")),
        (CUBE, ("fsdp",)),
        (CUBE, ("data", "model")),
        (CUBE, ("fsdp", "model")),
        (CUBE, ("data", "fsdp", "model")),
    ],
)
def test_psum_is_one_all_reduce_of_the_array_over_its_axes(axes, over):
    n = math.prod(axes[a] for a in over)
    sent = 2 * BYTES * (n - 1) // n
    assert found(lambda x: lax.psum(x, over), X, axes=axes) == (Collective("all-reduce", over, n, 1, BYTES, sent),)


@pytest.mark.parametrize(("axes", "over"), [(DATA, "data"), (MODEL, "data"), (MODEL, "model"), (CUBE, "fsdp")])
def test_an_all_gather_counts_the_gathered_array(axes, over):
    n = axes[over]
    got = found(lambda x: lax.all_gather(x, over, tiled=True).reshape(n, *X)[0], X, axes=axes)
    assert got == (Collective("all-gather", (over,), n, 1, n * BYTES, n * BYTES * (n - 1) // n),)


@pytest.mark.parametrize(("axes", "over"), [(DATA, "data"), (MODEL, "data"), (MODEL, "model"), (CUBE, "model")])
def test_a_reduce_scatter_counts_the_array_before_it_is_reduced(axes, over):
    n = axes[over]
    got = found(lambda x: lax.psum_scatter(x, over, tiled=True), X, axes=axes)
    assert got == (Collective("reduce-scatter", (over,), n, 1, BYTES, BYTES * (n - 1) // n),)


@pytest.mark.parametrize(("axes", "over"), [(DATA, "data"), (MODEL, "data"), (MODEL, "model"), (CUBE, "data")])
def test_an_all_to_all_counts_all_its_pieces_as_one_array(axes, over):
    n = axes[over]
    got = found(lambda x: lax.all_to_all(x, over, 0, 1, tiled=True), X, axes=axes)
    assert got == (Collective("all-to-all", (over,), n, 1, BYTES, BYTES * (n - 1) // n),)


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize(("axes", "over"), [(DATA, "data"), (MODEL, "data"), (MODEL, "model"), (CUBE, "fsdp")])
def test_a_permute_sends_its_array_once_and_runs_over_the_axes_where_pairs_differ(axes, over, ring):
    n = axes[over]
    pairs = [(i, (i + 1) % n) for i in range(n if ring else n - 1)]
    got = found(lambda x: lax.ppermute(x, over, pairs), X, axes=axes)
    assert got == (Collective("collective-permute", (over,), n, 1, BYTES, BYTES),)


def test_a_permute_along_two_axes_names_both():
    pairs = [(i, (i + 3) % 8) for i in range(8)]
    got = found(lambda x: lax.ppermute(x, ("data", "model"), pairs), X, axes=MODEL)
    assert got == (Collective("collective-permute", ("data", "model"), 8, 1, BYTES, BYTES),)


def test_groups_are_places_in_the_mesh_and_not_device_ids():
    order = [3, 1, 0, 2, 7, 5, 6, 4]

    def step(x):
        return lax.psum(x, "data") + lax.all_gather(x, "model", tiled=True)[:16]

    def shift(x):
        return lax.ppermute(x, "model", [(0, 1), (1, 0)])

    for fun in (step, shift):
        assert found(fun, X, axes=MODEL, order=order) == found(fun, X, axes=MODEL)


def psum_in_scan(x, length=5):
    return lax.scan(lambda c, _: (lax.psum(c, "data") * 0.1, None), x, None, length=length)[0]


def psum_in_nested_scans(x):
    return lax.scan(lambda c, _: (psum_in_scan(c, 3), None), x, None, length=5)[0]


def psum_in_fori(x):
    return lax.fori_loop(2, 9, lambda i, c: lax.psum(c, "data") * 0.1, x)


def psum_in_scan_and_beside(x):
    return psum_in_scan(x) + lax.psum(x * 2, "data")


@pytest.mark.parametrize(
    ("fun", "count"),
    [
        (psum_in_scan, 5),
        (psum_in_nested_scans, 3 * 5),
        (psum_in_fori, 9 - 2),
        (psum_in_scan_and_beside, 5 + 1),
    ],
)
@pytest.mark.parametrize("axes", [DATA, MODEL, CUBE])
def test_a_collective_in_a_loop_counts_once_per_trip(fun, count, axes):
    n = axes["data"]
    sent = count * 2 * BYTES * (n - 1) // n
    assert found(fun, X, axes=axes) == (Collective("all-reduce", ("data",), n, count, BYTES, sent),)


def test_a_collective_in_a_loop_of_unknown_length_counts_for_one_pass():
    def step(x):
        def body(state):
            i, c = state
            return i + 1, lax.psum(c, "data") * 0.1

        return lax.while_loop(lambda s: (s[0] < 10) & (s[1][0, 0] > 0), body, (0, x))[1] + lax.psum(x, "model")

    got = {m.axes: (m.count, m.exact) for m in module_collectives(parse_module(compiled(step, X, axes=MODEL)), MODEL)}
    assert got == {("data",): (1, False), ("model",): (1, True)}


def test_combined_collectives_count_each_of_their_arrays():
    def step(x, y):
        a, b = lax.psum((x * 2, y * 3), "model")
        return a, b

    y = (4, 2)
    assert found(step, X, y, axes=MODEL) == (
        Collective("all-reduce", ("model",), 2, 1, BYTES, BYTES),
        Collective("all-reduce", ("model",), 2, 1, 4 * 2 * 4, 4 * 2 * 4),
    )


def test_alike_collectives_are_merged_and_those_that_send_most_come_first():
    def step(x):
        a = lax.psum(jnp.sin(x), "model")
        b = lax.psum(jnp.cos(a), "model")
        return b + lax.psum(x[:1], "data")

    assert found(step, X, axes=MODEL) == (
        Collective("all-reduce", ("model",), 2, 2, BYTES, 2 * BYTES),
        Collective("all-reduce", ("data",), 4, 1, 32, 48),
    )


def test_bytes_follow_the_dtype():
    (got,) = found(lambda x: lax.all_gather(x, "data", tiled=True)[:16], X, axes=DATA, dtype=jnp.int8)
    assert got.bytes == 8 * 16 * 8


def test_groups_that_follow_no_axis_have_none():
    def step(x):
        return lax.psum(x, "data", axis_index_groups=[[0, 3, 5, 6], [1, 2, 4, 7]])

    assert found(step, X, axes=DATA) == (Collective("all-reduce", None, 4, 1, BYTES, 2 * BYTES * 3 // 4),)


@pytest.mark.parametrize(
    ("groups", "axes", "apart"),
    [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], ("data",), 1),
        ([[0, 2, 4, 6], [1, 3, 5, 7]], ("data",), 2),
        ([[0, 1, 4, 5], [2, 3, 6, 7]], None, 1),
        ([[0, 1, 2, 4], [3, 5, 6, 7]], None, 1),
    ],
)
def test_groups_of_neighbours_and_of_equal_steps_are_a_part_of_an_axis(groups, axes, apart):
    (got,) = found(lambda x: lax.psum(x, "data", axis_index_groups=groups), X, axes=DATA)
    assert (got.axes, got.group_size, got.apart) == (axes, 4, apart)


def test_axes_of_one_device_are_not_named_and_a_collective_of_one_device_is_none():
    axes = {"data": 4, "one": 1, "model": 2}
    got = found(lambda x: lax.psum(x, ("data", "one")), X, axes=axes)
    assert got == (Collective("all-reduce", ("data",), 4, 1, BYTES, 2 * BYTES * 3 // 4),)
    assert found(lambda x: lax.psum(x, "one") + lax.ppermute(x, "one", [(0, 0)]), X, axes=axes) == ()


def test_data_parallel_gradients_are_one_reduction_of_every_parameter():
    mesh = mesh_of(MODEL)

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"]) ** 2)

    w1, w2 = (24, 48), (48, 12)
    arrays = {"w1": w1, "w2": w2}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, P())) for k, s in arrays.items()}
    x = jax.ShapeDtypeStruct((32, 24), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    step = jax.jit(jax.grad(loss), out_shardings=NamedSharding(mesh, P()))
    got = collectives(str(step.lower(params, x).compile().as_text()), MODEL)
    sizes = sorted((4 * math.prod(s) for s in arrays.values()), reverse=True)
    assert [(c.kind, c.axes, c.count, c.bytes) for c in got] == [("all-reduce", ("data",), 1, n) for n in sizes]


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all-reduce", 2 * 960 * 7 / 8),
        ("all-gather", 960 * 7 / 8),
        ("reduce-scatter", 960 * 7 / 8),
        ("all-to-all", 960 * 7 / 8),
        ("ragged-all-to-all", 960 * 7 / 8),
        ("collective-permute", 960),
        ("collective-broadcast", 960),
    ],
)
def test_what_one_device_of_eight_sends_on_a_ring(kind, sent):
    assert wire_bytes(kind, 8, 960) == sent


@pytest.mark.parametrize(
    ("text", "kind", "sent"),
    [
        # 4 hosts of 2 devices: a ring over all 8 leaves each host once, rings inside of hosts leave none
        ("replica_groups={{0,1,2,3,4,5,6,7}}", "all-reduce", 2 * 960 * 7 / 8),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", "all-reduce", 0),
        # two groups of 4, each with one of a host's two devices: both leave it
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", "all-reduce", 2 * 2 * 960 * 3 / 4),
        # two groups of 4, each on two hosts
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", "all-reduce", 2 * 960 * 3 / 4),
        # each of 2 members that are together sends an 8th of its array to each of the 6 others
        ("replica_groups={{0,1,2,3,4,5,6,7}}", "all-to-all", 2 * 6 * 960 / 8),
        # of the ring's pairs one leaves each host
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}", "collective-permute", 960),
        ("source_target_pairs={{0,2},{1,3},{2,0},{3,1}}", "collective-permute", 2 * 960),
    ],
)
def test_what_a_host_sends_to_others(text, kind, sent):
    added = ", to_apply=add" if kind == "all-reduce" else ""
    module = parse_module(
        "HloModule step, num_partitions=8\n\n"
        "add {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = f32[] add(a, b)\n}\n\n"
        "ENTRY main {\n  x = f32[240]{0} parameter(0)\n"
        f"  ROOT y = f32[240]{{0}} {kind}(x), channel_id=1, {text}, use_global_device_ids=true{added}\n}}\n"
    )
    (move,) = module_collectives(module, {"data": 8}, (0, 0, 1, 1, 2, 2, 3, 3))
    assert move.network == sent
    (alone,) = module_collectives(module, {"data": 8})
    assert alone.network is None


# ---- any mesh, any axes


shapes_of_eight = st.sampled_from(
    [s for r in (1, 2, 3) for s in itertools.product([1, 2, 4, 8], repeat=r) if math.prod(s) in (4, 8)]
)


@settings(max_examples=20, deadline=None)
@given(meshes_and_axes(shapes_of_eight))
def test_psum_over_any_axes_of_any_mesh_is_recognised(mesh_and_axes):
    axes, chosen = mesh_and_axes
    expected = tuple(a for a in chosen if axes[a] > 1)
    n = math.prod(axes[a] for a in expected)
    row = Collective("all-reduce", expected, n, 1, BYTES, wire_bytes("all-reduce", n, BYTES))
    assert found(lambda x: lax.psum(x, chosen), X, axes=axes) == ((row,) if expected else ())
