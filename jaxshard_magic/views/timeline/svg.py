"""A pipeline as inline SVG: each rank's lane with its ideal under it, and what it holds; colours seen on any ground."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from jaxshard_magic.report import Pipeline
from jaxshard_magic.views import svg, words
from jaxshard_magic.views.colours import BOTH
from jaxshard_magic.views.tags import text
from jaxshard_magic.views.timeline import data
from jaxshard_magic.views.timeline.ticks import ticks

WIDTH, NAMES, FIGURES = 860, 72, 56  # px, with the columns at the left and at the right
TOP, BELOW = 18, 18
LANE, IDEAL, HELD = 20, 7, 13  # px of the lanes and of the curve of activations
DENSE = 4000  # actions above which a lane tells the shares of each kind in a column
COLUMNS = 6000  # at most, on all lanes together
INK = "#14171a"
ROOM = 10  # px of an action from which its number has room, and of each further digit
DIGIT = 6
LETTER = 6.2
EDGES = {"I": (True, False), "W": (False, True), "B": (True, True), "F": (False, False)}  # above, below
_NO_EDGES = False, False
EDGE = 2.5


@dataclass(frozen=True)
class Plan:
    """Where things stand: px of a lane, of its ideal, of its curve, of a rank with all of them, and the end of time."""

    lane: float
    ideal: float
    held: float
    rank: float
    end: float

    def x(self, at: float) -> float:
        return NAMES + (WIDTH - NAMES - FIGURES) * (at / self.end if self.end else 0.0)


def drawing(p: Pipeline) -> str:
    """The whole timeline as one `<svg>`, empty without events."""
    height, marks = drawn(p)
    return whole(height, marks, f"Timeline of {words.size_text(p)}") if marks else ""


def whole(height: float, marks: str, label: str) -> str:
    """Marks for a drawing of `WIDTH` as one `<svg>`."""
    w, h = svg.number(WIDTH), svg.number(height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img"'
        f' aria-label="{text(label)}" style="max-width:100%;height:auto"'
        f' font-family="system-ui,sans-serif" font-size="11">{marks}</svg>'
    )


def drawn_lanes(
    lanes: Sequence[Sequence[data.Mark]], names: Sequence[str], figures: Sequence[str], end: float
) -> tuple[float, str]:
    """Lanes of other things than a pipeline's ranks: their height in px, and their marks, none without any lane. Each
    has its name at the left and a figure at the right, until `end` seconds."""
    n = len(lanes)
    lane = LANE if n <= 16 else 8
    plan = Plan(lane, 0, 0, lane + (8 if lane == LANE else 2), end)
    bottom = TOP + plan.rank * n
    if not n or not end:
        return 0, ""
    marks = [*_ticks(plan, "s", bottom), *_frames(plan, n, end), *_lanes(lanes, plan, 0, plan.lane)]
    every = max(1, round(12 / plan.rank))
    for i in range(0, n, every):
        y = TOP + i * plan.rank + plan.lane / 2 + 4
        marks.append(_text(0, y, names[i]) + _text(WIDTH, y, figures[i], "end"))
    return bottom + BELOW / 3, "".join(marks)


def drawn(p: Pipeline) -> tuple[float, str]:
    """The timeline's height in px, and its marks for a drawing of `WIDTH`, none without events."""
    plan, lanes = _plan(p), data.lanes(p, p.events)
    if not plan.end:
        return 0, ""
    bottom = TOP + plan.rank * len(p.ranks)
    marks = [*_axis(p, plan, bottom)]
    if sum(map(len, lanes)) > DENSE:
        marks += _columns(lanes, plan)
    else:
        marks += _lanes(lanes, plan, 0, plan.lane)
        marks += _numbers(lanes, plan)
        marks += _curves(p, lanes, plan)
    if plan.ideal:
        ideal = _lanes(data.lanes(p, p.ideal_events), plan, plan.lane + 2, plan.ideal)
        marks.append(f'<g opacity=".7">{"".join(ideal)}</g>')
    every = max(1, round(12 / plan.rank))
    for rank in range(0, len(p.ranks), every):
        y = TOP + rank * plan.rank + plan.lane / 2 + 4
        share = words.percent_text(p.ranks[rank].bubble)
        marks.append(_text(0, y, words.rank_name(p, rank)) + _text(WIDTH, y, share, "end"))
    return bottom + BELOW, "".join(marks)


