"""The arrays that are laid out, and a layout of all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from ..errors import ShardError, did_you_mean, one_of
from .cuts import Axes, Cut


@dataclass(frozen=True)
class Array:
    """One array by its shape alone. `bits` are those of an element; a key's are those of its data.

    `classes` numbers its dimensions: those of the same number are stored alike, in a parameter and in its moments, and
    whoever sets one sets all.
    """

    path: str
    role: str  # params | optimizer | batch | rng | other
    shape: tuple[int, ...]
    dtype: str
    bits: int
    classes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return -(-prod(self.shape) * self.bits // 8)


@dataclass(frozen=True)
class Laid:
    """How a strategy lays arrays out on a mesh: the cut of each, and why."""

    strategy: str
    mesh: Axes
    cuts: tuple[Cut, ...]
    whys: tuple[str, ...]


def index_of(arrays: Sequence[Array], path: str) -> int:
    """The number of the array with this path or an end of it, a parameter before others. Raises ShardError where none
    has it, or several."""
    paths = [a.path for a in arrays]
    if path in paths:
        return paths.index(path)
    found = [i for i, known in enumerate(paths) if known.endswith(f".{path}")]
    params = [i for i in found if arrays[i].role == "params"]
    if len(params or found) == 1:
        return (params or found)[0]
    if found:
        raise ShardError(f"several arrays end in '{path}': {one_of(paths[i] for i in found[:4])}; say which")
    raise ShardError(f"no array '{path}'; there are {len(paths)}.{did_you_mean(path, paths)}")


def following(arrays: Sequence[Array], index: int) -> list[int]:
    """The arrays that lie as the one at `index` wherever it is put: those whose dimensions are all of its classes."""
    classes = set(arrays[index].classes)
    alike = (i for i, a in enumerate(arrays) if a.shape and classes.issuperset(a.classes))
    return [i for i in alike if i != index]


def unlinked(ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Classes for arrays of so many dimensions of which none follows another."""
    return [tuple(range(end - rank, end)) for rank, end in zip(ranks, accumulate(ranks), strict=True)]
