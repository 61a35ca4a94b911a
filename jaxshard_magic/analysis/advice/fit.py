"""Advice on steps that exceed the memory of a device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...code_locations import lines_text
from ...report import Advice, DeviceMemory, Leaf
from ...report.device_leaves import leaves_on_device
from ...units import byte_text, limit_text
from .case import Case, axes_of, devices_along, mesh_text

WORTH = 0.05  # share of the excess; changes that save less are not mentioned
ROOM = 0.9  # share of the limit: a margin, since the memory of a smaller batch is only estimated
COPIES = 4  # arrays of the parameters' size in training: parameters, gradients and Adam's two moments


@dataclass(frozen=True)
class MemoryChange:
    """Change that reduces memory on a device.

    Attributes:
        says: Description for the user.
        fix: Text to paste; None without one.
        saves: Bytes saved; None where unknown.
        at_most: Whether the actual saving may be smaller, because other parts of the program may need some of it.
    """

    says: str
    fix: str | None
    saves: int | None = None
    at_most: bool = False


def does_not_fit(case: Case) -> Iterator[Advice]:
    """Advise on a peak above the limit: the cheapest change that fits first, the other changes as separate advice."""
    top = _fullest(case)
    if top is None or top.peak is None or top.limit is None or top.peak <= top.limit:
        return
    over = top.peak - top.limit
    worth = (c for c in _changes(case, top) if c.saves is None or c.saves >= WORTH * over)
    changes = [c for c in worth if c.fix is None or case.usable_fix(c.fix) is not None]
    enough = [c for c in changes if c.saves is not None and c.saves >= over]
    first = next(iter((*enough, *changes)), None)
    message = (
        f"The step needs {byte_text(top.peak)} on a device that has {limit_text(top.limit)}: "
        f"{byte_text(over)} too much."
    )
    if first is None:
        yield Advice("does-not-fit", "error", message)
        return
    yield Advice(
        "does-not-fit", "error", f"{message} {_change_text(case, top, first)}", first.fix, _part(first, top.peak)
    )
    for change in changes:
        if change is not first:
            yield Advice("would-fit", "info", _change_text(case, top, change), change.fix, _part(change, top.peak))


def _part(change: MemoryChange, peak: int) -> float | None:
    return None if change.saves is None else change.saves / peak


def _change_text(case: Case, top: DeviceMemory, change: MemoryChange) -> str:
    """Return a change in words with the memory left after it: as compiled where tried, else as predicted."""
    assert top.peak is not None and top.limit is not None
    tried = case.tried.get(change.fix or "")
    if tried is not None:
        verdict = "it fits" if tried <= top.limit else "still too much"
        return f"{change.says}. Compiled so, it needs {byte_text(tried)}: {verdict}."
    if change.saves is None:
        return f"{change.says}."
    left = top.peak - change.saves
    if left > top.limit:
        return f"{change.says}: {'at least ' if change.at_most else ''}{byte_text(left)} left."
    return f"{change.says}: {'it may be enough' if change.at_most else 'enough'}."


def _changes(case: Case, top: DeviceMemory) -> Iterator[MemoryChange]:
    """Yield changes that reduce memory on a device, the cheapest first."""
    saved, axes = _by_cutting_state(case, top)
    if saved:
        over = "+".join(axes)
        says = f"Parameters and optimizer state cut over {over} take off up to {byte_text(saved)}"
        # At most: weights are still gathered where they are used.
        yield MemoryChange(says, _fsdp(case), saved, at_most=True)
    if case.undonated_state:
        twice = sum(leaf.bytes_per_device for leaf in leaves_on_device(case.undonated_state, case.mesh, top.device))
        says = f"The old state stays while the new one is made; donated, it takes off up to {byte_text(twice)}"
        # At most: XLA may have placed gradients in the memory of the new state.
        yield MemoryChange(says, "--donate", twice, at_most=True)
    if (kept := _kept_for_backward(case, top)) is not None:
        yield kept
    yield from _in_microbatches(case, top)
    yield from _more_devices(case, top)
    yield from _fewer_examples(case, top)


def _kept_for_backward(case: Case, top: DeviceMemory) -> MemoryChange | None:
    """Return recomputation of saved activations as a change, where these are most of the temporaries."""
    if case.gradient_options is None or case.gradient_options.remat is not None:
        return None
    buffers = (case.memory and case.memory.buffers) or ()
    # XLA for the CPU keeps the order of straight-line code, in which recomputed values live as long as saved ones: only
    # those saved by the trips of a loop can be recomputed later.
    by_trips = case.mesh.platform == "cpu" and case.target is None
    kept = [b for b in buffers if b.phase == "forward" and (b.trips or not by_trips)]
    held = sum(b.bytes for b in kept)
    assert top.peak is not None and top.limit is not None
    if not kept or 2 * held < sum(b.bytes for b in buffers) or held < WORTH * (top.peak - top.limit):
        return None
    lines: dict[str | None, set[int]] = {}
    for b in kept:
        if b.line is not None:
            lines.setdefault(b.file, set()).add(b.line)
    places = "; ".join(lines_text(file, sorted(own)) for file, own in lines.items())
    where = f" of {places}" if places else ""
    says = f"{byte_text(held)}{where} are kept for the backward pass, which can compute them again, layer by layer"
    return MemoryChange(says, "--remat full")


def _in_microbatches(case: Case, top: DeviceMemory) -> Iterator[MemoryChange]:
    """Yield the smallest number of microbatches whose temporaries fit."""
    if (
        case.gradient_options is None
        or case.stage_axes  # activations of a pipeline schedule don't shrink with the microbatch alone
        or not (case.examples and case.batch)  # a batch that the step closes over can't be divided
        or top.temporaries is None
        or top.peak is None
        or not top.limit
    ):
        return
    now, each = (case.gradient_options.microbatches, case.examples // devices_along(case.mesh.axes, case.batch_axes))
    # Gradients of microbatches are added up in a buffer of the parameters' size; a single batch needs none.
    sums = sum(x.bytes_per_device for x in _on(case, top) if x.role == "params") if now == 1 else 0
    grows = max(0, top.temporaries - _of_parameters(case) - sums)
    for n in range(now + 1, each + 1):
        left = top.peak - grows + grows * now // n
        if each % n == 0 and left <= ROOM * top.limit:
            says = f"In {n} microbatches, one after the other, it would need about {byte_text(left)}"
            line = f"--microbatches {n}"
            if case.refusal_reason(line) is None:
                yield MemoryChange(says, line, top.peak - left)
            return


def _of_parameters(case: Case) -> int:
    """Return the bytes of temporaries independent of the batch size: gathered weights and gradients."""
    buffers = (case.memory and case.memory.buffers) or ()
    weights = {leaf.path for leaf in case.leaves if leaf.role == "params"}
    return sum(b.bytes for b in buffers if b.of in weights)


def _more_devices(case: Case, top: DeviceMemory) -> Iterator[MemoryChange]:
    """Yield the smallest available slice on which the step would fit, with more devices along the first batch axis."""
    if case.target is None or not case.batch_axes or top.temporaries is None:
        return
    axis, axes = case.batch_axes[0], case.mesh.axes
    # State that is not sharded over the axis stays as large on more devices.
    whole = sum(x.bytes_per_device for x in _on(case, top) if x.role != "batch" and axis not in axes_of(x.spec))
    for extent in case.larger:
        target = replace(case.target, extent=extent)
        times, rest = divmod(target.count, case.target.count)
        if times < 2 or rest:
            continue
        assert top.peak is not None and top.limit is not None
        left = whole + (top.peak - whole) // times
        if left <= top.limit:
            grown = {a: n * times if a == axis else n for a, n in axes.items()}
            says = f"On {target.name}, with {grown[axis]} devices along {axis}, it would need about {byte_text(left)}"
            yield MemoryChange(says, f"%mesh {target.name} {mesh_text(grown)}", top.peak - left)
            return


def _fewer_examples(case: Case, top: DeviceMemory) -> Iterator[MemoryChange]:
    """Yield the largest batch whose temporaries fit."""
    if not case.examples or top.temporaries is None or top.peak is None or top.limit is None or case.stage_axes:
        return
    step = devices_along(case.mesh.axes, case.batch_axes)
    grows = max(0, top.temporaries - _of_parameters(case)) + top.batch
    most_examples = int(case.examples * (ROOM * top.limit - (top.peak - grows)) / grows) if grows else 0
    if 0 < (fewer := most_examples // step * step) < case.examples:
        saves = grows - grows * fewer // case.examples
        left = byte_text(top.peak - saves)
        yield MemoryChange(
            f"With {fewer:,} of the {case.examples:,} examples in a batch it would need about {left}", None, saves
        )


def replicated_state(case: Case) -> Iterator[Advice]:
    """Advise on replicated parameters that leave no memory for their gradients and Adam's moments."""
    top = _fullest(case)
    if top is None or top.limit is None or (top.peak is not None and top.peak > top.limit):
        return
    saved, _ = _by_cutting_state(case, top)
    params = sum(x.bytes_per_device for x in _on(case, top) if x.role == "params")
    if saved and COPIES * params > top.limit:
        where = "every device of its stage" if case.stage_axes else "every device"
        message = (
            f"The parameters lie whole on {where}, {byte_text(params)}: with their gradients and Adam's two "
            f"moments {byte_text(COPIES * params)}, more than the {limit_text(top.limit)} there are."
        )
        yield Advice(
            "replicated-state", "warning", message, case.usable_fix(_fsdp(case)), saved / (top.peak or COPIES * params)
        )


