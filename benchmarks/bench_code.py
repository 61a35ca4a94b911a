"""`%shard code` beside the plan that it writes down: `python benchmarks/bench_code.py`.

Five steps of the zoo under every strategy that has a place in them, on 8 simulated devices and fewer: bytes that a
device sends in a step of the program, as a multiple of those under the plan, read from both as compiled; and how long
writing took (three compiles at most), as a multiple of compiling the plan. Exits with 1 where a program sends more than
the limit allows.
"""

import contextlib
import io
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from conftest import Notebook
from IPython.core.interactiveshell import InteractiveShell
from support.taken_home import FIVE, MESHES, POSITIONS, code

LIMIT = 1.7


def main() -> int:
    notebook, most = Notebook(InteractiveShell.instance()), 0.0
    notebook.run("%load_ext jaxshard_magic")
    notebook.run("%config ShardSession.view = 'text'\n%config ShardSession.progress = False")
    print(f"{'step':22}{'strategy':14}{'mesh':24}{'bytes sent, plan':>17}{'program':>9}{'time':>6}")
    for home in FIVE:
        for strategy, mesh in [*MESHES, *(POSITIONS if home.positions else ())]:
            with contextlib.redirect_stdout(io.StringIO()):
                program = code(notebook, home, f"{strategy};", mesh)
                start = time.perf_counter()
                notebook.run("%shard code;")
                taken = time.perf_counter() - start
                (entry,) = [notebook.shell.magics_manager.registry["ShardMagics"].session.step.entry]
            plan, sent = (sum(c.wire_bytes for c in found or ()) for found in (program.planned, program.sent))
            most = max(most, sent / plan)
            what = "same" if program.same else f"{sent / plan:.3f}"
            ratio = taken / (entry.trace_s + entry.compile_s)
            print(f"{home.name:22}{strategy:14}{mesh:24}{plan:17,}{what:>9}{ratio:6.1f}", flush=True)
    print(f"at most {most:.2f} of the plan's bytes, limit {LIMIT}")
    return int(most > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
