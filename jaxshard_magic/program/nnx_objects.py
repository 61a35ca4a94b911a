"""Flatten NNX objects among a step's arguments, rebuild them inside the trace, and write results back in place.

Order of use: `open_nodes` flattens the objects of a call. `TracedObjects` rebuilds them from tracers. After the step,
`TracedObjects.collect_update` compares the copies with the originals. `write_back` applies the update to the user's
objects with the outputs of the compiled program. `ObjectWatch` lets later calls skip the flattening.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from types import FunctionType, NoneType
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core.spmd import get_pspec
from flax.nnx import graphlib
from jax._src.state import AbstractRef  # no public equivalent
from jax.tree_util import GetAttrKey, KeyPath, SequenceKey

from ..errors import ShardError

LEAF_TREEDEF = jax.tree.structure(0)
Source = tuple[str, int]  # ("in", i): flat input i, unchanged; ("out", o): flat output o

# `Variable.set_raw_value` checks twice that the current trace is the Variable's own, 2 us each time. The caller of
# `write_back` has checked this once for all Variables.
_set_raw_value = vars(nnx.Variable)["_raw_value"].__set__
_get_raw_value = attrgetter("_raw_value")
_get_metadata = attrgetter("_var_metadata")
_PLAIN = (str, bytes, int, float, complex, NoneType, type, FunctionType, np.ndarray)


def is_node(x: Any) -> bool:
    """Return whether an object is NNX's own. False for a bare `jax.Ref`, although NNX follows references as well."""
    return not isinstance(x, (jax.Ref, AbstractRef)) and graphlib.is_graph_node(x)


def is_object(x: Any) -> bool:
    """Return whether `x` is an NNX object with attributes. False for a Variable: a pytree of its value."""
    return is_node(x) and not isinstance(x, nnx.Variable)


@dataclass(frozen=True)
class NnxNodes:
    """NNX objects of a single call, flattened together so that shared parts stay shared.

    Attributes:
        roots: Objects among the arguments.
        root_paths: Key path of each root.
        graphdefs: NNX graph definition of each root.
        holders: Variables (or bare arrays) of all roots in order, each once.
        paths: Key path of each holder.
        structures: Treedef of each holder's value; usually a single array.
        index: NNX map from every object to its number.
    """

    roots: tuple[Any, ...]
    root_paths: tuple[KeyPath, ...]
    graphdefs: tuple[Any, ...]
    holders: tuple[Any, ...]
    paths: tuple[KeyPath, ...]
    structures: tuple[Any, ...]
    index: Any

    def leaves(self) -> list[Any]:
        """Return the arrays of all holders, flat and in order."""
        return [x for h in self.holders for x in jax.tree.leaves(raw_value(h))]


@dataclass(frozen=True)
class HolderResult:
    """Value of a holder after the step.

    Attributes:
        position: Index of the holder in `NnxNodes.holders`; None for a new holder, and for a bare array.
        sources: Source of each leaf: a flat input, untouched, or a flat output.
        structure: Treedef of the value.
    """

    position: Any
    sources: tuple[Source, ...]
    structure: Any

    @property
    def is_changed(self) -> bool:
        """True if some leaf is an output of the step."""
        return any(kind == "out" for kind, _ in self.sources)

    def value(self, leaves: Sequence[Any], outs: Sequence[Any]) -> Any:
        """Return the value of the holder, from flat inputs and flat outputs of a call."""
        values = [leaves[i] if kind == "in" else outs[i] for kind, i in self.sources]
        return values[0] if self.structure == LEAF_TREEDEF else self.structure.unflatten(values)


@dataclass(frozen=True)
class NnxUpdate:
    """Effect of a step on the NNX objects among its arguments, and the NNX objects in its result.

    Attributes:
        same_structure: Structure and static attributes of the arguments are unchanged, and so is everything but
            `changed`. Otherwise the arguments are rebuilt from `after`.
        changed: Holders with a new value.
        after: Graph definition and holders of each argument after the step.
        returned: Graph definition and holders of each object in the step's result.
        returns_arguments: An object in the result is, or contains, an argument.
    """

    same_structure: bool
    changed: tuple[HolderResult, ...]
    after: tuple[tuple[Any, tuple[HolderResult, ...]], ...]
    returned: tuple[tuple[Any, tuple[HolderResult, ...]], ...]
    returns_arguments: bool


def raw_value(holder: Any) -> Any:
    """Return the value of a Variable, or a bare array unchanged."""
    return holder.get_raw_value() if isinstance(holder, nnx.Variable) else holder


