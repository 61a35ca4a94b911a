"""In which memory arrays lie: the devices' own, or the host's.

JAX names it twice: a sharding has a memory kind ("pinned_host"), an array's type a memory space. Of the kinds only
"pinned_host" is a space of its own; what is "unpinned_host" has the type of an array on its device (jax 0.10 to 0.12).
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax._src.core import MemorySpace, ShapedArray  # jax.memory and jax.core have them without a type
from jax.sharding import NamedSharding, SingleDeviceSharding

HOST = "pinned_host"
HOST_KINDS = (HOST, "unpinned_host")


def memory_kind(x: Any) -> str | None:
    """The memory kind of an array, a shape or a type on the host; None on the devices.

    >>> import jax.numpy as jnp
    >>> memory_kind(jnp.ones(4)) is None
    True
    """
    sharding = getattr(x, "sharding", None)
    kind = getattr(sharding, "memory_kind", None)
    if kind in HOST_KINDS:
        return kind
    return HOST if getattr(x, "memory_space", None) is MemorySpace.Host else None


def space_of(kind: str | None) -> MemorySpace:
    """The memory space of a memory kind."""
    return MemorySpace.Host if kind == HOST else MemorySpace.Device


def shape_in(shape: Sequence[int], dtype: Any, weak: bool, kind: str | None) -> jax.ShapeDtypeStruct:
    """A shape with its memory kind, and nothing else of where it lies."""
    if kind is None:
        return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)
    anywhere = SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak, sharding=anywhere)


def lowered_as(shapes: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    """Shapes to lower a program with whose inputs lie as `shardings` say: JAX wants it of those on the host twice."""
    return [
        jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            weak_type=bool(x.weak_type),
            sharding=at if at.memory_kind in HOST_KINDS else None,
        )
        for x, at in zip(shapes, shardings, strict=True)
    ]


def traced_as(x: Any) -> Any:
    """The type to trace a shape with: JAX reads the host's memory of one device as that of the device."""
    if not isinstance(x, jax.ShapeDtypeStruct) or memory_kind(x) is None:
        return x
    space = space_of(memory_kind(x))
    return ShapedArray(x.shape, x.dtype, weak_type=bool(x.weak_type), memory_space=space)


def on_host(result: Any, which: Any) -> Any:
    """`result` with those arrays put on the host for which `which`, a prefix of its tree, is true; None for none."""
    if which is None:
        return result
    flags = jax.tree.broadcast(which, result)
    return jax.tree.map(lambda x, flag: jax.device_put(x, MemorySpace.Host) if flag else x, result, flags)
