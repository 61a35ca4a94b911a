"""NNX objects among a step's arguments: opened to flat arrays, rebuilt inside the trace, written back in
place."""

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
from jax._src.state import AbstractRef  # jax has no public form of it
from jax.tree_util import GetAttrKey, KeyPath, SequenceKey

from ..errors import ShardError

ONE = jax.tree.structure(0)
Source = tuple[str, int]  # ("in", i): the i-th flat input, untouched; ("out", o): the o-th flat output

# `Variable.set_raw_value` asks twice whether the trace is still the Variable's own, 2 us each time; the
# caller of `write_back` has asked once for all of them.
_put = vars(nnx.Variable)["_raw_value"].__set__
_value = attrgetter("_raw_value")
_metadata = attrgetter("_var_metadata")
_PLAIN = (str, bytes, int, float, complex, NoneType, type, FunctionType, np.ndarray)


def is_node(x: Any) -> bool:
    """Return whether an object is NNX's own. A bare `jax.Ref`, which NNX follows as well, is none."""
    return not isinstance(x, (jax.Ref, AbstractRef)) and graphlib.is_graph_node(x)


def is_object(x: Any) -> bool:
    """Whether `x` is an NNX object with attributes. A Variable is none: it is a pytree of its value."""
    return is_node(x) and not isinstance(x, nnx.Variable)


@dataclass(frozen=True)
class Nodes:
    """The NNX objects of one call, opened together so that what they share stays shared.

    `holders` are the Variables (or bare arrays) of all `roots` in order, each once, and `structures` the
    trees of their values (most hold one array). `index` numbers every object.
    """

    roots: tuple[Any, ...]
    root_paths: tuple[KeyPath, ...]
    graphdefs: tuple[Any, ...]
    holders: tuple[Any, ...]
    paths: tuple[KeyPath, ...]
    structures: tuple[Any, ...]
    index: Any

    def leaves(self) -> list[Any]:
        return [x for h in self.holders for x in jax.tree.leaves(value_of(h))]


@dataclass(frozen=True)
class Held:
    """A holder after the step: its place among the inputs' holders, None if new, and its values' sources."""

    place: Any
    sources: tuple[Source, ...]
    structure: Any

    @property
    def changed(self) -> bool:
        return any(kind == "out" for kind, _ in self.sources)

    def value(self, leaves: Sequence[Any], outs: Sequence[Any]) -> Any:
        found = [leaves[i] if kind == "in" else outs[i] for kind, i in self.sources]
        return found[0] if self.structure == ONE else self.structure.unflatten(found)


@dataclass(frozen=True)
class Update:
    """What the step does to the objects it is given, and which objects it gives back.

    `same`: structure and static attributes stay as they are, so that the `changed` values are all there is
    to write back; otherwise the arguments are rebuilt from `after`. `returned` are the objects in the
    step's result; `refers` says that one of them is, or contains, an argument.
    """

    same: bool
    changed: tuple[Held, ...]
    after: tuple[tuple[Any, tuple[Held, ...]], ...]
    returned: tuple[tuple[Any, tuple[Held, ...]], ...]
    refers: bool


def value_of(holder: Any) -> Any:
    return holder.get_raw_value() if isinstance(holder, nnx.Variable) else holder


def open_nodes(roots: Sequence[Any], root_paths: Sequence[KeyPath]) -> Nodes:
    """Open NNX objects. Raises `ShardError` for Variables that hold a mutable reference."""
    index, graphdefs, holders, paths = graphlib.RefMap(), [], [], []
    for root, above in zip(roots, root_paths, strict=True):
        graphdef, flat = nnx.flatten(root, ref_index=index, graph=True)
        graphdefs.append(graphdef)
        holders += flat.leaves
        paths += [(*above, *map(_key, path)) for path in flat.paths]
    for holder, path in zip(holders, paths, strict=True):
        if isinstance(holder, nnx.Variable) and (holder.ref or holder.hijax):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ShardError(
                f"{name} is a Variable with ref=True or hijax=True; a step takes plain Variables only"
            )
    structures = tuple(jax.tree.structure(value_of(h)) for h in holders)
    return Nodes(
        tuple(roots), tuple(root_paths), tuple(graphdefs), tuple(holders), tuple(paths), structures, index
    )


def _key(key: Any) -> Any:
    return SequenceKey(key) if isinstance(key, int) else GetAttrKey(str(key))


def described(nodes: Nodes, donated: Sequence[bool]) -> list[tuple[KeyPath, Any, bool]]:
    """Per flat leaf its path (`model.linear.kernel`, without the Variable's `.value`), the partitioning
    noted on its Variable, and `donated` of its root."""
    owners = [
        d for d, graphdef in zip(donated, nodes.graphdefs, strict=True) for _ in range(graphdef.num_leaves)
    ]
    return [
        ((*path, *inner), noted, owner)
        for path, holder, owner in zip(nodes.paths, nodes.holders, owners, strict=True)
        for noted in [partitioning(holder)]
        for inner, _ in jax.tree_util.tree_flatten_with_path(value_of(holder))[0]
    ]


