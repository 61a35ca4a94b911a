"""Advice on the time of a step on a chip; none without a chip."""

import math
from collections import defaultdict
from collections.abc import Iterator

from ...code_locations import location_with_caller
from ...links import axis_links
from ...report import Advice
from ...units import byte_text, rate_text
from ...units import seconds_text as time
from ...units import share_text as share
from ..roofline import waits_by_axes
from .case import Case, all_divide, devices_along

COMMUNICATION = 0.2  # share of a step; more is a warning
DOMINATES = 0.5  # share of the communication
SLOW = 0.5  # share of the bandwidth of a chip's fast links; below it links are slow
MOST_TIMES = 16  # largest growth of the batch that is suggested
OFTEN = 0.75  # share of the bytes sent now; a change that sends more is not suggested
WAITING = 0.5  # share of a step's compute spent waiting for memory; less is not worth advice
MOSTLY = 0.5  # share of the FLOPs, or of the bytes
LARGE = 2**24  # bytes; smaller gathers are not worth advice


def communication(case: Case) -> Iterator[Advice]:
    """Advise on communication with a large share of the step."""
    step, sent = _predicted(case)
    if step is None or not sent or sent / step <= COMMUNICATION:
        return
    kind, axes, seconds, line = _largest(case)
    own = step - sent
    over = "+".join(axes or ()) or "groups of its own"
    most = "most" if seconds > DOMINATES * sent else "the largest part"
    message = (
        f"{share(sent / step)} of the predicted step is communication: {time(sent)} of {time(step)} on "
        f"{_chip(case)}, {most} by {kind}s over {over} ({time(seconds)}{line})."
    )
    if (larger := _batch_to_compute_more(case)) is not None:
        then = sent / (sent + own * larger / (case.examples or 1))
        message += (
            f" What moves for weights stays the same when the batch grows: of {larger:,} examples, where there are "
            f"{case.examples:,}, it would be about {share(then)}."
        )
    yield Advice("communication", "warning", message, saves=sent / step - COMMUNICATION)


def _batch_to_compute_more(case: Case) -> int | None:
    """Return the batch size at which communication is no longer a large share.

    None where the share is small already, and where no batch within `MOST_TIMES` of the current size is large enough.
    """
    step, sent = _predicted(case)
    if step is None or not sent or sent / step <= COMMUNICATION or not case.examples:
        return None
    own = step - sent
    times = _power((1 - COMMUNICATION) / COMMUNICATION * sent / own) if own else MOST_TIMES + 1
    # Collectives over the batch axes move weights and gradients, which don't grow with the batch.
    fixed = sum(c.waited or 0 for c in case.collectives if set(c.axes or ()) <= set(case.batch_axes))
    return case.examples * times if fixed >= DOMINATES * sent and times <= MOST_TIMES else None


def large_gather(case: Case) -> Iterator[Advice]:
    """Advise on a gathered array larger than any weight, as intended by no strategy."""
    # Sequence parallelism gathers the keys of all positions on purpose.
    meant = set(case.jobs.get("sp", ()))
    gathers = [c for c in case.collectives if c.kind == "all-gather" and meant.isdisjoint(c.axes or ())]
    weight, top = case.largest_weight, max(gathers, key=lambda c: c.bytes, default=None)
    if weight is None or top is None or top.bytes <= max(weight, LARGE):
        return
    what = top.what or "an array"
    line = f", {location_with_caller(top.file, top.line, top.called)}" if top.line else ""
    over = "+".join(top.axes or ()) or "groups of its own"
    often = "once" if top.count == 1 else f"{top.count} times"
    message = (
        f"An all-gather over {over} has {byte_text(top.bytes)} whole on each device, {often} a step: {what}{line}. The "
        f"largest weight that an operation reads is {byte_text(weight)}."
    )
    yield Advice("large-gather", "warning", message)


def slow_links(case: Case) -> Iterator[Advice]:
    """Advise on tensor parallelism, or gathers of fsdp, over links slower than the chip's."""
    if case.roof is None:
        return
    chip, wires = case.roof.chip, case.roof.wires
    fast = max((w.bandwidth or 0 for w in axis_links(chip, {"one": _node(case)}).values()), default=0)
    for part, axes in case.jobs.items():
        for axis in axes if part in ("tp", "fsdp") else ():
            rate = wires[axis].bandwidth
            if rate is None or rate >= SLOW * fast or not any(axis in (c.axes or ()) for c in case.collectives):
                continue
            what = "The sums of tensor parallelism" if part == "tp" else "The weights that fsdp gathers"
            message = (
                f"{what} go over {axis} at {rate_text(rate)} ({wires[axis].name}); "
                f"{chip.name} has links of {rate_text(fast)}."
            )
            fix = _inner(case, axis) or (_hybrid(case, axis) if part == "fsdp" else _narrower(case, axis))
            taken = sum(c.waited or 0 for c in case.collectives if axis in (c.axes or ()))
            step, _ = _predicted(case)
            yield Advice(f"slow-{part}", "warning", message, fix, taken / step * (1 - rate / fast) if step else None)


