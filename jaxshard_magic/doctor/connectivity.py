"""Whether the devices of a mesh reach each other: a small all-reduce along each axis, checked and timed."""

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
from .findings import Finding, one_line

AREA = "mesh"
LIMIT_S = 20.0
SMALL, LARGE = 1, 2**18  # float32 a device: 4 bytes, 1 MiB
TIMES = 5

Summed = Callable[[Mesh, str, int], tuple[float, bool]]


def connectivity(mesh: Mesh, limit_s: float = LIMIT_S, summed: Summed | None = None) -> Iterator[Finding]:
    """One finding for each axis: the time of an all-reduce of 4 bytes, and the bandwidth of one of 1 MiB, measured.

    The bandwidth is that of a ring, on which each of n devices sends 2(n-1)/n of the array. An axis that has not
    answered after `limit_s` seconds is an error, and those behind it are not tried: the devices are busy with it.
    `summed(mesh, axis, elements)` gives the seconds and whether the sums were right.
    """
    summed = summed or all_reduce
    text = " ".join(f"{axis}={n}" for axis, n in mesh.shape.items())
    if (target := target_of(mesh)) is not None:
        yield Finding(
            AREA, "axes", f"{text} on {target.name}, which is not attached: steps are compiled for it"
        )
        return
    yield Finding(AREA, "axes", text)
    for axis, n in mesh.shape.items():
        if n == 1:
            yield Finding(AREA, axis, "1 device: nothing to reach")
            continue
        outcome = within(limit_s, lambda a=axis: [summed(mesh, a, size) for size in (SMALL, LARGE)])
        yield _told(mesh, axis, n, outcome, limit_s)
        if outcome is None:
            return


def _told(mesh: Mesh, axis: str, n: int, outcome: Any, limit_s: float) -> Finding:
    if outcome is None:
        said = f"no answer after {limit_s:.3g} s: its {n} devices do not reach each other"
        fix = "restart the kernel (each process of it); then try a mesh of fewer hosts to find the one that hangs"
        return Finding(AREA, axis, said, "error", fix)
    if isinstance(outcome, Exception):
        fix = "restart the kernel; if it stays, the driver or network is at fault"
        return Finding(AREA, axis, one_line(outcome), "error", fix)
    (small, right), (large, also) = outcome
    if not (right and also):
        fix = "restart the kernel; if it stays, this hardware or its driver is broken"
        return Finding(AREA, axis, "an all-reduce gave a wrong sum", "error", fix)
    rate = ring_rate(n, LARGE, large)
    simulated = mesh.devices.flat[0].platform == "cpu"
    note = "; simulated devices: times say nothing of an accelerator" if simulated else ""
    said = f"{n} devices, sums right; measured: 4 bytes in {seconds_text(small)}, 1 MiB a device at {rate_text(rate)}"
    return Finding(AREA, axis, said + note)


def ring_rate(n: int, elements: int, seconds: float) -> float:
    """Bytes a second that each of n devices sends in an all-reduce of so many float32 a device, by a ring: 2(n-1)/n of
    the array.

    >>> ring_rate(2, 1000, 0.001)
    4000000.0
    """
    return 2 * (n - 1) / n * 4 * elements / seconds


def all_reduce(mesh: Mesh, axis: str, elements: int) -> tuple[float, bool]:
    """Seconds of an all-reduce of so many float32 a device along one axis, the median of some, and whether each device
    got the sum of its group's numbers."""
    axes, place = tuple(mesh.axis_names), mesh.axis_names.index(axis)
    count = mesh.devices.size
    numbers = np.arange(count, dtype=np.float32)
    wanted = np.broadcast_to(
        numbers.reshape(mesh.devices.shape).sum(place, keepdims=True), mesh.devices.shape
    ).reshape(-1)

    def rows_of(index: Any) -> np.ndarray:
        return np.repeat(numbers[index[0], None], elements, 1)

    spec = PartitionSpec(axes)
    layout = NamedSharding(mesh, spec)
    given = jax.make_array_from_callback(
        (count, elements), layout, rows_of
    )  # each process makes its own rows
    run = jax.jit(
        jax.shard_map(lambda x: lax.psum(x, axis), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    got = jax.block_until_ready(run(given))
    right = all(_holds(shard, wanted) for shard in got.addressable_shards)
    taken = []
    for _ in range(TIMES):
        start = time.perf_counter()
        jax.block_until_ready(run(given))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken), right


def _holds(shard: Any, wanted: np.ndarray) -> bool:
    """Does a device's part of the result hold its sum, and nothing else?"""
    rows = wanted[shard.index[0]]
    return bool((np.asarray(shard.data) == rows[:, None]).all())


def within(limit_s: float, work: Callable[[], Any]) -> Any:
    """What `work` gives, the exception that it raises, or None where it takes longer; it then goes on in its thread."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:  # else a failure would read as a hang
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True, name="jaxshard-doctor")
    thread.start()
    thread.join(limit_s)
    return outcome[0] if outcome else None
