"""A report as HTML without script: a fragment that stands in a notebook, and a whole document.

Hosts take things away: JupyterLab drops SVG from untrusted output, GitHub drops styles as well. So every key
number is text in a table, alignment is told twice (attribute and style), and drawings only repeat.
"""

from collections.abc import Sequence
from html import escape

from jaxshard_magic.report import Advice, Leaf, MeshInfo, Report
from jaxshard_magic.report.parts import mesh_text
from jaxshard_magic.views import communication as comm
from jaxshard_magic.views import leaf_rows, marks, option_table, svg, words
from jaxshard_magic.views.divided.html import divided_section, turns
from jaxshard_magic.views.format import (
    UNKNOWN,
    byte_text,
    count_text,
    more_text,
    place_parts,
    printable,
    seconds_text,
    share_text,
    type_parts,
    type_text,
)
from jaxshard_magic.views.measured import data as spent
from jaxshard_magic.views.measured.html import measured_section
from jaxshard_magic.views.memory_html import memory_section
from jaxshard_magic.views.page import document
from jaxshard_magic.views.source_lines import code_text
from jaxshard_magic.views.tags import axis, cell, code, joined, mesh_axes, row, section, small, table, text
from jaxshard_magic.views.timeline.html import pipeline_section
from jaxshard_magic.views.training.html import metrics_section

SIGNS = {"error": "\u2716", "warning": "\u26a0\ufe0e", "info": "\u2139\ufe0e"}
LONG_NAME = 36
LONG_SOURCE = 80
COLLECTIVE_ROWS = 12
LINKS = "on the links"  # beside "predicted", what of it the device waits for
LINE_ROWS = 40


def fragment(report: Report, also: str = "") -> str:
    """The report as one `<div>`, to stand in a notebook or a page; `also` is one more class of the `<div>`."""
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
        divided_section(report),
        _layout(report),
        pipeline_section(report.pipeline),
        metrics_section(report.metrics),
        _timing(report),
        _check(report),
    ]
    classes = f"jss {also}".rstrip()
    return f'<div class="{escape(classes)}">\n{joined(parts)}\n</div>\n'


def page(report: Report) -> str:
    """The report as a whole document that follows the reader's light or dark theme."""
    title = f"{words.title_text(report)} {mesh_text(report.mesh.axes)}"
    return document(printable(title), fragment(report))


def _title(report: Report) -> str:
    mesh = report.mesh
    typed = words.options_text(report)
    options = f" {code(typed)}" if typed else ""
    named = words.named_text(report)
    label = f" &nbsp; <small>{text(named)}</small>" if named else ""
    return (
        f"<p><b>{text(words.title_text(report))}</b>{options} &nbsp; {mesh_axes(mesh)} &nbsp;"
        f" {text(words.reported_devices(report))}{label}</p>"
    )


def _verdict(report: Report) -> str:
    verdict = words.verdict(report)
    tags = {
        "strong": lambda t: f"<b>{text(t)}</b>",
        "axis": lambda t: axis(t, report.mesh),
        "code": code,
    }
    sentences = "".join(tags.get(span.kind, text)(span.text) for span in verdict.spans)
    sign = "" if verdict.ok else f'<span class="jss-error">{SIGNS["error"]}</span> '
    return f'<p class="jss-verdict">{sign}{sentences}</p>' if sentences else ""


def _figures(report: Report) -> str:
    figures = words.figures(report)
    if not figures:
        return ""
    drawings = (_mark(mark, report.mesh) for mark in marks.marks(report))
    cells = (
        f'<span class="jss-value">{text(f.value)}</span><br><small>{text(f.note)}</small>'
        + (f"<br>{drawing}" if drawing else "")
        for f, drawing in zip(figures, drawings, strict=True)
    )
    top = row(cell(text(f.label), "wrap", "th", _TOP) for f in figures)
    return (
        f"<table><thead>{top}</thead><tbody>{row(cell(c, 'wrap', more=_TOP) for c in cells)}</tbody></table>"
    )


_TOP = ' valign="top"'


def _mark(mark: marks.Mark | None, mesh: MeshInfo) -> str:
    match mark:
        case marks.Range(least, median, most):
            return svg.range_mark(least, median, most)
        case marks.Share(share):
            used = min(1.0, share)
            return svg.share_bar([(None, used, 1.0), (None, 1 - used, 0.25)])
        case marks.Axes(parts):
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
            text(r.change),
            *(f"{text(v)} <small>{text(s)}</small>" for v, s in zip(r.values, r.shares, strict=True)),
        ]
        for r in options
    ]
    why = "<br>".join(text(f"{r.change}: {r.why}") for r in options if r.why)
    return section(option_table.TITLE, table(head, cells), small(why))


def _hints(advice: Sequence[Advice]) -> str:
    """The first ones open, the others folded."""
    shown, rest = (joined(map(_advice, part)) for part in (advice[: words.HINTS], advice[words.HINTS :]))
    more = f"<details><summary>{count_text(len(advice) - words.HINTS)} more</summary>\n{rest}\n</details>"
    return joined([shown, more if rest else ""])


