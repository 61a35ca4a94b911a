"""What the plan of a step says where nothing is compiled: its memory and its communication, as predicted."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..plan import Finding, Sent
from ..program.labels import GRADIENT, label_of, weight_label
from ..program.phases import phases
from ..report import Collective, Leaf, Memory
from ..strategies.footprint import footprint
from ..strategies.hold import Hold
from ..strategies.traffic import traffic
from .collectives import Cause, merge, wire_bytes
from .frames import called
from .memory import device_limit, memory, with_temporaries
from .origin import called_at, place_of
from .sources import SourceText

if TYPE_CHECKING:
    from ..step import Entry


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
        closed_over = len(plan.in_specs) - len(entry.shardings)
        peak = footprint(run, [closed_over + i for i in entry.donated]).peak
        held = with_temporaries(held, lambda arrays: max(peak - arrays, 0))
        sent = merge(_caused(entry, run, leaves, text))
    known = (
        "Arrays at rest are exact, and no more is known"
        if sent is None
        else "All figures are the plan's prediction"
    )
    if failed is None:
        return held, sent, None
    return held, sent, Finding("compiler-failed", "error", f"Not compiled: {failed}. {known}.")


def collective(move: Sent) -> Collective:
    """A collective of a plan as a report lists it."""
    n = move.group_size
    sent = wire_bytes(move.kind, n, move.count * move.bytes)
    return Collective(move.kind, move.axes, n, move.count, move.bytes, sent, apart=move.apart)


def _caused(
    entry: "Entry", hold: Hold, leaves: Sequence[Leaf], text: SourceText
) -> Iterator[tuple[Sent, Cause]]:
    """Yield the collectives of a plan, each with the user's line and the array that it is for."""
    program, flow = hold.program, hold.layout.flow
    phase_of, home = phases(program, flow), [entry.home] if entry.home else []
    for sent in traffic(hold):
        if sent.equation is None:
            yield sent, Cause()
            continue
        origin = place_of(called(hold.traceback(program.equations[sent.equation])), home)
        name = hold.labels.get(sent.equation)
        if sent.weight is not None:
            name = weight_label(program, flow, sent.weight)
        label, what = label_of(name or ""), None
        if label is not None:
            path = leaves[label[1]].path
            what = f"gradient of {path}" if label[0] == GRADIENT else path
        phase, frame = phase_of[sent.equation], origin.frame
        if frame is None:
            yield sent, Cause(phase=phase, what=what)
        else:
            yield sent, Cause(phase, frame.file, frame.line, text.line(frame), called_at(origin), what)
