"""`Saved`: what is told of one checkpoint, beside its arrays."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from ..errors import ShardError
from ..packages import versions

FORMAT = 1  # of what `to_json` writes
VERSIONS = ("jax", "flax", "orbax-checkpoint", "jaxshard_magic")


@dataclass(frozen=True)
class SavedLeaf:
    """One array of a state.

    `path`: where it is in the state, `params.Dense_0.kernel`; `dtype` is numpy's name of it, for typed PRNG keys
    `key<fry>`, of which `shape` has the keys and not their numbers.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.path} {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Saved:
    """What is told of one checkpoint.

    `step`: after how many calls of the step it was saved. `strategy`, `mesh`: what the state was laid out by, as text.
    `versions`: of jax, flax, orbax-checkpoint and jaxshard_magic, by name. `when`: local time, ISO 8601. `data`: how
    the place in the data is known: "grain", "state", "count", or None where it is not.
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
        """16 hexadecimal digits of the paths, shapes and dtypes: equal where the states are of one kind."""
        return hash_of(self.leaves)

    def to_json(self) -> dict[str, Any]:
        """As what JSON can say.

        >>> saved = Saved(3, "fsdp", "data=8", (SavedLeaf("w", (8, 4), "float32"),))
        >>> Saved.from_json(saved.to_json()) == saved
        True
        """
        return {"format": FORMAT, "hash": self.hash, **json.loads(json.dumps(asdict(self)))}

    @classmethod
    def from_json(cls, told: Any) -> "Saved":
        """What `to_json` gave. Raises ShardError for what a newer version wrote, for leaves that are not those that its
        hash is of, and for anything else."""
        kind = told.get("format") if isinstance(told, Mapping) else None
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
    if (
        not isinstance(path, str)
        or not isinstance(dtype, str)
        or not all(type(n) is int and n >= 0 for n in shape)
    ):
        raise TypeError
    return SavedLeaf(path, tuple(shape), dtype)


def hash_of(leaves: Sequence[SavedLeaf]) -> str:
    """16 hexadecimal digits of paths, shapes and dtypes, in any order."""
    rows = sorted([leaf.path, list(leaf.shape), leaf.dtype] for leaf in leaves)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
