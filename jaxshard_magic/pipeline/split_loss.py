"""Split a loss into stages: scopes of equations, pieces of operands, and bytes at the boundaries."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax

from ..program.ir import Program, Value
from ..program.primitives import scan_counts
from .allowed_starts import allowed_starts
from .balance import stage_starts
from .loss_units import LossUnits, equation_flops
from .split_scans import Pieces, ScanSplit, ScanSplitter


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
            scan_splits[e.index] = ScanSplit(
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
    loss: Program, parameters: Collection[int], cuts: Mapping[int, ScanSplit], whole: Mapping[int, int]
) -> tuple[Program, tuple[OperandPiece, ...]]:
    """Trace the loss with split scans, and with parameters in pieces unless an equation needs the complete array."""
    bounds = _layer_bounds(loss, parameters, cuts)
    # Only the trace shows which parameters an equation reads as one array: these are joined, and the loss traced again.
    while True:
        pieces = [piece for i in range(len(loss.inputs)) for piece in _pieces(i, bounds.get(i))]
        replay = ScanSplitter(loss, cuts, whole)
        closed = jax.make_jaxpr(partial(_run_split, replay, bounds))(*(_aval(loss, piece) for piece in pieces))
        if not replay.joined_inputs:
            return Program(closed), tuple(pieces)
        bounds = {i: b for i, b in bounds.items() if i not in replay.joined_inputs}


def _pieces(operand: int, bounds: tuple[int, ...] | None) -> list[OperandPiece]:
    return [OperandPiece(operand)] if bounds is None else [OperandPiece(operand, a, b) for a, b in pairwise(bounds)]


def _run_split(replay: ScanSplitter, bounds: Mapping[int, tuple[int, ...]], *xs: Any) -> list:
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
    loss: Program, parameters: Collection[int], cuts: Mapping[int, ScanSplit]
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
