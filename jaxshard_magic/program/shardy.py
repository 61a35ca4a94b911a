"""Ask Shardy, the partitioner of the installed jaxlib, for the consequences of dividing inputs of a step.

A step is lowered once, from shapes and for no device. A question writes a mesh with a single axis and the shardings of
some inputs into a copy of that module, then runs Shardy's own passes: propagation divides further inputs, and the
inserted collectives say how many bytes would move. Nothing is compiled.

`jaxlib.mlir` is no public API: no other module of the package imports it (except `targets/worker.py`, a program of its
own). Without such passes `ShardyPartitioner.for_program` returns None. Tried with jaxlib 0.10 and 0.12.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir, passmanager

from .emit import Emitter
from .ir import Equation, Program
from .primitives.primitive import Kind

# Propagate shardings, then turn all data movement into explicit collectives.
PASSES = (
    "builtin.module(inline,symbol-dce,sdy-propagation-pipeline,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true},sdy-reshard-to-collectives))"
)
_MESH, _AXIS = "jaxshard", "divided"
_ALL_REDUCE = "all_reduce"
_SHIFT = "collective_permute"
_KINDS = {_ALL_REDUCE, "all_gather", "reduce_scatter", "all_to_all", _SHIFT}
# Operations along a divided dimension for which Shardy's passes insert no collective: XLA's partitioner shifts parts of
# these between devices later (jaxlib 0.10, 0.12).
_SHIFTING_OPS = {"stablehlo.slice", "stablehlo.pad", "stablehlo.concatenate", "stablehlo.reverse"}
_EQUATION = re.compile(r"equation(\d+)\b")


@dataclass(frozen=True)
class ShardyCollective:
    """Collective that Shardy would insert into a step.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "collective_permute".
        nbytes: Bytes of the global array, all devices' shards together, in a single run of its equation.
        equation: Index of the equation served; None if its location names none.
        trips: Runs of that equation per step; 1 if unknown.
    """

    kind: str
    nbytes: int
    equation: int | None
    trips: int

    @property
    def is_sum(self) -> bool:
        """True for an all-reduce."""
        return self.kind == _ALL_REDUCE


@dataclass(frozen=True)
class ShardyDivision:
    """Consequences of dividing some inputs of a step over a mesh axis.

    Attributes:
        size: Devices along the axis.
        divided_inputs: All inputs divided in the end: those asked for, and those reached by Shardy's propagation.
        collectives: Inserted collectives, in program order.
    """

    size: int
    divided_inputs: frozenset[int]
    collectives: tuple[ShardyCollective, ...]

    @property
    def bytes_without_sums(self) -> int:
        """Bytes of collectives without a sum: gathers, exchanges and shifts, loop trips multiplied in."""
        return sum(c.nbytes * c.trips for c in self.collectives if not c.is_sum)

    @property
    def total_bytes(self) -> int:
        """Bytes of all collectives, loop trips multiplied in."""
        return sum(c.nbytes * c.trips for c in self.collectives)

    @property
    def sent_bytes_per_device(self) -> float:
        """Bytes sent by each device per step, loop trips multiplied in, with the usual algorithms.

        A ring for sums and gathers passes on all shards but its own: (n - 1) / n of the bytes, twice for a sum. An
        all-to-all sends (n - 1) / n^2, a shift 1 / n.
        """
        n = self.size
        share = {_ALL_REDUCE: 2 * (n - 1) / n, "all_to_all": (n - 1) / n**2, _SHIFT: 1 / n}
        return sum(c.nbytes * c.trips * share.get(c.kind, (n - 1) / n) for c in self.collectives)


class ShardyPartitioner:
    """Step lowered once, to be asked about divisions of its inputs.

    Cost: a trace and a lowering, 0.4 s for 2,500 equations.

    Args:
        program: Step to lower.
    """

    def __init__(self, program: Program):
        self._trips = [e.trip_count for e in program.equations]
        # Name scopes end up in MLIR locations and so attribute a collective to its equation.
        labels = {e.index: f"equation{e.index}" for e in program.equations if not e.bodies}
        avals = (program.avals[v] for v in program.inputs)
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        # Without keep_unused JAX drops unused inputs from the module, and arguments no longer match inputs by position.
        emitted = jax.jit(lambda *args: _ReplaceUnsupported(program, labels)(*args), keep_unused=True)
        self._module = _stablehlo_module(emitted.lower(*shapes))
        self._count = len(shapes)

    @classmethod
    def for_program(cls, program: Program) -> "ShardyPartitioner | None":
        """Return the partitioner of a step, lowered at the first question.

        None if this jaxlib has no such passes, or the step cannot be lowered for this host (a kernel of another
        platform).
        """
        if not has_passes():
            return None
        if program not in _PARTITIONERS:
            try:
                _PARTITIONERS[program] = cls(program)
            except (NotImplementedError, ValueError, ir.MLIRError):
                # Failure is cached too, or each question would lower the program again.
                _PARTITIONERS[program] = None
        return _PARTITIONERS[program]

    def divide(self, dims: Mapping[int, int], size: int) -> ShardyDivision | None:
        """Return the consequences of dividing dimension `dims[i]` of each input `i` over an axis of `size` devices.

        None if a pass fails. Cost: 10 to 600 ms.

        Args:
            dims: Dimension to divide, by input.
            size: Devices along the axis.
        """
        with self._module.context, ir.Location.unknown():
            # Passes rewrite a module in place; the original serves later questions.
            module = self._module.operation.clone()
            block = module.regions[0].blocks[0]
            with ir.InsertionPoint.at_block_begin(block):
                mesh = ir.Module.parse(f'sdy.mesh @{_MESH} = <["{_AXIS}"={size}]>')
                mesh.body.operations[0].operation.clone()
            main = _main_function(block)
            arguments = main.regions[0].blocks[0].arguments
            # JAX puts a token for each ordered effect ahead of the step's inputs.
            n_tokens = len(arguments) - self._count
            argument_attributes = [{} for _ in arguments]
            for i, dim in dims.items():
                rank = ir.RankedTensorType(arguments[n_tokens + i].type).rank
                argument_attributes[n_tokens + i] = {"sdy.sharding": _sharding_attribute(rank, dim)}
            main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in argument_attributes])
            try:
                passmanager.PassManager.parse(PASSES).run(module)
            except ir.MLIRError:
                return None
            attributes = list(_main_function(module.regions[0].blocks[0]).attributes["arg_attrs"])[n_tokens:]
            carriers = frozenset(i for i, a in enumerate(attributes) if f'"{_AXIS}"' in str(a))
            return ShardyDivision(size, carriers, tuple(self._collectives(module)))

    def _collectives(self, module: Any) -> Iterator[ShardyCollective]:
        """Yield the collectives of a partitioned module."""
        operations = []

        def visit(operation: Any) -> Any:
            dialect, _, kind = operation.name.partition(".")
            if dialect == "sdy" and kind in _KINDS:
                operations.append((kind, operation.results[0].type, str(operation.location)))
            elif dialect == "chlo" or operation.name == "stablehlo.custom_call":
                # Shardy has no rule for these, and XLA's partitioner gathers their divided operands.
                gathered = filter(_is_divided, operation.operands)
                operations.extend(("all_gather", x.type, str(operation.location)) for x in gathered)
            elif operation.name in _SHIFTING_OPS and _is_shift(operation):
                arrays = operation.operands if operation.name == "stablehlo.pad" else operation.results
                operations.append((_SHIFT, arrays[0].type, str(operation.location)))
            return ir.WalkResult.ADVANCE

        module.walk(visit)
        for kind, array, location in operations:
            equations = _EQUATION.findall(location)
            equation = int(equations[-1]) if equations else None
            trips = 1 if equation is None else self._trips[equation]
            yield ShardyCollective(kind, tensor_bytes(array), equation, trips)


# A search asks about the same step for each mesh. Weak keys: a partitioner is freed with its step.
_PARTITIONERS: "WeakKeyDictionary[Program, ShardyPartitioner | None]" = WeakKeyDictionary()


class _ReplaceUnsupported(Emitter):
    """Emitter that replaces equations without a Shardy rule by others with the same dimensions."""

    def result(self, e: Equation, values: list) -> list:
        # JAX lowers top_k and many elementwise functions to CHLO. XLA turns that into StableHLO only when it compiles,
        # too late for Shardy's passes.
        if e.name == "top_k" and e.operands[0] is not None:
            axis = e.params.get("axis", -1) % values[0].ndim
            positions = jax.lax.broadcasted_iota(jnp.int32, values[0].shape, axis)
            sorted_pair = jax.lax.sort((values[0], positions), dimension=axis, num_keys=1)
            return [jax.lax.slice_in_dim(x, 0, e.params["k"], axis=axis) for x in sorted_pair]
        # Negation and addition are StableHLO operations with the same sharding rule.
        if e.primitive.kind is Kind.ELEMENTWISE and len(e.results) == 1 and self._is_uniform(e, values):
            return [-values[0] if len(values) == 1 else sum(values[1:], values[0])]
        return super().result(e, values)

    def _is_uniform(self, e: Equation, values: list) -> bool:
        """Return whether operands and result are arrays of equal shape and equal inexact dtype."""
        out = self.program.avals[e.results[0]]
        kinds = {(jnp.shape(x), jnp.result_type(x)) for x in values}
        return kinds == {(out.shape, out.dtype)} and jnp.issubdtype(out.dtype, jnp.inexact)


@cache
def has_passes() -> bool:
    """Return whether the installed jaxlib has Shardy's passes in its Python package."""
    try:
        with _stablehlo_module(jax.jit(lambda x: x).lower(1.0)).context:
            passmanager.PassManager.parse(PASSES)
    except (ValueError, ir.MLIRError):
        return False
    return True


