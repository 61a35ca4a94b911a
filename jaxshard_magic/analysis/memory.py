"""What a device holds while the step runs, from XLA's own accounts of the compiled program."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from ..hardware import Chip
from ..report import DeviceMemory, Leaf, Memory
from ..targets import gpu

_ROLES = ("params", "optimizer", "batch")


def memory(stats: Any, leaves: Sequence[Leaf], mesh: Mesh, limit: int | None) -> Memory:
    """Bytes per device at the peak of the step, arguments split by role.

    `stats` is XLA's memory analysis, None where there is none; `leaves` are the arguments that the program reads;
    `limit` is what a device offers, `device_limit`.
    `other` holds keys, arguments without a role, outputs that reuse no argument's memory, the program itself and the
    padding of arguments (TPU).
    The parts add up to `peak`; without figures from XLA, `temporaries` and `peak` are None.
    """
    roles = Counter[str]()
    for leaf in leaves:
        roles[leaf.role if leaf.role in _ROLES else "other"] += leaf.bytes_per_device
    temporaries = peak = None
    if stats is not None:
        outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
        lasting = stats.argument_size_in_bytes + outputs + stats.generated_code_size_in_bytes
        told = getattr(stats, "peak_memory_in_bytes", 0)
        if told and mesh.devices.flat[0].platform == "tpu":
            peak = max(
                told + stats.generated_code_size_in_bytes, lasting
            )  # what lies in one place one after the other
        else:
            peak = max(told, lasting + stats.temp_size_in_bytes)  # CPU's own leaves out the temporaries
        temporaries = peak - lasting
        roles["other"] = lasting - sum(roles[role] for role in _ROLES)
    alike = DeviceMemory(
        device=0,
        params=roles["params"],
        optimizer=roles["optimizer"],
        batch=roles["batch"],
        other=roles["other"],
        temporaries=temporaries,
        peak=peak,
        limit=limit,
    )
    devices = mesh.devices.flatten().tolist()
    return Memory(tuple(replace(alike, device=d.id) for d in devices), "compiled")


def with_limit(found: Memory, limit: int) -> Memory:
    """The same bytes on devices that have `limit` each."""
    return replace(found, per_device=tuple(replace(d, limit=limit) for d in found.per_device))


def with_temporaries(found: Memory, reserved: int) -> Memory:
    """The same with the bytes that the compiler's buffer assignment sets aside for temporaries, on a backend whose own
    figures count those of two memories together (TPU)."""
    rows = []
    for d in found.per_device:
        held = d.params + d.optimizer + d.batch + d.other
        rows.append(replace(d, temporaries=reserved, peak=held + reserved))
    return replace(found, per_device=tuple(rows))


def peaks(mesh: Mesh) -> tuple[int | None, ...]:
    """The most bytes that each device of a mesh has held so far; None where its backend does not say."""
    return tuple(_stats(device).get("peak_bytes_in_use") for device in mesh.devices.flatten().tolist())


def with_measured(found: Memory, before: Sequence[int | None], after: Sequence[int | None]) -> Memory:
    """The peaks that devices came to while the step ran, in the mesh's order. A backend tells the most since it
    started: where that was no more than `before` the step, the step's own is not known."""
    if len(before) != len(after):
        return found
    rows = zip(found.per_device, before, after, strict=True)
    measured = (
        replace(d, measured=b if a is not None and b is not None and b > a else None) for d, a, b in rows
    )
    return replace(found, per_device=tuple(measured))


def usable(chip: Chip) -> int:
    """Bytes that a program gets of a chip's memory."""
    return (gpu.usable(chip) if chip.kind == "gpu" else chip.usable) or chip.hbm


def room(mesh: Mesh, chip: Chip | None = None) -> int | None:
    """Bytes that programs have on each device of `mesh`, or of a mesh of `chip`; None where it is not known."""
    return device_limit(mesh.devices.flat[0]) if chip is None else usable(chip)


def device_limit(device: Any) -> int | None:
    """Bytes that programs may use on a device; None where its backend does not say."""
    return _stats(device).get("bytes_limit")


def _stats(device: Any) -> dict[str, int]:
    try:
        return device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # a device that is not attached
        return {}
