"""History of reports as text for a terminal, and as HTML without script: a row for each report, newest first."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import PurePath
from typing import TYPE_CHECKING

from jaxshard_magic.views.format import UNKNOWN, byte_text, count_text, printable, seconds_text, usage_text
from jaxshard_magic.views.html_tags import SIGNS, document, escaped, join_nonempty, small, table, unbroken
from jaxshard_magic.views.terminal import clip, plain_signs, terminal_text, text_width, wrap, wrap_all
from jaxshard_magic.views.terminal import table as columns_of
from jaxshard_magic.views.words.comparison import passed_text

if TYPE_CHECKING:
    from jaxshard_magic.history import History, Row

EMPTY = "No report yet: the report of every %%shard cell, in any notebook, will stand here."
MORE = 200  # rows of the command for more reports
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_WHAT = ("", "when", "step", "strategy", "mesh")
_FIGURES = ("", "step time", "peak", "fits", "numbers")


def summary(listed: "History") -> str:
    """Return one sentence with the number of reports and the search text."""
    count = len(listed.rows)
    if not count:
        return EMPTY if not listed.asked else f"No report of {listed.asked}; %shard history alone shows all."
    many = f"{count_text(count)} report{'s' * (count != 1)}"
    return f"{many}{f' of {listed.asked}' * bool(listed.asked)}{', newest first' * (count > 1)}."


def footer(listed: "History") -> str:
    """Return the number of hidden reports and the command that opens a report; empty without reports."""
    if not listed.rows:
        return ""
    left = len(listed.rows) - listed.shown
    limit = MORE if listed.shown < MORE else len(listed.rows)
    more = f"and {count_text(left)} more: %shard history --limit {limit}. " if left > 0 else ""
    return f"{more}%shard history {listed.rows[0].id} shows report {listed.rows[0].id} in full."


def when_text(at: datetime, now: datetime) -> str:
    """Return a date relative to `now`: time of day for today, day and time in the same year, else the date alone.

    >>> now = datetime(2026, 11, 22, 18, 0)
    >>> when_text(datetime(2026, 11, 22, 14, 3), now), when_text(datetime(2026, 11, 3, 9, 12), now)
    ('today 14:03', 'Nov 3 09:12')
    >>> when_text(datetime(2025, 1, 2), now)
    'Jan 2 2025'
    """
    day = f"{_MONTHS[at.month - 1]} {at.day}"
    if at.year != now.year:
        return f"{day} {at.year}"
    return f"{'today' if at.date() == now.date() else day} {at:%H:%M}"


def step_parts(row: "Row") -> tuple[str, str]:
    """Return the step time and its source: "measured" on a chip, else "predicted" for one.

    Without either the time is a dash, and the source is the time on a simulating CPU, if there is one.
    """
    if row.step_s is not None and row.source != "simulated":
        return seconds_text(row.step_s), "measured"
    if row.predicted_s is not None:
        return seconds_text(row.predicted_s), "predicted"
    return UNKNOWN, "" if row.step_s is None else f"{seconds_text(row.step_s)} on this CPU"


def peak_text(row: "Row") -> str:
    """Return `5.09 of 15.75 GiB`, or the peak alone if the limit is unknown."""
    return byte_text(row.peak) if row.peak is None or row.limit is None else usage_text(row.peak, row.limit)


def fits_text(row: "Row") -> str:
    """Return `yes`, `no`, or a dash if unknown."""
    return UNKNOWN if row.fits is None else "yes" if row.fits else "no"


def same_text(row: "Row") -> str:
    """Return whether the numbers equal the plain step's: `yes`, `no`, or a dash if unknown.

    A passed check under a narrow precision gives `to bf16`: as near as the precision permits.
    """
    if not row.passed:
        return UNKNOWN if row.passed is None else "no"
    return passed_text(row.options)


def to_text(history: "History", width: int | None = None, now: datetime | None = None) -> str:
    """Render the rows as lines for a terminal: what ran, figures below, options below where there are some.

    Args:
        history: Reports, newest first.
        width: Columns, clamped to 60 to 100; None takes the width of the terminal.
        now: Time for relative dates; the present by default.
    """
    room = text_width(width)
    more = footer(history)
    parts = [
        wrap_all([summary(history)], room),
        _lines(history.rows[: history.shown], room, now or datetime.now().astimezone()),
        wrap(more, room) if more else [],
    ]
    return "\n\n".join(terminal_text(part) for part in parts if part)


def _lines(shown: Sequence["Row"], room: int, now: datetime) -> list[str]:
    """Return two table lines for each report, and a line of options; long names are cut."""
    if not shown:
        return []
    indent = max(len(str(row.id)) for row in shown) * " "
    short, wide = room // 6, room // 4
    what = [
        (
            str(row.id),
            when_text(row.at, now),
            clip(printable(row.name), short),
            clip(printable(row.strategy), short),
            clip(printable(row.mesh), wide),
        )
        for row in shown
    ]
    figures = [(indent, " ".join(step_parts(row)), peak_text(row), fits_text(row), same_text(row)) for row in shown]
    first, second = _table(_WHAT, what), _table(_FIGURES, figures)
    second = [clip(line.rstrip(), room) for line in second]
    lines = [first[0], second[0]]
    for row, above, below in zip(shown, first[1:], second[1:], strict=True):
        lines += [above, below]
        lines += wrap(printable(row.typed), room, f"{indent}  ", f"{indent}  ") if row.typed else []
    return lines


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    columns = {head: list(map(plain_signs, told)) for head, told in zip(heads, zip(*rows, strict=True), strict=True)}
    return columns_of(columns, heads, "")


def to_html(history: "History", now: datetime | None = None) -> str:
    """Render the rows as an HTML fragment without script, for a notebook or a page.

    Args:
        history: Reports, newest first.
        now: Time for relative dates; the present by default.
    """
    summary_html, more = f'<p class="jss-verdict">{escaped(summary(history))}</p>', footer(history)
    if not history.rows:
        return f'<div class="jss">\n{summary_html}\n</div>\n'
    at = now or datetime.now().astimezone()
    head = [("", "right"), ("when", "left"), ("step", "wrap"), ("strategy, options, mesh", "wrap")]
    head += [("step time", "right"), ("peak", "right"), ("fits", "left"), ("same numbers", "left")]
    body = [_cells(each, at) for each in history.rows[: history.shown]]
    footer_html = small(escaped(more))
    return f'<div class="jss">\n{join_nonempty([summary_html, table(head, body), footer_html])}\n</div>\n'


def page(history: "History") -> str:
    """Render the rows as a whole HTML document; the theme, light or dark, is the reader's."""
    return document("history of jaxshard_magic", to_html(history))


