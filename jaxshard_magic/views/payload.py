"""Data of a report for its widget: plain lists and strings, with all texts formatted here.

Devices are referred to by position in the mesh, axes by index, so the browser looks nothing up by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from jaxshard_magic.code_locations import short_location
from jaxshard_magic.report import Buffer, Collective, Memory, Report, SourceExcerpt
from jaxshard_magic.report.parts import finite_or_none
from jaxshard_magic.views import communication as comm
from jaxshard_magic.views import device_memory, figure_marks, words
from jaxshard_magic.views import measured as spent
from jaxshard_magic.views.device_memory import DeviceStages, stages
from jaxshard_magic.views.document.parts import Area, RowFigure
from jaxshard_magic.views.experts_positions import layout_figures, ring_figures, ring_memory_lines
from jaxshard_magic.views.format import byte_text, device_text, limit_text, printable, printable_lines, seconds_text
from jaxshard_magic.views.leaves_payload import leaves_payload
from jaxshard_magic.views.payload_encoding import axis_numbers, compressed, span_pairs
from jaxshard_magic.views.sections import summary
from jaxshard_magic.views.source_lines import line_facts, source_index
from jaxshard_magic.views.terminal import shorten
from jaxshard_magic.views.timeline.payload import pipeline_payload
from jaxshard_magic.views.training.data import short_text
from jaxshard_magic.views.training.payload import training_payload
from jaxshard_magic.views.words import Span
from jaxshard_magic.views.words.step_time import TIME_KINDS

VERSION = 1
PHASES = ("forward", "backward", "update")
LONG = 22  # letters of a buffer's name, at most


def packed_report(report: Report) -> bytes:
    """Return the payload as compact JSON in UTF-8, compressed with zlib."""
    return compressed(payload(report), 4)


def payload(report: Report) -> dict[str, Any]:
    """Return everything shown by the report's widget, as data for JSON.

    Names are plain text, never markup.
    """
    index = axis_numbers(report.mesh.axes, [report])
    memory = _memory(report)
    return {
        "v": VERSION,
        "title": _title(report),
        "mesh": {
            "axes": [[printable(axis), report.mesh.axes.get(axis, 1)] for axis in index],
            "devices": list(report.mesh.numbers),
            "hosts": list(report.mesh.hosts),
            "text": printable(words.reported_devices(report)),
        },
        "verdict": {"ok": (verdict := words.verdict(report)).ok, "spans": span_pairs(verdict.spans)},
        "notes": [printable(note) for note in (*words.run_notes(report), *words.saved_notes(report))],
        "foot": [printable(note) for note in words.origin_notes(report)],
        "check": _check(report),
        "time": _time(report, index),
        "figures": _figures(report, index, memory is not None),
        "options": _options(report),
        "advice": [_advice(a.level, a.message, a.fix) for a in report.advice],
        "hints": words.HINTS,
        "tabs": _tabs(report, memory is not None),
        "opens_on": first_tab(report),
        **leaves_payload(report, index),
        "memory": memory,
        "figures_of": {
            "layout": _figure_rows(layout_figures(report), index),
            "communication": _figure_rows(ring_figures(report), index),
        },
        "communication": _communication(report, index),
        "measured": measured_payload(report),
        "pipeline": None if report.pipeline is None else pipeline_payload(report.pipeline),
        "training": None if report.metrics is None else training_payload(report.metrics),
    }


def _figure_rows(figures: Sequence[RowFigure], index: Mapping[str, int]) -> list[Any]:
    """Return figures as [lead, axis, height, rows of (name, areas, text)]."""
    return [
        [
            printable(f.lead),
            index[f.axis],
            f.height,
            [[printable(row.name), [_area(a) for a in row.areas], printable(row.text)] for row in f.rows],
        ]
        for f in figures
    ]


def _area(area: Area) -> list[float]:
    """Return x, y, width and height in thousandths, then the opacity."""
    sides = (area.x, area.y, area.width, area.height)
    return [*(round(1000 * side) for side in sides), area.opacity]


def tab_ids(report: Report) -> list[str]:
    """Return the ids of the tabs with content in this report."""
    return [tab["id"] for tab in _tabs(report, bool(report.memory and report.memory.per_device))]


def first_tab(report: Report) -> str | None:
    """Return the id of the initial tab; None without tabs.

    The order of preference: memory for a step that doesn't fit, the timeline of a pipeline, the first tab.
    """
    tabs = tab_ids(report)
    preferred = (*("memory",) * (not words.fits_memory(report)), "pipeline", *tabs[:1])
    return next((tab for tab in preferred if tab in tabs), None)


def _title(report: Report) -> dict[str, str | None]:
    return {
        "strategy": printable(words.title_text(report)),
        "options": printable(words.options_text(report)),
        "name": printable(words.named_text(report)) or None,
    }


def _check(report: Report) -> dict[str, Any] | None:
    if report.check is None:
        return None

    def line_data(lines: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> list[Any]:
        return [[printable(line), [[*map(printable, leaf)] for leaf in leaves]] for line, leaves in lines]

    lines_found, noise = line_data(words.result_lines(report)), line_data(words.noise_lines(report))
    return {"passed": report.check.passed, "lines": lines_found, "noise": noise}


def _options(report: Report) -> dict[str, Any] | None:
    options = summary.option_rows(report)
    if not options:
        return None
    why = [printable(f"{r.change}: {r.reason}") for r in options if r.reason]
    rows = [[printable(r.change), r.values, r.shares] for r in options]
    return {"title": summary.OPTIONS_TITLE, "heads": list(summary.OPTION_HEADS.items()), "rows": rows, "why": why}


def _figures(report: Report, index: Mapping[str, int], memory: bool) -> list[dict[str, Any]]:
    sent = report.collectives is not None
    shown = words.key_figures_of(report)
    opens = (None, "memory" if memory else None, "communication" if sent else None, None, None)[: len(shown)]
    return [
        {
            "label": f.label,
            "value": f.value,
            "note": printable(f.note),
            "sign": f.sign,
            "opens": tab,
            "mark": _mark(mark, index),
        }
        for f, mark, tab in zip(shown, figure_marks.marks(report), opens, strict=True)
    ]


def _time(report: Report, index: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the predicted step, divided into the device's own work and each kind of collective by axes."""
    parts = words.time_parts(report)
    if not parts:
        return None
    rows = [
        [printable(kind), axes and [index[a] for a in axes], s, words.time_part_text(report, kind, axes, s)]
        for kind, axes, s in parts
    ]
    own = sum(kind in words.DEVICE_PARTS for kind, _, _ in parts)
    total = sum(s for _, _, s in parts)
    told = {"text": words.predicted_text(report), "range": words.predicted_range(report) or None}
    return {"total": total, **told, "parts": rows, "own": own}


