"""Experts, positions and turns as HTML without script."""

from jaxshard_magic.report import MeshInfo, Report
from jaxshard_magic.views import svg
from jaxshard_magic.views.divided.figures import Figure, Row, held_lines, layout_figures, turn_figures
from jaxshard_magic.views.tags import cell, row, section, small, text, unbroken


def divided_section(report: Report) -> str:
    """The section of a report on its experts and positions, empty where none are divided."""
    figures = layout_figures(report)
    titles = ["Experts"] * bool(report.experts) + ["positions" if report.experts else "Positions"] * bool(
        report.positions
    )
    return section(" and ".join(titles), *(_figure(f, report.mesh) for f in figures)) if figures else ""


def turns(report: Report) -> str:
    """The turns of each ring, to stand with what is sent."""
    return "\n".join(_figure(figure, report.mesh) for figure in turn_figures(report))


def held(report: Report) -> str:
    """What a ring has in flight, to stand with memory."""
    return small("<br>".join(map(text, held_lines(report))))


def _figure(figure: Figure, mesh: MeshInfo) -> str:
    hue = svg.axis_index(figure.axis, mesh)
    body = "\n".join(_row(one, figure.height, hue) for one in figure.rows)
    drawn = f'<table width="100%"><tbody>\n{body}</tbody></table>' if body else ""
    return f"{small(text(figure.lead))}\n{drawn}"


def _row(one: Row, height: int, hue: int) -> str:
    drawn = drawing(one, height, hue)
    return row(
        [cell(text(one.name)), cell(drawn, more=' width="40%"'), cell(unbroken(one.text), "wrap", more=_WIDE)]
    )


_WIDE = ' width="42%"'


def drawing(one: Row, height: int, hue: int) -> str:
    """A row's drawing as an `<svg>` that takes the width of its place."""
    marks = [svg.rect(0, 0, 1000, height, 'fill="currentColor" fill-opacity=".07"')]
    for a in one.areas:
        place = (1000 * a.x, height * a.y, 1000 * a.width, height * a.height)
        marks.append(svg.rect(*place, f'{svg.fill(hue)} fill-opacity="{a.opacity}"'))
    return svg.stretched(height, "", marks)
