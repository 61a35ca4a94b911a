"""Which stages of a pipeline devices belong to, for views that tell of devices."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxshard_magic.report import Report
from jaxshard_magic.views.format import device_text, index_text
from jaxshard_magic.views.leaf_rows import parted


@dataclass(frozen=True)
class Stages:
    """`at[axis][device]`: the index of a device along each axis of which leaves lie on a part; without such an axis
    devices are told by their ids alone."""

    at: dict[str, dict[int, int]]

    def of(self, devices: Sequence[int]) -> str:
        """`pipe=0-1`: the stages of these devices; empty where they are of all."""
        parts = []
        for axis, index in self.at.items():
            indices = {index[device] for device in devices if device in index}
            if indices and indices != set(index.values()):
                parts.append(f"{axis}={index_text(indices)}")
        return " ".join(parts)

    def named(self, devices: Sequence[int]) -> str:
        """`devices 0, 1 (pipe=0)`."""
        stages = self.of(devices)
        return f"{device_text(devices)} ({stages})" if stages else device_text(devices)


def stages(report: Report) -> Stages:
    """The stages of a report's devices."""
    mesh, index, inner = report.mesh, {}, 1
    axes = set(parted(report.leaves))
    for axis, size in reversed(mesh.axes.items()):
        if axis in axes:
            index[axis] = {device: i // inner % size for i, device in enumerate(mesh.devices)}
        inner *= size
    return Stages(dict(reversed(index.items())))
