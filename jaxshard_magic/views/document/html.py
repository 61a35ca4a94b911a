"""Documents as HTML without script.

Footguns:
- JupyterLab drops SVG from untrusted output. Every key number is therefore text in a table; drawings only repeat.
- GitHub drops styles as well. Alignment is given twice, as attribute and as style.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from jaxshard_magic.report import MeshInfo
from jaxshard_magic.views import device_memory, figure_marks, svg, words
from jaxshard_magic.views.document import parts as doc
from jaxshard_magic.views.format import count_text, more_text, runs
from jaxshard_magic.views.html_tags import (
    SIGNS,
    axis,
    cell,
    code,
    escaped,
    join_nonempty,
    mesh_axes,
    row,
    section,
    small,
    table,
    unbroken,
)
from jaxshard_magic.views.source_lines import code_text
from jaxshard_magic.views.timeline import data as timeline_data
from jaxshard_magic.views.timeline import svg as timeline_svg
from jaxshard_magic.views.training import chart, data

NO_MESH = MeshInfo.of_axes({})  # of a document that names no axes
LONG_NAME = 36  # letters of a name that is not broken, at most
LONG_SOURCE = 80
CHARTS = "display:flex;flex-wrap:wrap;gap:12px 20px;margin:8px 0"
_TOP, _WIDE, _DRAWN = ' valign="top"', ' width="42%"', ' width="40%"'
_SPACE = " &nbsp; "


def to_html(parts: Iterable[doc.Part], mesh: MeshInfo, extra_class: str = "") -> str:
    """Return a document as one `<div>`, for a notebook or a page.

    Args:
        parts: Parts of the document.
        mesh: Mesh of the axes that the document names.
        extra_class: Further class of the `<div>`.
    """
    classes = f"jss {extra_class}".rstrip()
    return f'<div class="{escaped(classes)}">\n{parts_html(parts, mesh)}\n</div>\n'


def parts_html(parts: Iterable[doc.Part], mesh: MeshInfo) -> str:
    """Return parts of a document as HTML, without a `<div>` around.

    Args:
        parts: Parts.
        mesh: Mesh of the axes that the parts name.
    """
    return join_nonempty(map(_Lowering(mesh).part, parts))


@dataclass(frozen=True)
class _Lowering:
    """Lowering of parts to HTML.

    Attributes:
        mesh: Mesh that gives the hues of axes.
    """

    mesh: MeshInfo

    def part(self, part: doc.Part) -> str:
        """Return a part as HTML; empty for a part without content."""
        match part:
            case doc.Section():
                return self._section(part)
            case doc.Header():
                return self._header(part)
            case doc.Paragraph(said, sign, leading):
                mark = f'<span class="jss-{sign}">{SIGNS[sign]}</span> ' if sign else ""
                start = '<p class="jss-verdict">' if leading else "<p>"
                return f"{start}{mark}{self._words(said)}</p>" if said else ""
            case doc.Notes(lines, below, shows):
                told = [self._words(line) for line in lines] if doc.HTML in shows else []
                return small("<br>".join(told)) if below else join_nonempty(map(small, told))
            case doc.KeyFigures():
                return self._key_figures(part)
            case doc.Hints():
                return _hints(part)
            case doc.Table():
                return self._table(part)
            case doc.Breakdown():
                return self._breakdown(part)
            case doc.MemoryBars():
                return _memory(part)
            case doc.RowFigure():
                return self._figure(part) if doc.HTML in part.shows else ""
            case doc.ActionLanes(p):
                kinds = [f"{timeline_svg.kind_mark(k)} {k} {words.KINDS[k]}" for k in timeline_data.kinds_of(p)]
                legend = [*kinds, f"{timeline_svg.idle_mark()} bubble", escaped(timeline_svg.lanes_text(p))]
                return join_nonempty([small(_SPACE.join(legend)), timeline_svg.timeline_svg(p)])
            case doc.RecordedLanes(m):
                return join_nonempty(
                    [timeline_svg.recorded_step_svg(m), small(_SPACE.join(timeline_svg.recorded_step_legend(m)))]
                )
            case doc.Charts(metrics):
                return charts_html(
                    (f"<b>{escaped(data.label_of(curve))}</b> {escaped(data.newest_text(curve))}", chart.chart([curve]))
                    for curve in data.charted_curves(metrics)
                )
            case doc.Leaves():
                return _leaves(part)
            case doc.Commands(lead, lines):
                return f"<p>{escaped(lead)} {'<br>'.join(map(code, lines))}</p>"

    def _section(self, part: doc.Section) -> str:
        if doc.HTML not in part.shows:
            return ""
        title = escaped(doc.plain(part.heading(doc.HTML)).rstrip("."))
        content = [small(escaped(" ".join(part.about))), *map(self.part, part.parts)]
        return section(title, *content) if title else join_nonempty(content)

    def _header(self, part: doc.Header) -> str:
        typed = f" {code(part.typed)}" if part.typed else ""
        label = f"{_SPACE}<small>{escaped(part.name)}</small>" if part.name else ""
        return (
            f"<p><b>{escaped(part.subject)}</b>{typed}{_SPACE}{mesh_axes(self.mesh)} &nbsp;"
            f" {escaped(part.devices[1])}{label}</p>"
        )

    def _words(self, said: doc.Words) -> str:
        return "".join(self._spans(said))

    def _spans(self, said: doc.Words) -> Iterator[str]:
        told = doc.spans(said)
        for i, span in enumerate(told):
            match span.kind:
                case "strong":
                    yield f"<b>{escaped(span.text)}</b>"
                case "axis":
                    yield axis(span.text, self.mesh)
                case "code":
                    yield code(span.text) if len(span.text) <= LONG_NAME else f"<code>{_breakable(span.text)}</code>"
                case "quiet":
                    yield f"<small>{escaped(span.text)}</small>"
                case "times":
                    yield f" \u00d7{escaped(span.text)}"
                case _:
                    # Hues tell axes apart without a sign between them.
                    between = span.text == "+" and 0 < i < len(told) - 1 and told[i + 1].kind == "axis"
                    yield " " if between else escaped(span.text)

    def _hue(self, axes: Sequence[str]) -> int | None:
        return svg.axis_index(axes[0], self.mesh) if axes else None

    def _key_figures(self, part: doc.KeyFigures) -> str:
        cells = (
            f'<span class="jss-value">{escaped(f.value)}</span><br><small>{escaped(f.note)}</small>'
            + (f"<br>{drawing}" if drawing else "")
            for f, drawing in zip(part.figures, map(self._mark, part.marks), strict=True)
        )
        top = row(cell(escaped(f.label), "wrap", "th", _TOP) for f in part.figures)
        return f"<table><thead>{top}</thead><tbody>{row(cell(c, 'wrap', more=_TOP) for c in cells)}</tbody></table>"

    def _mark(self, mark: figure_marks.Mark | None) -> str:
        match mark:
            case figure_marks.Range(least, median, most):
                return svg.range_mark(least, median, most)
            case figure_marks.Share(share):
                used = min(1.0, share)
                return svg.share_bar([(None, used, 1.0), (None, 1 - used, 0.25)])
            case figure_marks.Axes(parts):
                return svg.share_bar([(self._hue(axes or ()), share, 1.0) for axes, share in parts])
        return ""

    def _breakdown(self, part: doc.Breakdown) -> str:
        labels, drawn = [], []
        for one in part.parts:
            opacity = (svg.OWN_OPACITY if one.own else svg.KIND_OPACITY).get(one.kind, 0.4)
            hue, over = self._hue(one.axes), "".join(f" {axis(a, self.mesh)}" for a in one.axes)
            key = svg.share_bar([(hue, 1.0, opacity)], 10, 10)
            labels.append(f"{key} {escaped(one.kind)}{over} {escaped(one.share_text)} {escaped(one.time)}")
            drawn.append((hue, one.share, opacity))
        sentence = f"{escaped(part.subject)} {escaped(part.total)}: {', '.join(labels)}"
        more = more_text(len(part.parts) + part.omitted, len(part.parts))
        return f"<div>{svg.whole_bar(drawn)}</div>\n{small(sentence + more)}"

    def _figure(self, figure: doc.RowFigure) -> str:
        hue = svg.axis_index(figure.axis, self.mesh)
        body = "\n".join(
            row(
                [
                    cell(escaped(one.name)),
                    cell(row_svg(one, figure.height, hue), more=_DRAWN),
                    cell(unbroken(one.text), "wrap", more=_WIDE),
                ]
            )
            for one in figure.rows
        )
        drawn = f'<table width="100%"><tbody>\n{body}</tbody></table>' if body else ""
        return f"{small(escaped(figure.lead))}\n{drawn}"

    def _table(self, part: doc.Table) -> str:
        if not part.rows:
            return ""
        shown = [i for i, c in enumerate(part.columns) if doc.HTML in c.shows]
        # What stands below a row in a terminal belongs to the name of the row.
        named = next((i for i in shown if part.columns[i].align == "wrap"), shown[0])
        head = [(escaped(part.columns[i].heading(doc.HTML)), part.columns[i].align) for i in shown]
        rows = []
        for one in part.rows:
            cells = {i: self._cell(one.cells[i]) for i in shown}
            cells[named] += self._below(one)
            rows.append([*cells.values()])
        return table(head, rows)

    def _below(self, one: doc.TableRow) -> str:
        if not one.below:
            return ""
        sign = f'<span class="jss-warning">{SIGNS["warning"]}</span> ' if one.warn else ""
        return f"<br><small>{sign}{self._words(one.below)}</small>"

    def _cell(self, content: doc.AnyCell) -> str:
        match content:
            case doc.WordCell(said, more, _, is_code):
                small_print = f"<small>{self._words(more)}</small>" if more else ""
                if is_code:
                    return self._code_cell(said) + (f"<br>{small_print}" if more else "")
                return f"{self._words(said)} {small_print}" if more else self._words(said)
            case doc.CodeCell(text, callers, instead, more):
                source = code_text(text, callers, LONG_SOURCE)
                told = f"<small>{escaped(instead)}</small>" if instead else code(source) if source else ""
                return f"{told}<br><small>{escaped(more)}</small>" if more else told
            case doc.ListCell(items):
                told = (self._words(said) + (f" ({escaped(job)})" if job else "") for said, job in items)
                return f"<small>{', '.join(told)}</small>"
            case doc.BarCell(parts, _, width):
                drawn = [(self._hue(p.axes), p.share, svg.KIND_OPACITY.get(p.kind, 0.4)) for p in parts]
                return svg.share_bar(drawn, width, 10)
            case doc.TimeCell(text, parts):
                return f"{escaped(text)}<br>{timeline_svg.kinds_bar(parts)}"
            case doc.LeafCell(leaf):
                return svg.leaf_blocks(leaf, self.mesh)
            case _:
                return ""

    def _code_cell(self, said: doc.Words) -> str:
        text: Callable[[str], str] = _breakable if len(doc.plain(said)) > LONG_NAME else escaped
        told = (axis(s.text, self.mesh) if s.kind == "axis" else text(s.text) for s in doc.spans(said))
        return f"<code>{''.join(told)}</code>"


def _breakable(text: str) -> str:
    """Return plain text as HTML that may break after a dot or a comma."""
    return escaped(text).replace(".", ".<wbr>").replace(",", ",<wbr>")


def _hints(part: doc.Hints) -> str:
    """Return the hints: the first items open, the others in a folded section."""
    shown, rest = (join_nonempty(map(_hint, some)) for some in (part.hints[: part.shown], part.hints[part.shown :]))
    left = count_text(len(part.hints) - part.shown)
    more = f"<details><summary>{left} more</summary>\n{rest}\n</details>"
    return join_nonempty([shown, more if rest else ""])


def _hint(hint: doc.Hint) -> str:
    head, rest = words.first_clause(hint.message)
    message = f"<b>{escaped(head)}</b> {escaped(rest)}" if head else escaped(rest)
    lines = "\n".join(map(code, hint.fix))
    fix = f'<br><span style="white-space:pre-wrap">{lines}</span>' if lines else ""
    sign = f'<span class="jss-{escaped(hint.level)}">{SIGNS.get(hint.level, SIGNS["info"])}</span>'
    return f"<p>{sign} {message}{fix}</p>"


def _memory(part: doc.MemoryBars) -> str:
    heads = [*(f"{svg.role_mark(r)} {r}" for r in part.rows[0].roles), "peak"]
    heads += [f"{svg.measured_mark()} measured peak"] * part.measured
    top = row([cell("device", "left", "th"), *(cell(h, "right", "th") for h in heads)])
    body = join_nonempty(line for one in part.rows for line in _memory_row(part, one))
    scale = ""
    if part.off_scale is not None:
        scale = f"<div>{svg.limit_bar(*part.off_scale)}</div>\n{small(escaped(part.scale_note or ''))}"
    bars = f"<table><thead>{top}</thead><tbody>\n{body}</tbody></table>"
    return join_nonempty([scale, bars, small(part.omitted)])


def _memory_row(part: doc.MemoryBars, one: doc.MemoryRow) -> Iterator[str]:
    """Yield two table rows for a group of devices: figures, and a bar over the width of the table."""
    ids, device = _ids(one.group.devices), one.group.fullest
    figures = [*one.roles.values(), f"<b>{one.peak_of_limit}</b>"]
    label = f"{ids}{one.stage and f' ({one.stage})'}: {one.peak_of_limit}"
    if part.measured:
        figures.append(one.measured_text + (f" <small>{one.error}</small>" if one.error else ""))
    if one.measured is not None:
        label = ", ".join(filter(None, (label, f"measured {one.measured_text}", one.error)))
    segments = device_memory.segments(device)
    bar = svg.memory_bar(segments, device.peak, one.measured, part.limit, part.full, label)
    name = escaped(ids) + (f" <small>{escaped(one.stage)}</small>" if one.stage else "")
    cells = [cell(name, "wrap"), *(cell(f, "right") for f in figures)]
    yield f'<tr class="jss-figures">{"".join(cells)}</tr>'
    span = f' colspan="{len(cells)}"'
    # JupyterLab shades every second table row, and would part a bar from its figures.
    yield f'<tr style="background:transparent" class="jss-bar">{cell(bar, more=span)}</tr>'


def _ids(devices: Sequence[int]) -> str:
    pieces = [str(a) if a == b else f"{a} to {b}" for a, b in runs(devices)]
    return ", ".join(pieces) if len(pieces) <= 3 else f"{count_text(len(devices))} devices"


def _leaves(part: doc.Leaves) -> str:
    listed = ", ".join(code(p) + (f" {escaped(much)}" if much else "") for p, much in part.leaves[: part.most])
    more = more_text(len(part.leaves), part.most) if listed else ""
    return f"<p>{escaped(part.sentence)}{f' {listed}{more}' if listed else ''}</p>"


def row_svg(one: doc.FigureRow, height: int, hue: int) -> str:
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


def charts_html(charts: Iterable[tuple[str, str]]) -> str:
    """Return charts side by side; empty without any.

    Args:
        charts: (title as HTML, drawing) pairs; those without a drawing are left out.
    """
    drawn = [f"<div><small>{title}</small><br>{drawing}</div>" for title, drawing in charts if drawing]
    return f'<div style="{CHARTS}">{join_nonempty(drawn)}</div>' if drawn else ""
