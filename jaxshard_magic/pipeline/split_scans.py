"""Split scans between layers, and divide the arrays scanned over into matching pieces."""

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
class ScanSplit:
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


class ScanSplitter(Replay):
    """Replay a loss with some scans split into parts, each part in the name scope of its stage.

    Inputs may be `Pieces`. An equation that reads pieces other than layer by layer gets the concatenated array, and the
    position of the input is added to `joined_inputs`.

    Args:
        program: The loss.
        splits: The division of each split scan, by equation index.
        stages: The stage of each other equation, by equation index.
    """

    def __init__(self, program: Program, splits: Mapping[int, ScanSplit], stages: Mapping[int, int]):
        super().__init__(program, {i: stage_scope(s) for i, s in stages.items()})
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

    def _run_split_scan(self, e: Equation, values: list, cut: ScanSplit) -> list:
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
            with jax.named_scope(stage_scope(stage)):
                xs = tuple(self._slice_layers(x, cut, k) for x in values[consts + carried :])
                carry, ys = control_flow.scan(e, trip, carry, xs, end - first)
                stacked_parts.append(ys)
        with jax.named_scope(stage_scope(cut.stages[-1])):
            concatenated = {
                i: jnp.concatenate(parts) for i, *parts in zip(stacked_results, *stacked_parts, strict=True)
            }
        # Stacked results that nothing reads are None: otherwise they would be sent from stage to stage. `nnx.scan`
        # returns every weight.
        return [*carry, *(concatenated.get(i) for i in range(carried, len(e.results)))]

    def _slice_layers(self, x: Any, cut: ScanSplit, part: int) -> Any:
        """Return the layers of one part of a scanned operand, without a copy where the pieces have the same bounds."""
        if isinstance(x, Pieces) and x.bounds == cut.bounds:
            return x.arrays[part]
        return lax.slice_in_dim(self._join(x), *cut.bounds[part : part + 2])


_STAGE = "pipeline_stage_"
_NUMBER = re.compile(rf"{_STAGE}(\d+)")


def stage_scope(stage: int) -> str:
    """Return the name scope for equations of a stage."""
    return f"{_STAGE}{stage}"


def stage_of(e: Equation) -> int | None:
    """Return the stage of a top-level equation from its name scope; None for a free equation."""
    found = _NUMBER.findall(str(e.jaxpr_eqn.source_info.name_stack))  # vmap(jvp(pipeline_stage_1))
    return int(found[-1]) if found else None
