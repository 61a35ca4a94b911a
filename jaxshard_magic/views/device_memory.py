"""Memory per device, with devices that are alike within 1% told once."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from jaxshard_magic.report import DeviceMemory, Memory

ROLES = ("params", "optimizer", "batch", "temporaries", "other")

ALIKE = 0.01
SEEN = 0.05  # of the limit: less is drawn on a scale of its own


@dataclass(frozen=True)
class Group:
    """Devices that hold the same to within 1%; `most` is the one that holds most."""

    devices: tuple[int, ...]
    most: DeviceMemory


def bytes_of_arrays(device: DeviceMemory) -> int:
    """Bytes of the step's arrays on one device, temporaries left out."""
    return device.params + device.optimizer + device.batch + device.other


def bytes_at_peak(device: DeviceMemory) -> int:
    """Bytes on one device at the peak, or all that is known of them."""
    return device.peak if device.peak is not None else bytes_of_arrays(device) + (device.temporaries or 0)


def groups(memory: Memory) -> tuple[Group, ...]:
    """The devices in groups that are alike, fullest first."""
    same: dict[tuple[int | None, ...], list[DeviceMemory]] = defaultdict(list)
    for device in memory.per_device:
        same[(*(getattr(device, role) for role in ROLES), device.peak)].append(device)
    order = sorted(same.values(), key=lambda devices: (-bytes_at_peak(devices[0]), devices[0].device))
    alike: list[tuple[DeviceMemory, list[int]]] = []
    near = 0  # the first group that is not yet too full for any that follow
    for devices in order:
        while near < len(alike) and bytes_at_peak(alike[near][0]) - bytes_at_peak(
            devices[0]
        ) > ALIKE * bytes_at_peak(alike[near][0]):
            near += 1
        ids = [device.device for device in devices]
        for most, members in alike[near:]:
            if _alike(most, devices[0]):
                members += ids
                break
        else:
            alike.append((devices[0], ids))
    return tuple(Group(tuple(sorted(members)), most) for most, members in alike)


def _alike(most: DeviceMemory, other: DeviceMemory) -> bool:
    """Whether two devices that hold about the same hold it of the same roles."""
    room = ALIKE * bytes_at_peak(most)
    known = (most.temporaries is None) == (other.temporaries is None)
    return known and all(abs((getattr(most, r) or 0) - (getattr(other, r) or 0)) <= room for r in ROLES)


def fullest(memory: Memory | None) -> DeviceMemory | None:
    """The device that holds most; None where nothing is known of any."""
    return groups(memory)[0].most if memory is not None and memory.per_device else None


def roles(memory: Memory) -> list[str]:
    """The roles that some device holds bytes of."""
    return [role for role in ROLES if any(getattr(device, role) for device in memory.per_device)]


def limit(memory: Memory) -> int | None:
    """The memory limit of a device, None where there is none or it is not known."""
    return next((d.limit for d in memory.per_device if d.limit is not None), None)


def measured(memory: Memory, devices: Iterable[int] | None = None) -> DeviceMemory | None:
    """The one of `devices`, all by default, whose measured peak is the largest; None where none was measured."""
    among = None if devices is None else set(devices)
    known = [d for d in memory.per_device if d.measured is not None and (among is None or d.device in among)]
    return max(known, key=lambda d: d.measured or 0, default=None)


def error(device: DeviceMemory) -> float | None:
    """By how much of the computed peak the measured one lies above it; None where one of them is not known."""
    return device.measured / device.peak - 1 if device.measured is not None and device.peak else None


def length(device: DeviceMemory) -> int:
    """Bytes that a device's bar takes: its peak, or its segments where they are more."""
    return max(bytes_at_peak(device), sum(size for _, size in segments(device)))


def longest(memory: Memory) -> int:
    """Bytes that the longest bar takes, with the ticks of measured peaks."""
    bars = max(map(length, memory.per_device))
    top = measured(memory)
    return max(1, bars, (top and top.measured) or 0)


def enlarged(memory: Memory) -> bool:
    """Whether bars have a scale of their own, for on the limit's they would not be seen."""
    most = limit(memory)
    return most is not None and longest(memory) < SEEN * most


def scale(memory: Memory) -> tuple[int, int | None]:
    """Where the scale of the bars ends, in bytes, and the limit where that lies on it."""
    most = limit(memory)
    full = longest(memory)
    return (full, None) if most is None or enlarged(memory) else (max(full, most), most)


def segments(device: DeviceMemory) -> list[tuple[str, int]]:
    """The roles of a device's memory in the order they are stacked, those that are there."""
    return [(role, size) for role in ROLES if (size := getattr(device, role))]
