"""Documents as text for a terminal, 60 to 100 columns wide.

Words are wrapped, names are cut, and columns of tables are left out where there is no room. Lines to paste are never
broken.
"""

from collections.abc import Iterable, Sequence

from jaxshard_magic.report import DeviceMemory
from jaxshard_magic.report.parts import mesh_text
from jaxshard_magic.views import device_memory
from jaxshard_magic.views.choice import decision_tree
from jaxshard_magic.views.document import parts as doc
from jaxshard_magic.views.format import SPACE, count_text, printable, runs
from jaxshard_magic.views.source_lines import code_text
from jaxshard_magic.views.terminal import (
    bar,
    clip,
    display_width,
    pad,
    plain_signs,
    shorten,
    table,
    terminal_text,
    wrap,
    wrap_all,
)
from jaxshard_magic.views.timeline.grid import grid
from jaxshard_magic.views.training import chart

SIGNS = {"error": "x", "warning": "!", "info": "i"}
ROLE_INK = {"params": "\u2588", "optimizer": "\u2593", "batch": "\u259a", "temporaries": "\u2592", "other": "\u2591"}
LINE, BARS = 16, 32  # columns: of a line of positions, of a row of bars at most
BAR = 40  # columns of a bar beside a time, at most
ITEM = 8  # columns of the first word of an item in a list
FIGURES = 30  # columns of the figures of a candidate
BELOW = (" " * 6, " " * 6)  # indentation below a candidate
MARK = "  !"  # behind a row with something wrong


def to_text(parts: Iterable[doc.Part | doc.ChoicePart], width: int) -> str:
    """Return a document as text.

    Args:
        parts: Parts of the document.
        width: Columns of a line.
    """
    blocks = (block for part in parts for block in _blocks(part, width))
    return "\n\n".join(terminal_text(block) for block in blocks if block)


def _blocks(part: doc.Part | doc.ChoicePart, width: int) -> list[list[str]]:
    """Return the lines of a part, in blocks with an empty line between them."""
    if not isinstance(part, doc.Section):
        return [_lines(part, width)]
    if doc.TEXT not in part.shows:
        return []
    title = _words(part.heading(doc.TEXT))
    lead = " ".join([title, *(_words(line) for line in part.about[:1])])
    blocks = [[*(wrap(lead, width) if title else []), *wrap_all(part.about[1:], width)]]
    for one in part.parts:
        if isinstance(one, doc.Section):
            blocks += _blocks(one, width)
        else:
            blocks[-1] += _lines(one, width)
    return blocks


def _lines(part: doc.Block | doc.ChoicePart, width: int) -> list[str]:
    match part:
        case doc.Header():
            return _header(part, width)
        case doc.Paragraph(words, sign):
            return wrap(_words(words), width, f"{SIGNS[sign]} " if sign else "") if words else []
        case doc.Notes(lines, below, shows):
            indents = ("  ", "    ") if below else ("", "")
            return [line for words in lines * (doc.TEXT in shows) for line in wrap(_words(words), width, *indents)]
        case doc.KeyFigures():
            return _key_figures(part, width)
        case doc.Hints():
            return _hints(part, width)
        case doc.Table():
            return _table(part, width)
        case doc.Breakdown():
            return _breakdown(part, width)
        case doc.MemoryBars():
            return _memory(part, width)
        case doc.RowFigure():
            return _row_figure(part, width) if doc.TEXT in part.shows else []
        case doc.ActionLanes(pipeline):
            return grid(pipeline, width)
        case doc.RecordedLanes() | doc.Charts():
            return []
        case doc.Leaves():
            return _leaves(part, width)
        case doc.DecisionPath(path):
            return decision_tree.lines(path, width)
        case doc.Candidates():
            return _candidates(part, width)
        case doc.Commands(lead, lines):
            return [lead, *("    " + printable(line) for line in lines)]


def _words(words: doc.Words) -> str:
    """Return words on one line; names and code keep their signs."""
    return "".join(_span(s.text, s.kind) for s in doc.spans(words))


