"""The step around its gradient call as one flat program: what the loss reads, and what is made of its results."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from ..errors import ShardError
from ..program.capture import Gradient, gradients_of
from ..program.emit import Emitter
from ..program.flow import Flow
from ..program.ir import Equation, Program, Value
from ..program.replay import retraced
from .kinds import Kinds
from .layers import Pieces
from .piecewise import Piecewise, laid_out


class _Flat(Emitter):
    """Opens conditions: all their branches are run, and one is chosen for each result."""

    def equation(self, e: Equation, values: list) -> list:
        if e.name != "cond" or e.eqn.effects:
            return super().equation(e, values)
        branches = [self.run(door.scope, values[1:]) for door in e.doors]
        which = jnp.asarray(values[0])
        if which.dtype != jnp.bool_:
            which = lax.clamp(0, which, len(branches) - 1)
        avals = [v.aval for v in e.eqn.outvars]
        return [
            outs[0]
            if all(x is outs[0] for x in outs)
            else lax.select_n(_index(which, len(outs)), *(_array(x, aval) for x in outs))
            for aval, *outs in zip(avals, *branches, strict=True)
        ]


def _array(x: Any, aval: Any) -> Any:
    return x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)


def _index(which: Any, branches: int) -> Any:
    return which.astype(jnp.bool_) if branches == 2 else which


Bounds = (
    tuple[int, ...] | None
)  # the first row of each piece, and at last their number; None for what is whole


@dataclass(frozen=True)
class Around:
    """`program`: `(leaves..., results of the gradient call...)` -> `(operands of the loss..., outputs of the step...)`.

    `leaves[i]`, `results[j]`, `operands[k]`, `outputs[o]` say how each of these lies among its inputs and outputs: in
    the pieces of its bounds.
    """

    program: Program
    leaves: tuple[Bounds, ...]
    results: tuple[Bounds, ...]
    operands: tuple[Bounds, ...]
    outputs: tuple[Bounds, ...]


def flat(captured: Any) -> Program:
    """The captured step with its functions and conditions opened."""
    return Program(retraced(_Flat(Program(captured))))


def gradient_call(step: Program) -> Equation:
    """The one gradient call of a captured step.

    Raises ShardError where it has none, several, or one in a loop.
    """
    calls = gradients_of(step)
    if not calls:
        raise ShardError(
            "pp: the step takes no gradient (jax.grad, jax.value_and_grad or a framework's) to pipeline"
        )
    if len(calls) > 1:
        raise ShardError(
            f"pp: the step takes {len(calls)} gradients; a pipeline runs one loss: add the losses up and differentiate "
            "their sum, or use fsdp"
        )
    if calls[0] not in step.top.equations:
        raise ShardError(_in_a_loop(step, calls[0]))
    return calls[0]


def _in_a_loop(step: Program, call: Equation) -> str:
    """What to do about a gradient call in a loop, which trains in it or adds gradients up."""
    gradient: Gradient = call.params["gradient"]
    behind = Flow(step).back(call.ins[k] for k in gradient.differentiated)
    outer, trains = call.outer, False
    while outer is not None:
        trains |= any(carried in behind for door in outer.doors for _, carried in door.loop)
        outer = outer.outer
    if trains:
        return (
            "pp: the step trains in a loop of its own, one gradient and one update a trip; a pipeline runs one "
            "gradient call a step: make one trip the step and call it in a loop in Python, or use fsdp"
        )
    return (
        "pp: the step takes its gradient in a loop of its own; a pipeline runs one gradient call a step: leave the "
        "loop out, and use --microbatches where it takes the batch in parts"
    )


def around(step: Program, pieces: Mapping[int, tuple[int, ...]]) -> Around:
    """The flat `step` without its one gradient call, of whose operands `pieces` says which come in pieces, by position;
    what is made of them row by row comes in pieces as well."""
    call = gradient_call(step)
    gradient: Gradient = call.params["gradient"]
    kinds = Kinds(step, rows=True)
    operands: list[Bounds] = [pieces.get(k) for k in range(len(call.ins))]
    gradients = {gradient.outs + n: operands[k] for n, k in enumerate(gradient.differentiated)}
    bounds: dict[Value, tuple[int, ...]] = {}
    for v, cut in [*zip(call.ins, operands, strict=True), *((call.outs[j], b) for j, b in gradients.items())]:
        if v is not None and cut is not None:
            bounds[kinds.of(v)] = cut

    def cut_of(v: Value | None) -> Bounds:
        found = None if v is None else bounds.get(kinds.of(v))
        return found if found and v is not None and step.shapes[v][:1] == found[-1:] else None

    leaves = tuple(cut_of(v) for v in step.inputs)
    results = tuple(gradients.get(j) for j in range(len(call.outs)))
    avals = [
        *(a for v, cut in zip(step.inputs, leaves, strict=True) for a in _avals(step.avals[v], cut)),
        *(a for v, cut in zip(call.outs, results, strict=True) for a in _avals(step.avals[v], cut)),
    ]
    replay = _Around(step, call)
    laid: list[tuple[Bounds, ...]] = []

    def run(*arrays: Any) -> list:
        rest = iter(arrays)
        inputs = [_taken(rest, cut) for cut in leaves]
        replay.results = [_taken(rest, cut) for cut in results]
        outs = replay.run(step.top, inputs)
        ends = [laid_out(x, cut) for x, cut in zip(replay.operands, operands, strict=True)]
        ends = [_value(x) for x in (*ends, *outs)]
        laid.append(tuple(x.bounds if isinstance(x, Pieces) else None for x in ends))
        return [part for x in ends for part in (x.arrays if isinstance(x, Pieces) else (x,))]

    program = Program(jax.make_jaxpr(run)(*avals))
    n = len(call.ins)
    return Around(program, leaves, results, laid[0][:n], laid[0][n:])


class _Around(Piecewise):
    """Runs a step with the results of its gradient call given."""

    def __init__(self, step: Program, call: Equation):
        super().__init__(step)
        self._call = call
        self.results: Sequence[Any] = ()
        self.operands: list = []

    def equation(self, e: Equation, values: list) -> list:
        if e is self._call:
            self.operands = values
            return list(self.results)
        return super().equation(e, values)


def _avals(aval: Any, cut: Bounds) -> list:
    if cut is None:
        return [aval]
    return [aval.update(shape=(b - a, *aval.shape[1:])) for a, b in pairwise(cut)]


def _taken(arrays: Iterator[Any], cut: Bounds) -> Any:
    return next(arrays) if cut is None else Pieces([next(arrays) for _ in cut[1:]], cut, -1)


def _value(x: Any) -> Any:
    """What an output can be: a literal has no value in a program."""
    return x if isinstance(x, Pieces | Tracer) else lax.optimization_barrier(jnp.asarray(x))
