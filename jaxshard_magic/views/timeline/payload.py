"""Data of a pipeline for the widget: actions in columns, times in whole ticks, and all text ready to show."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from jaxshard_magic.report import Pipeline
from jaxshard_magic.views import words
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.payload_encoding import compressed, span_pairs
from jaxshard_magic.views.timeline import data

VERSION = 1
TICKS = 10**9  # ticks from 0 to the last end


def packed_pipeline(p: Pipeline) -> bytes:
    """Return the payload of a standalone pipeline as compact JSON in UTF-8, compressed with zlib."""
    alone = {"v": VERSION, "pipeline": pipeline_payload(p)}
    return compressed(alone)


def pipeline_payload(p: Pipeline) -> dict[str, Any]:
    """Return the data of the timeline, ready for JSON. Names are plain text, never markup."""
    lanes, ideal = data.lanes(p, p.events), data.has_ideal(p)
    end = data.end_of(p)
    scale = TICKS / end if end else 0.0
    measured = p.makespan[2]
    return {
        "lead": span_pairs(words.pipeline_lead(p)),
        "about": printable(words.pipeline_about(p)),
        "parts": [
            [part.what, part.share, words.part_text(part, i == 0), part.more and printable(part.more)]
            for i, part in enumerate(words.bubble_parts(p))
        ],
        "bubble": words.bubble_of(p),
        "work": words.work_text(p),
        "source": words.source_of_times(p),
        "unit": "s" if p.unit == "s" else "",
        "tick": 1 / scale if scale else 0.0,
        "end": p.makespan[1] if measured is None else measured,
        "ideal_end": p.makespan[0] if ideal else None,
        "kinds": data.kinds_of(p),
        "kept": list(p.kept),
        "losses": p.losses,
        "ranks": [_rank(p, i) for i in range(len(p.ranks))],
        "events": [_columns(lane, scale) for lane in lanes],
        "ideal": [_times(lane, scale) for lane in _matched(p, lanes)] if ideal else None,
        "now": _now(p),
        "what_if": [
            [
                printable(w.schedule),
                w.stages,
                w.microbatches,
                w.chunks,
                *map(_short, (w.ideal, w.bubble, w.makespan, w.peak)),
            ]
            for w in p.what_if
        ],
        "refused": [[printable(r.schedule), r.stages, r.microbatches, r.chunks, printable(r.why)] for r in p.refused],
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _rank(p: Pipeline, i: int) -> dict[str, Any]:
    rank = p.ranks[i]
    texts = {
        "name": words.rank_name(p, i),
        "stages": words.stages_text(p, i),
        "of": rank.holds,
        "devices": words.devices_of(rank),
        "bubble": words.percent_text(rank.bubble),
        "ideal": words.percent_text(rank.ideal),
        "held": words.held_text(rank),
        "bytes": words.held_bytes(rank),
    }
    plain = {name: text and printable(text) for name, text in texts.items()}
    return {**plain, "peak": rank.peak_activations, "size": rank.activation_bytes or None}


def _columns(lane: Sequence[data.LaneEvent], scale: float) -> dict[str, Any]:
    """Return the actions of a rank as columns.

    Kinds, stages and microbatches have an entry for each action, `sizes` the number of actions of each event.
    """
    parts = list(chain.from_iterable(mark.actions for mark in lane))
    sizes = [len(mark.actions) for mark in lane]
    return {
        "kinds": "".join(part.kind for part in parts),
        "stage": _one_or_all([part.stage for part in parts]),
        "mb": [part.microbatch for part in parts],
        "sizes": sizes if any(size > 1 for size in sizes) else None,
        **_times(lane, scale),
    }


def _one_or_all(values: Sequence[int]) -> int | Sequence[int]:
    """Return a single value for equal ones, else all: this makes the payload smaller."""
    return values[0] if values and len(set(values)) == 1 else values


def _times(lane: Sequence[data.LaneEvent], scale: float) -> dict[str, list[int]]:
    """Return for each event the ticks since the end of the previous event, and its duration in ticks."""
    waits, takes, last = [], [], 0
    for _, start, end in lane:
        start_tick, end_tick = round(start * scale), round(end * scale)
        # Differences are small and often equal: they compress better than absolute times.
        waits.append(start_tick - last)
        takes.append(end_tick - start_tick)
        last = end_tick
    return {"wait": waits, "take": takes}


def _matched(p: Pipeline, lanes: Sequence[Sequence[data.LaneEvent]]) -> list[list[data.LaneEvent]]:
    """Return the ideal events in the order of the shown ones; an event without an ideal form keeps its own times."""
    matched: list[list[data.LaneEvent]] = []
    for lane, own in zip(data.lanes(p, p.ideal_events), lanes, strict=True):
        ideal: Mapping[str, data.LaneEvent] = {mark.text: mark for mark in lane}
        matched.append([ideal.get(mark.text, mark) for mark in own])
    return matched


def _now(p: Pipeline) -> dict[str, Any]:
    """Return the present pipeline, for comparison with what-ifs. Its peak is in microbatches of a whole rank."""
    peaks = [rank.peak_activations for rank in p.ranks if rank.peak_activations is not None]
    held = [rank.activation_bytes for rank in p.ranks if rank.activation_bytes is not None]
    return {
        "schedule": printable(p.schedule),
        "stages": p.stages,
        "microbatches": p.microbatches,
        "chunks": p.chunks,
        "ideal": p.bubble.ideal,
        "bubble": p.bubble.predicted,
        "makespan": p.makespan[1],
        "peak": max(peaks) / max(1, p.chunks) if peaks else None,
        "bytes": max(held, default=0) or None,
    }
