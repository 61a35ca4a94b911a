"""Random train steps under every strategy on 8 simulated devices, beside the same steps run plain.

    python tests/fuzz/run.py --seed 7 --programs 200
    python tests/fuzz/run.py --seed 7 --programs 1 --strategies fsdp,tp    # one program of a fault again

Program K of seed S is that of seed S + K. Each is run for three calls, with NumPy and JAX batches in turn. What fails
is made as short as it can be and printed as a program that shows the failure; the last lines count what became of all.
Programs run in a process of their own, which begins anew where one ends it, takes longer than `--limit`, or holds more
than `--memory`.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # before jax starts, here and in the process that runs the programs
    sys.path[:0] = [str(Path(__file__).resolve().parents[k]) for k in (1, 2)]
    from support.settings import SETTINGS

    os.environ.update(SETTINGS)

if TYPE_CHECKING:
    from fuzz.judge import Outcome
    from fuzz.programs import Program


def serve(pipe: Any) -> None:
    """Judge the programs that come through `pipe`, until None comes."""
    import jax
    import psutil

    from fuzz.judge import outcome, plain_numbers

    known: dict[Any, Any] = {}
    asked = 0
    while (given := pipe.recv()) is not None:
        program, strategy = given
        asked += 1
        if asked % 20 == 0:
            jax.clear_caches()
        if program not in known:
            known.clear()
            try:
                known[program] = plain_numbers(program)
            except Exception:  # `outcome` tells which
                known[program] = None
        pipe.send((outcome(program, strategy, known[program]), psutil.Process().memory_info().rss / 2**30))


class Judge:
    """A process that runs programs; a new one takes its place where it ends."""

    def __init__(self, limit: float, memory: float):
        self._limit, self._memory = limit, memory
        self._process: Any = None
        self._pipe: Any = None

    def __call__(self, program: "Program", strategy: str) -> "Outcome":
        from fuzz.judge import Outcome

        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        self._pipe.send((program, strategy))
        held = float("inf")
        try:
            if self._pipe.poll(self._limit):
                found, held = self._pipe.recv()
            else:
                found = Outcome("slow", f"more than {self._limit:g} s")
        except EOFError:
            self._process.join()
            found = Outcome("ended", f"exit code {self._process.exitcode}")
        if held > self._memory:
            self.close()
        return found

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def faults(
    seeds: range,
    strategies: list[str],
    judge: Callable[["Program", str], "Outcome"],
    *,
    each: bool = True,
    shrink_s: float = 120,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[list[str], Counter[str]]:
    """A script for each sort of fault found, and how often each outcome came.

    `each`: every program under each strategy; else under one of them, in turn. A sort of fault is shrunk once.
    """
    from fuzz.generate import generate
    from fuzz.judge import MESHES, applies
    from fuzz.shrink import shrink

    scripts: dict[str, str] = {}
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        program = generate(seed)
        suited = [s for s in strategies if applies(program, s)]
        for strategy in suited if each or not suited else [suited[seed % len(suited)]]:
            found = judge(program, strategy)
            if found.sort not in outcomes and found.kind == "refused":
                tell(f"seed {seed} under {strategy}: {found.told}")
            outcomes[found.sort] += 1
            if outcomes.total() % 500 == 0:
                tell(f"up to seed {seed}: {dict(outcomes)}")
            if not found.fault:
                continue
            tell(f"seed {seed} under {strategy}: {found.kind}: {found.told}")
            sort = f"{found.sort} {seed if found.kind == 'wrong' else ''}"
            if sort in scripts:
                continue
            same = partial(_fails_alike, judge=judge, strategy=strategy, sort=found.sort)
            short = shrink(program, same, shrink_s)
            head = f"# seed {seed} under {strategy}: {found.kind}: {found.told}"
            scripts[sort] = f"{head}\n{short.script(strategy, MESHES[strategy], ('np', 'jnp', 'np'), found.specs)}"
            tell(scripts[sort])
    return [*scripts.values()], outcomes


def _fails_alike(program: "Program", judge: Callable[["Program", str], "Outcome"], strategy: str, sort: str) -> bool:
    return judge(program, strategy).sort == sort


def main() -> int:
    from fuzz.judge import MESHES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")) * 1000, help="today's unless given")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--strategies", default=",".join(MESHES), help=f"among {', '.join(MESHES)}")
    parser.add_argument("--one", action="store_true", help="each program under one of the strategies, in turn")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a program under a strategy")
    parser.add_argument("--shrink", type=float, default=120, help="seconds for making a failing program short")
    parser.add_argument("--memory", type=float, default=4, help="GiB of the process that runs them")
    asked = parser.parse_args()
    strategies = asked.strategies.split(",")
    if unknown := {*strategies} - {*MESHES}:
        parser.error(f"{', '.join(unknown)}: there are {', '.join(MESHES)}")
    judge, begun = Judge(asked.limit, asked.memory), time.perf_counter()
    seeds = range(asked.seed, asked.seed + asked.programs)
    found, outcomes = faults(
        seeds, strategies, judge, each=not asked.one, shrink_s=asked.shrink, tell=partial(print, flush=True)
    )
    judge.close()
    print(f"\n{asked.programs} programs from seed {asked.seed}, {outcomes.total()} runs, ", end="")
    print(f"{time.perf_counter() - begun:.0f} s, {len(found)} sorts of faults")
    print(*(f"{n:6} {sort}" for sort, n in outcomes.most_common()), sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
