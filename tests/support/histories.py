"""A history of its own for each test, and other processes that write to it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.sample_reports import attached

from jaxshard_magic.errors import ShardError
from jaxshard_magic.history import Row, Store
from jaxshard_magic.report import Report

TESTS = Path(__file__).parents[1]
SEARCH = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
CELL = "%%shard fsdp+tp\ndef train_step(state, batch):\n    return Übung(state, batch)  # 100%_done 'quoted'\n"
WRITER = """
import sys, time
from pathlib import Path
from support.sample_reports import bare
from jaxshard_magic.history import Store
path, count, go = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
store, report = Store(path, wait=120), bare()
print("ready", flush=True)
while not go.exists():
    time.sleep(0.01)
for n in range(count):
    print(store.add(report, cell=f"cell {n}", notebook=None, versions={}), flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "history.sqlite3"


@pytest.fixture
def kept(path: Path) -> Store:
    """A history that has nothing yet, and says nothing but what a test asks for."""
    return Store(path, tell=fail)


def fail(line: str) -> None:
    raise AssertionError(f"nothing was to be told: {line}")


def add(
    to: Store, report: Report | None = None, cell: str | None = CELL, notebook: str | None = "a/Train.ipynb"
) -> int:
    return to.add(report or attached(), cell=cell, notebook=notebook, versions={"jax": "0.10.2"})


def only(found: list[Row]) -> Row:
    (row,) = found
    return row


def numbers(found: list[Row]) -> list[int]:
    return [row.id for row in found]


def files(path: Path) -> list[str]:
    """What lies in the folder, but for the lock, which is empty."""
    return sorted(p.name for p in path.parent.iterdir() if not p.name.endswith("-lock"))


def one_line(error: pytest.ExceptionInfo[ShardError], *said: str) -> None:
    assert "\n" not in str(error.value)
    for words in said:
        assert words in str(error.value)


def in_process(code: str, *given: object) -> subprocess.CompletedProcess[str]:
    """What a process said that ran `code`."""
    command = [sys.executable, "-c", code, *map(str, given)]
    return subprocess.run(command, capture_output=True, text=True, env=SEARCH, timeout=120)


@contextmanager
def writers(path: Path, count: int, reports: int) -> Iterator[list[subprocess.Popen[str]]]:
    """So many processes, all ready; they begin at the same time, when the body begins."""
    go = path.parent.parent / "go"
    command = [sys.executable, "-c", WRITER, str(path), str(reports), str(go)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=SEARCH) for _ in range(count)]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        go.touch()
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()
        go.unlink(missing_ok=True)


def told(process: subprocess.Popen[str]) -> list[int]:
    """The numbers of all reports that the process was told are kept."""
    said, _ = process.communicate(timeout=300)
    return [int(line) for line in said.split()]
