"""What an examination found, as frozen plain data."""

from dataclasses import dataclass
from typing import Any

LONGEST = 200


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `level` is ok, info, warning or error; `remedy` a line to paste or to follow."""

    area: str
    name: str
    value: str
    level: str = "ok"
    remedy: str | None = None


@dataclass(frozen=True, repr=False)
class Doctor:
    """All that was found, area by area. Displays as a table in a notebook, as lines in a terminal."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Is there no error among the findings?"""
        return all(finding.level != "error" for finding in self.findings)

    def to_text(self) -> str:
        """The findings as lines for a terminal."""
        from jaxshard_magic.views import doctor

        return doctor.text(self)

    def to_html(self) -> str:
        """The findings as an HTML table without script."""
        from jaxshard_magic.views import doctor

        return doctor.html(self)

    def __repr__(self) -> str:
        bad = sum(finding.level in ("warning", "error") for finding in self.findings)
        return f"<Doctor: {len(self.findings)} findings, {bad} to look at>"

    def _repr_html_(self) -> str:
        return self.to_html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from jaxshard_magic.views.terminal import writable

        printer.text(writable(repr(self) if cycle else self.to_text()))


def one_line(said: object) -> str:
    """The first line of an error or a program's message, not longer than fits a table.

    >>> one_line(RuntimeError("no backend\\n  at client.cc:7"))
    'no backend'
    """
    lines = str(said).strip().splitlines() or [type(said).__name__]
    return lines[0][:LONGEST]
