"""Reading a large compiled step into its report: `python benchmarks/bench_analysis.py [LAYERS]`.

An unrolled transformer is compiled for 8 simulated devices, then read: collectives with their lines, and memory.
Prints the time for the text's size, and that of a scanned transformer of 1,000 layers against one of 2; of one of 48
layers compiled for a TPU slice, where libtpu is there, the time with what it tells of overlap against without. Exits
with 1 above a limit.
"""

import argparse
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from theory import steps

import jaxshard_magic
from jaxshard_magic.analysis import program_reading
from jaxshard_magic.analysis.program_reading import read_program
from jaxshard_magic.analysis.program_texts import ProgramTexts, home_files
from jaxshard_magic.compilation.compiled_step import CompiledStep

LIMIT_S, MB = 3.0, 20  # seconds for so many MB of HLO text
LOOP = 1.2  # a loop of 1,000 trips against one of 2
OVERLAP, DEEP = 1.2, 48  # with the order of collectives against without, of so many layers
ROUNDS = 5


def entry(layers: int, *, scan: bool, devices: str = "cpu:8") -> CompiledStep:
    steps.LAYERS = layers
    call = steps.transformer(scan=scan)
    mesh = jaxshard_magic.mesh(f"{devices} data=4 model=2")
    step = jaxshard_magic.shard(call.step, "fsdp+tp", mesh=mesh, on="v5e" if devices == "cpu:8" else None)
    return step.prepare(call.state, call.batch)


def seconds(made: CompiledStep) -> float:
    start = time.perf_counter()
    read_program(made, ProgramTexts(home_files(made)))
    return time.perf_counter() - start


def overlap() -> bool:
    """Whether the order of a TPU's program takes too long to read, a round with it and one without in turns."""
    made, pairs = entry(DEEP, scan=False, devices="v5e:2x4"), []
    for _ in range(2 * ROUNDS):
        with patch.object(program_reading, "read_schedule", return_value=None):
            without = seconds(made)
        pairs.append(seconds(made) / without)
    ratio = statistics.median(pairs)
    print(f"{DEEP} layers for v5e:2x4 with the order of collectives / without: {ratio:.2f}, at most {OVERLAP}")
    return ratio > OVERLAP


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
    slow = find_spec("libtpu") is not None and overlap()
    return per > LIMIT_S or ratio > LOOP or slow


if __name__ == "__main__":
    sys.exit(main())
