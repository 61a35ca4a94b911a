"""The cases that Python and the browser both have to get right, and what each calls for them."""

import json
from pathlib import Path
from typing import Any

from jaxshard_magic.explorer import ShardLine
from jaxshard_magic.explorer.line import path_regex
from jaxshard_magic.explorer.shard_sizes import fit_to_mesh, num_replicas, shard_bytes, spec_of
from jaxshard_magic.specs import format_spec

CASES: dict[str, list[list[Any]]] = json.loads(
    (Path(__file__).parents[1] / "data" / "explorer_cases.json").read_text(encoding="utf-8")
)


def cut(lists: Any) -> Any:
    return tuple(map(tuple, lists))


def line(own: Any, strategy: str, mesh: str, rules: Any, specs: Any) -> str:
    made = ShardLine(tuple(own["kept"]), tuple(own["rules"]), own["home"])
    by_name = ({name: cut(each) for name, each in some} for some in (rules, specs))
    return made.text(strategy, mesh, *by_name)


IN_PYTHON = {
    "fitting": lambda wish, shape, mesh: [list(axes) for axes in fit_to_mesh(cut(wish), shape, mesh)],
    "held": lambda shape, bits, axes, mesh: shard_bytes(shape, bits, cut(axes), mesh),
    "copies": lambda axes, mesh: num_replicas(cut(axes), mesh),
    "pattern": path_regex,
    "spec": lambda axes: format_spec(spec_of(cut(axes))),
    "line": line,
}
IN_THE_BROWSER = {
    "fitting": "(wish, shape, mesh) => cuts.fitting(wish, shape, new Map(Object.entries(mesh)))",
    "held": "(shape, bits, cut, mesh) => cuts.held(shape, bits, cut, new Map(Object.entries(mesh)))",
    "copies": "(cut, mesh) => cuts.copies(cut, new Map(Object.entries(mesh)))",
    "pattern": "(path, paths, alike) => line.pattern(path, paths, new Set(alike))",
    "spec": "line.specText",
    "line": "line.lineText",
}
