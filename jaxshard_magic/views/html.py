"""A report as HTML without script: a fragment for a notebook, and a whole document.

Footguns:
- JupyterLab drops SVG from untrusted output. Every key number is therefore text in a table; drawings only repeat.
- GitHub drops styles as well. Alignment is given twice, as attribute and as style.
"""

from collections.abc import Sequence
from html import escape

from jaxshard_magic.report import Advice, Leaf, MeshInfo, Report
from jaxshard_magic.report.parts import mesh_text
from jaxshard_magic.views import communication as comm
from jaxshard_magic.views import figure_marks, leaf_rows, option_table, svg, words
from jaxshard_magic.views.experts_positions.html import experts_positions_section, rings_html
from jaxshard_magic.views.format import (
    UNKNOWN,
    byte_text,
    count_text,
    more_text,
    printable,
    seconds_text,
    share_text,
    submesh_parts,
    type_parts,
    type_text,
)
from jaxshard_magic.views.html_document import document
from jaxshard_magic.views.html_tags import (
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
)
from jaxshard_magic.views.measured import data as spent
from jaxshard_magic.views.measured.html import measured_section
from jaxshard_magic.views.memory_html import memory_section
from jaxshard_magic.views.source_lines import code_text
from jaxshard_magic.views.timeline.html import pipeline_section
from jaxshard_magic.views.training.html import metrics_section

# U+FE0E selects the text form of a sign: some fonts would draw an emoji.
SIGNS = {"error": "\u2716", "warning": "\u26a0\ufe0e", "info": "\u2139\ufe0e"}
LONG_NAME = 36
LONG_SOURCE = 80
COLLECTIVE_ROWS = 12
LINKS = "on the links"  # heading of the time on the links; "predicted" is the time that the device waits
LINE_ROWS = 40


def fragment(report: Report, extra_class: str = "") -> str:
    """Render a report as one `<div>`, for a notebook or a page.

    Args:
        report: Report to show.
        extra_class: Further class of the `<div>`.
    """
    parts = [
        _title(report),
        _verdict(report),
        *(small(escape(line)) for line in words.notes(report)),
        _time(report),
        _figures(report),
        _options(report),
        _hints(report.advice),
        memory_section(report),
        _communication(report),
        measured_section(report),
        experts_positions_section(report),
        _layout(report),
        pipeline_section(report.pipeline),
        metrics_section(report.metrics),
        _timing(report),
        _check(report),
    ]
    classes = f"jss {extra_class}".rstrip()
    return f'<div class="{escape(classes)}">\n{join_nonempty(parts)}\n</div>\n'


def page(report: Report) -> str:
    """Render a report as a whole HTML document; the theme, light or dark, is the reader's."""
    title = f"{words.title_text(report)} {mesh_text(report.mesh.axes)}"
    return document(printable(title), fragment(report))


def _title(report: Report) -> str:
    mesh = report.mesh
    typed = words.options_text(report)
    options = f" {code(typed)}" if typed else ""
    named = words.named_text(report)
    label = f" &nbsp; <small>{escaped(named)}</small>" if named else ""
    return (
        f"<p><b>{escaped(words.title_text(report))}</b>{options} &nbsp; {mesh_axes(mesh)} &nbsp;"
        f" {escaped(words.reported_devices(report))}{label}</p>"
    )


def _verdict(report: Report) -> str:
    verdict = words.verdict(report)
    tags = {"strong": lambda t: f"<b>{escaped(t)}</b>", "axis": lambda t: axis(t, report.mesh), "code": code}
    sentences = "".join(tags.get(span.kind, escaped)(span.text) for span in verdict.spans)
    sign = "" if verdict.ok else f'<span class="jss-error">{SIGNS["error"]}</span> '
    return f'<p class="jss-verdict">{sign}{sentences}</p>' if sentences else ""


def _figures(report: Report) -> str:
    """Return the key figures as a table, each with its value, note and drawing."""
    figures = words.figures(report)
    if not figures:
        return ""
    drawings = (_mark(mark, report.mesh) for mark in figure_marks.marks(report))
    cells = (
        f'<span class="jss-value">{escaped(f.value)}</span><br><small>{escaped(f.note)}</small>'
        + (f"<br>{drawing}" if drawing else "")
        for f, drawing in zip(figures, drawings, strict=True)
    )
    top = row(cell(escaped(f.label), "wrap", "th", _TOP) for f in figures)
    return f"<table><thead>{top}</thead><tbody>{row(cell(c, 'wrap', more=_TOP) for c in cells)}</tbody></table>"


