"""Pipeline schedules beside what their sources publish: `python benchmarks/bench_schedules.py`.

Prints each figure of published_schedules.toml with the one found here, then, for 64 stages x 512 microbatches, the
CPU seconds that each schedule takes to make and to simulate. Less is better for every figure. Exits with 1 where a
figure is above the published one, where making and simulating take more than 2 s, 10 s for those that search, or where
the simulator runs fewer than 300,000 actions a second.
"""

import gc
import sys
import time
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from jaxshard_magic.schedule import NAMES, Costs, Simulation, make, simulate

FIGURES = Path(__file__).with_name("published_schedules.toml")
STAGES, MICROBATCHES, ROUNDS = 64, 512, 3
SECONDS, SECONDS_SEARCHED, ACTIONS_A_SECOND = 2.0, 10.0, 300_000
UNEVEN = Costs(10, 13, 7, 1)  # what those that search are timed at: at equal costs they may end at once
ROUNDING = 1e-4  # of figures that are printed with four digits


def simulated(figure: dict[str, Any]) -> Simulation:
    given = {part.name: figure[part.name] for part in fields(Costs) if part.name in figure}
    costs = Costs(**given)
    schedule = make(
        figure["schedule"],
        stages=figure["stages"],
        microbatches=figure["microbatches"],
        chunks=figure.get("chunks"),
        costs=costs,
        memory_limit=figure.get("memory_limit"),
    )
    return simulate(schedule, costs)


def compared() -> bool:
    """Prints the figures; whether none is above the published one."""
    print(f"{'schedule':12} {'p x m x v':>11}  {'quantity':18} {'here':>9} {'published':>10}  source")
    fine = True
    for figure in tomllib.loads(FIGURES.read_text("utf-8"))["figure"]:
        here = getattr(simulated(figure), figure["quantity"])
        there = figure["value"]
        above = here > there + ROUNDING * max(1.0, there)
        fine &= not above
        size = f"{figure['stages']}x{figure['microbatches']}x{figure.get('chunks', 1)}"
        published = f"{'~' if figure.get('about') else ''}{there:.4g}"
        mark = "  ABOVE" if above else ""
        print(
            f"{figure['schedule']:12} {size:>11}  {figure['quantity']:18} {here:9.4g} {published:>10}  "
            f"{figure['source']}{mark}"
        )
    return fine


def timed(name: str) -> bool:
    """Prints how long a schedule takes; whether that is within the limits."""
    searches = NAMES[name].uses_search
    costs = UNEVEN if searches else Costs()
    makes, runs, actions = [], [], 0
    for _ in range(1 if searches else ROUNDS):
        gc.collect()
        start = time.process_time()
        schedule = make(name, stages=STAGES, microbatches=MICROBATCHES, costs=costs)
        made = time.process_time()
        simulate(schedule, costs)
        end = time.process_time()
        makes.append(made - start)
        runs.append(end - made)
        actions = schedule.actions
    making, running = min(makes), min(runs)
    limit = SECONDS_SEARCHED if searches else SECONDS
    rate = actions / running
    print(f"{name:12} {actions:8,} actions: {making:5.2f} s + {running:5.2f} s of {limit:g}, {rate:9,.0f} a second")
    return making + running <= limit and rate >= ACTIONS_A_SECOND


def main() -> int:
    fine = compared()
    print(f"\n{STAGES} x {MICROBATCHES}: CPU seconds to make + to simulate, at most; actions simulated a second")
    return not all([fine, *map(timed, NAMES)])


if __name__ == "__main__":
    sys.exit(main())
