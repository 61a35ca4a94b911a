"""A pipeline as the widget reads it: its actions in columns, times as whole ticks, every word made here."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from jaxshard_magic.report import Pipeline
from jaxshard_magic.views import words
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.packing import compressed, span_pairs
from jaxshard_magic.views.timeline import data

VERSION = 1
TICKS = 10**9  # that the longest time is cut into


def packed_pipeline(p: Pipeline) -> bytes:
    """The payload of a pipeline that stands alone, as compact JSON in UTF-8, compressed with zlib."""
    alone = {"v": VERSION, "pipeline": pipeline_payload(p)}
    return compressed(alone)


def pipeline_payload(p: Pipeline) -> dict[str, Any]:
    """What the timeline shows, as data that JSON can hold. Names are plain text, never markup."""
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
        "refused": [
            [printable(r.schedule), r.stages, r.microbatches, r.chunks, printable(r.why)] for r in p.refused
        ],
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _rank(p: Pipeline, i: int) -> dict[str, Any]:
    rank = p.ranks[i]
    said = {
        "name": words.rank_name(p, i),
        "stages": words.stages_text(p, i),
        "of": rank.holds,
        "devices": words.devices_of(rank),
        "bubble": words.percent_text(rank.bubble),
        "ideal": words.percent_text(rank.ideal),
        "held": words.held_text(rank),
        "bytes": words.held_bytes(rank),
    }
    plain = {name: text and printable(text) for name, text in said.items()}
    return {**plain, "peak": rank.peak_activations, "size": rank.activation_bytes or None}


def _columns(lane: Sequence[data.Mark], scale: float) -> dict[str, Any]:
    """A rank's actions: letters, stages and microbatches of all parts, and how many parts each event has."""
    parts = list(chain.from_iterable(mark.parts for mark in lane))
    sizes = [len(mark.parts) for mark in lane]
    return {
        "kinds": "".join(part.kind for part in parts),
        "stage": _one_or_all([part.stage for part in parts]),
        "mb": [part.microbatch for part in parts],
        "sizes": sizes if any(size > 1 for size in sizes) else None,
        **_times(lane, scale),
    }


def _one_or_all(values: Sequence[int]) -> int | Sequence[int]:
    return values[0] if values and len(set(values)) == 1 else values


def _times(lane: Sequence[data.Mark], scale: float) -> dict[str, list[int]]:
    """Of each event the ticks since the one before, and those that it takes: small numbers, much alike."""
    waits, takes, last = [], [], 0
    for _, start, end in lane:
        begun, ended = round(start * scale), round(end * scale)
        waits.append(begun - last)
        takes.append(ended - begun)
        last = ended
    return {"wait": waits, "take": takes}


def _matched(p: Pipeline, lanes: Sequence[Sequence[data.Mark]]) -> list[list[data.Mark]]:
    """The ideal events in the order of those that are shown; one that has no ideal keeps its own time."""
    matched: list[list[data.Mark]] = []
    for lane, own in zip(data.lanes(p, p.ideal_events), lanes, strict=True):
        ideal: Mapping[str, data.Mark] = {mark.text: mark for mark in lane}
        matched.append([ideal.get(mark.text, mark) for mark in own])
    return matched


def _now(p: Pipeline) -> dict[str, Any]:
    """The pipeline as it is, beside which a what-if stands; its peak in microbatches of a whole rank."""
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
