"""The compile for hardware that isn't attached: its process, and each failure told in one line."""

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from support.apart import MESH, Shape, built, folder, sharded, slow, started
from support.refusals import refusal

import jaxshard_magic
from jaxshard_magic import targets
from jaxshard_magic.hardware import chip
from jaxshard_magic.packages import install_command
from jaxshard_magic.targets import Target, compiler_of, devices, gpu, tpu
from jaxshard_magic.targets.compiler import Compiler

pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
__all__ = ["folder", "started"]


def the_compiler() -> Compiler:
    return compiler_of(Target(chip("v5e"), (2, 4)))


def alive(pid: int) -> bool:
    """A process that has ended and that nobody has waited for is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends(pid: int, within_s: float = 10) -> bool:
    until = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(pid)


# The process


SCRIPT = """
import os, sys, time
sys.path.insert(0, {tests!r})
import test_targets as t
if __name__ == "__main__":
    {body}
"""


def script(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    """A Python process of its own that runs `body`, with this module as `t`."""
    file = tmp_path / "script.py"
    lines = "\n    ".join(body.strip().splitlines())
    file.write_text(SCRIPT.format(tests=str(Path(__file__).parent), body=lines))
    paths = [*map(str, Path(__file__).parents[1:3]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.Popen(
        [sys.executable, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def said(process: subprocess.Popen[str], timeout: float = 120) -> list[str]:
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err[-2000:]
    return out.splitlines()


WAITS = """
t.built()
print(t.the_compiler().pid, flush=True)
try:
    t.built(t.slow)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(len(t.built(width=128).text) > 0)
"""


@pytest.mark.ci
def test_an_interrupt_ends_the_compiler_for_good_and_the_next_compile_works(tmp_path):
    process = script(tmp_path, WAITS)
    pid = int(process.stdout.readline())
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline().strip() == "interrupted"
    assert ends(pid)
    assert said(process) == ["True"]


COMPARES = """
import jax, jax.numpy as jnp, jaxshard_magic
t.built()
print(t.the_compiler().pid, flush=True)
shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
found = jaxshard_magic.compare(t.slow, "dp,fsdp,tp", shapes, mesh=MESH)
print(len(found.trials), len(found.left), flush=True)
print(len(t.built(width=128).text) > 0)
"""


@pytest.mark.ci
def test_an_interrupt_ends_what_a_comparison_compiles_and_it_tells_what_is_left(tmp_path):
    process = script(tmp_path, COMPARES.replace("MESH", repr("v5e:2x4 data=8")))
    pid = int(process.stdout.readline())
    time.sleep(4)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline().strip() == "0 3"
    assert ends(pid)
    assert said(process) == ["True"]


@pytest.mark.ci
def test_the_compiler_ends_with_a_process_that_is_killed(tmp_path):
    process = script(tmp_path, WAITS)
    pid = int(process.stdout.readline())
    time.sleep(1)
    assert alive(pid)
    process.kill()
    process.communicate()
    assert ends(pid)


@pytest.mark.ci
def test_two_processes_compile_at_once(tmp_path):
    body = "one, other = (t.built() for _ in range(2))\nprint(one == other, one.stats)"
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    both = [script(tmp_path / name, body) for name in ("one", "two")]
    one, two = map(said, both)
    assert one == two
    assert one[0].startswith("True MemoryStats(argument_size_in_bytes=")


@pytest.mark.ci
def test_the_time_limit_ends_the_compiler_and_the_next_compile_works():
    built()
    pid = the_compiler().pid
    step = sharded(slow)
    step.programs.compile_limit = 1
    message = refusal(lambda: step.prepare(Shape((64, 64), jnp.float32), Shape((64, 64), jnp.float32)))
    assert message.startswith(
        "the compiler has not finished within 1 s and was stopped. A step that scans over its layers compiles faster; "
        "%config ShardSession.compile_limit = SECONDS allows more. By its plan the step takes "
    )
    assert not alive(pid)
    assert built(width=128).text


def killed_at_work(process):
    """Kill a process once it has worked for a second."""
    idle = sum(process.cpu_times()[:2])
    while sum(process.cpu_times()[:2]) < idle + 1:
        time.sleep(0.05)
    process.kill()


@pytest.mark.ci
def test_a_compiler_that_is_killed_is_told_in_one_line():
    built()
    compiler = psutil.Process(the_compiler().pid)
    threading.Thread(target=killed_at_work, args=(compiler,), daemon=True).start()
    message = refusal(lambda: built(slow))
    assert message.startswith(
        "the compiler's process ended by signal 9 (SIGKILL), as Linux does where a machine or a container has no "
        f"memory left{SMALLER}. By its plan the step takes "
    )
    assert built(width=128).text


@pytest.mark.ci
def test_an_idle_compiler_ends_and_the_next_job_starts_another():
    target = Target(chip("v5e"), (2, 4))
    compiler = Compiler(target.environment(), idle_s=0.2)
    compiler.preload(target.topology())
    first = compiler.pid
    until = time.monotonic() + 60
    while compiler.pid is not None and time.monotonic() < until:
        time.sleep(0.05)
    assert compiler.pid is None
    compiler.preload(target.topology())
    assert compiler.pid not in (None, first)
    compiler.stop()
    assert compiler.pid is None


LOG = """W0101 00:00:00.000000 1 slow.cc:1] slow operation
F0101 00:00:00.000000 1 pass.cc:7] Check failed: n < 8
*** Check failure stack trace: ***
    @     0x7f9650140634  absl::SendToLog()
