"""Planned layouts of a step's arrays: of the strategy alone, and with edits by hand."""

import time
from collections.abc import Callable

from jax.sharding import Mesh

from ..errors import ShardError
from ..search.trials import described
from .array import ExploredLayout
from .explored_step import ExploredStep

SLOW = 1.0  # seconds; slower planning is not repeated at every edit


class PlannedLayouts:
    """Last planned layouts of an explorer. Methods take the mesh as a function, which may raise ShardError.

    Args:
        stepped: The step; None for arrays without a step.
        laid: First layout.
        note: Reason why no layout could be planned, or another remark.

    Attributes:
        strategy_layout: Last planned layout of the strategy alone.
        edited_layout: Layout with the edits by hand, under which other arrays may change too; None if not planned.
    """

    def __init__(self, stepped: ExploredStep | None, laid: ExploredLayout, note: str = ""):
        self._stepped, self._seconds = stepped, 0.0
        self.strategy_layout, self.edited_layout = laid, None
        self._notes = [note, ""]

    @property
    def note(self) -> str:
        """Reason why a layout could not be planned, in one line; empty if both could."""
        return next(filter(None, self._notes), "")

    def plan(self, line: str, mesh: Callable[[], Mesh]) -> None:
        """Plan the layout of the strategy alone. On failure the previous layout stays.

        Args:
            line: `%%shard` line of the strategy.
            mesh: Function that makes the mesh.
        """
        found, why = self._planned(line, mesh)
        self.strategy_layout, self.edited_layout, self._notes = found or self.strategy_layout, None, [why, ""]

    def plan_edited(self, line: str | None, mesh: Callable[[], Mesh], *, anyway: bool = False) -> None:
        """Plan the layout with the edits by hand.

        Nothing is planned after a failed plan, nor where the last planning took longer than a second.

        Args:
            line: `%%shard` line with the edits; None without edits.
            mesh: Function that makes the mesh.
            anyway: Plan even where planning is slow.
        """
        self.edited_layout, self._notes[1] = None, ""
        if line is not None and not self._notes[0] and (anyway or self._seconds < SLOW):
            self.edited_layout, self._notes[1] = self._planned(line, mesh)

    def _planned(self, line: str, mesh: Callable[[], Mesh]) -> tuple[ExploredLayout | None, str]:
        """Return the layout of a line, or None and the reason. Times the planning."""
        assert self._stepped is not None
        start = time.perf_counter()
        try:
            return self._stepped.plan(line, mesh()), ""
        except ShardError as error:
            return None, " ".join(str(error).split())
        except Exception as error:  # the step's own code may raise under this strategy
            return None, described(error)
        finally:
            self._seconds = time.perf_counter() - start
