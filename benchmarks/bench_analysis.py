"""Reading a large compiled step into its report: `python benchmarks/bench_analysis.py [LAYERS]`.

An unrolled transformer is compiled for 8 simulated devices, then read: collectives with their lines, and memory.
Prints the time for the text's size, and that of a scanned transformer of 1,000 layers against one of 2. Exits with 1
above a limit.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from theory import steps

import jaxshard_magic
from jaxshard_magic.analysis.summary import read_entry
from jaxshard_magic.step import Entry

LIMIT_S, MB = 3.0, 20  # seconds for so many MB of HLO text
LOOP = 1.2  # a loop of 1,000 trips against one of 2
ROUNDS = 5


def entry(layers: int, *, scan: bool) -> Entry:
    steps.LAYERS = layers
    call = steps.transformer(scan=scan)
    step = jaxshard_magic.shard(
        call.step, "fsdp+tp", mesh=jaxshard_magic.mesh("cpu:8 data=4 model=2"), on="v5e"
    )
    return step.prepare(call.state, call.batch)


def seconds(made: Entry) -> float:
    start = time.perf_counter()
    read_entry(made)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", nargs="?", type=int, default=120, help="of the unrolled transformer")
    made = entry(parser.parse_args().layers, scan=False)
    size = len(made.compiled.as_text()) / 1e6
    took = statistics.median(seconds(made) for _ in range(ROUNDS))
    per = took * MB / size
    print(f"{size:.1f} MB of HLO text: {took:.2f} s, {per:.2f} s for {MB} MB, at most {LIMIT_S}")
    few, many = entry(2, scan=True), entry(1000, scan=True)
    pairs = [(seconds(few), seconds(many)) for _ in range(ROUNDS)]
    ratio = statistics.median(b / a for a, b in pairs)
    print(f"a loop of 1,000 trips / of 2: {ratio:.2f}, at most {LOOP}")
    return per > LIMIT_S or ratio > LOOP


if __name__ == "__main__":
    sys.exit(main())
