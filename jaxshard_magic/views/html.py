"""A report as HTML without script: a fragment that stands in a notebook, and a whole document.

Hosts take things away: JupyterLab drops SVG from untrusted output, GitHub drops styles as well. So every key
number is text in a table, alignment is told twice (attribute and style), and drawings only repeat.
"""

from collections.abc import Iterable, Sequence
from html import escape

from jaxshard_magic.report import Advice, Collective, Leaf, MeshInfo, Report
from jaxshard_magic.views import layout, marks, svg, words
from jaxshard_magic.views import memory as mem
from jaxshard_magic.views.format import (
    UNKNOWN,
    byte_text,
    count_text,
    printable,
    runs,
    seconds_text,
    share_text,
    type_parts,
    type_text,
)
from jaxshard_magic.views.page import document

SIGNS = {"error": "\u2716", "warning": "\u26a0\ufe0e", "info": "\u2139\ufe0e"}
MEMORY_ROWS = 8
LONG_NAME = 36
LONG_SOURCE = 60
COLLECTIVE_ROWS = 12


def fragment(report: Report, also: str = "") -> str:
    """The report as one `<div>`, to stand in a notebook or a page; `also` is one more class of the `<div>`."""
    parts = [
        _title(report),
        _verdict(report),
        *(f"<p><small>{escape(line)}</small></p>" for line in words.notes(report)),
        _figures(report),
        *(_advice(advice) for advice in report.advice),
        _memory(report),
        _communication(report),
        _layout(report),
        _timing(report),
        _check(report),
    ]
    classes = f"jss {also}".rstrip()
    return f'<div class="{escape(classes)}">\n{_joined(parts)}\n</div>\n'


def page(report: Report) -> str:
    """The report as a whole document that follows the reader's light or dark theme."""
    title = f"{report.strategy} {words.mesh_text(report.mesh)}"
    return document(printable(title), fragment(report))


def _joined(parts: Iterable[str]) -> str:
    return "\n".join(part for part in parts if part)


def text(value: str) -> str:
    return escape(printable(value))


def code(value: str) -> str:
    return f"<code>{text(value)}</code>"


def axis(name: str, mesh: MeshInfo) -> str:
    return f'<b class="jss-a{svg.axis_index(name, mesh)}">{text(name)}</b>'


def cell(content: str, align: str = "left", tag: str = "td", more: str = "") -> str:
    """A table cell; `align` is left, right, or wrap: left, and may break into lines."""
    if align == "wrap":
        return f'<{tag} align="left" style="text-align:left"{more}>{content}</{tag}>'
    return (
        f'<{tag} align="{align}" style="text-align:{align};white-space:nowrap" nowrap{more}>{content}</{tag}>'
    )


