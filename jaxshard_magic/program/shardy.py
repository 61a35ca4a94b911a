"""Shardy, the partitioner of the installed jaxlib, asked what dividing inputs of a step leads to.

A step is lowered once, from shapes and for no device. A question writes a mesh of one axis and the division of some
inputs into a copy of that module and runs Shardy's own passes on it: propagation tells which other inputs come to be
divided, and the collectives that follow tell what would be sent. Nothing is compiled.

`jaxlib.mlir` is no public API: no other module of the package imports it (`targets/worker.py`, a program of its own,
apart). Where it has no such passes, `Partitioner.of` gives None. Tried with jaxlib 0.10 and 0.12.
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

# Propagation, then all that has to move as explicit collectives.
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
_SHIFTED = {"stablehlo.slice", "stablehlo.pad", "stablehlo.concatenate", "stablehlo.reverse"}
_EQUATION = re.compile(r"equation(\d+)\b")


@dataclass(frozen=True)
class Collective:
    """A collective that Shardy would put into a step.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "collective_permute".
        nbytes: bytes of the whole array, all devices' parts together, in one run of its equation.
        equation: index of the equation that it serves, None where its location names none.
        trips: how often one step runs that equation; 1 where it is not known.
    """

    kind: str
    nbytes: int
    equation: int | None
    trips: int

    @property
    def is_sum(self) -> bool:
        return self.kind == _ALL_REDUCE


@dataclass(frozen=True)
class Division:
    """The consequences of dividing some inputs of a step over one mesh axis.

    Args:
        size: devices along the axis.
        carriers: all inputs that are divided then, by Shardy's propagation: those asked for, and what follows them.
        collectives: what would be sent, in the order of the program.
    """

    size: int
    carriers: frozenset[int]
    collectives: tuple[Collective, ...]

    @property
    def moved(self) -> int:
        """Bytes of collectives that add nothing up: gathers, exchanges and shifts, with all trips of loops."""
        return sum(c.nbytes * c.trips for c in self.collectives if not c.is_sum)

    @property
    def sent(self) -> int:
        """Bytes of all collectives, with all trips of loops."""
        return sum(c.nbytes * c.trips for c in self.collectives)

    @property
    def sent_per_device(self) -> float:
        """Bytes that each device sends, with all trips of loops, by the usual algorithms: a ring for sums and gathers,
        which passes on all parts but one, twice for a sum."""
        n = self.size
        share = {_ALL_REDUCE: 2 * (n - 1) / n, "all_to_all": (n - 1) / n**2, _SHIFT: 1 / n}
        return sum(c.nbytes * c.trips * share.get(c.kind, (n - 1) / n) for c in self.collectives)


class Partitioner:
    """A step that was lowered once, to be asked about divisions of its inputs. Costs a trace and a lowering: 0.4 s for
    2,500 equations."""

    def __init__(self, program: Program):
        self._trips = [e.trips for e in program.equations]
        labels = {e.index: f"equation{e.index}" for e in program.equations if not e.doors}
        avals = (program.avals[v] for v in program.inputs)
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        emitted = jax.jit(lambda *args: _StandIns(program, labels)(*args), keep_unused=True)
        self._module = _module_of(emitted.lower(*shapes))
        self._count = len(shapes)

    @classmethod
    def of(cls, program: Program) -> "Partitioner | None":
        """The partitioner of a step, lowered at its first question; None where this jaxlib has no such passes, or the
        step is not lowered for this host (a kernel of another platform)."""
        if not has_passes():
            return None
        if program not in _OF:
            try:
                _OF[program] = cls(program)
            except (NotImplementedError, ValueError, ir.MLIRError):
                _OF[program] = None
        return _OF[program]

    def divided(self, dims: Mapping[int, int], size: int) -> Division | None:
        """The consequences of dividing dimension `dims[i]` of each input i over one axis of `size` devices.

        None where a pass fails on it. Costs 10 to 600 ms.
        """
        with self._module.context, ir.Location.unknown():
            module = self._module.operation.clone()
            block = module.regions[0].blocks[0]
            with ir.InsertionPoint.at_block_begin(block):
                mesh = ir.Module.parse(f'sdy.mesh @{_MESH} = <["{_AXIS}"={size}]>')
                mesh.body.operations[0].operation.clone()
            main = _main(block)
            arguments = main.regions[0].blocks[0].arguments
            ahead = len(arguments) - self._count  # tokens of ordered effects
            given = [{} for _ in arguments]
            for i, dim in dims.items():
                rank = ir.RankedTensorType(arguments[ahead + i].type).rank
                given[ahead + i] = {"sdy.sharding": _sharding(rank, dim)}
            main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in given])
            try:
                passmanager.PassManager.parse(PASSES).run(module)
            except ir.MLIRError:
                return None
            attributes = list(_main(module.regions[0].blocks[0]).attributes["arg_attrs"])[ahead:]
            carriers = frozenset(i for i, a in enumerate(attributes) if f'"{_AXIS}"' in str(a))
            return Division(size, carriers, tuple(self._collectives(module)))

    def _collectives(self, module: Any) -> Iterator[Collective]:
        found = []

        def look(operation: Any) -> Any:
            dialect, _, kind = operation.name.partition(".")
            if dialect == "sdy" and kind in _KINDS:
                found.append((kind, operation.results[0].type, str(operation.location)))
            elif dialect == "chlo" or operation.name == "stablehlo.custom_call":
                # Shardy has no rule for it: its operands come whole.
                whole = filter(_is_divided, operation.operands)
                found.extend(("all_gather", x.type, str(operation.location)) for x in whole)
            elif operation.name in _SHIFTED and _is_shift(operation):
                given = operation.operands if operation.name == "stablehlo.pad" else operation.results
                found.append((_SHIFT, given[0].type, str(operation.location)))
            return ir.WalkResult.ADVANCE

        module.walk(look)
        for kind, array, location in found:
            equations = _EQUATION.findall(location)
            equation = int(equations[-1]) if equations else None
            trips = 1 if equation is None else self._trips[equation]
            yield Collective(kind, tensor_bytes(array), equation, trips)


# A search asks about one step for each mesh; what is kept goes with the step.
_OF: "WeakKeyDictionary[Program, Partitioner | None]" = WeakKeyDictionary()


class _StandIns(Emitter):
    """Emits other equations of the same dimensions for those without a rule of Shardy's: JAX lowers many functions of
    each element, and top_k, to CHLO, which XLA turns into StableHLO only in its own compile."""

    def result(self, e: Equation, values: list) -> list:
        if e.name == "top_k" and e.ins[0] is not None:
            axis = e.params.get("axis", -1) % values[0].ndim
            place = jax.lax.broadcasted_iota(jnp.int32, values[0].shape, axis)
            ordered = jax.lax.sort((values[0], place), dimension=axis, num_keys=1)
            return [jax.lax.slice_in_dim(x, 0, e.params["k"], axis=axis) for x in ordered]
        if e.primitive.kind is Kind.ELEMENTWISE and len(e.outs) == 1 and self._alike(e, values):
            return [-values[0] if len(values) == 1 else sum(values[1:], values[0])]
        return super().result(e, values)

    def _alike(self, e: Equation, values: list) -> bool:
        """Return whether operands and result are arrays of one shape and one inexact dtype."""
        out = self.program.avals[e.outs[0]]
        kinds = {(jnp.shape(x), jnp.result_type(x)) for x in values}
        return kinds == {(out.shape, out.dtype)} and jnp.issubdtype(out.dtype, jnp.inexact)


@cache
def has_passes() -> bool:
    """Return whether the installed jaxlib has Shardy's passes in its Python package."""
    try:
        with _module_of(jax.jit(lambda x: x).lower(1.0)).context:
            passmanager.PassManager.parse(PASSES)
    except (ValueError, ir.MLIRError):
        return False
    return True


