"""`%shard abstract`: replace arrays of the notebook by their shapes, and free their memory."""

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
from ..introspect import is_a, own_dict
from ..program.argument_errors import has_array_attributes
from ..program.flatten_call import aval_key, nnx_objects
from ..program.memory_kinds import shape_in_memory
from ..views.format import byte_text

_OUTPUT = re.compile(r"_\d+")  # IPython's name of a cell's output; `%xdel` of it deletes its other names, too
_HISTORY = re.compile(r"_{1,3}|_oh|Out|" + _OUTPUT.pattern)
_CLOSED = {"IPython", "ipykernel", "ipywidgets", "traitlets"}  # objects of the shell refer to everything


def abstract(value: Any) -> Any:
    """Return `value` with a `jax.ShapeDtypeStruct`, without sharding, in place of every array.

    Numbers and other leaves without arrays stay. NNX objects are copied, so the given objects do not change.

    >>> abstract([np.zeros((4, 8), np.float32), 3])
    [ShapeDtypeStruct(shape=(4, 8), dtype=float32), 3]

    Args:
        value: Any pytree; NNX objects may be among the leaves.

    Raises:
        ShardError: A leaf has arrays and is no pytree.
    """
    return _to_shapes({"the value": value})["the value"]


def abstract_names(namespace: MutableMapping[str, Any], names: Sequence[str]) -> list[str]:
    """Replace the values of `names` by their shapes, and report the freed bytes.

    All names are checked before the first value is changed. Objects shared by several values stay shared.

    Args:
        namespace: The notebook's namespace, changed in place.
        names: Names to replace; repetitions are ignored.

    Returns:
        One line for each name: bytes freed, and names or outputs of cells still holding the other bytes.

    Raises:
        ShardError: No names are given, a name is unknown, or a value has no arrays or some out of reach.
    """
    names = list(dict.fromkeys(names))
    if not names:
        raise ShardError("%shard abstract needs names of the notebook's: %shard abstract state batch")
    found = _collect_arrays(namespace, names)
    namespace.update(_to_shapes({f.name: namespace[f.name] for f in found if f.arrays}))
    # Arrays in reference cycles are freed by the garbage collector alone; without this call they would be reported as
    # held.
    gc.collect()
    elsewhere = _holders(namespace, {id(x): x for f in found for x in f.living()})
    return [_line(f, elsewhere, namespace) for f in found]


@dataclass(eq=False)
class _NamedArrays:
    """Arrays found under one name before the replacement.

    Attributes:
        name: Name in the notebook.
        arrays: Number of arrays.
        shapes: Number of leaves that are shapes already.
        owners: Weak references to arrays that own memory, each with the bytes on all devices; arrays under an earlier
            name are left out.
    """

    name: str
    arrays: int
    shapes: int
    owners: list[tuple[weakref.ref, int]] = field(default_factory=list)

    def living(self) -> list[Any]:
        """Return the owners not freed so far."""
        return [x for ref, _ in self.owners if (x := ref()) is not None]


def _collect_arrays(namespace: MutableMapping[str, Any], names: Sequence[str]) -> list[_NamedArrays]:
    """Collect the arrays under `names`; raise `ShardError`, before any change, for a name without reachable arrays."""
    found, seen = [], set()
    for name in names:
        if name not in namespace:
            near = did_you_mean(name, [n for n in namespace if not n.startswith("_")])
            raise ShardError(f"the notebook has no name '{name}'.{near} Nothing was changed")
        leaves = _array_leaves(name, namespace[name])
        arrays = [x for x in leaves if not isinstance(x, jax.ShapeDtypeStruct)]
        if not leaves:
            kind = type(namespace[name]).__name__
            raise ShardError(f"'{name}' is a {kind} and holds no arrays that jax knows of. Nothing was changed")
        one = _NamedArrays(name, len(arrays), len(leaves) - len(arrays))
        for x in map(_owner, arrays):
            if id(x) not in seen:
                seen.add(id(x))
                one.owners.append((weakref.ref(x), _bytes(x)))
        found.append(one)
    return found


def _array_leaves(name: str, value: Any) -> list[Any]:
    """Return the arrays and shapes in `value`. Raise `ShardError` if a leaf hides arrays from jax."""
    leaves = []
    for x in jax.tree.leaves(value, is_leaf=_is_node):
        if _is_node(x):
            leaves += nnx_objects().open_nodes([x], [(jax.tree_util.GetAttrKey(name),)]).leaves()
        else:
            leaves.append(x)
    for x in leaves:
        if not _is_array(x) and has_array_attributes(x):
            kind = type(x).__name__
            raise ShardError(
                f"'{name}' has arrays in a {kind}, which jax does not know as a pytree, so that they can't be "
                "reached. Nothing was changed; register it, or give its arrays names of their own"
            )
    return [x for x in leaves if _is_array(x) or isinstance(x, jax.ShapeDtypeStruct)]


