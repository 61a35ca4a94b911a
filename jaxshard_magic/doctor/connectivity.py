"""Check and time a small all-reduce along each axis of a mesh."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..targets import target_of
from ..units import rate_text, seconds_text
from .findings import DoctorFinding, one_line

AREA = "mesh"
LIMIT_S = 20.0
SMALL, LARGE = 1, 2**18  # float32 elements per device: 4 bytes, 1 MiB
TIMES = 5

AllReduceTimer = Callable[[Mesh, str, int], tuple[float, bool]]


def connectivity(
    mesh: Mesh, limit_s: float = LIMIT_S, measure: AllReduceTimer | None = None
) -> Iterator[DoctorFinding]:
    """Yield a finding for each axis: measured time of an all-reduce of 4 bytes, and bandwidth of one of 1 MiB.

    Bandwidth is that of a ring, in which each of n devices sends 2(n-1)/n of the array.

    Args:
        mesh: Mesh to check; one of a target that is not attached is only named.
        limit_s: Time limit of an axis. An axis that exceeds it is an error, and later axes are not tried: the devices
            are busy with it.
        measure: Returns seconds and correctness for a mesh, an axis and a number of elements; `time_all_reduce` by
            default.
    """
    measure = measure or time_all_reduce
    text = " ".join(f"{axis}={n}" for axis, n in mesh.shape.items())
    if (target := target_of(mesh)) is not None:
        yield DoctorFinding(AREA, "axes", f"{text} on {target.name}, which is not attached: steps are compiled for it")
        return
    yield DoctorFinding(AREA, "axes", text)
    for axis, n in mesh.shape.items():
        if n == 1:
            yield DoctorFinding(AREA, axis, "1 device: nothing to reach")
            continue
        outcome = run_within(limit_s, lambda a=axis: [measure(mesh, a, size) for size in (SMALL, LARGE)])
        yield _axis_finding(mesh, axis, n, outcome, limit_s)
        if outcome is None:
            return


def _axis_finding(mesh: Mesh, axis: str, n: int, outcome: Any, limit_s: float) -> DoctorFinding:
    if outcome is None:
        said = f"no answer after {limit_s:.3g} s: its {n} devices do not reach each other"
        fix = "restart the kernel (each process of it); then try a mesh of fewer hosts to find the one that hangs"
        return DoctorFinding(AREA, axis, said, "error", fix)
    if isinstance(outcome, Exception):
        fix = "restart the kernel; if it stays, the driver or network is at fault"
        return DoctorFinding(AREA, axis, one_line(outcome), "error", fix)
    (small, right), (large, also) = outcome
    if not (right and also):
        fix = "restart the kernel; if it stays, this hardware or its driver is broken"
        return DoctorFinding(AREA, axis, "an all-reduce gave a wrong sum", "error", fix)
    rate = ring_rate(n, LARGE, large)
    simulated = mesh.devices.flat[0].platform == "cpu"
    note = "; simulated devices: times say nothing of an accelerator" if simulated else ""
    said = f"{n} devices, sums right; measured: 4 bytes in {seconds_text(small)}, 1 MiB a device at {rate_text(rate)}"
    return DoctorFinding(AREA, axis, said + note)


def ring_rate(n: int, elements: int, seconds: float) -> float:
    """Return the bytes per second sent by each device in a ring all-reduce: 2(n-1)/n of the array.

    Args:
        n: Number of devices.
        elements: float32 elements per device.
        seconds: Time of the all-reduce.

    >>> ring_rate(2, 1000, 0.001)
    4000000.0
    """
    return 2 * (n - 1) / n * 4 * elements / seconds


def time_all_reduce(mesh: Mesh, axis: str, elements: int) -> tuple[float, bool]:
    """Time an all-reduce along one axis and check its sums.

    Args:
        mesh: Mesh.
        axis: Axis to reduce over.
        elements: float32 elements per device.

    Returns:
        Median seconds of `TIMES` runs; whether each device of this process has the sum of its group.
    """
    axes, place = tuple(mesh.axis_names), mesh.axis_names.index(axis)
    count = mesh.devices.size
    numbers = np.arange(count, dtype=np.float32)
    wanted = np.broadcast_to(numbers.reshape(mesh.devices.shape).sum(place, keepdims=True), mesh.devices.shape).reshape(
        -1
    )

    def rows_of(index: Any) -> np.ndarray:
        return np.repeat(numbers[index[0], None], elements, 1)

    spec = PartitionSpec(axes)
    layout = NamedSharding(mesh, spec)
    # A process can only fill its own shards, so the array is made by callback.
    given = jax.make_array_from_callback((count, elements), layout, rows_of)
    run = jax.jit(jax.shard_map(lambda x: lax.psum(x, axis), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    # The first run compiles and is not timed.
    got = jax.block_until_ready(run(given))
    right = all(_holds(shard, wanted) for shard in got.addressable_shards)
    taken = []
    for _ in range(TIMES):
        start = time.perf_counter()
        jax.block_until_ready(run(given))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken), right


def _holds(shard: Any, wanted: np.ndarray) -> bool:
    """Return whether a shard of the result has its group's sum in all elements."""
    rows = wanted[shard.index[0]]
    return bool((np.asarray(shard.data) == rows[:, None]).all())


def run_within(limit_s: float, work: Callable[[], Any]) -> Any:
    """Return the result of `work`, its exception, or None after `limit_s` seconds; `work` then continues in its
    thread."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:  # otherwise a failure would look like a hang
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True, name="jaxshard-doctor")
    thread.start()
    thread.join(limit_s)
    return outcome[0] if outcome else None
