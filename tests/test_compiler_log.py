"""What XLA complains of while it compiles: taken off descriptor 2, with nothing else lost, and told plainly."""

import ctypes
import io
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jupyter_client.manager import start_new_kernel

from jaxshard_magic.analysis import cuts
from jaxshard_magic.analysis.complaints import complaints, findings
from jaxshard_magic.analysis.frames import Frames
from jaxshard_magic.analysis.hlo import Shape, read
from jaxshard_magic.step import compiler_log
from jaxshard_magic.step.compiler_log import captured

AXES = {"x": 4, "y": 2}
HEAD = "W1121 10:01:49.656686   32617 spmd_partitioner.cc:656] "
MOVED = (
    "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {FROM} to {TO} efficiently for "
    'HLO operation %copy.1 = bf16[8,16,4]{2,1,0} copy(%a), sharding={FROM}, metadata={op_name="jit(step)/add" '
    "stack_frame_id=7}. As the last resort, and so on."
)
FOLDING = """Constant folding an instruction is taking > 1s:

  %scatter.5 = f32[1000000]{0} scatter(%a, %b, %c), metadata={op_name="jit(step)/scatter" stack_frame_id=2}

This isn't necessarily a bug; and so on.

If you'd like to file a bug, do so."""
STARS = "*" * 32
SLOW = f"{STARS}\n[Compiling module jit_step] Very slow compile? And so on.\n{STARS}"


def moved(before: str, after: str) -> str:
    return MOVED.replace("{FROM}", before).replace("{TO}", after)


TILES = moved("{devices=[2,1,4]<=[4,2]T(1,0)}", "{devices=[1,8,1]<=[8]}")
NAMED = moved("{mesh['x'=4,'y'=2], [{'y'}, {}, {'x'}]}", "{mesh['x'=4,'y'=2], [{}, {'x', 'y'}, {}]}")
# XLA ends each with a line feed; the alarm for a compilation begins with one as well.
LOGGED = (TILES, FOLDING, f"The operation took 3.5s\n{FOLDING}", SLOW, f"The operation took 2m3s\n\n{SLOW}")


def log(text: str) -> bytes:
    return f"{HEAD}{chr(10) * text.startswith('*')}{text}\n".encode()


def say(data: bytes) -> None:
    os.write(2, data)


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


def test_what_xla_complains_of_is_taken_off_and_all_else_that_is_written_meanwhile_is_seen(compiler, capfd):
    lowered = compiler.lowered(FROM, TO)
    say(b"before\n")
    with captured() as found:
        say(b"of the user's\n")
        subprocess.run(["sh", "-c", "echo of a child >&2"], check=True)
        lowered.compile()
        ctypes.CDLL(None).perror(b"of C")
    say(b"after\n")
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        *("before", "of the user's", "of a child", "of C", "after")
    ]
    (message,) = found.messages
    assert message.startswith("[SPMD] Involuntary full rematerialization. ")
    assert message.endswith(".")


def test_without_a_capture_xla_complains_on_descriptor_2_and_in_the_form_that_is_known(compiler, capfd):
    compiler.lowered(FROM, TO).compile()
    seen = capfd.readouterr().err
    assert "Involuntary full rematerialization" in seen
    with captured() as found:
        say(seen.encode())
    assert capfd.readouterr().err == ""
    assert len(found.messages) == 1


