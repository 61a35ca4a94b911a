"""A loss with its scans cut between layers, and the arrays that they step over in as many pieces."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..program import control_flow
from ..program.ir import Equation, Program
from ..program.primitives import bind, scan_counts
from ..program.replay import Replay


@dataclass(frozen=True)
class Cut:
    """Where a scan is cut: `bounds` are the first layer of each part, and at last the number of layers; `stages` the
    stage of each part."""

    bounds: tuple[int, ...]
    stages: tuple[int, ...]


class Pieces:
    """An array in pieces along its first dimension, as `bounds` says."""

    def __init__(self, arrays: Sequence[Any], bounds: tuple[int, ...], source: int):
        self.arrays, self.bounds, self.source = tuple(arrays), bounds, source


class CutScans(Replay):
    """Runs a loss with some of its scans in parts, each part in the scope of its stage.

    `cuts`: by the index of the equation. Inputs may come as `Pieces`; what reads one otherwise than layer by layer
    joins it, and its input is then among `joined`.
    """

    def __init__(self, program: Program, cuts: Mapping[int, Cut], stages: Mapping[int, int]):
        super().__init__(program, {i: stage_name(s) for i, s in stages.items()})
        self._cuts = cuts
        self._read = {v for scope in program.scopes() for v in scope.outs}
        self._read |= {v for e in program.equations for v in e.ins}
        self.joined: set[int] = set()

    def equation(self, e: Equation, values: list) -> list:
        if e.index in self._cuts:
            return self._in_parts(e, values, self._cuts[e.index])
        pieces = [x for x in values if isinstance(x, Pieces)]
        if not pieces:
            return super().equation(e, values)
        if e.primitive.elementwise and e.primitive.linear and len(values) == 1:
            (whole,) = pieces
            made = [bind(e.eqn, [x])[0] for x in whole.arrays]
            return [Pieces(made, whole.bounds, whole.source)]
        return super().equation(e, [self._joined(x) for x in values])

    def _joined(self, x: Any) -> Any:
        if not isinstance(x, Pieces):
            return x
        self.joined.add(x.source)
        return jnp.concatenate(x.arrays)

    def _in_parts(self, e: Equation, values: list, cut: Cut) -> list:
        consts, carried = scan_counts(e.params)
        fixed = [self._joined(x) for x in values[:consts]]
        carry = [self._joined(x) for x in values[consts : consts + carried]]
        scope, made = e.doors[0].scope, []
        stacked = [i for i, v in enumerate(e.outs) if i >= carried and v in self._read]

        def trip(carry, x):
            outs = self.body(scope, [*fixed, *carry, *x])
            return tuple(outs[:carried]), tuple(outs[i] for i in stacked)

        for k, stage in enumerate(cut.stages):
            first, end = cut.bounds[k : k + 2]
            with jax.named_scope(stage_name(stage)):
                xs = tuple(self._layers(x, cut, k) for x in values[consts + carried :])
                carry, ys = control_flow.scan(e, trip, carry, xs, end - first)
                made.append(ys)
        with jax.named_scope(stage_name(cut.stages[-1])):
            whole = {i: jnp.concatenate(parts) for i, *parts in zip(stacked, *made, strict=True)}
        # What nothing reads would go from stage to stage all the same: nnx.scan gives back every weight.
        return [*carry, *(whole.get(i) for i in range(carried, len(e.outs)))]

    def _layers(self, x: Any, cut: Cut, part: int) -> Any:
        if isinstance(x, Pieces) and x.bounds == cut.bounds:
            return x.arrays[part]
        return lax.slice_in_dim(self._joined(x), *cut.bounds[part : part + 2])


_STAGE = "pipeline_stage_"
_NUMBER = re.compile(rf"{_STAGE}(\d+)")


def stage_name(stage: int) -> str:
    """The scope that equations of a stage are in."""
    return f"{_STAGE}{stage}"


def stage_of(e: Equation) -> int | None:
    """The stage whose scope an equation of the top level is in; None for what is free."""
    found = _NUMBER.findall(str(e.eqn.source_info.name_stack))  # as in vmap(jvp(pipeline_stage_1))
    return int(found[-1]) if found else None
