"""A report as text for a terminal, 60 to 100 columns wide."""

from collections.abc import Sequence

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report import Advice, DeviceMemory, Memory, Report
from jaxshard_magic.report.parts import mesh_text
from jaxshard_magic.views import communication as comm
from jaxshard_magic.views import device_memory, leaf_rows, option_table, words
from jaxshard_magic.views.device_stages import stages
from jaxshard_magic.views.experts_positions import text as divided_text
from jaxshard_magic.views.format import (
    SPACE,
    UNKNOWN,
    byte_text,
    count_text,
    printable,
    runs,
    seconds_text,
    share_text,
    submesh_text,
    type_text,
)
from jaxshard_magic.views.measured import data as spent
from jaxshard_magic.views.measured import text as spent_text
from jaxshard_magic.views.source_lines import code_text, short_line
from jaxshard_magic.views.terminal import (
    bar,
    clip,
    display_width,
    pad,
    plain_signs,
    shorten,
    table,
    terminal_text,
    text_width,
    wrap,
    wrap_all,
)
from jaxshard_magic.views.timeline import text as timeline_text
from jaxshard_magic.views.training import text as training_text

SIGNS = {"error": "x", "warning": "!", "info": "i"}
ROLE_INK = {"params": "\u2588", "optimizer": "\u2593", "batch": "\u259a", "temporaries": "\u2592", "other": "\u2591"}
MEMORY_ROWS = 8
BUFFER_ROWS = 5
COLLECTIVE_ROWS = 12
LINE_ROWS = 8
LEAST_SOURCE, LEAST_WHAT = 16, 8  # columns of code and of a buffer's name, at least
BOTH_TIMES = 72  # columns from which a line has room for measured and predicted times
TRACED = "Lines that move data"


def render(report: Report, width: int | None = None, leaves: str | int = 8) -> str:
    """Render a report as text; a fix to paste is never broken.

    Args:
        report: Report to show.
        width: Columns, clamped to 60 to 100; None takes the width of the terminal.
        leaves: Number of the largest rows of leaves, or "all" for every leaf.

    Raises:
        ShardError: `leaves` is neither a number nor "all".
    """
    columns = text_width(width)
    if leaves != "all" and not isinstance(leaves, int):
        raise ShardError(f"leaves is {leaves!r}; it is a number, or 'all' for every leaf")
    largest = None if isinstance(leaves, str) else leaves
    parts = [
        _header(report, columns),
        _figures(report, columns),
        _options(report, columns),
        _advice(report.advice, columns),
        _time(report, columns),
        _memory(report, columns),
        _communication(report, columns),
        _lines(report, columns),
        spent_text.lines(report, columns),
        divided_text.lines(report, columns),
        _leaves(report, columns, largest),
        timeline_text.lines(report.pipeline, columns) if report.pipeline else [],
        training_text.lines(report.metrics, columns),
        _check(report, columns),
    ]
    return "\n\n".join(terminal_text(part) for part in parts if part)


def _header(report: Report, width: int) -> list[str]:
    first = [words.title_text(report), words.options_text(report)]
    second = [mesh_text(report.mesh.axes), words.reported_devices(report, "x")]
    name = printable(words.named_text(report))
    lines = [printable("   ".join(p for p in [*first, *second] if p))]
    if display_width(lines[0]) > width:
        lines = [line for part in (first, second) for line in _line(printable("   ".join(filter(None, part))), width)]
    if display_width(lines[-1]) + 3 + display_width(name) <= width:
        lines[-1] = pad(lines[-1], width - display_width(name)) + name
    else:
        lines += wrap(name, width)
    verdict = words.verdict(report)
    verdict_text = "".join(
        printable(s.text) if s.kind == "code" else plain_signs(printable(s.text)) for s in verdict.spans
    )
    lines += wrap(verdict_text, width, "" if verdict.ok else "x ") if verdict_text else []
    for note in words.notes(report):
        lines += wrap(plain_signs(printable(note)), width)
    return lines


def _line(text: str, width: int) -> list[str]:
    return [text] if display_width(text) <= width else wrap(text, width)


def _figures(report: Report, width: int) -> list[str]:
    lines = []
    for f in words.figures(report):
        first = f"  {f.short:<8}{plain_signs(f.value):>10}   "
        lines += wrap(plain_signs(printable(f.note)), width, first, " " * len(first))
    return lines


