"""The step around its gradient call as one flat program: what the loss reads, and what is made of its results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..program.capture import Gradient, gradients_of
from ..program.emit import Emitter
from ..program.example_rules import ELEMENTWISE
from ..program.ir import Equation, Program, Value
from ..program.primitives import bind
from ..program.replay import retraced
from .layers import Pieces

BY_ELEMENT = ELEMENTWISE | {
    *("add", "sub", "mul", "div", "neg", "add_any", "select_n", "convert_element_type", "reduce_precision"),
    *("copy", "copy_p", "name", "stop_gradient", "sharding_constraint", "device_put"),
}


class _Flat(Emitter):
    """Opens conditions: all their branches are run, and one is chosen for each result."""

    def equation(self, e: Equation, values: list) -> list:
        if e.name != "cond" or e.eqn.effects:
            return super().equation(e, values)
        branches = [self.run(door.scope, values[1:]) for door in e.doors]
        which = values[0]
        if which.dtype != jnp.bool_:
            which = jnp.clip(which, 0, len(branches) - 1)
        return [
            outs[0] if all(x is outs[0] for x in outs) else lax.select_n(_index(which, len(outs)), *outs)
            for outs in zip(*branches, strict=True)
        ]


def _index(which: Any, branches: int) -> Any:
    return which.astype(jnp.bool_) if branches == 2 else which


@dataclass(frozen=True)
class Around:
    """`program`: `(leaves..., results of the gradient call...)` -> `(operands of the loss..., outputs of the step...)`.

    `leaves[i]`, `results[j]`, `operands[k]`, `outputs[o]` say how each of these lies among its inputs and outputs: in as
    many pieces as the bounds have parts.
    """

    program: Program
    leaves: tuple[tuple[int, ...] | None, ...]
    results: tuple[tuple[int, ...] | None, ...]
    operands: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[tuple[int, ...] | None, ...]


def flat(captured: Any) -> Program:
    """The captured step with its functions and conditions opened."""
    return Program(retraced(_Flat(Program(captured))))


def around(step: Program, pieces: Mapping[int, tuple[int, ...]]) -> Around:
    """The flat `step` without its one gradient call, of whose operands `pieces` says which come in pieces, by position;
    what is as they are, element for element, comes in pieces as well."""
    (call,) = gradients_of(step)
    gradient: Gradient = call.params["gradient"]
    kinds = Kinds(step)
    bounds: dict[Value, tuple[int, ...]] = {}
    for k, cut in pieces.items():
        for v in (call.ins[k], call.outs[gradient.outs + k - gradient.closed_over]):
            if v is not None:
                bounds[kinds.of(v)] = cut

    def cut_of(v: Value | None) -> tuple[int, ...] | None:
        found = None if v is None else bounds.get(kinds.of(v))
        return found if found and v is not None and step.shapes[v][:1] == found[-1:] else None

    leaves = tuple(cut_of(v) for v in step.inputs)
    results = tuple(cut_of(v) for v in call.outs)
    avals = [
        *(a for v, cut in zip(step.inputs, leaves, strict=True) for a in _avals(step.avals[v], cut)),
        *(a for v, cut in zip(call.outs, results, strict=True) for a in _avals(step.avals[v], cut)),
    ]
    replay = _Around(step, call, cut_of)
    laid: list[tuple[tuple[int, ...] | None, ...]] = []

    def run(*arrays: Any) -> list:
        rest = iter(arrays)
        inputs = [_taken(rest, cut) for cut in leaves]
        replay.results = [_taken(rest, cut) for cut in results]
        outs = replay.run(step.top, inputs)
        ends = [*replay.operands, *outs]
        laid.append(tuple(x.bounds if isinstance(x, Pieces) else None for x in ends))
        return [part for x in ends for part in (x.arrays if isinstance(x, Pieces) else (x,))]

    program = Program(jax.make_jaxpr(run)(*avals))
    n = len(call.ins)
    return Around(program, leaves, results, laid[0][:n], laid[0][n:])


class Kinds:
    """Values that are of one shape and made of each other element by element, such as a parameter, its gradient and its
    moments: `of(v)` is the same for all of them."""

    def __init__(self, step: Program):
        self._parent = list(range(len(step.avals)))
        spread = {v for e in step.top.equations if e.name == "broadcast_in_dim" for v in e.outs}
        for e in step.top.equations:
            if e.name in BY_ELEMENT:
                shape = step.shapes[e.outs[0]]
                same = [v for v in (*e.ins, *e.outs) if v is not None and shape and step.shapes[v] == shape]
                for v in same:
                    if v not in spread:
                        self.join(v, e.outs[0])

    def join(self, v: Value, w: Value) -> None:
        """From here on the two are of one kind."""
        self._parent[self.of(v)] = self.of(w)

    def of(self, v: Value) -> Value:
        while self._parent[v] != v:
            self._parent[v] = self._parent[self._parent[v]]
            v = self._parent[v]
        return v


def _avals(aval: Any, cut: tuple[int, ...] | None) -> list:
    if cut is None:
        return [aval]
    return [aval.update(shape=(b - a, *aval.shape[1:])) for a, b in zip(cut, cut[1:], strict=False)]


def _taken(arrays: Any, cut: tuple[int, ...] | None) -> Any:
    return next(arrays) if cut is None else Pieces([next(arrays) for _ in cut[1:]], cut, -1)


class _Around(Emitter):
    """Runs a step with the results of its gradient call given, piece by piece where values come in pieces."""

    def __init__(self, step: Program, call: Equation, cut_of: Any):
        super().__init__(step)
        self._call, self._cut_of = call, cut_of
        self.results: Sequence[Any] = ()
        self.operands: list = []

    def equation(self, e: Equation, values: list) -> list:
        if e is self._call:
            self.operands = values
            return list(self.results)
        if any(isinstance(x, Pieces) for x in values):
            return self._of_pieces(e, values)
        return super().equation(e, values)

    def _of_pieces(self, e: Equation, values: list) -> list:
        bounds = next(x.bounds for x in values if isinstance(x, Pieces))
        if e.name in BY_ELEMENT and self._cut_of(e.outs[0]) == bounds:
            parts = [self._parts(x, bounds) for x in values]
            made = [bind(e.eqn, list(xs)) for xs in zip(*parts, strict=True)]
            return [Pieces(xs, bounds, -1) for xs in zip(*made, strict=True)]
        if e.name == "reduce_sum" and 0 in e.params["axes"]:
            sums = [bind(e.eqn, [x])[0] for x in values[0].arrays]
            total = sums[0]
            for x in sums[1:]:
                total = lax.add(total, x)
            return [total]
        return super().equation(
            e, [jnp.concatenate(x.arrays) if isinstance(x, Pieces) else x for x in values]
        )

    def _parts(self, x: Any, bounds: tuple[int, ...]) -> list:
        n = len(bounds) - 1
        if isinstance(x, Pieces):
            return list(x.arrays)
        if not jnp.shape(x):
            return [x] * n
        return [lax.slice_in_dim(x, a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
