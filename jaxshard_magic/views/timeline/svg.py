"""Timelines as inline SVG: a pipeline with a lane for each rank, its ideal form below, and activations held; and one
recorded step with a lane for each device, painted by phase and kind.

Colours are legible on light and dark backgrounds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from jaxshard_magic.report import Measured, Pipeline
from jaxshard_magic.views import measured as spent
from jaxshard_magic.views import svg, words
from jaxshard_magic.views.colours import BOTH
from jaxshard_magic.views.format import count_text
from jaxshard_magic.views.html_tags import escaped
from jaxshard_magic.views.timeline import data
from jaxshard_magic.views.timeline.data import ticks

WIDTH, NAMES, FIGURES = 860, 72, 56  # px: the whole, the column of names, the column of figures
TOP, BELOW = 18, 18
LANE, IDEAL, HELD = 20, 7, 13  # px: heights of lanes and of the curve of activations
DENSE = 4000  # actions above which columns of shares are drawn
COLUMNS = 6000  # columns on all lanes together, at most
INK = "#14171a"
ROOM = 10  # px of an action with room for one digit
DIGIT = 6  # px of a further digit
LETTER = 6.2  # px, mean width of a letter
EDGES = {"I": (True, False), "W": (False, True), "B": (True, True), "F": (False, False)}  # (above, below)
_NO_EDGES = False, False
EDGE = 2.5


@dataclass(frozen=True)
class TimelineLayout:
    """Sizes of a timeline in px.

    Attributes:
        lane_height: Height of a lane.
        ideal_height: Height of the ideal lane; 0 for none.
        curve_height: Height of the curve of activations; 0 for none.
        rank_height: Height of a rank, with all of these and a gap.
        end: Time at the right end.
    """

    lane_height: float
    ideal_height: float
    curve_height: float
    rank_height: float
    end: float

    def x(self, at: float) -> float:
        return NAMES + (WIDTH - NAMES - FIGURES) * (at / self.end if self.end else 0.0)


def timeline_svg(p: Pipeline) -> str:
    """Return the timeline as one `<svg>`; empty without events."""
    height, marks = timeline_marks(p)
    return wrap_marks(height, marks, f"Timeline of {words.size_text(p)}") if marks else ""


def wrap_marks(height: float, marks: str, label: str) -> str:
    """Wrap marks in one `<svg>` of width `WIDTH`.

    Args:
        height: Height in px.
        marks: SVG.
        label: Text for screen readers.
    """
    w, h = svg.coordinate(WIDTH), svg.coordinate(height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img"'
        f' aria-label="{escaped(label)}" style="max-width:100%;height:auto"'
        f' font-family="system-ui,sans-serif" font-size="11">{marks}</svg>'
    )


def lane_marks(
    lanes: Sequence[Sequence[data.LaneEvent]], names: Sequence[str], figures: Sequence[str], end: float
) -> tuple[float, str]:
    """Draw lanes of something else than a pipeline's ranks, such as devices.

    Args:
        lanes: Events of each lane, in seconds.
        names: Text left of each lane.
        figures: Text right of each lane.
        end: Seconds at the right end.

    Returns:
        Height in px, and marks for a drawing of width `WIDTH`; (0, "") without lanes.
    """
    n = len(lanes)
    lane = LANE if n <= 16 else 8
    plan = TimelineLayout(lane, 0, 0, lane + (8 if lane == LANE else 2), end)
    bottom = TOP + plan.rank_height * n
    if not n or not end:
        return 0, ""
    marks = [*_ticks(plan, "s", bottom), *_frames(plan, n, end), *_lanes(lanes, plan, 0, plan.lane_height)]
    every = max(1, round(12 / plan.rank_height))
    for i in range(0, n, every):
        y = TOP + i * plan.rank_height + plan.lane_height / 2 + 4
        marks.append(_text(0, y, names[i]) + _text(WIDTH, y, figures[i], "end"))
    return bottom + BELOW / 3, "".join(marks)


def timeline_marks(p: Pipeline) -> tuple[float, str]:
    """Return the height of the timeline in px, and its marks for a drawing of width `WIDTH`; no marks without
    events."""
    plan, lanes = _plan(p), data.lanes(p, p.events)
    if not plan.end:
        return 0, ""
    bottom = TOP + plan.rank_height * len(p.ranks)
    marks = [*_axis(p, plan, bottom)]
    if sum(map(len, lanes)) > DENSE:
        # Columns bound the size of the drawing, however many actions there are.
        marks += _columns(lanes, plan)
    else:
        marks += _lanes(lanes, plan, 0, plan.lane_height)
        marks += _numbers(lanes, plan)
        marks += _curves(p, lanes, plan)
    if plan.ideal_height:
        ideal = _lanes(data.lanes(p, p.ideal_events), plan, plan.lane_height + 2, plan.ideal_height)
        marks.append(f'<g opacity=".7">{"".join(ideal)}</g>')
    every = max(1, round(12 / plan.rank_height))
    for rank in range(0, len(p.ranks), every):
        y = TOP + rank * plan.rank_height + plan.lane_height / 2 + 4
        share = words.percent_text(p.ranks[rank].bubble)
        marks.append(_text(0, y, words.rank_name(p, rank)) + _text(WIDTH, y, share, "end"))
    return bottom + BELOW, "".join(marks)


def lanes_text(p: Pipeline) -> str:
    """Return a legend of the lanes in words."""
    plan = _plan(p)
    if len(p.events) > DENSE:
        return "each column is filled by the shares of the kinds in it"
    return words.lanes_text(p, bool(plan.ideal_height), bool(plan.curve_height))


def kind_mark(kind: str) -> str:
    """Return the mark of one kind of action for the legend."""
    edges = [
        svg.rect(0, y, 14, EDGE, f'fill="{INK}" fill-opacity=".6"')
        for y, there in zip((0, 10 - EDGE), EDGES.get(kind, _NO_EDGES), strict=True)
        if there
    ]
    return svg.drawing(14, 10, "", [svg.rect(0, 0, 14, 10, _fill(kind)), *edges])


def kinds_bar(parts: Sequence[tuple[str, float]], width: float = 64, height: float = 10) -> str:
    """Return a bar with the share of each kind.

    Args:
        parts: (kind, share of the width), from left to right.
        width: Width in px.
        height: Height in px.
    """
    x, drawn = 0.0, []
    for kind, share in parts:
        drawn.append(svg.rect(x, 0, max(0.0, share * width), height, _fill(kind)))
        x += share * width
    return svg.drawing(width, height, "", drawn)


def idle_mark() -> str:
    """Return the mark of idle time for the legend."""
    return svg.drawing(14, 10, "", [f'<rect x=".5" y=".5" width="13" height="9" fill="none" {_RULE}/>'])


_RULE = f'stroke="{BOTH["rule"]}" stroke-opacity=".6"'


def _plan(p: Pipeline) -> TimelineLayout:
    """Return the sizes for a pipeline. With more ranks lanes get thinner, and lose the ideal lane and the curve."""
    n = len(p.ranks)
    dense = len(p.events) > DENSE
    ideal = IDEAL if data.has_ideal(p) and n <= 16 and not dense else 0
    held = HELD if n <= 8 and not dense else 0
    lane = LANE if n <= 16 else 8
    gap = 2 if lane < LANE else 8
    return TimelineLayout(
        lane, ideal, held, lane + (ideal + 2) * bool(ideal) + (held + 4) * bool(held) + gap, data.end_of(p)
    )


def _fill(kind: str) -> str:
    return f'class="jss-k-{kind}" fill="{BOTH[kind]}"'


def _text(x: float, y: float, said: str, anchor: str = "start") -> str:
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{svg.coordinate(x)}" y="{svg.coordinate(y)}" fill="currentColor"{at}>{escaped(said)}</text>'


def _axis(p: Pipeline, plan: TimelineLayout, bottom: float) -> Iterator[str]:
    """Yield ticks with labels, frames of the lanes, and the end of the ideal form."""
    yield from _ticks(plan, p.unit, bottom)
    yield from _frames(plan, len(p.ranks), _end(p))
    last, end = f"{words.source_of_times(p)} end {words.time_text(_end(p), p.unit)}", plan.x(_end(p))
    if plan.ideal_height:
        x = plan.x(p.makespan[0])
        dashed = 'stroke="currentColor" stroke-dasharray="3 2"'
        yield f'<path d="M{svg.coordinate(x)} {TOP - 4}V{svg.coordinate(bottom)}" {dashed}/>'
        label = f"ideal end {words.time_text(p.makespan[0], p.unit)}"
        if x <= end - LETTER * len(last) - 8:
            yield _text(x, bottom + 12, label, "end")
        else:
            # Two labels would overlap here, so they become one.
            last = f"{label}, {last}"
    yield _text(end, bottom + 12, last, "end")


def _ticks(plan: TimelineLayout, unit: str, bottom: float) -> Iterator[str]:
    for at, label in ticks(plan.end, 8, unit):
        x = plan.x(at)
        hair = f'stroke="{BOTH["rule"]}" stroke-opacity=".3"'
        yield f'<path d="M{svg.coordinate(x)} {TOP - 4}V{svg.coordinate(bottom)}" {hair}/>'
        yield _text(x, 10, label, "middle" if at else "start")


def _frames(plan: TimelineLayout, lanes: int, end: float) -> Iterator[str]:
    width = plan.x(end) - NAMES
    for rank in range(lanes):
        yield svg.rect(NAMES, TOP + rank * plan.rank_height, width, plan.lane_height, f'fill="none" {_RULE}')


def _end(p: Pipeline) -> float:
    return p.makespan[1] if p.makespan[2] is None else p.makespan[2]


def _lanes(lanes: Sequence[Sequence[data.LaneEvent]], plan: TimelineLayout, below: float, height: float) -> list[str]:
    """Return one path for each kind of action, and one for all edges.

    Args:
        lanes: Events of each lane.
        plan: Sizes.
        below: Px from the top of a rank.
        height: Height of an action in px.
    """
    boxes: dict[str, list[str]] = {}
    edges: list[str] = []
    for rank, lane in enumerate(lanes):
        for mark in lane:
            x, end = plan.x(mark.start), plan.x(mark.end)
            each = height / len(mark.actions)
            for i, (_, kind, _) in enumerate(mark.actions):
                y = TOP + rank * plan.rank_height + below + i * each
                # Actions shorter than a pixel stay visible; the half pixel separates neighbours.
                width = max(0.3, end - x - 0.5)
                boxes.setdefault(kind, []).append(_box(x + 0.25, y, width, each))
                if height >= LANE:
                    edge = EDGE / len(mark.actions)
                    tops = zip((y, y + each - edge), EDGES.get(kind, _NO_EDGES), strict=True)
                    edges += [_box(x + 0.25, top, width, edge) for top, there in tops if there]
    paths = [f'<path d="{"".join(drawn)}" {_fill(kind)}/>' for kind, drawn in boxes.items()]
    return paths + ([f'<path d="{"".join(edges)}" fill="{INK}" fill-opacity=".6"/>'] if edges else [])


def _box(x: float, y: float, width: float, height: float) -> str:
    w = svg.coordinate(width)
    return f"M{svg.coordinate(x)} {svg.coordinate(y)}h{w}v{svg.coordinate(height)}h-{w}z"


def _numbers(lanes: Sequence[Sequence[data.LaneEvent]], plan: TimelineLayout) -> Iterator[str]:
    """Yield the microbatches of all actions with room for a number."""
    if plan.lane_height < LANE:
        return
    texts = []
    for rank, lane in enumerate(lanes):
        for mark in lane:
            x, end = plan.x(mark.start), plan.x(mark.end)
            each = plan.lane_height / len(mark.actions)
            for i, (_, _, microbatch) in enumerate(mark.actions):
                if end - x >= ROOM + DIGIT * (len(str(microbatch)) - 1):
                    y = TOP + rank * plan.rank_height + (i + 0.5) * each + 3.5
                    at = f'x="{svg.coordinate((x + end) / 2)}" y="{svg.coordinate(y)}"'
                    smaller = "" if len(mark.actions) == 1 else ' font-size="9"'
                    texts.append(f"<text {at}{smaller}>{microbatch}</text>")
    if texts:
        yield f'<g fill="{INK}" font-size="10" text-anchor="middle">{"".join(texts)}</g>'


def _curves(p: Pipeline, lanes: Sequence[Sequence[data.LaneEvent]], plan: TimelineLayout) -> Iterator[str]:
    """Yield the activations held by each rank, all on one scale."""
    steps = [data.held_activations(p, lane) for lane in lanes]
    most = max((count for own in steps for _, count in own), default=0.0)
    if not plan.curve_height or not most:
        return
    path = []
    for rank, own in enumerate(steps):
        base = TOP + rank * plan.rank_height + plan.rank_height - 8
        path.append(f"M{NAMES} {svg.coordinate(base)}")
        path += (
            f"H{svg.coordinate(plan.x(at))}V{svg.coordinate(base - count / most * plan.curve_height)}"
            for at, count in own
        )
        path.append(f"H{svg.coordinate(plan.x(_end(p)))}V{svg.coordinate(base)}")
    fill = 'fill="currentColor" fill-opacity=".08" stroke="currentColor" stroke-opacity=".55"'
    yield f'<path d="{"".join(path)}" {fill}/>'


def _columns(lanes: Sequence[Sequence[data.LaneEvent]], plan: TimelineLayout) -> Iterator[str]:
    """Yield lanes of columns in whole pixels, each filled by the shares of the kinds of actions."""
    end = max(lane[-1].end for lane in lanes if lane)
    width = plan.x(end) - NAMES
    step = max(1, ceil(width * len(lanes) / COLUMNS))
    columns = max(1, round(width / step))
    lines: dict[str, list[str]] = {kind: [] for kind in data.KINDS}
    for rank, lane in enumerate(lanes):
        top = TOP + rank * plan.rank_height
        for at, heights in enumerate(_heights(data.kind_shares(lane, end, columns), plan.lane_height)):
            x, y = NAMES + (at + 0.5) * step, float(top)
            for kind, height in heights:
                lines[kind].append(f"M{svg.coordinate(x)} {svg.coordinate(y)}v{svg.coordinate(height)}")
                y += height
    for kind, drawn in lines.items():
        if drawn:
            stroke = f'class="jss-s-{kind}" stroke="{BOTH[kind]}" stroke-width="{step}"'
            # Columns are whole pixels: antialiasing would show seams between them.
            yield f'<path d="{"".join(drawn)}" {stroke} shape-rendering="crispEdges"/>'


def _heights(shares: Iterable[dict[str, float]], lane: float) -> Iterator[tuple[tuple[str, float], ...]]:
    """Yield for each column the height of each kind, to half a pixel."""
    for share in shares:
        yield tuple((k, h) for k in data.KINDS if (h := round(2 * lane * share.get(k, 0.0)) / 2))


def recorded_step_svg(m: Measured) -> str:
    """Return one typical step as one `<svg>`; empty without lanes."""
    height, marks = recorded_step_marks(m)
    label = f"One recorded step in lanes, a device each, {len(m.lanes)} of {m.of_devices}"
    return wrap_marks(height, marks, label) if marks else ""


def recorded_step_marks(m: Measured) -> tuple[float, str]:
    """Return the height of the lanes in px, and their marks; no marks without lanes."""
    names = [f"device {lane.device}" for lane in m.lanes]
    return lane_marks(spent.lane_events(m), names, spent.idle_shares(m), spent.lanes_end(m))


def recorded_step_legend(m: Measured) -> list[str]:
    """Return the entries of the legend as HTML."""
    keys = [f"{kind_mark(kind)} {escaped(words.TIME_KINDS[kind])}" for kind in spent.lane_letters(m)]
    lanes = "" if len(m.lanes) == m.of_devices else f", {len(m.lanes)} of {count_text(m.of_devices)} devices"
    about = f"one typical step{lanes}; at the right the share of it that is idle"
    return [*keys, f"{idle_mark()} idle", about]