def _options(report: Report, width: int) -> list[str]:
    options = option_table.rows(report)
    if not options:
        return []
    heads = enumerate(option_table.HEADS)
    figures = {head: [plain_signs(option_table.cell(r, k, width)) for r in options] for k, head in heads}
    room = width - display_width(table(figures, ())[0]) - 2
    columns = {"": [clip(printable(r.change), room) for r in options], **figures}
    refusals = (printable(f"{r.change}: {r.reason}") for r in options if r.reason)
    why = (line for text in refusals for line in wrap(text, width, "  ", "    "))
    return [option_table.TITLE, *table(columns, ("",)), *why]


def _advice(advice: Sequence[Advice], width: int) -> list[str]:
    lines = []
    for a in advice[: words.HINTS]:
        message = a.message if not a.fix else f"{a.message} Fix:"
        lines += wrap(plain_signs(printable(message)), width, f"{SIGNS.get(a.level, 'i')} ", "  ")
        # Not wrapped: a broken line could not be pasted.
        lines += ["    " + printable(line) for line in (a.fix or "").splitlines()]
    rest = advice[words.HINTS :]
    if rest:
        lines.append(f"{len(rest)} more in report.advice:")
    lines += [clip(f"  {plain_signs(printable(a.message))}", width) for a in rest]
    return lines


def _memory(report: Report, width: int) -> list[str]:
    memory = report.memory
    if memory is None or not memory.per_device:
        return []
    groups, most = device_memory.groups(memory), device_memory.limit(memory)
    top = groups[0].fullest
    legend = []
    for role in device_memory.ROLES:
        if role == "temporaries" or any(getattr(g.fullest, role) for g in groups):
            legend.append(f"{ROLE_INK[role]}{SPACE}{role}{SPACE}{byte_text(getattr(top, role))}{SPACE}")
    lines = ["Memory per device", *map(plain_signs, wrap(" ".join(legend), width, "  ", "  "))]
    lines += wrap_all(filter(None, [words.scale_note(memory)]), width, "  ", "  ")
    shown = groups[:MEMORY_ROWS]
    stage_map = stages(report)
    labels = [printable(f"{_ids(g.devices)} {stage_map.stage_text(g.devices)}".rstrip()) for g in shown]
    values = []
    for g in shown:
        d = g.fullest
        peak_text = words.usage_text(d.peak, most) if d.peak is not None and most and not values else byte_text(d.peak)
        values.append(plain_signs(peak_text) + (" each" if len(g.devices) > 1 and d.peak is not None else ""))
    label_width, value_width = max(map(display_width, labels)), max(map(display_width, values))
    room = width - label_width - value_width - 6
    full, on_scale = device_memory.scale(memory)
    for g, label, value in zip(shown, labels, values, strict=True):
        lines.append(f"  {pad(label, label_width, 'right')}  {_memory_bar(g.fullest, on_scale, full, room)}  {value}")
    left = sum(len(g.devices) for g in groups[MEMORY_ROWS:])
    if left:
        lines.append(f"  {count_text(left)} more devices hold less")
    measured = words.measured_text(memory)
    return lines + ([f"  {plain_signs(measured)}"] if measured else []) + _buffers(memory, width)