def test_a_complaint_of_xla_becomes_a_finding_with_its_line_its_size_and_what_to_do(compiler):
    with captured() as log:
        program = compiler.lowered(FROM, TO).compile()
    (one,) = complaints(log.messages, AXES)
    assert (one.code, one.count) == ("full-remat", 1)
    assert one.shape == Shape("f32", (16, 16, 16))  # XLA itself names the shard of one device, f32[8,16,4]
    assert one.op_name is not None and one.op_name.startswith("jit(step)/")
    frames = Frames(read(program.as_text()).header)
    assert one.stack_frame_id is not None
    assert frames[one.stack_frame_id][-1].file == __file__
    assert "step" in frames[one.stack_frame_id][-1].function
    (finding,) = findings([one], lambda _: "line 12")
    assert finding.level == "warning"
    assert finding.message == (
        "At line 12 XLA cannot move f32[16,16,16] from P('y', None, 'x') to P(None, ('x', 'y'), None) in parts: "
        "every device gathers the whole array, 16 KiB."
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
    with captured() as log:
        compiler.lowered(before, after).compile()
    assert log.messages
    way = cuts.between(*(cut(spec) for spec in (before, after)))
    assert way is not None
    with captured() as log:
        compiler.lowered(before, P(*way), after).compile()
    assert log.messages == ()


def cut(spec: P) -> cuts.Cut:
    axes = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec)
    return cuts.Cut((1,) * len(axes), axes)


ENTRIES = (None, "x", "y", ("x", "y"), ("y", "x"))
SPECS = [s for s in itertools.product(ENTRIES, repeat=2) if str(s).count("x") < 2 and str(s).count("y") < 2]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_tiles_that_jax_writes_are_read_back_as_the_axes_it_was_given(spec, mesh):
    text = str(NamedSharding(mesh, P(*spec))._to_xla_hlo_sharding(2))
    found = cuts.read(text, 2, AXES)
    assert found is not None
    assert found.axes == cut(P(*spec)).axes


def test_axes_are_told_apart_by_the_order_in_which_their_devices_are_dealt_out():
    mesh = {"a": 2, "b": 2, "one": 1, "c": 2}
    text = "{devices=[4,1,2]<=[2,2,2]T(2,0,1) last_tile_dim_replicate}"
    assert cuts.read(text, 2, mesh) == cuts.Cut((4, 1), (("c", "a"), ()))


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
    assert str(cuts.read(text, 2, AXES)) == said


def test_no_way_between_is_invented_where_one_axis_moves_or_none_is_known():
    assert cuts.between(cut(P("x", None)), cut(P(None, "x"))) is None
    assert cuts.between(cuts.Cut((4, 1)), cuts.Cut((1, 4))) is None


@pytest.mark.parametrize("text", [TILES, NAMED], ids=["tiles", "named"])
def test_old_and_new_ways_to_write_a_sharding_are_told_alike(text):
    (one,) = complaints([text], AXES)
    assert one.shape == Shape("bf16", (16, 16, 16))
    assert one.text == (
        "XLA cannot move bf16[16,16,16] from P('y', None, 'x') to P(None, ('x', 'y'), None) in parts: "
        "every device gathers the whole array, 8 KiB"
    )
    assert (one.op_name, one.stack_frame_id) == ("jit(step)/add", 7)


def test_alike_complaints_are_one_finding_with_a_count():
    found = complaints([TILES, FOLDING, TILES, TILES], AXES)
    assert [(one.code, one.count) for one in found] == [("full-remat", 3), ("slow-folding", 1)]
    assert findings(found)[0].message.endswith("8 KiB (3 times).")


def test_the_same_of_several_operations_of_one_line_is_said_once():
    found = complaints([TILES, TILES.replace("jit(step)/add", "jit(step)/mul")], AXES)
    assert len(found) == 2
    assert len(findings(found, lambda _: "line 3")) == 1
    assert len(findings(found, lambda one: one.op_name)) == 2


def test_a_slow_operation_is_told_of_once_with_the_seconds_of_its_end():
    found = findings(complaints(LOGGED[1:]))
    assert [(f.level, f.message) for f in found] == [
        (
            "info",
            "XLA computes f32[1000000], 3.81 MiB, while it compiles, because no input of the step goes into it: "
            "this took 3.5 s.",
        ),
        ("info", "XLA finds jit_step very slow to compile: this took 123 s."),
    ]


