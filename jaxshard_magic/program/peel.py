"""One call of any step, taken apart: a pure function of flat arrays, their names, and the way back."""

import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from types import ModuleType, NoneType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.tree_util import GetAttrKey, KeyPath, SequenceKey, tree_flatten_with_path

from ..errors import ShardError
from .memory_kinds import memory_kind, on_host, shape_in
from .trace import path_name
from .unwrap import NUMBERS, Step

if TYPE_CHECKING:
    from .nnx_calls import Nodes, Update

RETURN = GetAttrKey("return")
_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision")  # they change what a step traces to
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@dataclass(frozen=True)
class Result:
    """How the step's result is put together from its flat outputs; known once the step was traced.

    Each of `leaves` is ("out", o), the o-th output, ("held", value) or ("node", k), the k-th NNX object.
    """

    tree: Any  # a PyTreeDef
    leaves: tuple[tuple[str, Any], ...]
    update: "Update | None"

    @property
    def plain(self) -> bool:
        """Is the result all arrays, and nothing written back?"""
        return self.update is None and self._all_outs

    @property
    def held(self) -> "dict[KeyPath, Any]":
        """The leaves that are no arrays, by their paths."""
        places = self.tree.unflatten(range(len(self.leaves)))
        by_path = {}
        for path, k in jax.tree_util.tree_flatten_with_path(places)[0]:
            kind, value = self.leaves[k]
            if kind == "held":
                by_path[RETURN, *path] = value
        return by_path

    @cached_property
    def _all_outs(self) -> bool:
        return all(kind == "out" for kind, _ in self.leaves)

    def build(self, outs: Sequence[Any], nodes: Sequence[Any] = ()) -> Any:
        if self._all_outs:
            return self.tree.unflatten(outs[: len(self.leaves)])
        parts = {"out": outs, "node": nodes}
        return self.tree.unflatten([v if kind == "held" else parts[kind][v] for kind, v in self.leaves])


