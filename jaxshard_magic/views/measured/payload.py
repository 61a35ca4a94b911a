"""What was measured of a step as the widget reads it: its lanes as those of a pipeline, its tables as text."""

from typing import Any

from jaxshard_magic.report import Report
from jaxshard_magic.views import words
from jaxshard_magic.views.format import printable, seconds_text
from jaxshard_magic.views.measured import data
from jaxshard_magic.views.packing import span_pairs
from jaxshard_magic.views.source_lines import source_of
from jaxshard_magic.views.words.measured import SPENT


def measured_payload(report: Report) -> dict[str, Any] | None:
    """None where nothing was measured. In `lanes` the microbatch of an action is the position of its line in `lines`,
    behind which stands what no line is known of."""
    m = report.measured
    if m is None:
        return None
    listed, idle = data.rows(report), data.idle(m)
    blank = dict.fromkeys(("stages", "of", "devices", "ideal", "held", "bytes", "peak", "size"))
    return {
        "lead": span_pairs(words.spent_lead(m)),
        "about": words.sentence_case(words.spent_about(m)),
        "notes": [printable(note) for note in words.spent_notes(report)],
        "kinds": [[kind, SPENT[kind]] for kind in data.kinds(m)],
        "lanes": {
            "source": "measured",
            "unit": "s",
            "tick": m.tick,
            "end": data.end(m),
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
                        data.kind_of(m, of, kind) for of, kind in zip(lane.of, lane.kinds, strict=True)
                    ),
                    "stage": 0,
                    "mb": [of if of >= 0 else len(m.lines) for of in lane.of],
                    "sizes": None,
                    "wait": _waits(lane.starts, lane.takes),
                    "take": list(lane.takes),
                }
                for lane in m.lanes
            ],
            "lines": [
                *([printable(row.place), row.text or ""] for row in listed),
                ["no line, or one of those that take least", ""],
            ],
        },
        "heads": ["line", "", *(heads := data.heads(listed))],
        "rows": [
            [
                printable(row.place),
                row.text or "",
                *(printable(row.figures[head]) for head in heads),
            ]
            for row in listed
        ],
        "tables": [
            [heads, [[printable(cell) for cell in row] for row in rows]]
            for heads, rows in (data.collectives(report), data.devices(m))
            if rows
        ],
    }


def line_times(report: Report) -> list[list[Any]]:
    """What each line took, beside the code: the position of its source, its number, the time."""
    return [
        [source_of(file, line, None, report.sources), line, seconds_text(seconds)]
        for (file, line), seconds in data.by_line(report).items()
    ]


def _waits(starts: tuple[int, ...], takes: tuple[int, ...]) -> list[int]:
    """Of each piece the ticks since the end of the one before."""
    ends = (0, *(start + took for start, took in zip(starts, takes, strict=True)))
    return [start - end for start, end in zip(starts, ends, strict=False)]
