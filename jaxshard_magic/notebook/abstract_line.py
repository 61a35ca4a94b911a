"""`%shard abstract`: arrays of the notebook turned into their shapes, and their memory freed."""

import gc
import math
import re
import sys
import types
import weakref
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ..errors import ShardError, did_you_mean
from ..program.memory_kinds import shape_in
from ..program.peel import aval, holds_arrays, nnx_calls
from ..views.format import byte_text

_OUTPUT = re.compile(r"_\d+")  # IPython's name for what one cell gave; %xdel of it finds its other names, too
_HISTORY = re.compile(r"_{1,3}|_oh|Out|" + _OUTPUT.pattern)
_CLOSED = {"IPython", "ipykernel", "ipywidgets", "traitlets"}  # the shell leads to everything


def abstract(value: Any) -> Any:
    """`value` with a `jax.ShapeDtypeStruct` in the place of every array, without its sharding.

    value: any pytree, NNX objects among its leaves; these are made anew, the given ones stay as they are. Numbers
    and what else is no array stay. Raises `ShardError` for a leaf that holds arrays and is no pytree.

    >>> abstract([np.zeros((4, 8), np.float32), 3])
    [ShapeDtypeStruct(shape=(4, 8), dtype=float32), 3]
    """
    return _abstracted({"the value": value})["the value"]


def abstract_names(namespace: MutableMapping[str, Any], names: Sequence[str]) -> list[str]:
    """Replace the values of `names` by their shapes; a line of each that says what was freed.

    Objects that several of the values share stay shared. All names are looked at before the first is changed.
    Raises `ShardError` for a name that is not there and for a value without arrays, or with some that can't be
    reached.
    """
    names = list(dict.fromkeys(names))
    if not names:
        raise ShardError("%shard abstract needs names of the notebook's: %shard abstract state batch")
    found = _found(namespace, names)
    namespace.update(_abstracted({f.name: namespace[f.name] for f in found if f.arrays}))
    gc.collect()
    elsewhere = _holders(namespace, {id(x): x for f in found for x in f.living()})
    return [_line(f, elsewhere, namespace) for f in found]


@dataclass(eq=False)
class _Found:
    """What stood under a name. `arrays` counts its arrays; `owners` are weak references to those that no name
    before it has, each with its bytes on all devices."""

    name: str
    arrays: int
    shapes: int
    owners: list[tuple[weakref.ref, int]] = field(default_factory=list)

    def living(self) -> list[Any]:
        return [x for ref, _ in self.owners if (x := ref()) is not None]


def _found(namespace: MutableMapping[str, Any], names: Sequence[str]) -> list[_Found]:
    found, seen = [], set()
    for name in names:
        if name not in namespace:
            near = did_you_mean(name, [n for n in namespace if not n.startswith("_")])
            raise ShardError(f"the notebook has no name '{name}'.{near} Nothing was changed")
        leaves = _array_leaves(name, namespace[name])
        arrays = [x for x in leaves if not isinstance(x, jax.ShapeDtypeStruct)]
        if not leaves:
            kind = type(namespace[name]).__name__
            raise ShardError(
                f"'{name}' is a {kind} and holds no arrays that jax knows of. Nothing was changed"
            )
        one = _Found(name, len(arrays), len(leaves) - len(arrays))
        for x in map(_owner, arrays):
            if id(x) not in seen:
                seen.add(id(x))
                one.owners.append((weakref.ref(x), _bytes(x)))
        found.append(one)
    return found


def _array_leaves(name: str, value: Any) -> list[Any]:
    """The arrays and shapes in `value`. Raises `ShardError` where some are out of reach."""
    leaves = []
    for x in jax.tree.leaves(value, is_leaf=_is_node):
        if _is_node(x):
            leaves += nnx_calls().open_nodes([x], [(jax.tree_util.GetAttrKey(name),)]).leaves()
        else:
            leaves.append(x)
    for x in leaves:
        if not _is_array(x) and holds_arrays(x):
            kind = type(x).__name__
            raise ShardError(
                f"'{name}' has arrays in a {kind}, which jax does not know as a pytree, so that they can't be "
                "reached. Nothing was changed; register it, or give its arrays names of their own"
            )
    return [x for x in leaves if _is_array(x) or isinstance(x, jax.ShapeDtypeStruct)]


