"""Drawing surface of pictures: a sheet of fixed width, filled from the top, in the colours of a theme; and
its conversion to PNG."""

from collections.abc import Iterable, Sequence
from html import escape
from math import ceil

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report import MeshInfo
from jaxshard_magic.views import svg
from jaxshard_magic.views.colours import HUES, THEMES
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.html_tags import colour_rules
from jaxshard_magic.views.terminal import display_width
from jaxshard_magic.views.words import Span

CONTENT_WIDTH, MARGIN = 860, 16  # px: width of the content, margin around it
SMALL, BASE, VERDICT = 11.5, 13, 15  # font sizes in px
_SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
# SVG does not break lines, so `Sheet` does, by estimated widths.
_WIDE, _MONO_WIDE = 0.53, 0.61  # mean width of a letter, in font sizes; the viewer chooses the font
_LINE = 1.4
SCALE = 2  # pixels of the file for each px of the drawing


class Sheet:
    """Sheet of an SVG picture.

    `y` is the top of the next line, in px from the top of the sheet. An `x` is in px from the left margin.

    Args:
        mesh: Gives the hues of axes; None if no axis is drawn.
        width: Width of the content in px, without margins.
    """

    def __init__(self, mesh: MeshInfo | None = None, width: float = CONTENT_WIDTH):
        self.mesh, self.width, self.y = mesh, width, float(MARGIN)
        self._marks: list[str] = []

    def skip(self, px: float) -> None:
        """Skip `px` of height."""
        self.y += px

    def sentence(self, spans: Iterable[Span], size: float = VERDICT) -> None:
        """Write a sentence over the width of the sheet, broken between words."""
        most, line, used = int(self.width / (size * _WIDE)), list[Span](), 0
        for word in _words(spans):
            if used + display_width(word.text.rstrip()) > most and line:
                self._line(line, size)
                line, used = [], 0
            line.append(word)
            used += display_width(word.text)
        if line:
            self._line(line, size)
        self.skip(4)

    def small(self, *lines: str) -> None:
        """Write small print. Each argument begins a line; empty ones are skipped."""
        for line in filter(None, lines):
            self.sentence([Span(line, "quiet")], SMALL)

    def title(self, said: str) -> None:
        """Write a heading for the rows below."""
        self.skip(8)
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
        """Write text on one line.

        Args:
            x: Start of the text, or its end if `end`.
            spans: Text.
            down: Px from the top of the next line to the baseline.
            mono: Whether to use a monospaced font.
            end: Whether the text ends at `x`.
            size: Font size in px.
        """
        spans = [Span(spans)] if isinstance(spans, str) else spans
        pieces = "".join(map(self._span, spans))
        family = f' font-family="{_MONO}"' if mono else ""
        anchor = ' text-anchor="end"' if end else ""
        at = f'x="{svg.coordinate(MARGIN + x)}" y="{svg.coordinate(self.y + down)}" font-size="{size}"'
        # By default SVG joins spaces, and drops those at the ends of a text.
        self._marks.append(f'<text {at}{family}{anchor} xml:space="preserve">{pieces}</text>')

    def draw(self, x: float, drawing: str, *, down: float = 0) -> None:
        """Draw marks, or an `<svg>` with a size of its own.

        Args:
            x: Left edge.
            drawing: SVG.
            down: Px from the top of the next line to the upper edge.
        """
        place = f"{svg.coordinate(MARGIN + x)} {svg.coordinate(self.y + down)}"
        self._marks.append(f'<g transform="translate({place})">{drawing}</g>')

    def stretch(self, x: float, drawing: str, width: float, height: float, *, down: float = 0) -> None:
        """Draw an `<svg>` that fills the given size.

        Args:
            x: Left edge.
            drawing: SVG.
            width: Width in px.
            height: Height in px.
            down: Px from the top of the next line to the upper edge.
        """
        size = f'width="{svg.coordinate(width)}" height="{svg.coordinate(height)}"'
        self.draw(x, f"<svg {size}>{drawing}</svg>", down=down)

    def svg(self, label: str, theme: str) -> str:
        """Return the sheet as an SVG document.

        Args:
            label: Text for screen readers.
            theme: Name of a colour theme.
        """
        colours = THEMES[theme]
        w, h = svg.coordinate(self.width + 2 * MARGIN), svg.coordinate(ceil(self.y + MARGIN))
        # Drawings have colours that are legible on any background; these rules replace them with the theme's.
        rules = colour_rules(colours.__getitem__) + f".jss-quiet{{fill:{colours['ink-2']}}}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img"'
            f' aria-label="{escape(printable(label))}" color="{colours["ink"]}" fill="currentColor"'
            f' font-family="{_SANS}"><style>{rules}</style>'
            f'<rect width="{w}" height="{h}" fill="{colours["bg"]}"/>{"".join(self._marks)}</svg>\n'
        )

    def _line(self, line: Sequence[Span], size: float) -> None:
        self.text(0, line, down=size, size=size)
        self.skip(_LINE * size)

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


def columns_in(px: float, size: float = 12, *, mono: bool = False) -> int:
    """Return the number of columns of text that fit into a width.

    Args:
        px: Width.
        size: Font size in px.
        mono: Whether the font is monospaced.
    """
    return int(px / (size * (_MONO_WIDE if mono else _WIDE)))


def _words(spans: Iterable[Span]) -> Iterable[Span]:
    """Yield the words of `spans`, each with the space after it."""
    for span in spans:
        text = span.text
        while text:
            word, space, rest = text.partition(" ")
            yield Span(word + space, span.kind)
            text = rest


def png(text: str) -> bytes:
    """Return an SVG document as a PNG file, with 2 pixels for each px.

    Raises:
        ShardError: The package resvg-py is not installed.
    """
    try:
        import resvg_py
    except ImportError:
        line = "pip install resvg-py"
        raise ShardError(
            f"a .png takes the package resvg-py, which is not installed: {line}; a .svg needs nothing", fix=line
        ) from None
    return bytes(resvg_py.svg_to_bytes(svg_string=text, zoom=SCALE))