def _to_shapes(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with shapes in place of arrays."""
    leaves, tree = jax.tree.flatten(values, is_leaf=_is_node)
    # All NNX objects are opened at once: opened one by one, the copies would no longer share their variables.
    places = [i for i, x in enumerate(leaves) if _is_node(x)]
    shapes = [_shape(x) for x in leaves]
    if places:
        nodes = nnx_objects().open_nodes([leaves[i] for i in places], [()] * len(places))
        made = nnx_objects().TracedObjects(nodes, [_shape(x) for x in nodes.leaves()]).roots
        for i, node in zip(places, made, strict=True):
            shapes[i] = node
    return tree.unflatten(shapes)


def _shape(x: Any) -> Any:
    if not _is_array(x):
        return x
    return shape_in_memory(*aval_key(x))


def _is_array(x: Any) -> bool:
    """Return whether `x` is a jax or numpy array with a dtype known to jax."""
    if isinstance(x, np.ndarray):
        return x.dtype.kind not in "OSUMm"
    return isinstance(x, jax.Array)


def _is_node(x: Any) -> bool:
    return "flax.nnx" in sys.modules and nnx_objects().is_node(x)


def _owner(x: Any) -> Any:
    """Return the array that owns the memory of `x`: for a numpy view the base, otherwise `x`."""
    while isinstance(x, np.ndarray) and isinstance(x.base, np.ndarray):
        x = x.base
    return x


def _bytes(x: Any) -> int:
    """Return the bytes of an array on all addressable devices together."""
    if isinstance(x, np.ndarray):
        return x.nbytes
    if x.is_deleted():
        return 0
    shard = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return shard * len(x.sharding.addressable_devices)


def _holders(namespace: MutableMapping[str, Any], living: dict[int, Any]) -> dict[int, list[str]]:
    """Return, for each array still alive, the notebook's names that lead to it.

    Args:
        namespace: The notebook's namespace.
        living: Arrays by id.
    """
    held: dict[int, list[str]] = {i: [] for i in living}
    if not living:
        return held
    # Functions refer to the globals of their module, and through these everything is reachable.
    closed = {id(own_dict(m)) for m in list(sys.modules.values())} | {id(namespace), id(living)}
    for name, value in list(namespace.items()):
        for i in _reachable_ids(value, held.keys(), closed):
            held[i].append(name)
    return held


def _reachable_ids(value: Any, wanted: Iterable[int], closed: set[int]) -> set[int]:
    """Return the ids out of `wanted` reachable from `value` through objects, containers and closures."""
    wanted, seen, todo = set(wanted), set(closed), [value]
    while todo:
        x = todo.pop()
        # Types, modules and objects of the shell lead to everything, so every name would appear to hold every array.
        if id(x) in seen or is_a(x, (type, types.ModuleType)) or _package(x) in _CLOSED:
            continue
        seen.add(id(x))
        if is_a(x, np.ndarray):
            todo += () if x.base is None else (x.base,)
        elif not is_a(x, jax.Array):
            todo += gc.get_referents(x)
    return wanted & (seen - closed)


def _package(x: Any) -> str:
    """Return the top-level package of the type of `x`."""
    return str(type(x).__module__).partition(".")[0]


def _line(found: _NamedArrays, elsewhere: dict[int, list[str]], namespace: Mapping[str, Any]) -> str:
    """Return the line printed for one name."""
    count = f"{found.name}: {found.arrays} array{'s' * (found.arrays != 1)}"
    if not found.arrays:
        return f"{found.name}: {found.shapes} shape{'s' * (found.shapes != 1)} already, nothing to free"
    freed = sum(n for ref, n in found.owners if ref() is None)
    held = [(ref(), n) for ref, n in found.owners if ref() is not None]
    text = f"{count}, {byte_text(freed)} freed (now shapes)"
    if not held:
        return text
    names = list(dict.fromkeys(name for x, _ in held for name in elsewhere[id(x)]))
    return f"{text}; {byte_text(sum(n for _, n in held))} still held {_holders_text(names, namespace)}"


def _holders_text(names: Sequence[str], namespace: Mapping[str, Any]) -> str:
    """Return a text with the holders of memory not freed, and the commands that free the memory."""
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
    """Return whether jax finds arrays or NNX objects among the leaves of `value`."""
    return any(_is_node(x) or _is_array(x) for x in jax.tree.leaves(value, is_leaf=_is_node))