def _advice(advice: Advice) -> str:
    head, rest = words.first_clause(advice.message)
    message = f"<b>{text(head)}</b> {text(rest)}" if head else text(rest)
    lines = "\n".join(code(line) for line in (advice.fix or "").splitlines())
    fix = f'<br><span style="white-space:pre-wrap">{lines}</span>' if lines else ""
    sign = f'<span class="jss-{text(advice.level)}">{SIGNS.get(advice.level, SIGNS["info"])}</span>'
    return f"<p>{sign} {message}{fix}</p>"


def _time(report: Report) -> str:
    """The predicted step as a bar, and its parts in words."""
    parts = words.time_parts(report)
    total = sum(seconds for _, _, seconds in parts)
    if not total:
        return ""
    told, drawn = [], []
    for kind, axes, seconds in parts[:COLLECTIVE_ROWS]:
        own = kind in words.OWN
        hue, opacity = _hue(axes, report.mesh), (svg.OWN_OPACITY if own else svg.KIND_OPACITY).get(kind, 0.4)
        over = "".join(f" {axis(a, report.mesh)}" for a in axes or ())
        name = f"{text(kind)}{over}"
        key = svg.share_bar([(hue, 1.0, opacity)], 10, 10)
        told.append(
            f"{key} {name} {share_text(seconds / total)} {words.time_part_text(report, kind, axes, seconds)}"
        )
        drawn.append((hue, seconds / total, opacity))
    between = words.predicted_range(report)
    step = words.predicted_text(report) + (f", {between}" if between else "")
    sentence = f"Predicted step {step}: {', '.join(told)}"
    return f"<div>{svg.whole_bar(drawn)}</div>\n{small(sentence + more_text(len(parts), len(told)))}"


def _communication(report: Report) -> str:
    if report.collectives is None:
        return ""
    if not report.collectives:
        return section("Communication: nothing moves between devices in this step")
    total = words.sent(report) or 0
    timed, weigh = comm.is_timed(report), comm.weight(report)
    kinds = comm.kinds(report, report.collectives)
    head = [("collective", "wrap"), ("over", "left"), ("count", "right"), ("bytes each", "right")]
    between = comm.between(report)
    head += [("sent per device", "right"), *([(between, "right")] if between else [])]
    hidden = timed and comm.is_hidden(report)
    head += [
        ("", "left"),
        *([(LINKS, "right")] if hidden else []),
        ("predicted" if timed else "share", "right"),
    ]
    most = max(map(weigh, kinds)) or 1
    rows = []
    for part in kinds[:COLLECTIVE_ROWS]:
        named = text(part.kind) + (f" <small>{text(part.jobs)}</small>" if part.jobs else "")
        cells = [named, _over(part, report.mesh), part.count_text, part.each_text, part.sent_text]
        bar = svg.share_bar([_piece(part, report.mesh, weigh(part) / most)], 56 if timed else 80, 10)
        share = share_text(part.sent / total if total else 0)
        cells += [part.leaving_text] if between else []
        links = [part.links_text] if hidden else []
        rows.append([*cells, bar, *links, part.seconds_text if timed else share])
    rest = kinds[COLLECTIVE_ROWS:]
    left = f"{count_text(len(rest))} more send {comm.together(rest).sent_text}" if rest else ""
    return section(
        f"Communication: {_sent(report)}",
        table(head, rows),
        small(left),
        small("<br>".join(f"{axis(a, report.mesh)}: {text(way)}" for a, way in words.ways(report))),
        _lines(report),
        turns(report),
    )


def _sent(report: Report) -> str:
    """`62% of the predicted step, 993 MiB sent by each device`."""
    share, total = words.communication_share(report), words.sent_text(report.collectives or ())
    if share is None:
        return f"{total} sent by each device per step"
    return f"{share} of the predicted step, {total} sent by each device"


def _over(part: comm.Part, mesh: MeshInfo) -> str:
    return " ".join(axis(a, mesh) for a in part.axes) if part.axes else text(part.over)


def _piece(part: comm.Part, mesh: MeshInfo, share: float) -> tuple[int | None, float, float]:
    return _hue(part.axes, mesh), share, svg.KIND_OPACITY.get(part.kind, 0.4)


def _lines(report: Report) -> str:
    """The lines that move most, in their order, each with its collectives."""
    sending = comm.lines(report)
    if not sending:
        return ""
    shown, rest = comm.in_order(report, sending[:LINE_ROWS]), sending[LINE_ROWS:]
    timed, weigh = comm.is_timed(report), comm.weight(report)
    total, most = sum(weigh(line.part) for line in sending) or 1, weigh(sending[0].part) or 1
    head = [("line", "right"), ("source", "wrap"), ("predicted" if timed else "share", "right")]
    times = spent.by_line(report)
    head += [
        ("", "left"),
        *([("measured", "right")] if times else []),
        ("sent", "right"),
        ("collectives", "wrap"),
    ]
    rows = []
    for line, name in zip(shown, comm.names(shown, UNKNOWN), strict=True):
        kinds = comm.kinds(report, line.part.collectives)
        bar = svg.share_bar([_piece(part, report.mesh, weigh(part) / most) for part in kinds], 64, 10)
        waited = line.part.seconds_text if timed else share_text(weigh(line.part) / total)
        told = ", ".join(_times(part, report.mesh) for part in kinds)
        took = [spent.of_line(times, line.file, line.number)] if times else []
        rows.append(
            [text(name), _source(line), waited, bar, *took, line.part.sent_text, f"<small>{told}</small>"]
        )
    return joined([table(head, rows), _below(report, shown, rest)])


