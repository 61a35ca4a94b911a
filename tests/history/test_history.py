"""Every report that was kept comes back, is found by its words, and lies where it should."""

import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.histories import CELL, add, fail, files, kept, numbers, one_line, only, path
from support.sample_reports import (
    MIB,
    SAMPLES,
    attached,
    bare,
    hostile,
    large,
    simulated,
    too_big,
    unknown,
    wrong,
)

from jaxshard_magic.errors import ShardError
from jaxshard_magic.history import HistoryError, Row, Store, database, store

__all__ = ["kept", "path"]


# What is kept comes back


@pytest.mark.parametrize("name", ["attached", "large", "hostile"])  # JSON of all of them: test_report.py
def test_a_report_and_its_cell_come_back_as_they_were(kept: Store, name: str):
    number = add(kept, SAMPLES[name]())
    assert kept.report(number).to_dict() == SAMPLES[name]().to_dict()
    assert kept.cell(number) == CELL
    assert only(kept.rows()).id == number


def test_a_row_tells_what_its_report_does(kept: Store):
    before = datetime.now(UTC)
    add(kept)
    found = only(kept.rows())
    assert before <= found.at <= datetime.now(UTC)
    assert found.at.tzinfo is not None
    # 4.4 GiB of temporaries and 475 MiB of other arrays on the fullest device, beside the 112.6 MiB of the step's own
    assert found.peak == max(d.peak or 0 for d in attached().memory.per_device)  # type: ignore[union-attr]
    assert (found.limit, found.fits) == (16128 * MIB, True)
    assert found.sent == sum(c.wire_bytes for c in attached().collectives or ())
    assert replace(found, at=before, predicted_s=None, peak=None, sent=None) == Row(
        id=found.id,
        at=before,
        notebook="a/Train.ipynb",
        name="train_step",
        strategy="fsdp+tp",
        mesh="data=4 model=2",
        options={},
        typed="",
        device="TPU v5 lite",
        source="attached",
        step_s=0.0473,
        predicted_s=None,
        on="TPU v5e",
        peak=None,
        limit=16128 * MIB,
        fits=True,
        sent=None,
        passed=True,
        versions={"jax": "0.10.2"},
        has_cell=True,
    )


def test_what_is_not_known_is_none_and_never_zero(kept: Store):
    add(kept, bare(), cell=None, notebook=None)
    found = only(kept.rows())
    missing = (
        found.step_s,
        found.predicted_s,
        found.on,
        found.peak,
        found.limit,
        found.fits,
        found.sent,
        found.passed,
    )
    assert set(missing) == {None}
    assert (found.notebook, found.has_cell, kept.cell(found.id)) == (None, False, None)
    add(kept, replace(bare(), collectives=()))
    assert kept.rows(limit=1)[0].sent == 0, "nothing moves: that is known"


def test_not_fitting_and_other_numbers_are_told_apart_from_unknown(kept: Store):
    for made in (too_big, wrong, simulated):
        add(kept, made())
    assert [(found.fits, found.passed) for found in kept.rows()] == [
        (None, None),
        (True, False),
        (False, None),
    ]


def test_text_that_utf8_cannot_write_is_kept(kept: Store):
    name = os.fsdecode(b"Tr\xe4ining.ipynb") + "\udc80"
    number = add(kept, hostile(), cell="x = '\ud800'", notebook=name)
    assert kept.cell(number) == "x = '\ud800'"
    assert numbers(kept.rows(["ining.ipynb"])) == [number]


def test_a_report_made_again_keeps_its_number_cell_and_time(kept: Store):
    number = add(kept, unknown())
    first = only(kept.rows())
    kept.replace(number, attached())
    again = only(kept.rows(["übung", "train.ipynb"]))
    assert (first.step_s, again.step_s) == (None, 0.0473)
    assert (again.id, again.at, again.notebook, again.versions) == (
        number,
        first.at,
        first.notebook,
        first.versions,
    )
    assert (kept.cell(number), kept.report(number)) == (CELL, attached())


def test_a_report_that_is_gone_is_not_made_again_in_the_place_of_another(kept: Store, path: Path):
    mine = add(kept)
    path.unlink()
    others = Store(path)
    assert add(others, bare()) == mine
    with pytest.raises(HistoryError) as error:
        kept.replace(mine, attached())
    one_line(error, f"report {mine} is no longer in the history")
    assert others.report(mine) == bare()


