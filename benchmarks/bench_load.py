"""What `%load_ext jaxshard_magic` costs in a fresh kernel, against `import jax` in one like it.

    python benchmarks/bench_load.py [--rounds N]

Each round starts one process of each kind, in turns, so that a machine that grows slower counts for all.
Prints the ratios of the medians; exits with 1 where that of `%load_ext` is above the limit. Loading leaves
jax alone; the first magic that runs imports it with the API, which the last row shows and no limit holds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

LIMIT = 1.15

_SHELL = """
import time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
start = time.perf_counter()
{work}
print(time.perf_counter() - start)
"""
BASE = "import jax"
WORK = {
    BASE: "import jax",
    "%load_ext": "shell.run_line_magic('load_ext', 'jaxshard_magic')",
    "%load_ext and API": "shell.run_line_magic('load_ext', 'jaxshard_magic'); import jaxshard_magic.api",
}


def seconds(work: str) -> float:
    """Seconds that `work` takes in a fresh process with a bare IPython shell."""
    command = [sys.executable, "-c", _SHELL.format(work=work)]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "IPYTHONDIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return float(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description="%load_ext jaxshard_magic against import jax")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="processes of each (default: 9)")
    rounds = parser.parse_args().rounds
    for work in WORK.values():  # the first run of each also writes bytecode
        seconds(work)
    times = {name: [] for name in WORK}
    for _ in range(rounds):
        for name, work in WORK.items():
            times[name].append(seconds(work))
    base = statistics.median(times[BASE])
    ratios = {name: statistics.median(values) / base for name, values in times.items()}
    for name, values in times.items():
        median = statistics.median(values)
        print(
            f"{name:18}{median * 1e3:6.0f} ms   {min(values) * 1e3:.0f} to {max(values) * 1e3:.0f}"
            f"   {ratios[name]:.3f} of {BASE}"
        )
    print(f"%load_ext / {BASE}: {ratios['%load_ext']:.3f}, at most {LIMIT}, {rounds} processes each")
    return 0 if ratios["%load_ext"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
