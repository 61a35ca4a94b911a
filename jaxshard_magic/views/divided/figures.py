"""Experts, positions and the turns of a ring as figures: rows of a name, a drawing and words, laid out once for all
views."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from jaxshard_magic.places import in_words
from jaxshard_magic.report import Experts, Load, Positions, Report, Ring
from jaxshard_magic.report.divided import Part, parts_of
from jaxshard_magic.report.parts import part_at
from jaxshard_magic.views.format import byte_text, count_text, runs, share_text

ROWS = 8  # of a figure
NAMED = 4  # devices that a way names
FLAT, TALL = 10, 34  # px
OTHER, FAINT = 0.6, 0.3  # opacity: of every second device, and of what is dropped
WORK = {
    "places": "Every expert multiplies all its places, those without a token as well",
    "sorted": "An expert multiplies the rows that chose it",
    "all": "Every expert multiplies all tokens, whoever chose it",
}
HOW = {
    "gather": "attention, where there is any, gathers keys and values of all",
    "heads": "attention has its heads divided instead",
    "ring": "keys and values go round in a ring",
}
UNCOUNTED = (
    "The rows of each were not counted: a cell's first call does that on one host, for a step that calls no Python, "
    "where it takes no more memory than the step."
)


@dataclass(frozen=True)
class Area:
    """A rectangle of a drawing, whose sides are 1, from its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    opacity: float = 1.0


@dataclass(frozen=True)
class Row:
    """`bars`: of a row of bars the height of each, 0 to 1; empty where `areas` are places on a line."""

    name: str
    areas: tuple[Area, ...]
    text: str
    bars: tuple[float, ...] = ()


@dataclass(frozen=True)
class Figure:
    """`lead`: a sentence or more; `axis`: whose hue it has; `rows` are `height` px high."""

    lead: str
    axis: str
    rows: tuple[Row, ...] = ()
    height: int = FLAT


def layout_figures(report: Report) -> list[Figure]:
    """What the layout view shows beside arrays: which device has which experts, how many rows each gets, and which
    positions are where."""
    found: list[Figure] = []
    for experts in report.experts:
        found += [_held(report, experts), *_loads(report, experts)]
    return [*found, *(_positions(report, one) for one in report.positions)]


def turn_figures(report: Report) -> list[Figure]:
    """The turns of each ring of a step, as its first device sees them."""
    return [_turns(report, one, ring) for one in report.positions for ring in one.rings]


def held_lines(report: Report) -> list[str]:
    """What a device holds of keys and values while a ring runs: of those of a size once."""
    rings = {(ring.bytes, ring.gradients): ring for one in report.positions for ring in one.rings}
    return [_in_flight(ring) for ring in rings.values()]


def along(report: Report, axes: Sequence[str]) -> list[list[int]]:
    """The devices at each place along certain axes of the mesh, in order."""
    mesh = report.mesh
    places: list[list[int]] = [[] for _ in range(prod(mesh.axes[a] for a in axes))]
    for i, device in enumerate(mesh.numbers):
        places[part_at(mesh.place(i), axes, mesh.axes)].append(device)
    return places


def _held(report: Report, experts: Experts) -> Figure:
    places = along(report, experts.axes)
    each = experts.number // len(places)
    rows = [
        Row(
            _devices(devices),
            (Area(d / len(places), 0, 1 / len(places), 1),),
            _span("expert", d * each, each),
        )
        for d, devices in enumerate(places[:ROWS])
    ]
    over = "+".join(experts.axes)
    lead = f"{count_text(experts.number)} experts over {over}, {count_text(each)} on each device along it."
    return Figure(f"{lead} {WORK[experts.work]}.{_drawn_of(len(places))}", experts.axes[0], tuple(rows))