def test_the_memory_that_xla_cannot_get_below_is_told_in_bytes():
    text = (
        "Can't reduce memory use below 10.00GiB (10737418240 bytes) by rematerialization; only reduced to 20.00GiB "
        "(21474836480 bytes), down from 30.00GiB (32212254720 bytes) originally"
    )
    (finding,) = findings(complaints([text]))
    assert finding.code == "over-memory"
    assert "still needs 20 GiB on a device, where it wants to stay below 10 GiB" in finding.message


def test_a_message_cut_anywhere_is_a_finding_all_the_same():
    for text in (TILES, NAMED, FOLDING, SLOW, LOGGED[2], LOGGED[4]):
        for end in range(0, len(text), 3):
            (finding,) = findings(complaints([text[:end]], AXES))
            assert finding.message.endswith(".")
    short = "[SPMD] Involuntary full rematerialization. The compiler cannot go from"
    (finding,) = findings(complaints([short]))
    assert (finding.code, finding.message) == (
        "full-remat",
        "XLA says: Involuntary full rematerialization.",
    )


@pytest.mark.parametrize("text", LOGGED, ids=["move", "folding", "folded", "slow", "compiled"])
def test_a_complaint_of_several_lines_is_taken_whole_and_the_next_line_is_not(text, capfd):
    with captured() as found:
        say(b"mine, unfinished" + log(text) + b"\nmine\n")
    assert found.messages == (text,)
    assert capfd.readouterr().err == "mine, unfinished\nmine\n"


def test_a_complaint_that_is_cut_takes_nothing_of_what_follows(capfd):
    with captured() as found:
        for end in range(FOLDING.index("\n"), len(FOLDING)):
            say(log(FOLDING[:end].rstrip("\n")) + b"mine\n")
    assert capfd.readouterr().err.count("mine\n") == len(FOLDING) - FOLDING.index("\n")
    assert not any("mine" in message for message in found.messages)


def test_other_messages_of_the_compiler_stay_where_they_were(capfd):
    with captured() as found:
        say(log("GSPMD is going to be deprecated."))
        say(TILES.encode() + b"\n")  # without the log's head: somebody else's text
    assert found.messages == ()
    assert capfd.readouterr().err == f"{HEAD}GSPMD is going to be deprecated.\n{TILES}\n"


def test_what_is_written_appears_while_the_compiler_still_runs(capfd):
    with captured() as found:
        say(b"\r\x1b[Kcompiling, 1.0 s" + log(TILES))
        seen, until = "", time.monotonic() + 10
        while not seen and time.monotonic() < until:
            time.sleep(0.01)
            seen = capfd.readouterr().err
        assert seen == "\r\x1b[Kcompiling, 1.0 s"
        assert found.messages == (TILES,)


def which() -> tuple[int, int]:
    found = os.fstat(2)
    return found.st_dev, found.st_ino


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_passes_through_and_descriptor_2_is_what_it_was(error, capfd):
    before = which()
    with pytest.raises(error), captured() as found:
        assert which() != before
        say(b"mine\n" + log(TILES))
        raise error
    assert which() == before
    assert found.messages == (TILES,)
    assert capfd.readouterr().err == "mine\n"


def test_an_inner_capture_has_its_own_complaints_and_the_outer_one_all(capfd):
    before = which()
    with captured() as outer:
        say(log(TILES))
        with captured() as inner:
            say(log(FOLDING))
        say(log(NAMED))
        assert which() != before
    assert inner.messages == (FOLDING,)
    assert outer.messages == (TILES, FOLDING, NAMED)
    assert which() == before


def in_threads(work: Callable[[int], None], n: int) -> None:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_that_compile_at_once_lose_no_line_and_no_complaint(capfd):
    before, missed = which(), []

    def work(i: int) -> None:
        for k in range(25):
            text = TILES.replace("step", f"step_{i}_{k}")
            with captured() as found:
                say(log(text) + f"mine {i} {k}\n".encode())
            if text not in found.messages:
                missed.append((i, k))

    in_threads(work, 8)
    assert missed == []
    assert which() == before
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == sorted(f"mine {i} {k}" for i in range(8) for k in range(25))
    assert compiler_log._redirect is None


