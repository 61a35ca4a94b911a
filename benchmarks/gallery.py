"""Steps that people ask about, on hardware that isn't attached, from shapes alone: `python benchmarks/gallery.py`.

Each row of the table is one `%%shard` line: compiled by the chip's own compiler, or, where that takes longer than the
limit, planned alone; or what `auto` chooses on those devices. A row has a process and a cache of its own, so that its
seconds are those of a first time; rows come one after the other. The compilers are the extras `tpu` and `cuda-aot`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("NPROC", "32")
os.environ["JAX_PLATFORMS"] = "cpu"

from gallery_page import page, table
from models import gpt, llama, resnet, vit
from models.parts import Call

import jaxshard_magic
from jaxshard_magic.errors import ShardError
from jaxshard_magic.packages import installed
from jaxshard_magic.report.choice import Choice
from jaxshard_magic.report.comparison import Trial
from jaxshard_magic.report.parts import mesh_text
from jaxshard_magic.search.candidates import line_of

LIMIT_S = 120.0
NOTED = ("jax", "flax", "optax", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")


@dataclass(frozen=True)
class Line:
    """A strategy on the axes of a mesh, with its options as `shard` takes them; "auto" takes any mesh."""

    strategy: str
    axes: str
    options: Mapping[str, Any] = field(default_factory=dict)


AUTO = Line("auto", "data=-1")


@dataclass(frozen=True)
class Case:
    """`devices`: as `%mesh` writes them. `batch`: the global batch in words."""

    model: str
    batch: str
    devices: str
    call: Callable[[], Call]
    lines: tuple[Line, ...]


def _texts(examples: int, length: int) -> str:
    return f"{examples:,} texts of {length:,} tokens"


def _llama(model: str, size: llama.Size, devices: str, examples: int, length: int, line: Line) -> Case:
    made = partial(llama.call, size, examples, length)
    return Case(model, _texts(examples, length), devices, made, (line, AUTO))


CASES = {
    "resnet-50": Case(
        "ResNet-50",
        "2,048 images of 224 pixels",
        "a100-80:8",
        partial(resnet.call, resnet.DEPTH_50, 2048),
        (Line("dp", "data=8"), AUTO),
    ),
    "gpt2-medium": Case(
        "GPT-2 medium",
        _texts(32, 1024),
        "a100-40:8",
        partial(gpt.call, gpt.MEDIUM, 32),
        (Line("dp", "data=8"), Line("dp+tp", "data=4 model=2"), AUTO),
    ),
    "vit-g-16": Case(
        "ViT-g/14",
        "2,048 images of 224 pixels",
        "v5e:4x4",
        partial(vit.call, vit.G_14, 2048),
        (Line("fsdp", "data=16"), AUTO),
    ),
    "vit-g-8": Case(
        "ViT-g/14",
        "1,024 images of 224 pixels",
        "v5e:2x4",
        partial(vit.call, vit.G_14, 1024),
        (Line("pp", "pipe=8"), AUTO),
    ),
    "gpt-3": Case(
        "GPT-3 175B",
        _texts(1536, 2048),
        "a100-80:128x8",
        partial(gpt.call, gpt.GPT3, 1536),
        (Line("pp+fsdp+tp", "pipe=8 fsdp=32 model=4"), Line("pp+dp+tp", "pipe=8 data=32 model=4"), AUTO),
    ),
    "llama-8b-v5e": _llama("Llama 3 8B", llama.LLAMA3_8B, "v5e:8x8", 64, 4096, Line("fsdp", "data=64")),
    "llama-8b-v5p": _llama("Llama 3 8B", llama.LLAMA3_8B, "v5p:4x4x4", 128, 8192, Line("fsdp", "data=64")),
    "llama-70b-v5e": _llama("Llama 3 70B", llama.LLAMA3_70B, "v5e:16x16", 256, 4096, Line("fsdp", "data=256")),
    "llama-70b-v5p": _llama("Llama 3 70B", llama.LLAMA3_70B, "v5p:8x8x8", 512, 8192, Line("fsdp", "data=512")),
    "qwen3-v5e": _llama("Qwen3 0.6B", llama.QWEN3_600M, "v5e:4x4", 64, 4096, Line("dp", "data=16")),
    "qwen3-v5p": _llama("Qwen3 0.6B", llama.QWEN3_600M, "v5p:2x2x2", 64, 4096, Line("dp", "data=8")),
}


@dataclass(frozen=True)
class Row:
    """One line of a case and what became of it.

    `line`: what follows `%%shard`, of `auto` what it chose, None where it chose nothing. `source`: "compiled",
    "planned", None where there is neither. `fits`, `peak`, `limit`: of the fullest device, in bytes; `sent`: bytes that
    one device sends in a step; `step_s`: seconds, predicted, and at least so many where `source` is "planned"; `bound`
    what most of them are. `seconds`: from the mesh's text to these figures. `tried` of `candidates`: what `auto`
    compiled of what it planned. `why`: what kept it from being compiled. `load`: of the machine in the minute before,
    in processes that want one of its `cores`. `given`: seconds that a compile or a search might take. None: not known.
    """

    case: str
    model: str
    parameters: int
    batch: str
    devices: str
    asked: str
    line: str | None = None
    source: str | None = None
    fits: bool | None = None
    peak: int | None = None
    limit: int | None = None
    sent: int | None = None
    step_s: float | None = None
    bound: str | None = None
    seconds: float | None = None
    tried: int | None = None
    candidates: int | None = None
    why: str | None = None
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    cores: int = 0
    load: float = 0.0
    given: float = LIMIT_S


def measured(name: str, line: Line, plan_only: bool, limit_s: float, kept: Path | None) -> Row:
    """A row in this process. Raises `ShardError` where it can't be had; `kept`: a file for what the package said."""
    start, case = time.perf_counter(), CASES[name]
    mesh = jaxshard_magic.mesh(f"{case.devices} {line.axes}")
    call = case.call()
    row = _row_of(name, line, call, limit_s)
    if line.strategy == "auto":
        found = jaxshard_magic.choose(call.step, call.args, mesh=mesh, budget=limit_s, plan_only=plan_only)
        row, said = _chosen(row, found), found
    elif plan_only:
        found = jaxshard_magic.choose(
            call.step,
            call.args,
            mesh=mesh,
            among=line.strategy,
            meshes=[mesh_text(mesh.shape)],
            vary={"microbatches": [line.options.get("microbatches")], "remat": [line.options.get("remat")]},
            plan_only=True,
            **line.options,
        )
        row, said = replace(_chosen(row, found), tried=None, candidates=None), found
    else:
        step = jaxshard_magic.shard(call.step, line.strategy, mesh=mesh, **line.options)
        step.prepare(*call.args)
        said = step.report()
        row = _compiled(row, Trial(line.strategy, dict(mesh.shape), dict(line.options), row.line or "", said))
    row = replace(row, seconds=time.perf_counter() - start)
    if kept is not None:
        kept.write_text(said.to_json())
    return row


