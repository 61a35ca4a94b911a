"""Arrays by shape, and layouts of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from ..errors import ShardError, did_you_mean, list_names
from .shard_sizes import DimAxes, MeshAxes


@dataclass(frozen=True)
class ExploredArray:
    """An array by its shape alone.

    Attributes:
        path: Path of the array.
        role: `params`, `optimizer`, `batch`, `rng` or `other`.
        shape: Size of each dimension.
        dtype: Name of the dtype.
        bits: Bits of an element; for a PRNG key, of the key data.
        classes: Class of each dimension. Dimensions of equal class are always sharded equally, as in a parameter and
            the moments; an edit applies to all.
    """

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    bits: int
    classes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        # Rounded up: an element may have fewer than 8 bits.
        return -(-prod(self.shape) * self.bits // 8)


@dataclass(frozen=True)
class ExploredLayout:
    """Layout of arrays on a mesh by a strategy.

    Attributes:
        strategy: Strategy text.
        mesh: Mesh axes with their sizes.
        cuts: Mesh axes of each dimension, by array.
        reasons: Reason of each array's layout.
    """

    strategy: str
    mesh: MeshAxes
    cuts: tuple[DimAxes, ...]
    reasons: tuple[str, ...]


def index_of(arrays: Sequence[ExploredArray], path: str) -> int:
    """Return the index of the array with a path, or with an end of the path; parameters come first.

    Args:
        arrays: Arrays to search.
        path: Path, or the last names of a path.

    Raises:
        ShardError: No array matches, or several.
    """
    paths = [a.path for a in arrays]
    if path in paths:
        return paths.index(path)
    found = [i for i, known in enumerate(paths) if known.endswith(f".{path}")]
    params = [i for i in found if arrays[i].role == "params"]
    if len(params or found) == 1:
        return (params or found)[0]
    if found:
        raise ShardError(f"several arrays end in '{path}': {list_names(paths[i] for i in found[:4])}; say which")
    raise ShardError(f"no array '{path}'; there are {len(paths)}.{did_you_mean(path, paths)}")


def linked_arrays(arrays: Sequence[ExploredArray], index: int) -> list[int]:
    """Return the indices of the arrays always laid out as the array at `index`: all dimensions are linked."""
    classes = set(arrays[index].classes)
    alike = (i for i, a in enumerate(arrays) if a.shape and classes.issuperset(a.classes))
    return [i for i in alike if i != index]


def unlinked(ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return dimension classes for arrays of these ranks, all different."""
    return [tuple(range(end - rank, end)) for rank, end in zip(ranks, accumulate(ranks), strict=True)]
