"""Positions permuted to zig-zag order once for all rings of a step, and back."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...plan import PlannedCollective
from ...program.ir import Equation, Value
from ..layout import Layout
from ..zigzag_plan import ZigzagPlan, permute_positions
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class ZigzagRegion(Region):
    """Equations that read positions in another order than they were made in.

    Attributes:
        layout: The layout.
        zigzag: The plan of values in zig-zag order.
        reshards: Collectives of each equation for the permutation, by index; None for the outputs of the step.
    """

    layout: Layout
    zigzag: ZigzagPlan
    reshards: Mapping[int | None, Sequence[PlannedCollective]]

    def emit(self, e: Equation, values: list, default: Callable[[list], list], lowering: Emission) -> list:
        values = [*values]
        for back, read in ((False, self.zigzag.to_zigzag), (True, self.zigzag.to_sequential)):
            for k in sorted(read.get(e.index, ())):
                v, x, body = e.operands[k], values[k], e.parent and e.parent.index
                assert v is not None
                values[k] = lowering.once((body, v, back), lambda v=v, x=x, back=back: self._permute(v, x, back=back))
        return default(values)

    def finish_outputs(self, outs: list) -> list:
        # Callers expect positions in sequential order.
        pairs = enumerate(zip(self.layout.program.outputs, outs, strict=True))
        return [
            self._permute(v, x, back=True) if o in self.zigzag.restored_outputs and v is not None else x
            for o, (v, x) in pairs
        ]

    def collectives(
        self, e: Equation, operand_collectives: Iterable[PlannedCollective], default: Iterable[PlannedCollective]
    ) -> Iterable[PlannedCollective]:
        yield from self.reshards.get(e.index, ())
        yield from default

    def output_collectives(self) -> Iterable[PlannedCollective]:
        return self.reshards.get(None, ())

    def _permute(self, v: Value, x: Any, *, back: bool) -> Any:
        by_parts = v in self.zigzag.by_permute
        return permute_positions(self.layout, v, x, self.zigzag.positions[v], by_permute=by_parts, to_sequential=back)


def find_zigzag_region(context: Context) -> ZigzagRegion:
    layout, dealing = context.layout, context.zigzag
    moves: dict[int | None, list[PlannedCollective]] = defaultdict(list)
    for at, move in dealing.collectives(layout):
        moves[at].append(move)
    return ZigzagRegion({*dealing.to_zigzag, *dealing.to_sequential}, layout, dealing, moves)
