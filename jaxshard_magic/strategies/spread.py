"""How a call of a step written for one device is spread over a mesh: which axes its names stand for, and what of each
argument a device takes."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from ..config.request import Request
from ..errors import ShardError
from ..program.batching.batch import find_batch
from ..program.dimensions import Dimensions
from ..program.mapped import Cut, Mapped, Name, PerDevice, by_leaf, on_a_device
from ..program.peel import Peeled, specs
from ..program.roles import PARAMS
from ..program.trace import path_name, trace
from ..program.untraceable import explained, unbound
from .layout import Axes
from .named_axes import mesh_axes, spare_axes
from .placements import under
from .results import nothing_returned, returns_nothing

_SMALL = 2**20  # bytes of an array that is looked at


def spread(peeled: Peeled, request: Request) -> Mapped:
    """Find the axis names of a step and what of each argument a device takes.

    Decorated with `jax.pmap`, or where every array begins with a device axis, each device takes its place along that;
    else the batch is split and the rest is whole on every device. The request's specs may say which arguments are the
    batch. Traces the step as often as it takes to know its names.

    Raises `ShardError` for axes that the mesh does not have and for a batch that can't be found or does not divide.
    """
    name, given = peeled.step.name, request.specs
    if request.rules:
        raise ShardError(
            f"{name} is spread as pmap does it, so --rule has no say; leave --rule out, or use spmd"
        )
    call = _Call(peeled, request.mesh, request.axes.get("pmap", ()))
    said = peeled.step.pmap
    if said is not None and not given:
        names = [said.axis_name] if said.axis_name is not None else []
        axes = call.axes(names)
        cuts = _along(call, said.in_axes, axes)
        if cuts is not None:
            return call.mapped(axes, cuts, device_axis=True, out_axes=said.out_axes)
    stacked = _stacked(call) if said is None and not given else None
    return stacked or _split(call, given)


class _Call:
    """One call of the step on a mesh, traced as often as it takes to know the names of its axes."""

    def __init__(self, peeled: Peeled, mesh: Mesh, own: Axes):
        self.peeled, self.mesh, self.own = peeled, mesh, own
        self.step = peeled.step.name
        self.avals = specs(peeled.leaves)
        self.paths = [path for path, _, _ in peeled.inputs]
        self.names = [path_name(path) for path in self.paths]

    def axes(self, names: Sequence[Name]) -> tuple[dict[Name, Axes], tuple[Name, ...]]:
        """The mesh axes behind each name, and the names that arrays are cut along."""
        return mesh_axes(self.step, names, self.mesh, self.own)

    def mapped(
        self, axes: Any, cuts: Sequence[Cut | None], *, device_axis: bool, out_axes: Any = 0
    ) -> Mapped:
        found, over = axes
        sizes = {n: prod(self.mesh.shape[a] for a in of) for n, of in found.items()}
        return Mapped(found, sizes, over, tuple(cuts), device_axis, out_axes)

    def traced(self, cuts_of: Callable[[int], Sequence[Cut | None]], device_axis: bool) -> PerDevice:
        """The step as one device has it, with every name bound that it asks for. `cuts_of`: for how many devices."""
        names = [] if self.peeled.step.pmap is None else [self.peeled.step.pmap.axis_name]
        names = [n for n in names if n is not None]
        results: list[Any] = []

        def fun(*leaves):
            outs, paths, result = self.peeled.fun(*leaves)
            results.append(result)
            return outs, paths

        with explained(self.step):
            while True:
                known = names or self.own or spare_axes(self.mesh)
                axes = self.axes(names) if known else ({}, ())  # the step has yet to say which axis it lacks
                devices = self.mapped(axes, [], device_axis=device_axis).devices
                mapped = self.mapped(axes, cuts_of(devices), device_axis=device_axis)
                try:
                    with on_a_device(mapped):
                        traced = trace(fun, mapped.parts(self.avals), self.paths)
                except NameError as error:
                    missing = unbound(error)
                    if missing is None or missing in names:
                        raise
                    names.append(missing)
                else:
                    self.axes(names)
                    return mapped.traced(traced, results[-1])


def _along(call: _Call, in_axes: Any, axes: Any) -> list[Cut | None] | None:
    """The parts that `jax.pmap` would give each device; None where the arguments have no device axis.

    Raises `ShardError` for a device axis of another size than the mesh's.
    """
    devices = call.mapped(axes, [], device_axis=True).devices
    dims = _dims(call.peeled, in_axes)
    sizes = {
        aval.shape[d] if -len(aval.shape) <= d < len(aval.shape) else None
        for aval, d in zip(call.avals, dims, strict=True)
        if d is not None
    }
    if sizes <= {devices}:
        return [
            None if d is None else Cut(d % len(a.shape), True) for a, d in zip(call.avals, dims, strict=True)
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


def _dims(peeled: Peeled, in_axes: Any) -> list[int | None]:
    """The axis of each flat input that `jax.pmap` maps over: what it was told of the arguments by position, and 0."""
    args, kwargs = peeled.tree.unflatten(range(peeled.tree.num_leaves))
    if isinstance(in_axes, (tuple, list)):
        in_axes = tuple(in_axes[i] for i in peeled.positions)
    flat = [*by_leaf(in_axes, tuple(args)), *(0 for _ in jax.tree.leaves(kwargs))]
    return [flat[i] for i in peeled.array_places]


def _stacked(call: _Call) -> Mapped | None:
    """The call of an undecorated step whose every array begins with a device axis, the parameters alike all along it;
    None for other calls."""
    leading = {a.shape[0] if a.shape else None for a in call.avals}
    along_batch = prod(call.mesh.shape[a] for a in call.own or spare_axes(call.mesh))
    if len(leading) != 1 or not leading <= {call.mesh.size, along_batch}:
        return None
    cuts = [Cut(0, True)] * len(call.avals)
    try:
        traced = call.traced(lambda _: cuts, True)
    except (TypeError, ValueError):  # not written for what would be left
        return None
    first = len(traced.consts)
    params = [i - first for i, role in enumerate(traced.roles.of) if role == PARAMS and i >= first]
    if leading != {traced.mapped.devices} or not all(_alike(call.peeled.leaves[i]) for i in params):
        return None
    return call.mapped((traced.mapped.axes, traced.mapped.over), cuts, device_axis=True)


def _alike(x: Any) -> bool:
    """Is the array the same all along its first dimension? Of shapes and large arrays it is taken to be."""
    if isinstance(x, jax.ShapeDtypeStruct) or x.nbytes > _SMALL:
        return True
    values = np.asarray(x)
    return bool((values == values[:1]).all())


def _split(call: _Call, given: Mapping[str, PartitionSpec]) -> Mapped:
    """State as on one device, and the batch split: along the dimension that is found in the step, or was given."""
    if given:
        traced = call.traced(lambda n: _given_cuts(call, given, n), False)
        return call.mapped((traced.mapped.axes, traced.mapped.over), traced.mapped.cuts, device_axis=False)
    if not any(aval.shape for aval in call.avals):
        raise ShardError(
            f"{call.step} takes no arrays that could be split over devices; pmap splits its arguments"
        )
    nothing = [None] * len(call.avals)
    try:
        traced = call.traced(lambda _: nothing, False)
    except (TypeError, ValueError, AssertionError) as error:
        said = " ".join(str(error).partition("\n")[0].split())
        line = _said(call)
        raise ShardError(
            f"{call.step} can't be traced on its whole batch, which tells what to split ({said}); say it: {line}",
            fix=line,
        ) from error
    dims = Dimensions(traced.program, tuple(call.mesh.shape.values()))
    batch = find_batch(dims, traced.roles)
    first, devices, over = len(traced.consts), traced.mapped.devices, traced.mapped.over
    cuts = [
        Cut(batch.dims[i + first][0], False) if i + first in batch.dims else None for i in range(len(nothing))
    ]
    if returns_nothing(traced.flow):
        raise ShardError(nothing_returned(traced, traced.flow))
    if not any(cuts):
        line = _said(call)
        raise ShardError(
            f"{call.step} has no batch to split that can be found; say which argument it is: {line}", fix=line
        )
    for i, cut in enumerate(cuts):
        _divides(call, i, cut, devices, traced.mapped.mesh_axes)
    return call.mapped((traced.mapped.axes, over), cuts, device_axis=False)


def _said(call: _Call) -> str:
    """How the user says which argument is the batch; most often it is the last that has dimensions."""
    axis = next(iter(spare_axes(call.mesh)), call.mesh.axis_names[0])
    named = [name for name, aval in zip(call.names, call.avals, strict=True) if aval.shape]
    argument = named[-1].split(".")[0]
    return f"--spec \"{argument}=P('{axis}')\""


def _given_cuts(call: _Call, given: Mapping[str, PartitionSpec], devices: int) -> list[Cut | None]:
    cuts: list[Cut | None] = [None] * len(call.avals)
    for name, spec in given.items():
        dims = [d for d, entry in enumerate(spec) if entry is not None]
        inputs = under(name, call.names)
        if len(dims) != 1:
            raise ShardError(f"--spec {name}={spec}: under pmap a spec says which one dimension is the batch")
        for i in inputs:
            if len(call.avals[i].shape) > dims[0]:
                cuts[i] = Cut(dims[0], False)
                _divides(call, i, cuts[i], devices, ())
    return cuts


def _divides(call: _Call, i: int, cut: Cut | None, devices: int, over: Axes) -> None:
    size = devices if cut is None else call.avals[i].shape[cut.dim]
    if cut is None or size % devices == 0:
        return
    names = "+".join(over) or "the batch axes"
    near = [m for m in (size // devices * devices, -(-size // devices) * devices) if m]
    raise ShardError(
        f"{call.names[i]} has {size} examples (dim {cut.dim}), which do not divide by {names}={devices}; use a batch "
        f"of {' or '.join(map(str, dict.fromkeys(near)))}"
    )
