"""Layout report of existing arrays, whatever sharded them: a step, `device_put`, or nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.tree_util import GetAttrKey

from ..device_arrays import device_number
from ..errors import ShardError
from ..program.arrays import arrays_with_paths
from ..program.sizes import array_bytes
from ..report import Advice, Leaf, MeshInfo, Report, Spec
from ..report.parts import dim_axes, shard_index
from .leaves import as_spec
from .mesh_info import detect_mesh_info, devices_info

ALONE = "x"  # path of an array passed by itself


class ArrayLayout(NamedTuple):
    """Layout of one array on a mesh.

    Attributes:
        spec: The mesh axes of each dimension.
        within: Per mesh axis, the range of positions with a part of the array; axes in full use are left out.
        why: Remark for the reader, such as the memory kind; "" for none.
    """

    spec: Spec
    within: dict[str, tuple[int, int]]
    why: str


def report_arrays(value: Any, name: str = "") -> Report:
    """Return a report of the layout of the arrays in `value`. No array is moved or read.

    Args:
        value: A `jax.Array`, any pytree of arrays, or an NNX object. Shapes with a sharding count as well.
        name: Prefix of the paths.

    Raises:
        ShardError: No array is on a device, or one is a tracer.
    """
    found = arrays_with_paths(value, (GetAttrKey(name),) if name else ())
    if any(isinstance(x, Tracer) for _, x in found):
        raise ShardError("an array that is being traced lies nowhere yet: show it outside of the jitted function")
    with_sharding = [(path or ALONE, x, s) for path, x in found if (s := _sharding(x)) is not None]
    if not with_sharding:
        what = "arrays, but none of them on a device" if found else "no arrays"
        raise ShardError(
            f"{name or ALONE} is of type {type(value).__name__} and holds {what}; give a jax.Array or a pytree of them"
        )
    mesh = _mesh(with_sharding)
    lying = [(path, x, _lying(tuple(x.shape), sharding, mesh)) for path, x, sharding in with_sharding]
    return Report(
        name=name,
        strategy="",
        options={},
        mesh=mesh,
        leaves=tuple(_leaf(path, x, lies) for path, x, lies in lying if lies is not None),
        advice=(
            *(_elsewhere(path, x) for path, x, lies in lying if lies is None),
            *_left_out(len(found) - len(with_sharding)),
        ),
    )


def _sharding(x: Any) -> Sharding | None:
    """Return the sharding of an array; None for a NumPy array, a shape without sharding, and a mesh without devices."""
    sharding = getattr(x, "sharding", None)
    # An AbstractMesh has axes and no devices.
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        return None
    return sharding if isinstance(sharding, Sharding) else None


def _mesh(on: Sequence[tuple[str, Any, Sharding]]) -> MeshInfo:
    """Return the largest mesh named by an array, and the most frequent of equal sizes; without a mesh, the devices in a
    row."""
    meshes = Counter(s.mesh for _, _, s in on if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh))
    if meshes:
        return detect_mesh_info(max(meshes, key=lambda mesh: (mesh.size, meshes[mesh])))
    devices = {device_number(d): d for _, _, sharding in on for d in sharding.device_set}
    return devices_info([devices[i] for i in sorted(devices)])


def _leaf(path: str, x: Any, lying: ArrayLayout) -> Leaf:
    shape, (spec, within, why) = tuple(x.shape), lying
    # A deleted array still has its shape and sharding.
    if isinstance(x, jax.Array) and x.is_deleted():
        why = "deleted: its memory was donated to a call, or freed"
    held = x.sharding.shard_shape(shape)
    return Leaf(
        path=path,
        role="rng" if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else "other",
        shape=shape,
        dtype=str(x.dtype),
        spec=spec,
        bytes=array_bytes(shape, x.dtype),
        bytes_per_device=array_bytes(held, x.dtype),
        why=why,
        within=within,
    )


def _lying(shape: tuple[int, ...], sharding: Sharding, mesh: MeshInfo) -> ArrayLayout | None:
    """Return the layout over the axes of `mesh`; None where no spec expresses the layout."""
    kind = sharding.memory_kind
    # Default memory is not worth a remark: "device" on accelerators, "unpinned_host" on CPU.
    why = f"in {kind} memory" if kind not in (None, "device", "unpinned_host") else ""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        own = sharding.mesh
        ids = tuple(map(device_number, own.devices.flat))
        # A spec can be copied only from the same mesh. Any other sharding is read from the slices of its devices.
        if (dict(own.shape), ids) == (mesh.axes, mesh.devices):
            return ArrayLayout(as_spec(dim_axes(sharding.spec, len(shape))), {}, why)
    starts = {
        device_number(device): tuple(part.start or 0 for part in index)
        for device, index in sharding.devices_indices_map(shape).items()
    }
    read = _spec_from_starts(starts, sharding.shard_shape(shape), mesh)
    if read is None:
        return None
    if not why and len(starts) == 1 < len(mesh.devices):
        why = f"on device {next(iter(starts))} alone"
    return ArrayLayout(*read, why)


def _spec_from_starts(
    starts: Mapping[int, tuple[int, ...]], block: Sequence[int], mesh: MeshInfo
) -> tuple[Spec, dict[str, tuple[int, int]]] | None:
    """Return spec and mesh range from the start of each device's slice; None where no spec over the mesh axes fits.

    Args:
        starts: Per device, the first index of its slice in each dimension.
        block: Shape of all slices.
        mesh: The mesh.
    """
    place = {device: i for i, device in enumerate(mesh.devices)}
    if not starts.keys() <= place.keys():
        return None
    starts_at = {tuple(mesh.place(place[device]).values()): begins for device, begins in starts.items()}
    low = tuple(map(min, zip(*starts_at, strict=True)))
    sizes = tuple(max(each) + 1 - first for each, first in zip(zip(*starts_at, strict=True), low, strict=True))
    if prod(sizes) != len(starts_at):  # the devices form no box of mesh coordinates
        return None
    names = tuple(mesh.axes)
    box = dict(zip(names, sizes, strict=True))
    cuts = [[names[i] for i in _axes_of(dim, starts_at, low, sizes)] for dim in range(len(block))]
    for coordinates, begins in starts_at.items():
        # The axes are a guess from neighbors: they have to reproduce the start of every slice.
        inside = {name: i - first for name, i, first in zip(names, coordinates, low, strict=True)}
        expected = (shard_index(inside, axes, box) * size for axes, size in zip(cuts, block, strict=True))
        if tuple(expected) != begins:
            return None
    within = {names[i]: (low[i], low[i] + n) for i, n in enumerate(sizes) if n < mesh.axes[names[i]]}
    return as_spec(cuts), within


def _axes_of(
    dim: int, at: Mapping[tuple[int, ...], tuple[int, ...]], low: tuple[int, ...], sizes: tuple[int, ...]
) -> list[int]:
    """Return the positions of the mesh axes along which the slices of a dimension move, the largest move first."""
    moved = {}
    for i, size in enumerate(sizes):
        if size > 1:
            moved[i] = at[(*low[:i], low[i] + 1, *low[i + 1 :])][dim] - at[low][dim]
    # The major axis of a dimension moves the slice farthest.
    return sorted((i for i, by in moved.items() if by), key=lambda i: -moved[i])


def _elsewhere(path: str, x: Any) -> Advice:
    told = " ".join(str(x.sharding).split())
    return Advice("elsewhere", "warning", f"{path} is cut along none of these axes, and left out: {told}.")


def _left_out(count: int) -> tuple[Advice, ...]:
    if not count:
        return ()
    some = "1 array lies" if count == 1 else f"{count} arrays lie"
    return (Advice("host", "info", f"{some} on no device (NumPy's, or a shape without a sharding), and left out."),)
