"""A pipeline as a trace in the trace event format, which Perfetto and chrome://tracing open."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from jaxshard_magic.report import Pipeline
from jaxshard_magic.views import words
from jaxshard_magic.views.format import SPACE, printable
from jaxshard_magic.views.timeline import data

SHOWN, IDEAL = 1, 2  # process ids
MICROSECONDS = {"s": 1e6}
UNITLESS = 1e3  # us that a unit takes, so that it is seen


def to_json(p: Pipeline) -> str:
    """The trace as JSON text: `{"traceEvents": [...]}`."""
    return json.dumps(trace(p), ensure_ascii=False, separators=(",", ":"))


def trace(p: Pipeline) -> dict[str, Any]:
    """One process for what is shown, one for its ideal; a thread a rank, an event an action, times in microseconds."""
    size = _plain(words.size_text(p))
    events = [*_process(p, SHOWN, f"{size}, {p.source}", data.lanes(p, p.events), counted=True)]
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
