"""The figures of a report's tables and charts in each of its views, by what each is of and what it is called there."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import unescape
from typing import Any

from support.figures_told import SHARE, TIME, of_payload

from jaxshard_magic.report import Collective, Report
from jaxshard_magic.report.metrics import CurveTail
from jaxshard_magic.views.format import UNKNOWN, byte_text, seconds_text, share_text
from jaxshard_magic.views.payload import payload
from jaxshard_magic.views.pictures import communication
from jaxshard_magic.views.training.data import label_of
from jaxshard_magic.views.training.payload import update_payload

Figure = tuple[
    str, str, str
]  # of what, what it is called, how it reads: "all-gather over data", "predicted", "14.3 ms"
Table = Callable[[str], Iterable[Figure]]

_SAME = {
    "sent per device": "sent",
    "each": "bytes each",
}  # what heads are called where there is room, and where not
PREDICTED = ", predicted"  # where measured ones stand beside it
_LAST = "first", "least", "most", "last"
_PHASES = "forward", "backward", "recomputed", "update"
_CELL = re.compile(r"<t[hd][ >].*?</t[hd]>", re.DOTALL)


def tabled(report: Report) -> dict[str, dict[tuple[str, str], set[str]]]:
    """The figures that each view tells, by what they are of and what they are called."""
    views = {"text": of_text, "html": of_page, "widget": of_widget, "picture": of_picture, "JSON": of_numbers}
    found: dict[str, dict[tuple[str, str], set[str]]] = {}
    for view, read in views.items():
        found[view] = defaultdict(set)
        for of, called, figure in read(report):
            if figure not in ("", "-", UNKNOWN):
                found[view][" ".join(of.split()), _SAME.get(called, called)].add(_plain(figure))
    return found


def _plain(figure: str) -> str:
    return figure.replace("\u202f", " ").replace("\u2212", "-").replace(">=", "\u2265")


def of_text(report: Report) -> Iterator[Figure]:
    """The tables of the terminal: columns are two spaces apart."""
    yield from _said(report.to_text(100).partition("Predicted step,")[0])
    table: Table | None = None
    for line in report.to_text(100).splitlines():
        if not line.strip():
            table = None
        elif table is not None and not re.match(r" *[\d,]+ more ", line):
            yield from table(line)
        else:
            table = _table(line)


def _table(head: str) -> Table | None:
    heads = _columns(head)
    if heads[:2] == ["collective", "over"]:
        ends = _ends(head, heads[2:])
        return lambda row: _kind(heads, [*_columns(row)[:2], *(_ending(row, end) for end in ends)])
    if heads[0] == "device":
        return lambda row: _named(f"device {_columns(row)[0]}", heads[1:], _columns(row)[1:])
    if heads[0] == "Lines that move data":
        ends = _ends(head, heads[1:-1])
        return lambda row: _named(row.split()[0], heads[1:-1], [_ending(row, end) for end in ends])
    if heads[0] == "Lines by measured time":
        return lambda row: _timed(heads[1:], _columns(row))
    if heads[0].startswith("Predicted step,"):
        return lambda row: _part(_columns(row))
    return (lambda row: _curve(_columns(row)[:5])) if heads[:4] == [*_LAST] else None


def _columns(line: str) -> list[str]:
    return re.split("  +", line.strip())


def _ends(line: str, heads: Sequence[str]) -> list[int]:
    """Where the heads of figures end, and so do the figures."""
    ends = [0]
    for head in heads:
        ends.append(line.index(f"  {head}", ends[-1]) + 2 + len(head))
    return ends[1:]


def _ending(row: str, end: int) -> str:
    return _columns(row[:end])[-1] if row[end - 1 : end].strip() else ""


def of_page(report: Report) -> Iterator[Figure]:
    """The tables of the page without script."""
    page = re.sub(r"<svg.*?</svg>", " ", report.to_html(), flags=re.DOTALL)
    for table in re.findall(r"<table.*?</table>", page, flags=re.DOTALL):
        head, _, body = table.partition("</thead>")
        heads, rows = _cells(head), [_cells(row) for row in re.findall("<tr>.*?</tr>", body, flags=re.DOTALL)]
        yield from (figure for row in rows for figure in _row(heads, row))
    yield from _said(" ".join(_cells(f"<td>{page}</td>")))


def _said(words: str) -> Iterator[Figure]:
    """What sentences tell of a kind of collective, in the verdict, below the bar of the step and in hints."""
    words = " ".join(words.split())
    over = r"(?P<kind>[a-z-]+?)s? over (?P<axes>\w+(?:(?: and |\+)\w+)*)"
    for told in (
        rf"(?P<share>{SHARE}) of the predicted step is {over}",
        rf"(?:most|part) by {over} \((?P<time>{TIME})",
        rf"(?P<kind>[a-z-]+-[a-z]+) (?P<axes>\w+) (?P<share>{SHARE}) (?P<time>{TIME})",
    ):
        for m in re.finditer(told, words):
            found = m.groupdict()
            of = f"{m['kind']} over {m['axes'].replace(' and ', '+')}"
            yield of, "of the predicted step", found.get("share") or ""
            yield of, "predicted", found.get("time") or ""


def _cells(row: str) -> list[str]:
    return [" ".join(re.split(" +", unescape(re.sub(r"<[^>]+>", " ", c)).strip())) for c in _CELL.findall(row)]


def _row(heads: Sequence[str], cells: Sequence[str]) -> Iterable[Figure]:
    if heads[:2] == ["collective", "over"]:
        return _kind(heads, cells)
    if heads[:2] == ["line", "source"] and "sent" in heads:
        return _named(cells[0], heads[2:], cells[2:])
    if heads[0] == "device" and "moving" in heads:
        return _named(f"device {cells[0]}", heads[1:], cells[1:])
    return _curve(cells) if heads[1:] == [*_LAST] else ()


def _kind(heads: Sequence[str], cells: Sequence[str]) -> Iterator[Figure]:
    """Of the collectives of one kind; in a table of measured ones all is measured that is not told to be predicted."""
    of = f"{cells[0]} over {'+'.join(cells[1].split())}" if len(cells) > 1 else ""
    measured = "reached" in heads or "waiting" in heads
    for called, cell in _pairs(heads[2:], cells[2:]):
        if measured:
            called = called.removesuffix(PREDICTED) if called.endswith(PREDICTED) else f"{called}, measured"
        yield of, called, cell


def _named(of: str, heads: Sequence[str], cells: Sequence[str]) -> Iterator[Figure]:
    yield from ((of, called, cell) for called, cell in _pairs(heads, cells))


def _pairs(heads: Sequence[str], cells: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Heads and their cells; bars have no head, and a row may lack its last cells."""
    yield from ((h, c) for h, c in zip(heads, cells, strict=False) if h and h != "collectives")


