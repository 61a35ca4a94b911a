"""Change a request by a line: `--microbatches 8`, `%%shard fsdp --attention heads`, `%mesh v5e:8x8 data=64`."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

from jax.sharding import Mesh

from ..errors import ShardError
from ..specs import parse_assignment, parse_rule
from .mesh import MeshSpec
from .request import Request

_LINES = ("%%shard ", "%mesh ", "--")


def is_line(text: str) -> bool:
    """Return whether a text is a line of the magics, or options for one; else the text is code."""
    return text.startswith(_LINES) and "\n" not in text


def apply_line(line: str, request: Request, mesh_of: Callable[[str], Mesh] | None = None) -> Request:
    """Return `request` with the changes of a line.

    Args:
        line: Options, a `%%shard` line with options, or a `%mesh` line.
        request: Request so far.
        mesh_of: Makes a mesh from mesh text; by default of the same devices, or of the first of them if fewer are
            needed.

    Raises:
        ShardError: The strategy or the mesh doesn't allow the change.
    """
    make_mesh = mesh_of or (lambda text: _on_same_devices(request.mesh, text))
    if line.startswith("%mesh "):
        return request.changed(mesh=make_mesh(line.removeprefix("%mesh ")))
    words, given = shlex.split(line.removeprefix("%%shard ")), dict[str, Any]()
    strategy = words.pop(0) if words and not words[0].startswith("--") else None
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        text = words.pop(0) if words and not words[0].startswith("--") else True
        given[name] = int(text) if isinstance(text, str) and text.isdecimal() else text
    if "mesh" in given:
        given["mesh"] = make_mesh(given["mesh"])
    specs, rules = request.specs, request.rules
    if "spec" in given:
        name, spec = parse_assignment(given.pop("spec"))
        specs = {**specs, name: spec}
    if "rule" in given:
        rule = parse_rule(given.pop("rule"))
        rules = rules if rule in rules else (rule, *rules)
    return replace(request, specs=specs, rules=rules).changed(strategy, **given)


def _on_same_devices(mesh: Mesh, text: str) -> Mesh:
    """Return a mesh of the first devices of `mesh`, with the axes of a text."""
    axes = MeshSpec.parse(text).resolve(mesh.size)
    names, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    if prod(sizes) > mesh.size:
        raise ShardError(f"mesh {text} takes {prod(sizes)} devices, and there are {mesh.size}")
    devices = mesh.devices.reshape(-1)[: prod(sizes)].reshape(sizes)
    return Mesh(devices, names, axis_types=(mesh.axis_types[0],) * len(names))
