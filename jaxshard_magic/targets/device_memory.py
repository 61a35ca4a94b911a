"""Memory of devices: in use, at the peak, and available to programs, attached or not."""

from typing import Any

import jax
from jax.sharding import Mesh

from ..hardware import Chip, chip
from . import gpu, target_of


def peak_bytes(mesh: Mesh) -> tuple[int | None, ...]:
    """Return the peak bytes of each device of a mesh since the start of the backend; None where the backend has no
    statistics."""
    return tuple(_stats(device).get("peak_bytes_in_use") for device in mesh.devices.flatten().tolist())


def bytes_in_use(mesh: Mesh) -> int | None:
    """Return the bytes in use on the fullest local device of a mesh; None if no backend has statistics."""
    devices = (d for d in mesh.devices.flat if d.process_index == jax.process_index())
    return max((n for d in devices if (n := _stats(d).get("bytes_in_use")) is not None), default=None)


def usable_chip_bytes(chip: Chip) -> int:
    """Return the bytes of a chip's memory available to a program."""
    return (gpu.usable_bytes(chip) if chip.kind == "gpu" else chip.usable) or chip.hbm


def usable_bytes(mesh: Mesh, of: Chip | None = None) -> int | None:
    """Return the bytes available to programs on each device of `mesh`, or on the chip `of`; None if unknown."""
    return device_limit(mesh.devices.flat[0]) if of is None else usable_chip_bytes(of)


def usable_bytes_for(mesh: Mesh, on: str | None) -> int | None:
    """Return the bytes available to programs on each device of a mesh; None if unknown.

    Args:
        mesh: Mesh of attached devices or of a target.
        on: Name of a chip to use in place of the mesh's devices; None for the devices.
    """
    target = target_of(mesh)
    return usable_bytes(mesh, chip(on) if on is not None else None if target is None else target.chip)


def device_limit(device: Any) -> int | None:
    """Return the bytes available to programs on a device; None if the backend has no statistics."""
    return _stats(device).get("bytes_limit")


def _stats(device: Any) -> dict[str, int]:
    try:
        return device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # a device that is not attached
        return {}
