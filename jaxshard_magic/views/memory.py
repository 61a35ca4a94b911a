"""Memory per device, with devices that are alike within 1% told once."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxshard_magic.report import DeviceMemory, Memory
from jaxshard_magic.views.format import byte_text, device_text, limit_parts, limit_text, share_text

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
    order = sorted(memory.per_device, key=lambda d: (-held(d), d.device))
    found: list[tuple[DeviceMemory, list[int]]] = []
    for device in order:
        for most, members in found:
            if _alike(most, device):
                members.append(device.device)
                break
        else:
            found.append((device, [device.device]))
    return tuple(Group(tuple(sorted(members)), most) for most, members in found)


def _alike(most: DeviceMemory, other: DeviceMemory) -> bool:
    room = ALIKE * held(most)
    known = (most.temporaries is None) == (other.temporaries is None)
    parts = ((getattr(most, role) or 0, getattr(other, role) or 0) for role in ROLES)
    return known and held(most) - held(other) <= room and all(abs(a - b) <= room for a, b in parts)


def limit(memory: Memory) -> int | None:
    """The memory limit of a device, None where there is none or it is not known."""
    return next((d.limit for d in memory.per_device if d.limit is not None), None)


def of_limit(bytes_held: int, most: int, digits: int = 3) -> str:
    """`5.09 of 15.75 GiB`, with the unit told once where both have the same."""
    text, unit = byte_text(bytes_held, digits), limit_parts(most)[1]
    return f"{text.removesuffix(unit)[:-1] if text.endswith(unit) else text} of {limit_text(most)}"


def where(found: Sequence[Group]) -> str:
    """On which devices the fullest group's figure holds: `on every device`, `on the fullest device`;
    empty for a single device."""
    if len(found) > 1:
        return "on the fullest device" if len(found[0].devices) == 1 else "on the fullest devices"
    return "on every device" if len(found[0].devices) > 1 else ""


def sentence(memory: Memory) -> str:
    """Who is fullest and who is alike: `device 0 is fullest, 5.09 of 15.75 GiB; devices 1 to 7 ...`."""
    found, most = groups(memory), limit(memory)
    known = found[0].most.peak is not None
    texts = [
        of_limit(held(g.most), most) if most and i == 0 else byte_text(held(g.most))
        for i, g in enumerate(found)
    ]
    names = [device_text(g.devices) for g in found]
    if len(found) == 1:
        what = (
            f"all {len(found[0].devices)} devices are alike at"
            if len(found[0].devices) > 1
            else f"{names[0]} holds"
        )
        told = f"{what} {texts[0]}"
    else:
        verb = "is" if len(found[0].devices) == 1 else "are"
        told = f"{names[0]} {verb} fullest, {texts[0]}; "
        told += "; ".join(
            f"{name} {'are alike at' if len(g.devices) > 1 else 'holds'} {text}"
            for name, g, text in list(zip(names, found, texts, strict=True))[1:4]
        )
        if len(found) > 4:
            told += f"; {sum(len(g.devices) for g in found[4:])} more hold less"
    return told if known else f"{told} of arrays; temporaries and peak are not known"


def segments(device: DeviceMemory) -> list[tuple[str, int]]:
    """The roles of a device's memory in the order they are stacked, those that are there."""
    return [(role, size) for role in ROLES if (size := getattr(device, role))]


def share_of_limit(memory: Memory) -> str | None:
    """`32% of 15.75 GiB`, None without a limit or without a peak."""
    most, top = limit(memory), groups(memory)[0].most
    return f"{share_text(top.peak / most)} of {limit_text(most)}" if most and top.peak is not None else None
