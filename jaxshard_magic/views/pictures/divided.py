"""Experts, positions and turns below the picture of what they belong to."""

from collections.abc import Iterable

from jaxshard_magic.report import MeshInfo
from jaxshard_magic.views import svg
from jaxshard_magic.views.divided.figures import FLAT, Figure
from jaxshard_magic.views.divided.html import drawing
from jaxshard_magic.views.pictures.sheet import ROOM, Sheet, fitting
from jaxshard_magic.views.terminal import clip, wrap

DRAWN, TEXT, SIZE = 130, 430, 11  # px: where drawings and words begin, and of the letters
LINE, GAP = 14, 4


def add(sheet: Sheet, figures: Iterable[Figure], mesh: MeshInfo) -> None:
    """Put figures on a sheet, below what is there."""
    most = fitting(ROOM - TEXT, SIZE)
    for figure in figures:
        sheet.down(8)
        sheet.small(figure.lead)
        hue, tall = svg.axis_index(figure.axis, mesh), figure.height > FLAT
        for row in figure.rows:
            sheet.text(0, clip(row.name, fitting(DRAWN - 8, SIZE)), down=11, size=SIZE)
            sheet.stretch(DRAWN, drawing(row, figure.height, hue), TEXT - DRAWN - 12, figure.height, down=2)
            said = wrap(row.text, most)[:2] if tall else [clip(row.text, most)]
            for i, line in enumerate(said):
                sheet.text(TEXT, line, down=11 + LINE * i, size=SIZE)
            sheet.down(figure.height + 2 * GAP)