def _stablehlo_module(lowered: Any) -> Any:
    """Return the StableHLO module of a lowered function."""
    return lowered.compiler_ir("stablehlo")


def _main_function(block: Any) -> Any:
    """Return the function that receives the step's inputs."""
    return next(
        op for op in block.operations if "sym_name" in op.attributes and op.attributes["sym_name"].value == "main"
    )


def _sharding_attribute(rank: int, dim: int) -> Any:
    """Return the Shardy attribute that divides dimension `dim` of an array."""
    dims = ", ".join(f'{{"{_AXIS}"}}' if d == dim else "{}" for d in range(rank))
    return ir.Attribute.parse(f"#sdy.sharding<@{_MESH}, [{dims}]>")


def _is_divided(value: Any) -> bool:
    """Return whether propagation divided a value."""
    owner: Any = value.owner
    if isinstance(owner, ir.Block):
        attributes: Any = owner.owner.attributes
        shardings = [str(a) for a in attributes["arg_attrs"]] if "arg_attrs" in attributes else []
        number = ir.BlockArgument(value).arg_number
    else:
        attributes = owner.attributes
        shardings = str(attributes["sdy.sharding"]).split("<@")[1:] if "sdy.sharding" in attributes else []
        number = ir.OpResult(value).result_number
    return number < len(shardings) and f'"{_AXIS}"' in shardings[number]


def _is_shift(operation: Any) -> bool:
    """Return whether a slice, pad, concatenate or reverse changes a divided dimension: in size, or in direction."""
    if "sdy.sharding" not in operation.attributes:
        return False
    dims = re.findall(r"\{[^{}]*\}", str(operation.attributes["sdy.sharding"]))
    divided = [d for d, axes in enumerate(dims) if f'"{_AXIS}"' in axes]
    if operation.name == "stablehlo.reverse":
        return any(d in operation.attributes["dimensions"] for d in divided)
    before, after = (ir.RankedTensorType(x[0].type).shape for x in (operation.operands, operation.results))
    return any(before[d] != after[d] for d in divided)


def tensor_bytes(tensor_type: Any) -> int:
    """Return the bytes of a tensor type; an element narrower than a byte counts as a byte."""
    tensor = ir.RankedTensorType(tensor_type)
    element: Any = tensor.element_type
    part: Any = element if hasattr(element, "width") else ir.ComplexType(element).element_type
    bits = part.width * (1 if part is element else 2)
    return prod(tensor.shape) * -(-bits // 8)
