"""No report is lost that was said to be kept, whatever happens to processes, the disk and the file."""

import os
import signal
import sqlite3
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.histories import add, fail, files, in_process, kept, numbers, one_line, path, told, writers
from support.sample_reports import attached, bare, large

from jaxshard_magic.errors import ShardError
from jaxshard_magic.history import HistoryError, Row, Store, database
from jaxshard_magic.packages import upgrade_command

__all__ = ["kept", "path"]


# Several at once


@pytest.mark.ci
def test_twenty_processes_write_at_once_and_no_report_is_lost(path: Path):
    with writers(path, 20, 3) as started:
        added = [number for process in started for number in told(process)]
    assert sorted(added) == list(range(1, 61))
    assert sorted(numbers(Store(path).rows())) == sorted(added)


def test_two_notebooks_read_what_the_other_wrote(path: Path):
    one, other = Store(path), Store(path)
    for n in range(3):
        assert other.report(add(one, replace(bare(), name=f"one{n}"))).name == f"one{n}"
        assert one.report(add(other, replace(bare(), name=f"other{n}"))).name == f"other{n}"


def test_threads_of_a_kernel_write_at_once(kept: Store):
    threads = [threading.Thread(target=lambda: [add(kept, bare()) for _ in range(5)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers(kept.rows())) == list(range(1, 41))


@pytest.mark.ci
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_killed_writer_leaves_all_that_it_finished(path: Path):
    added: list[int] = []
    for finished in (1, 3, 10, 30):
        with writers(path, 2, 100_000) as started:
            for process in started:
                assert process.stdout is not None
                added += [int(process.stdout.readline()) for _ in range(finished)]
            for process in started:
                process.send_signal(signal.SIGKILL)
            for process in started:
                said, _ = process.communicate(timeout=60)
                added += [int(line) for line in said.splitlines(keepends=True) if line.endswith("\n")]
    kept = Store(path, tell=fail)
    assert set(added) <= set(numbers(kept.rows()))
    assert len(added) == len(set(added)) >= 88
    assert kept.report(add(kept)) == attached()
    assert kept.cell(added[0]) is not None


# Whose it is


@pytest.mark.skipif(sys.platform == "win32", reason="rights are kept in another way")
def test_nobody_else_reads_the_history_nor_what_was_laid_open_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAXSHARD_HISTORY")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    folder = Store().path.parent
    before = os.umask(0)
    try:
        add(Store())
        (folder / "history.broken-1.sqlite3").touch()
        assert open_to_others(folder) == {"history.broken-1.sqlite3"}
        for file in (folder, *folder.iterdir()):
            file.chmod(0o777)
        add(Store())
        with closing(sqlite3.connect(folder / "history.sqlite3")) as other:
            other.execute("SELECT count(*) FROM report").fetchall()
            assert open_to_others(folder) == set()
    finally:
        os.umask(before)


def open_to_others(folder: Path) -> set[str]:
    return {file.name for file in (folder, *folder.iterdir()) if file.stat().st_mode & 0o077}


@pytest.mark.skipif(sys.platform == "win32", reason="rights are kept in another way")
def test_a_folder_that_the_user_names_keeps_its_rights(tmp_path: Path):
    tmp_path.chmod(0o755)
    other = tmp_path / "other.txt"
    other.write_text("")
    other.chmod(0o644)
    add(Store(tmp_path / "history.sqlite3"))
    assert open_to_others(tmp_path) == {tmp_path.name, "other.txt"}


# A damaged file


def random_bytes(path: Path) -> None:
    path.write_bytes(os.urandom(20_000))


def text_instead(path: Path) -> None:
    path.write_text("no database " * 1000)


def truncated(part: float) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        whole = path.read_bytes()
        path.write_bytes(whole[: int(part * len(whole))])

    return cut


def damaged_within(path: Path) -> None:
    """The first page as it was, and none of the others."""
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + os.urandom(len(whole) - 4096))


@pytest.mark.parametrize(
    "damage",
    [random_bytes, text_instead, damaged_within, *map(truncated, (0.01, 0.3, 0.5))],
    ids=["random", "text", "within", "1%", "30%", "50%"],
)
def test_a_damaged_file_is_moved_aside_and_told_once(path: Path, damage: Callable[[Path], None]):
    lines: list[str] = []
    kept = Store(path, tell=lines.append)
    for _ in range(3):
        add(kept, large())
    damage(path)
    broken = path.read_bytes()
    number = add(kept)
    assert kept.report(number) == attached()
    assert numbers(kept.rows()) == [number]
    (line,) = lines
    aside, fresh = files(path)
    assert aside.startswith("history.broken-") and aside.endswith(".sqlite3") and fresh == path.name
    assert (path.parent / aside).read_bytes() == broken
    assert aside in line and "\n" not in line


@pytest.mark.parametrize("ask", [Store.rows, lambda kept: kept.rows(["x"])])
def test_reading_a_damaged_file_finds_nothing_and_tells_once(path: Path, ask: Callable[[Store], list[Row]]):
    lines: list[str] = []
    kept = Store(path, tell=lines.append)
    add(kept, large())
    random_bytes(path)
    assert ask(kept) == ask(kept) == []
    assert len(lines) == 1


def test_a_warning_tells_it_by_default(path: Path):
    path.parent.mkdir()
    random_bytes(path)
    with pytest.warns(UserWarning, match="was damaged: it now lies in history.broken-"):
        add(Store(path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add(Store(path))


@pytest.mark.ci
def test_processes_that_find_it_damaged_at_once_move_it_once_and_lose_nothing(path: Path):
    path.parent.mkdir()
    random_bytes(path)
    with writers(path, 6, 5) as started:
        added = [number for process in started for number in told(process)]
    assert sorted(added) == list(range(1, 31))
    assert sorted(numbers(Store(path).rows())) == sorted(added)
    assert len(files(path)) == 2


def test_what_lay_beside_a_damaged_or_removed_file_does_not_get_into_a_new_one(path: Path):
    """A write-ahead log of a killed process belongs to its own database."""
    add(Store(path), bare())
    with closing(sqlite3.connect(path)) as open_one:  # so that the log is not written back when the store is done
        open_one.execute("SELECT * FROM report").fetchall()
        add(Store(path), bare())
        log = (path.parent / (path.name + "-wal")).read_bytes()
    assert log
    for make_place in (path.unlink, lambda: random_bytes(path)):
        make_place()
        (path.parent / (path.name + "-wal")).write_bytes(log)
        again = Store(path, tell=str)
        assert add(again) == 1
        assert again.report(1) == attached()
        assert len(again.rows()) == 1


def test_one_damaged_report_says_so_and_the_others_are_read(kept: Store, path: Path):
    first, second = add(kept), add(kept)
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE content SET report = x'00' WHERE id = ?", (first,))
    with pytest.raises(ShardError) as error:
        kept.report(first)
    one_line(error, f"report {first} of the history", "is damaged: remove it")
    assert kept.report(second) == attached()


@pytest.mark.parametrize(
    ("column", "value"),
    [("versions", "{"), ("at", "yesterday"), ("step_s", b"\xff"), ("name", b"x"), ("peak", float("inf"))],
)
def test_one_damaged_row_is_left_out_and_the_line_names_what_removes_it(path: Path, column: str, value: Any):
    lines: list[str] = []
    kept = Store(path, tell=lines.append)
    first, second = add(kept), add(kept)
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("PRAGMA ignore_check_constraints = 1")
        other.execute(f'UPDATE report SET "{column}" = ? WHERE id = ?', (value, first))
    assert [row.id for row in kept.rows()] == [second]
    [line] = lines
    assert "which is damaged" in line
    exec(f"import jaxshard_magic\nimport jaxshard_magic.history\n{line.rpartition(', ')[2]}")
    assert [row.id for row in kept.rows()] == [second] and len(lines) == 1


# Where nothing can be kept


def refused(kept: Store, *said: str) -> None:
    """`add` and `replace` raise one line, and it says so."""
    for write in (lambda: add(kept), lambda: kept.replace(1, attached()), kept.clear):
        with pytest.raises(HistoryError) as error:
            write()
        one_line(error, str(kept.path), "set JAXSHARD_HISTORY to another file", *said)


def test_a_folder_where_a_file_should_be_is_one_line_that_names_one(tmp_path: Path):
    kept = Store(tmp_path)
    said = f"the history {tmp_path} is a folder: set JAXSHARD_HISTORY to a file in it, {tmp_path}/history.sqlite3"
    for ask in (lambda: add(kept), kept.rows, lambda: kept.reserve(1), kept.clear):
        with pytest.raises(HistoryError) as error:
            ask()
        assert str(error.value) == said


def test_a_file_where_a_folder_should_be_is_one_line(tmp_path: Path):
    (tmp_path / "data").write_text("a file")
    kept = Store(tmp_path / "data" / "history.sqlite3")
    refused(kept, "can't be opened and written", "make its folder one that you can write to")
    assert kept.rows() == []


READ_ONLY = """
import os, sys
from support.sample_reports import attached
from jaxshard_magic.history import Store, HistoryError
from jaxshard_magic.views import words  # another user may not read where Python lies
folder = sys.argv[1]
kept, none = Store(folder + "/history.sqlite3"), Store(folder + "/other/history.sqlite3")
assert len(kept.rows()) == 1
if os.getuid() == 0:
    os.setuid(65534)
for each in (kept, none):
    try:
        each.add(attached(), cell=None, notebook=None, versions={})
        print("was written")
    except HistoryError as error:
        print(error)
print(kept.rows(["train"])[0].strategy, kept.report(1) == attached(), none.rows(), sorted(os.listdir(folder)))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="folders are read-only in another way")
def test_a_read_only_folder_is_read_and_not_written():
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        kept = Store(folder / "history.sqlite3")
        add(kept)
        names = sorted(os.listdir(folder))
        for file in folder.iterdir():
            file.chmod(0o444)
        folder.chmod(0o555)
        done = in_process(READ_ONLY, given)
        folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    first, second, read = done.stdout.splitlines()
    assert "can't be opened and written" in first and "can't be opened and written" in second
    assert read == f"fsdp+tp True [] {names}"


def test_a_full_disk_is_one_line_and_what_was_kept_stays(kept: Store, monkeypatch: pytest.MonkeyPatch):
    add(kept)
    connect = sqlite3.connect

    def connect_to_a_full_disk(*given, **options):
        connection = connect(*given, **options)
        connection.execute("PRAGMA max_page_count = 1")  # not below what it has
        return connection

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", connect_to_a_full_disk)
        with pytest.raises(HistoryError) as error:
            add(kept, large(), cell=os.urandom(20_000).hex())
    one_line(error, "has no room left on its disk: free some, or set JAXSHARD_HISTORY to another file")
    assert [kept.report(found.id) for found in kept.rows()] == [attached()]
    assert len(kept.rows()) == 1 and add(kept) == 2


LIMITED = """
import os, resource, sys
from support.sample_reports import bare
from jaxshard_magic.history import Store, HistoryError
kept = Store(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    for _ in range(1000):
        kept.add(bare(), cell=os.urandom(2000).hex(), notebook=None, versions={})
except HistoryError as error:
    print(error)
print(len(kept.rows()))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits to the size of files")
@pytest.mark.parametrize("size", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (20_000, 150_000))])
def test_a_file_that_may_not_grow_is_one_line_and_what_was_kept_stays(path: Path, size: int):
    done = in_process(LIMITED, path, size)
    assert done.returncode == 0, done.stderr
    line, count = done.stdout.splitlines()
    assert "can't be read or written (disk I/O error): see whether its disk is full, over its quota or gone" in line
    kept = Store(path, tell=fail)
    assert len(kept.rows()) == int(count)
    assert (int(count) > 5) == (size > 100_000)
    assert kept.report(add(kept)) == attached()


def test_a_database_that_another_process_holds_is_one_line(path: Path):
    add(Store(path))
    kept = Store(path, wait=0.2)
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        start = time.monotonic()
        refused(kept, "has been locked by another process for 0.2 s: try again when that is done")
        assert 0.5 < time.monotonic() - start < 20
        if database._is_local(path):
            assert len(kept.rows()) == 1, "a writer keeps no reader out"
    assert add(kept) == 2


def test_a_writer_waits_for_another_one_that_is_done_in_time(path: Path):
    kept = Store(path, wait=30)
    add(kept)
    other = sqlite3.connect(path, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    thread = threading.Timer(0.5, other.rollback)
    thread.start()
    assert add(kept) == 2
    thread.join()
    other.close()


def test_a_database_of_a_newer_version_is_neither_written_nor_moved(kept: Store, path: Path):
    add(kept)
    with closing(sqlite3.connect(path)) as newer:
        newer.execute(f"PRAGMA user_version = {len(database.VERSIONS) + 1}")
    before = path.read_bytes()
    refused(kept, "was made by a newer jaxshard_magic", upgrade_command())
    with pytest.raises(HistoryError) as error:
        kept.rows()
    assert error.value.fix == upgrade_command()
    assert path.read_bytes() == before
    assert files(path) == [path.name]


def test_a_database_of_another_program_is_neither_written_nor_moved(kept: Store, path: Path):
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("CREATE TABLE report (id INTEGER PRIMARY KEY)")
    before = path.read_bytes()
    refused(kept, "is a database of another program")
    with pytest.raises(HistoryError):
        kept.rows()
    assert path.read_bytes() == before


def test_a_database_of_an_older_version_is_migrated_with_what_it_holds(
    kept: Store, path: Path, monkeypatch: pytest.MonkeyPatch
):
    number = add(kept)
    newer = (*database.VERSIONS, ("ALTER TABLE report ADD COLUMN colour TEXT DEFAULT 'green'",))
    monkeypatch.setattr(database, "VERSIONS", newer)
    assert kept.report(number) == attached()
    with closing(sqlite3.connect(path)) as found:
        assert found.execute("SELECT colour FROM report").fetchall() == [("green",)]
        assert found.execute("PRAGMA user_version").fetchone() == (len(newer),)
    assert add(kept) == number + 1