_TOP = ' valign="top"'


def _mark(mark: figure_marks.Mark | None, mesh: MeshInfo) -> str:
    match mark:
        case figure_marks.Range(least, median, most):
            return svg.range_mark(least, median, most)
        case figure_marks.Share(share):
            used = min(1.0, share)
            return svg.share_bar([(None, used, 1.0), (None, 1 - used, 0.25)])
        case figure_marks.Axes(parts):
            return svg.share_bar([(_hue(axes, mesh), share, 1.0) for axes, share in parts])
    return ""


def _hue(axes: Sequence[str] | None, mesh: MeshInfo) -> int | None:
    return svg.axis_index(axes[0], mesh) if axes else None


def _options(report: Report) -> str:
    options = option_table.rows(report)
    if not options:
        return ""
    head = [("", "left"), *((name, "right") for name in option_table.HEADS)]
    cells = [
        [
            escaped(r.change),
            *(f"{escaped(v)} <small>{escaped(s)}</small>" for v, s in zip(r.values, r.shares, strict=True)),
        ]
        for r in options
    ]
    why = "<br>".join(escaped(f"{r.change}: {r.reason}") for r in options if r.reason)
    return section(option_table.TITLE, table(head, cells), small(why))


def _hints(advice: Sequence[Advice]) -> str:
    """Return the advice: the first items open, the others in a folded section."""
    shown, rest = (join_nonempty(map(_advice, part)) for part in (advice[: words.HINTS], advice[words.HINTS :]))
    more = f"<details><summary>{count_text(len(advice) - words.HINTS)} more</summary>\n{rest}\n</details>"
    return join_nonempty([shown, more if rest else ""])


def _advice(advice: Advice) -> str:
    head, rest = words.first_clause(advice.message)
    message = f"<b>{escaped(head)}</b> {escaped(rest)}" if head else escaped(rest)
    lines = "\n".join(code(line) for line in (advice.fix or "").splitlines())
    fix = f'<br><span style="white-space:pre-wrap">{lines}</span>' if lines else ""
    sign = f'<span class="jss-{escaped(advice.level)}">{SIGNS.get(advice.level, SIGNS["info"])}</span>'
    return f"<p>{sign} {message}{fix}</p>"


def _time(report: Report) -> str:
    """Return the predicted step as a bar, and its parts in words."""
    parts = words.time_parts(report)
    total = sum(seconds for _, _, seconds in parts)
    if not total:
        return ""
    labels, drawn = [], []
    for kind, axes, seconds in parts[:COLLECTIVE_ROWS]:
        own = kind in words.DEVICE_PARTS
        hue, opacity = _hue(axes, report.mesh), (svg.OWN_OPACITY if own else svg.KIND_OPACITY).get(kind, 0.4)
        over = "".join(f" {axis(a, report.mesh)}" for a in axes or ())
        name = f"{escaped(kind)}{over}"
        key = svg.share_bar([(hue, 1.0, opacity)], 10, 10)
        labels.append(f"{key} {name} {share_text(seconds / total)} {words.time_part_text(report, kind, axes, seconds)}")
        drawn.append((hue, seconds / total, opacity))
    between = words.predicted_range(report)
    step = words.predicted_text(report) + (f", {between}" if between else "")
    sentence = f"Predicted step {step}: {', '.join(labels)}"
    return f"<div>{svg.whole_bar(drawn)}</div>\n{small(sentence + more_text(len(parts), len(labels)))}"