def _below(report: Report, shown: Sequence[comm.Line], rest: Sequence[comm.Line]) -> str:
    """What the table leaves out, why a line has no text, and the short names of collectives."""
    sent = comm.together(line.part for line in rest).sent_text
    left = [f"{count_text(len(rest))} more send {sent}"] if rest else []
    kinds = {c.kind for line in shown for c in line.part.collectives}
    short = ", ".join(f"{short} {kind}" for kind, short in comm.SHORT.items() if kind in kinds)
    return small("<br>".join(text(line) for line in (*left, *comm.notes(report, shown), short) if line))


def _source(line: comm.Line) -> str:
    if line.number is None:
        return f"<small>{comm.UNTRACED}</small>"
    source = code_text(line.text, line.calls, LONG_SOURCE)
    return code(source) if source else ""


def _times(part: comm.Part, mesh: MeshInfo) -> str:
    """`AG data ×96`."""
    times = "" if part.count_text == "1" else f" ×{part.count_text}"
    jobs = f" ({text(part.jobs)})" if part.jobs else ""
    return f"{text(comm.SHORT.get(part.kind, part.kind))} {_over(part, mesh)}{times}{jobs}"


def _layout(report: Report) -> str:
    if not report.leaves:
        return ""
    listing = leaf_rows.listing(report)
    roles = leaf_rows.role_bytes(report.leaves)
    sizes = ", ".join(
        f"{'other arguments' if role == 'other' else role} {byte_text(n)}" for role, n in roles.items()
    )
    rows = [
        [
            svg.leaf_blocks(r.leaf, report.mesh),
            _leaf_name(r),
            _type(r, report.mesh),
            byte_text(r.bytes_per_device),
        ]
        for r in listing.rows
    ]
    head = [("", "left"), ("leaf", "wrap"), ("type", "left"), ("per device", "right")]
    parted = leaf_rows.parted(report.leaves)
    first = "the first of its devices" if parted else "the first device"
    lines = [
        listing.above,
        *listing.below,
        f"shaded: what {first} holds; a second sheet: a copy elsewhere",
    ]
    per = "on the device that holds most of them" if parted else "per device"
    said = " ".join(text(f"{words.sentence_case(line)}.") for line in lines)
    return section(
        f"Layout: {text(sizes)} {per}" if sizes else "Layout",
        table(head, rows),
        small(said),
    )


def _leaf_name(r: leaf_rows.Row) -> str:
    times = f" \u00d7{count_text(r.members)}" if r.members > 1 else ""
    not_cut = leaf_rows.not_cut(r)
    why = text(r.leaf.why)
    if not_cut:
        sign = f'<span class="jss-warning">{SIGNS["warning"]}</span>'
        why = f"{sign} <b>{text(not_cut)}</b>: {why}" if why else f"{sign} <b>{text(not_cut)}</b>"
    name = _breakable(r.path, ".") if len(r.path) > LONG_NAME else text(r.path)
    return f"<code>{name}</code>{times}" + (f"<br><small>{why}</small>" if why else "")


def _breakable(value: str, after: str) -> str:
    return text(value).replace(after, f"{after}<wbr>")


def _type(r: leaf_rows.Row, mesh: MeshInfo) -> str:
    """The type and, below it, the part of the mesh that the leaf is on."""
    place = "".join(axis(name, mesh) if name else text(piece) for piece, name in place_parts(r.leaves))
    return f"<code>{_type_code(r.leaf, mesh)}</code>" + (f"<br><small>{place}</small>" if place else "")


def _type_code(leaf: Leaf, mesh: MeshInfo) -> str:
    long = len(type_text(leaf)) > LONG_NAME
    return "".join(
        axis(name, mesh) if name else _breakable(piece, ",") if long else text(piece)
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
    title = (
        "Timing on this CPU" if words.simulated(report) else f"Timing: {seconds_text(spread.median)} a step"
    )
    return section(title, table([(head, "right") for head in heads], [cells]))


def _check(report: Report) -> str:
    lines = words.check_lines(report)
    if not lines:
        return ""
    paragraphs = [f"<p>{text(line)}{_told(leaves)}</p>" for line, leaves in lines]
    passed = report.check is not None and report.check.passed
    return section("Check: the same numbers" if passed else "Check: not the same numbers", *paragraphs)


def _told(leaves: Sequence[tuple[str, str]], most: int = 12) -> str:
    if not leaves:
        return ""
    more = more_text(len(leaves), most)
    return (
        " "
        + ", ".join(code(path) + (f" {text(amount)}" if amount else "") for path, amount in leaves[:most])
        + more
    )
