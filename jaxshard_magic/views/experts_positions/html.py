"""Experts, positions and ring attention as HTML without script."""

from jaxshard_magic.report import MeshInfo, Report
from jaxshard_magic.views import svg
from jaxshard_magic.views.document.parts import FigureRow, RowFigure
from jaxshard_magic.views.experts_positions.figures import (
    layout_figures,
    ring_figures,
    ring_memory_lines,
)
from jaxshard_magic.views.html_tags import cell, escaped, row, section, small, unbroken


def experts_positions_section(report: Report) -> str:
    """Return the section of a report on experts and positions; empty if neither is sharded."""
    figures = layout_figures(report)
    titles = ["Experts"] * bool(report.experts) + ["positions" if report.experts else "Positions"] * bool(
        report.positions
    )
    return section(" and ".join(titles), *(_figure(f, report.mesh) for f in figures)) if figures else ""


def rings_html(report: Report) -> str:
    """Return the turns of each ring, for the section on communication."""
    return "\n".join(_figure(figure, report.mesh) for figure in ring_figures(report))


def ring_memory_html(report: Report) -> str:
    """Return the memory of rings in flight, for the section on memory."""
    return small("<br>".join(map(escaped, ring_memory_lines(report))))


def _figure(figure: RowFigure, mesh: MeshInfo) -> str:
    hue = svg.axis_index(figure.axis, mesh)
    body = "\n".join(_row(one, figure.height, hue) for one in figure.rows)
    drawn = f'<table width="100%"><tbody>\n{body}</tbody></table>' if body else ""
    return f"{small(escaped(figure.lead))}\n{drawn}"


def _row(one: FigureRow, height: int, hue: int) -> str:
    drawn = drawing(one, height, hue)
    return row(
        [cell(escaped(one.name)), cell(drawn, more=' width="40%"'), cell(unbroken(one.text), "wrap", more=_WIDE)]
    )


_WIDE = ' width="42%"'


def drawing(one: FigureRow, height: int, hue: int) -> str:
    """Return the drawing of a row as an `<svg>` that takes the width of its container.

    Args:
        one: Row to draw.
        height: Height in px.
        hue: Number of the mesh axis.
    """
    marks = [svg.rect(0, 0, 1000, height, 'fill="currentColor" fill-opacity=".07"')]
    for a in one.areas:
        place = (1000 * a.x, height * a.y, 1000 * a.width, height * a.height)
        marks.append(svg.rect(*place, f'{svg.fill(hue)} fill-opacity="{a.opacity}"'))
    return svg.full_width_drawing(height, "", marks)
