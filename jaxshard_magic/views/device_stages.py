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
    mesh, axes = report.mesh, set(parted(report.leaves))
    at = {device: mesh.place(i) for i, device in enumerate(mesh.devices)}
    return Stages({axis: {d: place[axis] for d, place in at.items()} for axis in mesh.axes if axis in axes})