def _mark(mark: figure_marks.Mark | None, index: Mapping[str, int]) -> dict[str, Any] | None:
    if mark is None:
        return None
    if isinstance(mark, figure_marks.Axes):
        parts = [[index[axes[0]] if axes else None, share] for axes, share in mark.parts]
        return {"kind": "axes", "parts": parts}
    # The browser selects a drawing by the class name and reads its fields by name.
    return {"kind": type(mark).__name__.lower(), **asdict(mark)}


def _advice(level: str, message: str, fix: str | None) -> dict[str, str | None]:
    head, rest = words.first_clause(printable(message))
    known = level if level in ("info", "warning", "error") else "info"
    return {"level": known, "head": head, "rest": rest, "fix": None if fix is None else printable_lines(fix)}


def _tabs(report: Report, memory: bool) -> list[dict[str, str]]:
    tabs = []
    if report.leaves:
        tabs.append(("layout", "Layout", words.leaves_text(len(report.leaves))))
    if memory and report.memory:
        tabs.append(("memory", "Memory", byte_text(device_memory.groups(report.memory)[0].fullest.peak)))
    if report.collectives is not None:
        sent = _communication_number(report) if report.collectives else "nothing"
        tabs.append(("communication", "Communication", sent))
    if report.measured is not None:
        tabs.append(("measured", "Measured", words.recorded_text(report.measured)))
    if report.pipeline is not None:
        bubble = words.percent_text(words.bubble_of(report.pipeline))
        tabs.append(("pipeline", "Pipeline", f"bubble {bubble}"))
    if report.metrics is not None:
        tabs.append(("training", "Training", printable(short_text(report.metrics))))
    return [dict(zip(("id", "label", "number"), tab, strict=True)) for tab in tabs]