@dataclass(frozen=True)
class Peeled:
    """One call of a step, taken apart.

    `statics` are the parameters that the user's own jit holds; `tree` is what is left of (args, kwargs). Of
    its leaves those at `array_places` are traced, those at `node_places` are NNX objects, opened as
    `nodes`, and `held` stay Python values. The flat inputs `leaves` are the objects' arrays, then the
    traced leaves. Calls with equal `key` run the same program; equal `loose` says that they differ in held
    numbers at most.
    """

    step: Step
    positions: tuple[int, ...]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    statics: Mapping[int | str, Any]
    tree: Any  # a PyTreeDef
    array_places: tuple[int, ...]
    node_places: tuple[int, ...]
    held: Mapping[int, Any]
    nodes: "Nodes | None"
    leaves: list[Any]
    key: Hashable
    loose: Hashable

    @property
    def all_traced(self) -> bool:
        return not (self.node_places or self.held or self.statics)

    @property
    def given(self) -> tuple[int, tuple[str, ...]]:
        """How many arguments the caller gave by position, and the names of the others."""
        _, kwargs = self.tree.children()[1].node_data()  # nothing is made of classes of the user's
        names = [name for name in self.statics if isinstance(name, str)]
        positions = len(self.positions) + len(self.statics) - len(names) - len(self.step.bound)
        return positions, tuple(name for name in (*kwargs, *names) if name not in self.step.bound_names)

    @property
    def node_leaves(self) -> int:
        """How many of the flat inputs are NNX objects' own."""
        return len(self.leaves) - len(self.array_places)

    def keys_with(self, avals: Sequence[Hashable]) -> tuple[Hashable, Hashable]:
        """`key` and `loose` of the same call with flat inputs of other shapes, each as `aval` has it."""
        (fixed, held), (_, loosely) = self.key, self.loose  # pyright: ignore[reportGeneralTypeIssues]
        fixed = (*fixed[:3], tuple(avals), *fixed[4:])
        return (fixed, held), (fixed, loosely)

    def fun(self, *leaves: Any) -> tuple[list[Any], list[KeyPath], Result]:
        """The step: flat arrays -> (flat arrays, their paths, how the result is made of them)."""
        full = dict(self.held)
        full.update(zip(self.array_places, leaves[self.node_leaves :], strict=True))
        inside = None
        if self.nodes is not None:
            inside = nnx_calls().Inside(self.nodes, leaves[: self.node_leaves])
            full.update(zip(self.node_places, inside.roots, strict=True))
        [*args], kwargs = self.tree.unflatten([full[i] for i in range(self.tree.num_leaves)])
        for i in sorted(k for k in self.statics if isinstance(k, int)):
            args.insert(i, self.statics[i])
        named = {k: v for k, v in self.statics.items() if isinstance(k, str)}
        return self._close(on_host(self.step.inner(*args, **kwargs, **named), self.step.on_host), inside)

    def _close(self, result: Any, inside: Any) -> tuple[list[Any], list[KeyPath], Result]:
        outs, paths, leaves, returned, returned_paths = [], [], [], [], []
        is_node = node_test(self.step)
        for path, x, _ in _described(result, is_node):
            if is_node(x):
                leaves.append(("node", len(returned)))
                returned.append(x)
                returned_paths.append((RETURN, *path))
            elif _is_traced(x, self.step):
                leaves.append(("out", len(outs)))
                outs.append(x)
                paths.append((RETURN, *path))
            else:
                leaves.append(("held", x))
        if returned and inside is None:
            inside = nnx_calls().Inside(nnx_calls().open_nodes((), ()), ())
        update = inside.update(returned, returned_paths, outs, paths) if inside is not None else None
        return outs, paths, Result(jax.tree.structure(result, is_leaf=is_node), tuple(leaves), update)

    def as_shapes(self) -> "Peeled":
        """The same call with shapes in the place of its arrays. It keeps none of them alive, and none of its NNX
        objects: it can be traced, and not be run."""
        nodes = None if self.nodes is None else replace(self.nodes, roots=(), holders=(), index=None)
        call = replace(self, leaves=specs(self.leaves), arguments=((), {}), nodes=nodes)
        call.__dict__["inputs"] = self.inputs  # they are read off the arguments
        return call

    @cached_property
    def inputs(self) -> list[tuple[KeyPath, Any, bool]]:
        """Per flat input: its path (the first key is the parameter's name), the partitioning that Flax
        keeps with it or None, and whether the user's own jit donates it."""
        named = _named(self.step, self.positions)
        rows = []
        for path, _, noted in _described(self.arguments, node_test(self.step)):
            parameter, key = named(path)
            rows.append(((key, *path[2:]), noted, self.step.donates(parameter)))
        arrays = [rows[i] for i in self.array_places]
        if self.nodes is None:
            return arrays
        donated = [rows[i][2] for i in self.node_places]
        return [*nnx_calls().described(self.nodes, donated), *arrays]


def peel(step: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Peeled:
    """Take one call of `step` apart.

    Raises `ShardError` for arguments that can be neither traced nor held.
    """
    arguments, statics, positions = split(step, args, kwargs)
    is_node = node_test(step)
    leaves, tree = jax.tree.flatten(arguments, is_leaf=is_node)
    node_places = tuple(i for i, x in enumerate(leaves) if is_node(x))
    array_places = tuple(i for i, x in enumerate(leaves) if _is_traced(x, step))
    held = {i: x for i, x in enumerate(leaves) if i not in {*node_places, *array_places}}
    _refuse(step, positions, arguments, held)
    nodes = None
    if node_places:
        paths = _named_paths(step, positions, arguments)
        nodes = nnx_calls().open_nodes([leaves[i] for i in node_places], [paths[i] for i in node_places])
    flat = [*(nodes.leaves() if nodes is not None else ()), *(leaves[i] for i in array_places)]
    fixed = (
        tree,
        tuple((k, _static_key(v, step, k)) for k, v in statics.items()),
        nodes and (tuple(map(_GraphKey, nodes.graphdefs)), nodes.structures),
        tuple(map(aval, flat)),
        tuple(getattr(jax.config, name) for name in _SETTINGS),
    )
    keys = {i: held_key(x, step.names) for i, x in held.items()}
    loose = (
        fixed,
        tuple((i, type(held[i]) if type(held[i]) in NUMBERS - {bool} else k) for i, k in keys.items()),
    )
    key = fixed, tuple(keys.items())
    return Peeled(
        step, positions, arguments, statics, tree, array_places, node_places, held, nodes, flat, key, loose
    )


def split(
    step: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], dict[int | str, Any], tuple[int, ...]]:
    """(args, kwargs) with what the step's wrappers bring and without its static parameters, those, and the
    positions of the arguments left."""
    args, kwargs = (*step.bound, *args), {**step.bound_names, **kwargs}
    if not step.static:
        return (args, kwargs), {}, tuple(range(len(args)))
    static = {n % len(args) if isinstance(n, int) and n < 0 and args else n for n in step.static}
    statics: dict[int | str, Any] = {i: x for i, x in enumerate(args) if i in static}
    statics.update({k: v for k, v in kwargs.items() if k in static})
    positions = tuple(i for i in range(len(args)) if i not in static)
    left = tuple(args[i] for i in positions), {k: v for k, v in kwargs.items() if k not in static}
    return left, statics, positions


