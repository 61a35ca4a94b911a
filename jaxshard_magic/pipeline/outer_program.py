"""Outer program: the step outside of its gradient calls, as one flat program.

It runs on arrays in pieces, and keeps them in pieces through row-wise equations.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice, pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from ..errors import ShardError
from ..program.callbacks import is_host_call
from ..program.emit import Emitter, retrace
from ..program.flow import Flow
from ..program.gradient_calls import GradientCall, gradient_equations
from ..program.ir import Equation, Program, Value
from ..program.primitives import bind
from .equation_groups import ValueClasses, is_rowwise
from .split_loss import Pieces

_SHAPES = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}  # jaxpr parameters with the shape of the result


class _PiecewiseEmitter(Emitter):
    """Emit a program with some inputs in `Pieces`.

    Row-wise equations run once per piece. A reduction over the rows runs per piece, with the partial results combined.
    Any other equation reads the concatenated array.
    """

    def run_equation(self, e: Equation, values: list) -> list:
        if not any(isinstance(x, Pieces) for x in values):
            return super().run_equation(e, values)
        if self._by_piece(e):
            bounds = next(x.bounds for x in values if isinstance(x, Pieces))
            parts = zip(*(_aligned_pieces(x, bounds) for x in values), strict=True)
            results = [
                bind(_with_row_count(e, b - a), list(xs)) for xs, (a, b) in zip(parts, pairwise(bounds), strict=True)
            ]
            return [Pieces(xs, bounds, -1) for xs in zip(*results, strict=True)]
        if e.primitive.combiner is not None and len(values) == 1:
            results = [bind(e.jaxpr_eqn, [x])[0] for x in values[0].arrays]
            return [reduce(e.primitive.combiner, results)]
        if e.name == "reshape" and (rows_per_row := self._rows_per_row(e)):
            return [_reshaped(e, values[0], rows_per_row)]
        return super().run_equation(e, [_to_pieces(x, None) for x in values])

    def _rows_per_row(self, e: Equation) -> int:
        """Return the number of result rows per operand row of a reshape; 0 if a reshape cuts through rows."""
        before, after = self.program.shapes[e.operands[0] or 0], self.program.shapes[e.results[0]]
        # With `dimensions`, a reshape transposes as well.
        if not after or after[0] % before[0] or e.params["dimensions"] is not None:
            return 0
        return after[0] // before[0]

    def _by_piece(self, e: Equation) -> bool:
        """Return whether `e` can run on each piece by itself."""
        shapes = self.program.shapes
        own = {shapes[v] for v in (*e.operands, *e.results) if v is not None and shapes[v]}
        return len(own) == 1 if e.primitive.is_elementwise else is_rowwise(e, self.program)


def _to_pieces(x: Any, bounds: tuple[int, ...] | None) -> Any:
    """Return `x` in the pieces of `bounds`, or as one array for None."""
    if isinstance(x, Pieces):
        if x.bounds == bounds:
            return x
        x = jnp.concatenate(x.arrays)
    return x if bounds is None else Pieces(_slices(x, bounds), bounds, -1)


def _aligned_pieces(x: Any, bounds: tuple[int, ...]) -> list:
    """Return `x` as one operand per piece: its pieces, or a scalar repeated."""
    if not isinstance(x, Pieces) and not jnp.shape(x):
        return [x] * (len(bounds) - 1)
    return list(_to_pieces(x, bounds).arrays)


def _reshaped(e: Equation, x: Pieces, each: int) -> Pieces:
    """Reshape piece by piece, for a reshape that turns each row into `each` rows."""
    bounds = tuple(each * b for b in x.bounds)
    made = [
        bind(_with_row_count(e, b - a), [piece])[0] for piece, (a, b) in zip(x.arrays, pairwise(bounds), strict=True)
    ]
    return Pieces(made, bounds, -1)


def _slices(x: Any, bounds: tuple[int, ...]) -> list:
    return [lax.slice_in_dim(x, a, b) for a, b in pairwise(bounds)]


def _with_row_count(e: Equation, rows: int) -> Any:
    """Return the equation with its result shape changed to a piece of so many rows."""
    name = _SHAPES.get(e.name)
    if name is None:
        return e.jaxpr_eqn
    return e.jaxpr_eqn.replace(params={**e.params, name: (rows, *e.params[name][1:])})


class _CondInliner(Emitter):
    """Inline conditions: all branches run, and a select chooses each result, unless only one branch may run."""

    def run_equation(self, e: Equation, values: list) -> list:
        if not e.is_cond or _must_stay_cond(e):
            return super().run_equation(e, values)
        branches = [self.run(body.sub_jaxpr, values[1:]) for body in e.bodies]
        which = jnp.asarray(values[0])
        if which.dtype != jnp.bool_:
            # As `lax.switch` does with an index out of range.
            which = lax.clamp(0, which, len(branches) - 1)
        avals = [v.aval for v in e.jaxpr_eqn.outvars]
        return [
            outs[0]
            if all(x is outs[0] for x in outs)
            else lax.select_n(_index(which, len(outs)), *(_array(x, aval) for x in outs))
            for aval, *outs in zip(avals, *branches, strict=True)
        ]


def _must_stay_cond(e: Equation) -> bool:
    """Return whether only one branch of a condition may run.

    True for branches with effects, calls to host functions, branches for other platforms, and `while` loops, which may
    run for ever.
    """
    if e.jaxpr_eqn.effects or "branches_platforms" in e.params:
        return True
    return any(inner.is_while or is_host_call(inner.jaxpr_eqn) for inner in e.nested())


def _array(x: Any, aval: Any) -> Any:
    return x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)


def _index(which: Any, branches: int) -> Any:
    return which.astype(jnp.bool_) if branches == 2 else which


Bounds = tuple[int, ...] | None  # first row of each piece, then the number of rows; None for an array in one piece


@dataclass(frozen=True)
class OuterProgram:
    """The outer program: `(leaves..., results of each gradient call...)` -> `(operands of each call..., outputs...)`.

    The other fields hold the piece bounds of these arrays; None for an array in one piece.

    Attributes:
        program: The program.
        leaves: Bounds of each leaf.
        results: Bounds of each result, by gradient call.
        operands: Bounds of each operand, by gradient call.
        outputs: Bounds of each output.
    """

    program: Program
    leaves: tuple[Bounds, ...]
    results: tuple[tuple[Bounds, ...], ...]
    operands: tuple[tuple[Bounds, ...], ...]
    outputs: tuple[Bounds, ...]


def flatten_step(captured: Any) -> Program:
    """Inline the functions and conditions of a captured step."""
    return Program(retrace(_CondInliner(Program(captured))))


def gradient_calls(step: Program) -> list[Equation]:
    """Return the gradient calls of a captured step, in order.

    Raises:
        ShardError: No gradient call, or a gradient call in a loop.
    """
    calls = gradient_equations(step)
    if not calls:
        raise ShardError("pp: the step takes no gradient (jax.grad, jax.value_and_grad or a framework's) to pipeline")
    for call in calls:
        if call not in step.top.equations:
            raise ShardError(_loop_error(step, call))
    return calls


def _loop_error(step: Program, call: Equation) -> str:
    """Return advice for a gradient call in a loop that trains or accumulates gradients."""
    gradient: GradientCall = call.params["gradient"]
    gradient_sources = Flow(step).ancestors(call.operands[k] for k in gradient.differentiated_positions)
    outer, trains = call.parent, False
    while outer is not None:
        trains |= any(carried in gradient_sources for body in outer.bodies for _, carried in body.carries)
        outer = outer.parent
    if trains:
        return (
            "pp: the step takes gradients in a loop of its own, each at what the trip before made of them; a pipeline "
            "runs no gradient call in a loop: make one trip the step, where it trains, and call it in a Python loop, "
            "or use fsdp"
        )
    return (
        "pp: the step takes its gradient in a loop of its own, and a pipeline runs no gradient call in a loop: leave "
        "it out, and use --microbatches where it takes the batch in parts"
    )


def make_outer_program(step: Program, call_bounds: Sequence[Mapping[int, tuple[int, ...]]]) -> OuterProgram:
    """Build the outer program of a flat step.

    Row-wise equations of arrays in pieces keep the pieces. If two calls split one class differently, the first counts.

    Args:
        step: The flat step, with its gradient calls.
        call_bounds: For each call, the piece bounds of operands by position.
    """
    calls, kinds = gradient_calls(step), ValueClasses(step, rows=True)
    operands: list[list[Bounds]] = []
    results: list[tuple[Bounds, ...]] = []
    class_bounds: dict[Value, tuple[int, ...]] = {}
    for call, own in zip(calls, call_bounds, strict=True):
        gradient: GradientCall = call.params["gradient"]
        operands.append([own.get(k) for k in range(len(call.operands))])
        gradients = {gradient.num_outputs + n: own.get(k) for n, k in enumerate(gradient.differentiated_positions)}
        results.append(tuple(gradients.get(j) for j in range(len(call.results))))
        for v, cut in zip((*call.operands, *call.results), (*operands[-1], *results[-1]), strict=True):
            if v is not None and cut is not None:
                class_bounds.setdefault(kinds.class_of(v), cut)

    def bounds_of(v: Value | None) -> Bounds:
        found = None if v is None else class_bounds.get(kinds.class_of(v))
        return found if found and v is not None and step.shapes[v][:1] == found[-1:] else None

    leaves = tuple(bounds_of(v) for v in step.inputs)
    result_bounds = [
        pair for call, cuts in zip(calls, results, strict=True) for pair in zip(call.results, cuts, strict=True)
    ]
    avals = [
        a
        for v, cut in (*zip(step.inputs, leaves, strict=True), *result_bounds)
        for a in _piece_avals(step.avals[v], cut)
    ]
    replay = _OuterReplay(step)
    # `make_jaxpr` flattens the outputs: their bounds are recorded while it traces.
    traced_bounds: list[tuple[Bounds, ...]] = []

    def run(*arrays: Any) -> list:
        rest = iter(arrays)
        inputs = [_take_pieces(rest, cut) for cut in leaves]
        replay.results = {
            call.index: [_take_pieces(rest, cut) for cut in cuts] for call, cuts in zip(calls, results, strict=True)
        }
        outs = replay.run(step.top, inputs)
        ends = [
            _to_pieces(x, cut)
            for call, cuts in zip(calls, operands, strict=True)
            for x, cut in zip(replay.operands[call.index], cuts, strict=True)
        ]
        ends = [_value(x) for x in (*ends, *outs)]
        traced_bounds.append(tuple(x.bounds if isinstance(x, Pieces) else None for x in ends))
        return [part for x in ends for part in (x.arrays if isinstance(x, Pieces) else (x,))]

    program = Program(jax.make_jaxpr(run)(*avals))
    ends = iter(traced_bounds[0])
    operand_bounds_by_call = tuple(tuple(islice(ends, len(call.operands))) for call in calls)
    return OuterProgram(program, leaves, tuple(results), operand_bounds_by_call, tuple(ends))


class _OuterReplay(_PiecewiseEmitter):
    """Emitter that replaces gradient calls by given results, and records their operands.

    Attributes:
        results: Results of each call, by equation index.
        operands: Operands of each call, by equation index.
    """

    def __init__(self, step: Program):
        super().__init__(step)
        self.results: Mapping[int, list] = {}
        self.operands: dict[int, list] = {}

    def run_equation(self, e: Equation, values: list) -> list:
        if e.index in self.results:
            self.operands[e.index] = values
            return list(self.results[e.index])
        return super().run_equation(e, values)


def _piece_avals(aval: Any, cut: Bounds) -> list:
    if cut is None:
        return [aval]
    return [aval.update(shape=(b - a, *aval.shape[1:])) for a, b in pairwise(cut)]


def _take_pieces(arrays: Iterator[Any], cut: Bounds) -> Any:
    return next(arrays) if cut is None else Pieces([next(arrays) for _ in cut[1:]], cut, -1)


def _value(x: Any) -> Any:
    """Return `x` as a traced array, since a literal output has no value in a program."""
    return x if isinstance(x, Pieces | Tracer) else lax.optimization_barrier(jnp.asarray(x))