def _communication(report: Report) -> str:
    """Return the section on communication: collectives by kind, by axis and by line."""
    if report.collectives is None:
        return ""
    if not report.collectives:
        return section("Communication: nothing moves between devices in this step")
    total = words.sent_bytes(report) or 0
    timed, weigh = comm.is_timed(report), comm.weight(report)
    kinds = comm.group_by_kind(report, report.collectives)
    head = [("collective", "wrap"), ("over", "left"), ("count", "right"), ("bytes each", "right")]
    between = comm.inter_island_heading(report)
    head += [("sent per device", "right"), *([(between, "right")] if between else [])]
    hidden = timed and comm.has_overlap(report)
    head += [("", "left"), *([(LINKS, "right")] if hidden else []), ("predicted" if timed else "share", "right")]
    most = max(map(weigh, kinds)) or 1
    rows = []
    for part in kinds[:COLLECTIVE_ROWS]:
        kind_html = escaped(part.kind) + (f" <small>{escaped(part.jobs)}</small>" if part.jobs else "")
        cells = [kind_html, _axes_html(part, report.mesh), part.count_text, part.each_text, part.sent_text]
        bar = svg.share_bar([_bar_part(part, report.mesh, weigh(part) / most)], 56 if timed else 80, 10)
        share = share_text(part.sent / total if total else 0)
        cells += [part.inter_island_text] if between else []
        links = [part.link_time_text] if hidden else []
        rows.append([*cells, bar, *links, part.seconds_text if timed else share])
    rest = kinds[COLLECTIVE_ROWS:]
    omitted = f"{count_text(len(rest))} more send {comm.merge(rest).sent_text}" if rest else ""
    return section(
        f"Communication: {_sent(report)}",
        table(head, rows),
        small(omitted),
        small("<br>".join(f"{axis(a, report.mesh)}: {escaped(way)}" for a, way in words.link_texts(report))),
        _lines(report),
        rings_html(report),
    )


def _sent(report: Report) -> str:
    """Return the title of the section: `62% of the predicted step, 993 MiB sent by each device`."""
    share, total = words.communication_share(report), words.sent_text(report.collectives or ())
    if share is None:
        return f"{total} sent by each device per step"
    return f"{share} of the predicted step, {total} sent by each device"


def _axes_html(part: comm.CollectiveGroup, mesh: MeshInfo) -> str:
    return " ".join(axis(a, mesh) for a in part.axes) if part.axes else escaped(part.axes_text)


def _bar_part(part: comm.CollectiveGroup, mesh: MeshInfo, share: float) -> tuple[int | None, float, float]:
    return _hue(part.axes, mesh), share, svg.KIND_OPACITY.get(part.kind, 0.4)


def _lines(report: Report) -> str:
    """Return the table of the lines that communicate most, in source order, each with its collectives."""
    sending = comm.group_by_line(report)
    if not sending:
        return ""
    # The heaviest lines are selected first, then sorted by source: the table is read like the code.
    shown, rest = comm.in_source_order(report, sending[:LINE_ROWS]), sending[LINE_ROWS:]
    timed, weigh = comm.is_timed(report), comm.weight(report)
    total, most = sum(weigh(line.group) for line in sending) or 1, weigh(sending[0].group) or 1
    head = [("line", "right"), ("source", "wrap"), ("predicted" if timed else "share", "right")]
    times = spent.seconds_by_line(report)
    head += [("", "left"), *([("measured", "right")] if times else []), ("sent", "right"), ("collectives", "wrap")]
    rows = []
    for line, name in zip(shown, comm.line_labels(shown, UNKNOWN), strict=True):
        kinds = comm.group_by_kind(report, line.group.collectives)
        bar = svg.share_bar([_bar_part(part, report.mesh, weigh(part) / most) for part in kinds], 64, 10)
        waited = line.group.seconds_text if timed else share_text(weigh(line.group) / total)
        collectives_text = ", ".join(_group_html(part, report.mesh) for part in kinds)
        measured_time = [spent.line_time_text(times, line.file, line.number)] if times else []
        rows.append(
            [
                escaped(name),
                _source(line),
                waited,
                bar,
                *measured_time,
                line.group.sent_text,
                f"<small>{collectives_text}</small>",
            ]
        )
    return join_nonempty([table(head, rows), _table_notes(report, shown, rest)])


def _table_notes(report: Report, shown: Sequence[comm.CodeLine], rest: Sequence[comm.CodeLine]) -> str:
    """Return notes on omitted lines, on sources without text, and on the abbreviations of collectives."""
    sent = comm.merge(line.group for line in rest).sent_text
    left = [f"{count_text(len(rest))} more send {sent}"] if rest else []
    kinds = {c.kind for line in shown for c in line.group.collectives}
    short = ", ".join(f"{short} {kind}" for kind, short in comm.SHORT.items() if kind in kinds)
    return small("<br>".join(escaped(line) for line in (*left, *comm.source_notes(report, shown), short) if line))


def _source(line: comm.CodeLine) -> str:
    if line.number is None:
        return f"<small>{comm.UNTRACED}</small>"
    source = code_text(line.text, line.callers, LONG_SOURCE)
    return code(source) if source else ""


