"""What fills memory at the peak: bytes worked out by hand, XLA's own totals and its own dumps, on real programs."""

import os

os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import contextlib
import math
import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard_magic.analysis import protobuf
from jaxshard_magic.analysis.buffers import LiveBytes, _thinned, live_bytes, serialized_assignment
from jaxshard_magic.analysis.hlo import Module, parse_module

with contextlib.suppress(RuntimeError):  # the backend is up, with the devices of the suite's conftest
    jax.config.update("jax_num_cpu_devices", 8)

ALIGNMENT = 64  # bytes: where XLA's CPU compiler starts each array


def array(*shape: int, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def compiled(fun: Callable, *args: Any, options: Any = None, **jit: Any) -> jax.stages.Compiled:
    return jax.jit(fun, **jit).lower(*args).compile(compiler_options=options)


def live(program: jax.stages.Compiled) -> LiveBytes:
    parts = serialized_assignment(program)
    assert parts is not None
    found = live_bytes(*parts, parse_module(program.as_text() or ""))
    assert found is not None
    return found


def totals(program: jax.stages.Compiled) -> Any:
    """XLA's own sums."""
    return program.memory_analysis()


def temporaries(found: LiveBytes) -> list[tuple[int, ...]]:
    """The shapes of the arrays among the temporaries, the largest first."""
    shapes = (b.shape for b in found.buffers if b.kind == "temporary")
    return [shape.dims for shape in shapes if shape is not None]


def chain(x, a, b, c):
    return x @ a @ b @ c


def mlp_step(params, x):
    def loss(params):
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return (h**2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


MLP = [array(64, 128), array(128, 256), array(256, 32)]


def layers(wrap: Callable) -> Callable:
    """The gradient of six layers in a scan."""

    def loss(ws, x):
        body = wrap(lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w.T) @ w, None))
        return (jax.lax.scan(body, x, ws)[0] ** 2).sum()

    return jax.grad(loss)


LAYERS = (array(6, 128, 128), array(512, 128))


def test_a_chain_of_products_holds_the_one_it_reads_and_the_one_it_makes():
    found = live(compiled(chain, array(64, 32), array(32, 1024), array(1024, 512), array(512, 16)))
    given = 4 * (64 * 32 + 32 * 1024 + 1024 * 512 + 512 * 16)
    assert temporaries(found) == [(64, 1024), (64, 512)]
    assert found.bytes_at_peak("argument") == given
    assert found.bytes_at_peak("output") == 4 * 64 * 16
    assert found.bytes[found.peak] == given + 4 * (64 * 16 + 64 * 1024 + 64 * 512)
    _, made = found.order[found.positions[found.peak]]
    assert made.shapes[0].dims == (64, 512)


def test_before_and_after_the_temporaries_only_arguments_and_outputs_count():
    found = live(compiled(chain, array(64, 32), array(32, 1024), array(1024, 512), array(512, 16)))
    kept = sum(found.bytes_at_peak(kind) for kind in ("argument", "output", "constant"))
    assert found.bytes[0] == kept
    products = [4 * 64 * 1024, 4 * 64 * (1024 + 512), 4 * 64 * 512]
    assert [held - kept for held in found.bytes[1:]] == products
    assert found.positions[-1] < len(found.order)


def test_a_step_without_temporaries_holds_what_goes_in_and_out():
    found = live(compiled(jnp.sin, array(8, 8)))
    assert (found.positions, found.bytes, found.peak, found.reserved) == ((0,), (2 * 4 * 64,), 0, 0)
    assert sorted(b.kind for b in found.buffers) == ["argument", "output"]


@pytest.mark.parametrize("donated", [(), (0,)])
def test_arguments_and_outputs_are_xlas_to_the_byte_donated_ones_once(donated):
    program = compiled(mlp_step, MLP, array(512, 64), donate_argnums=donated)
    found, stats = live(program), totals(program)
    weights = 4 * (64 * 128 + 128 * 256 + 256 * 32)
    assert stats.alias_size_in_bytes == (weights if donated else 0)
    assert found.bytes_at_peak("argument") == stats.argument_size_in_bytes == weights + 4 * 512 * 64
    assert found.bytes_at_peak("output") == stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert found.reserved == stats.temp_size_in_bytes
    # Without gaps between arrays, what is in use at the peak is all that XLA reserves.
    assert found.bytes_at_peak("temporary") == found.reserved
    assert sum(b.bytes for b in found.buffers) == found.bytes[found.peak] == max(found.bytes)
    total = getattr(stats, "total_allocation_bytes", None)  # newer versions of jax tell
    assert total in (None, found.bytes[found.peak])