"""
SMALLER = ". A step that scans over its layers is a smaller program; another slice or another --remat may do, too"


@pytest.mark.parametrize(
    ("dies", "told"),
    [
        ("os.abort()", f"by signal 6 (SIGABRT); its last words: {LOG.splitlines()[1]}{SMALLER}"),
        (
            "os.kill(os.getpid(), 11)",
            f"by signal 11 (SIGSEGV); its last words: {LOG.splitlines()[1]}{SMALLER}",
        ),
        ("os._exit(3)", f"with exit code 3; its last words: {LOG.splitlines()[1]}"),
    ],
)
def test_a_compiler_that_dies_is_told_by_its_signal_and_last_words(monkeypatch, dies, told):
    monkeypatch.setattr(
        targets.compiler, "_START", f"import os, sys; sys.stderr.write({LOG!r}); sys.stderr.flush(); {dies}"
    )
    compiler = Compiler({})
    message = refusal(lambda: compiler.compile(SimpleNamespace()))  # type: ignore[arg-type]
    assert message == f"the compiler's process ended {told}"
    assert compiler.pid is None


def test_a_process_that_does_not_start_is_told_by_its_last_words(monkeypatch):
    monkeypatch.setattr(targets.compiler, "_START", "raise OSError('no such thing')")
    target = Target(chip("v5e"), (2, 4))
    compiler = Compiler(target.environment())
    message = refusal(lambda: compiler.compile(SimpleNamespace(topology=target.topology())))  # type: ignore[arg-type]
    assert message == "the compiler's process ended with exit code 1; its last words: OSError: no such thing"


# What is missing or refused


@pytest.fixture
def without(monkeypatch):
    """`without(libtpu="0.0.1")` changes what is installed; None: not at all."""

    def change(**versions: str | None) -> None:
        there = tpu.installed()
        monkeypatch.setattr(tpu, "installed", lambda: {**there, **versions})
        if "libtpu" in versions and versions["libtpu"] is None:
            monkeypatch.setattr(tpu, "find_spec", lambda name: None)
            monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)

    devices.cache_clear()
    yield change
    devices.cache_clear()


def test_without_libtpu_the_line_that_installs_it_is_told(without):
    without(libtpu=None)
    line = install_command("tpu", f"jax=={jax.__version__}")
    assert refusal(lambda: jaxshard_magic.mesh(MESH)) == (f"no TPU compiler: libtpu is not installed. Run {line}")


def test_a_libtpu_that_does_not_pair_with_jax_is_named(without):
    without(libtpu="0.0.1")
    asked = tpu.jax_requirements()["libtpu"]
    message = refusal(lambda: jaxshard_magic.mesh(MESH))
    assert f"libtpu 0.0.1 does not pair with jax {jax.__version__}, which needs libtpu{asked}." in message
    assert message.endswith(f"Run {install_command('tpu', f'jax=={jax.__version__}')}")


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "aarch64"), ("Windows", "AMD64")])
def test_other_systems_are_told_what_has_a_compiler(monkeypatch, without, system, machine):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert refusal(lambda: jaxshard_magic.mesh(MESH)) == (
        f"no TPU compiler on {system} {machine}: libtpu is made for Linux on x86_64 alone. A Linux container or a "
        "Colab notebook has it"
    )


@pytest.mark.ci
def test_a_slice_that_the_compiler_refuses_is_told_in_one_line(monkeypatch):
    def load(topology):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no such\nslice")

    monkeypatch.setattr(targets, "load", load)
    message = refusal(lambda: devices(Target(chip("v5e"), (3, 5))))
    assert message == "the compiler refuses v5e:3x5: INVALID_ARGUMENT: no such slice"


@pytest.mark.ci
def test_a_step_refused_by_the_compiler_is_one_line_and_its_words_are_kept(folder):
    def step(w, x):
        return jax.ffi.ffi_call("nothing_of_this_name", Shape(x.shape, x.dtype))(x @ w)

    message = refusal(lambda: built(step))
    path = folder / "compiler-error.txt"
    assert message.startswith("the compiler for v5e:2x4 refuses this step: ")
    assert "nothing_of_this_name" in message
    assert message.endswith(f"All it says: {path}")
    assert "nothing_of_this_name" in path.read_text("utf-8")
    assert built().text  # by the same process


def test_an_attached_tpu_starts_first_and_under_its_own_variables(monkeypatch, without):
    slice_ = Target(chip("v5e"), (2, 4))
    found, seen = devices(slice_), []
    devices.cache_clear()
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    monkeypatch.setattr(tpu, "attached", lambda: True)
    monkeypatch.setattr(jax, "devices", lambda: seen.append("attached"))
    monkeypatch.setattr(targets, "load", lambda topology: seen.append(os.environ.get("TPU_SKIP_MDS_QUERY")) or found)
    assert devices(slice_) == found
    assert seen == ["attached", None]


# Calls to Python


def prints(w, x):
    jax.debug.print("{}", x.sum())
    return x @ w


def calls_back(w, x):
    jax.debug.callback(lambda y: None, x.sum())
    return x @ w


def asks_numpy(w, x):
    return x @ w + jax.pure_callback(np.asarray, Shape((), jnp.float32), x.sum())


def asks_outside(w, x):
    return x @ w + jax.experimental.io_callback(np.asarray, Shape((), jnp.float32), x.sum())


CALLS = {
    prints: "jax.debug.print",
    calls_back: "jax.debug.callback",
    asks_numpy: "jax.pure_callback",
    asks_outside: "jax.experimental.io_callback",
}


@pytest.mark.ci
@pytest.mark.parametrize("step", CALLS)
def test_a_step_that_calls_python_compiles_for_a_slice_and_is_told_so_once(step):
    made = sharded(step)
    made.prepare(Shape((64, 64), jnp.float32), Shape((64, 64), jnp.float32))
    (told,) = [a for a in made.report().advice if a.code == "host-call"]
    line = step.__code__.co_firstlineno + 1
    assert f"calls Python in each run from test_targets.py, line {line}:" in told.message


@pytest.mark.ci
@pytest.mark.parametrize("step", CALLS)
@pytest.mark.skipif(gpu.missing() is not None, reason="jax's CUDA plugin is not installed")
def test_for_gpus_a_call_to_python_is_named_with_its_line(step):
    line = step.__code__.co_firstlineno + 1
    assert refusal(lambda: built(step, mesh="h100:8 data=8")) == (
        f"test_targets.py, line {line} calls Python while the step runs ({CALLS[step]}), which jax lowers for no GPU "
        "that is not attached: take it out, or compile for a TPU slice"
    )


@pytest.mark.ci
def test_what_jax_lowers_for_no_tpu_is_told_with_its_line():
    def step(w, x):
        return x @ w + jnp.linalg.eigvals(w)[0].real

    line = step.__code__.co_firstlineno + 1
    message = refusal(lambda: built(step))
    assert message.startswith(
        f"test_targets.py, line {line} asks for what jax lowers for no hardware like this that is not attached: "
    )
    assert "'eig'" in message


# Beside what is attached


@pytest.mark.ci
def test_an_attached_mesh_works_on_beside_it():
    w = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
    x = np.linspace(0, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
    here = sharded(mesh="cpu:8 data=8")
    before = jax.device_get(here(w, x))
    there = jax.devices()
    assert built().text
    after = jax.device_get(here(w, x))
    again = jax.device_get(sharded(mesh="cpu:8 data=8")(w, x))
    for a, b, c in zip(before, after, again, strict=True):
        assert np.array_equal(a, b) and np.array_equal(a, c)
    assert jax.devices() == there
    assert {d.platform for d in there} == {"cpu"}