def _is_traced(x: Any, step: Step) -> bool:
    if isinstance(x, np.ndarray):
        return x.dtype.kind not in "OSUMm"
    return isinstance(x, _ARRAYS) or type(x) in step.numbers


def aval(x: Any) -> tuple[tuple[int, ...], Any, bool, str | None]:
    """Shape, dtype, weak type and memory kind: what decides whether two calls run the same program."""
    kind = memory_kind(x)
    if isinstance(x, jax.Array):
        return x.shape, x.dtype, getattr(x, "weak_type", False), kind  # typed keys have none
    if isinstance(x, jax.ShapeDtypeStruct):  # may have a dtype that an array would not get
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        return x.shape, dtype, bool(x.weak_type), kind
    of = jax.typeof(x)
    return of.shape, of.dtype, of.weak_type, kind


def specs(leaves: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """What to trace with: no array's sharding gets into the program, but for the memory that it lies in."""
    return [shape_in(*each) for each in map(aval, leaves)]


def held_key(value: Any, names: frozenset[str] = frozenset(), depth: int = 3) -> Hashable:
    """A key for a Python value that the program is made for. Raises TypeError for values that can change.

    An object that is equal only to itself counts as changed when one of its attributes among `names` has
    (those that the step's code mentions), objects in objects down to `depth`.
    """
    if isinstance(value, float):
        return float, value.hex()  # so that nan is itself and -0.0 is not 0.0
    if isinstance(value, tuple):
        return type(value), tuple(held_key(x, names, depth) for x in value)
    try:
        hash(value)
    except TypeError:
        if isinstance(value, list):
            return list, tuple(held_key(x, names, depth) for x in value)
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(held_key(x, names, depth) for x in value)
        if isinstance(value, Mapping):
            return type(value), tuple((held_key(k), held_key(v, names, depth)) for k, v in value.items())
        if is_dataclass(value) or isinstance(value, SimpleNamespace):
            return type(value), tuple((k, held_key(v, names, depth)) for k, v in vars(value).items())
        raise
    attributes = getattr(value, "__dict__", None)
    if type(value).__hash__ is not object.__hash__ or not attributes or not depth or callable(value):
        return type(value), value
    read = [(k, attributes[k]) for k in sorted(names & attributes.keys())]
    return type(value), value, tuple((k, held_key(v, names, depth - 1)) for k, v in read if _is_setting(v))


def _is_setting(value: Any) -> bool:
    """Can this attribute change what the step does, and be compared?"""
    return isinstance(value, (bool, int, float, complex, str, tuple, list, dict, NoneType)) or (
        hasattr(value, "__dict__") and not callable(value)
    )


def _static_key(value: Any, step: Step, name: int | str) -> Hashable:
    try:
        hash(value)
    except TypeError:
        raise ShardError(
            f"{step.name}: the static argument {name} is a {type(value).__name__}, which can't be hashed; "
            "pass something hashable, a tuple instead of a list for example"
        ) from None
    return held_key(value)


def _refuse(step: Step, positions: Sequence[int], arguments: Any, held: Mapping[int, Any]) -> None:
    """Raise for the first leaf that can be neither traced nor held."""
    if not held:
        return
    paths = [path_name(path) for path in _named_paths(step, positions, arguments)]
    for i, value in held.items():
        kind = type(value).__name__
        if isinstance(value, np.ndarray):
            raise ShardError(
                f"{step.name}: {paths[i]} is a numpy array of dtype {value.dtype}, which no device can hold; "
                "take it out of the step's arguments"
            )
        if holds_arrays(value):
            raise ShardError(
                f"{step.name}: {paths[i]} is a {kind}, which jax does not know as a pytree, so that its "
                "arrays can't be sharded; register it, or pass its arrays",
                fix=f"jax.tree_util.register_dataclass({kind})" if is_dataclass(value) else None,
            )
        try:
            held_key(value, step.names)
        except TypeError:
            raise ShardError(
                f"{step.name}: {paths[i]} is a {kind}, neither an array nor hashable; pass its arrays, or "
                "make it hashable"
            ) from None


def holds_arrays(value: Any) -> bool:
    if isinstance(value, (type, ModuleType)) or (callable(value) and not is_dataclass(value)):
        return False
    return any(isinstance(x, _ARRAYS) for x in jax.tree.leaves(list(getattr(value, "__dict__", {}).values())))


class _GraphKey:
    """A graphdef as a key. Its hash takes milliseconds, so it is taken once; NNX keeps lists among its static
    attributes, too, which have none."""

    __slots__ = ("_graphdef", "_hash")

    def __init__(self, graphdef: Any):
        self._graphdef = graphdef
        try:
            self._hash = hash(graphdef)
        except TypeError:
            attributes = tuple((k, held_key(getattr(a, "value", a))) for k, a in graphdef.attributes)
            self._graphdef = tuple(graphdef.nodes), attributes
            self._hash = hash(self._graphdef)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: Any) -> bool:
        return (
            isinstance(other, _GraphKey) and self._hash == other._hash and self._graphdef == other._graphdef
        )


