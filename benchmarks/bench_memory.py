"""Host memory of a session that goes on: `python benchmarks/bench_memory.py`.

A `%%shard` cell of a scanned transformer with microbatches, on 8 simulated devices, runs 200 times in one kernel, as
somebody runs it who changes a number and runs it again; then `%shard code` 20 times. Printed as it goes: resident
memory once garbage is collected and glibc has given back what it holds free (compilers leave much of that), and
Python's objects. A session keeps its last 100 reports, and JAX some thousand small entries of its caches; nothing else
may grow. Exits with 1 where memory grew by more than the limit since the tenth run, or the fifth `%shard code`.
"""

import contextlib
import ctypes
import gc
import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import psutil
from conftest import Notebook
from IPython.core.interactiveshell import InteractiveShell
from support.taken_home import FIVE

HOME = next(home for home in FIVE if home.name == "transformer_scanned")
JOBS = (("%%shard cell", 200, 10, 48), ("%shard code", 20, 5, 16))  # runs, from which one on, MB


def measured() -> tuple[float, int]:
    """MB of resident memory, and Python's objects."""
    gc.collect()
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
    return psutil.Process().memory_info().rss / 1e6, len(gc.get_objects())


def main() -> int:
    notebook, over = Notebook(InteractiveShell.instance()), False
    *before, cell = HOME.cells("fsdp --microbatches 2")
    cell = f"{cell.rstrip()};"  # else the notebook's Out holds every report
    settings = [f"%config ShardSession.{name}" for name in ("progress = False", "options_limit = 0")]
    for text in ("%load_ext jaxshard_magic", *settings, "%mesh data=8;", *before):
        notebook.run(text)
    print(f"{'':14}{'run':>5}{'memory':>11}{'objects':>11}")
    for name, runs, first, limit in JOBS:
        since = 0.0, 0
        for n in range(1, runs + 1):
            with contextlib.redirect_stdout(io.StringIO()):
                notebook.run("%shard code;" if name == "%shard code" else cell)
            # IPython 9 keeps what a cell showed, but in the kernel of a notebook it does not.
            getattr(notebook.shell.history_manager, "outputs", {}).clear()
            if n == first:
                since = measured()
            if n in (1, first) or not n % (runs // 10):
                memory, objects = measured()
                print(f"{name:14}{n:5}{memory:8.1f} MB{objects:11,}", flush=True)
        more, objects = (now - then for now, then in zip(measured(), since, strict=True))
        print(f"{name}: {more:+.1f} MB and {objects:+,} objects since run {first}, limit {limit} MB")
        over |= more > limit
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