def every_trip(case: Case) -> Iterator[Advice]:
    """Advise on weights gathered, and gradients reduced, at every trip of a loop, such as one over time or
    microbatches."""
    step, exposed = _predicted(case)
    if step is None or not exposed or exposed / step <= COMMUNICATION or case.gradient_options is None:
        return
    fix = case.usable_fix("--reduce once-gathered")
    once = case.once_per_loop() if fix is not None else None
    if once is None or once.bytes_then > OFTEN * once.bytes_now or not _has_room(case, once.extra_peak_bytes):
        return
    holds = f", and holds up to {byte_text(once.extra_peak_bytes)} more" if once.extra_peak_bytes > 0 else ""
    message = (
        f"Loops gather weights and reduce gradients at every trip: once for all of them, a device sends about "
        f"{byte_text(once.bytes_then)} a step, not {byte_text(once.bytes_now)}{holds}."
    )
    yield Advice("every-trip", "info", message, fix, exposed * (1 - once.bytes_then / once.bytes_now) / step)


def _has_room(case: Case, more: int) -> bool:
    devices = case.memory.per_device if case.memory is not None else ()
    return all(d.peak is None or d.limit is None or d.peak + more <= d.limit for d in devices)


def wide_axis(case: Case) -> Iterator[Advice]:
    """Advise on one axis of tensor parallelism with most of the communication."""
    step, sent = _predicted(case)
    if step is None or not sent or sent / step <= COMMUNICATION:
        return
    for axis in case.jobs.get("tp", ()):
        taken = sum(c.waited or 0 for c in case.collectives if c.axes == (axis,))
        fix = _narrower(case, axis)
        if taken > DOMINATES * sent and fix is not None and case.mesh.axes[axis] > 1:
            n = case.mesh.axes[axis]
            # Half as many examples per device, on a ring of half the length, which sends (n - 1) / n of an array.
            left = taken / 2 * (n / 2 - 1) / (n / 2) / ((n - 1) / n)
            then = f"with {n // 2} devices along it, it would take about {time(left)}" if left else "without it, none"
            message = f"{axis} takes {time(taken)} of the {time(sent)} that the step communicates; {then}."
            yield Advice("wide-axis", "info", message, fix, (taken - left) / step)


def small_batch(case: Case) -> Iterator[Advice]:
    """Advise on products so small that the chip waits for its memory."""
    roof = case.roof
    if roof is None or roof.bound_by_memory is None or roof.bound_by_memory <= WAITING or not case.shares:
        return
    flops, moved = sum(s.flops for s in case.shares), sum(s.bytes for s in case.shares)
    rate = roof.chip.peak(max(case.shares, key=lambda s: s.flops).dtype)
    if not flops or not moved or rate is None:
        return
    does, needs = flops / moved, rate / roof.chip.hbm_bandwidth
    if does >= needs:
        return
    message = (
        f"Of a device's own {time(roof.own)}, without communication, {share(roof.bound_by_memory)} waits for "
        f"{_chip(case)}'s memory: the products do {does:.3g} FLOPs for each byte, and it needs {needs:.3g} to be busy."
    )
    weights = sum(s.weights for s in case.shares)
    # FLOPs left to hide reads of weights, after those that hide bytes that grow with the batch.
    left = flops - needs * (moved - weights)
    times = _power(needs * weights / left) if left > 0 else math.inf
    devices = devices_along(case.mesh.axes, case.batch_axes)
    if case.examples and times <= MOST_TIMES:
        each = f" Each device has {case.examples // devices or 1:,} of the {case.examples:,} examples"
        other = _batch_to_compute_more(case)
        # The advice on communication may name a batch size already: one number is enough.
        keeps = "a larger batch" if other else f"a batch of {case.examples * times:,}"
        message += f"{each}: {keeps} would keep it busy."
    elif moved - weights > MOSTLY * moved:
        message += f" {share((moved - weights) / moved)} of the bytes grow with the batch, as attention's scores do."
    step, _ = _predicted(case)
    waits = (1 - does / needs) * roof.bound_by_memory * (step - (roof.exposed or 0.0)) / step if step else None
    yield Advice("small-batch", "info", message, saves=waits)


