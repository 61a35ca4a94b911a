"""Which call of a step gave an array, for as long as that lives."""

import weakref
from collections.abc import Mapping
from typing import Any


class Origins:
    """The calls, and which of their flat outputs, that arrays came from. It keeps none of them alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, int, int]] = {}
        self._prune_at = 1024

    def add(self, call: int, outs: Mapping[int, Any]) -> None:
        """A call gave these, by their place among its outputs."""
        for o, x in outs.items():
            self._known[id(x)] = weakref.ref(x), call, o
        if len(self._known) > self._prune_at:
            self._known = {k: known for k, known in self._known.items() if known[0]() is not None}
            self._prune_at = max(1024, 2 * len(self._known))

    def of(self, x: Any) -> tuple[int, int] | None:
        """The call and the output; None for an array that no call gave."""
        known = self._known.get(id(x))
        return known[1:] if known is not None and known[0]() is x else None
