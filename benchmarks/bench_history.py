"""Listing and searching 10,000 reports: `python benchmarks/bench_history.py`.

Small reports of many steps, strategies, meshes and options are added one by one, each with a cell of about 2 kB; then
all are listed, and searched by words, by columns and by time. Exits with 1 where the median of a question is above the
limit. What it takes to add one is printed, without a limit: the disk decides it.
"""

import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.sample_leaves import mesh
from support.sample_reports import MIB, bare, memory

from jaxshard_magic.history import History, Store
from jaxshard_magic.report import Report, Timing
from jaxshard_magic.report.parts import TimeSpread

LIMIT = 0.3  # seconds
REPORTS = 10_000
ROUNDS = 5
STRATEGIES = ("dp", "fsdp", "tp", "fsdp+tp", "pp+dp")
MESHES: tuple[dict[str, int], ...] = ({"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4})
LINE = "    state, loss = train_step(state, next(batches))  # {} of this cell\n"


def report(n: int) -> Report:
    seconds = 0.04 + n % 97 / 1000
    return replace(
        bare(),
        name=f"step_{n % 50}",
        strategy=STRATEGIES[n % len(STRATEGIES)],
        options={"microbatches": 2 ** (n % 5), "precision": ("fp32", "bf16")[n % 2]},
        mesh=mesh(MESHES[n % len(MESHES)]),
        memory=memory((), 8, n % 1000 * MIB, 16128 * MIB),
        timing=Timing(1.0, 20, 20, TimeSpread(seconds, seconds, 2 * seconds)),
    )


def fill(store: Store) -> list[float]:
    """Seconds that each took."""
    taken = []
    for n in range(REPORTS):
        cell = f"%%shard {STRATEGIES[n % len(STRATEGIES)]}\n" + "".join(LINE.format(n + i) for i in range(30))
        made, start = report(n), time.perf_counter()
        store.add(made, cell=cell, notebook=f"notebooks/train{n % 20}.ipynb", versions={"jax": "0.10.2"})
        taken.append(time.perf_counter() - start)
    return taken


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "history.sqlite3")
        store.add(report(0), cell=None, notebook=None, versions={})
        with closing(sqlite3.connect(store.path)) as other:  # a second notebook keeps the log open
            other.execute("SELECT * FROM report").fetchall()
            adding = statistics.median(fill(store))
        print(f"{store.path.stat().st_size / 1e6:.0f} MB; adding one: {adding * 1e3:.1f} ms")
        middle = store.rows()[REPORTS // 2].at
        newest = History(tuple(store.rows(limit=200)), store)
        asked: dict[str, tuple[int | None, Callable[[], Sequence[object]]]] = {
            "all": (REPORTS + 1, store.rows),
            "a word of few": (REPORTS // 50, lambda: store.rows(["step_7", "notebooks"])),
            "words of none": (0, lambda: store.rows(["no cell has this"])),
            "a strategy": (REPORTS // 5, lambda: store.rows(strategy="pp+dp")),
            "a name": (REPORTS // 50, lambda: store.rows(name="step_7")),
            "since a time": (None, lambda: store.rows(since=middle, until=datetime.now())),
            "the newest 50 of a word": (50, lambda: store.rows(["bf16"], limit=50)),
            "a table of 50 as HTML": (None, lambda: [newest.to_html()]),
        }
        wrong = [name for name, (count, ask) in asked.items() if not measured(name, ask, count)]
    print(f"at most {LIMIT * 1e3:.0f} ms each")
    return bool(wrong)


def measured(name: str, ask: Callable[[], Sequence[object]], count: int | None) -> bool:
    """Whether it is within the limit; raises where it finds another count."""
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        found = ask()
        taken.append(time.perf_counter() - start)
        if count is not None and len(found) != count:
            raise SystemExit(f"{name}: {len(found)} reports, not {count}")
    print(f"{name:25} {len(found):6,} found   {statistics.median(taken) * 1e3:6.1f} ms")
    return statistics.median(taken) <= LIMIT


if __name__ == "__main__":
    sys.exit(main())
