"""Reading the text of a large compiled program: `python benchmarks/bench_hlo.py`.

The ratio is the time a byte of about 20 MB over that of about 2 MB, in one run: reading must not grow faster than
the text. Exits with 1 above the limit.
"""

import statistics
import sys
import time

from jaxshard_magic.analysis.hlo import RunCounts, parse_module

LIMIT = 1.5
ROUNDS = 5
METADATA = 'metadata={op_name="jit(step)/transpose(jvp())/while/body/dot_general" stack_frame_id=9}'


def program(computations: int) -> str:
    """HLO text of that many fused computations of 150 instructions each, about 20 kB a computation."""
    body = "".join(f"  %x.{i} = f32[64,64]{{1,0}} add(%x.{i - 1}, %x.{i - 1}), {METADATA}\n" for i in range(1, 150))
    head = "(x.0: f32[64,64]) -> f32[64,64] {\n  %x.0 = f32[64,64] parameter(0)\n"
    parts = "\n".join(f"%c.{n} {head}{body}}}\n" for n in range(computations))
    calls = "".join(f"  %f.{n} = f32[64,64] fusion(%p), kind=kLoop, calls=%c.{n}\n" for n in range(computations))
    return f"{parts}\nENTRY %e (p: f32[64,64]) -> f32[64,64] {{\n  %p = f32[64,64] parameter(0)\n{calls}}}\n"


def seconds(text: str) -> float:
    start = time.perf_counter()
    module = parse_module(text)
    counted = RunCounts(module)
    for name in module.computations:
        counted[name]
    return time.perf_counter() - start


def main() -> int:
    small, large = program(100), program(1000)
    times = [(seconds(small), seconds(large)) for _ in range(ROUNDS)]
    for text, column in zip((small, large), zip(*times, strict=True), strict=True):
        print(f"{len(text) / 1e6:5.1f} MB   {statistics.median(column):.2f} s")
    ratio = statistics.median((b / len(large)) / (a / len(small)) for a, b in times)
    print(f"time a byte, large / small: {ratio:.2f}, at most {LIMIT}")
    return ratio > LIMIT


if __name__ == "__main__":
    sys.exit(main())
