"""What becomes of every zoo step under every strategy: the same numbers, a refusal, wrong numbers or a traceback.

    python tests/zoo_table.py
    python tests/zoo_table.py --steps 'gan|nnx' --strategies pp-2,pp-4 --batches numpy

A cell of the table is three calls, each fed with the results of the one before it, beside three of the plain step.
Cells run one after another in a process of their own, which begins anew where a cell takes longer than `--limit` or the
process holds more than `--memory`. Every outcome is a line of the file `--into`; a cell that has one isn't run again.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

CALLS = 3
BATCHES = ("numpy", "jnp")
ON = {  # a column -> strategy and mesh
    "pp-2": ("pp", "pipe=2"),
    "pp-4": ("pp", "pipe=4"),
    "pp+fsdp": ("pp+fsdp", "pipe=2 data=2"),
    "dp": ("dp", "data=8"),
    "fsdp": ("fsdp", "data=8"),
    "tp": ("tp", "data=4 model=2"),
    "fsdp+tp": ("fsdp+tp", "data=2 fsdp=2 model=2"),
    "sp": ("sp", "data=4 seq=2"),
    "ep": ("ep", "data=2 expert=4"),
}
FOR = {"sp": {"transformer"}, "ep": {"moe"}}  # columns for steps of certain families
MARKS = {"same": "=", "refused": "r", "wrong": "W", "traceback": "T", "slow": "s", "ended": "E", "plain": "?"}
SAYS = {
    "same": "the plain step's numbers",
    "refused": "one line that says why not",
    "wrong": "other numbers",
    "traceback": "an error that is no ShardError, or one of several lines",
    "slow": "longer than the limit",
    "ended": "the process ended",
    "plain": "the plain step itself failed",
}


class Cell(NamedTuple):
    step: str
    column: str
    batches: str


@dataclass(frozen=True)
class Outcome:
    """`kind`: a key of MARKS; `told`: the line, the error or how far the numbers are off; `call`: in which call."""

    kind: str
    told: str = ""
    call: int = 0
    seconds: float = 0.0


def cells(steps: str, columns: Iterable[str], batches: Iterable[str]) -> Iterator[Cell]:
    """Those whose step's name `steps`, a regular expression, finds; `sp` where there are positions, `ep` where there
    are experts."""
    import zoo

    for name, step in zoo.STEPS.items():
        if re.search(steps, name):
            for library in batches:
                for column in columns:
                    if FOR.get(column, set()) <= step.families:
                        yield Cell(name, column, library)


def plain_numbers(name: str, batches: str) -> list[Mapping[str, Any]]:
    """The numbers after each call of a step as it is."""
    import zoo

    step = zoo.STEPS[name]
    call = step.make(batches=batches)
    return list(zoo.numbers_of_calls(step, call, call.fn, CALLS))


def outcome(cell: Cell, plain: list[Mapping[str, Any]]) -> Outcome:
    """What becomes of one cell, beside the plain step's numbers."""
    import zoo

    import jaxshard_magic

    step, begun, number = zoo.STEPS[cell.step], time.perf_counter(), 1
    strategy, mesh = ON[cell.column]
    kind, told = "same", ""
    try:
        call = step.make(batches=cell.batches)
        sharded = jaxshard_magic.shard(call.fn, strategy, mesh=mesh)
        for got, want in zip(zoo.numbers_of_calls(step, call, sharded, CALLS), plain, strict=True):
            off = [d for d in zoo.differences(step, got, want) if not d.rounding]
            if off:
                worst = max(off, key=lambda d: d.largest)
                told = f"{worst.name} by {worst.largest:.2g} of its largest, {worst.share:.0%} of it; {len(off)} leaves"
                kind = "wrong"
                break
            number += 1
    except jaxshard_magic.ShardError as error:
        kind, told = "refused" if "\n" not in str(error) else "traceback", str(error)
    except Exception as error:  # what a step raises is what the table tells
        ours = [f for f in traceback.extract_tb(error.__traceback__) if "jaxshard_magic" in f.filename]
        where = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name})" if ours else ""
        kind, told = "traceback", f"{type(error).__name__}: {str(error)[:300]}{where}"
    return Outcome(kind, told, min(number, CALLS), round(time.perf_counter() - begun, 2))


def serve(pipe: Any) -> None:
    """Run the cells that come through `pipe`, until None comes, as the process of its own."""
    import jax
    import psutil

    known: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    while (cell := pipe.recv()) is not None:
        of = cell.step, cell.batches
        try:
            if of not in known:
                known.clear()
                jax.clear_caches()
                known[of] = plain_numbers(*of)
            found = outcome(cell, known[of])
        except Exception as error:  # of the plain step
            found = Outcome("plain", f"{type(error).__name__}: {str(error)[:300]}")
        pipe.send((found, psutil.Process().memory_info().rss / 2**30))


