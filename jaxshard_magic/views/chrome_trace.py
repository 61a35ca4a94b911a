"""A pipeline, or a recorded step in lanes, as a trace in the trace event format: for Perfetto and chrome://tracing."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from jaxshard_magic.report import Measured, Pipeline
from jaxshard_magic.views import words
from jaxshard_magic.views.format import SPACE, printable
from jaxshard_magic.views.measured import data as spent
from jaxshard_magic.views.source_lines import place_in_short
from jaxshard_magic.views.timeline import data

SHOWN, IDEAL = 1, 2  # process ids
MICROSECONDS = {"s": 1e6}
UNITLESS = 1e3  # us that a unit takes, so that it is seen


def to_json(p: Pipeline) -> str:
    """The trace as JSON text: `{"traceEvents": [...]}`."""
    return json.dumps(trace(p), ensure_ascii=False, separators=(",", ":"))


def lanes_to_json(m: Measured) -> str:
    """The lanes of one recorded step as JSON text: a thread a device, an event a piece, named by its line."""
    events = [_named("process_name", SHOWN, 0, f"one recorded step, {m.of_devices} devices")]
    for lane, marks in zip(m.lanes, spent.marks(m), strict=True):
        events.append(_named("thread_name", SHOWN, lane.device, f"device {lane.device}"))
        for mark in marks:
            row, kind, _ = mark.parts[0]
            line = m.lines[row] if row >= 0 else None
            place = (place_in_short(line) if line is not None else "") or "no line"
            took = {"ts": round(mark.start * 1e6, 3), "dur": round((mark.end - mark.start) * 1e6, 3)}
            name = {"ph": "X", "name": f"{printable(place)} {words.SPENT[kind]}", "cat": words.SPENT[kind]}
            events.append({**name, "pid": SHOWN, "tid": lane.device, **took})
    about = {"traceEvents": events, "displayTimeUnit": "ms"}
    return json.dumps(about, ensure_ascii=False, separators=(",", ":"))


def trace(p: Pipeline) -> dict[str, Any]:
    """One process for what is shown, one for its ideal; a thread a rank, an event an action, times in microseconds."""
    size = _plain(words.size_text(p))
    events = [
        *_process(p, SHOWN, f"{size}, {words.source_of_times(p)}", data.lanes(p, p.events), counted=True)
    ]
    if p.ideal_events:
        events += _process(p, IDEAL, f"{size}, ideal", data.lanes(p, p.ideal_events), counted=False)
    about = {
        "schedule": printable(p.schedule),
        "bubble": words.bubble_of(p),
        "unit": p.unit or "1 unit = 1 ms",
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _process(
    p: Pipeline, pid: int, name: str, lanes: Sequence[Sequence[data.Mark]], *, counted: bool
) -> Iterator[dict[str, Any]]:
    yield _named("process_name", pid, 0, name)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    scale = MICROSECONDS.get(p.unit, UNITLESS)
    for rank, lane in enumerate(lanes):
        holds = p.ranks[rank].holds
        label = words.rank_name(p, rank) + (f": {printable(holds)}" if holds else "")
        yield _named("thread_name", pid, rank, label)
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": rank, "args": {"sort_index": rank}}
        for mark in lane:
            yield _event(pid, rank, mark, scale)
        if counted:
            counter = {"ph": "C", "name": f"activations held, {words.rank_name(p, rank)}", "pid": pid}
            for at, held in data.activations(p, lane):
                yield {**counter, "ts": round(at * scale, 3), "args": {"held": round(held, 3)}}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(pid: int, rank: int, mark: data.Mark, scale: float) -> dict[str, Any]:
    """A complete event; its category is the kind, so that a viewer can tell them apart."""
    kinds = [words.KINDS[kind] for _, kind, _ in mark.parts]
    stage, _, microbatch = mark.parts[0]
    alone = {"stage": stage, "microbatch": microbatch} if len(mark.parts) == 1 else {}
    return {
        "ph": "X",
        "name": "+".join(f"{kind}{microbatch}" for _, kind, microbatch in mark.parts),
        "cat": ",".join(kinds),
        "pid": pid,
        "tid": rank,
        "ts": round(mark.start * scale, 3),
        "dur": round((mark.end - mark.start) * scale, 3),
        "args": {"action": mark.text, "kind": " and ".join(kinds), **alone},
    }


def _plain(text: str) -> str:
    return printable(text).replace(SPACE, " ")
