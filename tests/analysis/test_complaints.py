"""What XLA complains of becomes a finding: its text held against the compiler itself, its layouts read and bridged."""

import ctypes
import itertools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.sample_complaints import AXES, FOLDING, LOGGED, NAMED, SLOW, TILES, say

from jaxshard_magic.analysis import compiler_diagnostics
from jaxshard_magic.analysis.compiler_diagnostics import findings, parse_messages
from jaxshard_magic.analysis.hlo import Shape, parse_module
from jaxshard_magic.analysis.sources import Frames
from jaxshard_magic.compiler_log import capture_messages


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


@dataclass(frozen=True)
class Compiler:
    """Compiles `a + 1` with the result held in each of some specs, one after the other; never from a cache."""

    mesh: jax.sharding.Mesh

    def lowered(self, *specs: P) -> Any:
        def step(a: jax.Array) -> jax.Array:
            a = a + 1
            for spec in specs:
                a = jax.lax.with_sharding_constraint(a, NamedSharding(self.mesh, spec))
            return a * 2

        first, last = (NamedSharding(self.mesh, specs[i]) for i in (0, -1))
        jitted = jax.jit(step, in_shardings=first, out_shardings=last)
        return jitted.lower(jax.ShapeDtypeStruct((16, 16, 16), jnp.float32))