def open_nodes(roots: Sequence[Any], root_paths: Sequence[KeyPath]) -> NnxNodes:
    """Flatten NNX objects together.

    Args:
        roots: Objects to flatten.
        root_paths: Key path of each.

    Raises:
        ShardError: A Variable holds a mutable reference (`ref=True` or `hijax=True`).
    """
    # One index for all roots, so that an object shared by several is flattened once.
    index, graphdefs, holders, paths = graphlib.RefMap(), [], [], []
    for root, above in zip(roots, root_paths, strict=True):
        graphdef, flat = nnx.flatten(root, ref_index=index, graph=True)
        graphdefs.append(graphdef)
        holders += flat.leaves
        paths += [(*above, *map(_path_key, path)) for path in flat.paths]
    for holder, path in zip(holders, paths, strict=True):
        if isinstance(holder, nnx.Variable) and (holder.ref or holder.hijax):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ShardError(f"{name} is a Variable with ref=True or hijax=True; a step takes plain Variables only")
    structures = tuple(jax.tree.structure(raw_value(h)) for h in holders)
    return NnxNodes(tuple(roots), tuple(root_paths), tuple(graphdefs), tuple(holders), tuple(paths), structures, index)


def _path_key(key: Any) -> Any:
    return SequenceKey(key) if isinstance(key, int) else GetAttrKey(str(key))


def describe_leaves(nodes: NnxNodes, donated: Sequence[bool]) -> list[tuple[KeyPath, Any, bool]]:
    """Return (path, partitioning, donated) of each flat leaf.

    The path reads as `model.linear.kernel`, without the Variable's `.value`. The partitioning is the PartitionSpec
    noted on the leaf's Variable, or None.

    Args:
        nodes: Flattened objects.
        donated: Whether each root is donated.
    """
    owners = [d for d, graphdef in zip(donated, nodes.graphdefs, strict=True) for _ in range(graphdef.num_leaves)]
    return [
        ((*path, *inner), noted, owner)
        for path, holder, owner in zip(nodes.paths, nodes.holders, owners, strict=True)
        for noted in [partition_spec(holder)]
        for inner, _ in jax.tree_util.tree_flatten_with_path(raw_value(holder))[0]
    ]


def random_state_flags(nodes: NnxNodes) -> list[bool]:
    """Return, for each flat leaf, whether a random number generator holds it: a key or a count of uses."""
    return [isinstance(holder, nnx.RngState) for holder in nodes.holders for _ in jax.tree.leaves(raw_value(holder))]


def partition_spec(box: Any) -> Any:
    """Return the PartitionSpec of a Variable or a Linen box, logical names mapped by its rules; None without."""
    if isinstance(box, nnx.Variable):
        names, rules = box.get_metadata("out_sharding", None), box.get_metadata("sharding_rules", None)
    else:
        names, rules = getattr(box, "names", None), getattr(box, "rules", None)
    return get_pspec(names, rules) if names else None


class TracedObjects:
    """Copies of NNX objects that hold the values of a trace; shared parts stay shared.

    Args:
        nodes: Flattened objects of the call.
        leaves: Tracers for the arrays of `nodes`.
    """

    def __init__(self, nodes: NnxNodes, leaves: Sequence[Any]):
        values, remaining = [], iter(leaves)
        for structure in nodes.structures:
            values.append(structure.unflatten([next(remaining) for _ in range(structure.num_leaves)]))
        refs, self.roots, start = graphlib.IndexMap(), [], 0
        for graphdef in nodes.graphdefs:
            part = values[start : start + graphdef.num_leaves]
            self.roots.append(nnx.unflatten(graphdef, part, index_ref=refs))
            start += graphdef.num_leaves
        self._nodes, self._leaves = nodes, list(leaves)
        self._outer = graphlib.RefMap.from_indexmap(refs)
        holders = open_nodes(self.roots, [()] * len(self.roots)).holders
        self._positions = {id(h): i for i, h in enumerate(holders) if isinstance(h, nnx.Variable)}

    def collect_update(
        self, returned: Sequence[Any], returned_paths: Sequence[KeyPath], outs: list, out_paths: list
    ) -> NnxUpdate:
        """Return the update of the objects after the step.

        Appends changed arrays, and the arrays of returned objects, to `outs`, and their key paths to `out_paths`.

        Args:
            returned: NNX objects in the step's result.
            returned_paths: Key path of each.
            outs: Flat outputs of the step so far.
            out_paths: Key paths of `outs`.
        """
        nodes, index = self._nodes, graphlib.RefMap()
        starts = [0]
        for s in nodes.structures:
            starts.append(starts[-1] + s.num_leaves)
        leaf_positions = {
            (p, k): starts[i] + k for i, p in enumerate(nodes.paths) for k in range(nodes.structures[i].num_leaves)
        }

        def holder_result(holder: Any, path: KeyPath) -> HolderResult:
            position = self._positions.get(id(holder)) if isinstance(holder, nnx.Variable) else None
            # A Variable that the step moved to another attribute counts under its first path.
            if position is not None:
                path = nodes.paths[position]
            sources = []
            for k, (inner, x) in enumerate(jax.tree_util.tree_flatten_with_path(raw_value(holder))[0]):
                i = leaf_positions.get((path, k))
                # An unchanged leaf is still the same tracer object.
                if i is not None and self._leaves[i] is x:
                    sources.append(("in", i))
                else:
                    sources.append(("out", len(outs)))
                    outs.append(x)
                    out_paths.append((*path, *inner))
            return HolderResult(position, tuple(sources), jax.tree.structure(raw_value(holder)))

        def flatten(node: Any, path: KeyPath) -> tuple[Any, tuple[HolderResult, ...]]:
            graphdef, flat = nnx.flatten(node, ref_index=index, ref_outer_index=self._outer, graph=True)
            items = zip(flat.paths, flat.leaves, strict=True)
            return graphdef, tuple(holder_result(h, (*path, *map(_path_key, inner))) for inner, h in items)

        after = tuple(flatten(n, p) for n, p in zip(self.roots, nodes.root_paths, strict=True))
        returned_after = tuple(flatten(n, p) for n, p in zip(returned, returned_paths, strict=True))
        results = [h for _, hs in after for h in hs]
        # The new definitions refer to the objects of before; compared are those without such references.
        same_structure = (
            tuple(g.with_no_outer_index() for g, _ in after) == nodes.graphdefs
            and tuple(h.structure for h in results) == nodes.structures
            and not any(h.position is None and h.is_changed for h in results)
        )
        returns_arguments = any(
            type(n) is graphlib.NodeRef or n.outer_index is not None for g, _ in returned_after for n in g.nodes
        )
        return NnxUpdate(
            same_structure, tuple(h for h in results if h.is_changed), after, returned_after, returns_arguments
        )


