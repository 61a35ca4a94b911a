"""What a compiler said is kept for the next look, in this session and in others, whatever happens to the cache."""

import linecache
import pickle
import shutil
import stat
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from support.apart import MESH, Shape, built, folder, sharded, started

from jaxshard_magic.targets import CompileResult, cache

compiling = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
__all__ = ["folder", "started"]


# The cache. A program has the lines that led to it, the caller's too: each test below looks twice from one line.


@compiling
@pytest.mark.ci
def test_the_second_look_asks_no_compiler_and_says_the_same(started):
    first, second = (built() for _ in range(2))
    assert first == second
    assert len(started) == 1


@compiling
@pytest.mark.ci
def test_another_program_slice_or_device_order_is_compiled_anew(started):
    for width, mesh in [(64, MESH), (128, MESH), (64, "v5e:4x4 data=16"), (64, "v5e:2x4 data=4 model=2")]:
        built(width=width, mesh=mesh)
    assert len(started) == 4


def nothing(folder: Path) -> None:
    pass


def overwritten(folder: Path, by: bytes = b"no program " * 1000) -> None:
    for file in (folder / "compiled").iterdir():
        file.write_bytes(by)


def truncated(folder: Path) -> None:
    (file,) = (folder / "compiled").iterdir()
    file.write_bytes(file.read_bytes()[:100])


def removed(folder: Path) -> None:
    (file,) = (folder / "compiled").iterdir()
    file.unlink()


@compiling
@pytest.mark.ci
def test_a_damaged_cache_costs_one_compile_and_is_whole_again(started, folder):
    texts, asked = [], []
    for happens in (nothing, overwritten, nothing, shutil.rmtree, nothing):
        happens(folder)
        texts.append(built().text)
        asked.append(len(started))
    assert asked == [1, 2, 2, 3, 3]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("damage", [overwritten, truncated, removed])
def test_what_is_damaged_is_not_there_and_can_be_kept_again(folder, damage):
    large = CompileResult(text="HloModule", proto=np.random.default_rng(0).bytes(100_000), log=("slow",))
    for happens, found in ((nothing, large), (damage, None)):
        cache.put("key", large)
        happens(folder)
        assert cache.get("key") == found
    cache.put("key", large)
    assert cache.get("key") == large


class Touches:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_what_is_no_json_of_ours_is_not_there_and_nothing_of_it_runs(folder, tmp_path):
    pickled, ran = pickle.dumps(Touches(tmp_path / "ran")), tmp_path / "ran"
    pickle.loads(pickled)
    ran.unlink()
    for found in (pickled, b"[1, 2]", b'{"text": "HloModule"}', b"[" * 100_000, b'{"stats": 5}', b"\xff"):
        for data in (found, zlib.compress(found)):
            cache.put("key", CompileResult(text="HloModule"))
            overwritten(folder, data)
            assert cache.get("key") is None
    assert not ran.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="rights are kept in another way")
def test_nobody_else_reads_the_cache_nor_what_was_laid_open_before(folder):
    cache.put("old", CompileResult(text="HloModule"))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    cache.put("new", CompileResult(text="HloModule"))
    rights = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert rights == {folder.name: 0o700, "compiled": 0o700, "old": 0o600, "new": 0o600}


@compiling
@pytest.mark.ci
def test_where_nothing_can_be_written_nothing_is_kept_and_all_works(started, folder):
    folder.parent.write_text("a file, no folder")
    first, second = (built() for _ in range(2))
    assert first.text == second.text
    assert len(started) == 2


@pytest.mark.ci
def test_the_cache_is_bounded_and_keeps_what_was_looked_at_last(folder, monkeypatch):
    monkeypatch.setattr(cache, "SIZE", 2_000_000)
    some = [CompileResult(proto=np.random.default_rng(i).bytes(50_000)) for i in range(80)]
    cache.put("first", some[0])
    for i, each in enumerate(some):
        cache.put(str(i), each)
        assert cache.get("first") == some[0]
    held = sum(f.stat().st_size for f in (folder / "compiled").glob("**/*") if f.is_file())
    assert held < 1.1 * cache.SIZE
    assert cache.get("0") is None
    assert cache.get("79") == some[79]


# Two sessions


CELL = """
import jax, jax.numpy as jnp
def cell_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * grad, loss
"""


@pytest.fixture
def cell_of():
    """The step of a cell as a session runs it whose file for the cell has a name."""
    made = []

    def run(file: str):
        names: dict = {}
        exec(compile(CELL, file, "exec"), names)
        linecache.cache[file] = len(CELL), None, CELL.splitlines(keepends=True), file
        made.append(file)
        return names["cell_step"]

    yield run
    for file in made:
        linecache.cache.pop(file, None)


@compiling
@pytest.mark.ci
@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param("/tmp/ipykernel_111/2718281828.py", "/tmp/ipykernel_222/2718281828.py", marks=pytest.mark.full),
        ("<ipython-input-3-0123456789ab>", "<ipython-input-7-0123456789ab>"),
        pytest.param(
            "/tmp/ipython-input-3-2718281828.py", "/tmp/ipython-input-7-2718281828.py", marks=pytest.mark.full
        ),
    ],
)
def test_a_cell_compiled_in_another_session_has_this_sessions_name(started, cell_of, one, other):
    first, second = (built(cell_of(file)) for file in (one, other))
    assert len(started) == 1
    assert f'"{one}"' in first.text and f'"{other}"' not in first.text
    assert f'"{other}"' in second.text and f'"{one}"' not in second.text


@compiling
@pytest.mark.ci
def test_a_report_has_the_lines_of_this_sessions_cell(cell_of):
    shapes = Shape((64, 64), jnp.float32), Shape((64, 64), jnp.float32)
    built(cell_of("/tmp/ipykernel_111/31415926.py"))
    step = sharded(cell_of("/tmp/ipykernel_222/31415926.py"))
    step.prepare(*shapes)
    report = step.report()
    assert {(c.file, c.line) for c in report.collectives} == {("a cell", 4)}
    (source,) = report.sources
    assert dict(zip(source.numbers, source.text, strict=True))[4] == CELL.splitlines()[3]