def _abstracted(values: dict[str, Any]) -> dict[str, Any]:
    """The values with shapes for arrays; NNX objects of all of them in one go, so that they stay one graph."""
    leaves, tree = jax.tree.flatten(values, is_leaf=_is_node)
    places = [i for i, x in enumerate(leaves) if _is_node(x)]
    shapes = [_shape(x) for x in leaves]
    if places:
        nodes = nnx_calls().open_nodes([leaves[i] for i in places], [()] * len(places))
        made = nnx_calls().Inside(nodes, [_shape(x) for x in nodes.leaves()]).roots
        for i, node in zip(places, made, strict=True):
            shapes[i] = node
    return tree.unflatten(shapes)


def _shape(x: Any) -> Any:
    if not _is_array(x):
        return x
    return shape_in(*aval(x))


def _is_array(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return x.dtype.kind not in "OSUMm"
    return isinstance(x, jax.Array)


def _is_node(x: Any) -> bool:
    return "flax.nnx" in sys.modules and nnx_calls().is_node(x)


def _owner(x: Any) -> Any:
    """The array whose memory `x` shows: of a numpy view the one that it is of."""
    while isinstance(x, np.ndarray) and isinstance(x.base, np.ndarray):
        x = x.base
    return x


def _bytes(x: Any) -> int:
    """On all devices together."""
    if isinstance(x, np.ndarray):
        return x.nbytes
    if x.is_deleted():
        return 0
    shard = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return shard * len(x.sharding.addressable_devices)


def _holders(namespace: MutableMapping[str, Any], living: dict[int, Any]) -> dict[int, list[str]]:
    """For each array that lives on: the notebook's names that lead to it."""
    held: dict[int, list[str]] = {i: [] for i in living}
    if not living:
        return held
    closed = {id(getattr(m, "__dict__", None)) for m in list(sys.modules.values())} | {
        id(namespace),
        id(living),
    }
    for name, value in list(namespace.items()):
        for i in _reached(value, held.keys(), closed):
            held[i].append(name)
    return held


def _reached(value: Any, wanted: Iterable[int], closed: set[int]) -> set[int]:
    """Those of the `wanted` that are in `value`, objects, containers and closures looked through."""
    wanted, seen, todo = set(wanted), set(closed), [value]
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, (type, types.ModuleType)) or _package(x) in _CLOSED:
            continue
        seen.add(id(x))
        if isinstance(x, np.ndarray):
            todo += () if x.base is None else (x.base,)
        elif not isinstance(x, jax.Array):
            todo += gc.get_referents(x)
    return wanted & (seen - closed)


def _package(x: Any) -> str:
    return str(type(x).__module__).partition(".")[0]


def _line(found: _Found, elsewhere: dict[int, list[str]], namespace: Mapping[str, Any]) -> str:
    count = f"{found.name}: {found.arrays} array{'s' * (found.arrays != 1)}"
    if not found.arrays:
        return f"{found.name}: {found.shapes} shape{'s' * (found.shapes != 1)} already, nothing to free"
    freed = sum(n for ref, n in found.owners if ref() is None)
    held = [(ref(), n) for ref, n in found.owners if ref() is not None]
    text = f"{count}, {byte_text(freed)} freed (now shapes)"
    if not held:
        return text
    names = list(dict.fromkeys(name for x, _ in held for name in elsewhere[id(x)]))
    return f"{text}; {byte_text(sum(n for _, n in held))} still held {_by(names, namespace)}"


def _by(names: Sequence[str], namespace: Mapping[str, Any]) -> str:
    """Who holds what was not freed, and what frees it."""
    users = [name for name in names if not _HISTORY.fullmatch(name)]
    outputs = [name for name in names if _OUTPUT.fullmatch(name)]
    parts = []
    if users:
        shown = [name for name in users if _shows_arrays(namespace[name])]
        lines = [f"%shard abstract {' '.join(shown)}"] if shown else []
        lines += [f"del {name}" for name in users if name not in shown]
        parts.append(f"by {', '.join(users)}: {' and '.join(lines)} frees it")
    if outputs:
        parts.append(f"by outputs of cells: {' and '.join(f'%xdel {name}' for name in outputs)} frees it")
    elif len(users) < len(names):
        parts.append("by the history of outputs: %reset -f out frees it")
    return ", and ".join(parts) or "outside the notebook's names"


def _shows_arrays(value: Any) -> bool:
    return any(_is_node(x) or _is_array(x) for x in jax.tree.leaves(value, is_leaf=_is_node))
