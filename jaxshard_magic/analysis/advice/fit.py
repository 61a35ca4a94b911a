"""Advice on what does not fit into a device's memory."""

from collections.abc import Iterator

from ...report import Advice, DeviceMemory
from .case import Case, axes_of, byte_text, devices_along

COPIES = 4  # of the parameters in training: themselves, their gradients and Adam's two moments


def does_not_fit(case: Case) -> Iterator[Advice]:
    """The peak is above the limit: what would take most off it."""
    top = _fullest(case)
    if top is None or top.peak is None or top.limit is None or top.peak <= top.limit:
        return
    message = (
        f"The step needs {byte_text(top.peak)} on a device that has {byte_text(top.limit)}: "
        f"{byte_text(top.peak - top.limit)} too much."
    )
    saved, axes = _by_cutting_state(case)
    if saved and saved >= 0.05 * (top.peak - top.limit):
        enough = "enough" if top.peak - saved <= top.limit else f"{byte_text(top.peak - saved)} left"
        over = "+".join(axes)
        message += f" Parameters and optimizer state cut over {over} take off {byte_text(saved)}: {enough}."
        yield Advice("does-not-fit", "error", message, _fsdp(case))
    elif case.kept:
        twice = sum(leaf.bytes_per_device for leaf in case.kept)
        message += (
            f" The old state stays while the new one is made; donated, it takes off {byte_text(twice)}."
        )
        yield Advice("does-not-fit", "error", message, "--donate")
    else:
        yield Advice("does-not-fit", "error", message)


def replicated_state(case: Case) -> Iterator[Advice]:
    """Parameters whole on every device that leave no room for their gradients and Adam's moments."""
    top = _fullest(case)
    if top is None or top.limit is None or (top.peak is not None and top.peak > top.limit):
        return
    saved, _ = _by_cutting_state(case)
    params = sum(x.bytes_per_device for x in case.leaves if x.role == "params")
    if saved and COPIES * params > top.limit:
        message = (
            f"The parameters lie whole on every device, {byte_text(params)}: with their gradients and Adam's two "
            f"moments {byte_text(COPIES * params)}, more than the {byte_text(top.limit)} there are."
        )
        yield Advice("replicated-state", "warning", message, _fsdp(case))


def _fullest(case: Case) -> DeviceMemory | None:
    devices = case.memory.per_device if case.memory else ()
    return max(devices, key=lambda d: d.peak or 0, default=None)


def _by_cutting_state(case: Case) -> tuple[int, tuple[str, ...]]:
    """Bytes of a device that fsdp over the batch axes would take off it, and those axes: what of the parameters, their
    gradients and optimizer state lies whole along all of them."""
    axes = tuple(a for a in case.batch_axes if case.mesh.axes[a] > 1)
    n = devices_along(case.mesh.axes, axes)
    whole = [x for x in case.leaves if x.role in ("params", "optimizer") and not axes_of(x.spec) & set(axes)]
    saved = sum(
        (2 if x.role == "params" else 1) * x.bytes_per_device * (n - 1) // n for x in whole if x.shape
    )
    return saved, axes


def _fsdp(case: Case) -> str:
    kept = [part for part in case.jobs if part not in ("dp", "fsdp", "spmd")]
    axis = "fsdp" if "fsdp" in case.mesh.axes else f"fsdp@{case.batch_axes[0]}"
    return "%%shard " + "+".join([axis if axis != "fsdp@data" else "fsdp", *kept])
