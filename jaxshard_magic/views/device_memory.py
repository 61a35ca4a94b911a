"""Devices for the views: memory of each, in groups of devices that are equal to within 1%, and their pipeline stages.

All sizes are bytes.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxshard_magic.report import DeviceMemory, Memory, Report
from jaxshard_magic.views.format import device_text, index_text
from jaxshard_magic.views.leaf_rows import partial_axes

ROLES = ("params", "optimizer", "batch", "temporaries", "other")

ALIKE = 0.01  # share of the peak within which devices are equal
SEEN = 0.05  # share of the limit below which bars have a scale of their own


@dataclass(frozen=True)
class DeviceGroup:
    """Devices with equal memory to within 1%.

    Attributes:
        devices: Device ids, ascending.
        fullest: Memory of the device with most bytes.
    """

    devices: tuple[int, ...]
    fullest: DeviceMemory


def bytes_of_arrays(device: DeviceMemory) -> int:
    """Return the bytes of the step's arrays on one device, without temporaries."""
    return device.params + device.optimizer + device.batch + device.other


def bytes_at_peak(device: DeviceMemory) -> int:
    """Return the bytes on one device at the peak; if the peak is unknown, the sum of all known bytes."""
    return device.peak if device.peak is not None else bytes_of_arrays(device) + (device.temporaries or 0)


def groups(memory: Memory) -> tuple[DeviceGroup, ...]:
    """Group devices with equal memory, the fullest group first."""
    identical: dict[tuple[int | None, ...], list[DeviceMemory]] = defaultdict(list)
    for device in memory.per_device:
        identical[(*(getattr(device, role) for role in ROLES), device.peak)].append(device)
    order = sorted(identical.values(), key=lambda devices: (-bytes_at_peak(devices[0]), devices[0].device))
    grouped: list[tuple[DeviceMemory, list[int]]] = []
    first_open = 0  # the first group that this and later devices may join
    for devices in order:
        # Devices come in descending order: a group too full for this device is too full for all later ones.
        while first_open < len(grouped) and bytes_at_peak(grouped[first_open][0]) - bytes_at_peak(
            devices[0]
        ) > ALIKE * bytes_at_peak(grouped[first_open][0]):
            first_open += 1
        ids = [device.device for device in devices]
        for most, members in grouped[first_open:]:
            if _has_same_roles(most, devices[0]):
                members += ids
                break
        else:
            grouped.append((devices[0], ids))
    return tuple(DeviceGroup(tuple(sorted(members)), most) for most, members in grouped)


def _has_same_roles(most: DeviceMemory, other: DeviceMemory) -> bool:
    """Return whether each role of two devices is equal to within 1% of the peak of `most`."""
    room = ALIKE * bytes_at_peak(most)
    known = (most.temporaries is None) == (other.temporaries is None)
    return known and all(abs((getattr(most, r) or 0) - (getattr(other, r) or 0)) <= room for r in ROLES)


def fullest(memory: Memory | None) -> DeviceMemory | None:
    """Return the device with most bytes; None if nothing is known about any device."""
    return groups(memory)[0].fullest if memory is not None and memory.per_device else None


def roles(memory: Memory) -> list[str]:
    """Return the roles with bytes on at least one device."""
    return [role for role in ROLES if any(getattr(device, role) for device in memory.per_device)]


def limit(memory: Memory) -> int | None:
    """Return the memory limit of a device; None if there is no limit, or an unknown one."""
    return next((d.limit for d in memory.per_device if d.limit is not None), None)


def highest_measured(memory: Memory, devices: Iterable[int] | None = None) -> DeviceMemory | None:
    """Return the device with the largest measured peak; None without a measurement.

    Args:
        memory: Memory of all devices.
        devices: Ids to choose from; all by default.
    """
    among = None if devices is None else set(devices)
    known = [d for d in memory.per_device if d.measured is not None and (among is None or d.device in among)]
    return max(known, key=lambda d: d.measured or 0, default=None)


def error(device: DeviceMemory) -> float | None:
    """Return the measured peak relative to the computed one, minus 1; None if either is unknown."""
    return device.measured / device.peak - 1 if device.measured is not None and device.peak else None


def length(device: DeviceMemory) -> int:
    """Return the length of a device's bar: the peak, or the sum of all segments if larger."""
    return max(bytes_at_peak(device), sum(size for _, size in segments(device)))


def longest(memory: Memory) -> int:
    """Return the length of the longest bar, including ticks of measured peaks; at least 1."""
    bars = max(map(length, memory.per_device))
    top = highest_measured(memory)
    return max(1, bars, (top and top.measured) or 0)


def has_own_scale(memory: Memory) -> bool:
    """Return whether bars have a scale of their own, being too short to see on the limit's scale."""
    most = limit(memory)
    return most is not None and longest(memory) < SEEN * most


def scale(memory: Memory) -> tuple[int, int | None]:
    """Return the end of the bars' scale, and the limit if the scale includes it, else None."""
    most = limit(memory)
    full = longest(memory)
    return (full, None) if most is None or has_own_scale(memory) else (max(full, most), most)


def segments(device: DeviceMemory) -> list[tuple[str, int]]:
    """Return (role, bytes) of a device in stacking order, without empty roles."""
    return [(role, size) for role in ROLES if (size := getattr(device, role))]


@dataclass(frozen=True)
class DeviceStages:
    """Position of devices along the mesh axes of a pipeline.

    Attributes:
        index_by_axis: By axis and device id, the device's index along the axis. Only axes with leaves on a part of the
            devices are present; without such an axis devices are shown by their ids alone.
    """

    index_by_axis: dict[str, dict[int, int]]

    def stage_text(self, devices: Sequence[int]) -> str:
        """Return the stages of these devices, `pipe=0-1`; empty if they cover all stages."""
        parts = []
        for axis, index in self.index_by_axis.items():
            indices = {index[device] for device in devices if device in index}
            if indices and indices != set(index.values()):
                parts.append(f"{axis}={index_text(indices)}")
        return " ".join(parts)

    def devices_text(self, devices: Sequence[int]) -> str:
        """Return devices with their stages: `devices 0, 1 (pipe=0)`."""
        stages = self.stage_text(devices)
        return f"{device_text(devices)} ({stages})" if stages else device_text(devices)


def stages(report: Report) -> DeviceStages:
    """Return the stages of a report's devices."""
    mesh, axes = report.mesh, set(partial_axes(report.leaves))
    at = {device: mesh.place(i) for i, device in enumerate(mesh.devices)}
    return DeviceStages({axis: {d: place[axis] for d, place in at.items()} for axis in mesh.axes if axis in axes})
