"""A cell that fills the memory is ended before the machine ends the kernel; any other cell runs as without a guard."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxshard_magic.errors import ShardError
from jaxshard_magic.notebook.cells import memory_guard
from jaxshard_magic.notebook.cells.memory_guard import MemoryGuard, MemoryState

GIB = 2**30


def machine(*, free: float, mine: float, total: float = 24) -> MemoryState:
    return MemoryState(int(free * GIB), int(total * GIB), int(mine * GIB))


def reader(*states: MemoryState) -> Callable[[], MemoryState]:
    """One state after another, the last for ever."""
    left = list(states)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def guard(*states: MemoryState, **options) -> MemoryGuard:
    return MemoryGuard(read=reader(*states), every=0.001, **options)


def fill(seconds: float = 10) -> None:
    """Runs Python until it is ended, or for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


FULL = machine(free=1.9, mine=18.7)


def test_a_cell_that_fills_the_memory_is_ended_with_what_would_help():
    said: list[str] = []
    with pytest.raises(ShardError) as caught, guard(machine(free=20, mine=0.5), FULL, say=said.append):
        fill()
    expected = (
        "this cell has allocated 18.2\u202fGiB and 1.90\u202fGiB are left: build the state as shapes: "
        "`state = jax.eval_shape(init, key)`, or nnx.eval_shape"
    )
    assert str(caught.value) == expected
    assert said == [expected]
    assert caught.value.fix == "state = jax.eval_shape(init, key)"


def test_no_except_of_the_cell_keeps_it_alive():
    with pytest.raises(ShardError), guard(machine(free=20, mine=0.5), FULL):
        while True:
            try:
                fill()
            except (Exception, KeyboardInterrupt):
                continue


def test_it_comes_again_where_code_swallowed_it(monkeypatch):
    monkeypatch.setattr(memory_guard, "RETRY_SECONDS", 0.01)
    swallowed = 0
    with pytest.raises(ShardError), guard(machine(free=20, mine=0.5), FULL):
        while True:
            try:
                fill()
            except BaseException:
                swallowed += 1
                if swallowed == 3:
                    raise


@pytest.mark.parametrize(
    "now",
    [
        machine(free=1.9, mine=2.4),  # little is left, but this process took none of it
        machine(free=3, mine=18),  # a tenth of 24 GiB is 2.4
        machine(free=1.1, mine=8, total=8),  # a tenth is less than 1 GiB
    ],
)
def test_a_cell_goes_on_while_there_is_room_or_others_fill_it(now):
    with guard(machine(free=20, mine=0.5), now):
        fill(0.05)


def test_the_thresholds_are_the_callers():
    with (
        pytest.raises(ShardError),
        guard(machine(free=20, mine=1), machine(free=5, mine=1.2), least=6 * GIB, grown=0),
    ):
        fill()


def test_an_exception_of_the_cell_passes_through():
    with pytest.raises(ZeroDivisionError), guard(machine(free=20, mine=0.5)):
        print(1 / 0)


def test_a_cell_that_ends_by_itself_at_that_moment_is_not_interrupted_later():
    told = threading.Event()
    with guard(machine(free=20, mine=0.5), FULL, say=lambda _: (told.wait(1), None)[1]):
        pass
    told.set()
    fill(0.05)


def test_what_stood_for_the_signal_stands_again():
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(ShardError), guard(machine(free=20, mine=0.5), FULL):
        fill()
    assert signal.getsignal(signal.SIGUSR2) == before


def test_cells_that_end_at_that_very_moment_are_never_interrupted_afterwards(monkeypatch):
    monkeypatch.setattr(memory_guard, "RETRY_SECONDS", 0.0)
    for n in range(300):
        with contextlib.suppress(ShardError), guard(machine(free=20, mine=0.5), FULL):
            fill(0.0001 * (n % 20))
    fill(0.05)


def test_in_another_thread_nothing_is_watched():
    done = []

    def cell():
        with guard(machine(free=20, mine=0.5), FULL):
            fill(0.05)
        done.append(True)

    other = threading.Thread(target=cell)
    other.start()
    other.join()
    assert done


def test_the_watching_ends_with_the_cell():
    threads = threading.active_count()
    with guard(machine(free=20, mine=0.5)):
        assert threading.active_count() == threads + 1
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threading.active_count() == threads


def test_this_machine_is_read_as_linux_tells_it():
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        pytest.skip("this machine has no /proc")
    kib = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
    found = memory_guard._machine()
    assert found.total == kib["MemTotal"] * 1024
    assert found.free == pytest.approx(kib["MemAvailable"] * 1024, rel=0.2)
    assert found.mine == pytest.approx(pages * os.sysconf("SC_PAGE_SIZE"), rel=0.2)


def container(place, limit: str, used: int, files: int) -> None:
    place.joinpath("memory.max").write_text(f"{limit}\n")
    place.joinpath("memory.current").write_text(f"{used}\n")
    place.joinpath("memory.stat").write_text(f"anon 1\ninactive_file {files}\nactive_file 2\n")


def test_a_container_has_what_its_limit_leaves(monkeypatch, tmp_path):
    container(tmp_path, str(4 * GIB), used=3 * GIB, files=GIB)
    monkeypatch.setattr(memory_guard, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory_guard, "_machine", lambda: machine(free=20, mine=0.5))
    assert memory_guard.memory() == machine(free=2, mine=0.5, total=4)


def test_a_container_without_a_limit_has_the_machine(monkeypatch, tmp_path):
    container(tmp_path, "max", used=3 * GIB, files=0)
    monkeypatch.setattr(memory_guard, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory_guard, "_machine", lambda: machine(free=20, mine=0.5))
    assert memory_guard.memory() == machine(free=20, mine=0.5)


REAL = """
import numpy as np
from jaxshard_magic.notebook.cells.memory_guard import MemoryState, MemoryGuard, memory
from jaxshard_magic.errors import ShardError
MIB, start, held = 2**20, memory().mine, []
def pretend():
    now = memory()
    return MemoryState(start + 400 * MIB - now.mine, 400 * MIB, now.mine)
try:
    with MemoryGuard(read=pretend, least=100 * MIB, grown=50 * MIB):
        while len(held) < 1000:
            held.append(np.ones(MIB // 2, np.float64))  # 4 MiB
except ShardError as error:
    print(error)
print("alive with", len(held) < 1000)
"""


def test_a_process_that_really_allocates_survives():
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert re.match(r"this cell has allocated \d+\u202fMiB", first)
    assert last == "alive with True"