# Finding and removing


def test_rows_come_newest_first_and_as_many_as_asked(kept: Store):
    added = [add(kept, bare()) for _ in range(5)]
    assert numbers(kept.rows()) == added[::-1]
    assert numbers(kept.rows(limit=2)) == added[:2:-1]
    assert kept.rows(limit=0) == []


@pytest.mark.parametrize(
    "words",
    [
        ["TRAIN_step"],
        ["fsdp"],
        ["data=4"],
        ["v5 LITE"],
        ["train.IPYNB"],
        ["ÜBUNG"],
        ["100%_done", "'quoted'"],
        ["--microbatches 8"],
        ["microbatches", "train_step", "model=2"],
    ],
)
def test_words_are_found_in_all_that_was_said_of_a_report(kept: Store, words: list[str]):
    number = add(kept, replace(attached(), options={"microbatches": 8}))
    add(kept, replace(bare(), strategy="dp"), cell="x", notebook=None)
    assert numbers(kept.rows(words)) == [number]


@pytest.mark.parametrize("word", ["10_%", "%", "nothing of it", "'; DROP TABLE report; --"])
def test_a_word_is_text_and_no_pattern(kept: Store, word: str):
    add(kept, cell="100%_done".replace("%", ""))
    assert kept.rows([word]) == []
    assert kept.rows([word, "train"]) == []


def test_rows_are_found_by_strategy_name_and_time(kept: Store, monkeypatch: pytest.MonkeyPatch):
    day = datetime(2026, 3, 1, 12, tzinfo=UTC)
    for n, made in enumerate((bare(), attached(), too_big())):
        monkeypatch.setattr(store.time, "time", lambda n=n: (day + timedelta(days=n)).timestamp())
        add(kept, made)
    assert [found.at for found in kept.rows()] == [day + timedelta(days=n) for n in (2, 1, 0)]
    assert [found.strategy for found in kept.rows(strategy="fsdp+tp")] == ["fsdp+tp"]
    assert kept.rows(strategy="fsdp") == []
    assert [found.strategy for found in kept.rows(name="train_step")] == ["dp", "fsdp+tp"]
    assert [found.strategy for found in kept.rows(name="train_step", strategy="dp", since=day)] == ["dp"]
    second = day + timedelta(days=1)
    assert [found.strategy for found in kept.rows(since=second)] == ["dp", "fsdp+tp"]
    assert [found.strategy for found in kept.rows(until=second)] == ["spmd"]
    without_zone = second.astimezone().replace(tzinfo=None)
    assert len(kept.rows(since=without_zone)) == 2


def test_a_number_that_no_report_has_is_one_line_with_the_nearest(kept: Store):
    with pytest.raises(ShardError, match="no report 3: the history is empty"):
        kept.report(3)
    added = [add(kept, bare()) for _ in range(9)]
    kept.remove(added[3:6])
    for ask in (kept.report, kept.cell, lambda number: kept.remove([1, number])):
        with pytest.raises(ShardError) as error:
            ask(5)
        one_line(error, "no report 5 in the history; the nearest are 3, 7, 8, the latest is 9")
    assert 1 in numbers(kept.rows()), "where one number is wrong nothing is removed"


def test_reserved_numbers_are_nobody_elses_also_where_nothing_was_kept_before(kept: Store, path: Path):
    assert kept.reserve(2) == range(1, 3)
    assert add(Store(path), bare()) == 3
    assert kept.reserve(1) == range(4, 5)
    known = {"cell": None, "notebook": None, "versions": {}}
    assert kept.add(bare(), number=2, **known) == 2
    assert [row.id for row in kept.rows()] == [3, 2]


def test_what_is_removed_is_gone_from_the_disk(kept: Store, path: Path):
    secret = "token = 'hf_removed'"
    first, last = add(kept, large(), cell=secret), add(kept)
    for number in range(3):
        add(kept, replace(large(), name=f"step{number}"))
    before = path.stat().st_size
    kept.remove([first, first])
    assert len(kept.rows()) == 4
    assert path.stat().st_size < before
    kept.clear()
    assert kept.rows() == []
    assert b"hf_removed" not in path.read_bytes()
    assert path.stat().st_size < before / 2
    assert add(kept) > last + 3, "numbers are never given twice"