def _group_html(part: comm.CollectiveGroup, mesh: MeshInfo) -> str:
    """Return a group of collectives in short: `AG data ×96`."""
    times = "" if part.count_text == "1" else f" ×{part.count_text}"
    jobs = f" ({escaped(part.jobs)})" if part.jobs else ""
    return f"{escaped(comm.SHORT.get(part.kind, part.kind))} {_axes_html(part, mesh)}{times}{jobs}"


def _layout(report: Report) -> str:
    if not report.leaves:
        return ""
    listing = leaf_rows.listing(report)
    roles = leaf_rows.role_bytes(report.leaves)
    sizes = ", ".join(f"{'other arguments' if role == 'other' else role} {byte_text(n)}" for role, n in roles.items())
    rows = [
        [svg.leaf_blocks(r.leaf, report.mesh), _leaf_name(r), _type(r, report.mesh), byte_text(r.bytes_per_device)]
        for r in listing.rows
    ]
    head = [("", "left"), ("leaf", "wrap"), ("type", "left"), ("per device", "right")]
    parted = leaf_rows.partial_axes(report.leaves)
    first = "the first of its devices" if parted else "the first device"
    lines = [listing.heading, *listing.notes, f"shaded: what {first} holds; a second sheet: a copy elsewhere"]
    per = "on the device that holds most of them" if parted else "per device"
    notes = " ".join(escaped(f"{words.sentence_case(line)}.") for line in lines)
    return section(f"Layout: {escaped(sizes)} {per}" if sizes else "Layout", table(head, rows), small(notes))


def _leaf_name(r: leaf_rows.LeafRow) -> str:
    times = f" \u00d7{count_text(r.members)}" if r.members > 1 else ""
    not_cut = leaf_rows.unsharded_text(r)
    why = escaped(r.leaf.why)
    if not_cut:
        sign = f'<span class="jss-warning">{SIGNS["warning"]}</span>'
        why = f"{sign} <b>{escaped(not_cut)}</b>: {why}" if why else f"{sign} <b>{escaped(not_cut)}</b>"
    name = _breakable(r.path, ".") if len(r.path) > LONG_NAME else escaped(r.path)
    return f"<code>{name}</code>{times}" + (f"<br><small>{why}</small>" if why else "")


def _breakable(value: str, after: str) -> str:
    return escaped(value).replace(after, f"{after}<wbr>")


def _type(r: leaf_rows.LeafRow, mesh: MeshInfo) -> str:
    """Return the type of a leaf and, below, the part of the mesh that stores it."""
    place = "".join(axis(name, mesh) if name else escaped(piece) for piece, name in submesh_parts(r.leaves))
    return f"<code>{_type_code(r.leaf, mesh)}</code>" + (f"<br><small>{place}</small>" if place else "")


def _type_code(leaf: Leaf, mesh: MeshInfo) -> str:
    long = len(type_text(leaf)) > LONG_NAME
    return "".join(
        axis(name, mesh) if name else _breakable(piece, ",") if long else escaped(piece)
        for piece, name in type_parts(leaf)
    )


def _timing(report: Report) -> str:
    timing = report.timing
    if timing is None or timing.step_s is None:
        return ""
    spread = timing.step_s
    heads = ["least", "median", "most", "timed calls", "calls"]
    cells = [seconds_text(s) for s in (spread.min, spread.median, spread.max)]
    cells += [count_text(timing.timed), count_text(timing.calls)]
    if timing.compile_s is not None:
        heads.append("compile")
        cells.append(seconds_text(timing.compile_s))
    title = "Timing on this CPU" if words.is_simulated(report) else f"Timing: {seconds_text(spread.median)} a step"
    return section(title, table([(head, "right") for head in heads], [cells]))


def _check(report: Report) -> str:
    lines = words.check_lines(report)
    if not lines:
        return ""
    paragraphs = [f"<p>{escaped(line)}{_path_list(leaves)}</p>" for line, leaves in lines]
    passed = report.check is not None and report.check.passed
    return section("Check: the same numbers" if passed else "Check: not the same numbers", *paragraphs)


def _path_list(leaves: Sequence[tuple[str, str]], most: int = 12) -> str:
    if not leaves:
        return ""
    more = more_text(len(leaves), most)
    return (
        " " + ", ".join(code(path) + (f" {escaped(amount)}" if amount else "") for path, amount in leaves[:most]) + more
    )