def _cells(row: "Row", now: datetime) -> list[str]:
    seconds, source = step_parts(row)
    of = f" for {row.on}" if source == "predicted" and row.on else ""
    notebook = f"<br><small>{unbroken(PurePath(row.notebook).name)}</small>" if row.notebook else ""
    typed = f" {unbroken(row.typed)}" if row.typed else ""
    return [
        escaped(str(row.id)),
        escaped(when_text(row.at, now)),
        f"{unbroken(row.name)}{notebook}",
        f"<code><b>{escaped(row.strategy)}</b>{typed}</code><br><small><code>{escaped(row.mesh)}</code></small>",
        f"{escaped(seconds)}{f'<br><small>{escaped(source + of)}</small>' * bool(source)}",
        escaped(peak_text(row)),
        _answer(row.fits, fits_text(row)),
        _answer(row.passed, same_text(row)),
    ]


def _answer(known: bool | None, word: str) -> str:
    """Return yes or no with a sign, or a dash if unknown."""
    if known is None:
        return UNKNOWN
    if known:
        # U+FE0E selects the text form of a sign: some fonts would draw an emoji.
        return f'<span class="jss-ok">\u2714\ufe0e</span> {escaped(word)}'
    return f'<span class="jss-error">{SIGNS["error"]} {escaped(word)}</span>'