def _loads(report: Report, experts: Experts) -> Iterator[Figure]:
    """A figure for the layers that choose alike, of one line."""
    devices = len(along(report, experts.axes))
    numbered = list(enumerate(experts.layers))

    def alike(layer: tuple[int, Load]) -> tuple:
        load = layer[1]
        return load.file, load.line, load.tokens, load.best, load.places, load.groups, load.chosen is None

    for _, group in groupby(numbered, alike):
        layers = list(group)
        first = layers[0][1]
        lead = f"{count_text(first.tokens)} tokens choose {_experts(first.best)} each"
        lead += f" at {in_words(first.file, first.line)}" if first.line is not None else ""
        if first.places is not None:
            lead += f"; an expert has {count_text(first.places)} places"
            if first.groups > 1:
                each = count_text(first.places // first.groups)
                lead += f", {each} in each of {count_text(first.groups)} groups"
        if first.chosen is None:
            yield Figure(f"{lead}. {UNCOUNTED}", experts.axes[0])
            continue
        lead += ". Rows of each expert on the first batch, beside the mean; shades tell devices apart."
        if len(layers) > ROWS:
            lead += f" The {ROWS} most uneven of {count_text(len(layers))} layers are drawn."
            layers = sorted(
                sorted(layers, key=lambda layer: -_uneven(layer[1]))[:ROWS], key=lambda layer: layer[0]
            )
        scale = max(max(load.chosen or (0,)) for _, load in layers) or 1
        name = "layer {}" if len(experts.layers) > 1 else "rows"
        rows = (_load(name.format(i), load, devices, scale) for i, load in layers)
        yield Figure(lead, experts.axes[0], tuple(rows), TALL)


def _uneven(load: Load) -> float:
    """What the busiest expert has, of all that was chosen."""
    chosen = load.chosen or (0,)
    return max(chosen) / (sum(chosen) or 1)


def _load(name: str, load: Load, devices: int, scale: int) -> Row:
    chosen, kept = load.chosen or (), load.kept or load.chosen or ()
    n, areas = len(chosen), list[Area]()
    for e, (rows, stay) in enumerate(zip(chosen, kept, strict=True)):
        opacity = OTHER if e * devices // n % 2 else 1.0
        x, width = (e + 0.08) / n, 0.84 / n
        areas.append(Area(x, 1 - stay / scale, width, stay / scale, opacity))
        if stay < rows:
            areas.append(Area(x, 1 - rows / scale, width, (rows - stay) / scale, FAINT))
    mean = sum(chosen) / n
    areas.append(Area(0, 1 - mean / scale, 1, 1 / TALL, FAINT))
    return Row(name, tuple(areas), load_text(load), tuple(rows / scale for rows in chosen))


def load_text(load: Load) -> str:
    """`most to expert 6: 65 rows, 1.35 times the mean; 4 of 384 dropped (1.0%), 50% of the places empty`."""
    chosen = load.chosen or ()
    total, top = sum(chosen), max(chosen, default=0)
    if not total:
        return "no row for any"
    said = f"most to expert {chosen.index(top)}: {count_text(top)} rows, {top * len(chosen) / total:.2f} times the mean"
    if load.dropped is not None:
        share = f" ({share_text(load.dropped / total)})" if load.dropped else ""
        said += f"; {count_text(load.dropped)} of {count_text(total)} dropped{share}"
    return said + (f", {share_text(load.empty)} of the places empty" if load.empty is not None else "")


def _positions(report: Report, one: Positions) -> Figure:
    places, over = along(report, one.axes), "+".join(one.axes)
    ring = next((ring for ring in one.rings if ring.zigzag), None)
    lie, dealt = parts_of(one, len(places)), parts_of(one, len(places), ring)
    rows = []
    for devices, own, while_runs in zip(places[:ROWS], lie, dealt, strict=False):
        text, top = f"positions {_listed(own)}", 1.0 if ring is None else 0.46
        areas = [Area(a / one.number, 0, (b - a) / one.number, top) for a, b in own]
        if ring is not None:
            text += f"; in the ring {_listed(while_runs)}"
            areas += [Area(a / one.number, 0.54, (b - a) / one.number, 0.46, OTHER) for a, b in while_runs]
        rows.append(Row(_devices(devices), tuple(areas), text))
    each = one.number // len(places)
    lead = f"{count_text(one.number)} positions over {over}, {count_text(each)} on each device along it; "
    if ring is not None:
        lead += "a causal ring deals them out zig-zag, so that all devices see as many keys."
    else:
        lead += HOW[one.attention] + "."
    return Figure(lead + _drawn_of(len(places)), one.axes[0], tuple(rows))


def _turns(report: Report, one: Positions, ring: Ring) -> Figure:
    places = along(report, one.axes)
    first, dealt = [devices[0] for devices in places], parts_of(one, len(places), ring)
    where = f" at {in_words(ring.file, ring.line)}" if ring.line is not None else ""
    often = f", {count_text(ring.count)} times a step" if ring.count > 1 else ""
    sent = ring.turns - 1
    turns = f"each of {count_text(sent)} turns" if sent > 1 else "its one turn"
    lead = (
        f"Attention{where} as a ring over {'+'.join(one.axes)}{often}. {_way(first)}: at {turns} forward a device "
        f"sends keys and values to the next, {byte_text(ring.bytes)}"
    )
    if ring.gradients is not None:
        back = byte_text(ring.gradients)
        lead += f"; backward the same, and {back} of their gradients behind them, at the last turn home"
    rows = []
    for turn in range(min(ring.turns, ROWS)):
        whose = -turn % len(first)
        areas = tuple(Area(a / one.number, 0, (b - a) / one.number, 1) for a, b in dealt[whose])
        own = "its own keys" if not turn else f"those of device {first[whose]}"
        name = "at first" if not turn else f"turn {turn}"
        rows.append(Row(name, areas, f"device {first[0]} has {own}: {_listed(dealt[whose])}"))
    return Figure(f"{lead}.{_drawn_of(ring.turns, 'turns')}", one.axes[0], tuple(rows))


def _in_flight(ring: Ring) -> str:
    """What a device has of keys and values while a ring runs."""
    has = byte_text(ring.bytes)
    said = f"In a ring a device has keys and values of one device at a time, {has}, and as much on its way"
    return said + (
        f"; backward {byte_text(ring.gradients)} of gradients with each." if ring.gradients else "."
    )


def _way(devices: Sequence[int]) -> str:
    """`0 → 1 → 2 → 3 → 0`."""
    named = [str(d) for d in devices]
    if len(named) > 2 * NAMED:
        named = [*named[:NAMED], "…", named[-1]]
    return " → ".join(["Devices " + named[0], *named[1:], str(devices[0])])


def _devices(ids: Sequence[int]) -> str:
    pieces = [str(a) if a == b else f"{a}-{b}" for a, b in runs(ids)]
    if len(pieces) > NAMED:
        pieces = [*pieces[: NAMED - 1], "…"]
    return ("device " if len(ids) == 1 else "devices ") + ",".join(pieces)


def _experts(n: int) -> str:
    return "1 expert" if n == 1 else f"{count_text(n)} experts"


def _span(what: str, first: int, count: int) -> str:
    return f"{what} {first}" if count == 1 else f"{what}s {first}-{first + count - 1}"


def _listed(parts: Iterable[Part]) -> str:
    found = list[Part]()
    for a, b in sorted(parts):
        if found and found[-1][1] == a:
            found[-1] = found[-1][0], b
        else:
            found.append((a, b))
    return " and ".join(str(a) if b - a == 1 else f"{a}-{b - 1}" for a, b in found)


def _drawn_of(number: int, what: str = "devices along it") -> str:
    return f" Of {count_text(number)} {what} {ROWS} are drawn." if number > ROWS else ""
