"""Pipeline stages of devices, for views that name devices."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxshard_magic.report import Report
from jaxshard_magic.views.format import device_text, index_text
from jaxshard_magic.views.leaf_rows import partial_axes


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