def write_back(nodes: NnxNodes, update: NnxUpdate, leaves: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """Apply a step's update to the user's objects, in place; return the objects in the step's result.

    Args:
        nodes: Flattened objects of the call.
        update: Update found by the trace.
        leaves: Flat inputs of the call.
        outs: Flat outputs of the call.
    """
    original_objects = (
        graphlib.IndexMap.from_refmap(nodes.index)
        if update.returns_arguments or not update.same_structure
        else graphlib.IndexMap()
    )
    if update.same_structure:
        for holder in update.changed:
            _set_raw_value(nodes.holders[holder.position], holder.value(leaves, outs))
        new_objects = graphlib.IndexMap(original_objects)
    else:
        new_objects = graphlib.IndexMap()
        for after in update.after:
            _rebuild(after, leaves, outs, new_objects, original_objects)
    return [_rebuild(back, leaves, outs, new_objects, original_objects) for back in update.returned]


def _rebuild(
    flattened: tuple[Any, tuple[HolderResult, ...]],
    leaves: Sequence,
    outs: Sequence,
    new_objects: Any,
    original_objects: Any,
) -> Any:
    """Build an object from its graph definition and holders."""
    graphdef, holders = flattened
    values = [h.value(leaves, outs) for h in holders]
    return nnx.unflatten(graphdef, values, index_ref=new_objects, outer_index_outer_ref=original_objects)


def build_returned(update: NnxUpdate, leaves: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """Return the NNX objects in a result, for results that contain none of the step's arguments.

    Args:
        update: Update found by the trace.
        leaves: Flat inputs of the call.
        outs: Flat outputs of the call.
    """
    new_objects, original_objects = graphlib.IndexMap(), graphlib.IndexMap()
    return [_rebuild(back, leaves, outs, new_objects, original_objects) for back in update.returned]


def move_arrays(node: Any, put: Callable[[list[Any]], Sequence[Any]]) -> None:
    """Replace all arrays of an object by those that `put` returns, in place."""
    arrays, structure = jax.tree.flatten(nnx.state(node))
    nnx.update(node, structure.unflatten(put(arrays)))


def has_arrays(x: Any) -> bool:
    """Return whether `to_dicts` can read `x`: an NNX object, state or Variable."""
    return is_node(x) or isinstance(x, nnx.State)


def to_dicts(x: Any) -> Any:
    """Return the arrays of an NNX object or state in nested dicts by attribute name; of a Variable, its value."""
    if isinstance(x, nnx.Variable):
        return x.get_raw_value()
    return nnx.to_pure_dict(x if isinstance(x, nnx.State) else nnx.state(x))


def store_placed_arrays(nodes: NnxNodes, before: Sequence[Any], placed: Sequence[Any]) -> None:
    """Store arrays put on their devices in the Variables they came from, so that equal values are put once.

    Args:
        nodes: Flattened objects of the call.
        before: Flat arrays before they were put on devices.
        placed: Flat arrays on their devices.
    """
    start = 0
    for holder, structure in zip(nodes.holders, nodes.structures, strict=True):
        if structure == LEAF_TREEDEF and isinstance(holder, nnx.Variable) and placed[start] is not before[start]:
            _set_raw_value(holder, placed[start])
        start += structure.num_leaves


def set_values(nodes: NnxNodes, leaves: Sequence[Any]) -> None:
    """Set the values of all Variables of flattened objects, in place."""
    left = iter(leaves)
    for holder, s in zip(nodes.holders, nodes.structures, strict=True):
        _set_raw_value(holder, s.unflatten([next(left) for _ in range(s.num_leaves)]))


class ObjectWatch:
    """Fast check, well below a millisecond, of whether NNX objects have the same Variables and attributes as before.

    Holds the attribute dictionaries and containers of the objects, not the objects themselves, and compares contents by
    identity. `is_watchable` is False for objects with a value that could change unseen or that moves from call to call.

    Args:
        nodes: Flattened objects of a call.
    """

    def __init__(self, nodes: NnxNodes):
        self._roots = tuple(map(self._reference, nodes.roots))
        self.holders = nodes.holders
        self.is_watchable = all(isinstance(h, nnx.Variable) for h in nodes.holders) and set(nodes.structures) <= {
            LEAF_TREEDEF
        }
        self._dicts: list[dict] = []
        self._lists: list[list] = []
        seen: set[int] = set()  # objects may refer to each other in cycles
        pending = list(nodes.roots)
        while pending:
            value = pending.pop()
            if id(value) not in seen:
                seen.add(id(value))
                pending += self._record(value)
        self._sizes, self._keys, self._values = self._contents()
        self._metadata = [dict(m) for m in map(_get_metadata, self.holders)]

    def _reference(self, root: Any) -> Callable[[], Any]:
        """Return a weak reference to a root; a strong reference to a bare Variable, which allows no weak ones."""
        if not isinstance(root, nnx.Pytree):
            return lambda: root
        # A strong reference from the callback would form a cycle with this watch.
        watch = weakref.ref(self)
        return weakref.ref(root, lambda _: (found := watch()) and found.clear())

    def clear(self) -> None:
        """Drop all contents of an object that has been collected."""
        self.holders, self._dicts, self._lists, self._values, self._metadata = (), [], [], [], []

    def _record(self, value: Any) -> Iterable[Any]:
        """Record a container and return its children; a leaf has none."""
        if isinstance(value, _PLAIN):
            return ()
        if isinstance(value, dict):
            self._dicts.append(value)
            return value.values()
        if isinstance(value, list):
            self._lists.append(value)
            return value
        if isinstance(value, tuple):
            return value
        if isinstance(value, (nnx.Variable, jax.Array)):
            return ()
        if is_node(value) and hasattr(value, "__dict__"):
            self._dicts.append(vars(value))
            return vars(value).values()
        # One level of a pytree: all but `value` itself count as leaves.
        children = jax.tree.leaves(value, is_leaf=lambda x: x is not value)
        if is_node(value):
            self.is_watchable = False
        if not children or children[0] is value:
            return ()
        self._dicts.append(getattr(value, "__dict__", {}))
        return children

    def _contents(self) -> tuple[list[int], list[Any], list[Any]]:
        """Return sizes, dictionary keys and values of all recorded containers."""
        boxes = chain(self._dicts, self._lists)
        values = chain(chain.from_iterable([d.values() for d in self._dicts]), chain.from_iterable(self._lists))
        return list(map(len, boxes)), list(chain.from_iterable(self._dicts)), list(values)

    def roots(self) -> tuple[Any, ...]:
        """Return the objects; None for each that has been collected."""
        return tuple(ref() for ref in self._roots)

    def is_unchanged(self, roots: Sequence[Any]) -> bool:
        """Return whether `roots` are the recorded objects, unchanged except for the values of their Variables."""
        if not all(ref() is root for ref, root in zip(self._roots, roots, strict=True)):
            return False
        sizes, keys, values = self._contents()
        # By identity, since `==` of arrays is elementwise.
        return (
            sizes == self._sizes
            and all(map(is_, keys, self._keys))
            and all(map(is_, values, self._values))
            and list(map(_get_metadata, self.holders)) == self._metadata
        )

    def values(self) -> list[Any]:
        """Return the values of all Variables."""
        return list(map(_get_raw_value, self.holders))

    def set_values(self, places: Sequence[int], values: Iterable[Any]) -> None:
        """Set the values of the Variables at some positions."""
        for place, value in zip(places, values, strict=True):
            _set_raw_value(self.holders[place], value)
