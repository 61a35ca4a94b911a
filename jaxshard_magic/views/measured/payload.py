"""Time breakdown of a recorded step for the widget: lanes in the form of a pipeline's, tables as text."""

from typing import Any

from jaxshard_magic.report import Report
from jaxshard_magic.views import words
from jaxshard_magic.views.format import printable, seconds_text
from jaxshard_magic.views.measured import data
from jaxshard_magic.views.payload_encoding import span_pairs
from jaxshard_magic.views.source_lines import source_index
from jaxshard_magic.views.words.measured import TIME_KINDS


def measured_payload(report: Report) -> dict[str, Any] | None:
    """Return the data of the measured view; None without a measurement.

    In `lanes` the microbatch of an action is the index of its line in `lines`. The last entry of `lines` stands for
    time of other lines, and without a known line.
    """
    m = report.measured
    if m is None:
        return None
    listed, idle = data.rows(report), data.idle_shares(m)
    blank = dict.fromkeys(("stages", "of", "devices", "ideal", "held", "bytes", "peak", "size"))
    return {
        "lead": span_pairs(words.measured_lead(m)),
        "about": words.sentence_case(words.measured_about(m)),
        "notes": [printable(note) for note in words.measured_notes(report)],
        "kinds": [[kind, TIME_KINDS[kind]] for kind in data.lane_letters(m)],
        "lanes": {
            "source": "measured",
            "unit": "s",
            "tick": m.tick,
            "end": data.lanes_end(m),
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
                        data.lane_letter(m, of, kind) for of, kind in zip(lane.of, lane.kinds, strict=True)
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
        "heads": ["line", "", *(heads := data.heads(listed))],
        "rows": [
            [printable(row.location), row.text or "", *(printable(row.figures[head]) for head in heads)]
            for row in listed
        ],
        "tables": [
            [heads, [[printable(cell) for cell in row] for row in rows]]
            for heads, rows in (data.collectives(report), data.devices(m))
            if rows
        ],
    }


def line_times(report: Report) -> list[list[Any]]:
    """Return (index of the source, line number, time) of each line, for display beside the code."""
    return [
        [source_index(file, line, None, report.sources), line, seconds_text(seconds)]
        for (file, line), seconds in data.seconds_by_line(report).items()
    ]


def _waits(starts: tuple[int, ...], takes: tuple[int, ...]) -> list[int]:
    """Return for each piece the ticks since the end of the previous one."""
    ends = (0, *(start + took for start, took in zip(starts, takes, strict=True)))
    return [start - end for start, end in zip(starts, ends, strict=False)]
