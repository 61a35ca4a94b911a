"""Split a loss into stages: scopes of equations, pieces of operands, and bytes at the boundaries.

Scans are split between layers, and the arrays scanned over are divided into matching pieces.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..program import control_flow
from ..program.emit import Replay
from ..program.ir import Equation, Program, Value
from ..program.primitives import bind, scan_counts
from .allowed_starts import allowed_starts
from .balance import stage_starts
from .loss_units import LossUnits, equation_flops


@dataclass(frozen=True)
class _ScanSplit:
    """Division of a scan among stages.

    Attributes:
        bounds: First layer of each part, then the number of layers.
        stages: Stage of each part.
    """

    bounds: tuple[int, ...]
    stages: tuple[int, ...]


class Pieces:
    """An array in pieces along its first dimension.

    Args:
        arrays: The pieces.
        bounds: First row of each piece, then the number of rows.
        input_index: Position of the array among the inputs; -1 for none.
    """

    def __init__(self, arrays: Sequence[Any], bounds: tuple[int, ...], input_index: int):
        self.arrays, self.bounds, self.input_index = tuple(arrays), bounds, input_index


class _ScanSplitter(Replay):
    """Replay a loss with some scans split into parts, each part in the name scope of its stage.

    Inputs may be `Pieces`. An equation that reads pieces other than layer by layer gets the concatenated array, and the
    position of the input is added to `joined_inputs`.

    Args:
        program: The loss.
        splits: The division of each split scan, by equation index.
        stages: The stage of each other equation, by equation index.
    """

    def __init__(self, program: Program, splits: Mapping[int, _ScanSplit], stages: Mapping[int, int]):
        super().__init__(program, {i: _stage_scope(s) for i, s in stages.items()})
        self._cuts = splits
        self._read = {v for scope in program.sub_jaxprs() for v in scope.outputs}
        self._read |= {v for e in program.equations for v in e.operands}
        self.joined_inputs: set[int] = set()

    def run_equation(self, e: Equation, values: list) -> list:
        if e.index in self._cuts:
            return self._run_split_scan(e, values, self._cuts[e.index])
        pieces = [x for x in values if isinstance(x, Pieces)]
        if not pieces:
            return super().run_equation(e, values)
        if e.primitive.is_elementwise and e.primitive.linear_operands and len(values) == 1:
            (whole,) = pieces
            made = [bind(e.jaxpr_eqn, [x])[0] for x in whole.arrays]
            return [Pieces(made, whole.bounds, whole.input_index)]
        return super().run_equation(e, [self._join(x) for x in values])

    def _join(self, x: Any) -> Any:
        """Concatenate `x`, if in pieces, and record the input."""
        if not isinstance(x, Pieces):
            return x
        self.joined_inputs.add(x.input_index)
        return jnp.concatenate(x.arrays)

    def _run_split_scan(self, e: Equation, values: list, cut: _ScanSplit) -> list:
        """Run a scan as one scan per part, in the scopes of the stages."""
        consts, carried = scan_counts(e.params)
        constants = [self._join(x) for x in values[:consts]]
        carry = [self._join(x) for x in values[consts : consts + carried]]
        scope, stacked_parts = e.bodies[0].sub_jaxpr, []
        stacked_results = [i for i, v in enumerate(e.results) if i >= carried and v in self._read]

        def trip(carry, x):
            outs = self.enter_body(scope, [*constants, *carry, *x])
            return tuple(outs[:carried]), tuple(outs[i] for i in stacked_results)

        for k, stage in enumerate(cut.stages):
            first, end = cut.bounds[k : k + 2]
            with jax.named_scope(_stage_scope(stage)):
                xs = tuple(self._slice_layers(x, cut, k) for x in values[consts + carried :])
                carry, ys = control_flow.scan(e, trip, carry, xs, end - first)
                stacked_parts.append(ys)
        with jax.named_scope(_stage_scope(cut.stages[-1])):
            concatenated = {
                i: jnp.concatenate(parts) for i, *parts in zip(stacked_results, *stacked_parts, strict=True)
            }
        # Stacked results that nothing reads are None: otherwise they would be sent from stage to stage. `nnx.scan`
        # returns every weight.
        return [*carry, *(concatenated.get(i) for i in range(carried, len(e.results)))]

    def _slice_layers(self, x: Any, cut: _ScanSplit, part: int) -> Any:
        """Return the layers of one part of a scanned operand, without a copy where the pieces have the same bounds."""
        if isinstance(x, Pieces) and x.bounds == cut.bounds:
            return x.arrays[part]
        return lax.slice_in_dim(self._join(x), *cut.bounds[part : part + 2])


_STAGE = "pipeline_stage_"
_NUMBER = re.compile(rf"{_STAGE}(\d+)")


def _stage_scope(stage: int) -> str:
    """Return the name scope for equations of a stage."""
    return f"{_STAGE}{stage}"


def stage_of(e: Equation) -> int | None:
    """Return the stage of a top-level equation from its name scope; None for a free equation."""
    found = _NUMBER.findall(str(e.jaxpr_eqn.source_info.name_stack))  # vmap(jvp(pipeline_stage_1))
    return int(found[-1]) if found else None


@dataclass(frozen=True)
class OperandPiece:
    """An operand of the loss, or some of its layers.

    Attributes:
        operand: Position of the operand.
        first_layer: First layer; None for all.
        end_layer: Layer after the last; None for all.
    """

    operand: int
    first_layer: int | None = None
    end_layer: int | None = None


@dataclass(frozen=True)
class UnitSummary:
    """Summary of one unit of the loss.

    Attributes:
        parameters: Parameters that the unit reads, as operand positions.
        layer: Layer of a scan; None for a complete equation.
        cost: Cost of the unit.
    """

    parameters: tuple[int, ...]
    layer: int | None
    cost: float


@dataclass(frozen=True)
class SplitLoss:
    """A loss with stages.

    Attributes:
        program: The loss, with the equations of each stage in the name scope of the stage. Free equations have none.
        pieces: For each input of `program`, the operand, or the layers of one.
        units: Units of each stage.
        crossing_bytes: For each stage but the last, bytes of one microbatch at the boundary after it.
        has_chosen_starts: Whether names or markers restrict the starts of stages.
    """

    program: Program
    pieces: tuple[OperandPiece, ...]
    units: tuple[tuple[UnitSummary, ...], ...]
    crossing_bytes: tuple[int, ...]
    has_chosen_starts: bool


@dataclass(frozen=True)
class SplitOptions:
    """Options for splitting a loss.

    Attributes:
        start_pattern: Regular expression for modules, functions and scopes at which stages begin.
        unit_costs: Cost of each unit, in place of FLOPs.
    """

    start_pattern: str | None = None
    unit_costs: Sequence[float] | None = None


BY_FLOPS = SplitOptions()


def split_loss(
    loss: Program,
    parameters: Collection[int],
    examples: Collection[int],
    stages: int,
    chunks: int = 1,
    options: SplitOptions = BY_FLOPS,
) -> SplitLoss:
    """Split the loss of one microbatch into stages of about equal work.

    Args:
        loss: The loss.
        parameters: Positions of the weights among the inputs, trained or frozen.
        examples: Positions of the inputs that hold examples.
        stages: Number of stages.
        chunks: Number of stages per rank.
        options: Constraints and costs.

    Raises:
        ShardError: Too few starts for stages.
    """
    units = LossUnits(
        loss, [loss.inputs[i] for i in parameters], [loss.inputs[i] for i in examples], options.unit_costs
    )
    allowed = allowed_starts(units, stages, chunks, options.start_pattern)
    bounds = stage_starts(units, stages, chunks, allowed)
    stage_at = [sum(u >= b for b in bounds) for u in range(len(units.units))]
    scan_splits, equation_stages = {}, {}
    for e in units.main_equations:
        first, last = units.unit_range[e.index]
        unit_stages = stage_at[first : last + 1]
        if unit_stages[0] == unit_stages[-1]:
            equation_stages[e.index] = unit_stages[0]
        else:
            first_layers = [k for k in range(1, len(unit_stages)) if unit_stages[k] != unit_stages[k - 1]]
            scan_splits[e.index] = _ScanSplit(
                (0, *first_layers, len(unit_stages)), (unit_stages[0], *(unit_stages[k] for k in first_layers))
            )
    program, pieces = _trace_split(loss, parameters, scan_splits, equation_stages)
    input_position = {v: i for i, v in enumerate(loss.inputs)}
    summaries = [
        UnitSummary(tuple(sorted(input_position[v] for v in units.parameters_read[u])), x.layer, x.cost)
        for u, x in enumerate(units.units)
    ]
    units_by_stage = [tuple(summaries[a:b]) for a, b in pairwise([0, *bounds, len(summaries)])]
    return SplitLoss(
        program, pieces, tuple(units_by_stage), tuple(units.crossing_bytes[b] for b in bounds), allowed is not None
    )


def unsplit_loss(loss: Program, parameters: Collection[int], stages: int) -> SplitLoss:
    """Return the loss with all equations in the last stage.

    Args:
        loss: The loss.
        parameters: Positions of the weights among the inputs, trained or frozen.
        stages: Number of stages.
    """
    last = {e.index: stages - 1 for e in loss.top.equations}
    program, pieces = _trace_split(loss, parameters, {}, last)
    one = UnitSummary(tuple(sorted(parameters)), None, sum(equation_flops(loss).values()))
    return SplitLoss(program, pieces, (*[()] * (stages - 1), (one,)), (0,) * (stages - 1), has_chosen_starts=False)


def _trace_split(
    loss: Program, parameters: Collection[int], cuts: Mapping[int, _ScanSplit], whole: Mapping[int, int]
) -> tuple[Program, tuple[OperandPiece, ...]]:
    """Trace the loss with split scans, and with parameters in pieces unless an equation needs the complete array."""
    bounds = _layer_bounds(loss, parameters, cuts)
    # Only the trace shows which parameters an equation reads as one array: these are joined, and the loss traced again.
    while True:
        pieces = [piece for i in range(len(loss.inputs)) for piece in _pieces(i, bounds.get(i))]
        replay = _ScanSplitter(loss, cuts, whole)
        closed = jax.make_jaxpr(partial(_run_split, replay, bounds))(*(_aval(loss, piece) for piece in pieces))
        if not replay.joined_inputs:
            return Program(closed), tuple(pieces)
        bounds = {i: b for i, b in bounds.items() if i not in replay.joined_inputs}


def _pieces(operand: int, bounds: tuple[int, ...] | None) -> list[OperandPiece]:
    return [OperandPiece(operand)] if bounds is None else [OperandPiece(operand, a, b) for a, b in pairwise(bounds)]


def _run_split(replay: _ScanSplitter, bounds: Mapping[int, tuple[int, ...]], *xs: Any) -> list:
    rest, inputs = iter(xs), []
    for i in range(len(replay.program.inputs)):
        if i in bounds:
            inputs.append(Pieces([next(rest) for _ in bounds[i][1:]], bounds[i], i))
        else:
            inputs.append(next(rest))
    return replay(*inputs)


def _aval(loss: Program, piece: OperandPiece) -> Any:
    aval = loss.closed.in_avals[piece.operand]
    if piece.first_layer is None or piece.end_layer is None:
        return aval
    return aval.update(shape=(piece.end_layer - piece.first_layer, *aval.shape[1:]))


def _layer_bounds(
    loss: Program, parameters: Collection[int], cuts: Mapping[int, _ScanSplit]
) -> dict[int, tuple[int, ...]]:
    """Return the piece bounds of parameters that a split scan may read layer by layer."""
    layers: dict[int, tuple[int, ...]] = {}
    for i in parameters:
        shape = loss.shapes[loss.inputs[i]]
        for e in loss.top.equations:
            if e.index in cuts and shape and shape[0] == cuts[e.index].bounds[-1]:
                consts, carried = scan_counts(e.params)
                if values_made_only_of(loss, loss.inputs[i]) & {
                    v for v in e.operands[consts + carried :] if v is not None
                }:
                    layers.setdefault(i, cuts[e.index].bounds)
    return layers


def values_made_only_of(loss: Program, value: Value) -> set[Value]:
    """Return `value` and all values computed from it alone."""
    made = {value}
    for e in loss.top.equations:
        arrays = {v for v in e.operands if v is not None}
        if arrays and arrays <= made:
            made.update(e.results)
    return made
