"""Results of an examination, as frozen plain data."""

from dataclasses import dataclass
from typing import Any

from jaxshard_magic.display import renderer, writable

LONGEST = 200


@dataclass(frozen=True)
class DoctorFinding:
    """Result of one check.

    Attributes:
        area: Group of the check, such as `devices`.
        name: Name of the check within its area.
        value: Result, in words.
        level: `ok`, `info`, `warning` or `error`.
        remedy: Line to paste or to follow; None without a remedy.
    """

    area: str
    name: str
    value: str
    level: str = "ok"
    remedy: str | None = None


@dataclass(frozen=True, repr=False)
class Doctor:
    """All findings, area by area. Displays as a table in a notebook and as lines in a terminal."""

    findings: tuple[DoctorFinding, ...]

    @property
    def ok(self) -> bool:
        """Return whether no finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def to_text(self) -> str:
        """Return the findings as lines for a terminal."""
        return renderer(self, "text")(self)

    def to_html(self) -> str:
        """Return the findings as an HTML table without script."""
        return renderer(self, "html")(self)

    def __repr__(self) -> str:
        bad = sum(finding.level in ("warning", "error") for finding in self.findings)
        return f"<Doctor: {len(self.findings)} findings, {bad} to look at>"

    def _repr_html_(self) -> str:
        return self.to_html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(writable(repr(self) if cycle else self.to_text()))


def one_line(said: object) -> str:
    r"""Return the first line of an error or of a program's message, at most `LONGEST` characters.

    >>> one_line(RuntimeError("no backend\n  at client.cc:7"))
    'no backend'
    """
    lines = str(said).strip().splitlines() or [type(said).__name__]
    return lines[0][:LONGEST]
