"""Experts, positions and ring attention below the picture they belong to."""

from collections.abc import Iterable

from jaxshard_magic.report import MeshInfo
from jaxshard_magic.views import svg
from jaxshard_magic.views.document.html import row_svg
from jaxshard_magic.views.document.parts import FLAT, RowFigure
from jaxshard_magic.views.pictures.sheet import CONTENT_WIDTH, Sheet, columns_in
from jaxshard_magic.views.terminal import clip, wrap

DRAWN, TEXT, SIZE = 130, 430, 11  # px: left edges of drawings and texts, font size
LINE, GAP = 14, 4


def add_figures(sheet: Sheet, figures: Iterable[RowFigure], mesh: MeshInfo) -> None:
    """Draw figures on a sheet, below its present content.

    Args:
        sheet: Sheet to draw on.
        figures: Figures, from top to bottom.
        mesh: Gives the hues of axes.
    """
    most = columns_in(CONTENT_WIDTH - TEXT, SIZE)
    for figure in figures:
        sheet.skip(8)
        sheet.small(figure.lead)
        hue, tall = svg.axis_index(figure.axis, mesh), figure.height > FLAT
        for row in figure.rows:
            sheet.text(0, clip(row.name, columns_in(DRAWN - 8, SIZE)), down=11, size=SIZE)
            sheet.stretch(DRAWN, row_svg(row, figure.height, hue), TEXT - DRAWN - 12, figure.height, down=2)
            said = wrap(row.text, most)[:2] if tall else [clip(row.text, most)]
            for i, line in enumerate(said):
                sheet.text(TEXT, line, down=11 + LINE * i, size=SIZE)
            sheet.skip(figure.height + 2 * GAP)