def _communication_number(report: Report) -> str:
    return words.communication_share(report) or words.sent_text(report.collectives or ())


def _memory(report: Report) -> dict[str, Any] | None:
    position = {device: i for i, device in enumerate(report.mesh.numbers)}
    memory = report.memory
    # The browser refers to devices by position in the mesh: a device outside of the mesh has none.
    rows = [d for d in memory.per_device if d.device in position] if memory else []
    if memory is None or not rows:
        return None
    memory = replace(memory, per_device=tuple(rows))
    by_device = {d.device: d for d in rows}
    stage_map = stages(report)
    columns = (*device_memory.ROLES, "peak", "measured")
    most = device_memory.limit(memory)
    return {
        "limit": most,
        "limit_text": None if most is None else limit_text(most),
        "source": "measured" if memory.source == "measured" else "computed",
        "lead": span_pairs(
            [
                *words.memory_lead(memory, stage_map.devices_text),
                *(Span(f" {line}") for line in ring_memory_lines(report)),
            ]
        ),
        "scale_note": words.scale_note(memory),
        "roles": device_memory.roles(memory),
        "devices": {
            "device": list(position),
            **{c: [getattr(by_device.get(d), c, None) for d in position] for c in columns},
        },
        "stages": [printable(stage_map.stage_text([d])) for d in position] if stage_map.index_by_axis else None,
        "groups": _groups(memory, position, stage_map),
        "live": _live(memory, report.sources),
        "buffers": None if memory.buffers is None else [_buffer(b, report.sources) for b in memory.buffers],
        "others": memory.others,
        "buffers_lead": words.buffers_lead(memory),
    }


def _live(memory: Memory, sources: Sequence[SourceExcerpt]) -> dict[str, Any] | None:
    live = memory.live
    if live is None or not live.bytes:
        return None
    return {
        "at": live.at,
        "bytes": live.bytes,
        "instructions": live.instructions,
        "peak": live.peak,
        "phases": live.phases,
        "lead": words.live_lead(memory),
        "told": words.live_text(memory),
        **line_facts(live, sources),
    }


def _buffer(buffer: Buffer, sources: Sequence[SourceExcerpt]) -> dict[str, Any]:
    return {
        "bytes": buffer.bytes,
        "count": buffer.count,
        "type": printable(words.array_type(buffer)),
        "what": shorten(printable(words.buffer_name(buffer)), LONG),
        "about": printable(words.buffer_about(buffer)),
        "told": printable(", ".join(filter(None, (words.buffer_name(buffer), words.buffer_about(buffer))))),
        **line_facts(buffer, sources),
    }


def _groups(memory: Memory, position: Mapping[int, int], stage_map: DeviceStages) -> list[dict[str, Any]]:
    return [
        {
            "text": device_text(group.devices),
            "stage": printable(stage_map.stage_text(group.devices)),
            "members": sorted(position[device] for device in group.devices),
            "top": position[group.fullest.device],
        }
        for group in device_memory.groups(memory)
    ]


def _communication(report: Report, index: Mapping[str, int]) -> dict[str, Any] | None:
    if report.collectives is None:
        return None
    total = words.sent_bytes(report) or 0
    order = sorted(report.collectives, key=lambda c: -c.wire_bytes)
    return {
        "lead": span_pairs(words.communication_lead(report)),
        "total": total,
        "between": comm.inter_island_heading(report),
        "ways": [[index[axis], printable(way)] for axis, way in words.link_texts(report)],
        "step_s": sum(s for _, _, s in words.time_parts(report)) or None,
        "rows": [_collective(c, index, total, report.sources) for c in order],
        "sources": [_source(source) for source in report.sources],
        "measured": line_times(report),
    }


