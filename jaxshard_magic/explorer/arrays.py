"""Arrays by shape, and layouts of them.

Without a step, arrays are found by name among the values of the notebook, or written as types: `f32[50257,768]`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from ..errors import ShardError, did_you_mean, list_names, parse_count
from ..program.arrays import arrays_with_paths
from ..program.flatten_call import aval_key
from ..program.sizes import element_bits
from .shard_sizes import DimAxes, MeshAxes

_TYPE = re.compile(r"(?:(?P<name>[A-Za-z_][\w.]*)=)?(?P<dtype>[A-Za-z]\w*)\[(?P<shape>[\d,\s]*)\]")
_SHORT = {"bf": "bfloat", "f": "float", "i": "int", "u": "uint", "c": "complex"}
_EXAMPLE = "f32[50257,768]"
MOST_SIZE = 10**12  # largest size of a dimension


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


def find_arrays(words: Sequence[str], namespace: Mapping[str, Any]) -> tuple[ExploredArray, ...]:
    """Return the arrays of some words of a command.

    Args:
        words: Names of values, with attributes and keys (`state.params`), and array types.
        namespace: Values of the notebook.

    Raises:
        ShardError: A name is unknown, or a value has no arrays.
    """
    found: list[tuple[str, Any]] = []
    for word in words:
        if (named := parse_array_type(word)) is not None:
            taken = {path for path, _ in found}
            name = named[0] or next(n for i in count(1) if (n := "x" if i == 1 else f"x{i}") not in taken)
            found.append((name, named[1]))
        else:
            found += _leaves(word, _value(word, namespace))
    classes = unlinked([len(aval_key(x)[0]) for _, x in found])
    return tuple(_array(path, x, own) for (path, x), own in zip(found, classes, strict=True))


def parse_array_type(word: str) -> tuple[str, jax.ShapeDtypeStruct] | None:
    """Return the name, empty if missing, and the shape of `wte=f32[50257,768]`; None for a word that is no array type.

    >>> parse_array_type("bf16[4096,4096]")
    ('', ShapeDtypeStruct(shape=(4096, 4096), dtype=bfloat16))

    Raises:
        ShardError: The element type is unknown.
    """
    if (match := _TYPE.fullmatch(word)) is None:
        return None
    short = re.fullmatch(r"(bf|f|i|u|c)(\d.*)", match["dtype"])
    name = _SHORT[short[1]] + short[2] if short else match["dtype"]
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        raise ShardError(
            f"{word}: {match['dtype']} is no type of elements; write bf16, f32, i32, ..., as in {_EXAMPLE}"
        ) from None
    shape = tuple(_size(size.strip(), word) for size in match["shape"].split(",") if size.strip())
    return match["name"] or "", jax.ShapeDtypeStruct(shape, dtype)


def _size(text: str, word: str) -> int:
    """Return a dimension. Raises ShardError for other text than a whole number up to the limit."""
    # `parse_count` accepts numbers from 1 on.
    size = parse_count(text, MOST_SIZE) if text.strip("0") else 0
    if size is None:
        raise ShardError(f"{word}: a size is a whole number from 0 to {MOST_SIZE:,}, as in {_EXAMPLE}")
    return size


def _value(word: str, namespace: Mapping[str, Any]) -> Any:
    """Return the value of a dotted name. Raises ShardError for an unknown name."""
    root, *path = word.split(".")
    if root not in namespace:
        near = did_you_mean(root, [name for name in namespace if not name.startswith("_")])
        raise ShardError(
            f"the notebook has no name '{root}'; name what holds arrays, or write a type: {_EXAMPLE}.{near}"
        )
    value = namespace[root]
    for at, name in enumerate(path):
        inner = _inner(value, name)
        # The function object stands for a missing name, as None may be a value.
        if inner is _inner:
            above = ".".join([root, *path[:at]])
            raise ShardError(f"'{above}' has no '{name}'.{did_you_mean(name, _known(value))}")
        value = inner
    return value


def _inner(value: Any, name: str) -> Any:
    """Return an attribute, item or key of a value. Missing names give the function object itself, as None may be a
    value."""
    if isinstance(value, Mapping):
        return value.get(name, _inner)
    if isinstance(value, Sequence) and name.isdecimal():
        place = parse_count(name, len(value)) if name.strip("0") else 0
        return value[place] if place is not None and place < len(value) else _inner
    return getattr(value, name, _inner)


def _known(value: Any) -> list[str]:
    """Return the public names in a value."""
    names = map(str, value) if isinstance(value, Mapping) else dir(value)
    return [name for name in names if not name.startswith("_")]


def _leaves(word: str, value: Any) -> list[tuple[str, Any]]:
    """Return the arrays and shapes in a value, each with its path. Raises ShardError where there is none."""
    found = arrays_with_paths(value, (GetAttrKey(word),))
    if not found:
        raise ShardError(
            f"'{word}' is a {type(value).__name__} and holds no arrays; name what does, or write {_EXAMPLE}"
        )
    return found


def _array(path: str, x: Any, classes: tuple[int, ...]) -> ExploredArray:
    shape, dtype, *_ = aval_key(x)
    return ExploredArray(path, "other", tuple(shape), str(dtype), element_bits(dtype), classes)
