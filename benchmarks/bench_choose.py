"""`%%shard auto` beside compiling everything, and on large models: `python benchmarks/bench_choose.py [CASE ...]`.

Small cases: every strategy on every mesh of 8 devices is compiled, with the options that save memory where the case has
them; the search must find the fastest of those that fit, with a third of the compiles at most. Large cases: a model of
shapes on a slice that isn't attached, 600 seconds on 2 cores, each with a process and a cache of its own; the plan that
is found must fit by the compiler's own account. Exits with 1 where fewer than 9 of 10 small cases find the best, one
takes more compiles, or a large one finds no plan that fits.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("NPROC", "32")
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import jax
from bench_targets import ONE_B, SEVEN_B, Size, abstract, train_step
from bench_targets import Case as Large
from theory.steps import STEPS

import jaxshard_magic
from jaxshard_magic.analysis.roofline import PREDICTION_ERROR
from jaxshard_magic.config.strategies import SEARCHED_STRATEGIES

SHARE, FOUND = 1 / 3, 0.9  # of the compiles; of the cases
BUDGET, CORES, GIB = 600.0, 2, 2**30
SEVENTY_B = Size(8192, 64, 32_768, 86)


@dataclass(frozen=True)
class Small:
    """A step on 8 devices: simulated ones, predicted for the chip `on`, or those of a slice. `args`: of one call."""

    step: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    mesh: str = "cpu:8 data=8"
    on: str | None = "v5e"
    among: tuple[str, ...] = SEARCHED_STRATEGIES
    vary: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def zoo(name: str, **how: Any) -> Small:
    call = STEPS[name]()
    return Small(call.step, lambda: (call.state, call.batch), **how)


def decoder(width: int, layers: int, examples: int, time_: int, **how: Any) -> Small:
    """A decoder of shapes, whose state or activations are too much for one device."""
    large = Large(Size(width, width // 128, 4 * width, layers), "", "", examples, time_)
    among = ("dp", "fsdp", "tp", "dp+tp", "fsdp+tp")
    vary = {"microbatches": (None, 4), "remat": (None, "full")}
    return Small(train_step, lambda: abstract(large), among=among, vary=vary, **how)


SMALL: dict[str, Callable[[], Small]] = {
    "mlp-v5e": lambda: zoo("mlp"),
    "gated-h100": lambda: zoo("gated mlp", on="h100"),
    "cnn-v5p": lambda: zoo("cnn", on="v5p"),
    "transformer-v5e": lambda: zoo("transformer"),
    "transformer-a100": lambda: zoo("transformer, fused qkv", on="a100"),
    "scanned-v6e": lambda: zoo("transformer, scanned", on="v6e"),
    "tied-slice": lambda: zoo("transformer, tied", mesh="v5e:2x4 data=8", on=None),
    "state-v5e": lambda: decoder(2048, 12, 16, 512, on="v5e"),
    "activations-v5e": lambda: decoder(1024, 8, 512, 2048, on="v5e"),
    "wide-h100": lambda: decoder(4096, 12, 16, 1024, on="h100"),
}
LARGE = {
    f"{name}-{slice_}": Large(size, f"{mesh} data=-1", "", examples, length)
    for name, size in (("1b", ONE_B), ("7b", SEVEN_B), ("70b", SEVENTY_B))
    for slice_, mesh, examples, length in (("v5e", "v5e:16x16", 256, 2048), ("v5p", "v5p:8x8x8", 512, 4096))
}


def small(name: str) -> dict[str, Any]:
    case = SMALL[name]()
    mesh, args = jaxshard_magic.mesh(case.mesh), case.args()
    start = time.perf_counter()
    found = jaxshard_magic.choose(case.step, args, mesh=mesh, among=case.among, vary=case.vary, on=case.on, budget=None)
    searched = time.perf_counter() - start
    start = time.perf_counter()
    every = jaxshard_magic.compare(
        case.step, case.among, args, mesh=mesh, meshes="all", vary=case.vary, on=case.on, run=False
    )
    all_s = time.perf_counter() - start
    best, chosen = every.fastest, found.trial
    assert best is not None and best.predicted is not None
    plain = [t.predicted for t in every.usable if t.strategy == "dp" and t.predicted is not None]
    return {
        "compiles": sum(t.report is not None for t in found.comparison.trials),
        "of": sum(t.report is not None for t in every.trials),
        "chosen": None if chosen is None else chosen.line,
        "chosen_s": None if chosen is None else chosen.predicted,
        "best": best.line,
        "best_s": best.predicted,
        "plain_s": min(plain, default=None),
        "seconds": searched,
        "all_seconds": all_s,
    }


def large(name: str) -> dict[str, Any]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    case = LARGE[name]
    args = abstract(case)
    start = time.perf_counter()
    found = jaxshard_magic.choose(train_step, args, mesh=jaxshard_magic.mesh(case.mesh), budget=BUDGET)
    chosen = found.trial
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(args[0])),
        "seconds": time.perf_counter() - start,
        "candidates": len(found.candidates),
        "compiles": sum(t.report is not None for t in found.comparison.trials),
        "chosen": None if chosen is None else chosen.line,
        "fits": None if chosen is None else chosen.fits,
        "step_s": None if chosen is None else chosen.predicted,
        "peak": None if chosen is None or chosen.peak is None else chosen.peak / GIB,
        "limit": None if found.limit is None else found.limit / GIB,
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
    }


def alone(name: str) -> dict[str, Any]:
    """One case in a process of its own, with nothing cached."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, "--here", name],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": folder},
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def told_small(name: str) -> tuple[bool, bool]:
    """Prints a case; whether it found the best, or what a prediction can't tell from it, with few enough compiles; no
    pipeline where dp is as near."""
    got = alone(name)
    ours, plain = got["chosen_s"] or math.inf, got["plain_s"] or math.inf
    best = ours <= (1 + PREDICTION_ERROR) * got["best_s"]
    if best and got["chosen"].startswith("pp"):
        best = plain > (1 + PREDICTION_ERROR) * ours
    few = got["compiles"] <= SHARE * got["of"]
    better = "" if best else f", best {got['best']}, {1e3 * got['best_s']:.4g} ms"
    print(
        f"{name:18s} {'best' if best else 'NOT THE BEST'}: {got['chosen']}, {1e3 * (got['chosen_s'] or 0):.4g} ms"
        f"{better}; {got['compiles']} of {got['of']} compiles{'' if few else ', TOO MANY'}, {got['seconds']:.0f} s "
        f"beside {got['all_seconds']:.0f} s",
        flush=True,
    )
    return best, few


