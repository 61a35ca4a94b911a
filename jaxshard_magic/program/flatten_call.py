"""Flatten a call of any step: a pure function of flat arrays, names for them, and the way back to the user's result."""

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
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.tree_util import GetAttrKey, KeyPath, SequenceKey, tree_flatten_with_path

from ..errors import ShardError, calls_users_code
from ..introspect import static_attribute
from . import container_writes
from .argument_errors import check_leaves, check_result_value, static_key
from .cache_keys import IdentityKey, cache_key
from .explicit_axes import explicit_mesh_in_context, has_explicit_axes
from .memory_kinds import memory_kind, put_on_host, shape_in_memory
from .python_state import NO_STATE_INPUTS, PythonState, ReachableState, StateInputs, WatchKind
from .references import read_reference, write_references
from .trace import path_name
from .unwrap import NUMBERS, UnwrappedStep

if TYPE_CHECKING:
    from .nnx_objects import NnxNodes, NnxUpdate

RETURN = GetAttrKey("return")
_TRACE_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision")  # settings that change the traced program
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@dataclass(frozen=True)
class ResultStructure:
    """Structure of a step's result, known once the step has been traced.

    Attributes:
        treedef: Treedef of the result.
        leaves: For each leaf ("out", o) for output number o, ("held", value) for a Python value, or ("node", k) for NNX
            object number k.
        update: Update of the NNX objects among the arguments; None without.
        written: Changes that the step makes to lists and dicts among its arguments.
        references: For each `jax.Ref` among the arguments its position among their leaves, and the output that it
            holds after a call.
    """

    treedef: Any
    leaves: tuple[tuple[str, Any], ...]
    update: "NnxUpdate | None"
    written: tuple[container_writes.ContainerWrite, ...] = ()
    references: tuple[tuple[int, int], ...] = ()

    @property
    def is_all_arrays(self) -> bool:
        """True if the result is all arrays and nothing is written back."""
        return self.update is None and self._only_outputs and not (self.written or self.references)

    @property
    def python_values(self) -> "dict[KeyPath, Any]":
        """Python values among the leaves, by path."""
        indices = self.treedef.unflatten(range(len(self.leaves)))
        by_path = {}
        for path, k in jax.tree_util.tree_flatten_with_path(indices)[0]:
            kind, value = self.leaves[k]
            if kind == "held":
                by_path[RETURN, *path] = value
        return by_path

    @cached_property
    def _only_outputs(self) -> bool:
        """True if all leaves are outputs."""
        return all(kind == "out" for kind, _ in self.leaves)

    def write_back(self, arguments: Any, outs: Sequence[Any], is_node: Callable[[Any], bool] | None) -> None:
        """Write the outputs of a call into the lists, dicts and references among its arguments.

        Args:
            arguments: (args, kwargs) of the call.
            outs: Outputs of the call.
            is_node: Predicate for NNX objects, which are leaves; None where there are none.
        """
        if self.references:
            write_references(self.references, jax.tree.leaves(arguments, is_leaf=is_node), outs)
        container_writes.apply_writes(self.written, arguments, outs)

    def build(self, outs: Sequence[Any], nodes: Sequence[Any] = ()) -> Any:
        """Build the result from flat outputs and NNX objects."""
        if self._only_outputs:
            return self.treedef.unflatten(outs[: len(self.leaves)])
        parts = {"out": outs, "node": nodes}
        return self.treedef.unflatten([v if kind == "held" else parts[kind][v] for kind, v in self.leaves])


