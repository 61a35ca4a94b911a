"""The step around its gradient calls as one flat program: what the losses read, and what is made of their results."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from ..errors import ShardError
from ..program.callbacks import calls_host
from ..program.capture import Gradient, gradients_of
from ..program.emit import Emitter
from ..program.flow import Flow
from ..program.ir import Equation, Program, Value
from ..program.replay import retraced
from .kinds import Kinds
from .layers import Pieces
from .piecewise import Piecewise, laid_out


class _Flat(Emitter):
    """Opens conditions: all their branches are run, and one is chosen for each result, but where one alone may run."""

    def equation(self, e: Equation, values: list) -> list:
        if not e.is_cond or _one_alone(e):
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


def _one_alone(e: Equation) -> bool:
    """Return whether only one branch of a condition may run: others have effects, call functions of the host, are for
    other platforms, or hold a loop that may go on for ever."""
    if e.eqn.effects or "branches_platforms" in e.params:
        return True
    return any(inner.is_while or calls_host(inner.eqn) for inner in e.inside())


def _array(x: Any, aval: Any) -> Any:
    return x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)


def _index(which: Any, branches: int) -> Any:
    return which.astype(jnp.bool_) if branches == 2 else which


Bounds = (
    tuple[int, ...] | None
)  # the first row of each piece, and at last their number; None for what is whole


@dataclass(frozen=True)
class Around:
    """`program`: `(leaves..., results of each gradient call...)` -> `(operands of each call..., outputs...)`.

    `leaves[i]`, `results[c][j]`, `operands[c][k]`, `outputs[o]` say how each of these lies among its inputs and
    outputs: in the pieces of its bounds.
    """

    program: Program
    leaves: tuple[Bounds, ...]
    results: tuple[tuple[Bounds, ...], ...]
    operands: tuple[tuple[Bounds, ...], ...]
    outputs: tuple[Bounds, ...]


def flat(captured: Any) -> Program:
    """The captured step with its functions and conditions opened."""
    return Program(retraced(_Flat(Program(captured))))


def gradient_calls(step: Program) -> list[Equation]:
    """The gradient calls of a captured step, in order.

    Raises ShardError where it has none, or one in a loop.
    """
    calls = gradients_of(step)
    if not calls:
        raise ShardError(
            "pp: the step takes no gradient (jax.grad, jax.value_and_grad or a framework's) to pipeline"
        )
    for call in calls:
        if call not in step.top.equations:
            raise ShardError(_in_a_loop(step, call))
    return calls


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
            "pp: the step takes gradients in a loop of its own, each at what the trip before made of them; a pipeline "
            "runs no gradient call in a loop: make one trip the step, where it trains, and call it in a Python loop, "
            "or use fsdp"
        )
    return (
        "pp: the step takes its gradient in a loop of its own, and a pipeline runs no gradient call in a loop: leave "
        "it out, and use --microbatches where it takes the batch in parts"
    )


def around(step: Program, pieces: Sequence[Mapping[int, tuple[int, ...]]]) -> Around:
    """The flat `step` without its gradient calls, of whose operands `pieces` says which come in pieces, by position;
    what is made of them row by row comes in pieces as well. Of two calls that cut the same the first counts."""
    calls, kinds = gradient_calls(step), Kinds(step, rows=True)
    operands: list[list[Bounds]] = []
    results: list[tuple[Bounds, ...]] = []
    bounds: dict[Value, tuple[int, ...]] = {}
    for call, own in zip(calls, pieces, strict=True):
        gradient: Gradient = call.params["gradient"]
        operands.append([own.get(k) for k in range(len(call.ins))])
        gradients = {gradient.outs + n: own.get(k) for n, k in enumerate(gradient.differentiated)}
        results.append(tuple(gradients.get(j) for j in range(len(call.outs))))
        for v, cut in zip((*call.ins, *call.outs), (*operands[-1], *results[-1]), strict=True):
            if v is not None and cut is not None:
                bounds.setdefault(kinds.of(v), cut)

    def cut_of(v: Value | None) -> Bounds:
        found = None if v is None else bounds.get(kinds.of(v))
        return found if found and v is not None and step.shapes[v][:1] == found[-1:] else None

    leaves = tuple(cut_of(v) for v in step.inputs)
    given = [
        pair for call, cuts in zip(calls, results, strict=True) for pair in zip(call.outs, cuts, strict=True)
    ]
    avals = [
        a for v, cut in (*zip(step.inputs, leaves, strict=True), *given) for a in _avals(step.avals[v], cut)
    ]
    replay = _Around(step)
    laid: list[tuple[Bounds, ...]] = []

    def run(*arrays: Any) -> list:
        rest = iter(arrays)
        inputs = [_taken(rest, cut) for cut in leaves]
        replay.results = {
            call.index: [_taken(rest, cut) for cut in cuts] for call, cuts in zip(calls, results, strict=True)
        }
        outs = replay.run(step.top, inputs)
        ends = [
            laid_out(x, cut)
            for call, cuts in zip(calls, operands, strict=True)
            for x, cut in zip(replay.operands[call.index], cuts, strict=True)
        ]
        ends = [_value(x) for x in (*ends, *outs)]
        laid.append(tuple(x.bounds if isinstance(x, Pieces) else None for x in ends))
        return [part for x in ends for part in (x.arrays if isinstance(x, Pieces) else (x,))]

    program = Program(jax.make_jaxpr(run)(*avals))
    ends = iter(laid[0])
    each = tuple(tuple(islice(ends, len(call.ins))) for call in calls)
    return Around(program, leaves, tuple(results), each, tuple(ends))


class _Around(Piecewise):
    """Runs a step with the results of its gradient calls given, by the index of each; `operands`: what they read."""

    def __init__(self, step: Program):
        super().__init__(step)
        self.results: Mapping[int, list] = {}
        self.operands: dict[int, list] = {}

    def equation(self, e: Equation, values: list) -> list:
        if e.index in self.results:
            self.operands[e.index] = values
            return list(self.results[e.index])
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
