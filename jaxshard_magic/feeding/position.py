"""Position of a loop in its data, in JSON form."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ShardError

KINDS = ("grain", "state", "count")
_BYTES_KEY = "bytes in base64"


@dataclass(frozen=True)
class Position:
    """Position of a loop in its data.

    Attributes:
        kind: One of `KINDS`.
        passes: Number of batches of each loop.
        state: State of the loader's iterator; None where batches are counted.
    """

    kind: str
    passes: tuple[int, ...]
    state: Any

    @property
    def batches(self) -> int:
        """Batches of all loops together."""
        return sum(self.passes)

    def to_json(self) -> dict[str, Any]:
        """Return the position as JSON data. Raises `ShardError` for a state that cannot be written as JSON."""
        state = None if self.state is None else state_to_json(self.state)
        return {"kind": self.kind, "batches": self.batches, "passes": list(self.passes), "state": state}


def state_kind(loader: Any) -> str:
    """Return the `kind` of a position with this loader's iterator state."""
    return "grain" if type(loader).__module__.partition(".")[0] == "grain" else "state"


def state_to_json(state: Any) -> Any:
    """Return a loader's state as JSON data; bytes become base64. Raises `ShardError` for any other state."""
    if isinstance(state, bytes):
        return {_BYTES_KEY: base64.b64encode(state).decode()}
    # `json` makes lists of tuples and text of number keys, without an error.
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


def parse_position(position: Mapping[str, Any]) -> Position:
    """Return the position written by `Feed.position`. Raises `ShardError` for anything else."""
    try:
        kind, passes, state = position["kind"], tuple(position["passes"]), position["state"]
        fits = kind in KINDS and all(type(n) is int and n >= 0 for n in passes) and (state is None) == (kind == "count")
    except (TypeError, KeyError):
        fits = False
    if not fits:
        raise ShardError("go_to takes what position() gave: kind, batches, passes and state")
    if isinstance(state, dict) and set(state) == {_BYTES_KEY}:
        state = base64.b64decode(state[_BYTES_KEY])
    return Position(kind, passes, state)
