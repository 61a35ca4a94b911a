"""What a device holds while the step runs, from XLA's own accounts of the compiled program."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from ..hardware import Chip, chip
from ..placing import number_of
from ..report import DeviceMemory, Leaf, Memory
from ..targets import gpu, target_of

_ROLES = ("params", "optimizer", "batch")


def memory(stats: Any, leaves: Iterable[Leaf], mesh: Mesh, limit: int | None, host_bytes: int = 0) -> Memory:
    """Bytes per device at the peak of the step, arguments split by role.

    `stats` is XLA's memory analysis, None where there is none; `leaves` are the arguments that the program reads;
    `limit` is what a device offers, `device_limit`; `host_bytes` are those of arrays on the host in XLA's figures.
    `other` holds keys, arguments without a role, outputs that reuse no argument's memory, the program itself and the
    padding of arguments (TPU).
    The parts add up to `peak`; without figures from XLA, `temporaries` and `peak` are None.
    """
    arguments = by_role((leaf.role, leaf.bytes_per_device) for leaf in leaves)
    temporaries = None
    if stats is not None:
        outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
        lasting = stats.argument_size_in_bytes + outputs + stats.generated_code_size_in_bytes - host_bytes
        reported = getattr(stats, "peak_memory_in_bytes", 0)
        if reported and mesh.devices.flat[0].platform == "tpu":
            # What lies in one place one after the other counts once.
            peak = max(reported + stats.generated_code_size_in_bytes, lasting)
        else:
            peak = max(
                reported - host_bytes, lasting + stats.temp_size_in_bytes
            )  # CPU's own leaves out the temporaries
        temporaries = peak - lasting
        arguments["other"] += lasting - arguments.total()
    devices = mesh.devices.flatten().tolist()
    return Memory(
        tuple(device_memory(number_of(d), arguments, temporaries, limit) for d in devices), "compiled"
    )


def by_role(sizes: Iterable[tuple[str, int]]) -> Counter[str]:
    """Bytes of the arrays of each role that a `DeviceMemory` tells apart, all others as "other"."""
    roles = Counter[str]()
    for role, size in sizes:
        roles[role if role in _ROLES else "other"] += size
    return roles


def device_memory(
    device: int, arrays: Counter[str], temporaries: int | None, limit: int | None
) -> DeviceMemory:
    """What the device of this id holds: `arrays` by role, and beside them `temporaries`, None where not known."""
    peak = None if temporaries is None else arrays.total() + temporaries
    own = {role: arrays[role] for role in (*_ROLES, "other")}
    return DeviceMemory(device, **own, temporaries=temporaries, peak=peak, limit=limit)


def with_limit(memory: Memory, limit: int) -> Memory:
    """The same bytes on devices that have `limit` each."""
    return replace(memory, per_device=tuple(replace(d, limit=limit) for d in memory.per_device))


def with_temporaries(memory: Memory, temporaries_beside: Callable[[int], int]) -> Memory:
    """The same with other bytes for temporaries, which are given for the bytes of a device's own arrays."""
    rows = []
    for d in memory.per_device:
        arrays = d.params + d.optimizer + d.batch + d.other
        temporaries = temporaries_beside(arrays)
        rows.append(replace(d, temporaries=temporaries, peak=arrays + temporaries))
    return replace(memory, per_device=tuple(rows))


def peaks(mesh: Mesh) -> tuple[int | None, ...]:
    """The most bytes that each device of a mesh has held so far; None where its backend does not say."""
    return tuple(_stats(device).get("peak_bytes_in_use") for device in mesh.devices.flatten().tolist())


def in_use(mesh: Mesh) -> int | None:
    """Bytes that the fullest of a mesh's devices here holds now; None where no backend says."""
    devices = (d for d in mesh.devices.flat if d.process_index == jax.process_index())
    return max((n for d in devices if (n := _stats(d).get("bytes_in_use")) is not None), default=None)


def with_measured(memory: Memory, before: Sequence[int | None], after: Sequence[int | None]) -> Memory:
    """The peaks that devices came to while the step ran, in the mesh's order. A backend tells the most since it
    started: where that was no more than `before` the step, the step's own is not known."""
    if len(before) != len(after):
        return memory
    rows = zip(memory.per_device, before, after, strict=True)
    measured = (
        replace(d, measured=b if a is not None and b is not None and b > a else None) for d, a, b in rows
    )
    return replace(memory, per_device=tuple(measured))


def usable(chip: Chip) -> int:
    """Bytes that a program gets of a chip's memory."""
    return (gpu.usable(chip) if chip.kind == "gpu" else chip.usable) or chip.hbm


def room(mesh: Mesh, of: Chip | None = None) -> int | None:
    """Bytes that programs have on each device of `mesh`, or of a mesh of the chip `of`; None where it is not known."""
    return device_limit(mesh.devices.flat[0]) if of is None else usable(of)


def room_for(mesh: Mesh, on: str | None) -> int | None:
    """Bytes that programs have on each device of a mesh: of the chip `on`, of that which the mesh is of, or as its
    devices say; None where that is not known."""
    target = target_of(mesh)
    return room(mesh, chip(on) if on is not None else None if target is None else target.chip)


def device_limit(device: Any) -> int | None:
    """Bytes that programs may use on a device; None where its backend does not say."""
    return _stats(device).get("bytes_limit")


def _stats(device: Any) -> dict[str, int]:
    try:
        return device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # a device that is not attached
        return {}
