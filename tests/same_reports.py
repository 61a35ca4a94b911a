"""Are reports what they were? Writes the Report of every zoo step under every strategy, or compares with such a file.

    python tests/same_reports.py save before.jsonl --package path/of/the/checkout/before
    python tests/same_reports.py against before.jsonl

Steps are compiled, not run. Times are left out; all else of `Report.to_dict()` has to be equal, and of a step that is
refused its one line. `--quick` takes each step under one strategy, `--only REGEX` the rows whose name it matches.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MESHES = {
    "dp": "data=8",
    "fsdp": "data=8",
    "tp": "data=4 model=2",
    "fsdp+tp": "data=2 fsdp=2 model=2",
    "sp": "data=4 seq=2",
    "spmd": "data=4 model=2",
    "pp": "pipe=2",
    "pp+fsdp": "pipe=2 data=2",
}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "accumulated": ("fsdp", {"microbatches": 2, "reduce": "once", "remat": "full"}),
    "gathered once": ("fsdp+tp", {"microbatches": 2, "reduce": "once-gathered", "precision": "bf16"}),
    "remat dots": ("dp", {"remat": "dots", "precision": "bf16", "donate": True}),
    "fp16": ("fsdp", {"precision": "fp16"}),
    "padded": ("dp", {"pad": True, "microbatches": 3}),
}
LEFT_OUT = {"timing", "created", "versions", "seconds", "start", "end", "simulated", "predicted"}


def rows(quick: bool) -> Iterator[tuple[str, str, str, str, dict[str, Any]]]:
    """The name of a row, its zoo step, strategy, mesh and options."""
    import zoo

    for name in zoo.STEPS:
        for strategy, mesh in MESHES.items():
            if not quick or strategy == "fsdp+tp":
                yield f"{name} {strategy}", name, strategy, mesh, {}
        for title, (strategy, options) in OPTIONS.items():
            if not quick:
                yield f"{name} {title}", name, strategy, MESHES[strategy], options


def report(name: str, strategy: str, mesh: str, options: dict[str, Any]) -> Any:
    """What is known of one compiled step, without times; of a refused one the line that says so."""
    import jax
    import zoo

    import jaxshard_magic

    call = zoo.STEPS[name].make()
    try:
        step = jaxshard_magic.shard(call.fn, strategy, mesh=mesh, **options)
        step.prepare(*call.args, **call.kwargs)
        found = step.report().to_dict()
    except jaxshard_magic.ShardError as error:
        return {"refused": str(error)}
    except Exception as error:  # what a step raises is part of what is compared
        return {"raised": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
    finally:
        jax.clear_caches()
    return json.loads(json.dumps(timeless(found), default=str))


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in LEFT_OUT and not k.endswith("_s")}
    return [timeless(v) for v in value] if isinstance(value, list | tuple) else value


def differences(was: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}):
            yield from differences(was.get(key), now.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for k, (a, b) in enumerate(zip(was, now, strict=True)):
            yield from differences(a, b, f"{path}[{k}]")
    elif was != now:
        yield f"{path}: {json.dumps(was)[:200]} -> {json.dumps(now)[:200]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("do", choices=["save", "against"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--package", type=Path, default=HERE.parent, help="the checkout whose package is asked")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "NPROC": "32"}
    sys.path[:0] = [str(asked.package.resolve()), str(HERE)]

    before = {}
    if asked.file.exists():
        before = dict(json.loads(line) for line in asked.file.read_text().splitlines())
    wrong = count = 0
    with asked.file.open("a") if asked.do == "save" else open(os.devnull, "w") as out:
        for row, name, strategy, mesh, options in rows(asked.quick):
            if not re.search(asked.only, row) or (row in before) == (asked.do == "save"):
                continue
            count += 1
            now = report(name, strategy, mesh, options)
            print(json.dumps([row, now]), file=out, flush=True)
            if asked.do == "against" and (found := list(differences(before[row], now))):
                wrong += 1
                print(f"{row}: {len(found)} differ", *found[:8], sep="\n    ", flush=True)
    print(f"{count} reports {'saved' if asked.do == 'save' else f'compared, {wrong} differ'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
