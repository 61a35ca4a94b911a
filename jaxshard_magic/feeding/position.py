"""Where a loop is in its data, as JSON holds it."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ShardError

KINDS = ("grain", "state", "count")
_BYTES = "bytes in base64"


@dataclass(frozen=True)
class Position:
    """`passes`: the batches of each loop; `state`: of the loader's iterator, None where batches are counted."""

    kind: str
    passes: tuple[int, ...]
    state: Any

    @property
    def batches(self) -> int:
        """Of all loops together."""
        return sum(self.passes)

    def data(self) -> dict[str, Any]:
        """As JSON holds it. Raises ShardError for a state that can't be held."""
        state = None if self.state is None else plain(self.state)
        return {"kind": self.kind, "batches": self.batches, "passes": list(self.passes), "state": state}


def kind_of(loader: Any) -> str:
    """What the state of a loader's iterator is called."""
    return "grain" if type(loader).__module__.partition(".")[0] == "grain" else "state"


def plain(state: Any) -> Any:
    """A loader's state as JSON holds it. Raises ShardError for one that it can't."""
    if isinstance(state, bytes):
        return {_BYTES: base64.b64encode(state).decode()}
    try:
        same = json.loads(json.dumps(state)) == state
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ShardError(
            f"the loader's get_state gives a {type(state).__name__} that JSON can't hold; give bytes, or dicts and "
            "lists of numbers and text"
        )
    return state


def read(position: Mapping[str, Any]) -> Position:
    """A position that `Feed.position` gave. Raises ShardError for anything else."""
    try:
        kind, passes, state = position["kind"], tuple(position["passes"]), position["state"]
        fits = (
            kind in KINDS
            and all(type(n) is int and n >= 0 for n in passes)
            and (state is None) == (kind == "count")
        )
    except (TypeError, KeyError):
        fits = False
    if not fits:
        raise ShardError("go_to takes what position() gave: kind, batches, passes and state")
    if isinstance(state, dict) and set(state) == {_BYTES}:
        state = base64.b64decode(state[_BYTES])
    return Position(kind, passes, state)
