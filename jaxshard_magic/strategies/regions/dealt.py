"""Positions that are dealt out once for all rings of a step: where they are, and where they are put back."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...plan import Sent
from ...program.ir import Equation, Value
from ..dealing import Dealing
from ..deals import moved
from ..layout import Layout
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class DealtOnce(Region):
    """The equations that read positions dealt out which were made in order, or in order what was made dealt out.
    `moves`: what each of them sends for that, and, under None, what leaves the step."""

    layout: Layout
    dealing: Dealing
    moves: Mapping[int | None, Sequence[Sent]]

    def emit(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        values = [*values]
        for back, read in ((False, self.dealing.deals), (True, self.dealing.puts_back)):
            for k in sorted(read.get(e.index, ())):
                v, x, body = e.ins[k], values[k], e.outer and e.outer.index
                assert v is not None
                values[k] = hold.once(
                    (body, v, back), lambda v=v, x=x, back=back: self._moved(v, x, back=back)
                )
        return rest(values)

    def leave(self, outs: list) -> list:
        pairs = enumerate(zip(self.layout.program.outputs, outs, strict=True))
        return [
            self._moved(v, x, back=True) if o in self.dealing.outputs and v is not None else x
            for o, (v, x) in pairs
        ]

    def sent(self, e: Equation, operands: Iterable[Sent], rest: Iterable[Sent]) -> Iterable[Sent]:
        yield from self.moves.get(e.index, ())
        yield from rest

    def sent_leaving(self) -> Iterable[Sent]:
        return self.moves.get(None, ())

    def _moved(self, v: Value, x: Any, *, back: bool) -> Any:
        by_parts = v in self.dealing.by_parts
        return moved(self.layout, v, x, self.dealing.places[v], by_parts=by_parts, back=back)


def dealt_once(context: Context) -> DealtOnce:
    """Where a step deals out its positions."""
    layout, dealing = context.layout, context.dealing
    moves: dict[int | None, list[Sent]] = defaultdict(list)
    for at, move in dealing.sent(layout):
        moves[at].append(move)
    return DealtOnce({*dealing.deals, *dealing.puts_back}, layout, dealing, moves)
