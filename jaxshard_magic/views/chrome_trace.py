"""Export a pipeline, or the lanes of a recorded step, in the Trace Event Format for Perfetto and chrome://tracing."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from jaxshard_magic.report import Measured, Pipeline
from jaxshard_magic.views import measured as spent
from jaxshard_magic.views import words
from jaxshard_magic.views.format import SPACE, printable
from jaxshard_magic.views.source_lines import short_line
from jaxshard_magic.views.timeline import data

SHOWN, IDEAL = 1, 2  # process ids
MICROSECONDS = {"s": 1e6}
UNITLESS = 1e3  # us of one unit, long enough to be visible


def pipeline_to_json(p: Pipeline) -> str:
    """Return the trace of a pipeline as JSON text: `{"traceEvents": [...]}`."""
    return json.dumps(pipeline_trace(p), ensure_ascii=False, separators=(",", ":"))


def recorded_step_to_json(m: Measured) -> str:
    """Return the lanes of one recorded step as JSON text: a thread for each device, an event for each piece of time.

    An event is named after its line of code and the kind of time, and has the kind as category.
    """
    events = [_metadata_event("process_name", SHOWN, 0, f"one recorded step, {m.of_devices} devices")]
    for lane, marks in zip(m.lanes, spent.lane_events(m), strict=True):
        events.append(_metadata_event("thread_name", SHOWN, lane.device, f"device {lane.device}"))
        for mark in marks:
            row, kind, _ = mark.actions[0]
            # Row -1: no line of code is known, or the line is not among `m.lines`.
            line = m.lines[row] if row >= 0 else None
            location = (short_line(line) if line is not None else "") or "no line"
            timing = {"ts": round(mark.start * 1e6, 3), "dur": round((mark.end - mark.start) * 1e6, 3)}
            name = {"ph": "X", "name": f"{printable(location)} {words.TIME_KINDS[kind]}", "cat": words.TIME_KINDS[kind]}
            events.append({**name, "pid": SHOWN, "tid": lane.device, **timing})
    about = {"traceEvents": events, "displayTimeUnit": "ms"}
    return json.dumps(about, ensure_ascii=False, separators=(",", ":"))


def pipeline_trace(p: Pipeline) -> dict[str, Any]:
    """Return a pipeline as a dict in the Trace Event Format.

    The pipeline as shown is one process, its ideal form another. Threads are ranks, events are actions, times are
    microseconds.
    """
    size = _with_plain_spaces(words.size_text(p))
    events = [*_process(p, SHOWN, f"{size}, {words.source_of_times(p)}", data.lanes(p, p.events), counted=True)]
    if p.ideal_events:
        events += _process(p, IDEAL, f"{size}, ideal", data.lanes(p, p.ideal_events), counted=False)
    about = {"schedule": printable(p.schedule), "bubble": words.bubble_of(p), "unit": p.unit or "1 unit = 1 ms"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _process(
    p: Pipeline, pid: int, name: str, lanes: Sequence[Sequence[data.LaneEvent]], *, counted: bool
) -> Iterator[dict[str, Any]]:
    """Yield the events of one process: names, sort order, actions, and counters of held activations if `counted`."""
    yield _metadata_event("process_name", pid, 0, name)
    # Sort indices keep the shown pipeline above the ideal one, and ranks in order.
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    scale = MICROSECONDS.get(p.unit, UNITLESS)
    for rank, lane in enumerate(lanes):
        holds = p.ranks[rank].holds
        label = words.rank_name(p, rank) + (f": {printable(holds)}" if holds else "")
        yield _metadata_event("thread_name", pid, rank, label)
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": rank, "args": {"sort_index": rank}}
        for mark in lane:
            yield _event(pid, rank, mark, scale)
        if counted:
            counter = {"ph": "C", "name": f"activations held, {words.rank_name(p, rank)}", "pid": pid}
            for at, held in data.held_activations(p, lane):
                yield {**counter, "ts": round(at * scale, 3), "args": {"held": round(held, 3)}}


def _metadata_event(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """Return a metadata event, such as the name of a process or a thread."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(pid: int, rank: int, mark: data.LaneEvent, scale: float) -> dict[str, Any]:
    """Return a complete event for one action."""
    kinds = [words.KINDS[kind] for _, kind, _ in mark.actions]
    stage, _, microbatch = mark.actions[0]
    single_action = {"stage": stage, "microbatch": microbatch} if len(mark.actions) == 1 else {}
    return {
        "ph": "X",
        "name": "+".join(f"{kind}{microbatch}" for _, kind, microbatch in mark.actions),
        # The category is the kind of the action, so that a trace viewer can tell kinds apart.
        "cat": ",".join(kinds),
        "pid": pid,
        "tid": rank,
        "ts": round(mark.start * scale, 3),
        "dur": round((mark.end - mark.start) * scale, 3),
        "args": {"action": mark.text, "kind": " and ".join(kinds), **single_action},
    }


def _with_plain_spaces(text: str) -> str:
    """Return printable text with ordinary spaces instead of narrow ones."""
    return printable(text).replace(SPACE, " ")
