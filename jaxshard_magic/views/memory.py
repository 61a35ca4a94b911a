"""Memory per device, with devices that are alike within 1% told once."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jaxshard_magic.report import DeviceMemory, Memory
from jaxshard_magic.views.format import (
    byte_text,
    count_text,
    device_text,
    limit_parts,
    limit_text,
    share_text,
)

ROLES = ("params", "optimizer", "batch", "temporaries", "other")

ALIKE = 0.01


@dataclass(frozen=True)
class Group:
    """Devices that hold the same to within 1%; `most` is the one that holds most."""

    devices: tuple[int, ...]
    most: DeviceMemory


def arrays(device: DeviceMemory) -> int:
    """Bytes of the step's arrays on one device, temporaries left out."""
    return device.params + device.optimizer + device.batch + device.other


def held(device: DeviceMemory) -> int:
    """Bytes on one device at the peak, or all that is known of them."""
    return device.peak if device.peak is not None else arrays(device) + (device.temporaries or 0)


def groups(memory: Memory) -> tuple[Group, ...]:
    """The devices in groups that are alike, fullest first."""
    same: dict[tuple[int | None, ...], list[DeviceMemory]] = defaultdict(list)
    for device in memory.per_device:
        same[(*(getattr(device, role) for role in ROLES), device.peak)].append(device)
    order = sorted(same.values(), key=lambda devices: (-held(devices[0]), devices[0].device))
    found: list[tuple[DeviceMemory, list[int]]] = []
    near = 0  # the first group that is not yet too full for any that follow
    for devices in order:
        while near < len(found) and held(found[near][0]) - held(devices[0]) > ALIKE * held(found[near][0]):
            near += 1
        ids = [device.device for device in devices]
        for most, members in found[near:]:
            if _alike(most, devices[0]):
                members += ids
                break
        else:
            found.append((devices[0], ids))
    return tuple(Group(tuple(sorted(members)), most) for most, members in found)


def _alike(most: DeviceMemory, other: DeviceMemory) -> bool:
    """Whether two devices that hold about the same hold it of the same roles."""
    room = ALIKE * held(most)
    known = (most.temporaries is None) == (other.temporaries is None)
    return known and all(abs((getattr(most, r) or 0) - (getattr(other, r) or 0)) <= room for r in ROLES)


def limit(memory: Memory) -> int | None:
    """The memory limit of a device, None where there is none or it is not known."""
    return next((d.limit for d in memory.per_device if d.limit is not None), None)


def of_limit(bytes_held: int, most: int, digits: int = 3) -> str:
    """`5.09 of 15.75 GiB`, with the unit told once where both have the same."""
    text, unit = byte_text(bytes_held, digits), limit_parts(most)[1]
    return f"{text.removesuffix(unit)[:-1] if text.endswith(unit) else text} of {limit_text(most)}"


def where(found: Sequence[Group]) -> str:
    """On which devices the fullest group's figure holds: `every device`, `the fullest device`;
    empty for a single device."""
    if len(found) > 1:
        return "the fullest device" if len(found[0].devices) == 1 else "the fullest devices"
    return "every device" if len(found[0].devices) > 1 else ""


Named = Callable[[Sequence[int]], str]


def sentence(memory: Memory, named: Named = device_text) -> str:
    """Who is fullest and who is alike: `device 0 is fullest, 5.09 of 15.75 GiB; devices 1 to 7 ...`, the devices as
    `named` tells of them."""
    head, rest = clauses(memory, named)
    return "; ".join((head, *rest))


def clauses(memory: Memory, named: Named = device_text) -> tuple[str, list[str]]:
    """The sentence in parts: who is fullest, and what the others hold."""
    found, most = groups(memory), limit(memory)
    known = found[0].most.peak is not None
    texts = [
        of_limit(held(g.most), most) if most and i == 0 else byte_text(held(g.most))
        for i, g in enumerate(found)
    ]
    names = [named(g.devices) for g in found]
    if len(found) == 1:
        what = (
            f"all {len(found[0].devices)} devices are alike at"
            if len(found[0].devices) > 1
            else f"{names[0]} holds"
        )
        head = f"{what} {texts[0]}"
    else:
        verb = "is" if len(found[0].devices) == 1 else "are"
        head = f"{names[0]} {verb} fullest, {texts[0]}"
    rest = [
        f"{name} {'are alike at' if len(g.devices) > 1 else 'holds'} {text}"
        for name, g, text in list(zip(names, found, texts, strict=True))[1:4]
    ]
    if len(found) > 4:
        rest.append(f"{count_text(sum(len(g.devices) for g in found[4:]))} more hold less")
    return (head, rest) if known else (f"{head} of arrays", [*rest, "temporaries and peak are not known"])


def measured(memory: Memory, devices: Iterable[int] | None = None) -> DeviceMemory | None:
    """The one of `devices`, all by default, whose measured peak is the largest; None where none was measured."""
    among = None if devices is None else set(devices)
    known = [d for d in memory.per_device if d.measured is not None and (among is None or d.device in among)]
    return max(known, key=lambda d: d.measured or 0, default=None)


def error(device: DeviceMemory) -> float | None:
    """By how much of the computed peak the measured one lies above it; None where one of them is not known."""
    return device.measured / device.peak - 1 if device.measured is not None and device.peak else None


def segments(device: DeviceMemory) -> list[tuple[str, int]]:
    """The roles of a device's memory in the order they are stacked, those that are there."""
    return [(role, size) for role in ROLES if (size := getattr(device, role))]


def share_of_limit(memory: Memory) -> str | None:
    """`32% of 15.75 GiB`, None without a limit or without a peak."""
    most, top = limit(memory), groups(memory)[0].most
    return f"{share_text(top.peak / most)} of {limit_text(most)}" if most and top.peak is not None else None
