"""What a picture is drawn on: a sheet of one width that is filled from its top, in the colours of a theme."""

from collections.abc import Iterable, Sequence
from html import escape
from math import ceil

from jaxshard_magic.report import MeshInfo
from jaxshard_magic.views import svg
from jaxshard_magic.views.colours import THEMES
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.hues import HUES
from jaxshard_magic.views.page import colour_rules
from jaxshard_magic.views.terminal import cells
from jaxshard_magic.views.words import Span

ROOM, MARGIN = 860, 16  # px of what is drawn, and around it
SMALL, BASE, VERDICT = 11.5, 13, 15  # px of letters
_SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
_WIDE, _MONO_WIDE = 0.53, 0.61  # of a letter, as a share of its height; what draws it chooses the fonts
_LINE = 1.4


class Sheet:
    """`y` is where the next line begins; marks are placed from the sheet's margin on, in px.

    Args:
        mesh: whose axes have their hues; None where none is named.
        room: px of what is drawn, without the margins.
    """

    def __init__(self, mesh: MeshInfo | None = None, room: float = ROOM):
        self.mesh, self.room, self.y = mesh, room, float(MARGIN)
        self._marks: list[str] = []

    def down(self, px: float) -> None:
        """Leave room."""
        self.y += px

    def sentence(self, spans: Iterable[Span], size: float = VERDICT) -> None:
        """A sentence over the sheet's width, broken between words."""
        most, line, used = int(self.room / (size * _WIDE)), list[Span](), 0
        for word in _words(spans):
            if used + cells(word.text.rstrip()) > most and line:
                self._line(line, size)
                line, used = [], 0
            line.append(word)
            used += cells(word.text)
        if line:
            self._line(line, size)
        self.down(4)

    def small(self, *lines: str) -> None:
        """Small print; each in lines of its own, empty ones left out."""
        for line in filter(None, lines):
            self.sentence([Span(line, "quiet")], SMALL)

    def title(self, said: str) -> None:
        """What the rows below it are."""
        self.down(8)
        self.sentence([Span(said, "strong")], BASE)

    def text(
        self,
        x: float,
        spans: str | Sequence[Span],
        *,
        down: float = 0,
        mono: bool = False,
        end: bool = False,
        size: float = 12,
    ) -> None:
        """A text that begins at `x`, or ends there, on the line that lies `down` px below."""
        spans = [Span(spans)] if isinstance(spans, str) else spans
        pieces = "".join(map(self._span, spans))
        family = f' font-family="{_MONO}"' if mono else ""
        anchor = ' text-anchor="end"' if end else ""
        at = f'x="{svg.number(MARGIN + x)}" y="{svg.number(self.y + down)}" font-size="{size}"'
        self._marks.append(f'<text {at}{family}{anchor} xml:space="preserve">{pieces}</text>')

    def draw(self, x: float, drawing: str, *, down: float = 0) -> None:
        """An `<svg>` of a size of its own, or marks, with its upper left corner at `x` and `down` px below."""
        place = f"{svg.number(MARGIN + x)} {svg.number(self.y + down)}"
        self._marks.append(f'<g transform="translate({place})">{drawing}</g>')

    def stretch(self, x: float, drawing: str, width: float, height: float, *, down: float = 0) -> None:
        """An `<svg>` that takes the width it is given."""
        size = f'width="{svg.number(width)}" height="{svg.number(height)}"'
        self.draw(x, f"<svg {size}>{drawing}</svg>", down=down)

    def svg(self, label: str, theme: str) -> str:
        """The sheet as an SVG document; `label` is what a screen reader says."""
        colours = THEMES[theme]
        w, h = svg.number(self.room + 2 * MARGIN), svg.number(ceil(self.y + MARGIN))
        rules = colour_rules(colours.__getitem__) + f".jss-quiet{{fill:{colours['ink-2']}}}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img"'
            f' aria-label="{escape(printable(label))}" color="{colours["ink"]}" fill="currentColor"'
            f' font-family="{_SANS}"><style>{rules}</style>'
            f'<rect width="{w}" height="{h}" fill="{colours["bg"]}"/>{"".join(self._marks)}</svg>\n'
        )

    def _line(self, line: Sequence[Span], size: float) -> None:
        self.text(0, line, down=size, size=size)
        self.down(_LINE * size)

    def _span(self, span: Span) -> str:
        said = escape(printable(span.text))
        if span.kind == "axis" and self.mesh is not None:
            hue = svg.axis_index(span.text.strip(), self.mesh) % HUES
            return f'<tspan class="jss-f{hue}" font-weight="600">{said}</tspan>'
        if span.kind == "code":
            return f'<tspan font-family="{_MONO}">{said}</tspan>'
        if span.kind in ("strong", "quiet"):
            how = 'font-weight="600"' if span.kind == "strong" else 'class="jss-quiet"'
            return f"<tspan {how}>{said}</tspan>"
        return said


def fitting(px: float, size: float = 12, *, mono: bool = False) -> int:
    """How many columns of letters have room in so many px."""
    return int(px / (size * (_MONO_WIDE if mono else _WIDE)))


def _words(spans: Iterable[Span]) -> Iterable[Span]:
    """The words of `spans`, each with the spaces behind it."""
    for span in spans:
        text = span.text
        while text:
            word, space, rest = text.partition(" ")
            yield Span(word + space, span.kind)
            text = rest
