"""The history as text for a terminal, and as HTML without script: a row for each report, newest first."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import PurePath
from typing import TYPE_CHECKING

from jaxshard_magic.views.format import UNKNOWN, byte_text, count_text, of_limit, printable, seconds_text
from jaxshard_magic.views.html import SIGNS
from jaxshard_magic.views.page import document
from jaxshard_magic.views.tags import joined, small, table, text, unbroken
from jaxshard_magic.views.terminal import clip, fitted, plain, printed, wrap, wrapped
from jaxshard_magic.views.terminal import table as columns_of
from jaxshard_magic.views.words.comparison import passed_text

if TYPE_CHECKING:
    from jaxshard_magic.history import History, Row

EMPTY = "No report yet: the report of every %%shard cell, in any notebook, will stand here."
MORE = 200  # rows that are offered next
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_WHAT = ("", "when", "step", "strategy", "mesh")
_FIGURES = ("", "step time", "peak", "fits", "numbers")


def lead(listed: "History") -> str:
    """How many there are, and of what; one sentence."""
    count = len(listed.rows)
    if not count:
        return EMPTY if not listed.asked else f"No report of {listed.asked}; %shard history alone shows all."
    many = f"{count_text(count)} report{'s' * (count != 1)}"
    return f"{many}{f' of {listed.asked}' * bool(listed.asked)}{', newest first' * (count > 1)}."


def rest(listed: "History") -> str:
    """What is not in the table, and how one of it is opened; empty where there is none."""
    if not listed.rows:
        return ""
    left = len(listed.rows) - listed.shown
    limit = MORE if listed.shown < MORE else len(listed.rows)
    more = f"and {count_text(left)} more: %shard history --limit {limit}. " if left > 0 else ""
    return f"{more}%shard history {listed.rows[0].id} shows report {listed.rows[0].id} in full."


def when_text(at: datetime, now: datetime) -> str:
    """A time of day near `now`, a date in its year, or one of another year.

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
    """The step time and where it is from: measured where a chip ran it, else predicted for one; a dash where neither
    is known, with the time of a CPU that stood in."""
    if row.step_s is not None and row.source != "simulated":
        return seconds_text(row.step_s), "measured"
    if row.predicted_s is not None:
        return seconds_text(row.predicted_s), "predicted"
    return UNKNOWN, "" if row.step_s is None else f"{seconds_text(row.step_s)} on this CPU"


def peak_text(row: "Row") -> str:
    """`5.09 of 15.75 GiB`, or the peak alone where no limit is known."""
    return byte_text(row.peak) if row.peak is None or row.limit is None else of_limit(row.peak, row.limit)


def fits_text(row: "Row") -> str:
    """`yes`, `no`, or a dash where it is not known whether the step fits."""
    return UNKNOWN if row.fits is None else "yes" if row.fits else "no"


def same_text(row: "Row") -> str:
    """Whether the numbers are those of the plain step, or as near as a narrow precision can be."""
    if not row.passed:
        return UNKNOWN if row.passed is None else "no"
    return passed_text(row.options)


def to_text(history: "History", width: int | None = None, now: datetime | None = None) -> str:
    """The rows in lines of at most `width` columns, the terminal's by default, held between 60 and 100: of each report
    what ran, below it its figures, and its options where it has some."""
    room = fitted(width)
    more = rest(history)
    parts = [
        wrapped([lead(history)], room),
        _lines(history.rows[: history.shown], room, now or datetime.now().astimezone()),
        wrap(more, room) if more else [],
    ]
    return "\n\n".join(printed(part) for part in parts if part)


def _lines(shown: Sequence["Row"], room: int, now: datetime) -> list[str]:
    """Names are cut so that their line fits."""
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
    figures = [
        (indent, " ".join(step_parts(row)), peak_text(row), fits_text(row), same_text(row)) for row in shown
    ]
    first, second = _table(_WHAT, what), _table(_FIGURES, figures)
    second = [clip(line.rstrip(), room) for line in second]
    lines = [first[0], second[0]]
    for row, above, below in zip(shown, first[1:], second[1:], strict=True):
        lines += [above, below]
        lines += wrap(printable(row.typed), room, f"{indent}  ", f"{indent}  ") if row.typed else []
    return lines


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    columns = {
        head: list(map(plain, told)) for head, told in zip(heads, zip(*rows, strict=True), strict=True)
    }
    return columns_of(columns, heads, "")


def to_html(history: "History", now: datetime | None = None) -> str:
    """The rows as a fragment to stand in a notebook or a page, without script."""
    said, more = f'<p class="jss-verdict">{text(lead(history))}</p>', rest(history)
    if not history.rows:
        return f'<div class="jss">\n{said}\n</div>\n'
    at = now or datetime.now().astimezone()
    head = [("", "right"), ("when", "left"), ("step", "wrap"), ("strategy, options, mesh", "wrap")]
    head += [("step time", "right"), ("peak", "right"), ("fits", "left"), ("same numbers", "left")]
    body = [_cells(each, at) for each in history.rows[: history.shown]]
    left = small(text(more))
    return f'<div class="jss">\n{joined([said, table(head, body), left])}\n</div>\n'


def page(history: "History") -> str:
    """The rows as a whole document that follows the reader's light or dark theme."""
    return document("history of jaxshard_magic", to_html(history))


def _cells(row: "Row", now: datetime) -> list[str]:
    seconds, source = step_parts(row)
    of = f" for {row.on}" if source == "predicted" and row.on else ""
    notebook = f"<br><small>{unbroken(PurePath(row.notebook).name)}</small>" if row.notebook else ""
    typed = f" {unbroken(row.typed)}" if row.typed else ""
    return [
        text(str(row.id)),
        text(when_text(row.at, now)),
        f"{unbroken(row.name)}{notebook}",
        f"<code><b>{text(row.strategy)}</b>{typed}</code><br><small><code>{text(row.mesh)}</code></small>",
        f"{text(seconds)}{f'<br><small>{text(source + of)}</small>' * bool(source)}",
        text(peak_text(row)),
        _answer(row.fits, fits_text(row)),
        _answer(row.passed, same_text(row)),
    ]


def _answer(known: bool | None, word: str) -> str:
    """Yes or no with its sign; a dash where it is not known."""
    if known is None:
        return UNKNOWN
    if known:
        return f'<span class="jss-ok">\u2714\ufe0e</span> {text(word)}'
    return f'<span class="jss-error">{SIGNS["error"]} {text(word)}</span>'
