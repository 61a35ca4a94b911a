"""Compute the device memory of a step from XLA's memory analysis, and read the memory statistics of devices."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from ..device_arrays import device_number
from ..hardware import Chip, chip
from ..report import DeviceMemory, Leaf, Memory
from ..targets import gpu, target_of

_ROLES = ("params", "optimizer", "batch")


def memory(stats: Any, leaves: Iterable[Leaf], mesh: Mesh, limit: int | None, host_bytes: int = 0) -> Memory:
    """Return the bytes per device at the peak of the step, arguments divided by role.

    Args:
        stats: XLA's memory analysis; None without one.
        leaves: Arguments read by the program.
        mesh: Mesh of the step.
        limit: Usable bytes of a device; None if unknown.
        host_bytes: Bytes of arrays on the host counted by XLA.

    Returns:
        Parts adding up to `peak`. `other` contains keys, arguments without a role, outputs without a donated argument,
        the program's code, and the padding of arguments (TPU). Without `stats`, `temporaries` and `peak` are None.
    """
    arguments = by_role((leaf.role, leaf.bytes_per_device) for leaf in leaves)
    temporaries = None
    if stats is not None:
        outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
        lasting = stats.argument_size_in_bytes + outputs + stats.generated_code_size_in_bytes - host_bytes
        reported = getattr(stats, "peak_memory_in_bytes", 0)
        if reported and mesh.devices.flat[0].platform == "tpu":
            # TPU's own peak counts memory shared by successive values once, and leaves out the program's code.
            peak = max(reported + stats.generated_code_size_in_bytes, lasting)
        else:
            # The CPU's own peak leaves out the temporaries.
            peak = max(reported - host_bytes, lasting + stats.temp_size_in_bytes)
        temporaries = peak - lasting
        # The remainder: keys, undonated outputs, code, and the padding of arguments (TPU).
        arguments["other"] += lasting - arguments.total()
    devices = mesh.devices.flatten().tolist()
    return Memory(tuple(device_memory(device_number(d), arguments, temporaries, limit) for d in devices), "compiled")


def by_role(sizes: Iterable[tuple[str, int]]) -> Counter[str]:
    """Return the total bytes of each role in a `DeviceMemory`; all other roles count as "other"."""
    roles = Counter[str]()
    for role, size in sizes:
        roles[role if role in _ROLES else "other"] += size
    return roles


def device_memory(device: int, arrays: Counter[str], temporaries: int | None, limit: int | None) -> DeviceMemory:
    """Return the memory of one device.

    Args:
        device: Device id.
        arrays: Bytes of arrays by role.
        temporaries: Bytes of temporaries; None if unknown.
        limit: Usable bytes of the device; None if unknown.
    """
    peak = None if temporaries is None else arrays.total() + temporaries
    own = {role: arrays[role] for role in (*_ROLES, "other")}
    return DeviceMemory(device, **own, temporaries=temporaries, peak=peak, limit=limit)


def with_limit(memory: Memory, limit: int) -> Memory:
    """Return `memory` with `limit` usable bytes on each device."""
    return replace(memory, per_device=tuple(replace(d, limit=limit) for d in memory.per_device))


def with_temporaries(memory: Memory, temporaries_beside: Callable[[int], int]) -> Memory:
    """Return `memory` with other temporaries.

    Args:
        memory: Memory of each device.
        temporaries_beside: Returns bytes of temporaries for the total bytes of a device's arrays.
    """
    rows = []
    for d in memory.per_device:
        arrays = d.params + d.optimizer + d.batch + d.other
        temporaries = temporaries_beside(arrays)
        rows.append(replace(d, temporaries=temporaries, peak=arrays + temporaries))
    return replace(memory, per_device=tuple(rows))


def peak_bytes(mesh: Mesh) -> tuple[int | None, ...]:
    """Return the peak bytes of each device of a mesh since the start of the backend; None where the backend has no
    statistics."""
    return tuple(_stats(device).get("peak_bytes_in_use") for device in mesh.devices.flatten().tolist())


def bytes_in_use(mesh: Mesh) -> int | None:
    """Return the bytes in use on the fullest local device of a mesh; None if no backend has statistics."""
    devices = (d for d in mesh.devices.flat if d.process_index == jax.process_index())
    return max((n for d in devices if (n := _stats(d).get("bytes_in_use")) is not None), default=None)


def with_measured(memory: Memory, before: Sequence[int | None], after: Sequence[int | None]) -> Memory:
    """Return `memory` with the measured peak of each device while the step ran, None where no higher than before the
    step.

    Args:
        memory: Memory of each device.
        before: Peak bytes before the step, in the order of the mesh.
        after: Peak bytes after the step, in the order of the mesh.
    """
    if len(before) != len(after):
        return memory
    rows = zip(memory.per_device, before, after, strict=True)
    # A backend reports the peak since its start. A peak no higher than before the step says nothing about the step.
    measured = (replace(d, measured=b if a is not None and b is not None and b > a else None) for d, a, b in rows)
    return replace(memory, per_device=tuple(measured))


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
