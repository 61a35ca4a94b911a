"""The collectives that Shardy's passes put into what a plan emits, to hold planned ones against."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import jax
from jaxlib.mlir import ir, passmanager

from jaxshard_magic.plan import Plan
from jaxshard_magic.program.shardy import tensor_bytes

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")
SMALL = 64  # bytes: sums of single numbers, which compilers merge
PROPAGATION = "builtin.module(inline,symbol-dce,sdy-propagation-pipeline,func.func(sdy-populate-op-sharding-rules))"
COLLECTIVES = (
    "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true},sdy-reshard-to-collectives))"
)
Moves = Counter[tuple[str, tuple[str, ...]]]


def moves_by_shardy(plan: Plan) -> Moves:
    """Bytes on one device by kind and mesh axes, as `Sent` counts them, with all trips of loops of a known length."""
    program, sizes = plan.run.program, dict(plan.mesh.shape)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (program.avals[v] for v in program.inputs)]
    shardings = {"in_shardings": plan.in_shardings, "out_shardings": plan.out_shardings}
    lowered = jax.jit(lambda *args: plan.run(*args), keep_unused=True, **shardings).lower(*shapes)
    module: Any = lowered.compiler_ir("stablehlo")
    found: Moves = Counter()
    with module.context, ir.Location.unknown():
        module = module.operation.clone()
        passmanager.PassManager.parse(PROPAGATION).run(module)
        _sum_whole(module)
        passmanager.PassManager.parse(COLLECTIVES).run(module)
        for operation, kind, axes, nbytes in _collectives(module, sizes):
            if nbytes > SMALL:
                found[kind.replace("_", "-"), axes] += nbytes * _trips(module, operation)
    return found


def _operations(module: Any) -> list[Any]:
    operations = []
    module.walk(lambda operation: operations.append(operation) or ir.WalkResult.ADVANCE)
    return operations


def _sum_whole(module: Any) -> None:
    """Have sums whose result is divided over an axis that they add up along made whole, then sliced, as XLA does it for
    the CPU; Shardy's pass moves the operands instead."""
    for operation in _operations(module):
        if "sdy.sharding_rule" not in operation.attributes:
            continue
        rule = operation.attributes["sdy.sharding_rule"]
        del operation.attributes["sdy.sharding_rule"]
        if "reduction={" not in str(rule) or "sdy.sharding" not in operation.attributes:
            continue
        ins, _, rest = str(rule).partition("<")[2].partition("->")
        reduced = set(rest.partition("reduction={")[2].partition("}")[0].split(", "))
        along: set[str] = set()
        for operand, dims in zip(operation.operands, re.findall(r"\[([^\]]*)\]", ins), strict=False):
            for factors, axes in zip(dims.split(", "), _dims(_sharding(operand)), strict=False):
                if re.sub(r"([a-z]_?\d*).*", r"\1", factors) in reduced:
                    along |= set(axes)
        given = [str(each) for each in _per_value(operation.attributes["sdy.sharding"])]
        left = [_without(each, along) for each in given]
        if left == given:
            continue
        operation.attributes["sdy.sharding"] = ir.Attribute.parse(f"#sdy.sharding_per_value<[{', '.join(left)}]>")
        for result, sharding in zip(operation.results, given, strict=True):
            attributes = {"sharding": ir.Attribute.parse(f"#sdy.sharding{sharding}")}
            with ir.InsertionPoint(operation):
                back = ir.Operation.create("sdy.reshard", [result.type], [result], attributes, loc=operation.location)
            back.move_after(operation)
            result.replace_all_uses_except(back.results[0], back)


def _per_value(attribute: Any) -> list[str]:
    return re.findall(r"<@[^>]*>", str(attribute))


def _dims(sharding: str) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension, of `<@mesh, [{"data"}, {}]>` or an empty text."""
    return [_names(dim) for dim in re.findall(r"\{([^{}]*)\}", sharding.partition("[")[2].partition("]")[0])]


def _without(sharding: str, axes: set[str]) -> str:
    """The same sharding with these axes dividing nothing."""
    if not axes.intersection(_names(sharding.partition("[")[2])):
        return sharding
    left = (", ".join(f'"{a}"' for a in dim if a not in axes) for dim in _dims(sharding))
    return sharding.partition("[")[0] + "[" + ", ".join("{" + dim + "}" for dim in left) + "]>"


def _sharding(value: Any) -> str:
    """The sharding that propagation gave a value, empty where it gave none."""
    owner: Any = value.owner
    if isinstance(owner, ir.Block):
        number, parent = ir.BlockArgument(value).arg_number, owner.owner
        if parent.name == "func.func":
            attribute: Any = list(parent.attributes["arg_attrs"])[number] if "arg_attrs" in parent.attributes else {}
            return str(attribute["sdy.sharding"]) if "sdy.sharding" in attribute else ""
        if parent.name == "stablehlo.while" and "sdy.sharding" in parent.attributes:
            return _per_value(parent.attributes["sdy.sharding"])[number]
        return ""
    if owner.name in ("sdy.reshard", "sdy.sharding_constraint"):
        return str(owner.attributes["sharding"])
    if "sdy.sharding" not in owner.attributes:
        return ""
    return _per_value(owner.attributes["sdy.sharding"])[ir.OpResult(value).result_number]


def _trips(module: Any, operation: Any) -> int:
    """How often a step runs an operation, a loop of an unknown length once. Bodies of loops are functions that a loop
    calls, alike ones the same."""
    trips, outer = 1, operation.parent
    while outer.name != "func.func":
        trips *= _length(outer) if outer.name == "stablehlo.while" else 1
        outer = outer.parent
    name = ir.StringAttr(outer.attributes["sym_name"]).value
    if name == "main":
        return trips
    calls = (each for each in _operations(module) if each.name == "func.call")
    return trips * sum(_trips(module, e) for e in calls if str(e.attributes["callee"]) == f"@{name}")


def _length(loop: Any) -> int:
    """How often a loop runs whose counter is compared with a constant; 1 of others."""
    test = list(loop.regions[0].blocks[0].operations)[-1].operands[0].owner
    if isinstance(test, ir.Block) or test.name != "stablehlo.compare" or " LT," not in str(test):
        return 1
    written = re.search(r"dense<(\d+)> : tensor<i\d+>", str(test.operands[1].owner))
    return int(written[1]) if written and not isinstance(test.operands[1].owner, ir.Block) else 1


def _collectives(module: Any, sizes: Mapping[str, int]) -> Iterator[tuple[Any, str, tuple[str, ...], int]]:
    for operation in _operations(module):
        dialect, _, kind = operation.name.partition(".")
        if kind not in KINDS:
            continue
        if dialect == "sdy":
            written = re.search(r"sdy\.\w+ (?:\w+ )?(\[.*?\]|\{.*?\}) %", str(operation))
            assert written is not None, str(operation)
            yield (
                operation,
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
            yield operation, kind, axes, tensor_bytes(whole.type) // prod(sizes[a] for a in others)


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