def random(nodes: Nodes) -> list[bool]:
    """Per flat leaf whether it is of a generator of random numbers, a key or the count of its uses."""
    return [
        isinstance(holder, nnx.RngState)
        for holder in nodes.holders
        for _ in jax.tree.leaves(value_of(holder))
    ]


def partitioning(box: Any) -> Any:
    """The PartitionSpec that a Variable or a Linen box carries, logical names mapped by its rules; None
    without."""
    if isinstance(box, nnx.Variable):
        noted, rules = box.get_metadata("out_sharding", None), box.get_metadata("sharding_rules", None)
    else:
        noted, rules = getattr(box, "names", None), getattr(box, "rules", None)
    return get_pspec(noted, rules) if noted else None


class Inside:
    """The objects as the traced step sees them: copies that hold the trace's values, sharing what is
    shared."""

    def __init__(self, nodes: Nodes, leaves: Sequence[Any]):
        values, left = [], iter(leaves)
        for s in nodes.structures:
            values.append(s.unflatten([next(left) for _ in range(s.num_leaves)]))
        refs, self.roots, at = graphlib.IndexMap(), [], 0
        for graphdef in nodes.graphdefs:
            part = values[at : at + graphdef.num_leaves]
            self.roots.append(nnx.unflatten(graphdef, part, index_ref=refs))
            at += graphdef.num_leaves
        self._nodes, self._leaves = nodes, list(leaves)
        self._outer = graphlib.RefMap.from_indexmap(refs)
        holders = open_nodes(self.roots, [()] * len(self.roots)).holders
        self._place = {id(h): i for i, h in enumerate(holders) if isinstance(h, nnx.Variable)}

    def update(
        self, returned: Sequence[Any], returned_paths: Sequence[KeyPath], outs: list, out_paths: list
    ) -> Update:
        """After the step: append what changed, and the arrays of `returned` objects, to `outs`."""
        nodes, index = self._nodes, graphlib.RefMap()
        starts = [0]
        for s in nodes.structures:
            starts.append(starts[-1] + s.num_leaves)
        bare = {
            (p, k): starts[i] + k
            for i, p in enumerate(nodes.paths)
            for k in range(nodes.structures[i].num_leaves)
        }

        def held(holder: Any, path: KeyPath) -> Held:
            place = self._place.get(id(holder)) if isinstance(holder, nnx.Variable) else None
            if place is not None:
                path = nodes.paths[place]
            sources = []
            for k, (inner, x) in enumerate(jax.tree_util.tree_flatten_with_path(value_of(holder))[0]):
                i = bare.get((path, k))
                if i is not None and self._leaves[i] is x:
                    sources.append(("in", i))
                else:
                    sources.append(("out", len(outs)))
                    outs.append(x)
                    out_paths.append((*path, *inner))
            return Held(place, tuple(sources), jax.tree.structure(value_of(holder)))

        def close(node: Any, path: KeyPath) -> tuple[Any, tuple[Held, ...]]:
            graphdef, flat = nnx.flatten(node, ref_index=index, ref_outer_index=self._outer, graph=True)
            found = zip(flat.paths, flat.leaves, strict=True)
            return graphdef, tuple(held(h, (*path, *map(_key, inner))) for inner, h in found)

        after = tuple(close(n, p) for n, p in zip(self.roots, nodes.root_paths, strict=True))
        back = tuple(close(n, p) for n, p in zip(returned, returned_paths, strict=True))
        rows = [h for _, hs in after for h in hs]
        same = (
            tuple(g.with_no_outer_index() for g, _ in after) == nodes.graphdefs
            and tuple(h.structure for h in rows) == nodes.structures
            and not any(h.place is None and h.changed for h in rows)
        )
        refers = any(
            type(n) is graphlib.NodeRef or n.outer_index is not None for g, _ in back for n in g.nodes
        )
        return Update(same, tuple(h for h in rows if h.changed), after, back, refers)


