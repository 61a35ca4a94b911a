"""Compute the device memory of a step from XLA's memory analysis."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from ..device_arrays import device_number
from ..program.roles import FROZEN
from ..report import DeviceMemory, Leaf, Memory

_ROLES = ("params", "optimizer", "batch")

# Errors of compilers that found no room for a program.
_SIZE = r"([\d.]+)([KMGT]?)"
_FORMS = (
    re.compile(rf"required for HLO temporaries \({_SIZE}\) exceeds available HBM"),
    re.compile(rf"Used {_SIZE} of [\d.]+[KMGT]? hbm"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


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
        # A bar of memory has frozen weights among the parameters.
        roles["params" if role == FROZEN else role if role in _ROLES else "other"] += size
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


def parse_required_bytes(message: str) -> int | None:
    """Return the bytes needed on one device, from the error message of a TPU compiler; None for a message without
    sizes.

    The result is as rounded as the message.

    >>> parse_required_bytes("Ran out of memory in memory space hbm. Used 17.5G of 15.75G hbm. Exceeded by 1.75G.")
    18790481920
    """
    for form in _FORMS:
        if sizes := form.search(message):
            number, unit = sizes.groups()
            return int(float(number) * _UNITS[unit])
    return None


def with_needed(memory: Memory, needed: int, stand_in: str | None) -> Memory:
    """Return the memory of a refused program with the peak requested by the program's own compiler.

    Args:
        memory: Memory of each device, from the compiler of `stand_in`.
        needed: Bytes needed on a device.
        stand_in: Chip with a successful compile; None without one.
    """
    source = f"compiled for {stand_in}" if stand_in else "refused"
    return replace(with_temporaries(memory, lambda arrays: max(needed - arrays, 0)), source=source)


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