@dataclass(frozen=True)
class FlatCall:
    """Flattened call of a step.

    The flat inputs `leaves` are the arrays of NNX objects, then the traced leaves, then the values of `extra_inputs`.

    Attributes:
        step: Step called.
        positions: Positions of the arguments that are not static.
        arguments: Arguments (args, kwargs) that are not static.
        statics: Static parameters of the user's own jit.
        treedef: Treedef of `arguments`.
        array_positions: Leaves of `arguments` that are traced.
        reference_positions: Traced leaves of `arguments` that are references (`jax.Ref`); their flat inputs are the
            arrays that they hold.
        node_positions: Leaves of `arguments` that are NNX objects.
        python_values: Leaves of `arguments` that stay Python values, by position.
        nodes: NNX objects, flattened; None without.
        leaves: Flat inputs.
        key: Calls with equal keys run the same program.
        loose_key: Calls with equal loose keys differ at most in numbers, and in arrays read besides the arguments.
        state: Values read besides the arguments that are no inputs. None for a jitted step, and for a call without its
            arrays.
        extra_inputs: Values read besides the arguments that are inputs.
        mesh_in_context: Mesh that the caller has set (`jax.set_mesh`), if an axis of it is explicit; else None.
    """

    step: UnwrappedStep
    positions: tuple[int, ...]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    statics: Mapping[int | str, Any]
    treedef: Any
    array_positions: tuple[int, ...]
    reference_positions: tuple[int, ...]
    node_positions: tuple[int, ...]
    python_values: Mapping[int, Any]
    nodes: "NnxNodes | None"
    leaves: list[Any]
    key: Hashable
    loose_key: Hashable
    state: PythonState | None = None
    extra_inputs: StateInputs = NO_STATE_INPUTS
    mesh_in_context: Mesh | None = None

    @property
    def is_all_arrays(self) -> bool:
        """True if nothing but arrays goes into the call."""
        other = self.node_positions or self.reference_positions or self.python_values or self.statics
        return not (other or self.extra_inputs.slots)

    @property
    def call_signature(self) -> tuple[int, tuple[str, ...]]:
        """Number of arguments that the caller passed by position, and names of the others."""
        _, kwargs = self.treedef.children()[1].node_data()  # unflattening would construct the user's classes
        names = [name for name in self.statics if isinstance(name, str)]
        positions = len(self.positions) + len(self.statics) - len(names) - len(self.step.bound)
        return positions, tuple(name for name in (*kwargs, *names) if name not in self.step.bound_kwargs)

    @property
    def node_leaf_count(self) -> int:
        """Number of flat inputs that belong to NNX objects."""
        return len(self.leaves) - len(self.array_positions) - len(self.extra_inputs.slots)

    def keys_with(self, avals: Sequence[Hashable]) -> tuple[Hashable, Hashable]:
        """Return `key` and `loose_key` of the same call with flat inputs of other types.

        Args:
            avals: Type of each flat input, as returned by `aval_key`.
        """
        (exact_part, values_key), (_, loose_values_key) = self.key, self.loose_key  # pyright: ignore[reportGeneralTypeIssues]
        exact_part = (*exact_part[:3], tuple(avals), *exact_part[4:])
        return (exact_part, values_key), (exact_part, loose_values_key)

    @calls_users_code
    def flat_function(self, *leaves: Any) -> tuple[list[Any], list[KeyPath], ResultStructure]:
        """Run the step on flat arrays; return flat arrays, their key paths, and the structure of the result."""
        all_leaves, n_call_leaves = dict(self.python_values), self.node_leaf_count + len(self.array_positions)
        all_leaves.update(zip(self.array_positions, leaves[self.node_leaf_count : n_call_leaves], strict=True))
        all_leaves.update({i: jax.new_ref(all_leaves[i]) for i in self.reference_positions})
        traced_objects = None
        if self.nodes is not None:
            traced_objects = nnx_objects().TracedObjects(self.nodes, leaves[: self.node_leaf_count])
            all_leaves.update(zip(self.node_positions, traced_objects.roots, strict=True))
        [*args], kwargs = self.treedef.unflatten([all_leaves[i] for i in range(self.treedef.num_leaves)])
        # In ascending order, since each insertion shifts later positions.
        for i in sorted(k for k in self.statics if isinstance(k, int)):
            args.insert(i, self.statics[i])
        named = {k: v for k, v in self.statics.items() if isinstance(k, str)}
        # Under `jax.jit` itself a step changes copies of its containers, so a jitted step's writes are not followed.
        containers_before = (
            None if self.step.jitted else container_writes.ContainerSnapshot(args, kwargs, node_predicate(self.step))
        )
        with self.extra_inputs.bind_values(leaves[n_call_leaves:]) if self.extra_inputs.slots else nullcontext():
            result = put_on_host(self.step.inner(*args, **kwargs, **named), self.step.on_host)
        outs, paths, structure = self._flatten_result(result, traced_objects, containers_before)
        if not self.reference_positions:
            return outs, paths, structure
        first = len(outs)
        outs += [all_leaves[i][...] for i in self.reference_positions]
        path_by_leaf = dict(zip(self.array_positions, self.inputs[self.node_leaf_count :], strict=False))
        paths += [path_by_leaf[i][0] for i in self.reference_positions]
        references = tuple((i, first + k) for k, i in enumerate(self.reference_positions))
        return outs, paths, replace(structure, references=references)

    def _flatten_result(
        self, result: Any, traced_objects: Any, containers_before: container_writes.ContainerSnapshot | None
    ) -> tuple[list[Any], list[KeyPath], ResultStructure]:
        """Flatten the result of the step, and collect what it wrote to NNX objects and containers."""
        outs, paths, leaves, returned, returned_paths = [], [], [], [], []
        is_node = node_predicate(self.step)
        for path, x, _ in _flatten_boxes(result, is_node):
            if is_node(x):
                leaves.append(("node", len(returned)))
                returned.append(x)
                returned_paths.append((RETURN, *path))
            elif _is_traced(x, self.step):
                leaves.append(("out", len(outs)))
                outs.append(x)
                paths.append((RETURN, *path))
            else:
                check_result_value(self.step, x)
                leaves.append(("held", x))
        if returned and traced_objects is None:
            traced_objects = nnx_objects().TracedObjects(nnx_objects().open_nodes((), ()), ())
        update = (
            traced_objects.collect_update(returned, returned_paths, outs, paths) if traced_objects is not None else None
        )
        written = (
            ()
            if containers_before is None
            else containers_before.find_writes(self.step.name, self._input_path, outs, paths)
        )
        # A call made of shapes (`as_shapes`) has no arguments.
        if written and self.arguments[0]:
            container_writes.refuse_shared(self.step.name, written, self.arguments)
        return (
            outs,
            paths,
            ResultStructure(jax.tree.structure(result, is_leaf=is_node), tuple(leaves), update, written),
        )

    def _input_path(self, path: KeyPath) -> KeyPath:
        """Return the path of an input from its path in (args, kwargs)."""
        return _parameter_namer(self.step, self.positions)(path)[1], *path[2:]

    def changed_reads(self, key: Any) -> frozenset[str]:
        """Return the names of values read besides the arguments that differed in the call with another `key`."""
        return frozenset() if self.state is None or key is None else self.state.differing_slots(key[1][1])

    def as_shapes(self) -> "FlatCall":
        """Return the call with shapes instead of arrays.

        Keeps no array and no NNX object alive, can be traced and cannot be run.
        """
        nodes = None if self.nodes is None else replace(self.nodes, roots=(), holders=(), index=None)
        call = replace(self, leaves=shape_structs(self.leaves), arguments=((), {}), nodes=nodes, state=None)
        # The cached properties are filled now, as they are computed from the arguments.
        call.__dict__.update(inputs=self.inputs, own_shardings=self.own_shardings)
        return call

    @cached_property
    def own_shardings(self) -> tuple[NamedSharding | None, ...]:
        """Sharding of each flat input over a mesh, as the caller passes it; None without one."""
        shardings = (getattr(x, "sharding", None) for x in self.leaves)
        return tuple(at if isinstance(at, NamedSharding) else None for at in shardings)

    @property
    def explicit_mesh(self) -> Mesh | AbstractMesh | None:
        """Mesh with explicit axes that the step is called under, or that its arguments lie on; None without one."""
        meshes = (at.mesh for at in self.own_shardings if at is not None)
        return self.mesh_in_context or next(filter(has_explicit_axes, meshes), None)

    @property
    def own_placements(self) -> list[Any]:
        """Placement of each flat input by Flax's metadata, or else by its own sharding; None without."""
        pairs = zip(self.inputs, self.own_shardings, strict=True)
        return [own if noted is None else noted for (_, noted, _), own in pairs]

    @cached_property
    def inputs(self) -> list[tuple[KeyPath, Any, bool]]:
        """Path, partitioning and donation of each flat input.

        The first key of a path is the parameter's name. The partitioning is Flax's, or None. Donation is by the user's
        own jit.
        """
        parameter_name = _parameter_namer(self.step, self.positions)
        rows = []
        for path, _, partitioning in _flatten_boxes(self.arguments, node_predicate(self.step)):
            parameter, key = parameter_name(path)
            rows.append(((key, *path[2:]), partitioning, self.step.donates(parameter)))
        for i in self.reference_positions:  # its array is the reference's own, and is replaced by each call
            rows[i] = (*rows[i][:2], True)
        arrays = [rows[i] for i in self.array_positions]
        arrays += [((GetAttrKey(slot.name),), None, False) for slot in self.extra_inputs.slots]
        if self.nodes is None:
            return arrays
        donated = [rows[i][2] for i in self.node_positions]
        return [*nnx_objects().describe_leaves(self.nodes, donated), *arrays]