def write_back(nodes: Nodes, update: Update, leaves: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """Do to the user's objects what the step did to its copies; gives back the objects in the step's
    result."""
    known = (
        graphlib.IndexMap.from_refmap(nodes.index)
        if update.refers or not update.same
        else graphlib.IndexMap()
    )
    if update.same:
        for held in update.changed:
            _put(nodes.holders[held.place], held.value(leaves, outs))
        made = graphlib.IndexMap(known)
    else:
        made = graphlib.IndexMap()
        for after in update.after:
            _rebuild(after, leaves, outs, made, known)
    return [_rebuild(back, leaves, outs, made, known) for back in update.returned]


def _rebuild(
    closed: tuple[Any, tuple[Held, ...]], leaves: Sequence, outs: Sequence, made: Any, known: Any
) -> Any:
    graphdef, holders = closed
    values = [h.value(leaves, outs) for h in holders]
    return nnx.unflatten(graphdef, values, index_ref=made, outer_index_outer_ref=known)


def give_back(update: Update, leaves: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """The objects in a result that contain none of the step's arguments."""
    made, known = graphlib.IndexMap(), graphlib.IndexMap()
    return [_rebuild(back, leaves, outs, made, known) for back in update.returned]


def move(node: Any, put: Callable[[list[Any]], Sequence[Any]]) -> None:
    """Let `put` move all arrays of an object, in place."""
    arrays, structure = jax.tree.flatten(nnx.state(node))
    nnx.update(node, structure.unflatten(put(arrays)))


def has_arrays(x: Any) -> bool:
    """Whether `x` is an NNX object, state or Variable, of which `as_dicts` takes the arrays."""
    return is_node(x) or isinstance(x, nnx.State)


def as_dicts(x: Any) -> Any:
    """The arrays of an NNX object or state in nested dicts, by the names of attributes; of a Variable its value."""
    if isinstance(x, nnx.Variable):
        return x.get_raw_value()
    return nnx.to_pure_dict(x if isinstance(x, nnx.State) else nnx.state(x))


def settle(nodes: Nodes, before: Sequence[Any], placed: Sequence[Any]) -> None:
    """Leave arrays that were moved to their devices in the Variables they came from: the same values,
    placed once."""
    at = 0
    for holder, s in zip(nodes.holders, nodes.structures, strict=True):
        if s == ONE and isinstance(holder, nnx.Variable) and placed[at] is not before[at]:
            _put(holder, placed[at])
        at += s.num_leaves


def fill(nodes: Nodes, leaves: Sequence[Any]) -> None:
    """Put other values into the Variables of objects, in place."""
    left = iter(leaves)
    for holder, s in zip(nodes.holders, nodes.structures, strict=True):
        _put(holder, s.unflatten([next(left) for _ in range(s.num_leaves)]))


class Watch:
    """Tells in well under a millisecond whether NNX objects are what they were: same Variables, same
    attributes.

    It holds the objects' attribute dictionaries and containers, not the objects themselves, and compares
    what they contain by identity. `watchable` is False where a value could change unseen or moves from call
    to call.
    """

    def __init__(self, nodes: Nodes):
        self._roots = tuple(map(self._reference, nodes.roots))
        self.holders = nodes.holders
        self.watchable = all(isinstance(h, nnx.Variable) for h in nodes.holders) and set(
            nodes.structures
        ) <= {ONE}
        self._dicts: list[dict] = []
        self._lists: list[list] = []
        seen: set[int] = set()
        todo = list(nodes.roots)
        while todo:
            value = todo.pop()
            if id(value) not in seen:
                seen.add(id(value))
                todo += self._open(value)
        self._sizes, self._keys, self._values = self._contents()
        self._metadata = [dict(m) for m in map(_metadata, self.holders)]

    def _reference(self, root: Any) -> Callable[[], Any]:
        """A weak reference where the object allows one (a bare Variable does not)."""
        if not isinstance(root, nnx.Pytree):
            return lambda: root
        watch = weakref.ref(self)
        return weakref.ref(root, lambda _: (found := watch()) and found.forget())

    def forget(self) -> None:
        """Let go of the parts of an object that nobody has any more."""
        self.holders, self._dicts, self._lists, self._values, self._metadata = (), [], [], [], []

    def _open(self, value: Any) -> Iterable[Any]:
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
        children = jax.tree.leaves(value, is_leaf=lambda x: x is not value)
        if is_node(value):
            self.watchable = False
        if not children or children[0] is value:
            return ()
        self._dicts.append(getattr(value, "__dict__", {}))
        return children

    def _contents(self) -> tuple[list[int], list[Any], list[Any]]:
        boxes = chain(self._dicts, self._lists)
        values = chain(
            chain.from_iterable([d.values() for d in self._dicts]), chain.from_iterable(self._lists)
        )
        return list(map(len, boxes)), list(chain.from_iterable(self._dicts)), list(values)

    def roots(self) -> tuple[Any, ...]:
        return tuple(ref() for ref in self._roots)

    def same(self, roots: Sequence[Any]) -> bool:
        """Are `roots` the objects it was made for, unchanged but for their Variables' values?"""
        if not all(ref() is root for ref, root in zip(self._roots, roots, strict=True)):
            return False
        sizes, keys, values = self._contents()
        return (
            sizes == self._sizes
            and all(map(is_, keys, self._keys))
            and all(map(is_, values, self._values))
            and list(map(_metadata, self.holders)) == self._metadata
        )

    def values(self) -> list[Any]:
        return list(map(_value, self.holders))

    def put(self, places: Sequence[int], values: Iterable[Any]) -> None:
        for place, value in zip(places, values, strict=True):
            _put(self.holders[place], value)