def _timed(heads: Sequence[str], cells: Sequence[str]) -> Iterator[Figure]:
    own = cells[-len(heads) :]
    if own[0] in _PHASES:
        yield from _named(f"{own[0]} of {cells[0].partition(' from ')[0]}", heads[1:], own[1:])


def _part(cells: Sequence[str]) -> Iterator[Figure]:
    """Of a part of the predicted step, `all-gather  data  14.3 ms  31%` or `compute  17.6 ms  38%`."""
    at = next(k for k, cell in enumerate(cells) if cell.endswith("%"))
    of = f"{cells[0]} over {cells[1]}" if at == 3 else cells[0]
    yield from _named(of, ("predicted", "of the predicted step"), cells[at - 1 : at + 1])


def _curve(cells: Sequence[str]) -> Iterator[Figure]:
    if len(cells) == 5:
        yield from _named(f"curve {cells[0]}", _LAST, cells[1:])


def of_widget(report: Report) -> Iterator[Figure]:
    """The figures that the widget is given, and what it makes of numbers."""
    data = payload(report)
    axes = [name for name, _ in data["mesh"]["axes"]]
    yield from _said(of_payload(data))
    time, moved = data["time"], data["communication"]
    for kind, over, seconds, took in time["parts"][time["own"] :] if time and _all_known(time, axes) else ():
        yield _over(kind, over, axes), "predicted", took
        yield _over(kind, over, axes), "of the predicted step", share_text(seconds / time["total"])
    if measured := data["measured"]:
        for name, _, *cells in measured["rows"]:
            yield from _timed(measured["heads"][2:], [name, *cells])
        for heads, rows in measured["tables"]:
            yield from (figure for row in rows for figure in _row(heads, row))
    lines: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in moved["rows"] if moved else ():
        lines[row["short"] or ""].append(row)
    for name, rows in lines.items():
        if name and all(row["exact"] for row in rows):
            yield name, "sent", byte_text(sum(row["wire_bytes"] for row in rows))
            if time and all(row["seconds"] is not None for row in rows):
                yield name, "predicted", seconds_text(sum(row["seconds"] for row in rows))
    if training := data["training"]:
        yield from (figure for row in training["rows"] for figure in _curve(row))
        for chart in training["charts"]:
            yield f"curve {chart['label']}", "last", chart["value"]
    for curve in _live(report):
        yield f"curve {curve['label']}", "last", curve["value"]