def row(cells: Iterable[str]) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def table(head: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """A table; `head` holds (title, alignment) of each column."""
    top = row(cell(title, align, "th") for title, align in head)
    body = "\n".join(row(cell(c, align) for c, (_, align) in zip(r, head, strict=True)) for r in rows)
    return f"<table><thead>{top}</thead><tbody>\n{body}</tbody></table>"


def section(title: str, *content: str) -> str:
    return f"<details open><summary><b>{title}</b></summary>\n{_joined(content)}</details>"


def _title(report: Report) -> str:
    mesh = report.mesh
    axes = " &nbsp;".join(
        f"{svg.axis_mark(name, mesh)} <code>{axis(name, mesh)}={size}</code>"
        for name, size in mesh.axes.items()
    )
    given = words.options_text(report.options)
    options = f" {code(given)}" if given else ""
    label = (
        f" &nbsp; <small>{text(report.name)}</small>"
        if report.name and report.name != report.strategy
        else ""
    )
    return (
        f"<p><b>{text(report.strategy)}</b>{options} &nbsp; {axes} &nbsp;"
        f" {text(words.devices_text(mesh))}{label}</p>"
    )


def _verdict(report: Report) -> str:
    verdict = words.verdict(report)
    marks = {
        "text": text,
        "strong": lambda t: f"<b>{text(t)}</b>",
        "axis": lambda t: axis(t, report.mesh),
        "code": code,
        "memory": text,
    }
    said = "".join(marks[span.kind](span.text) for span in verdict.spans)
    sign = "" if verdict.ok else f'<span class="jss-error">{SIGNS["error"]}</span> '
    return f'<p class="jss-verdict">{sign}{said}</p>' if said else ""


def _figures(report: Report) -> str:
    found = words.figures(report)
    drawings = (_mark(mark, report.mesh) for mark in marks.marks(report))
    cells = (
        f'<span class="jss-value">{text(f.value)}</span><br><small>{text(f.note)}</small>'
        + (f"<br>{drawing}" if drawing else "")
        for f, drawing in zip(found, drawings, strict=True)
    )
    top = row(cell(text(f.label), "wrap", "th", _TOP) for f in found)
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


def _advice(advice: Advice) -> str:
    head, rest = words.first_clause(advice.message)
    message = f"<b>{text(head)}</b> {text(rest)}" if head else text(rest)
    fix = f"<br>{code(advice.fix)}" if advice.fix else ""
    sign = f'<span class="jss-{text(advice.level)}">{SIGNS.get(advice.level, SIGNS["info"])}</span>'
    return f"<p>{sign} {message}{fix}</p>"


def _memory(report: Report) -> str:
    memory = report.memory
    if memory is None or not memory.per_device:
        return ""
    found, most = mem.groups(memory), mem.limit(memory)
    roles = [r for r in mem.ROLES if r == "temporaries" or any(getattr(d, r) for d in memory.per_device)]
    full = max(max(mem.held(g.most), sum(n for _, n in mem.segments(g.most))) for g in found)
    full = max(full, most or 0)
    heads = [f"{svg.role_mark(r)} {r}" for r in roles]
    top = row([cell("device", "left", "th"), *(cell(h, "right", "th") for h in [*heads, "peak"])])
    body = []
    for group in found[:MEMORY_ROWS]:
        d = group.most
        figures = [byte_text(getattr(d, r)) for r in roles]
        peak = mem.of_limit(d.peak, most) if d.peak is not None and most else byte_text(d.peak)
        cells = [cell(text(_ids(group.devices)), "wrap"), *(cell(f, "right") for f in figures)]
        bar = svg.memory_bar(mem.segments(d), d.peak, most, full, f"{_ids(group.devices)}: {peak}")
        body.append(f'<tr class="jss-figures">{"".join(cells)}{cell(f"<b>{peak}</b>", "right")}</tr>')
        span = f' colspan="{len(roles) + 2}"'
        body.append(f'<tr style="background:transparent" class="jss-bar">{cell(bar, more=span)}</tr>')
    left = sum(len(g.devices) for g in found[MEMORY_ROWS:])
    title = mem.sentence(memory)
    return section(
        f"Memory: {text(title)}",
        f"<table><thead>{top}</thead><tbody>\n{_joined(body)}</tbody></table>",
        f"<p><small>{count_text(left)} more devices hold less</small></p>" if left else "",
    )


def _ids(devices: Sequence[int]) -> str:
    pieces = [str(a) if a == b else f"{a} to {b}" for a, b in runs(devices)]
    return ", ".join(pieces) if len(pieces) <= 3 else f"{count_text(len(devices))} devices"


def _communication(report: Report) -> str:
    if report.collectives is None:
        return ""
    if not report.collectives:
        return section("Communication: nothing moves between devices in this step")
    total = words.sent(report) or 0
    order = sorted(report.collectives, key=lambda c: -c.wire_bytes)
    timed = any(c.seconds is not None for c in order)
    head = [("collective", "wrap"), ("over", "left"), ("count", "right"), ("bytes each", "right")]
    head += [("sent per device", "right"), ("", "left"), ("predicted" if timed else "share", "right")]
    most = max(c.wire_bytes for c in order) or 1
    rows = []
    for c in order[:COLLECTIVE_ROWS]:
        over = " ".join(axis(a, report.mesh) for a in c.axes or ()) or f"groups of {count_text(c.group_size)}"
        bar = (_hue(c.axes, report.mesh), c.wire_bytes / most, svg.KIND_OPACITY.get(c.kind, 0.4))
        cells = [_kind(c), over, count_text(c.count), byte_text(c.bytes), byte_text(c.wire_bytes)]
        share = share_text(c.wire_bytes / total if total else 0)
        rows.append(
            [
                *cells,
                svg.share_bar([bar], 56 if timed else 80, 10),
                seconds_text(c.seconds) if timed else share,
            ]
        )
    rest = order[COLLECTIVE_ROWS:]
    left = f"{count_text(len(rest))} more send {byte_text(sum(c.wire_bytes for c in rest))}"
    return section(
        f"Communication: {byte_text(total)} sent by each device per step",
        table(head, rows),
        f"<p><small>{left}</small></p>" if rest else "",
    )


def _kind(c: Collective) -> str:
    if c.line is None and c.source is None:
        return text(c.kind)
    line = UNKNOWN if c.line is None else str(c.line)
    source = "" if c.source is None else c.source.strip()
    cut = source if len(source) <= LONG_SOURCE else source[: LONG_SOURCE - 1] + "\u2026"
    return f"{text(c.kind)}<br><small>line {line} {code(cut) if cut else ''}</small>"


def _layout(report: Report) -> str:
    if not report.leaves:
        return ""
    found = layout.listing(report.leaves)
    sizes = ", ".join(f"{role} {byte_text(n)}" for role, n in layout.role_bytes(report.leaves).items())
    rows = [
        [
            svg.leaf_blocks(r.leaf, report.mesh),
            _leaf_name(r),
            _type(r.leaf, report.mesh),
            byte_text(r.bytes_per_device),
        ]
        for r in found.rows
    ]
    head = [("", "left"), ("leaf", "wrap"), ("type", "left"), ("per device", "right")]
    lines = [
        found.above,
        *found.below,
        "shaded: what the first device holds; a second sheet: a copy elsewhere",
    ]
    said = " ".join(text(f"{words.sentence_case(line)}.") for line in lines)
    return section(
        f"Layout: {text(sizes)} per device" if sizes else "Layout",
        table(head, rows),
        f"<p><small>{said}</small></p>",
    )


def _leaf_name(r: layout.Row) -> str:
    times = f" \u00d7{count_text(r.members)}" if r.members > 1 else ""
    not_cut = layout.not_cut(r)
    why = text(r.leaf.why)
    if not_cut:
        sign = f'<span class="jss-warning">{SIGNS["warning"]}</span>'
        why = f"{sign} <b>{text(not_cut)}</b>: {why}" if why else f"{sign} <b>{text(not_cut)}</b>"
    name = _breakable(r.path, ".") if len(r.path) > LONG_NAME else text(r.path)
    return f"<code>{name}</code>{times}" + (f"<br><small>{why}</small>" if why else "")


def _breakable(value: str, after: str) -> str:
    return text(value).replace(after, f"{after}<wbr>")


def _type(leaf: Leaf, mesh: MeshInfo) -> str:
    long = len(type_text(leaf)) > LONG_NAME
    pieces = (
        axis(name, mesh) if name else _breakable(piece, ",") if long else text(piece)
        for piece, name in type_parts(leaf)
    )
    return f"<code>{''.join(pieces)}</code>"


def _timing(report: Report) -> str:
    timing = report.timing
    if timing is None or timing.step_s is None:
        return ""
    spread = timing.step_s
    head = [
        ("least", "right"),
        ("median", "right"),
        ("most", "right"),
        ("timed calls", "right"),
        ("calls", "right"),
    ]
    cells = [seconds_text(s) for s in (spread.min, spread.median, spread.max)]
    cells += [count_text(timing.timed), count_text(timing.calls)]
    if timing.compile_s is not None:
        head.append(("compile", "right"))
        cells.append(seconds_text(timing.compile_s))
    return section(f"Timing: {seconds_text(spread.median)} a step", table(head, [cells]))


def _check(report: Report) -> str:
    lines = words.check_lines(report)
    if not lines:
        return ""
    said = [f"<p>{text(line)}{_paths(paths)}</p>" for line, paths in lines]
    passed = report.check is not None and report.check.passed
    return section("Check: the same numbers" if passed else "Check: not the same numbers", *said)


def _paths(paths: Sequence[str], most: int = 12) -> str:
    if not paths:
        return ""
    more = f" and {count_text(len(paths) - most)} more" if len(paths) > most else ""
    return " " + ", ".join(code(p) for p in paths[:most]) + more