def _chosen(row: Row, found: Choice) -> Row:
    """What a search says of its choice, or of the first that it considered where it found none."""
    row = replace(row, tried=len(found.comparison.trials), candidates=len(found.candidates), limit=found.limit)
    if found.trial is not None:
        return _compiled(row, found.trial)
    if found.source != "planned" and found.chosen is None:
        return replace(row, reason="nothing that was compiled in that time fits")
    first = found.chosen or found.candidates[0]
    return replace(
        row,
        line=_without_devices(row, first.line),
        source="planned",
        fits=None if first.needs is None or found.limit is None else first.needs <= found.limit,
        peak=first.needs,
        step_s=first.guess,
        reason=first.why or None,
    )


def _compiled(row: Row, trial: Trial) -> Row:
    timing = None if trial.report is None else trial.report.timing
    return replace(
        row,
        line=_without_devices(row, trial.line),
        source="compiled",
        fits=trial.fits,
        peak=trial.peak,
        limit=trial.limit,
        sent=None if trial.sent is None else sum(trial.sent.values()),
        step_s=trial.predicted,
        bound=None if timing is None else timing.bound,
        reason=trial.why,
    )


def _without_devices(row: Row, line: str) -> str:
    return line.replace(f"{row.devices} ", "")


def _row_of(name: str, line: Line, call: Call, limit_s: float) -> Row:
    """A row of which nothing but its circumstances is known."""
    case, auto = CASES[name], line.strategy == "auto"
    return Row(
        name,
        case.model,
        call.parameters,
        case.batch,
        case.devices,
        line.strategy,
        None if auto else line_of(line.strategy, line.axes, line.options),
        date=datetime.now(UTC).date().isoformat(),
        versions={name: version for name, version in installed().items() if version and name in NOTED},
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        given=limit_s,
    )