def test_the_peak_of_a_straight_program_is_the_one_that_xla_lists():
    program = compiled(mlp_step, MLP, array(512, 64), donate_argnums=0)
    found = live(program)
    stats = totals(program)
    fields = protobuf.fields(stats.serialized_buffer_assignment_proto)
    sizes = {}
    for allocation in (protobuf.fields(protobuf.message(value)) for number, value in fields if number == 3):
        for slot in (protobuf.fields_by_number(protobuf.message(value)) for number, value in allocation if number == 9):
            sizes[slot.get(1, 0)] = slot[3]
    lists = [protobuf.fields_by_number(protobuf.message(value)) for number, value in fields if number == 5]
    listed = max(sum(sizes[value] for value in protobuf.integers(entry[2])) for entry in lists)
    assert found.bytes_at_peak("temporary") == listed


def test_the_residuals_of_a_scan_are_named_by_what_the_loop_writes():
    found = live(compiled(layers(lambda body: body), *LAYERS))
    stacked = [b for b in found.buffers if b.kind == "temporary" and b.bytes == 4 * 6 * 512 * 128]
    assert len(stacked) >= 3
    for buffer in stacked:
        assert buffer.shape is not None and buffer.shape.dims == (6, 512, 128)
        assert buffer.instruction.opcode not in ("parameter", "while", "tuple", "get-tuple-element")
        assert "dynamic" in buffer.instruction.name + buffer.instruction.attributes


def test_remat_keeps_only_what_enters_each_layer():
    plain, remat = (live(compiled(layers(wrap), *LAYERS)) for wrap in (lambda body: body, jax.checkpoint))
    assert temporaries(remat).count((6, 512, 128)) == 1
    saved = temporaries(plain).count((6, 512, 128)) - 1
    assert saved >= 2
    assert (
        plain.bytes_at_peak("temporary") - remat.bytes_at_peak("temporary")
        >= saved * 4 * 6 * 512 * 128 - 4 * 512 * 128 * 2
    )


@pytest.mark.parametrize("wrap", [lambda body: body, jax.checkpoint], ids=["plain", "remat"])
def test_a_loop_s_peak_fills_what_xla_reserves_but_for_the_gaps_of_alignment(wrap):
    program = compiled(layers(wrap), *LAYERS)
    found = live(program)
    assert found.reserved == totals(program).temp_size_in_bytes
    assert 0 <= found.reserved - found.bytes_at_peak("temporary") < ALIGNMENT * len(found.buffers)


def test_the_largest_temporary_of_attention_is_its_scores():
    def attention(params, x):
        q, k, v = ((x @ params[name]).reshape(4, 64, 4, 16).swapaxes(1, 2) for name in "qkv")
        scores = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 4)
        return ((scores @ v) ** 2).mean()

    found = live(compiled(jax.grad(attention), {name: array(64, 64) for name in "qkv"}, array(4, 64, 64)))
    largest = next(b for b in found.buffers if b.kind == "temporary")
    assert largest.bytes == 4 * math.prod((4, 4, 64, 64))
    assert largest.shape is not None and sorted(largest.shape.dims)[-2:] == [64, 64]
    assert 'op_name="jit(attention)' in largest.instruction.attributes


def test_a_sharded_step_holds_one_device_s_part():
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    params = [array(*p.shape, sharding=rows) for p in MLP]
    program = compiled(mlp_step, params, array(512, 64, sharding=rows), donate_argnums=0)
    found, stats = live(program), totals(program)
    assert found.bytes_at_peak("argument") == stats.argument_size_in_bytes
    assert found.bytes_at_peak("argument") == 4 * (64 * 128 + 128 * 256 + 256 * 32 + 512 * 64) // 8
    assert found.bytes_at_peak("output") == stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert 0 <= stats.temp_size_in_bytes - found.bytes_at_peak("temporary") < ALIGNMENT * len(found.buffers)
    assert any(i.opcode == "all-reduce" for _, i in found.order)


