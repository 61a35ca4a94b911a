"""An examination as lines for a terminal and as an HTML table."""

import textwrap
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from jaxshard_magic.views.format import printable
from jaxshard_magic.views.html import SIGNS, code, row
from jaxshard_magic.views.html import cell as td
from jaxshard_magic.views.html import text as safe

if TYPE_CHECKING:
    from jaxshard_magic.doctor import Doctor, Finding

MARKS = {"ok": "\u2713", "info": "i", "warning": "!", "error": "\u2717"}
WIDTH = 100


def lead(doctor: "Doctor") -> str:
    """`All is well.`, or how much is not."""
    bad = [f for f in doctor.findings if f.level in ("error", "warning")]
    parts = [_counted(sum(f.level == level for f in bad), level) for level in ("error", "warning")]
    said = " and ".join(part for part in parts if part)
    helped = ", each with its remedy" if all(f.remedy for f in bad) else ""
    return f"{said}{helped}." if said else "All is well."


def text(doctor: "Doctor") -> str:
    """The findings in lines, a remedy below what it is for."""
    width = max((len(printable(f.name)) for f in doctor.findings), default=0)
    lines = [lead(doctor)]
    for area, group in groupby(doctor.findings, key=lambda f: f.area):
        lines += ["", area]
        for f in group:
            head = f"  {MARKS.get(f.level, ' ')} {printable(f.name):{width}}  "
            lines += textwrap.wrap(
                printable(f.value), WIDTH, initial_indent=head, subsequent_indent=" " * len(head)
            ) or [head.rstrip()]
            if f.remedy:
                lines.append(" " * len(head) + f"-> {printable(f.remedy)}")
    return "\n".join(lines)


def html(doctor: "Doctor") -> str:
    """The findings as one table, area by area."""
    body = []
    for area, group in groupby(doctor.findings, key=lambda f: f.area):
        body.append(row([td(f"<b>{safe(area)}</b>", more=' colspan="3"')]))
        body += [row(_cells(f)) for f in group]
    table = f"<table><tbody>\n{chr(10).join(body)}</tbody></table>"
    return f'<div class="jss">\n<p><b>{escape(lead(doctor))}</b></p>\n{table}\n</div>\n'


def _cells(f: "Finding") -> list[str]:
    remedy = f"<br>{code(f.remedy)}" if f.remedy else ""
    return [td(_sign(f.level)), td(code(f.name)), td(safe(f.value) + remedy, "wrap")]


def _sign(level: str) -> str:
    """A sign with its word, for those who see no colour and those who see no sign."""
    sign = SIGNS.get(level, MARKS["ok"])
    return f'<span class="jss-{safe(level)}" title="{safe(level)}" role="img" aria-label="{safe(level)}">{sign}</span>'


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}" if n else ""