def run(wanted: Iterable[Cell], limit: float, memory: float) -> Iterator[tuple[Cell, Outcome]]:
    """Each cell with its outcome; `limit` in seconds a cell, `memory` in GiB."""
    context = multiprocessing.get_context("spawn")
    process, pipe = None, None
    for cell in wanted:
        if process is None:
            pipe, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
        assert pipe is not None
        pipe.send(cell)
        held = float("inf")
        try:
            if pipe.poll(limit):
                found, held = pipe.recv()
            else:
                found = Outcome("slow", f"more than {limit:g} s", seconds=limit)
        except EOFError:
            process.join()
            found = Outcome("ended", f"exit code {process.exitcode}")
        yield cell, found
        if held > memory:
            process.kill()
            process.join()
            process = None
    if process is not None:
        assert pipe is not None
        pipe.send(None)
        process.join()


def known_in(file: Path) -> dict[Cell, Outcome]:
    lines = file.read_text().splitlines() if file.exists() else []
    return {Cell(*cell): Outcome(**found) for cell, found in map(json.loads, lines)}


def table(found: Mapping[Cell, Outcome]) -> str:
    """A row for each step, a column for each strategy, in each a mark for each kind of batch; then totals and lines."""
    columns = [c for c in ON if any(cell.column == c for cell in found)]
    steps = list(dict.fromkeys(cell.step for cell in found))
    width = max(map(len, steps), default=0)
    out = [" " * width + "".join(f"{c:>9}" for c in columns)]
    for name in steps:
        marks = ["".join(_mark(found, Cell(name, c, b)) for b in BATCHES) for c in columns]
        out.append(f"{name:<{width}}" + "".join(f"{m:>9}" for m in marks))
    out += ["", " ".join(f"{mark} {SAYS[kind]};" for kind, mark in MARKS.items()), ""]
    for column in columns:
        count = Counter(o.kind for cell, o in found.items() if cell.column == column)
        out.append(f"{column:<9}" + ", ".join(f"{count[kind]} {kind}" for kind in MARKS if count[kind]))
    return "\n".join((*out, "", *_lines(found)))


def _mark(found: Mapping[Cell, Outcome], cell: Cell) -> str:
    return MARKS[found[cell].kind] if cell in found else " "


def _lines(found: Mapping[Cell, Outcome]) -> Iterator[str]:
    """What was told, each once, with the cells that it was told of."""
    told: dict[tuple[str, str], dict[str, list[str]]] = {}
    for cell, o in found.items():
        if o.kind != "same":
            where = f"{cell.column} {cell.batches}" + (f" call {o.call}" if o.call > 1 else "")
            told.setdefault((o.kind, o.told), {}).setdefault(cell.step, []).append(where)
    for kind in MARKS:
        for (of, line), steps in told.items():
            if of == kind:
                yield f"{kind}: {line}"
                yield from (f"    {name}: {', '.join(where)}" for name, where in steps.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", default="", help="a regular expression for their names")
    parser.add_argument("--strategies", default=",".join(ON), help=f"among {', '.join(ON)}")
    parser.add_argument("--batches", default=",".join(BATCHES), help=f"among {', '.join(BATCHES)}")
    parser.add_argument("--limit", type=float, default=120, help="seconds a cell")
    parser.add_argument("--memory", type=float, default=4, help="GiB of the process that runs the cells")
    parser.add_argument("--into", type=Path, default=Path("zoo_table.jsonl"), help="the file of outcomes")
    parser.add_argument("--again", action="store_true", help="run cells that have an outcome again")
    parser.add_argument("--quiet", action="store_true", help="print the table alone")
    asked = parser.parse_args()
    columns, batches = asked.strategies.split(","), asked.batches.split(",")
    if unknown := [*({*columns} - {*ON}), *({*batches} - {*BATCHES})]:
        parser.error(f"{', '.join(unknown)}: there are {', '.join((*ON, *BATCHES))}")

    wanted = list(cells(asked.steps, columns, batches))
    before = known_in(asked.into)
    missing = [cell for cell in wanted if asked.again or cell not in before]
    with asked.into.open("a") as out:
        for cell, found in run(missing, asked.limit, asked.memory):
            before[cell] = found
            print(json.dumps([cell, asdict(found)]), file=out, flush=True)
            if not asked.quiet:
                print(f"{' '.join(cell)}: {found.kind} {found.told[:200]}", file=sys.stderr, flush=True)
    found = {cell: before[cell] for cell in wanted}
    print(table(found))
    return any(o.kind not in ("same", "refused") for o in found.values())


if __name__ == "__main__":
    from support.settings import SETTINGS

    os.environ.update(SETTINGS)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main())