def _module_of(lowered: Any) -> Any:
    return lowered.compiler_ir("stablehlo")


def _main(block: Any) -> Any:
    """The function that the step's inputs go into."""
    return next(
        op
        for op in block.operations
        if "sym_name" in op.attributes and op.attributes["sym_name"].value == "main"
    )


def _sharding(rank: int, dim: int) -> Any:
    dims = ", ".join(f'{{"{_AXIS}"}}' if d == dim else "{}" for d in range(rank))
    return ir.Attribute.parse(f"#sdy.sharding<@{_MESH}, [{dims}]>")


def _is_divided(value: Any) -> bool:
    """Return whether propagation divided a value."""
    owner: Any = value.owner
    if isinstance(owner, ir.Block):
        given: Any = owner.owner.attributes
        shardings = [str(a) for a in given["arg_attrs"]] if "arg_attrs" in given else []
        number = ir.BlockArgument(value).arg_number
    else:
        given = owner.attributes
        shardings = str(given["sdy.sharding"]).split("<@")[1:] if "sdy.sharding" in given else []
        number = ir.OpResult(value).result_number
    return number < len(shardings) and f'"{_AXIS}"' in shardings[number]


def _is_shift(operation: Any) -> bool:
    """Return whether a slice or the like has a divided dimension that is a part of its operand's, or reversed."""
    if "sdy.sharding" not in operation.attributes:
        return False
    dims = re.findall(r"\{[^{}]*\}", str(operation.attributes["sdy.sharding"]))
    divided = [d for d, axes in enumerate(dims) if f'"{_AXIS}"' in axes]
    if operation.name == "stablehlo.reverse":
        return any(d in operation.attributes["dimensions"] for d in divided)
    before, after = (ir.RankedTensorType(x[0].type).shape for x in (operation.operands, operation.results))
    return any(before[d] != after[d] for d in divided)


def tensor_bytes(array: Any) -> int:
    """Bytes of a tensor type, elements of less than a byte in one each."""
    tensor = ir.RankedTensorType(array)
    element: Any = tensor.element_type
    part: Any = element if hasattr(element, "width") else ir.ComplexType(element).element_type
    bits = part.width * (1 if part is element else 2)
    return prod(tensor.shape) * -(-bits // 8)