def branches(x, y):
    def loop(y):
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.cos(y) @ y, y)

    return jax.lax.cond(x.sum() > 0, lambda y: jnp.sin(y) @ y, loop, y).sum()


DUMPED: dict[str, tuple[Callable, tuple]] = {
    "straight": (mlp_step, (MLP, array(512, 64))),
    "scan": (layers(lambda body: body), LAYERS),
    "branches": (branches, (array(4), array(64, 64))),
}


@pytest.mark.parametrize("name", DUMPED)
def test_the_series_is_that_of_xla_s_own_live_ranges(name, tmp_path):
    program = dumped(*DUMPED[name], tmp_path)
    found = live(program)
    slots = placed((tmp_path / one(tmp_path, "buffer-assignment.txt")).read_text())
    text = (tmp_path / one(tmp_path, "live-range.txt")).read_text()
    ranges = {value: (int(a), int(b)) for value, a, b in re.findall(r"^\s+(\S+?):(\d+)-(\d+)$", text, re.M)}
    assert [i.name for _, i in found.order] == re.findall(r"^\s+\d+:([\w.\-]+)$", text, re.M)
    kept = found.bytes[found.peak] - found.bytes_at_peak("temporary")
    ends = [*found.positions[1:], len(found.order)]
    for start, end, held in zip(found.positions, ends, found.bytes, strict=True):
        for position in range(start, end):
            used = {slots[v] for v, (a, b) in ranges.items() if v in slots and a <= position <= b}
            assert held - kept == sum(size for _, size in used), f"at {position}, {found.order[position][1].name}"


@pytest.mark.parametrize("name", ["straight", "scan"])
def test_a_compiler_s_own_trace_tells_the_same_peak(name, tmp_path):
    program = dumped(*DUMPED[name], tmp_path)
    whole = protobuf.fields_by_number((tmp_path / one(tmp_path, "cpu_after_optimizations.hlo.pb")).read_bytes())
    module = parse_module(program.as_text() or "")
    assignment = protobuf.message(whole[3])
    assert [number for number, _ in protobuf.fields(assignment)].count(4) == 1, "no trace"
    traced = live_bytes(assignment, protobuf.message(whole[1]), module)
    found = live(program)
    assert traced is not None
    assert traced.buffers == found.buffers
    assert (traced.positions[traced.peak], max(traced.bytes)) == (
        found.positions[found.peak],
        max(found.bytes),
    )


def dumped(fun: Callable, args: tuple, folder: Path) -> jax.stages.Compiled:
    """Compile, with XLA's accounts of it written to `folder`."""
    own = random.random()  # a program out of the cache is not written
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_proto": True, "xla_dump_hlo_as_text": True}
    return compiled(lambda *args: (fun(*args), jnp.float32(own)), *args, options=options)


def one(folder: Path, ending: str) -> str:
    (found,) = (path.name for path in folder.iterdir() if path.name.endswith(ending))
    return found


def placed(text: str) -> dict[str, tuple[int, int]]:
    """Offset and size of the values among XLA's temporaries, by name and element: `while.1{0}`."""
    found = {}
    for part in re.split(r"^allocation ", text, flags=re.M):
        if "preallocated-temp" in part.partition("\n")[0]:
            for value, size, offset in re.findall(r"<\d+ (\S+) .*?\(size=(\d+),offset=(\d+)\)", part):
                found[value if value.endswith("}") else value + "{}"] = int(offset), int(size)
    return found


def test_few_points_keep_the_maximum_and_the_order():
    series = [(k, (k * 7919) % 10007) for k in range(5000)]
    points = _thinned(series, 400)
    assert len(points) <= 400
    assert points[0] == (0, 0)
    assert max(held for _, held in points) == max(held for _, held in series)
    assert all(a < b for (a, _), (b, _) in pairwise(points))
    assert set(points) <= set(series)


@pytest.fixture(scope="module")
def parts() -> tuple[bytes, bytes, Module]:
    program = compiled(mlp_step, MLP, array(512, 64))
    found = serialized_assignment(program)
    assert found is not None
    return *found, parse_module(program.as_text() or "")