def test_the_oldest_go_when_there_are_too_many(kept: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "MOST", 3)
    added = []
    for _ in range(5):
        added.append(add(kept, bare()))
        assert numbers(kept.rows()) == added[:-4:-1]
    with pytest.raises(ShardError):
        kept.cell(added[0])


def test_the_oldest_go_when_they_are_too_large(kept: Store, path: Path, monkeypatch: pytest.MonkeyPatch):
    with_cell = [add(kept, bare(), cell=os.urandom(5000).hex()) for _ in range(10)]
    monkeypatch.setattr(store, "MOST_BYTES", 50_000)  # 5000 bytes as hex: 10 kB to search and 5 kB compressed
    add(kept, bare(), cell=None)
    assert numbers(kept.rows())[1:] == with_cell[:-4:-1]
    with pytest.raises(HistoryError) as error:
        add(kept, bare(), cell=os.urandom(50_000).hex())
    one_line(error, "larger than the 50,000 bytes", "report.to_json()")
    assert len(kept.rows()) == 4, "what is too large to keep drops nothing"


# Where and how it lies


def test_nothing_is_made_before_something_is_written(kept: Store, path: Path):
    assert kept.rows() == []
    assert not path.parent.exists()
    add(kept)
    assert files(path) == [path.name]


def test_a_maker_that_was_killed_leaves_nothing_that_is_read(path: Path):
    path.parent.mkdir()
    (path.parent / (path.name + "-new")).write_bytes(b"SQLite format 3\0 and no more")
    path.touch()
    kept = Store(path, tell=fail)
    assert kept.rows() == []
    assert kept.report(add(kept)) == attached()
    assert files(path) == [path.name]


def test_the_variable_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXSHARD_HISTORY", str(tmp_path / "mine.sqlite3"))
    assert Store().path == tmp_path / "mine.sqlite3"
    monkeypatch.setenv("JAXSHARD_HISTORY", "")
    assert (Store().path.parent.name, Store().path.name) == ("jaxshard_magic", "history.sqlite3")
    assert Store(tmp_path / "other").path == tmp_path / "other"


@pytest.mark.parametrize(("local", "mode"), [(True, "wal"), (False, "delete")])
def test_a_write_ahead_log_is_kept_only_where_no_other_machine_writes(
    kept: Store, path: Path, monkeypatch: pytest.MonkeyPatch, local: bool, mode: str
):
    monkeypatch.setattr(database, "_is_local", lambda _: local)
    add(kept)
    with closing(sqlite3.connect(path)) as found:
        assert found.execute("PRAGMA journal_mode").fetchone() == (mode,)
    assert [kept.report(each.id) for each in kept.rows()] == [attached()]


def test_a_network_file_system_is_none_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mounted = [("/", "ext4"), (str(tmp_path), "nfs4"), (str(tmp_path / "fast"), "XFS")]
    parts = [SimpleNamespace(mountpoint=place, fstype=kind, opts="rw") for place, kind in mounted]
    monkeypatch.setattr(database.psutil, "disk_partitions", lambda all: parts)
    places = (Path("/elsewhere/h"), tmp_path / "h", tmp_path / "faster" / "h", tmp_path / "fast" / "h")
    assert [database._is_local(place) for place in places] == [True, False, False, True]


def test_no_array_of_a_run_is_in_the_file(kept: Store, path: Path):
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxshard_magic

    key = jax.random.key(7)
    state = {"w": jax.random.normal(key, (16, 8)), "b": jax.random.normal(key, (8,))}
    batch = jax.random.normal(key, (8, 16))

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda s: jnp.mean((batch @ s["w"] + s["b"]) ** 2))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    sharded = jaxshard_magic.shard(step, "fsdp", mesh=jaxshard_magic.mesh("data=8"), check=True)
    after = sharded(state, batch)
    number = add(kept, sharded.report())
    report, raw = kept.report(number), path.read_bytes()
    assert report.check is not None and report.check.passed
    known = raw + report.to_json().encode() + (kept.cell(number) or "").encode()
    for array in map(np.asarray, jax.tree.leaves((state, batch, after))):
        for value in array.ravel()[:20]:
            assert value.tobytes() not in raw or array.size == 1
            assert repr(float(value)).encode() not in known
            assert f"{value:.6f}".encode() not in known