def float32(case: Case) -> Iterator[Advice]:
    """Advise on float32 products where bfloat16 would do."""
    if case.roof is None or not case.shares:
        return
    flops = sum(s.flops for s in case.shares)
    wide = sum(s.flops for s in case.shares if s.dtype == "float32")
    chip = case.roof.chip
    narrow, full = chip.peak("bfloat16"), chip.peak("float32")
    if not flops or wide / flops <= MOSTLY or narrow is None or full is None:
        return
    moved = byte_text(sum(s.bytes for s in case.shares if s.dtype == "float32") / 2)
    gain = f"is {narrow / full:.2g} times as fast on {chip.name} and " if narrow > full else ""
    message = f"{share(wide / flops)} of the FLOPs are in float32: bfloat16 {gain}reads and writes {moved} less."
    step, sent = _predicted(case)
    saves = wide / flops * (1 - full / narrow) * (1 - sent / step) if step else None
    fix = None if case.gradient_options is None else case.usable_fix("--precision bf16")
    # Products that are still float32 under `--precision bf16` are the user's own choice.
    if fix is not None or case.gradient_options is None:
        yield Advice("float32", "info", message, fix, saves)


def _predicted(case: Case) -> tuple[float | None, float]:
    """Return the seconds of the predicted step, and of its exposed communication."""
    if case.roof is None or case.roof.step is None:
        return None, 0.0
    return case.roof.step, case.roof.exposed or 0.0


def _largest(case: Case) -> tuple[str, tuple[str, ...] | None, float, str]:
    """Return kind, axes and seconds of the collectives with the longest wait, and in words their line if one has most
    of it."""
    top = max(waits_by_axes(case.collectives), key=lambda wait: wait.seconds)
    kind, axes, seconds = top.kind, top.axes, top.seconds
    lines: dict[tuple[str | None, int | None], float] = defaultdict(float)
    calls: dict[tuple[str | None, int | None], set[str | None]] = defaultdict(set)
    for c in case.collectives:
        if (c.kind, c.axes or ()) == (kind, axes):
            lines[c.file, c.line] += c.waited or 0.0
            calls[c.file, c.line].add(c.called)
    (file, line), most = max(lines.items(), key=lambda item: item[1])
    if not line or most <= DOMINATES * sum(lines.values()):
        return kind, axes, seconds, ""
    (called,) = calls[file, line] if len(calls[file, line]) == 1 else (None,)
    return kind, axes, seconds, f", most from {location_with_caller(file, line, called)}"


def _inner(case: Case, axis: str) -> str | None:
    """Return the same mesh with `axis` last, where that axis is at least twice as fast."""
    # Neighbors along the last axis are the nearest devices.
    axes = {a: n for a, n in case.mesh.axes.items() if a != axis} | {axis: case.mesh.axes[axis]}
    if case.roof is None or list(axes) == list(case.mesh.axes):
        return None
    now, then = case.roof.wires[axis].bandwidth, axis_links(case.roof.chip, axes)[axis].bandwidth
    return case.on_mesh(axes) if now and then and then >= 2 * now else None


def _hybrid(case: Case, axis: str) -> str | None:
    """Return a mesh with weights sharded within a node and replicated between nodes."""
    n, node = case.mesh.axes[axis], _node(case)
    others = {a: m for a, m in case.mesh.axes.items() if a != axis}
    if case.strategy != "fsdp" or others or n <= node or n % node:
        return None
    return case.on_mesh({"data": n // node, "fsdp": node}, "dp+fsdp")


def _narrower(case: Case, axis: str) -> str | None:
    """Return a mesh with half as many devices along `axis`, and twice as many along the batch."""
    others = [a for a in case.batch_axes if a != axis]
    if not others or case.mesh.axes[axis] % 2:
        return None
    axes = {**case.mesh.axes, axis: case.mesh.axes[axis] // 2, others[0]: 2 * case.mesh.axes[others[0]]}
    if not all_divide(case.leaves, axes):
        return None
    return case.on_mesh({a: n for a, n in axes.items() if n > 1}) or case.on_mesh(axes)


def _node(case: Case) -> int:
    """Return the number of devices joined by the chip's fast links, at most those of the mesh."""
    devices = math.prod(case.mesh.axes.values())
    return min(case.roof.chip.node, devices) if case.roof else devices


def _chip(case: Case) -> str:
    return case.roof.chip.name if case.roof else "the chip"


def _power(times: float) -> int:
    """Return the next power of two; 2**62 for unlimited or invalid input."""
    return 2 ** max(0, math.ceil(math.log2(times))) if 0 < times < math.inf else 2**62
