"""Figures of experts, positions and ring attention, in one form for all views: rows with a name, a drawing and text."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import prod

from jaxshard_magic.code_locations import line_text
from jaxshard_magic.report import ExpertLoad, Experts, Positions, Report, Ring
from jaxshard_magic.report.experts_positions import PositionRange, position_ranges
from jaxshard_magic.report.parts import shard_index
from jaxshard_magic.views.document.parts import TALL, Area, FigureRow, RowFigure
from jaxshard_magic.views.format import byte_text, count_text, runs, share_text

ROWS = 8  # rows of a figure, at most
NAMED = 4  # devices named in a text, at most
OTHER, FAINT = 0.6, 0.3  # opacity: of every second device, of dropped rows
WORK = {
    "places": "Every expert multiplies all its places, those without a token as well",
    "sorted": "An expert multiplies the rows that chose it",
    "all": "Every expert multiplies all tokens, whoever chose it",
}
ATTENTION_TEXT = {
    "gather": "attention, where there is any, gathers keys and values of all",
    "heads": "attention has its heads divided instead",
    "ring": "keys and values go round in a ring",
}
UNCOUNTED = (
    "The rows of each were not counted: a cell's first call does that on one host, for a step that calls no Python, "
    "where it takes no more memory than the step."
)


def layout_figures(report: Report) -> list[RowFigure]:
    """Return the figures of the layout view: experts on each device, rows of each expert, and positions on each
    device."""
    figures: list[RowFigure] = []
    for experts in report.experts:
        figures += [_held(report, experts), *_loads(report, experts)]
    return [*figures, *(_positions(report, one) for one in report.positions)]


def ring_figures(report: Report) -> list[RowFigure]:
    """Return a figure for each ring of the step, with its turns as the first device sees them."""
    return [_turns(report, one, ring) for one in report.positions for ring in one.rings]


def ring_memory_lines(report: Report) -> list[str]:
    """Return sentences on keys and values on a device while a ring runs; rings of equal size share a sentence."""
    rings = {(ring.bytes, ring.gradients): ring for one in report.positions for ring in one.rings}
    return [_in_flight(ring) for ring in rings.values()]


def devices_along(report: Report, axes: Sequence[str]) -> list[list[int]]:
    """Return the devices at each index along some axes of the mesh.

    Args:
        report: Gives the mesh.
        axes: Mesh axes, the last one fastest.
    """
    mesh = report.mesh
    device_groups: list[list[int]] = [[] for _ in range(prod(mesh.axes[a] for a in axes))]
    for i, device in enumerate(mesh.numbers):
        device_groups[shard_index(mesh.place(i), axes, mesh.axes)].append(device)
    return device_groups


def _held(report: Report, experts: Experts) -> RowFigure:
    """Return the figure of experts on devices."""
    places = devices_along(report, experts.axes)
    each = experts.number // len(places)
    rows = [
        FigureRow(_devices(devices), (Area(d / len(places), 0, 1 / len(places), 1),), _span("expert", d * each, each))
        for d, devices in enumerate(places[:ROWS])
    ]
    over = "+".join(experts.axes)
    lead = f"{count_text(experts.number)} experts over {over}, {count_text(each)} on each device along it."
    return RowFigure(f"{lead} {WORK[experts.work]}.{_drawn_of(len(places))}", experts.axes[0], tuple(rows))


def _loads(report: Report, experts: Experts) -> Iterator[RowFigure]:
    """Yield a figure for each run of consecutive layers with equal routing on one line of code."""
    devices = len(devices_along(report, experts.axes))
    numbered = list(enumerate(experts.layers))

    def alike(layer: tuple[int, ExpertLoad]) -> tuple:
        load = layer[1]
        return load.file, load.line, load.tokens, load.best, load.places, load.groups, load.chosen is None

    # `groupby` joins neighbours only, so the figures stay in the order of the layers.
    for _, group in groupby(numbered, alike):
        layers = list(group)
        first = layers[0][1]
        lead = f"{count_text(first.tokens)} tokens choose {_experts(first.best)} each"
        lead += f" at {line_text(first.file, first.line)}" if first.line is not None else ""
        if first.places is not None:
            lead += f"; an expert has {count_text(first.places)} places"
            if first.groups > 1:
                each = count_text(first.places // first.groups)
                lead += f", {each} in each of {count_text(first.groups)} groups"
        if first.chosen is None:
            yield RowFigure(f"{lead}. {UNCOUNTED}", experts.axes[0])
            continue
        lead += ". Rows of each expert on the first batch, beside the mean; shades tell devices apart."
        if len(layers) > ROWS:
            lead += f" The {ROWS} most uneven of {count_text(len(layers))} layers are drawn."
            # Uneven layers are selected first, then sorted by number, so that the figure has the order of the layers.
            layers = sorted(sorted(layers, key=lambda layer: -_uneven(layer[1]))[:ROWS], key=lambda layer: layer[0])
        scale = max(max(load.chosen or (0,)) for _, load in layers) or 1
        name = "layer {}" if len(experts.layers) > 1 else "rows"
        rows = (_load(name.format(i), load, devices, scale) for i, load in layers)
        yield RowFigure(lead, experts.axes[0], tuple(rows), TALL)


def _uneven(load: ExpertLoad) -> float:
    """Return the share of all routed rows that the busiest expert gets."""
    chosen = load.chosen or (0,)
    return max(chosen) / (sum(chosen) or 1)


def _load(name: str, load: ExpertLoad, devices: int, scale: int) -> FigureRow:
    """Return a row with a bar for each expert; dropped rows are faint, and a line marks the mean."""
    chosen, kept = load.chosen or (), load.kept or load.chosen or ()
    n, areas = len(chosen), list[Area]()
    for e, (rows, stay) in enumerate(zip(chosen, kept, strict=True)):
        opacity = OTHER if e * devices // n % 2 else 1.0
        x, width = (e + 0.08) / n, 0.84 / n
        areas.append(Area(x, 1 - stay / scale, width, stay / scale, opacity))
        if stay < rows:
            areas.append(Area(x, 1 - rows / scale, width, (rows - stay) / scale, FAINT))
    mean = sum(chosen) / n
    # 1 / TALL is one px, as rows are TALL px high.
    areas.append(Area(0, 1 - mean / scale, 1, 1 / TALL, FAINT))
    return FigureRow(name, tuple(areas), load_text(load), tuple(rows / scale for rows in chosen))


def load_text(load: ExpertLoad) -> str:
    """Return the load of one layer: `most to expert 6: 65 rows, 1.35 times the mean; 4 of 384 dropped (1.0%), 50% of
    the places empty`."""
    chosen = load.chosen or ()
    total, top = sum(chosen), max(chosen, default=0)
    if not total:
        return "no row for any"
    description = (
        f"most to expert {chosen.index(top)}: {count_text(top)} rows, {top * len(chosen) / total:.2f} times the mean"
    )
    if load.dropped is not None:
        share = f" ({share_text(load.dropped / total)})" if load.dropped else ""
        description += f"; {count_text(load.dropped)} of {count_text(total)} dropped{share}"
    return description + (f", {share_text(load.empty)} of the places empty" if load.empty is not None else "")


def _positions(report: Report, one: Positions) -> RowFigure:
    """Return the figure of positions on devices, with the zig-zag order if a causal ring has one."""
    places, over = devices_along(report, one.axes), "+".join(one.axes)
    ring = next((ring for ring in one.rings if ring.zigzag), None)
    stored, in_ring = position_ranges(one, len(places)), position_ranges(one, len(places), ring)
    rows = []
    for devices, own, while_runs in zip(places[:ROWS], stored, in_ring, strict=False):
        text, top = f"positions {_listed(own)}", 1.0 if ring is None else 0.46
        areas = [Area(a / one.number, 0, (b - a) / one.number, top) for a, b in own]
        if ring is not None:
            text += f"; in the ring {_listed(while_runs)}"
            areas += [Area(a / one.number, 0.54, (b - a) / one.number, 0.46, OTHER) for a, b in while_runs]
        rows.append(FigureRow(_devices(devices), tuple(areas), text))
    each = one.number // len(places)
    lead = f"{count_text(one.number)} positions over {over}, {count_text(each)} on each device along it; "
    if ring is not None:
        lead += "a causal ring deals them out zig-zag, so that all devices see as many keys."
    else:
        lead += ATTENTION_TEXT[one.attention] + "."
    return RowFigure(lead + _drawn_of(len(places)), one.axes[0], tuple(rows))


def _turns(report: Report, one: Positions, ring: Ring) -> RowFigure:
    """Return the figure of one ring: the keys of the first device at each turn."""
    places = devices_along(report, one.axes)
    first, in_ring = [devices[0] for devices in places], position_ranges(one, len(places), ring)
    where = f" at {line_text(ring.file, ring.line)}" if ring.line is not None else ""
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
        # Keys and values move to the next device at each turn, so device 0 has those of the device `turn` places before
        # it.
        owner = -turn % len(first)
        areas = tuple(Area(a / one.number, 0, (b - a) / one.number, 1) for a, b in in_ring[owner])
        own = "its own keys" if not turn else f"those of device {first[owner]}"
        name = "at first" if not turn else f"turn {turn}"
        rows.append(FigureRow(name, areas, f"device {first[0]} has {own}: {_listed(in_ring[owner])}"))
    return RowFigure(f"{lead}.{_drawn_of(ring.turns, 'turns')}", one.axes[0], tuple(rows))


def _in_flight(ring: Ring) -> str:
    """Return a sentence on the bytes of keys and values on one device while a ring runs."""
    has = byte_text(ring.bytes)
    said = f"In a ring a device has keys and values of one device at a time, {has}, and as much on its way"
    return said + (f"; backward {byte_text(ring.gradients)} of gradients with each." if ring.gradients else ".")


def _way(devices: Sequence[int]) -> str:
    """Return the devices of a ring in order: `Devices 0 → 1 → 2 → 3 → 0`."""
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


def _listed(parts: Iterable[PositionRange]) -> str:
    """Return ranges of positions in words, with adjacent ranges joined: `0-7 and 24-31`."""
    found = list[PositionRange]()
    for a, b in sorted(parts):
        if found and found[-1][1] == a:
            found[-1] = found[-1][0], b
        else:
            found.append((a, b))
    return " and ".join(str(a) if b - a == 1 else f"{a}-{b - 1}" for a, b in found)


def _drawn_of(number: int, what: str = "devices along it") -> str:
    return f" Of {count_text(number)} {what} {ROWS} are drawn." if number > ROWS else ""
