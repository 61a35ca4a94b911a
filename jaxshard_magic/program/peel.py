"""One call of any step, taken apart: a pure function of flat arrays, their names, and the way back."""

import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.tree_util import GetAttrKey, KeyPath, SequenceKey, tree_flatten_with_path

from ..errors import calls_users_code
from ..introspect import static_attribute
from . import in_place
from .held import Same, held_key
from .memory_kinds import memory_kind, on_host, shape_in
from .python_state import NO_INPUTS, Inputs, Kind, PythonState, Reach
from .refused import refuse, refuse_result, static_key
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

    Each of `leaves` is ("out", o), the o-th output, ("held", value) or ("node", k), the k-th NNX object. `written` is
    what the step does to lists and dicts among its arguments.
    """

    tree: Any  # a PyTreeDef
    leaves: tuple[tuple[str, Any], ...]
    update: "Update | None"
    written: tuple[in_place.Written, ...] = ()

    @property
    def plain(self) -> bool:
        """Is the result all arrays, and nothing written back?"""
        return self.update is None and self._all_outs and not self.written

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
    traced leaves, then the `inputs_read`: values that the step reads beside its arguments. `state` are those of them
    that are no inputs; None of a jitted step, and of a call without its arrays. Calls with equal `key` run the same
    program; equal `loose` says that they differ in numbers, and in arrays beside the arguments, at most.
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
    state: PythonState | None = None
    inputs_read: Inputs = NO_INPUTS

    @property
    def all_traced(self) -> bool:
        return not (self.node_places or self.held or self.statics or self.inputs_read.slots)

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
        return len(self.leaves) - len(self.array_places) - len(self.inputs_read.slots)

    def keys_with(self, avals: Sequence[Hashable]) -> tuple[Hashable, Hashable]:
        """`key` and `loose` of the same call with flat inputs of other shapes, each as `aval` has it."""
        (fixed, held), (_, loosely) = self.key, self.loose  # pyright: ignore[reportGeneralTypeIssues]
        fixed = (*fixed[:3], tuple(avals), *fixed[4:])
        return (fixed, held), (fixed, loosely)

    @calls_users_code
    def fun(self, *leaves: Any) -> tuple[list[Any], list[KeyPath], Result]:
        """The step: flat arrays -> (flat arrays, their paths, how the result is made of them)."""
        full, first_read = dict(self.held), self.node_leaves + len(self.array_places)
        full.update(zip(self.array_places, leaves[self.node_leaves : first_read], strict=True))
        inside = None
        if self.nodes is not None:
            inside = nnx_calls().Inside(self.nodes, leaves[: self.node_leaves])
            full.update(zip(self.node_places, inside.roots, strict=True))
        [*args], kwargs = self.tree.unflatten([full[i] for i in range(self.tree.num_leaves)])
        for i in sorted(k for k in self.statics if isinstance(k, int)):
            args.insert(i, self.statics[i])
        named = {k: v for k, v in self.statics.items() if isinstance(k, str)}
        before = None if self.step.jitted else in_place.Before(args, kwargs, node_test(self.step))
        with self.inputs_read.holding(leaves[first_read:]) if self.inputs_read.slots else nullcontext():
            result = on_host(self.step.inner(*args, **kwargs, **named), self.step.on_host)
        return self._close(result, inside, before)

    def _close(
        self, result: Any, inside: Any, before: in_place.Before | None
    ) -> tuple[list[Any], list[KeyPath], Result]:
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
                refuse_result(self.step, x)
                leaves.append(("held", x))
        if returned and inside is None:
            inside = nnx_calls().Inside(nnx_calls().open_nodes((), ()), ())
        update = inside.update(returned, returned_paths, outs, paths) if inside is not None else None
        written = () if before is None else before.written(self.step.name, self._input_path, outs, paths)
        if written and self.arguments[0]:
            in_place.refuse_shared(self.step.name, written, self.arguments)
        return (
            outs,
            paths,
            Result(jax.tree.structure(result, is_leaf=is_node), tuple(leaves), update, written),
        )

    def _input_path(self, path: KeyPath) -> KeyPath:
        """The path of an input by its path in (args, kwargs)."""
        return _named(self.step, self.positions)(path)[1], *path[2:]

    def read_otherwise(self, key: Any) -> frozenset[str]:
        """The names of what the step reads beside its arguments and held something else in the call of this `key`."""
        return frozenset() if self.state is None or key is None else self.state.differing(key[1][1])

    def as_shapes(self) -> "Peeled":
        """The same call with shapes in the place of its arrays. It keeps none of them alive, and none of its NNX
        objects: it can be traced, and not be run."""
        nodes = None if self.nodes is None else replace(self.nodes, roots=(), holders=(), index=None)
        call = replace(self, leaves=specs(self.leaves), arguments=((), {}), nodes=nodes, state=None)
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
        arrays += [((GetAttrKey(slot.name),), None, False) for slot in self.inputs_read.slots]
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
    if held:
        refuse(step, held, lambda: [path_name(p) for p in _named_paths(step, positions, arguments)], is_node)
    nodes = None
    if node_places:
        paths = _named_paths(step, positions, arguments)
        nodes = nnx_calls().open_nodes([leaves[i] for i in node_places], [paths[i] for i in node_places])
    state = None if step.jitted else PythonState(_reach(step, arguments, is_node, held), step.taken)
    read = () if state is None else state.input_values
    flat = [*(nodes.leaves() if nodes is not None else ()), *(leaves[i] for i in array_places), *read]
    fixed = (
        tree,
        tuple((k, static_key(v, step, k)) for k, v in statics.items()),
        nodes and (tuple(map(_GraphKey, nodes.graphdefs)), nodes.structures),
        tuple(map(aval, flat)),
        tuple(getattr(jax.config, name) for name in _SETTINGS),
    )
    keys = {i: held_key(x) for i, x in held.items()}
    exact, roughly = (None, None) if state is None else state.keys()
    loosely = tuple((i, type(held[i]) if type(held[i]) in NUMBERS - {bool} else k) for i, k in keys.items())
    return Peeled(
        step,
        positions,
        arguments,
        statics,
        tree,
        array_places,
        node_places,
        held,
        nodes,
        flat,
        (fixed, (tuple(keys.items()), exact)),
        (fixed, (loosely, roughly)),
        state,
        NO_INPUTS if state is None else state.inputs,
    )


def _reach(
    step: Step,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    is_node: Callable[[Any], bool],
    held: Mapping[int, Any],
) -> Reach:
    """What the code of a step that is not jitted reaches, called with these arguments."""
    args, kwargs = arguments
    code = static_attribute(step.inner, "__code__")
    parameters = () if code is None else code.co_varnames[: code.co_argcount]
    objects = set(map(id, held.values()))

    def kind(value: Any) -> Kind:
        return Kind.ARGUMENT if is_node(value) else Kind.WATCHED if id(value) in objects else Kind.PASSED

    given = {name: (x, kind(x)) for name, x in (*zip(parameters, args, strict=False), *kwargs.items())}
    return Reach(step.inner, given, held.values(), is_node)


def inputs_of(step: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The leaves of a call's arguments, those of NNX objects too, with their names."""
    arguments, _, positions = split(step, args, kwargs)
    named = _named(step, positions)
    for path, x in tree_flatten_with_path(arguments)[0]:
        yield path_name((named(path)[1], *path[2:])), x


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
    if isinstance(x, jax.ShapeDtypeStruct):  # may have a dtype that an array would not get
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        return x.shape, dtype, bool(x.weak_type), memory_kind(x)
    of = x if isinstance(x, jax.Array) else jax.typeof(x)
    return of.shape, of.dtype, getattr(of, "weak_type", False), memory_kind(x)  # typed keys have none


def specs(leaves: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """What to trace with: no array's sharding gets into the program, but for the memory that it lies in."""
    return [shape_in(*each) for each in map(aval, leaves)]


class _GraphKey:
    """A graphdef as a key. Its hash takes milliseconds, so it is taken once; NNX keeps lists among its static
    attributes, too, which have none."""

    __slots__ = ("_graphdef", "_hash")

    def __init__(self, graphdef: Any):
        self._graphdef = graphdef
        try:
            self._hash = hash(graphdef)
        except Exception:  # an attribute has no hash, or its own that raises
            attributes = tuple((k, _attribute_key(a)) for k, a in graphdef.attributes)
            self._graphdef = tuple(graphdef.nodes), attributes
            self._hash = hash(self._graphdef)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: Any) -> bool:
        return (
            isinstance(other, _GraphKey) and self._hash == other._hash and self._graphdef == other._graphdef
        )


def _attribute_key(of: Any) -> Hashable:
    """A key for a static attribute of an NNX object; one that can't be compared counts as the same object."""
    value = static_attribute(of, "value", of)
    try:
        return held_key(value)
    except TypeError:
        return Same(value)


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
