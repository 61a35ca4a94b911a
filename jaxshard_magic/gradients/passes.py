"""Passes over a loss before differentiation, in order: precision, attention, remat, recomputation of wide values."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr

from ..config.options import GradientOptions
from .float32_recompute import recompute_float32
from .fused_attention import describe_attention, fuse_attention, save_attention_results
from .precision import cast_loss
from .remat import RematLoss, remat


@dataclass
class Passes:
    """Transformation of a loss as the options ask.

    Attributes:
        options: Options of the gradients.
        ring: Whether attention becomes a primitive that can run as a ring.
        notes: What each pass did, a line for each pass.
        rematted: Losses with remat.
    """

    options: GradientOptions
    ring: bool = False
    notes: list[str] = field(default_factory=list)
    rematted: list[RematLoss] = field(default_factory=list)

    def __call__(
        self, loss: ClosedJaxpr, known: Mapping[int, Any] | None = None, moving: Collection[int] | None = None
    ) -> ClosedJaxpr:
        """Return the transformed loss.

        Args:
            loss: Jaxpr of flat arrays with outputs `(value, aux...)`, not differentiated yet.
            known: Values of inputs that are constants, by position.
            moving: Positions of the inputs to differentiate; None for all others.
        """
        if self.options.precision is not None:
            cast = cast_loss(loss, self.options.precision)
            loss = cast.closed
            self._note(cast.note)
        if self.ring:
            found = fuse_attention(loss, known, moving)
            loss = found.closed
            for note in describe_attention(found):
                self._note(note)
        if self.options.remat is not None:
            again = remat(loss, str(self.options.remat))
            loss = again.closed
            self.rematted.append(again)
            self._note(again.note)
        if self.ring:
            # After remat, whose policies would otherwise recompute the primitive and send keys and values through the
            # ring once more.
            loss = save_attention_results(loss)
        if self.options.precision in ("bf16", "fp16"):  # last: remat would take these checkpoints for the user's own
            loss = recompute_float32(loss)
        return loss

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
