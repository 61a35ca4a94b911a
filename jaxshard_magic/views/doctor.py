"""Findings of `%shard doctor` as lines for a terminal and as an HTML table."""

import textwrap
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from jaxshard_magic.views.format import printable
from jaxshard_magic.views.html_tags import SIGNS, code, row
from jaxshard_magic.views.html_tags import cell as td
from jaxshard_magic.views.html_tags import escaped as safe

if TYPE_CHECKING:
    from jaxshard_magic.doctor import Doctor, DoctorFinding

MARKS = {"ok": "\u2713", "info": "i", "warning": "!", "error": "\u2717"}
WIDTH = 100


def summary(doctor: "Doctor") -> str:
    """Return `All is well.`, or the numbers of errors and warnings."""
    bad = [f for f in doctor.findings if f.level in ("error", "warning")]
    parts = [_counted(sum(f.level == level for f in bad), level) for level in ("error", "warning")]
    said = " and ".join(part for part in parts if part)
    helped = ", each with its remedy" if all(f.remedy for f in bad) else ""
    return f"{said}{helped}." if said else "All is well."


def to_text(doctor: "Doctor") -> str:
    """Render the findings as lines, with a remedy below its finding."""
    width = max((len(printable(f.name)) for f in doctor.findings), default=0)
    lines = [summary(doctor)]
    for area, group in groupby(doctor.findings, key=lambda f: f.area):
        lines += ["", area]
        for f in group:
            head = f"  {MARKS.get(f.level, ' ')} {printable(f.name):{width}}  "
            # `textwrap.wrap` returns no line for empty text.
            lines += textwrap.wrap(
                printable(f.value), WIDTH, initial_indent=head, subsequent_indent=" " * len(head)
            ) or [head.rstrip()]
            if f.remedy:
                lines.append(" " * len(head) + f"-> {printable(f.remedy)}")
    return "\n".join(lines)


def to_html(doctor: "Doctor") -> str:
    """Render the findings as one HTML table, ordered by area."""
    body = []
    for area, group in groupby(doctor.findings, key=lambda f: f.area):
        body.append(row([td(f"<b>{safe(area)}</b>", more=' colspan="3"')]))
        body += [row(_cells(f)) for f in group]
    table = f"<table><tbody>\n{chr(10).join(body)}</tbody></table>"
    return f'<div class="jss">\n<p><b>{escape(summary(doctor))}</b></p>\n{table}\n</div>\n'


def _cells(f: "DoctorFinding") -> list[str]:
    remedy = f"<br>{code(f.remedy)}" if f.remedy else ""
    return [td(_sign(f.level)), td(code(f.name)), td(safe(f.value) + remedy, "wrap")]


def _sign(level: str) -> str:
    """Return the sign of a level as HTML."""
    # The level is a word as well, for readers without colours and for screen readers.
    sign = SIGNS.get(level, MARKS["ok"])
    return f'<span class="jss-{safe(level)}" title="{safe(level)}" role="img" aria-label="{safe(level)}">{sign}</span>'


def _counted(n: int, what: str) -> str:
    """Return `2 errors`; empty for none."""
    return f"{n} {what}{'s' * (n != 1)}" if n else ""