def _collective(
    c: Collective, index: Mapping[str, int], total: int, sources: Sequence[SourceExcerpt]
) -> dict[str, Any]:
    return {
        "kind": printable(c.kind),
        "axes": None if c.axes is None else [index[axis] for axis in c.axes],
        "group_size": c.group_size,
        "count": c.count,
        "exact": c.exact,
        "bytes": c.bytes,
        "wire_bytes": c.wire_bytes,
        "network_bytes": c.network_bytes,
        "seconds": finite_or_none(c.waited),
        "links": None if c.exposed is None else finite_or_none(c.seconds),
        "share": c.wire_bytes / total if total else 0,
        "phase": c.phase if c.phase in PHASES else None,
        "what": None if c.what is None else printable(c.what),
        "job": c.job and printable(c.job),
        "source": source_index(c.file, c.line, c.source, sources),
        "line": c.line,
        "short": None if c.line is None else printable(short_location(c.file, c.line)),
        "text": None if c.source is None else printable(c.source.strip()),
        "called": None if c.called is None else printable(c.called.removeprefix("cell ")),
    }


def _source(source: SourceExcerpt) -> dict[str, Any]:
    lines = [[number, printable(line)] for number, line in zip(source.numbers, source.text, strict=True)]
    note = None if source.note is None else printable(source.note)
    return {"name": printable(source.name), "home": source.home, "note": note, "lines": lines}


def measured_payload(report: Report) -> dict[str, Any] | None:
    """Return the data of the measured view; None without a measurement.

    In `lanes` the microbatch of an action is the index of its line in `lines`. The last entry of `lines` stands for
    time of other lines, and without a known line.
    """
    m = report.measured
    if m is None:
        return None
    listed, idle = spent.rows(report), spent.idle_shares(m)
    blank = dict.fromkeys(("stages", "of", "devices", "ideal", "held", "bytes", "peak", "size"))
    return {
        "lead": span_pairs(words.measured_lead(m)),
        "about": words.sentence_case(words.measured_about(m)),
        "notes": [printable(note) for note in words.measured_notes(report)],
        "kinds": [[kind, TIME_KINDS[kind]] for kind in spent.lane_letters(m)],
        "lanes": {
            "source": "measured",
            "unit": "s",
            "tick": m.tick,
            "end": spent.lanes_end(m),
            "ideal_end": None,
            "kept": [],
            "losses": 1,
            "ideal": None,
            "ranks": [
                {**blank, "name": f"device {lane.device}", "bubble": share}
                for lane, share in zip(m.lanes, idle, strict=True)
            ],
            "events": [
                {
                    "kinds": "".join(
                        spent.lane_letter(m, of, kind) for of, kind in zip(lane.of, lane.kinds, strict=True)
                    ),
                    "stage": 0,
                    # The widget draws these lanes with the code of pipelines; the line takes the field of the
                    # microbatch.
                    "mb": [of if of >= 0 else len(m.lines) for of in lane.of],
                    "sizes": None,
                    "wait": _waits(lane.starts, lane.takes),
                    "take": list(lane.takes),
                }
                for lane in m.lanes
            ],
            "lines": [
                *([printable(row.location), row.text or ""] for row in listed),
                ["no line, or one of those that take least", ""],
            ],
        },
        "heads": ["line", "", *(heads := spent.heads(listed))],
        "rows": [
            [printable(row.location), row.text or "", *(printable(row.figures[head]) for head in heads)]
            for row in listed
        ],
        "tables": [
            [heads, [[printable(cell) for cell in row] for row in rows]]
            for heads, rows in (spent.collectives(report), spent.devices(m))
            if rows
        ],
    }


def line_times(report: Report) -> list[list[Any]]:
    """Return (index of the source, line number, time) of each line, for display beside the code."""
    return [
        [source_index(file, line, None, report.sources), line, seconds_text(seconds)]
        for (file, line), seconds in spent.seconds_by_line(report).items()
    ]


def _waits(starts: tuple[int, ...], takes: tuple[int, ...]) -> list[int]:
    """Return for each piece the ticks since the end of the previous one."""
    ends = (0, *(start + took for start, took in zip(starts, takes, strict=True)))
    return [start - end for start, end in zip(starts, ends, strict=False)]
