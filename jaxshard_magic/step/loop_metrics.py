"""Add loop metrics (step time, loss, returned scalars) to the programs of a step."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..config.request import Request
from ..program.unwrap import UnwrappedStep
from .loop_monitor import LoopMonitor
from .step_programs import StepPrograms

if TYPE_CHECKING:
    from ..live import MetricsRow


class MonitoredPrograms(StepPrograms):
    """Programs of a step, with a monitor for their calls.

    Args:
        step: Unwrapped train step.
        request: Strategy, mesh and options.
    """

    def __init__(self, step: UnwrappedStep, request: Request):
        super().__init__(step, request)
        self.watch: LoopMonitor | None = None  # monitor of the next call; None without one
        self._last_watch: LoopMonitor | None = None  # the newest monitor
        self._loop_watch: LoopMonitor | None = None  # monitor of the loop before the newest

    def settle(self) -> None:
        """Wait for running calls and read their metrics, so that later time is not counted as step time.

        Raises the exceptions of functions passed to `on_metrics`.
        """
        self.loops.settle()
        for watch in filter(None, (self._loop_watch, self._last_watch)):
            watch.settle()

    def followed(self, watch: LoopMonitor) -> None:
        """Use `watch` as the monitor from the next call on."""
        if watch is not self._last_watch:
            self._loop_watch = self.watched
        self.watch = self._last_watch = watch

    @property
    def watched(self) -> LoopMonitor | None:
        """Monitor of the last loop; a single call after a loop doesn't count as a loop. None before the first."""
        newest, before = self._last_watch, self._loop_watch
        if newest is None or before is None:
            return newest
        return newest if newest.calls >= min(2, before.calls) else before

    def on_metrics(self, write: "Callable[[MetricsRow], object] | None" = None) -> None:
        """Record returned scalars and step times of later calls as `report().metrics`; a `%%shard` cell does so by
        default.

        Args:
            write: Called with a `MetricsRow` for each call with known results: `step` (from 1 on), `time` in seconds
                and `values` by name. Later calls of the step call it, in their own thread, and raise its exceptions
                before they run.

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
            LoopMonitor().follow(self)
        if write is not None and self.watch is not None:
            self.watch.writers.append(write)
