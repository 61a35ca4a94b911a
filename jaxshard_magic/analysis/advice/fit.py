"""Advice on what does not fit into a device's memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...places import lines_in_words
from ...report import Advice, DeviceMemory, Leaf
from ...report.held import on_device
from ...units import byte_text, limit_text
from .case import Case, axes_of, devices_along, mesh_text

WORTH = 0.05  # of what is too much: what takes off less is not told
ROOM = 0.9  # of the limit: what a smaller batch would need is known that well
COPIES = 4  # of the parameters in training: themselves, their gradients and Adam's two moments


@dataclass(frozen=True)
class Change:
    """Something that takes memory off a device: `saves` bytes where that can be told, and the text to paste. `at_most`:
    the rest of the program may need a part of what it saves."""

    says: str
    fix: str | None
    saves: int | None = None
    at_most: bool = False


def does_not_fit(case: Case) -> Iterator[Advice]:
    """The peak is above the limit: what would make it fit, the cheapest first, the others as advice of their own."""
    top = _fullest(case)
    if top is None or top.peak is None or top.limit is None or top.peak <= top.limit:
        return
    over = top.peak - top.limit
    worth = (c for c in _changes(case, top) if c.saves is None or c.saves >= WORTH * over)
    changes = [c for c in worth if c.fix is None or case.line(c.fix) is not None]
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
        "does-not-fit", "error", f"{message} {_told(case, top, first)}", first.fix, _part(first, top.peak)
    )
    for change in changes:
        if change is not first:
            yield Advice("would-fit", "info", _told(case, top, change), change.fix, _part(change, top.peak))


def _part(change: Change, peak: int) -> float | None:
    return None if change.saves is None else change.saves / peak


def _told(case: Case, top: DeviceMemory, change: Change) -> str:
    """A change, with what is left after it: as compiled where it was tried, else as predicted."""
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


def _changes(case: Case, top: DeviceMemory) -> Iterator[Change]:
    """What takes memory off a device, the cheapest first."""
    saved, axes = _by_cutting_state(case, top)
    if saved:
        over = "+".join(axes)
        says = f"Parameters and optimizer state cut over {over} take off up to {byte_text(saved)}"
        yield Change(says, _fsdp(case), saved, at_most=True)  # weights are gathered where they are used
    if case.kept:
        twice = sum(leaf.bytes_per_device for leaf in on_device(case.kept, case.mesh, top.device))
        says = (
            f"The old state stays while the new one is made; donated, it takes off up to {byte_text(twice)}"
        )
        yield Change(says, "--donate", twice, at_most=True)  # the new one's memory may have held gradients
    if (kept := _kept_for_backward(case, top)) is not None:
        yield kept
    yield from _in_microbatches(case, top)
    yield from _more_devices(case, top)
    yield from _fewer_examples(case, top)


def _kept_for_backward(case: Case, top: DeviceMemory) -> Change | None:
    """What the forward pass leaves for the backward pass, where it is most of the temporaries."""
    if case.inside is None or case.inside.remat is not None:
        return None
    buffers = (case.memory and case.memory.buffers) or ()
    # XLA for the CPU keeps the order of straight-line code, in which what is computed again is there just as long.
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
    places = "; ".join(lines_in_words(file, sorted(own)) for file, own in lines.items())
    where = f" of {places}" if places else ""
    says = f"{byte_text(held)}{where} are kept for the backward pass, which can compute them again, layer by layer"
    return Change(says, "--remat full")


def _in_microbatches(case: Case, top: DeviceMemory) -> Iterator[Change]:
    """The fewest parts of the batch, one after the other, whose temporaries would leave room for the rest."""
    if (
        case.inside is None
        or case.stage_axes  # what a schedule keeps does not fall so
        or not (case.examples and case.batch)  # examples that it closes over can't be taken in parts
        or top.temporaries is None
        or top.peak is None
        or not top.limit
    ):
        return
    now, each = case.inside.microbatches, case.examples // devices_along(case.mesh.axes, case.batch_axes)
    sums = sum(x.bytes_per_device for x in _on(case, top) if x.role == "params") if now == 1 else 0
    grows = max(0, top.temporaries - _of_parameters(case) - sums)
    for n in range(now + 1, each + 1):
        left = top.peak - grows + grows * now // n
        if each % n == 0 and left <= ROOM * top.limit:
            says = f"In {n} microbatches, one after the other, it would need about {byte_text(left)}"
            line = f"--microbatches {n}"
            if case.refuses(line) is None:
                yield Change(says, line, top.peak - left)
            return


def _of_parameters(case: Case) -> int:
    """Bytes of the temporaries that are as many however few examples there are: gathered weights and gradients."""
    buffers = (case.memory and case.memory.buffers) or ()
    weights = {leaf.path for leaf in case.leaves if leaf.role == "params"}
    return sum(b.bytes for b in buffers if b.of in weights)


def _more_devices(case: Case, top: DeviceMemory) -> Iterator[Change]:
    """The smallest slice that is offered on which it would fit, with more devices along the first batch axis."""
    if case.target is None or not case.batch_axes or top.temporaries is None:
        return
    axis, axes = case.batch_axes[0], case.mesh.axes
    whole = sum(
        x.bytes_per_device for x in _on(case, top) if x.role != "batch" and axis not in axes_of(x.spec)
    )
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
            yield Change(says, f"%mesh {target.name} {mesh_text(grown)}", top.peak - left)
            return


def _fewer_examples(case: Case, top: DeviceMemory) -> Iterator[Change]:
    """The largest batch whose temporaries would leave room for the rest."""
    if (
        not case.examples
        or top.temporaries is None
        or top.peak is None
        or top.limit is None
        or case.stage_axes
    ):
        return
    step = devices_along(case.mesh.axes, case.batch_axes)
    grows = max(0, top.temporaries - _of_parameters(case)) + top.batch
    fit = int(case.examples * (ROOM * top.limit - (top.peak - grows)) / grows) if grows else 0
    if 0 < (fewer := fit // step * step) < case.examples:
        saves = grows - grows * fewer // case.examples
        left = byte_text(top.peak - saves)
        yield Change(
            f"With {fewer:,} of the {case.examples:,} examples in a batch it would need about {left}",
            None,
            saves,
        )


def replicated_state(case: Case) -> Iterator[Advice]:
    """Parameters whole on every device that leave no room for their gradients and Adam's moments."""
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
            "replicated-state",
            "warning",
            message,
            case.line(_fsdp(case)),
            saved / (top.peak or COPIES * params),
        )