def lanes_text(p: Pipeline) -> str:
    """What the drawing's lanes are."""
    plan = _plan(p)
    if len(p.events) > DENSE:
        return "each column is filled by the shares of the kinds in it"
    return words.lanes_text(p, bool(plan.ideal), bool(plan.held))


def kind_mark(kind: str) -> str:
    """A key of the legend."""
    edges = [
        svg.rect(0, y, 14, EDGE, f'fill="{INK}" fill-opacity=".6"')
        for y, there in zip((0, 10 - EDGE), EDGES.get(kind, _NO_EDGES), strict=True)
        if there
    ]
    return svg.drawing(14, 10, "", [svg.rect(0, 0, 14, 10, _fill(kind)), *edges])


def kinds_bar(parts: Sequence[tuple[str, float]], width: float = 64, height: float = 10) -> str:
    """Shares of the width by kind, side by side."""
    x, drawn = 0.0, []
    for kind, share in parts:
        drawn.append(svg.rect(x, 0, max(0.0, share * width), height, _fill(kind)))
        x += share * width
    return svg.drawing(width, height, "", drawn)


def idle_mark() -> str:
    """A piece of a lane in which a rank is idle, for the legend."""
    return svg.drawing(14, 10, "", [f'<rect x=".5" y=".5" width="13" height="9" fill="none" {_RULE}/>'])


_RULE = f'stroke="{BOTH["rule"]}" stroke-opacity=".6"'


def _plan(p: Pipeline) -> Plan:
    """Lanes get thinner, and lose what stands under them, as ranks get more."""
    n = len(p.ranks)
    dense = len(p.events) > DENSE
    ideal = IDEAL if data.has_ideal(p) and n <= 16 and not dense else 0
    held = HELD if n <= 8 and not dense else 0
    lane = LANE if n <= 16 else 8
    gap = 2 if lane < LANE else 8
    return Plan(
        lane, ideal, held, lane + (ideal + 2) * bool(ideal) + (held + 4) * bool(held) + gap, data.end_of(p)
    )


def _fill(kind: str) -> str:
    return f'class="jss-k-{kind}" fill="{BOTH[kind]}"'


def _text(x: float, y: float, said: str, anchor: str = "start") -> str:
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{svg.number(x)}" y="{svg.number(y)}" fill="currentColor"{at}>{text(said)}</text>'


def _axis(p: Pipeline, plan: Plan, bottom: float) -> Iterator[str]:
    """Ticks with their labels, the frames of the lanes, and where the ideal ends."""
    yield from _ticks(plan, p.unit, bottom)
    yield from _frames(plan, len(p.ranks), _end(p))
    last, end = f"{words.source_of_times(p)} end {words.time_text(_end(p), p.unit)}", plan.x(_end(p))
    if plan.ideal:
        x = plan.x(p.makespan[0])
        dashed = 'stroke="currentColor" stroke-dasharray="3 2"'
        yield f'<path d="M{svg.number(x)} {TOP - 4}V{svg.number(bottom)}" {dashed}/>'
        label = f"ideal end {words.time_text(p.makespan[0], p.unit)}"
        if x <= end - LETTER * len(last) - 8:
            yield _text(x, bottom + 12, label, "end")
        else:
            last = f"{label}, {last}"
    yield _text(end, bottom + 12, last, "end")


def _ticks(plan: Plan, unit: str, bottom: float) -> Iterator[str]:
    for at, label in ticks(plan.end, 8, unit):
        x = plan.x(at)
        hair = f'stroke="{BOTH["rule"]}" stroke-opacity=".3"'
        yield f'<path d="M{svg.number(x)} {TOP - 4}V{svg.number(bottom)}" {hair}/>'
        yield _text(x, 10, label, "middle" if at else "start")


def _frames(plan: Plan, lanes: int, end: float) -> Iterator[str]:
    width = plan.x(end) - NAMES
    for rank in range(lanes):
        yield svg.rect(NAMES, TOP + rank * plan.rank, width, plan.lane, f'fill="none" {_RULE}')


def _end(p: Pipeline) -> float:
    return p.makespan[1] if p.makespan[2] is None else p.makespan[2]