def _span(text: str, kind: str) -> str:
    if kind == "times":
        return f" x{text}"
    return printable(text) if kind in ("code", "name", "axis") else plain_signs(printable(text))


def _header(part: doc.Header, width: int) -> list[str]:
    first, second = [part.subject, part.typed], [mesh_text(part.mesh), part.devices[0]]
    name = printable(part.name)
    lines = [printable("   ".join(p for p in [*first, *second] if p))]
    if display_width(lines[0]) > width:
        lines = [line for one in (first, second) for line in wrap_wide(printable("   ".join(filter(None, one))), width)]
    if display_width(lines[-1]) + 3 + display_width(name) <= width:
        lines[-1] = pad(lines[-1], width - display_width(name)) + name
        return lines
    return lines + wrap(name, width)


def wrap_wide(text: str, width: int) -> list[str]:
    """Break a text into lines; a text that fits keeps its spaces."""
    return [text] if display_width(text) <= width else wrap(text, width)


def _key_figures(part: doc.KeyFigures, width: int) -> list[str]:
    lines = []
    for f in part.figures:
        first = f"  {f.short:<8}{plain_signs(f.value):>10}   "
        lines += wrap(plain_signs(printable(f.note)), width, first, " " * len(first))
    return lines


def _hints(part: doc.Hints, width: int) -> list[str]:
    lines = []
    for hint in part.hints[: part.shown]:
        message = f"{hint.message} Fix:" if hint.fix else hint.message
        lines += wrap(plain_signs(printable(message)), width, f"{SIGNS.get(hint.level, 'i')} ", "  ")
        # Not wrapped: a broken line could not be pasted.
        lines += ["    " + printable(line) for line in hint.fix]
    rest = part.hints[part.shown :]
    if rest:
        lines.append(f"{len(rest)} more in {part.where}:")
    return lines + [clip(f"  {plain_signs(printable(hint.message))}", width) for hint in rest]


def _breakdown(part: doc.Breakdown, width: int) -> list[str]:
    columns = {
        "part": [shorten(printable(one.kind), 20) for one in part.parts],
        "over": [shorten(printable(one.over), 16) for one in part.parts],
        "time": [plain_signs(one.time) for one in part.parts],
        "share": [one.share_text for one in part.parts],
    }
    _, *lines = table(columns, ("part", "over"))
    room = min(BAR, width - display_width(lines[0]) - 2)
    most = max(one.share for one in part.parts)
    lines = [f"{line}  {bar(one.share / most, room)}" for line, one in zip(lines, part.parts, strict=True)]
    if part.omitted:
        lines.append(f"  {count_text(part.omitted)} more take {plain_signs(part.omitted_text)}")
    return [f"{part.subject}, {plain_signs(part.total)}", *lines]


def _memory(part: doc.MemoryBars, width: int) -> list[str]:
    legend = (f"{ROLE_INK[role]}{SPACE}{role}{SPACE}{size}{SPACE}" for role, size in part.legend.items())
    lines = [*map(plain_signs, wrap(" ".join(legend), width, "  ", "  "))]
    lines += wrap_all(filter(None, [part.scale_note]), width, "  ", "  ")
    labels = [printable(f"{_ids(row.group.devices)} {row.stage}".rstrip()) for row in part.rows]
    values = []
    for i, row in enumerate(part.rows):
        each = " each" * (len(row.group.devices) > 1 and row.group.fullest.peak is not None)
        values.append(plain_signs(row.peak if i else row.peak_of_limit) + each)
    label_width, value_width = max(map(display_width, labels)), max(map(display_width, values))
    room = width - label_width - value_width - 6
    for row, label, value in zip(part.rows, labels, values, strict=True):
        drawn = _memory_bar(row.group.fullest, part.limit, part.full, room)
        lines.append(f"  {pad(label, label_width, 'right')}  {drawn}  {value}")
    return lines + [f"  {part.omitted}"] * bool(part.omitted)


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


