"""Arrays as they lie now -> a Report of their layout, whatever laid them out: a step, `device_put`, or nobody."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.tree_util import GetAttrKey

from ..errors import ShardError
from ..placing import number_of
from ..program.arrays import arrays_in
from ..program.sizes import array_bytes
from ..report import Advice, Leaf, MeshInfo, Report, Spec
from ..report.parts import cut_of, part_at
from .leaves import as_spec
from .mesh_info import devices_info, info_of

ALONE = "x"  # what an array without a path is called


class Lying(NamedTuple):
    """How one array lies on the mesh: what cuts its dimensions, and which part of the mesh it is on."""

    spec: Spec
    within: dict[str, tuple[int, int]]
    why: str


def placed(value: Any, name: str = "") -> Report:
    """How the arrays in `value` lie on their devices; nothing is moved or read.

    Args:
        value: a `jax.Array`, any pytree of them, or an NNX object; shapes with a sharding count as well.
        name: what its paths begin with.

    Raises ShardError where no array in it lies on a device.
    """
    found = arrays_in(value, (GetAttrKey(name),) if name else ())
    if any(isinstance(x, Tracer) for _, x in found):
        raise ShardError(
            "an array that is being traced lies nowhere yet: show it outside of the jitted function"
        )
    on = [(path or ALONE, x, s) for path, x in found if (s := _sharding(x)) is not None]
    if not on:
        what = "arrays, but none of them on a device" if found else "no arrays"
        raise ShardError(
            f"{name or ALONE} is of type {type(value).__name__} and holds {what}; give a jax.Array or a pytree of them"
        )
    mesh = _mesh(on)
    lying = [(path, x, _lying(tuple(x.shape), sharding, mesh)) for path, x, sharding in on]
    return Report(
        name=name,
        strategy="",
        options={},
        mesh=mesh,
        leaves=tuple(_leaf(path, x, lies) for path, x, lies in lying if lies is not None),
        advice=(
            *(_elsewhere(path, x) for path, x, lies in lying if lies is None),
            *_left_out(len(found) - len(on)),
        ),
    )


def _sharding(x: Any) -> Sharding | None:
    """Where an array lies; None for one of NumPy's, a shape without a place, and a mesh without devices."""
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        return None
    return sharding if isinstance(sharding, Sharding) else None


def _mesh(on: Sequence[tuple[str, Any, Sharding]]) -> MeshInfo:
    """The largest mesh that an array names, of those the most frequent; without one the devices in a row."""
    meshes = Counter(s.mesh for _, _, s in on if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh))
    if meshes:
        return info_of(max(meshes, key=lambda mesh: (mesh.size, meshes[mesh])))
    devices = {number_of(d): d for _, _, sharding in on for d in sharding.device_set}
    return devices_info([devices[i] for i in sorted(devices)])


def _leaf(path: str, x: Any, lying: Lying) -> Leaf:
    shape, (spec, within, why) = tuple(x.shape), lying
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


def _lying(shape: tuple[int, ...], sharding: Sharding, mesh: MeshInfo) -> Lying | None:
    """None where no spec over the mesh's axes tells it."""
    kind = sharding.memory_kind
    why = f"in {kind} memory" if kind not in (None, "device", "unpinned_host") else ""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        own = sharding.mesh
        ids = tuple(map(number_of, own.devices.flat))
        if (dict(own.shape), ids) == (mesh.axes, mesh.devices):
            return Lying(as_spec(cut_of(sharding.spec, len(shape))), {}, why)
    starts = {
        number_of(device): tuple(part.start or 0 for part in index)
        for device, index in sharding.devices_indices_map(shape).items()
    }
    read = _read(starts, sharding.shard_shape(shape), mesh)
    if read is None:
        return None
    if not why and len(starts) == 1 < len(mesh.devices):
        why = f"on device {next(iter(starts))} alone"
    return Lying(*read, why)


def _read(
    starts: Mapping[int, tuple[int, ...]], block: Sequence[int], mesh: MeshInfo
) -> tuple[Spec, dict[str, tuple[int, int]]] | None:
    """Spec and part of the mesh, from where the slice of each device begins, each of the shape `block`; None where no
    spec over the mesh's axes says that."""
    place = {device: i for i, device in enumerate(mesh.devices)}
    if not starts.keys() <= place.keys():
        return None
    at = {tuple(mesh.place(place[device]).values()): begins for device, begins in starts.items()}
    low = tuple(map(min, zip(*at, strict=True)))
    sizes = tuple(max(each) + 1 - first for each, first in zip(zip(*at, strict=True), low, strict=True))
    if prod(sizes) != len(at):  # no box of the mesh
        return None
    names = tuple(mesh.axes)
    box = dict(zip(names, sizes, strict=True))
    cuts = [[names[i] for i in _axes_of(dim, at, low, sizes)] for dim in range(len(block))]
    for where, begins in at.items():
        inside = {name: i - first for name, i, first in zip(names, where, low, strict=True)}
        told = (part_at(inside, axes, box) * size for axes, size in zip(cuts, block, strict=True))
        if tuple(told) != begins:
            return None
    within = {names[i]: (low[i], low[i] + n) for i, n in enumerate(sizes) if n < mesh.axes[names[i]]}
    return as_spec(cuts), within


def _axes_of(
    dim: int, at: Mapping[tuple[int, ...], tuple[int, ...]], low: tuple[int, ...], sizes: tuple[int, ...]
) -> list[int]:
    """The mesh axes, by number, along which slices begin elsewhere in a dimension, the one that moves most first."""
    moved = {}
    for i, size in enumerate(sizes):
        if size > 1:
            moved[i] = at[(*low[:i], low[i] + 1, *low[i + 1 :])][dim] - at[low][dim]
    return sorted((i for i, by in moved.items() if by), key=lambda i: -moved[i])


def _elsewhere(path: str, x: Any) -> Advice:
    told = " ".join(str(x.sharding).split())
    return Advice("elsewhere", "warning", f"{path} is cut along none of these axes, and left out: {told}.")


def _left_out(count: int) -> tuple[Advice, ...]:
    if not count:
        return ()
    some = "1 array lies" if count == 1 else f"{count} arrays lie"
    return (
        Advice(
            "host", "info", f"{some} on no device (NumPy's, or a shape without a sharding), and left out."
        ),
    )
