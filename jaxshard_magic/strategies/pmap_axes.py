"""Mapping of a per-device step onto a mesh: mesh axes for its axis names, and the split of each argument.

Axis names are those of collectives, as in `jax.lax.pmean(x, "batch")`.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from ..config.request import Request
from ..config.strategies import job_of
from ..config.strategy_text import batch_axes
from ..errors import ShardError, list_names
from ..program.batching.batch import find_batch
from ..program.dimensions import Dimensions
from ..program.flatten_call import FlatCall, shape_structs
from ..program.per_device import (
    AxisName,
    DeviceMapping,
    DeviceSlice,
    PerDeviceTrace,
    broadcast_axes,
    device_trace_context,
)
from ..program.roles import PARAMS
from ..program.trace import path_name, trace
from ..program.trace_errors import explain_trace_errors, unbound_axis_name
from .layout import Axes
from .placements import inputs_under
from .plan_checks import returns_nothing, returns_nothing_message

_MAX_COMPARED_BYTES = 2**20  # bytes; larger arrays are not compared along their device axis


def find_pmap_axes(flat_call: FlatCall, request: Request) -> DeviceMapping:
    """Find the axis names of a step and the split of each argument.

    Decorated with `jax.pmap`, or if every array has a leading device axis, each device takes its index along the axis.
    Otherwise the batch is split and everything else is replicated. The request's specs may name the batch arguments.
    The step is traced repeatedly until all axis names are known.

    Args:
        flat_call: The step with flattened arguments.
        request: The request with mesh and specs.

    Raises:
        ShardError: The mesh lacks an axis, rules are given, or the batch cannot be found or does not divide.
    """
    name, given_specs = flat_call.step.name, request.specs
    if request.rules:
        raise ShardError(f"{name} is spread as pmap does it, so --rule has no say; leave --rule out, or use spmd")
    call = _PmapCall(flat_call, request.mesh, request.axes.get("pmap", ()))
    decorator = flat_call.step.pmap
    if decorator is not None and not given_specs:
        names = [decorator.axis_name] if decorator.axis_name is not None else []
        axes = call.axes(names)
        cuts = _device_axis_cuts(call, decorator.in_axes, axes)
        if cuts is not None:
            return call.make_mapped(axes, cuts, device_axis=True, out_axes=decorator.out_axes)
    stacked = _map_stacked(call) if decorator is None and not given_specs else None
    return stacked or _map_split_batch(call, given_specs)


class _PmapCall:
    """One call of the step on a mesh.

    Args:
        flat_call: The step with flattened arguments.
        mesh: The mesh.
        pmap_axes: Mesh axes given after `pmap@`; empty for the batch axes.
    """

    def __init__(self, flat_call: FlatCall, mesh: Mesh, pmap_axes: Axes):
        self.flat_call, self.mesh, self.pmap_axes = flat_call, mesh, pmap_axes
        self.step = flat_call.step.name
        self.avals = shape_structs(flat_call.leaves)
        self.paths = [path for path, _, _ in flat_call.inputs]
        self.names = [path_name(path) for path in self.paths]

    def axes(self, names: Sequence[AxisName]) -> tuple[dict[AxisName, Axes], tuple[AxisName, ...]]:
        """Return the mesh axes behind each name, and the names over which arrays are split."""
        return _mesh_axes(self.step, names, self.mesh, self.pmap_axes)

    def make_mapped(
        self, axes: Any, cuts: Sequence[DeviceSlice | None], *, device_axis: bool, out_axes: Any = 0
    ) -> DeviceMapping:
        found, over = axes
        sizes = {n: prod(self.mesh.shape[a] for a in of) for n, of in found.items()}
        return DeviceMapping(found, sizes, over, tuple(cuts), device_axis, out_axes)

    def trace_device(
        self, cuts_for: Callable[[int], Sequence[DeviceSlice | None]], device_axis: bool
    ) -> PerDeviceTrace:
        """Trace the step of one device, with every axis name bound that it uses.

        Args:
            cuts_for: Function from the number of devices to the split of each flat input.
            device_axis: Whether arrays have a device axis.
        """
        names = [] if self.flat_call.step.pmap is None else [self.flat_call.step.pmap.axis_name]
        names = [n for n in names if n is not None]
        results: list[Any] = []

        def fun(*leaves):
            outs, paths, result = self.flat_call.flat_function(*leaves)
            results.append(result)
            return outs, paths

        with explain_trace_errors(self.step):
            while True:
                known = names or self.pmap_axes or _default_batch_axes(self.mesh)
                # Without any name the step is traced without axes: JAX's error then says which one it needs.
                axes = self.axes(names) if known else ({}, ())
                devices = self.make_mapped(axes, [], device_axis=device_axis).device_count
                mapped = self.make_mapped(axes, cuts_for(devices), device_axis=device_axis)
                try:
                    with device_trace_context(mapped):
                        traced = trace(fun, mapped.local_avals(self.avals), self.paths)
                # JAX raises NameError for an unbound axis name: bind that too, and trace again.
                except NameError as error:
                    missing = unbound_axis_name(error)
                    if missing is None or missing in names:
                        raise
                    names.append(missing)
                else:
                    # Raises where neither the step nor the mesh names an axis to split over.
                    self.axes(names)
                    return mapped.per_device_trace(traced, results[-1])


def _device_axis_cuts(call: _PmapCall, in_axes: Any, axes: Any) -> list[DeviceSlice | None] | None:
    """Return the split that `jax.pmap` would make; None where the arguments have no device axis.

    Raises:
        ShardError: The device axis has another size than the mesh.
    """
    devices = call.make_mapped(axes, [], device_axis=True).device_count
    dims = _mapped_dims(call.flat_call, in_axes)
    sizes = {
        aval.shape[d] if -len(aval.shape) <= d < len(aval.shape) else None
        for aval, d in zip(call.avals, dims, strict=True)
        if d is not None
    }
    if sizes <= {devices}:
        return [
            None if d is None else DeviceSlice(d % len(a.shape), True) for a, d in zip(call.avals, dims, strict=True)
        ]
    if len(sizes) == 1 and None not in sizes:
        (size,) = sizes
        over = axes[1][0]
        line = f"%mesh {over if isinstance(over, str) else 'data'}={size}"
        raise ShardError(
            f"the arguments of {call.step} have a device axis of {size}, and the mesh has {devices} devices for it: "
            f"use {line}, or replicate the state and split the batch over {devices}",
            fix=line,
        )
    return None


def _mapped_dims(flat_call: FlatCall, in_axes: Any) -> list[int | None]:
    """Return the axis of each flat input that `jax.pmap` maps over: `in_axes` for positional arguments, 0 for
    keywords."""
    args, kwargs = flat_call.treedef.unflatten(range(flat_call.treedef.num_leaves))
    if isinstance(in_axes, (tuple, list)):
        in_axes = tuple(in_axes[i] for i in flat_call.positions)
    flat = [*broadcast_axes(in_axes, tuple(args)), *(0 for _ in jax.tree.leaves(kwargs))]
    return [flat[i] for i in flat_call.array_positions]


def _map_stacked(call: _PmapCall) -> DeviceMapping | None:
    """Return the mapping of an undecorated step with a device axis in every array; None for other steps.

    Parameters must be equal along the device axis.
    """
    leading = {a.shape[0] if a.shape else None for a in call.avals}
    along_batch = prod(call.mesh.shape[a] for a in call.pmap_axes or _default_batch_axes(call.mesh))
    if len(leading) != 1 or not leading <= {call.mesh.size, along_batch}:
        return None
    cuts = [DeviceSlice(0, True)] * len(call.avals)
    try:
        traced = call.trace_device(lambda _: cuts, True)
    # The leading dimension is no device axis if the step cannot be traced without it.
    except (TypeError, ValueError):
        return None
    first = len(traced.consts)
    params = [i - first for i, role in enumerate(traced.roles.by_input) if role == PARAMS and i >= first]
    if leading != {traced.mapping.device_count} or not all(_is_replicated(call.flat_call.leaves[i]) for i in params):
        return None
    return call.make_mapped((traced.mapping.axes, traced.mapping.split_names), cuts, device_axis=True)


def _is_replicated(x: Any) -> bool:
    """Return whether an array is equal along its first dimension."""
    # Without values, or with too many to compare, assume equality.
    if isinstance(x, jax.ShapeDtypeStruct) or x.nbytes > _MAX_COMPARED_BYTES:
        return True
    values = np.asarray(x)
    return bool((values == values[:1]).all())


def _map_split_batch(call: _PmapCall, given_specs: Mapping[str, PartitionSpec]) -> DeviceMapping:
    """Return the mapping that replicates state and splits the batch, along the dimension found or given.

    Raises:
        ShardError: There is no array, the step can't be traced on its whole batch, no batch is found or it does not
            divide, or the step returns nothing.
    """
    if given_specs:
        traced = call.trace_device(lambda n: _cuts_from_specs(call, given_specs, n), False)
        return call.make_mapped(
            (traced.mapping.axes, traced.mapping.split_names), traced.mapping.slices, device_axis=False
        )
    if not any(aval.shape for aval in call.avals):
        raise ShardError(f"{call.step} takes no arrays that could be split over devices; pmap splits its arguments")
    nothing = [None] * len(call.avals)
    try:
        traced = call.trace_device(lambda _: nothing, False)
    except (TypeError, ValueError, AssertionError) as error:
        error_text = " ".join(str(error).partition("\n")[0].split())
        line = _spec_option(call)
        raise ShardError(
            f"{call.step} can't be traced on its whole batch, which tells what to split ({error_text}); say it: {line}",
            fix=line,
        ) from error
    dims = Dimensions(traced.program, tuple(call.mesh.shape.values()))
    batch = find_batch(dims, traced.roles)
    first, devices, over = len(traced.consts), traced.mapping.device_count, traced.mapping.split_names
    cuts = [
        DeviceSlice(batch.input_dims[i + first][0], False) if i + first in batch.input_dims else None
        for i in range(len(nothing))
    ]
    if returns_nothing(traced.flow):
        raise ShardError(returns_nothing_message(traced, traced.flow))
    if not any(cuts):
        line = _spec_option(call)
        raise ShardError(
            f"{call.step} has no batch to split that can be found; say which argument it is: {line}", fix=line
        )
    for i, cut in enumerate(cuts):
        _check_divides(call, i, cut, devices, traced.mapping.mesh_axes)
    return call.make_mapped((traced.mapping.axes, over), cuts, device_axis=False)


def _spec_option(call: _PmapCall) -> str:
    """Return the `--spec` option that would name the batch; most often it is the last argument with dimensions."""
    axis = next(iter(_default_batch_axes(call.mesh)), call.mesh.axis_names[0])
    array_names = [name for name, aval in zip(call.names, call.avals, strict=True) if aval.shape]
    argument = array_names[-1].split(".")[0]
    return f"--spec \"{argument}=P('{axis}')\""


def _cuts_from_specs(
    call: _PmapCall, given_specs: Mapping[str, PartitionSpec], devices: int
) -> list[DeviceSlice | None]:
    cuts: list[DeviceSlice | None] = [None] * len(call.avals)
    for name, spec in given_specs.items():
        dims = [d for d, entry in enumerate(spec) if entry is not None]
        inputs = inputs_under(name, call.names)
        if len(dims) != 1:
            raise ShardError(f"--spec {name}={spec}: under pmap a spec says which one dimension is the batch")
        for i in inputs:
            if len(call.avals[i].shape) > dims[0]:
                cuts[i] = DeviceSlice(dims[0], False)
                _check_divides(call, i, cuts[i], devices, ())
    return cuts


def _check_divides(call: _PmapCall, i: int, cut: DeviceSlice | None, devices: int, over: Axes) -> None:
    """Raise ShardError where the split dimension of input `i` does not divide over the devices."""
    size = devices if cut is None else call.avals[i].shape[cut.dim]
    if cut is None or size % devices == 0:
        return
    names = "+".join(over) or "the batch axes"
    near = [m for m in (size // devices * devices, -(-size // devices) * devices) if m]
    raise ShardError(
        f"{call.names[i]} has {size} examples (dim {cut.dim}), which do not divide by {names}={devices}; use a batch "
        f"of {' or '.join(map(str, dict.fromkeys(near)))}"
    )


def _mesh_axes(
    step: str, names: Sequence[AxisName], mesh: Mesh, pmap_axes: Axes = ()
) -> tuple[dict[AxisName, Axes], tuple[AxisName, ...]]:
    """Return the mesh axes behind each axis name of a step, and the names over which arrays are split.

    A name equal to a mesh axis means that axis. At most one other name is allowed, for all of `pmap_axes`, or by
    default for the batch axes of the mesh. A step without axis names is split over the same axes.

    Args:
        step: Name of the step, for messages.
        names: Axis names in the step's collectives.
        mesh: The mesh.
        pmap_axes: Mesh axes given after `pmap@`; empty for the batch axes.

    Returns:
        The mesh axes by name, and the names to split over in the order of the mesh.

    Raises:
        ShardError: The mesh has no axis for a name, or none for the batch.
    """
    axes_by_name: dict[AxisName, Axes] = {n: (str(n),) for n in names if n in mesh.axis_names}
    unmatched = [n for n in names if n not in axes_by_name]
    free = tuple(a for a in pmap_axes or _default_batch_axes(mesh) if a not in axes_by_name)
    # Of two unmatched names nothing says which of the free axes each stands for.
    if len(unmatched) > 1 or (unmatched and not free):
        _raise_unknown_names(step, names, mesh)
    if unmatched:
        axes_by_name[unmatched[0]] = free
    examples = [n for n, axes in axes_by_name.items() if job_of(axes[0]) in ("data", "fsdp", None)]
    split_names = [n for n, axes in axes_by_name.items() if n in unmatched or axes[0] in pmap_axes or n in examples]
    if not split_names:
        if not free:
            _raise_no_batch_axis(mesh)
        axes_by_name |= {a: (a,) for a in free}
        split_names = list(free)
    order = {a: i for i, a in enumerate(mesh.axis_names)}
    return axes_by_name, tuple(sorted(split_names, key=lambda n: order[axes_by_name[n][0]]))


def _default_batch_axes(mesh: Mesh) -> Axes:
    """Return the mesh axes named for the batch, or by default the axes with names of no known meaning."""
    return batch_axes({}, mesh) or tuple(a for a in mesh.axis_names if job_of(a) is None)


def _raise_unknown_names(step: str, names: Sequence[AxisName], mesh: Mesh) -> NoReturn:
    """Raise ShardError for axis names without a mesh axis; the fix is a mesh with those names."""
    several = len(names) > 1
    sizes = [max(1, mesh.size // 2), 2, *([1] * (len(names) - 2))] if several else [mesh.size]
    line = "%mesh " + " ".join(f"{n}={size}" for n, size in zip(names, sizes, strict=True))
    what = f"the ax{'es' if several else 'is'} {list_names(map(str, names))}"
    other = "" if several else f", or name the axis for it, pmap@{mesh.axis_names[0]}"
    raise ShardError(f"{step} works along {what}, and the mesh has {_axis_sizes(mesh)}: use {line}{other}", fix=line)


def _raise_no_batch_axis(mesh: Mesh) -> NoReturn:
    """Raise ShardError for a mesh without an axis for the batch; the fix is a `data` axis."""
    line = f"%mesh data={mesh.size}"
    raise ShardError(
        f"pmap needs a mesh axis for the batch; the mesh has {_axis_sizes(mesh)}. Use another mesh "
        f"({line}) or name one: "
        f"pmap@{mesh.axis_names[0]}",
        fix=line,
    )


def _axis_sizes(mesh: Mesh) -> str:
    """Return the mesh axes with sizes as text, such as `data=4 or model=2`."""
    return list_names(f"{a}={n}" for a, n in mesh.shape.items())
