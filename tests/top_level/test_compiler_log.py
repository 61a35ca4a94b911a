"""What XLA complains of while it compiles is taken off descriptor 2, with nothing else lost."""

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel
from support.sample_complaints import FOLDING, HEAD, LOGGED, NAMED, TILES, log, say

from jaxshard_magic import compiler_log
from jaxshard_magic.compiler_log import capture_messages


@pytest.mark.parametrize("text", LOGGED, ids=["move", "folding", "folded", "slow", "compiled"])
def test_a_complaint_of_several_lines_is_taken_whole_and_the_next_line_is_not(text, capfd):
    with capture_messages() as found:
        say(b"mine, unfinished" + log(text) + b"\nmine\n")
    assert found.messages == (text,)
    assert capfd.readouterr().err == "mine, unfinished\nmine\n"


def test_a_complaint_that_is_cut_takes_nothing_of_what_follows(capfd):
    with capture_messages() as found:
        for end in range(FOLDING.index("\n"), len(FOLDING)):
            say(log(FOLDING[:end].rstrip("\n")) + b"mine\n")
    assert capfd.readouterr().err.count("mine\n") == len(FOLDING) - FOLDING.index("\n")
    assert not any("mine" in message for message in found.messages)


def test_other_messages_of_the_compiler_stay_where_they_were(capfd):
    with capture_messages() as found:
        say(log("GSPMD is going to be deprecated."))
        say(TILES.encode() + b"\n")  # without the log's head: somebody else's text
    assert found.messages == ()
    assert capfd.readouterr().err == f"{HEAD}GSPMD is going to be deprecated.\n{TILES}\n"


NO_TPU = f"""Failed to find host bounds for accelerator type: WARNING: could not determine TPU type, please so.
WARNING: Logging before InitGoogle() is written to STDERR
{HEAD}INVALID_ARGUMENT: Error: unexpected worker hostname 'WARNING: could not determine TPU worker hostnames' from env.
=== Source Location Trace: ===
learning/45eac/tfrc/runtime/libtpu_init_utils.cc:327

"""
OTHER = f"{HEAD}INVALID_ARGUMENT: Error: no chip answers.\n=== Source Location Trace: ===\nlearning/45eac/chip.cc:3\n"


def test_what_is_said_of_a_tpu_that_is_not_there_is_dropped_and_other_errors_stay(capfd):
    with capture_messages() as found:
        say(f"before\n{NO_TPU}{OTHER}after\n".encode())
    assert found.messages == ()
    assert capfd.readouterr().err == f"before\n{OTHER}after\n"


def test_what_is_said_of_a_tpu_that_is_not_there_may_come_in_parts(capfd):
    with capture_messages():
        for line in NO_TPU.splitlines(keepends=True):
            say(line.encode())
            time.sleep(3 * compiler_log.TICK)
    assert capfd.readouterr().err == ""


def test_what_is_written_appears_while_the_compiler_still_runs(capfd):
    with capture_messages() as found:
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
    with pytest.raises(error), capture_messages() as found:
        assert which() != before
        say(b"mine\n" + log(TILES))
        raise error
    assert which() == before
    assert found.messages == (TILES,)
    assert capfd.readouterr().err == "mine\n"


def test_a_capture_closes_its_files_itself():
    with capture_messages():
        redirect = compiler_log._redirect
    assert redirect is not None
    assert redirect._file.closed
    assert redirect._meant.closed  # Python would close it late, where a traceback holds it


def test_an_inner_capture_has_its_own_complaints_and_the_outer_one_all(capfd):
    before = which()
    with capture_messages() as outer:
        say(log(TILES))
        with capture_messages() as inner:
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
            with capture_messages() as found:
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
    with capture_messages():
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
    with capture_messages() as found:
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(2)
    assert found.messages == ()


def test_where_no_file_can_be_had_what_is_written_goes_where_it_was_meant_for(monkeypatch, capfd):
    monkeypatch.setattr(compiler_log.tempfile, "TemporaryFile", lambda **_: (_ for _ in ()).throw(OSError))
    with capture_messages() as found:
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

    reader = threading.Thread(target=drain, daemon=True)
    with capture_messages():
        say(b"x" * 300_000)  # more than a pipe holds
        reader.start()
    os.dup2(real, 2)
    reader.join(10)
    assert not reader.is_alive()  # the pipe ends once nobody holds its other end
    os.close(out)
    assert b"".join(got) == b"x" * 300_000


def test_a_capture_costs_less_than_a_millisecond():
    def once() -> float:
        start = time.perf_counter()
        with capture_messages():
            pass
        return time.perf_counter() - start

    assert min(once() for _ in range(50)) < 1e-3


NOTEBOOK = """
import os, subprocess, sys, jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxshard_magic.compiler_log import capture_messages
mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
def lowered():
    def step(a):
        for spec in (P("y", None, "x"), P(None, ("x", "y"), None)):
            a = jax.lax.with_sharding_constraint(a + 1, NamedSharding(mesh, spec))
        return a
    return jax.jit(step).lower(jax.ShapeDtypeStruct((16, 16, 16), jnp.float32))
"""
CELL = """
with capture_messages() as log:
    lowered().compile()
    os.write(2, b"of the user's\\n")
    subprocess.run("echo of a child >&2", shell=True)
    print("of Python", file=sys.stderr)
print(len(log.messages))
"""


@pytest.mark.ci
def test_under_a_cell_stands_the_users_output_and_none_of_the_compilers(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    for name in (
        "JAX_COMPILATION_CACHE_DIR",
        "PYTEST_CURRENT_TEST",
    ):  # for the sake of pytest a kernel leaves 2 alone
        monkeypatch.delenv(name, raising=False)
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(Path(__file__).parents[2]))
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