def told_large(name: str) -> bool:
    """Prints a case; whether its plan fits, in time."""
    got = alone(name)
    good = bool(got["fits"]) and got["seconds"] <= 1.05 * BUDGET
    figures = (
        "no plan"
        if got["chosen"] is None
        else f"{got['chosen']}: {got['peak']:.2f} of {got['limit']:.2f} GiB, {1e3 * got['step_s']:.4g} ms predicted"
    )
    print(
        f"{name:8s} {got['parameters'] / 1e9:.1f}B parameters {'fits' if good else 'DOES NOT FIT'}: {figures}; "
        f"{got['compiles']} of {got['candidates']} compiled in {got['seconds']:.0f} s, {got['host']:.1f} GiB of host "
        "memory",
        flush=True,
    )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join((*SMALL, *LARGE))}; all unless said")
    parser.add_argument("--here", action="store_true", help="one case in this process, told as JSON")
    given = parser.parse_args()
    chosen = given.cases or [*SMALL, *LARGE]
    if unknown := set(chosen) - {*SMALL, *LARGE}:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join((*SMALL, *LARGE))}")
    if given.here:
        print(json.dumps(small(chosen[0]) if chosen[0] in SMALL else large(chosen[0])))
        return 0
    found = [told_small(name) for name in chosen if name in SMALL]
    fitting = [told_large(name) for name in chosen if name in LARGE]
    if found:
        print(f"the best of {sum(best for best, _ in found)} of {len(found)}, at least {FOUND:.0%}")
    enough = sum(best for best, _ in found) >= FOUND * len(found) and all(few for _, few in found)
    return 0 if enough and all(fitting) else 1


if __name__ == "__main__":
    sys.exit(main())