def _fullest(case: Case) -> DeviceMemory | None:
    devices = case.memory.per_device if case.memory else ()
    return max(devices, key=lambda d: d.peak or 0, default=None)


def _on(case: Case, top: DeviceMemory) -> list[Leaf]:
    """What of the step's arrays the device holds: in a pipeline, those of its stage."""
    return on_device(case.leaves, case.mesh, top.device)


def _by_cutting_state(case: Case, top: DeviceMemory) -> tuple[int, tuple[str, ...]]:
    """Bytes of a device that fsdp over the batch axes would take off it, and those axes: what of the parameters, their
    gradients and optimizer state lies whole along all of them."""
    axes = tuple(
        a for a in case.batch_axes if case.mesh.axes[a] > 1 and a != "replica"
    )  # which is for copies
    n = devices_along(case.mesh.axes, axes)
    state = [x for x in _on(case, top) if x.role in ("params", "optimizer")]
    whole = [x for x in state if not axes_of(x.spec) & set(axes)]
    saved = sum(
        (2 if x.role == "params" else 1) * x.bytes_per_device * (n - 1) // n for x in whole if x.shape
    )
    return saved, axes


def _fsdp(case: Case) -> str | None:
    if case.strategy == "pmap":  # the step itself says what each device has
        return None
    kept = [part for part in case.strategy.split("+") if part.partition("@")[0] not in ("dp", "fsdp", "spmd")]
    named = (f"fsdp@{axis}" for axis in case.batch_axes if axis != "replica")
    lines = ("%%shard " + "+".join([part, *kept]) for part in ("fsdp", *named))
    return next(filter(None, map(case.line, lines)), None)
