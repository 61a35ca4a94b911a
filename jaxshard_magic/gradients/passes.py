"""The passes over a loss before it is differentiated, in their order: precision, attention, remat, and what wide values
need."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr

from ..config.options import GradientOptions
from .fused import fused, keeping_attention, told
from .precision import precision
from .recomputed import recomputed
from .remat import Rematted, remat


@dataclass
class Passes:
    """Makes of a loss what `options` ask of it; `notes` say what each pass did, one line a pass. `rematted`: the
    losses with remat in them. `ring`: attention is to be one primitive, which can be run as a ring."""

    options: GradientOptions
    ring: bool = False
    notes: list[str] = field(default_factory=list)
    rematted: list[Rematted] = field(default_factory=list)

    def __call__(
        self, loss: ClosedJaxpr, known: Mapping[int, Any] | None = None, moving: Collection[int] | None = None
    ) -> ClosedJaxpr:
        """`loss`: flat arrays -> value, aux; not differentiated yet. `known`: its inputs that are constants; `moving`:
        those that it is differentiated by, None for all others."""
        if self.options.precision is not None:
            cast = precision(loss, self.options.precision)
            loss = cast.closed
            self._note(cast.note)
        if self.ring:
            found = fused(loss, known, moving)
            loss = found.closed
            for note in told(found):
                self._note(note)
        if self.options.remat is not None:
            again = remat(loss, str(self.options.remat))
            loss = again.closed
            self.rematted.append(again)
            self._note(again.note)
        if self.ring:
            loss = keeping_attention(loss)
        if self.options.precision in ("bf16", "fp16"):  # last: remat would take these for the user's own
            loss = recomputed(loss)
        return loss

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