def _all_known(time: Mapping[str, Any], axes: Sequence[str]) -> bool:
    return all(set(over or ()) <= set(range(len(axes))) for _, over, *_ in time["parts"])


def _over(kind: str, over: Sequence[int] | None, axes: Sequence[str]) -> str:
    return f"{kind} over {'+'.join(axes[k] for k in over)}" if over else kind


def _live(report: Report) -> list[dict[str, Any]]:
    """The curves as a live view has them at the loop's end."""
    curves = report.metrics.curves if report.metrics else ()
    return update_payload(0, [CurveTail(curve, 0, 1) for curve in curves], "", None)["curves"]


def of_picture(report: Report) -> Iterator[Figure]:
    """The rows of the picture of what is sent: texts of one height, from the left to the right."""
    if report.collectives is None:
        return
    rows: dict[float, list[tuple[float, str]]] = defaultdict(list)
    for x, y, text in re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', communication(report, "light")):
        rows[float(y)].append((float(x), unescape(re.sub(r"<[^>]+>", "", text)).strip()))
    heads: list[str] = []
    for _, row in sorted(rows.items()):
        cells = [text for _, text in sorted(row)]
        if "sent per device" in cells:
            heads = cells
        elif heads[:2] == ["over", "count"] and len(cells) == 5:
            yield from _kind(["collective", *heads], cells)
        elif heads[:1] == ["line"] and len(cells) == 4:
            yield from _named(cells[0], heads[1:], cells[2:])


def of_numbers(report: Report) -> Iterator[Figure]:
    """The sums of the numbers that `to_json` writes."""
    read = Report.from_json(report.to_json())
    kinds: dict[str, list[Collective]] = defaultdict(list)
    for c in read.collectives or ():
        kinds[f"{c.kind} over {'+'.join(c.axes or ())}"].append(c)
    timing = read.timing
    for of, rows in kinds.items():
        if not of.endswith(" ") and all(c.exact for c in rows):
            yield of, "count", f"{sum(c.count for c in rows):,}"
            yield of, "sent", byte_text(sum(c.wire_bytes for c in rows))
            if timing and timing.predicted_step_s:
                waits = sum(c.waited or 0.0 for c in rows)
                yield of, "predicted", seconds_text(waits)
                yield of, "on the links", seconds_text(sum(c.seconds or 0.0 for c in rows))
                yield of, "of the predicted step", share_text(waits / timing.predicted_step_s)
    for curve in read.metrics.curves if read.metrics else ():
        if curve.unit is None and curve.source == "step":
            yield f"curve {label_of(curve)}", "first", f"{curve.first:.4g}"