def _lanes(lanes: Sequence[Sequence[data.Mark]], plan: Plan, below: float, height: float) -> list[str]:
    """One path for each kind of action, and one for each kind of edge."""
    boxes: dict[str, list[str]] = {}
    edges: list[str] = []
    for rank, lane in enumerate(lanes):
        for mark in lane:
            x, end = plan.x(mark.start), plan.x(mark.end)
            each = height / len(mark.parts)
            for i, (_, kind, _) in enumerate(mark.parts):
                y = TOP + rank * plan.rank + below + i * each
                width = max(0.3, end - x - 0.5)
                boxes.setdefault(kind, []).append(_box(x + 0.25, y, width, each))
                if height >= LANE:
                    edge = EDGE / len(mark.parts)
                    tops = zip((y, y + each - edge), EDGES.get(kind, _NO_EDGES), strict=True)
                    edges += [_box(x + 0.25, top, width, edge) for top, there in tops if there]
    paths = [f'<path d="{"".join(drawn)}" {_fill(kind)}/>' for kind, drawn in boxes.items()]
    return paths + ([f'<path d="{"".join(edges)}" fill="{INK}" fill-opacity=".6"/>'] if edges else [])


def _box(x: float, y: float, width: float, height: float) -> str:
    w = svg.number(width)
    return f"M{svg.number(x)} {svg.number(y)}h{w}v{svg.number(height)}h-{w}z"


def _numbers(lanes: Sequence[Sequence[data.Mark]], plan: Plan) -> Iterator[str]:
    """The microbatches of actions that have room for them."""
    if plan.lane < LANE:
        return
    texts = []
    for rank, lane in enumerate(lanes):
        for mark in lane:
            x, end = plan.x(mark.start), plan.x(mark.end)
            each = plan.lane / len(mark.parts)
            for i, (_, _, microbatch) in enumerate(mark.parts):
                if end - x >= ROOM + DIGIT * (len(str(microbatch)) - 1):
                    y = TOP + rank * plan.rank + (i + 0.5) * each + 3.5
                    at = f'x="{svg.number((x + end) / 2)}" y="{svg.number(y)}"'
                    smaller = "" if len(mark.parts) == 1 else ' font-size="9"'
                    texts.append(f"<text {at}{smaller}>{microbatch}</text>")
    if texts:
        yield f'<g fill="{INK}" font-size="10" text-anchor="middle">{"".join(texts)}</g>'


def _curves(p: Pipeline, lanes: Sequence[Sequence[data.Mark]], plan: Plan) -> Iterator[str]:
    """The activations that each rank holds, on one scale."""
    steps = [data.activations(p, lane) for lane in lanes]
    most = max((count for own in steps for _, count in own), default=0.0)
    if not plan.held or not most:
        return
    path = []
    for rank, own in enumerate(steps):
        base = TOP + rank * plan.rank + plan.rank - 8
        path.append(f"M{NAMES} {svg.number(base)}")
        path += (
            f"H{svg.number(plan.x(at))}V{svg.number(base - count / most * plan.held)}" for at, count in own
        )
        path.append(f"H{svg.number(plan.x(_end(p)))}V{svg.number(base)}")
    fill = 'fill="currentColor" fill-opacity=".08" stroke="currentColor" stroke-opacity=".55"'
    yield f'<path d="{"".join(path)}" {fill}/>'


def _columns(lanes: Sequence[Sequence[data.Mark]], plan: Plan) -> Iterator[str]:
    """Lanes of columns of whole pixels, each filled by the shares of the kinds in it."""
    end = max(lane[-1].end for lane in lanes if lane)
    width = plan.x(end) - NAMES
    step = max(1, ceil(width * len(lanes) / COLUMNS))
    columns = max(1, round(width / step))
    lines: dict[str, list[str]] = {kind: [] for kind in data.KINDS}
    for rank, lane in enumerate(lanes):
        top = TOP + rank * plan.rank
        for at, heights in enumerate(_heights(data.shares(lane, end, columns), plan.lane)):
            x, y = NAMES + (at + 0.5) * step, float(top)
            for kind, height in heights:
                lines[kind].append(f"M{svg.number(x)} {svg.number(y)}v{svg.number(height)}")
                y += height
    for kind, drawn in lines.items():
        if drawn:
            stroke = f'class="jss-s-{kind}" stroke="{BOTH[kind]}" stroke-width="{step}"'
            yield f'<path d="{"".join(drawn)}" {stroke} shape-rendering="crispEdges"/>'


def _heights(shares: Iterable[dict[str, float]], lane: float) -> Iterator[tuple[tuple[str, float], ...]]:
    """Of each column how high each kind stands, to a half of a pixel."""
    for share in shares:
        yield tuple((k, h) for k in data.KINDS if (h := round(2 * lane * share.get(k, 0.0)) / 2))