def flatten_call(step: UnwrappedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FlatCall:
    """Flatten a call of `step`.

    Args:
        step: Unwrapped step.
        args: Positional arguments of the caller.
        kwargs: Keyword arguments of the caller.

    Raises:
        ShardError: An argument can be neither traced nor kept as a Python value.
    """
    arguments, statics, positions = split_arguments(step, args, kwargs)
    is_node = node_predicate(step)
    leaves, tree = jax.tree.flatten(arguments, is_leaf=is_node)
    node_places = tuple(i for i, x in enumerate(leaves) if is_node(x))
    reference_places = _reference_places(step, leaves)
    references = frozenset(reference_places)
    array_places = tuple(i for i, x in enumerate(leaves) if i in references or _is_traced(x, step))
    python_values = {i: x for i, x in enumerate(leaves) if i not in {*node_places, *array_places}}
    if python_values:
        check_leaves(
            step, python_values, lambda: [path_name(p) for p in _named_paths(step, positions, arguments)], is_node
        )
    nodes = None
    if node_places:
        paths = _named_paths(step, positions, arguments)
        nodes = nnx_objects().open_nodes([leaves[i] for i in node_places], [paths[i] for i in node_places])
    state = None if step.jitted else PythonState(_reachable(step, arguments, is_node, python_values), step.input_names)
    extra_values = () if state is None else state.input_values
    flat = [
        *(nodes.leaves() if nodes is not None else ()),
        *(read_reference(leaves[i]) if i in references else leaves[i] for i in array_places),
        *extra_values,
    ]
    exact_part = (
        tree,
        tuple((k, static_key(v, step, k)) for k, v in statics.items()),
        nodes and (tuple(map(_GraphdefKey, nodes.graphdefs)), nodes.structures),
        tuple(map(aval_key, flat)),
        tuple(getattr(jax.config, name) for name in _TRACE_SETTINGS),
        reference_places,
    )
    keys = {i: cache_key(x) for i, x in python_values.items()}
    reads_key, loose_reads_key = (None, None) if state is None else state.program_keys()
    loose_values_key = tuple(
        (i, type(python_values[i]) if type(python_values[i]) in NUMBERS - {bool} else k) for i, k in keys.items()
    )
    return FlatCall(
        step,
        positions,
        arguments,
        statics,
        tree,
        array_places,
        reference_places,
        node_places,
        python_values,
        nodes,
        flat,
        (exact_part, (tuple(keys.items()), reads_key)),
        (exact_part, (loose_values_key, loose_reads_key)),
        state,
        NO_STATE_INPUTS if state is None else state.inputs,
        explicit_mesh_in_context(),
    )


def _reference_places(step: UnwrappedStep, leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions of references (`jax.Ref`) among the leaves. Raises ShardError for one that comes twice."""
    places = tuple(i for i, x in enumerate(leaves) if isinstance(x, jax.Ref))
    if len({id(leaves[i]) for i in places}) < len(places):
        raise ShardError(f"{step.name} is given the same jax.Ref twice, so that its value is not defined; pass it once")
    return places


def _reachable(
    step: UnwrappedStep,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    is_node: Callable[[Any], bool],
    python_values: Mapping[int, Any],
) -> ReachableState:
    """Return all that the code of a step without jit can reach when called with these arguments."""
    args, kwargs = arguments
    code = static_attribute(step.inner, "__code__")
    parameters = () if code is None else code.co_varnames[: code.co_argcount]
    objects = set(map(id, python_values.values()))

    def kind(value: Any) -> WatchKind:
        return WatchKind.ARGUMENT if is_node(value) else WatchKind.WATCHED if id(value) in objects else WatchKind.PASSED

    bound_arguments = {name: (x, kind(x)) for name, x in (*zip(parameters, args, strict=False), *kwargs.items())}
    return ReachableState(step.inner, bound_arguments, python_values.values(), is_node)


def named_leaves(step: UnwrappedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and leaf for all leaves of a call's arguments, NNX objects' included."""
    arguments, _, positions = split_arguments(step, args, kwargs)
    parameter_name = _parameter_namer(step, positions)
    for path, x in tree_flatten_with_path(arguments)[0]:
        yield path_name((parameter_name(path)[1], *path[2:])), x


def split_arguments(
    step: UnwrappedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], dict[int | str, Any], tuple[int, ...]]:
    """Split the arguments of a call into dynamic and static.

    Args:
        step: Unwrapped step.
        args: Positional arguments of the caller.
        kwargs: Keyword arguments of the caller.

    Returns:
        (args, kwargs) with the arguments supplied by wrappers and without static parameters; the static parameters; and
        the positions of the remaining arguments.
    """
    args, kwargs = (*step.bound, *args), {**step.bound_kwargs, **kwargs}
    if not step.static:
        return (args, kwargs), {}, tuple(range(len(args)))
    static = {n % len(args) if isinstance(n, int) and n < 0 and args else n for n in step.static}
    statics: dict[int | str, Any] = {i: x for i, x in enumerate(args) if i in static}
    statics.update({k: v for k, v in kwargs.items() if k in static})
    positions = tuple(i for i in range(len(args)) if i not in static)
    dynamic = tuple(args[i] for i in positions), {k: v for k, v in kwargs.items() if k not in static}
    return dynamic, statics, positions


def _is_traced(x: Any, step: UnwrappedStep) -> bool:
    """Return whether a leaf is traced rather than kept as a Python value."""
    if isinstance(x, np.ndarray):
        # Objects, bytes, text, datetimes and timedeltas have no JAX dtype.
        return x.dtype.kind not in "OSUMm"
    return isinstance(x, _ARRAYS) or type(x) in step.numbers


def aval_key(x: Any) -> tuple[tuple[int, ...], Any, bool, str | None]:
    """Return shape, dtype, weak type and memory kind of a leaf; calls that agree in these run the same program."""
    if isinstance(x, jax.ShapeDtypeStruct):  # may have a dtype that arrays never have, as int64 without x64
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        return x.shape, dtype, bool(x.weak_type), memory_kind(x)
    abstract = x if isinstance(x, jax.Array) else jax.typeof(x)
    return (
        abstract.shape,
        abstract.dtype,
        getattr(abstract, "weak_type", False),  # typed keys have none
        memory_kind(x),
    )


def shape_structs(leaves: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes to trace with. They carry no sharding into the program, only the memory kind."""
    return [shape_in_memory(*each) for each in map(aval_key, leaves)]


class _GraphdefKey:
    """Hashable key for an NNX graph definition."""

    __slots__ = ("_graphdef", "_hash")

    def __init__(self, graphdef: Any):
        # Hashed once, as that takes milliseconds.
        self._graphdef = graphdef
        try:
            self._hash = hash(graphdef)
        except Exception:  # NNX has lists among static attributes, and the user's `__hash__` may raise anything
            attributes = tuple((k, _attribute_key(a)) for k, a in graphdef.attributes)
            self._graphdef = tuple(graphdef.nodes), attributes
            self._hash = hash(self._graphdef)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _GraphdefKey) and self._hash == other._hash and self._graphdef == other._graphdef


def _attribute_key(attribute: Any) -> Hashable:
    """Return a key for a static attribute of an NNX object, by identity if it cannot be compared."""
    value = static_attribute(attribute, "value", attribute)
    try:
        return cache_key(value)
    except TypeError:
        return IdentityKey(value)


def _parameter_namer(step: UnwrappedStep, positions: Sequence[int]) -> Callable[[KeyPath], tuple[int | str, Any]]:
    """Return a function from a path in (args, kwargs) to the parameter (position or name) and the key that names it."""
    try:
        parameters = list(inspect.signature(step.inner).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    n_named = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_POSITIONAL), len(parameters))

    def name(path: KeyPath) -> tuple[int | str, Any]:
        if path[0].idx == 1:
            return path[1].key, GetAttrKey(path[1].key)
        i = positions[path[1].idx]
        return i, GetAttrKey(parameters[i].name) if i < n_named else SequenceKey(i - n_named)

    return name


def _named_paths(step: UnwrappedStep, positions: Sequence[int], arguments: Any) -> list[KeyPath]:
    """Return the paths of all leaves, with parameter names."""
    named = _parameter_namer(step, positions)
    return [(named(path)[1], *path[2:]) for path, _, _ in _flatten_boxes(arguments, node_predicate(step))]


def _flatten_boxes(tree: Any, is_node: Callable[[Any], bool]) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Yield path, leaf and Flax partitioning of every leaf; boxes with a partitioning leave no key in the path."""
    for path, x in tree_flatten_with_path(tree, is_leaf=lambda x: is_node(x) or _is_box(x))[0]:
        if is_node(x) or not _is_box(x):
            yield path, x, None
        else:
            partitioning = nnx_objects().partition_spec(x)
            for inner, leaf in tree_flatten_with_path(x)[0]:
                yield (*path, *inner[1:]), leaf, partitioning


def _is_box(x: Any) -> bool:
    """Return whether `x` is an NNX Variable as a pytree, or a Linen array with partitioning (`nn.Partitioned`)."""
    nnx, meta = sys.modules.get("flax.nnx"), sys.modules.get("flax.core.meta")
    return (nnx is not None and isinstance(x, nnx.Variable)) or (meta is not None and isinstance(x, meta.AxisMetadata))


def node_predicate(step: UnwrappedStep) -> Callable[[Any], bool]:
    """Return a predicate for NNX objects that the step may change in place; always False until flax is imported."""
    if step.graph and "flax.nnx" in sys.modules:
        return nnx_objects().is_node
    return lambda x: False


def nnx_objects() -> ModuleType:
    """Return the module for NNX objects."""
    # Imported late: the module imports flax, which a step without NNX need not have loaded.
    from . import nnx_objects as module

    return module
