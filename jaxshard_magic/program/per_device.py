"""Trace a step written for a single device of many (`jax.pmap`, named axes), with per-device input shapes.

`DeviceMapping` states the slice of every flat input that a device reads, and the mesh axes behind the axis names.
`PerDeviceTrace` is the resulting trace. `PerDeviceTrace.emulate` runs it for all devices at once under `jax.vmap`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import cached_property, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.core import extend_axis_env_nd  # binds axis names for a trace; no public equivalent
from jax.extend.core import jaxpr_as_fun

from .flatten_call import ResultStructure
from .flow import Flow
from .ir import Program
from .roles import InputRoles, find_roles
from .thread_state import JaxContexts
from .trace import Traced

_UNMAPPED = object()
AxisName = Hashable  # as in `jax.lax.pmean(x, name)`


@dataclass(frozen=True)
class DeviceSlice:
    """Slice of an array that a single device holds.

    Attributes:
        dim: Dimension divided over devices.
        is_device_axis: `dim` has one entry per device and is absent from the slice. Otherwise the slice keeps `dim`,
            with 1 / devices of the size.
    """

    dim: int
    is_device_axis: bool

    def local_shape(self, shape: tuple[int, ...], devices: int) -> tuple[int, ...]:
        """Return the shape of a device's slice of an array of `shape`, divided over `devices` devices."""
        part = () if self.is_device_axis else (shape[self.dim] // devices,)
        return (*shape[: self.dim], *part, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class DeviceMapping:
    """Mapping of a call onto the devices of a mesh.

    Attributes:
        axes: Mesh axes behind each axis name used by the step.
        sizes: Number of devices along each axis name.
        split_names: Axis names along which arrays are divided.
        slices: Slice of every flat input; None for an input replicated on all devices.
        has_device_axis: Results have a device axis (as from `jax.pmap`). False: results have none.
        out_axes: Position of the device axis in the results, as a prefix of the result's tree. Read only with
            `has_device_axis`.
    """

    axes: Mapping[AxisName, tuple[str, ...]]
    sizes: Mapping[AxisName, int]
    split_names: tuple[AxisName, ...]
    slices: tuple[DeviceSlice | None, ...]
    has_device_axis: bool
    out_axes: Any = 0

    @property
    def device_count(self) -> int:
        """Number of slices into which arrays are divided."""
        return prod(self.sizes[name] for name in self.split_names)

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Mesh axes over which arrays are divided."""
        return tuple(a for name in self.split_names for a in self.axes[name])

    def local_avals(self, avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Return the per-device shapes of flat inputs, given their global avals."""
        return [
            aval
            if cut is None
            else jax.ShapeDtypeStruct(
                cut.local_shape(aval.shape, self.device_count), aval.dtype, weak_type=aval.weak_type
            )
            for aval, cut in zip(avals, self.slices, strict=True)
        ]

    def per_device_trace(self, traced: Traced, result: ResultStructure) -> "PerDeviceTrace":
        """Wrap a trace of the step, made with the axis names bound and on `local_avals`.

        Args:
            traced: Trace of a single device's work.
            result: Structure of the step's result.
        """
        kept = {f.name: getattr(traced, f.name) for f in fields(traced)}
        return PerDeviceTrace(**kept, mapping=self, result=result)


@dataclass(frozen=True)
class PerDeviceTrace(Traced):
    """Trace of a step as a single device runs it: inputs and outputs have per-device shapes.

    Attributes:
        mapping: Mapping of the call onto devices.
        result: Structure of the step's result.
    """

    mapping: DeviceMapping
    result: ResultStructure

    @property
    def slices(self) -> tuple[DeviceSlice | None, ...]:
        """Slices of the trace's inputs, closed-over arrays first; those are replicated."""
        return (*(None for _ in self.consts), *self.mapping.slices)

    @cached_property
    def program(self) -> Program:
        """Program of the trace."""
        return Program(self.closed)

    @cached_property
    def flow(self) -> Flow:
        """Data flow of the program."""
        return Flow(self.program)

    @cached_property
    def roles(self) -> InputRoles:
        """Roles of the inputs."""
        return find_roles(self, self.flow)

    def with_trace(self, traced: Traced) -> "PerDeviceTrace":
        """Return another trace of the same inputs and outputs under this mapping, its own constants in front."""
        return self.mapping.per_device_trace(traced, self.result)

    def global_input_shape(self, i: int) -> tuple[int, ...]:
        """Return the global shape of input `i`."""
        return self.global_shape(self.closed.in_avals[i].shape, self.slices[i])

    def global_shape(self, local_shape: tuple[int, ...], device_slice: DeviceSlice | None) -> tuple[int, ...]:
        """Return the global shape of an array, given the shape of a device's slice.

        Args:
            local_shape: Shape of the slice.
            device_slice: Position of the slice; None for a replicated array, with its shape unchanged.
        """
        if device_slice is None:
            return tuple(local_shape)
        size = self.mapping.device_count * (1 if device_slice.is_device_axis else local_shape[device_slice.dim])
        return (
            *local_shape[: device_slice.dim],
            size,
            *local_shape[device_slice.dim + (not device_slice.is_device_axis) :],
        )

    @cached_property
    def output_slices(self) -> tuple[DeviceSlice | None, ...]:
        """Slices of the results, in order, for results with a device axis; None for a result without.

        Values written back in place have the device axis in front, except arrays closed over by the step, which have
        none.
        """
        tree = self.result.treedef
        axes = broadcast_axes(self.mapping.out_axes, tree.unflatten(range(tree.num_leaves)))
        leaf_kinds = (kind for kind, _ in self.result.leaves)
        returned = [a for a, kind in zip(axes, leaf_kinds, strict=True) if kind == "out"]
        ranks = [len(aval.shape) + 1 for aval in self.closed.out_avals]
        constants = set(self.in_paths[: len(self.consts)])
        written_back = self.out_paths[len(returned) :]
        axes_written_back = (None if path in constants else 0 for path in written_back)
        return tuple(
            None if a is None else DeviceSlice(a % rank, True)
            for a, rank in zip([*returned, *axes_written_back], ranks, strict=True)
        )

    def emulate(self, fun: Callable[..., Sequence[Any]], shapes: Sequence[tuple[int, ...]]) -> Callable[..., list]:
        """Return a function that runs `fun` for all devices on a single device, by `jax.vmap` over the axis names.

        Args:
            fun: Work of a single device: slices of the flat inputs in, a sequence of arrays out.
            shapes: Global shapes of the results of `fun`.

        Returns:
            A function from global flat inputs to results of `shapes`.
        """
        mapping = self.mapping
        is_divided = [cut is not None for cut in mapping.slices]

        def run_all(*leaves):
            parts = [_split_devices(x, cut, mapping) for x, cut in zip(leaves, mapping.slices, strict=True)]
            outs = _vmap_names(fun, is_divided, mapping)(*parts)
            cuts = self.output_slices[: len(shapes)] if mapping.has_device_axis else [None] * len(shapes)
            return [_join_devices(x, cut, s, mapping) for x, cut, s in zip(outs, cuts, shapes, strict=True)]

        return run_all

    def emulated_trace(self, shapes: Sequence[tuple[int, ...]]) -> Traced:
        """Trace the step for all devices at once, with global inputs.

        Args:
            shapes: Global shapes of the first results. Later results are dropped.
        """
        step, n_consts = jaxpr_as_fun(self.closed), len(self.consts)

        def run_all(*inputs):
            consts, leaves = inputs[:n_consts], inputs[n_consts:]
            return self.emulate(lambda *parts: step(*consts, *parts)[: len(shapes)], shapes)(*leaves)

        avals = enumerate(self.closed.in_avals)
        closed = jax.make_jaxpr(run_all)(*(jax.ShapeDtypeStruct(self.global_input_shape(i), a.dtype) for i, a in avals))
        return Traced(closed, self.in_paths, self.out_paths[: len(shapes)], self.consts)


def broadcast_axes(axes: Any, tree: Any) -> list[int | None]:
    """Return the axis of every leaf of `tree`, None for a leaf without.

    Args:
        axes: Prefix of `tree` with integers or None at its leaves, as `in_axes` of `jax.vmap`.
        tree: Any pytree.

    >>> broadcast_axes((0, None), ({"w": 1, "b": 2}, 3))
    [0, 0, None]
    """
    # JAX counts None as an empty subtree, so without a stand-in an unmapped argument would be missing from the leaves.
    prefix = jax.tree.map(lambda a: _UNMAPPED if a is None else a, axes, is_leaf=lambda a: a is None)
    return [None if a is _UNMAPPED else a for a in jax.tree.leaves(jax.tree.broadcast(prefix, tree))]


def device_trace_context(mapping: DeviceMapping | None) -> AbstractContextManager[Any]:
    """Return a context for tracing a single device's work: axis names bound, and no mesh, even under `jax.set_mesh`.

    Args:
        mapping: Mapping of the call. None for a step written for global arrays: the context changes nothing.
    """
    if mapping is None:
        return nullcontext()
    no_mesh = jax.sharding.AbstractMesh((), ())
    return JaxContexts(
        partial(jax.sharding.use_abstract_mesh, no_mesh), partial(extend_axis_env_nd, list(mapping.sizes.items()))
    )


def _split_devices(x: Any, device_slice: DeviceSlice | None, mapping: DeviceMapping) -> Any:
    """Move the slices of an array to leading dimensions, one for each of `split_names`."""
    if device_slice is None:
        return x
    sizes = tuple(mapping.sizes[name] for name in mapping.split_names)
    if not device_slice.is_device_axis:
        part = x.shape[device_slice.dim] // mapping.device_count
        x = x.reshape(*x.shape[: device_slice.dim], mapping.device_count, part, *x.shape[device_slice.dim + 1 :])
    x = jnp.moveaxis(x, device_slice.dim, 0)
    return x.reshape(*sizes, *x.shape[1:])


def _vmap_names(fun: Callable[..., Any], is_divided: Sequence[bool], mapping: DeviceMapping) -> Callable[..., Any]:
    """Apply `jax.vmap` once per axis name; results get a leading dimension for each, `split_names` first."""
    others = [name for name in mapping.axes if name not in mapping.split_names]
    # jax.vmap adds its dimension in front, so the name applied last comes first.
    for name, cuts in (*((n, False) for n in reversed(others)), *((n, True) for n in reversed(mapping.split_names))):
        fun = _vmap_name(fun, [0 if cuts and c else None for c in is_divided], name, mapping.sizes[name])
    return fun


def _vmap_name(fun: Callable[..., Any], axes: Sequence[int | None], name: AxisName, size: int) -> Callable[..., Any]:
    """Apply `jax.vmap` under a single axis name."""
    # jax.vmap raises where no argument is mapped, as with replicated inputs only; the iota is always mapped.
    each = jax.vmap(lambda _, *xs: fun(*xs), (0, *axes), axis_name=name)
    return lambda *xs: each(jnp.arange(size), *xs)


def _join_devices(x: Any, device_slice: DeviceSlice | None, shape: tuple[int, ...], mapping: DeviceMapping) -> Any:
    """Join the devices' results to an array of `shape`.

    Along names not in `split_names` all devices agree, so the first is taken.
    """
    part = x.shape[len(mapping.axes) :]
    x = x.reshape(mapping.device_count, prod(mapping.sizes.values()) // mapping.device_count, *part)[:, 0]
    if device_slice is not None:
        return jnp.moveaxis(x, 0, device_slice.dim)
    # Without a device axis, the divided dimension is the one whose per-device size differs from the global size.
    dim = next((d for d, (a, b) in enumerate(zip(part, shape, strict=True)) if a != b), None)
    return x[0] if dim is None else jnp.moveaxis(x, 0, dim).reshape(shape)
