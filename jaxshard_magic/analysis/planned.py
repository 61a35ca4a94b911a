"""What the plan of a step says where nothing is compiled: its memory and its communication, as predicted."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..plan import Finding, Sent
from ..program.ir import Program
from ..program.labels import GRADIENT, label_of, weight_label
from ..program.phases import phases
from ..report import Collective, Leaf, Memory
from ..strategies.footprint import footprint
from ..strategies.hold import Hold
from ..strategies.regions.ahead import Ahead
from ..strategies.traffic import traffic
from ..units import byte_text
from .advice.case import OnceALoop
from .collectives import Cause, merge, wire_bytes
from .frames import Frame, called
from .memory import device_limit, memory, with_temporaries
from .origin import called_at, place_of
from .sources import SourceText
from .texts import home_of

if TYPE_CHECKING:
    from ..step import Entry
    from .reading import Reading

MEMORY_ALIKE = 0.05  # of the planned peak: a compiler packs temporaries in its own way
SENT_ALIKE = 0.01  # of all that a step sends: scalars, such as a loss


def plan_alone(
    entry: "Entry", read: Sequence[Leaf], leaves: Sequence[Leaf], text: SourceText, failed: str | None = None
) -> tuple[Memory, tuple[Collective, ...] | None, Finding | None]:
    """Predict memory and communication of a step that is not compiled.

    Args:
        entry: the step, with its plan.
        read: the arguments that it reads.
        leaves: all of its flat inputs, by position.
        text: the user's files, in which lines are looked up.
        failed: how its compiler ended; None where it was not asked.

    Returns memory, communication with the lines that cause it, and a finding where a compiler failed, else None.
    Where the compiler decides the layout, memory has the arrays at rest alone, and communication is None.
    """
    plan, run = entry.plan, entry.plan.run
    limit = device_limit(plan.mesh.devices.flat[0]) if failed is None else None
    held, sent = replace(memory(None, read, plan.mesh, limit), source="planned"), None
    if isinstance(run, Hold):
        peak = _peak(entry, run)
        held = with_temporaries(held, lambda arrays: max(peak - arrays, 0))
        sent = merge(caused_by_plan(traffic(run), run.program, run, leaves, text, home_of(entry)))
    known = (
        "Arrays at rest are exact, and no more is known"
        if sent is None
        else "All figures are the plan's prediction"
    )
    if failed is None:
        return held, sent, None
    return held, sent, Finding("compiler-failed", "error", f"Not compiled: {failed}. {known}.")


def _peak(entry: "Entry", run: Hold) -> int:
    """The most bytes that a device holds at once."""
    closed_over = len(entry.plan.in_specs) - len(entry.shardings)
    return footprint(run, [closed_over + i for i in entry.donated]).peak


def once_a_loop(entry: "Entry", sum_dtype: Any) -> OnceALoop | None:
    """What a step would send and hold if its loops gathered weights once, and reduced gradients once, by its plan;
    None where they do neither at every trip. `sum_dtype`: the type in which gradients are added up."""
    run = entry.plan.run
    if not isinstance(run, Hold) or not any(e.trips > 1 for e in run.program.equations):
        return None
    other = Hold(run.layout, run.labels, "once-gathered", sum_dtype)
    if not other.region(Ahead).operands:
        return None
    sent, then = (sum(collective(move).wire_bytes for move in traffic(each)) for each in (run, other))
    return OnceALoop(sent, then, _peak(entry, other) - _peak(entry, run))


def collective(move: Sent) -> Collective:
    """A collective of a plan as a report lists it."""
    n = move.group_size
    sent = wire_bytes(move.kind, n, move.count * move.bytes)
    return Collective(move.kind, move.axes, n, move.count, move.bytes, sent, apart=move.apart)


def differences(planned: "Reading", compiled: "Reading") -> Finding | None:
    """Tell where a compiled program is not what its plan said, which was shown before; None where it is.

    Small differences are left out: in peak memory up to `MEMORY_ALIKE` of it, in what a kind of collective sends up to
    `SENT_ALIKE` of all that is sent.
    """
    found = []
    then, now = (
        max((d.peak or 0 for d in each.memory.per_device), default=0) for each in (planned, compiled)
    )
    if then and now and abs(now - then) > MEMORY_ALIKE * then:
        found.append(f"peak memory is {byte_text(now)}, not {byte_text(then)}")
    if planned.collectives is not None and compiled.collectives is not None:
        before, after = _sent_by_kind(planned.collectives), _sent_by_kind(compiled.collectives)
        least = SENT_ALIKE * max(before.total(), after.total())
        found += [
            f"{kind} sends {byte_text(after[kind])}, not {byte_text(before[kind])}"
            for kind in sorted(before | after)
            if abs(after[kind] - before[kind]) > least
        ]
    if not found:
        return None
    return Finding("plan-differs", "info", f"Compiled, it is not all as planned: {'; '.join(found)}.")


def _sent_by_kind(collectives: Sequence[Collective]) -> Counter[str]:
    """Return the bytes that a device sends in a step, by kind of collective."""
    sent = Counter[str]()
    for each in collectives:
        sent[each.kind] += each.wire_bytes
    return sent


def caused_by_plan(
    collectives: Iterable[Sent],
    program: Program,
    hold: Hold,
    leaves: Sequence[Leaf],
    text: SourceText,
    home: Sequence[str],
) -> Iterator[tuple[Sent, Cause]]:
    """Yield collectives of a plan, each with the user's line and the array that it is for.

    Args:
        collectives: those that `traffic` tells of `hold`.
        program: what `hold` emits, or a program that is alike, whose lines are wanted.
        hold: the program under a layout.
        leaves: the arrays that labels name, in the order of their numbers.
        text: the user's files, in which lines are looked up.
        home: the file that defines the step, where that is known.
    """
    flow = hold.layout.flow
    phase_of = phases(program, flow)
    for sent in collectives:
        if sent.equation is None:
            yield sent, Cause()
            continue
        frames = called(hold.traceback(program.equations[sent.equation]))
        name = hold.labels.get(sent.equation)
        if sent.value is not None:
            name = weight_label(program, flow, sent.value)
        label = label_of(name or "")
        yield sent, cause_of(frames, phase_of[sent.equation], label, leaves, text, home)


def cause_of(
    frames: Sequence[Frame],
    phase: str,
    label: tuple[str, int] | None,
    leaves: Sequence[Leaf],
    text: SourceText,
    home: Sequence[str],
) -> Cause:
    """Return the cause of a collective whose equation was called at `frames`, innermost last. `label`: the number of
    the array that it is for, and whether it is for its gradient; else as `caused_by_plan` has them."""
    origin, what = place_of(frames, home), None
    if label is not None and label[1] < len(leaves):
        path = leaves[label[1]].path
        what = f"gradient of {path}" if label[0] == GRADIENT else path
    if (frame := origin.frame) is None:
        return Cause(phase=phase, what=what)
    return Cause(phase, frame.file, frame.line, text.line(frame), called_at(origin), what)
