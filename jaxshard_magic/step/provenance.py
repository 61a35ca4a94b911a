"""Record the source of arrays: the call of a step and the output."""

import weakref
from collections.abc import Mapping
from typing import Any


class Provenance:
    """Source call and flat output of arrays, in weak references."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, int, int]] = {}
        self._prune_at = 1024

    def add(self, call: int, outs: Mapping[int, Any]) -> None:
        """Record the outputs of a call.

        Args:
            call: Number of the call.
            outs: Arrays by position among the flat outputs.
        """
        for o, x in outs.items():
            self._known[id(x)] = weakref.ref(x), call, o
        if len(self._known) > self._prune_at:
            self._known = {k: known for k, known in self._known.items() if known[0]() is not None}
            self._prune_at = max(1024, 2 * len(self._known))

    def source_of(self, x: Any) -> tuple[int, int] | None:
        """Return the number of the call and the position among its outputs; None for an array from no call."""
        # Python reuses the id of a dead object.
        known = self._known.get(id(x))
        return known[1:] if known is not None and known[0]() is x else None