@pytest.fixture
def compiler(mesh: jax.sharding.Mesh) -> Iterator[Compiler]:
    """A program that comes from the disk is not compiled, and nothing is complained of."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    yield Compiler(mesh)
    jax.config.update(name, before)


FROM, TO = P("y", None, "x"), P(None, ("x", "y"), None)


def test_complaints_of_xla_are_taken_off_and_all_other_output_is_seen(compiler, capfd):
    lowered = compiler.lowered(FROM, TO)
    say(b"before\n")
    with capture_messages() as found:
        say(b"of the user's\n")
        subprocess.run(["sh", "-c", "echo of a child >&2"], check=True)
        lowered.compile()
        ctypes.CDLL(None).perror(b"of C")
    say(b"after\n")
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == [*("before", "of the user's", "of a child", "of C", "after")]
    (message,) = found.messages
    assert message.startswith("[SPMD] Involuntary full rematerialization. ")
    assert message.endswith(".")


def test_xla_complains_on_descriptor_2_in_the_form_that_is_known(compiler, capfd):
    compiler.lowered(FROM, TO).compile()
    seen = capfd.readouterr().err
    assert "Involuntary full rematerialization" in seen
    with capture_messages() as found:
        say(seen.encode())
    assert capfd.readouterr().err == ""
    assert len(found.messages) == 1


def test_a_complaint_of_xla_becomes_a_finding_with_line_size_and_remedy(compiler):
    with capture_messages() as log:
        program = compiler.lowered(FROM, TO).compile()
    (one,) = parse_messages(log.messages, AXES)
    assert (one.code, one.count) == ("full-remat", 1)
    assert one.shape == Shape("f32", (16, 16, 16))  # XLA itself names the shard of one device, f32[8,16,4]
    assert one.op_name is not None and one.op_name.startswith("jit(step)/")
    frames = Frames(parse_module(program.as_text()).header)
    assert one.stack_frame_id is not None
    assert frames[one.stack_frame_id][-1].file == __file__
    assert "step" in frames[one.stack_frame_id][-1].function
    (finding,) = findings([one], lambda _: "line 12")
    assert finding.level == "warning"
    assert finding.message == (
        "At line 12 XLA cannot move f32[16,16,16] from P('y', None, 'x') to P(None, ('x', 'y'), None) in parts: "
        "every device gathers the whole array, 16.0\u202fKiB; with a constraint in between it goes in parts."
    )
    assert finding.fix is not None and "P(None, 'y', 'x')" in finding.fix


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (FROM, TO),
        (TO, FROM),
        (P("x", None, None), P(None, None, "y")),
        (P(None, None, ("y", "x")), P("x", "y", None)),
    ],
)
def test_with_the_layout_in_between_that_is_advised_xla_complains_no_more(before, after, compiler):
    with capture_messages() as log:
        compiler.lowered(before, after).compile()
    assert log.messages
    way = compiler_diagnostics.intermediate_axes(*(cut(spec) for spec in (before, after)))
    assert way is not None
    with capture_messages() as log:
        compiler.lowered(before, P(*way), after).compile()
    assert log.messages == ()


def cut(spec: P) -> compiler_diagnostics.HloSharding:
    axes = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec)
    return compiler_diagnostics.HloSharding((1,) * len(axes), axes)


ENTRIES = (None, "x", "y", ("x", "y"), ("y", "x"))
SPECS = [s for s in itertools.product(ENTRIES, repeat=2) if str(s).count("x") < 2 and str(s).count("y") < 2]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_tiles_that_jax_writes_are_read_back_as_the_axes_it_was_given(spec, mesh):
    text = str(NamedSharding(mesh, P(*spec))._to_xla_hlo_sharding(2))
    found = compiler_diagnostics.parse_sharding(text, 2, AXES)
    assert found is not None
    assert found.axes == cut(P(*spec)).axes


def test_axes_are_told_apart_by_the_order_in_which_their_devices_are_dealt_out():
    mesh = {"a": 2, "b": 2, "one": 1, "c": 2}
    text = "{devices=[4,1,2]<=[2,2,2]T(2,0,1) last_tile_dim_replicate}"
    assert compiler_diagnostics.parse_sharding(text, 2, mesh) == compiler_diagnostics.HloSharding(
        (4, 1), (("c", "a"), ())
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{devices=[2,4]<=[8]}", "2 x 4 parts"),  # parts of the first axis
        ("{devices=[3,2]<=[6]}", "3 x 2 parts"),
        ("{devices=[2,2]0,2,1,3}", "2 x 2 parts"),  # devices in an order of their own
        ("{mesh['x'=4,'y'=2], [{'x':(1)2}, {'y'}]}", "2 x 2 parts"),  # half of an axis
        ("{mesh['x'=4,'y'=2], [{'y', ?}, {}], replicated={'x'}}", "P('y', None)"),
        ("{replicated}", "P(None, None)"),
        ("{maximal device=0}", "one device"),
        ("{manual}", "None"),
        ("{devices=[4]<=[4]}", "None"),
    ],
)
def test_a_cut_whose_axes_are_not_known_is_told_in_parts(text, said):
    assert str(compiler_diagnostics.parse_sharding(text, 2, AXES)) == said


def test_no_way_between_is_invented_where_one_axis_moves_or_none_is_known():
    assert compiler_diagnostics.intermediate_axes(cut(P("x", None)), cut(P(None, "x"))) is None
    assert (
        compiler_diagnostics.intermediate_axes(
            compiler_diagnostics.HloSharding((4, 1)), compiler_diagnostics.HloSharding((1, 4))
        )
        is None
    )


@pytest.mark.parametrize("text", [TILES, NAMED], ids=["tiles", "named"])
def test_old_and_new_ways_to_write_a_sharding_are_told_alike(text):
    (one,) = parse_messages([text], AXES)
    assert one.shape == Shape("bf16", (16, 16, 16))
    assert one.text == (
        "XLA cannot move bf16[16,16,16] from P('y', None, 'x') to P(None, ('x', 'y'), None) in parts: "
        "every device gathers the whole array, 8.00\u202fKiB; with a constraint in between it goes in parts"
    )
    assert (one.op_name, one.stack_frame_id) == ("jit(step)/add", 7)


def test_alike_complaints_are_one_finding_with_a_count():
    found = parse_messages([TILES, FOLDING, TILES, TILES], AXES)
    assert [(one.code, one.count) for one in found] == [("full-remat", 3), ("slow-folding", 1)]
    assert findings(found)[0].message.endswith("it goes in parts (3 times).")


def test_the_same_of_several_operations_of_one_line_is_said_once():
    found = parse_messages([TILES, TILES.replace("jit(step)/add", "jit(step)/mul")], AXES)
    assert len(found) == 2
    assert len(findings(found, lambda _: "line 3")) == 1
    assert len(findings(found, lambda one: one.op_name)) == 2


def test_a_slow_operation_is_told_of_once_with_the_seconds_of_its_end():
    found = findings(parse_messages(LOGGED[1:]))
    assert [(f.level, f.message) for f in found] == [
        (
            "info",
            "XLA computes f32[1000000], 3.81\u202fMiB, while it compiles, because no input of the step goes into it; "
            "made outside the step and passed in, it is computed once: this took 3.50\u202fs.",
        ),
        ("info", "XLA finds jit_step very slow to compile: this took 123\u202fs."),
    ]


def test_the_memory_that_xla_cannot_get_below_is_told_in_bytes():
    text = (
        "Can't reduce memory use below 10.00GiB (10737418240 bytes) by rematerialization; only reduced to 20.00GiB "
        "(21474836480 bytes), down from 30.00GiB (32212254720 bytes) originally"
    )
    (finding,) = findings(parse_messages([text]))
    assert finding.code == "over-memory"
    assert "still needs 20.0\u202fGiB on a device, where it wants to stay below 10.0\u202fGiB" in finding.message


def test_a_message_cut_anywhere_is_a_finding_all_the_same():
    for text in (TILES, NAMED, FOLDING, SLOW, LOGGED[2], LOGGED[4]):
        for end in range(0, len(text), 3):
            (finding,) = findings(parse_messages([text[:end]], AXES))
            assert finding.message.endswith(".")
    short = "[SPMD] Involuntary full rematerialization. The compiler cannot go from"
    (finding,) = findings(parse_messages([short]))
    assert (finding.code, finding.message) == (
        "full-remat",
        "XLA says: Involuntary full rematerialization.",
    )
