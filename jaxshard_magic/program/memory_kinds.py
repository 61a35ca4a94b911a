"""Translate between JAX's two names for the memory of an array: memory kinds and memory spaces.

A sharding has a memory kind ("pinned_host"), an aval has a memory space. Only the kind "pinned_host" has a space of its
own: an "unpinned_host" array has the aval of an array on a device (jax 0.10 to 0.12).
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax._src.core import MemorySpace, ShapedArray  # untyped in jax.memory and jax.core
from jax.sharding import NamedSharding, SingleDeviceSharding

HOST = "pinned_host"
HOST_KINDS = (HOST, "unpinned_host")


def memory_kind(x: Any) -> str | None:
    """Return the host memory kind of an array, shape or aval; None in device memory.

    >>> import jax.numpy as jnp
    >>> memory_kind(jnp.ones(4)) is None
    True
    """
    sharding = getattr(x, "sharding", None)
    kind = getattr(sharding, "memory_kind", None)
    if kind in HOST_KINDS:
        return kind
    return HOST if getattr(x, "memory_space", None) is MemorySpace.Host else None


def memory_space(kind: str | None) -> MemorySpace:
    """Return the memory space of a memory kind; None is device memory."""
    return MemorySpace.Host if kind == HOST else MemorySpace.Device


def shape_in_memory(shape: Sequence[int], dtype: Any, weak: bool, kind: str | None) -> jax.ShapeDtypeStruct:
    """Return a `ShapeDtypeStruct` with a memory kind and no other placement.

    Args:
        shape: Shape.
        dtype: Data type.
        weak: Whether the type is weak.
        kind: Memory kind; None for device memory, and no sharding.
    """
    if kind is None:
        return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)
    # A ShapeDtypeStruct carries a memory kind only inside a sharding, so any device serves.
    anywhere = SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak, sharding=anywhere)


def shapes_for_lowering(shapes: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    """Return shapes to lower a program with.

    JAX requires the sharding of a host input twice: in the shape here, and in the `in_shardings` of the jitted
    function.

    Args:
        shapes: Shapes of the inputs.
        shardings: Shardings of the inputs; only those in host memory are written into the shapes.
    """
    return [
        jax.ShapeDtypeStruct(
            x.shape, x.dtype, weak_type=bool(x.weak_type), sharding=at if at.memory_kind in HOST_KINDS else None
        )
        for x, at in zip(shapes, shardings, strict=True)
    ]


def aval_for_tracing(x: Any) -> Any:
    """Return the aval to trace a shape with; anything in device memory is returned unchanged."""
    if not isinstance(x, jax.ShapeDtypeStruct) or memory_kind(x) is None:
        return x
    # JAX traces a ShapeDtypeStruct with a single-device sharding as in device memory; an aval keeps its memory space.
    space = memory_space(memory_kind(x))
    return ShapedArray(x.shape, x.dtype, weak_type=bool(x.weak_type), memory_space=space)


def put_on_host(result: Any, prefix: Any) -> Any:
    """Move some arrays of a result to host memory.

    Args:
        result: Any pytree of arrays.
        prefix: Prefix of the tree of `result`, true for arrays to move; None moves nothing.
    """
    if prefix is None:
        return result
    flags = jax.tree.broadcast(prefix, result)
    return jax.tree.map(lambda x, flag: jax.device_put(x, MemorySpace.Host) if flag else x, result, flags)