def _fullest(case: Case) -> DeviceMemory | None:
    devices = case.memory.per_device if case.memory else ()
    return max(devices, key=lambda d: d.peak or 0, default=None)


def _on(case: Case, top: DeviceMemory) -> list[Leaf]:
    """Return the arrays stored on the device: in a pipeline, those of its stage."""
    return leaves_on_device(case.leaves, case.mesh, top.device)


def _by_cutting_state(case: Case, top: DeviceMemory) -> tuple[int, tuple[str, ...]]:
    """Return the bytes that fsdp over the batch axes would save on a device, and those axes.

    Counted are parameters, their gradients and optimizer state replicated along all of these axes.
    """
    # The axis "replica" is for copies of the state.
    axes = tuple(a for a in case.batch_axes if case.mesh.axes[a] > 1 and a != "replica")
    n = devices_along(case.mesh.axes, axes)
    state = [x for x in _on(case, top) if x.role in ("params", "frozen", "optimizer")]
    whole = [x for x in state if not axes_of(x.spec) & set(axes)]
    # Twice for parameters: their gradients are sharded with them.
    saved = sum((2 if x.role == "params" else 1) * x.bytes_per_device * (n - 1) // n for x in whole if x.shape)
    return saved, axes


def _fsdp(case: Case) -> str | None:
    if case.strategy == "pmap":  # a pmapped step decides itself what each device stores
        return None
    kept = [part for part in case.strategy.split("+") if part.partition("@")[0] not in ("dp", "fsdp", "spmd")]
    named = (f"fsdp@{axis}" for axis in case.batch_axes if axis != "replica")
    lines = ("%%shard " + "+".join([part, *kept]) for part in ("fsdp", *named))
    return next(filter(None, map(case.usable_fix, lines)), None)