def test_what_python_has_not_written_yet_keeps_its_place(capfd, monkeypatch):
    buffered = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=False)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(flush=buffered.flush))
    buffered.write("before, ")
    with captured():
        say(b"C, ")
        buffered.write("Python, ")
    say(b"after")
    assert capfd.readouterr().err == "before, C, Python, after"


@pytest.fixture
def real() -> Iterator[int]:
    """The number of a descriptor that keeps what 2 was, while a test puts another in its place."""
    kept = os.dup(2)
    yield kept
    os.dup2(kept, 2)
    os.close(kept)


def test_where_descriptor_2_is_closed_nothing_is_captured_and_it_stays_closed(real):
    os.close(2)
    with captured() as found:
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(2)
    assert found.messages == ()


def test_where_no_file_can_be_had_what_is_written_goes_where_it_was_meant_for(monkeypatch, capfd):
    monkeypatch.setattr(compiler_log.tempfile, "TemporaryFile", lambda **_: (_ for _ in ()).throw(OSError))
    with captured() as found:
        say(log(TILES))
    assert found.messages == ()
    assert capfd.readouterr().err.encode() == log(TILES)


def test_a_slow_reader_gets_all_of_it(real):
    out, into = os.pipe()
    os.set_blocking(into, False)
    os.dup2(into, 2)
    os.close(into)
    got = []

    def drain() -> None:
        while data := os.read(out, 4096):
            got.append(data)

    reader = threading.Thread(target=drain)
    with captured():
        say(b"x" * 300_000)  # more than a pipe holds
        reader.start()
    os.dup2(real, 2)
    reader.join()
    os.close(out)
    assert b"".join(got) == b"x" * 300_000


def test_a_capture_costs_less_than_a_millisecond():
    def once() -> float:
        start = time.perf_counter()
        with captured():
            pass
        return time.perf_counter() - start

    assert min(once() for _ in range(50)) < 1e-3


NOTEBOOK = """
import os, subprocess, sys, jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxshard_magic.step.compiler_log import captured
mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
def lowered():
    def step(a):
        for spec in (P("y", None, "x"), P(None, ("x", "y"), None)):
            a = jax.lax.with_sharding_constraint(a + 1, NamedSharding(mesh, spec))
        return a
    return jax.jit(step).lower(jax.ShapeDtypeStruct((16, 16, 16), jnp.float32))
"""
CELL = """
with captured() as log:
    lowered().compile()
    os.write(2, b"of the user's\\n")
    subprocess.run("echo of a child >&2", shell=True)
    print("of Python", file=sys.stderr)
print(len(log.messages))
"""


def test_under_a_cell_of_a_notebook_stands_what_the_user_wrote_and_nothing_of_the_compiler(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    for name in (
        "JAX_COMPILATION_CACHE_DIR",
        "PYTEST_CURRENT_TEST",
    ):  # for the sake of pytest a kernel leaves 2 alone
        monkeypatch.delenv(name, raising=False)
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(Path(__file__).parents[1]))
    try:

        def shown(code: str) -> dict[str, str]:
            streams = {"stdout": "", "stderr": ""}

            def hear(message: dict[str, Any]) -> None:
                if message["msg_type"] == "stream":
                    streams[message["content"]["name"]] += message["content"]["text"]

            reply = client.execute_interactive(code, timeout=120, output_hook=hear)
            # What came through a pipe is shown by a thread of the kernel's, late for its own cell now and then.
            client.execute_interactive("import time; time.sleep(0.5)", timeout=60, output_hook=hear)
            assert reply["content"]["status"] == "ok", streams
            return streams

        shown(NOTEBOOK)
        assert "Involuntary full rematerialization" in shown("lowered().compile();")["stderr"]
        streams = shown(CELL)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert streams["stdout"] == "1\n"
    assert sorted(streams["stderr"].splitlines()) == ["of Python", "of a child", "of the user's"]
