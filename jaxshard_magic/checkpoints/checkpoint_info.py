"""Description of a checkpoint, saved beside the arrays; and values as JSON, in which small arrays become text, exact to
the bit."""

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..device_arrays import to_numpy
from ..errors import ShardError
from ..packages import versions

FORMAT = 1  # of the JSON that `to_json` returns
VERSIONS = ("jax", "flax", "orbax-checkpoint", "jaxshard_magic")
_ARRAY = "__array__"


@dataclass(frozen=True)
class SavedLeaf:
    """Name, shape and dtype of one array of a state.

    Attributes:
        path: Name in the state, such as `params.Dense_0.kernel`.
        shape: Shape; for typed PRNG keys without the dimension of the key data.
        dtype: numpy's name of the dtype; `key<fry>` and the like for typed PRNG keys.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.path} {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class CheckpointInfo:
    """Description of one checkpoint.

    Attributes:
        step: Number of calls of the step before the save.
        strategy: Strategy of the state's layout, as text.
        mesh: Mesh of the state's layout, as text.
        leaves: Arrays of the state.
        versions: Versions of jax, flax, orbax-checkpoint and jaxshard_magic, by name.
        when: Local time, ISO 8601.
        data: Source of the position in the data: "grain", "state" or "count"; None if the position is unknown.
    """

    step: int
    strategy: str
    mesh: str
    leaves: tuple[SavedLeaf, ...]
    versions: Mapping[str, str] = field(default_factory=lambda: versions(VERSIONS))
    when: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds"))
    data: str | None = None

    @property
    def hash(self) -> str:
        """16 hexadecimal digits of paths, shapes and dtypes: equal for states of one kind."""
        return hash_of(self.leaves)

    def to_json(self) -> dict[str, Any]:
        """Return the description in the types of JSON.

        >>> info = CheckpointInfo(3, "fsdp", "data=8", (SavedLeaf("w", (8, 4), "float32"),))
        >>> CheckpointInfo.from_json(info.to_json()) == info
        True
        """
        return {"format": FORMAT, "hash": self.hash, **json.loads(json.dumps(asdict(self)))}

    @classmethod
    def from_json(cls, told: Any) -> "CheckpointInfo":
        """Return the description that `to_json` gave.

        Raises:
            ShardError: The value has another format's number, leaves other than those of its hash, or is damaged.
        """
        kind = told.get("format") if isinstance(told, Mapping) else None
        # Another version can read another format; damaged data no version can.
        if isinstance(kind, int) and kind != FORMAT:
            raise ShardError(
                f"it was saved in format {kind}, and this jaxshard_magic reads format {FORMAT}: install the version "
                "that saved it"
            )
        try:
            leaves = tuple(_leaf(**row) for row in told["leaves"])
            if told["hash"] != hash_of(leaves):
                raise ShardError("what is told of its arrays is damaged: its hash is of others")
            versions = {str(name): str(version) for name, version in told["versions"].items()}
            strategy, mesh, when = (str(told[name]) for name in ("strategy", "mesh", "when"))
            data = None if told["data"] is None else str(told["data"])
            return cls(int(told["step"]), strategy, mesh, leaves, versions, when, data)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise ShardError("what is told of it is damaged") from None


def _leaf(path: str, shape: Sequence[int], dtype: str) -> SavedLeaf:
    """Return a leaf from its row of JSON. Raises TypeError."""
    if not isinstance(path, str) or not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in shape):
        raise TypeError
    return SavedLeaf(path, tuple(shape), dtype)


def hash_of(leaves: Sequence[SavedLeaf]) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of paths, shapes and dtypes, in any order."""
    rows = sorted([leaf.path, list(leaf.shape), leaf.dtype] for leaf in leaves)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def to_json_value(value: Any) -> Any:
    """Return a value in the types of JSON.

    Args:
        value: Dicts (keys become text), lists, tuples (which come back as lists), numbers, text, None and arrays.

    Raises:
        TypeError: The value has another type in it.

    >>> from_json_value(to_json_value({"n": 1, "x": np.ones(2, "float32")}))
    {'n': 1, 'x': array([1., 1.], dtype=float32)}
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(k): to_json_value(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(v) for v in value]
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.ascontiguousarray(to_numpy(value)).reshape(np.shape(value))
        return {_ARRAY: [array.dtype.name, list(array.shape), b64encode(array.tobytes()).decode()]}
    raise TypeError(f"{type(value).__name__} is nothing that JSON can say")


def from_json_value(value: Any) -> Any:
    """Return the value that was given to `to_json_value`, with numpy arrays."""
    if isinstance(value, dict) and set(value) == {_ARRAY}:
        dtype, shape, text = value[_ARRAY]
        # Over bytes instead of a bytearray, numpy's array would be read-only.
        return np.frombuffer(bytearray(b64decode(text)), jnp.dtype(dtype)).reshape(shape)
    if isinstance(value, dict):
        return {k: from_json_value(v) for k, v in value.items()}
    return [from_json_value(v) for v in value] if isinstance(value, list) else value
