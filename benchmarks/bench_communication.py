"""What each strategy moves on each of ten steps, beside theory: `python benchmarks/bench_communication.py`."""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("NPROC", "32")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from theory.expected import MESHES, expected, told
from theory.steps import STEPS, Call

import jaxshard_magic

SHORT = {"all-reduce": "AR", "all-gather": "AG", "reduce-scatter": "RS", "all-to-all": "A2A"}


def measured(call: Call, strategy: str, wanted: Counter) -> Counter:
    axes = " ".join(f"{a}={n}" for a, n in MESHES[strategy].items())
    step = jaxshard_magic.shard(call.step, strategy, mesh=jaxshard_magic.mesh(f"cpu:8 {axes}"))
    step.prepare(call.state, call.batch)
    return told(step.report().collectives or (), wanted)


def summed(moves: Counter) -> str:
    """`AG data 12/2048` per kind and axes: count and KiB."""
    totals: dict[str, list[int]] = {}
    for (kind, axes, size, _), count in moves.items():
        total = totals.setdefault(f"{SHORT.get(kind, kind)} {','.join(axes or ('?',))}", [0, 0])
        total[0] += count
        total[1] += count * size
    return "  ".join(f"{name} {int(n)}/{b / 1024:.5g}" for name, (n, b) in sorted(totals.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="*", help=f"of: {'; '.join(STEPS)}")
    chosen = parser.parse_args().steps or list(STEPS)
    print(
        "count / KiB per step over each set of axes, measured in the compiled program; "
        "exact: equal to theory, line by line"
    )
    off = 0
    for name in chosen:
        call = STEPS[name]()
        for strategy in MESHES:
            want = expected(name, strategy)
            got = measured(call, strategy, want)
            off += got != want
            print(f"{name:24s}{strategy:11s}{'exact' if got == want else 'OFF':6s}{summed(got)}")
            if got != want:
                print(f"{'theory':>41s}{summed(want)}")
    print(f"{off} of {len(chosen) * len(MESHES)} differ from theory")
    return off > 0


if __name__ == "__main__":
    sys.exit(main())