def alone(name: str, at: int, limit_s: float, reports: Path | None) -> Row:
    """One row in a process of its own with nothing cached; planned alone where that takes longer than `limit_s`."""
    row = _row(name, at, False, limit_s, reports)
    if row is not None and row.source is not None:
        return row
    planned = _row(name, at, True, limit_s, reports)
    if planned is None:
        raise SystemExit(f"{name}: the plan alone takes more than {limit_s:g} s; --limit {2 * limit_s:g} allows more")
    why = f"compiling it takes more than {limit_s:g} s" if row is None else row.why
    return replace(planned, reason=planned.why or why)


def _row(name: str, at: int, plan_only: bool, limit_s: float, reports: Path | None) -> Row | None:
    """None where it takes more than `limit_s`; a search ends by itself, and has as long again to read what it found."""
    given = ["--limit", str(limit_s), *([] if reports is None else ["--reports", str(reports)])]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--here", name, str(at), str(int(plan_only)), *given],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "XDG_CACHE_HOME": folder},
                check=True,
                timeout=2 * limit_s if CASES[name].lines[at].strategy == "auto" else limit_s,
            )
        except subprocess.TimeoutExpired:
            return None
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def here(name: str, at: int, plan_only: bool, limit_s: float, reports: Path | None) -> Row:
    """One row in this process, its error as one."""
    case, line = CASES[name], CASES[name].lines[at]
    kept = None if reports is None else reports / f"{name}-{at}-{line.strategy}.json"
    try:
        return measured(name, line, plan_only, limit_s, kept)
    except ShardError as error:
        return replace(_row_of(name, line, case.call(), limit_s), reason=" ".join(str(error).split()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help=f"of {', '.join(CASES)}; all unless said")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of a row's compile, and of a search"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows as JSON; those of other cases stay in it")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the page for the book, of all rows in --json")
    parser.add_argument("--reports", type=Path, metavar="FOLDER", help="each row's report or choice as JSON")
    parser.add_argument("--here", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        name, at, plan_only = given.here
        print(json.dumps(asdict(here(name, int(at), bool(int(plan_only)), given.limit, given.reports))))
        return 0
    chosen = given.only or list(CASES)
    if unknown := set(chosen) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if given.reports is not None:
        given.reports.mkdir(parents=True, exist_ok=True)
    rows = [] if given.json is None or not given.json.exists() else json.loads(given.json.read_text())
    known = {case: [Row(**row) for row in rows if row["case"] == case] for case in CASES}
    for name in chosen:
        known[name] = []
        for at in range(len(CASES[name].lines)):
            known[name].append(row := alone(name, at, given.limit, given.reports))
            print(f"{name}, {row.asked}: {row.seconds or 0:.1f} s", file=sys.stderr, flush=True)
    rows = [row for each in known.values() for row in each]
    print(table(rows))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if given.markdown is not None:
        given.markdown.write_text(page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