def _named(step: Step, positions: Sequence[int]) -> Callable[[KeyPath], tuple[int | str, Any]]:
    """For a path in (args, kwargs): the parameter by position or name, and the key that names it."""
    try:
        parameters = list(inspect.signature(step.inner).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    rest = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_POSITIONAL), len(parameters))

    def name(path: KeyPath) -> tuple[int | str, Any]:
        if path[0].idx == 1:
            return path[1].key, GetAttrKey(path[1].key)
        i = positions[path[1].idx]
        return i, GetAttrKey(parameters[i].name) if i < rest else SequenceKey(i - rest)

    return name


def _named_paths(step: Step, positions: Sequence[int], arguments: Any) -> list[KeyPath]:
    named = _named(step, positions)
    return [(named(path)[1], *path[2:]) for path, _, _ in _described(arguments, node_test(step))]


def _described(tree: Any, is_node: Callable[[Any], bool]) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Path, leaf and Flax partitioning of every leaf; the boxes that carry it leave no key in the path."""
    for path, x in tree_flatten_with_path(tree, is_leaf=lambda x: is_node(x) or _is_box(x))[0]:
        if is_node(x) or not _is_box(x):
            yield path, x, None
        else:
            noted = nnx_calls().partitioning(x)
            for inner, leaf in tree_flatten_with_path(x)[0]:
                yield (*path, *inner[1:]), leaf, noted


def _is_box(x: Any) -> bool:
    """An NNX Variable as a pytree, or a Linen array with partitioning (`nn.Partitioned` and its like)."""
    nnx, meta = sys.modules.get("flax.nnx"), sys.modules.get("flax.core.meta")
    return (nnx is not None and isinstance(x, nnx.Variable)) or (
        meta is not None and isinstance(x, meta.AxisMetadata)
    )


def node_test(step: Step) -> Callable[[Any], bool]:
    """Is this an NNX object that the step may change in place? Without flax imported nothing is."""
    if step.graph and "flax.nnx" in sys.modules:
        return nnx_calls().is_node
    return lambda x: False


def nnx_calls() -> ModuleType:
    """Imports flax, which nothing else here does."""
    from . import nnx_calls as module

    return module