def _buffers(memory: Memory, width: int) -> list[str]:
    """Return the largest temporaries at the peak, and the lines of code that made them."""
    shown = (memory.buffers or ())[:BUFFER_ROWS]
    if not shown:
        return []
    what = [", ".join(filter(None, (words.buffer_name(b), words.buffer_about(b)))) for b in shown]
    columns = {
        "size": [byte_text(b.bytes) for b in shown],
        "at the peak": [shorten(plain_signs(words.buffer_type(b)), width // 3) for b in shown],
        "what": [""] * len(shown),
        "line": [printable(short_line(b)) or plain_signs(UNKNOWN) for b in shown],
    }
    room = width - display_width(table(columns, ())[0])
    if room < LEAST_WHAT:
        # Callers are dropped before names become too short to read.
        columns["line"] = [line.partition(" from ")[0] for line in columns["line"]]
        room = width - display_width(table(columns, ())[0])
    columns["what"] = [shorten(printable(text), room + len("what")) for text in what]
    return table(columns, ("at the peak", "what"))


def _memory_bar(device: DeviceMemory, limit: int | None, full: int, width: int) -> str:
    """Return the memory of one device as a bar, each role to the nearest column, with `|` at the limit if there is
    one."""
    drawn, total = "", 0
    for role, size in device_memory.segments(device):
        total += size
        drawn += ROLE_INK[role] * (round(total * width / full) - len(drawn))
    if limit is None:
        return pad(drawn, width)
    drawn += "\u00b7" * (width - len(drawn))
    mark = min(width - 1, round(limit * width / full))
    return drawn[:mark] + "|" + drawn[mark + 1 :]


def _ids(devices: Sequence[int]) -> str:
    pieces = [str(a) if a == b else f"{a}-{b}" for a, b in runs(devices)]
    return ",".join(pieces) if len(pieces) <= 3 else f"{count_text(len(devices))} devices"


def _time(report: Report, width: int) -> list[str]:
    parts = words.time_parts(report)
    total = sum(seconds for _, _, seconds in parts)
    if not total:
        return []
    shown, rest = parts[:COLLECTIVE_ROWS], parts[COLLECTIVE_ROWS:]
    columns = {
        "part": [shorten(printable(kind), 20) for kind, _, _ in shown],
        "over": [
            shorten(printable(words.axes_text(axes)), 16) if kind not in words.DEVICE_PARTS else ""
            for kind, axes, _ in shown
        ],
        "time": [plain_signs(words.time_part_text(report, *part)) for part in shown],
        "share": [share_text(seconds / total) for _, _, seconds in shown],
    }
    _, *lines = table(columns, ("part", "over"))
    room = min(40, width - display_width(lines[0]) - 2)
    most = max(seconds for _, _, seconds in shown)
    lines = [f"{line}  {bar(part[2] / most, room)}" for line, part in zip(lines, shown, strict=True)]
    if rest:
        left = sum(seconds for _, _, seconds in rest)
        lines.append(f"  {count_text(len(rest))} more take {plain_signs(seconds_text(left))}")
    told = filter(None, (words.predicted_text(report), words.predicted_range(report)))
    return [f"Predicted step, {plain_signs(', '.join(told))}", *lines]


def _communication(report: Report, width: int) -> list[str]:
    if report.collectives is None:
        return []
    if not report.collectives:
        return ["Communication: nothing moves between devices in this step"]
    total = words.sent_bytes(report) or 0
    kinds = comm.group_by_kind(report, report.collectives)
    shown, rest = kinds[:COLLECTIVE_ROWS], kinds[COLLECTIVE_ROWS:]
    columns = _communication_columns(shown, total)
    if (between := comm.inter_island_heading(report)) is not None:
        columns[between] = [part.inter_island_text for part in shown]
    if comm.is_timed(report) and not words.time_parts(report):
        columns["predicted"] = [plain_signs(part.seconds_text) for part in shown]
    lines = table(columns, ("collective", "over"))
    for head in ("share", "each"):
        if display_width(lines[0]) > width and head in columns:
            del columns[head]
            lines = table(columns, ("collective", "over"))
    used = display_width(lines[0])
    room = min(40, width - used - 2)
    if room >= 8:
        most = max(part.sent for part in shown) or 1
        bars = ["", *(bar(part.sent / most, room) for part in shown)]
        lines = [f"{line}  {drawn}" for line, drawn in zip(lines, bars, strict=True)]
    if rest:
        lines.append(f"  {count_text(len(rest))} more send {comm.merge(rest).sent_text}")
    for axis, way in words.link_texts(report):
        lines += wrap(plain_signs(printable(f"{axis}: {way}")), width, "  ", "    ")
    return [f"Communication, {words.sent_text(report.collectives)} sent per device and step", *lines]


def _communication_columns(shown: Sequence[comm.CollectiveGroup], total: int) -> dict[str, list[str]]:
    return {
        "collective": [shorten(printable(part.kind), 20) for part in shown],
        "over": [shorten(printable(part.axes_text), 16) for part in shown],
        "count": [part.count_text for part in shown],
        "each": [part.each_text for part in shown],
        "sent": [part.sent_text for part in shown],
        "share": [share_text(part.sent / total if total else 0) for part in shown],
    }


def _lines(report: Report, width: int) -> list[str]:
    """Return the lines of code that communicate most, the heaviest first, each with its collectives."""
    sending = comm.group_by_line(report)
    if not sending:
        return []
    shown, rest = sending[:LINE_ROWS], sending[LINE_ROWS:]
    numbers = [shorten(printable(name), width // 5) for name in comm.line_labels(shown, "-")]
    columns = {"sent": [line.group.sent_text for line in shown]}
    if comm.is_timed(report):
        columns = {"predicted": [plain_signs(line.group.seconds_text) for line in shown], **columns}
    if times := spent.seconds_by_line(report):
        measured_times = [plain_signs(spent.line_time_text(times, line.file, line.number)) for line in shown]
        columns = {"measured": measured_times, **columns}
        if width < BOTH_TIMES:  # the table of measured times has the prediction
            columns.pop("predicted", None)
    label_width, figures_width = max(map(display_width, numbers)), display_width(table(columns, ())[0])
    most = min(width // 3, width - label_width - figures_width - LEAST_SOURCE)
    columns["collectives"] = [_kinds_text(comm.group_by_kind(report, line.group.collectives), most) for line in shown]
    figures = table(columns, ("collectives",))
    room = width - label_width - 4 - display_width(figures[0])
    lines = [pad(TRACED, label_width + room + 4) + figures[0]]
    for number, line, figure in zip(numbers, shown, figures[1:], strict=True):
        source = clip(comm.UNTRACED, room) if line.number is None else code_text(line.text, line.callers, room)
        lines.append(f"  {pad(number, label_width, 'right')}  {pad(source, room)}{figure}")
    if rest:
        sent = comm.merge(line.group for line in rest).sent_text
        lines.append(f"  {count_text(len(rest))} more send {sent}")
    return lines + [
        line for note in comm.source_notes(report, shown) for line in wrap(printable(note), width, "  ", "    ")
    ]


def _kinds_text(parts: Sequence[comm.CollectiveGroup], width: int) -> str:
    """Return groups of collectives in short, `AG data A2A expert (dispatch)`, cut to `width` with the number of others.

    Purposes are included only if everything fits.
    """
    kinds = [f"{shorten(printable(comm.SHORT.get(p.kind, p.kind)), 8)} {printable(p.axes_text)}" for p in parts]
    whole = "  ".join(f"{t} ({p.jobs})" if p.jobs else t for t, p in zip(kinds, parts, strict=True))
    if display_width(whole) <= width:
        return whole
    for n in range(len(kinds), 1, -1):
        candidate = "  ".join([*kinds[:n], *([f"+{len(kinds) - n}"] if n < len(kinds) else [])])
        if display_width(candidate) <= width:
            return candidate
    more = f"  +{len(kinds) - 1}" if len(kinds) > 1 else ""
    return clip(kinds[0], width - len(more)) + more


def _leaves(report: Report, width: int, largest: int | None) -> list[str]:
    if not report.leaves:
        return []
    listing = leaf_rows.listing(report, largest)
    paths = [printable(r.path) + (f" x{count_text(r.members)}" if r.members > 1 else "") for r in listing.rows]
    kinds = [printable(f"{type_text(r.leaf)} {submesh_text(r.leaves)}".rstrip()) for r in listing.rows]
    sizes = [byte_text(r.bytes_per_device) for r in listing.rows]
    size_width = max(map(display_width, sizes), default=0)
    kind_width, path_width = (max(map(display_width, kinds), default=0), max(map(display_width, paths), default=0))
    room = width - size_width - 9
    below = path_width + kind_width > room  # types then get lines of their own
    if below:
        kind_width, path_width = -2, min(room + 2, path_width)
    head = f"Leaves, {listing.heading}"
    path_width = max(path_width, display_width(head) + 6 - kind_width - size_width)  # room for "per device"
    lines = [pad(head, path_width + kind_width + size_width - 4) + "per device"]
    for r, path, kind, size in zip(listing.rows, paths, kinds, sizes, strict=True):
        left = "  " + pad(shorten(path, path_width), path_width) + ("" if below else "  " + pad(kind, kind_width))
        lines.append(f"{left}  {pad(size, size_width, 'right')}{'  !' * bool(r.leaf.wanted)}")
        lines += wrap(kind, width, "    ", "    ") if below else []
        lines += _reason(r, width, always=largest is None)
    lines += [line for said in listing.notes for line in wrap(plain_signs(said), width, "  ", "    ")]
    every = len(listing.rows) == listing.leaf_count
    return lines if every else [*lines, '  to_text(leaves="all") lists every leaf']


def _reason(r: leaf_rows.LeafRow, width: int, always: bool) -> list[str]:
    why = ": ".join(filter(None, [leaf_rows.unsharded_text(r), r.leaf.why]))
    return wrap(plain_signs(printable(why)), width, "    ", "    ") if why and (always or r.leaf.wanted) else []


def _check(report: Report, width: int) -> list[str]:
    lines = []
    for sentence, leaves in words.check_lines(report):
        lines += wrap(plain_signs(printable(sentence)), width)
        lines += ["  " + shorten(printable(f"{path} {much}".rstrip()), width - 2) for path, much in leaves[:12]]
        if len(leaves) > 12:
            lines.append(f"  and {count_text(len(leaves) - 12)} more")
    return lines
