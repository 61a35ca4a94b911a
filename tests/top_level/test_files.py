"""A file of the user's is written whole or stays as it was; each failure is one line."""

import os
import resource
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.refusals import refusal

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report.records import writable_path, write_file


@contextmanager
def no_room(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes, as on a disk that is full."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path: Path, there: bool):
    path = tmp_path / "report.html"
    if there:
        path.write_text("mine")
    with no_room(100), pytest.raises(ShardError) as error:
        write_file(path, "x" * 10_000)
    assert str(error.value) == f"{path} can't be written: File too large"
    assert [f.read_text() for f in tmp_path.iterdir()] == ["mine"] * there


def test_a_device_that_is_full_is_one_line():
    with pytest.raises(ShardError, match=r"^/dev/full can't be written: No space left on device$"):
        write_file("/dev/full", "x" * 10_000)


def test_a_new_file_has_the_rights_of_any_and_an_old_one_keeps_its_own(tmp_path: Path):
    old, new, plain = tmp_path / "old", tmp_path / "new", tmp_path / "plain"
    old.write_text("")
    old.chmod(0o640)
    plain.write_text("")
    for path in (old, new):
        assert write_file(path, "é\udc80").read_bytes() == "é?".encode()
    rights = [stat.S_IMODE(path.stat().st_mode) for path in (old, new)]
    assert rights == [0o640, stat.S_IMODE(plain.stat().st_mode)]


def test_a_path_that_is_none_is_one_line(tmp_path: Path):
    for path in (tmp_path / "a\0b", tmp_path / ("x" * 300), tmp_path):
        refusal(write_file, path, "")


def test_the_home_folder_and_a_link_are_what_they_stand_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    os.symlink(tmp_path / "new", tmp_path / "link")
    assert writable_path("~/link") == tmp_path / "link"
    with pytest.raises(ShardError, match="is there already"):
        writable_path("~/link", overwrite=False)
    write_file("~/link", "text")
    assert (tmp_path / "new").read_text() == "text" and (tmp_path / "link").is_symlink()