def _row_figure(figure: doc.RowFigure, width: int) -> list[str]:
    lines = wrap(plain_signs(printable(figure.lead)), width)
    before = max((display_width(row.name) for row in figure.rows), default=0)
    for row in figure.rows:
        first = f"  {pad(row.name, before)}  {row_drawing(row)}  "
        lines += wrap(plain_signs(printable(row.text)), width, first, " " * (before + 4))
    return lines


def row_drawing(row: doc.FigureRow) -> str:
    """Return the drawing of a row as one line of blocks."""
    if row.bars:
        # Where several bars share a column, the highest of them is drawn.
        n = min(BARS, len(row.bars))
        highest = (max(row.bars[i * len(row.bars) // n : (i + 1) * len(row.bars) // n]) for i in range(n))
        return "".join(_block(share) for share in highest)
    drawn = ["\u00b7"] * LINE
    for area in row.areas:
        # Areas below the top are positions within a ring; a line of text has room for the stored order alone.
        if not area.y:
            first = min(LINE - 1, round(area.x * LINE))
            for i in range(first, max(first + 1, min(LINE, round((area.x + area.width) * LINE)))):
                drawn[i] = "\u2588"
    return "".join(drawn)


def _block(share: float) -> str:
    return chart.BLOCKS[min(len(chart.BLOCKS) - 1, int(share * len(chart.BLOCKS)))] if share else " "


def _leaves(part: doc.Leaves, width: int) -> list[str]:
    lines = wrap(plain_signs(printable(part.sentence)), width)
    lines += ["  " + shorten(printable(f"{p} {much}".rstrip()), width - 2) for p, much in part.leaves[: part.most]]
    left = len(part.leaves) - part.most
    return lines + [f"  and {count_text(left)} more"] * (left > 0)


def _table(part: doc.Table, width: int) -> list[str]:
    """Return the lines of a table. Columns are left out, and then cells cut, until it is no wider than `width`."""
    if part.stacks:
        return _stacked(part, width)
    if part.second:
        return _divided(part, width)
    shown = [i for i, c in enumerate(part.columns) if doc.TEXT in c.shows and width >= c.wide]
    drawn = [i for i in shown if any(isinstance(row.cells[i], (doc.BarCell, doc.CurveCell)) for row in part.rows)]
    listed = [i for i in shown if any(isinstance(row.cells[i], doc.ListCell) for row in part.rows)]
    fills = [i for i in shown if part.columns[i].least and i not in drawn]
    fixed = [i for i in shown if i not in (*drawn, *listed, *fills)]
    cells = {i: [_cell(row.cells[i], part.columns[i], width) for row in part.rows] for i in fixed}

    def widths_of(indices: Iterable[int]) -> dict[int, int]:
        return {i: max(map(display_width, [part.columns[i].heading(doc.TEXT), *cells[i]])) for i in indices}

    def room_left() -> int:
        """Return the columns that all fixed columns leave, beside the column that takes them."""
        widths = widths_of(i for i in cells if i in shown)
        return width - 2 - sum(widths.values()) - 2 * (len(widths) - (not fills))

    least = part.columns[fills[0]].least if fills else 0
    for i in listed:
        room = room_left() + 4 - least if fills else room_left()
        most = min(int(part.columns[i].most * width), room)
        column = (row.cells[i] for row in part.rows)
        cells[i] = [_list(cell, most) for cell in column if isinstance(cell, doc.ListCell)]
    for rank in sorted({part.columns[i].drop for i in shown} - {0}):
        if room_left() >= least:
            break
        shown = [i for i in shown if part.columns[i].drop != rank]
    if room_left() < least:
        for i in fixed:
            cells[i] = [_short(row.cells[i], cell) for row, cell in zip(part.rows, cells[i], strict=True)]
    for i in fills:
        room = room_left()
        cells[i] = [_cell(row.cells[i], part.columns[i], width, room) for row in part.rows]
        if part.title:
            cells[i] = [pad(cell, room) for cell in cells[i]]
    shown = [i for i in shown if i in cells]
    widths = widths_of(shown)
    lines = [_table_line([cells[i][k] for i in shown], shown, part.columns, widths) for k in range(len(part.rows))]
    head = _table_line([part.columns[i].heading(doc.TEXT) for i in shown], shown, part.columns, widths)
    if part.title:
        # The first column with a heading ends the room of the title.
        empty = next(k for k, i in enumerate(shown) if part.columns[i].heading(doc.TEXT))
        start = sum(widths[i] + 2 for i in shown[:empty])
        head = pad(part.title, start) + head[start:]
    lines = [head, *lines]
    for i in drawn:
        room = min(int(part.columns[i].most), width - display_width(lines[0]) - 2)
        if room >= part.columns[i].least:
            drawings = [part.columns[i].heading(doc.TEXT), *(_drawn(row.cells[i], room) for row in part.rows)]
            lines = [f"{line}  {drawing}" for line, drawing in zip(lines, drawings, strict=True)]
    return lines


def _table_line(
    cells: Sequence[str], shown: Sequence[int], columns: Sequence[doc.Column], widths: dict[int, int]
) -> str:
    padded = (
        pad(cell, widths[i], "right" if columns[i].align == "right" else "left")
        for cell, i in zip(cells, shown, strict=True)
    )
    return "  " + "  ".join(padded)


def _cell(cell: doc.AnyCell, column: doc.Column, width: int, room: int | None = None) -> str:
    """Return a cell as text, cut to the room of its column.

    Args:
        cell: Cell of words or of code.
        column: Its column.
        width: Columns of a line.
        room: Columns of the cell at most; None takes those of the column.
    """
    if isinstance(cell, doc.CodeCell):
        most = width if room is None else room
        return clip(cell.instead, most) if cell.instead else code_text(cell.text, cell.callers, most)
    if isinstance(cell, doc.TimeCell):
        return plain_signs(cell.text)
    if not isinstance(cell, doc.WordCell):
        return ""
    text, more = _words(cell.words), _words(cell.more)
    if column.more is not None and width >= column.more_alone:
        text = f"{text}{column.joint}{more:>{column.more}}" if column.more or more else text
    elif column.more_alone:
        text = more or text
    if room is None:
        room = int(column.most if column.most >= 1 else column.most * width) or display_width(text)
    return clip(text, room) if column.from_end else shorten(text, room)


def _short(cell: doc.AnyCell, text: str) -> str:
    return plain_signs(printable(cell.short)) if isinstance(cell, doc.WordCell) and cell.short is not None else text


def _list(cell: doc.ListCell, width: int) -> str:
    """Return a list in `width` columns: with purposes if all of it fits, else its first items and the number of
    others."""
    items = [_item(words) for words, _ in cell.items]
    whole = "  ".join(f"{t} ({jobs})" if jobs else t for t, (_, jobs) in zip(items, cell.items, strict=True))
    if display_width(whole) <= width:
        return whole
    for n in range(len(items), 1, -1):
        candidate = "  ".join([*items[:n], *([f"+{len(items) - n}"] if n < len(items) else [])])
        if display_width(candidate) <= width:
            return candidate
    more = f"  +{len(items) - 1}" if len(items) > 1 else ""
    return clip(items[0], width - len(more)) + more


def _item(words: doc.Words) -> str:
    """Return an item with its first word cut, and without the number of times."""
    first, *rest = doc.spans(words)
    others = "".join(span.text for span in rest if span.kind != "times")
    return f"{shorten(printable(first.text), ITEM)}{printable(others)}"


def _drawn(cell: doc.AnyCell, room: int) -> str:
    if isinstance(cell, doc.BarCell):
        return bar(cell.share, room)
    if isinstance(cell, doc.CurveCell) and (scale := chart.scale_of(cell.scaled)) is not None:
        return chart.blocks(cell.curve, scale, max(c.step[-1] for c in cell.scaled), room)
    return ""


def _stacked(part: doc.Table, width: int) -> list[str]:
    """Return the lines of a table of names, types and sizes; types get lines of their own where names are long."""
    first, second, last = (i for i, c in enumerate(part.columns) if doc.TEXT in c.shows)
    paths, kinds, sizes = (
        [_cell(row.cells[i], part.columns[i], width) for row in part.rows] for i in (first, second, last)
    )
    size_width, kind_width, path_width = (
        max(map(display_width, column), default=0) for column in (sizes, kinds, paths)
    )
    room = width - size_width - 9
    below = path_width + kind_width > room
    if below:
        kind_width, path_width = -2, min(room + 2, path_width)
    # The heading of the sizes may be wider than they are.
    head = part.columns[last].heading(doc.TEXT)
    path_width = max(path_width, display_width(part.title) + 6 - kind_width - size_width)
    lines = [pad(part.title, path_width + kind_width + size_width + 6 - len(head)) + head]
    for row, path, kind, size in zip(part.rows, paths, kinds, sizes, strict=True):
        left = "  " + pad(shorten(path, path_width), path_width) + ("" if below else "  " + pad(kind, kind_width))
        lines.append(f"{left}  {pad(size, size_width, 'right')}{MARK * row.warn}")
        lines += wrap(kind, width, "    ", "    ") if below else []
        if row.below and (row.warn or row.always):
            lines += wrap(_words(row.below), width, "    ", "    ")
    return lines


def _divided(part: doc.Table, width: int) -> list[str]:
    """Return the lines of a table, or of as many below each other as the width requires, each with the first column."""
    # The columns of a star and a space are no part of a name.
    cells = [[_cell(row.cells[i], c, width - 4) for row in part.rows] for i, c in enumerate(part.columns)]
    widths = {i: max(map(display_width, [part.columns[i].head, *column])) for i, column in enumerate(cells)}
    groups = [[*range(1, part.second)], [*range(part.second, len(part.columns))]]
    every = [i for group in groups for i in group]

    def fits(indices: Sequence[int]) -> bool:
        return sum(widths[i] + 2 for i in (0, *indices)) <= width

    if fits(every):
        groups = [every]
    elif not all(map(fits, groups)):
        groups = [[]]
        for i in every:
            if groups[-1] and not fits([*groups[-1], i]):
                groups.append([])
            groups[-1].append(i)
    lines = []
    for group in groups:
        shown = [0, *group]
        rows = [[part.columns[i].head for i in shown], *zip(*(cells[i] for i in shown), strict=True)]
        drawn = [_table_line(row, shown, part.columns, widths) for row in rows]
        stars = (f"*{line[1:]}" if row.front else line for row, line in zip(part.rows, drawn[1:], strict=True))
        lines += [*([""] if lines else []), drawn[0], *stars]
    return lines


def _candidates(part: doc.Candidates, width: int) -> list[str]:
    """Return a table of the candidates; options go below their row where not all of them fit, reasons always."""
    shown = [one for candidates, _ in part.by_reason for one in candidates]
    left = width - FIGURES
    meshes = [clip(plain_signs(printable(mesh_text(one.mesh))), left // 2) for one in shown]
    room = left - max(map(display_width, meshes))
    strategies = [printable(f"{one.strategy} {one.options}".rstrip()) for one in shown]
    below = any(display_width(name) > room for name in strategies)
    if below:
        strategies = [clip(printable(one.strategy), room) for one in shown]
    columns = {
        "strategy": list(map(plain_signs, strategies)),
        "mesh": meshes,
        "at least": [plain_signs(one.bound) for one in shown],
        "needs about": [plain_signs(one.needs) for one in shown],
    }
    head, *rows = table(columns, ("strategy", "mesh"))
    lines, row_iter = [*wrap_all([f"{part.outcome}:"], width), head], iter(rows)
    for candidates, why in part.by_reason:
        for one in candidates:
            lines += [next(row_iter), *wrap_all([one.options] * bool(below and one.options), width, *BELOW)]
        lines += wrap_all([why] * bool(why), width, *BELOW)
    return lines + [f"  and {count_text(part.omitted)} more"] * (part.omitted > 0)
