"""The collectives that Shardy's passes put into what a plan emits, to hold planned ones against."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import jax
from jaxlib.mlir import ir, passmanager

from jaxshard_magic.plan import Plan
from jaxshard_magic.program.shardy import PASSES, tensor_bytes

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")
SMALL = 64  # bytes: sums of single numbers, which compilers merge
Moves = Counter[tuple[str, tuple[str, ...]]]


def moves_by_shardy(plan: Plan) -> Moves:
    """Bytes on one device by kind and mesh axes, as `Sent` counts them; a loop's body counts once."""
    program, sizes = plan.run.program, dict(plan.mesh.shape)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (program.avals[v] for v in program.inputs)]
    shardings = {"in_shardings": plan.in_shardings, "out_shardings": plan.out_shardings}
    lowered = jax.jit(lambda *args: plan.run(*args), keep_unused=True, **shardings).lower(*shapes)
    module: Any = lowered.compiler_ir("stablehlo")
    found: Moves = Counter()
    with module.context, ir.Location.unknown():
        module = module.operation.clone()
        passmanager.PassManager.parse(PASSES).run(module)
        for kind, axes, nbytes in _collectives(module, sizes):
            if nbytes > SMALL:
                found[kind.replace("_", "-"), axes] += nbytes
    return found


def _collectives(module: Any, sizes: Mapping[str, int]) -> Iterator[tuple[str, tuple[str, ...], int]]:
    operations = []
    module.walk(lambda operation: operations.append(operation) or ir.WalkResult.ADVANCE)
    for operation in operations:
        dialect, _, kind = operation.name.partition(".")
        if kind not in KINDS:
            continue
        if dialect == "sdy":
            written = re.search(r"sdy\.\w+ (?:\w+ )?(\[.*?\]|\{.*?\}) %", str(operation))
            assert written is not None, str(operation)
            yield (
                kind,
                _names(written[1]),
                _on_a_device(operation, str(operation.attributes["out_sharding"]), sizes),
            )
        elif dialect == "stablehlo":  # of a region that is manual over some axes
            region = _region_of(operation)
            manual = _names(str(region.attributes["manual_axes"]))
            axes = _names(str(operation.attributes["replica_groups"]))  # jax 0.12; before, groups of devices
            if not axes:
                size = operation.attributes["replica_groups"].type.shape[1]
                axes = tuple(a for a in manual if sizes[a] == size) or manual
            others = {a for a in _names(str(region.attributes["in_shardings"])) if a not in manual}
            whole = operation.results[0] if kind == "all_gather" else operation.operands[0]
            yield kind, axes, tensor_bytes(whole.type) // prod(sizes[a] for a in others)


def _on_a_device(operation: Any, sharding: str, sizes: Mapping[str, int]) -> int:
    divided = _names(sharding.split("unreduced")[0].split("replicated")[0])
    return tensor_bytes(operation.results[0].type) // prod(sizes[a] for a in divided)


def _region_of(operation: Any) -> Any:
    parent = operation.parent
    while parent.name != "sdy.manual_computation":
        parent = parent.parent
    return parent


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.findall(r'"(\w+)"', text)))
