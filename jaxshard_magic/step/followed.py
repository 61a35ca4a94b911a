"""`Followed`: programs whose calls somebody follows, and the numbers of their loops."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..config.request import Request
from ..program.unwrap import Step
from .programs import Programs
from .watch import Watch

if TYPE_CHECKING:
    from ..live import Row


class Followed(Programs):
    """Programs, and the watches that follow their calls: what the last loop gave, and how it went."""

    def __init__(self, step: Step, request: Request):
        super().__init__(step, request)
        self.watch: Watch | None = None  # follows its calls
        self._newest: Watch | None = None  # followed them last
        self._counted: Watch | None = None  # that of the loop before

    def settle(self) -> None:
        """Wait for the calls that are under way, and read their numbers: what passes from here on is no time of theirs.
        Raises what those raise who take rows."""
        self.loops.settle()
        for watch in filter(None, (self._counted, self._newest)):
            watch.settle()

    def followed(self, watch: Watch) -> None:
        """Be followed by `watch` from here on."""
        if watch is not self._newest:
            self._counted = self.watched
        self.watch = self._newest = watch

    @property
    def watched(self) -> Watch | None:
        """What followed its last loop; a single call after a loop is none."""
        newest, before = self._newest, self._counted
        if newest is None or before is None:
            return newest
        return newest if newest.calls >= min(2, before.calls) else before

    def on_metrics(self, write: "Callable[[Row], object] | None" = None) -> None:
        """Keep what the step returns and how its loop goes from here on, as `report().metrics`; a `%%shard` cell does
        so by itself.

        Args:
            write: called with a `Row` for each call whose numbers were read: its `step`, from 1 on, the `time` in
                seconds and the `values` by name. It is called by later calls of the step, in their thread, and what it
                raises they raise, before they run.

        >>> import jaxshard_magic
        >>> import jax.numpy as jnp
        >>> step = jaxshard_magic.shard(lambda w: (w / 2, {"norm": jnp.sum(w)}), "fsdp", mesh="cpu:8 data=8")
        >>> rows = []
        >>> step.on_metrics(rows.append)
        >>> half, norm = step(jnp.ones(64))
        >>> step.report().metrics["norm"].last, [(row.step, row.values) for row in rows]
        ((64.0,), [(1, {'norm': 64.0})])
        """
        if self.watch is None:
            Watch().follow(self)
        if write is not None and self.watch is not None:
            self.watch.writers.append(write)