def test_bytes_that_are_no_assignment_tell_nothing(parts):
    assignment, program, module = parts
    noise = random.Random(0).randbytes(4000)
    for given in (
        (b"", program),
        (noise, program),
        (assignment, noise),
        (assignment, b""),
        (program, assignment),
    ):
        assert live_bytes(*given, module) is None


def test_an_assignment_cut_short_tells_nothing_or_what_is_left_and_never_fails(parts):
    assignment, program, module = parts
    for end in range(0, len(assignment), 7):
        live_bytes(assignment[:end], program, module)
    assert all(live_bytes(assignment, program[:end], module) is None for end in range(0, len(program), 1013))


def test_damaged_bytes_never_fail(parts):
    assignment, program, module = parts
    chance = random.Random(0)
    for _ in range(300):
        damaged = bytearray(assignment)
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        live_bytes(bytes(damaged), program, module)


def test_the_assignment_of_another_program_tells_nothing(parts):
    assignment, program, _ = parts
    other = compiled(chain, array(64, 32), array(32, 128), array(128, 512), array(512, 16))
    assert live_bytes(assignment, program, parse_module(other.as_text() or "")) is None


def test_a_message_is_read_field_by_field():
    packed, fixed = b"\x1a\x03\x03\x8e\x02", b"\x21" + (7).to_bytes(8, "little") + b"\x2d\x01\x00\x00\x00"
    largest = b"\x08" + b"\xff" * 9 + b"\x01"
    assert protobuf.fields(packed + fixed) == [(3, b"\x03\x8e\x02"), (4, 7), (5, 1)]
    assert protobuf.fields(largest) == [(1, 2**64 - 1)]
    assert protobuf.integers(b"\x03\x8e\x02") == [3, 270]
    assert protobuf.fields(b"\xa2\x01\x00") == [(20, b"")]


def test_many_messages_read_side_by_side_are_those_read_one_by_one():
    chance = random.Random(0)

    def number() -> bytes:
        value, found = chance.getrandbits(chance.choice((3, 7, 8, 30, 64))), bytearray()
        while value > 127:
            found.append(value & 127 | 128)
            value >>= 7
        return bytes([*found, value])

    def field() -> bytes:
        part = chance.randbytes(chance.choice((0, 1, 20)))
        fixed = b"\x21" + bytes(8) if chance.random() < 0.01 else b""
        return fixed + chance.choice((b"\x08" + number(), b"\xa0\x01" + number(), b"\x1a" + bytes([len(part)]) + part))

    given = [b"".join(field() for _ in range(chance.randrange(40))) for _ in range(300)]
    numbers, (texts,) = protobuf.columns(given, (1, 20), (3,))
    assert numbers == [[protobuf.fields_by_number(data).get(key, 0) for data in given] for key in (1, 20)]
    assert texts == [protobuf.fields_by_number(data).get(3, b"") for data in given]
    assert protobuf.columns([], (1,), (2,)) == ([[]], [[]])


@pytest.mark.parametrize("last", [b"\x08", b"\x08\x80", b"\x12\x05abc", b"\x0b", b"\x08" + b"\xff" * 11])
def test_one_broken_message_among_many_is_refused(last):
    with pytest.raises(ValueError, match="protocol buffer"):
        protobuf.columns([b"\x08\x01", last, b"\x08\x01" * 20], (1,), (2,))


def test_many_packed_numbers_are_those_of_few():
    packed = b"".join(bytes([128 | k, k]) if k % 2 else bytes([k]) for k in range(100))
    assert protobuf.integers(packed) == [k * 129 if k % 2 else k for k in range(100)]
    with pytest.raises(ValueError, match="packed"):
        protobuf.integers(packed + b"\x80")


@pytest.mark.parametrize(
    "data",
    [b"\x08", b"\x08\x80", b"\x12\x05abc", b"\x09\x01", b"\x0d\x01", b"\x0b", b"\x08" + b"\xff" * 11],
    ids=["no value", "open number", "short text", "short 64 bits", "short 32 bits", "a group", "long number"],
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(ValueError, match="protocol buffer"):
        protobuf.fields(data)
