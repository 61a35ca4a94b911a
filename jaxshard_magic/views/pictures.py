"""Pictures of reports, comparisons, pipelines and explorers as standalone SVG documents, by name."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from jaxshard_magic.report import Leaf, Measured, Memory, MeshInfo, Pipeline, Report
from jaxshard_magic.report.choice import Choice
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.report.exports import Picture
from jaxshard_magic.report.metrics import Metrics
from jaxshard_magic.views import communication as comm
from jaxshard_magic.views import device_memory, leaf_rows, schedule_comparison, svg, words
from jaxshard_magic.views import measured as spent
from jaxshard_magic.views.comparison import chart
from jaxshard_magic.views.comparison.data import trial_points
from jaxshard_magic.views.device_memory import stages
from jaxshard_magic.views.document.html import row_svg
from jaxshard_magic.views.document.parts import FLAT, RowFigure
from jaxshard_magic.views.experts_positions import layout_figures, ring_figures
from jaxshard_magic.views.explorer import devices_text
from jaxshard_magic.views.format import (
    UNKNOWN,
    byte_text,
    count_text,
    limit_text,
    share_text,
    submesh_parts,
    type_parts,
)
from jaxshard_magic.views.payload import tab_ids
from jaxshard_magic.views.picture_sheet import CONTENT_WIDTH, SMALL, Sheet, columns_in
from jaxshard_magic.views.source_lines import code_text
from jaxshard_magic.views.terminal import clip, shorten, wrap
from jaxshard_magic.views.timeline import data as timeline_data
from jaxshard_magic.views.timeline import svg as timeline_svg
from jaxshard_magic.views.training import chart as curve_chart
from jaxshard_magic.views.training import data as curves
from jaxshard_magic.views.words import Span

if TYPE_CHECKING:
    from jaxshard_magic.explorer import Explorer
    from jaxshard_magic.schedule.compare import ScheduleComparison as Schedules

# Layout.
ARRAYS = 16
PATH, TYPE, ARRAY_ROW = 62, 440, 36  # px: left edges of paths and types, height of a row
# Memory.
GROUPS = 16
MEMORY_BAR, MEMORY_END = 170, CONTENT_WIDTH - 130  # px: left and right end of bars
GROUP_ROW, MEMORY_HIGH = 24, 12  # px: height of a row and of its bar
# Communication.
KINDS, LINES = 10, 14
OVER, COUNT, KIND_BAR, SENT = 130, 330, 350, CONTENT_WIDTH - 110  # px: positions of columns
SOURCE, LINE_BAR = 80, 500  # px: positions of columns of lines
SENT_ROW, SHARE_HIGH = 20, 10  # px: height of a row and of its bar
# Training.
ACROSS = 3  # charts in a row
# Experts, positions and ring attention.
FIGURE_DRAWN, FIGURE_TEXT, FIGURE_SIZE = 130, 430, 11  # px: left edges of drawings and texts, font size
FIGURE_LINE, FIGURE_GAP = 14, 4


def report_pictures(report: Report) -> Mapping[str, Picture]:
    """Return the pictures of a report, one for each tab of its widget, under the tab's name."""
    draw = {
        "layout": partial(layout, report),
        "memory": partial(memory, report),
        "communication": partial(communication, report),
        **({} if report.measured is None else {"measured": partial(measured, report.measured)}),
        **({} if report.metrics is None else {"training": partial(training, report.metrics)}),
        **({} if report.pipeline is None else pipeline_pictures(report.pipeline)),
    }
    return {name: draw[name] for name in tab_ids(report)}


def pipeline_pictures(p: Pipeline) -> Mapping[str, Picture]:
    """Return the picture of a pipeline's timeline."""
    return {"pipeline": partial(pipeline, p)}


def comparison_pictures(compared: Comparison) -> Mapping[str, Picture]:
    """Return the chart of a comparison; empty for fewer than two points."""
    return {"comparison": partial(comparison, compared)} if len(trial_points(compared)) > 1 else {}


def choice_pictures(choice: Choice) -> Mapping[str, Picture]:
    """Return the pictures of the compiled candidates, and of the report of the choice."""
    chosen = {} if choice.report is None else report_pictures(choice.report)
    return {**comparison_pictures(choice.comparison), **chosen}


def layout(report: Report, theme: str) -> str:
    """Draw the layout of a report's arrays, the largest first, repeated layers in one row; return SVG."""
    figures, there = layout_figures(report), words.reported_devices(report)
    return _layout_svg(report.leaves, report.mesh, words.title_text(report), there, theme, figures)


def explorer_pictures(ex: "Explorer") -> Mapping[str, Picture]:
    """Return the picture of an explorer's present layout, by name."""
    # Values are read now: the explorer may change before the picture is drawn.
    leaves, mesh, strategy, there = ex.leaves, ex.mesh_info, ex.strategy, devices_text(ex)
    return {"layout": lambda theme: _layout_svg(leaves, mesh, strategy, there, theme)}


def _layout_svg(
    leaves: Sequence[Leaf], mesh: MeshInfo, strategy: str, devices: str, theme: str, figures: Sequence[RowFigure] = ()
) -> str:
    lead = [Span(f"{strategy} ", "strong"), Span("on "), *_mesh_spans(mesh), Span(f", {devices}")]
    sheet, rows = Sheet(mesh), leaf_rows.fold(leaves)
    sheet.sentence(lead)
    per = "on the fullest device" if leaf_rows.partial_axes(leaves) else "per device"
    sizes = ", ".join(f"{role} {byte_text(n)}" for role, n in leaf_rows.role_bytes(leaves).items())
    sheet.small(f"{words.leaves_text(len(leaves))}: {sizes} {per}" if sizes else words.leaves_text(len(leaves)))
    sheet.skip(4)
    for row in rows[:ARRAYS]:
        times = f" ×{count_text(row.members)}" if row.members > 1 else ""
        name = shorten(row.path, columns_in(TYPE - PATH - 12, mono=True) - len(times))
        sheet.draw(0, svg.leaf_blocks(row.leaf, mesh))
        sheet.text(PATH, [Span(name), Span(times, "quiet")], down=14, mono=True)
        why = leaf_rows.unsharded_text(row) or row.leaf.why
        sheet.text(PATH, [Span(clip(why, columns_in(TYPE - PATH - 12, 11)), "quiet")], down=28, size=11)
        sheet.text(TYPE, _type_spans(row.leaf), down=14, mono=True)
        place = [Span(text, "axis" if name else "quiet") for text, name in submesh_parts(row.leaves)]
        sheet.text(TYPE, place, down=28, size=11)
        sheet.text(CONTENT_WIDTH, byte_text(row.bytes_per_device), down=14, end=True)
        sheet.skip(ARRAY_ROW)
    left = sum(row.members for row in rows[ARRAYS:])
    first = "the first of its devices" if leaf_rows.partial_axes(leaves) else "the first device"
    sheet.small(
        f"and {count_text(left)} more, none larger" if left else "",
        f"Shaded: what {first} holds; a second sheet: a copy elsewhere.",
    )
    add_figures(sheet, figures, mesh)
    return sheet.svg(f"layout of {words.leaves_text(len(leaves))}", theme)


def _mesh_spans(mesh: MeshInfo) -> list[Span]:
    """Return the mesh as spans, each axis in its hue: `data=4 model=2`."""
    spans: list[Span] = []
    for axis, size in mesh.axes.items():
        spans += [Span(" ")] * bool(spans) + [Span(axis, "axis"), Span(f"={size}")]
    return spans


def _type_spans(leaf: Leaf) -> list[Span]:
    """Return the type of a leaf, cut to the width of its column, each axis in its hue."""
    most, spans = columns_in(CONTENT_WIDTH - TYPE - 70, mono=True), list[Span]()
    for text, axis in type_parts(leaf):
        said = clip(text if axis is None else axis, most)
        spans.append(Span(said, "axis" if axis else "text"))
        most -= len(said)
        if most <= 1:
            break
    return spans


def memory(report: Report, theme: str) -> str:
    """Draw the memory of a report's devices at the peak, the fullest first; return SVG."""
    held, stage_map = report.memory, stages(report)
    assert held is not None
    groups, most = device_memory.groups(held), device_memory.limit(held)
    full, on_scale = device_memory.scale(held)
    sheet = Sheet(report.mesh)
    sheet.sentence(words.memory_lead(held, stage_map.devices_text))
    sheet.small(words.scale_note(held) or "")
    _memory_legend(sheet, held, on_scale)
    for group in groups[:GROUPS]:
        d, own = group.fullest, device_memory.highest_measured(held, group.devices)
        peak = words.usage_text(d.peak, most) if d.peak is not None and most else byte_text(d.peak)
        bar = svg.memory_bar(device_memory.segments(d), d.peak, own and own.measured, on_scale, full, "")
        sheet.text(0, clip(stage_map.devices_text(group.devices), columns_in(MEMORY_BAR - 10)), down=11)
        sheet.stretch(MEMORY_BAR, bar, MEMORY_END - MEMORY_BAR, MEMORY_HIGH + 4, down=1 if own is None else -1)
        sheet.text(CONTENT_WIDTH, peak, down=11, end=True)
        sheet.skip(GROUP_ROW)
    left = sum(len(group.devices) for group in groups[GROUPS:])
    sheet.small(f"{count_text(left)} more devices hold less" if left else "")
    return sheet.svg(f"memory: {words.memory_sentence(held, stage_map.devices_text)}", theme)


def _memory_legend(sheet: Sheet, held: Memory, most: int | None) -> None:
    """Draw the roles in their colours, the tick of measured peaks, and the limit."""
    x = float(MEMORY_BAR)
    sheet.skip(4)
    for role in device_memory.roles(held):
        sheet.draw(x, svg.role_mark(role))
        sheet.text(x + 14, role, down=9, size=SMALL)
        x += 28 + 7 * len(role)
    if device_memory.highest_measured(held) is not None:
        sheet.draw(x, svg.measured_mark(), down=-1)
        sheet.text(x + 8, "measured peak", down=9, size=SMALL)
    if most is not None:
        sheet.text(MEMORY_END, f"limit {limit_text(most)}", down=9, end=True, size=SMALL)
    sheet.skip(20)


def communication(report: Report, theme: str) -> str:
    """Draw the collectives of a report, the heaviest kinds first, and its lines in source order; return SVG."""
    rows = report.collectives or ()
    sheet, timed = Sheet(report.mesh), comm.is_timed(report)
    sheet.sentence(words.communication_lead(report))
    kinds, sending = comm.group_by_kind(report, rows), comm.group_by_line(report)
    weigh = comm.weight(report)
    if kinds:
        _communication_heads(sheet, {OVER: "over", COUNT: "count"}, timed)
    most = max(map(weigh, kinds), default=0) or 1
    for part in kinds[:KINDS]:
        sheet.text(0, part.kind, down=12)
        sheet.text(OVER, _over_spans(part), down=12)
        sheet.text(COUNT, part.count_text, down=12, end=True)
        sheet.draw(KIND_BAR, _share_bar(report, [part], most, SENT - 80 - KIND_BAR), down=3)
        _communication_figures(sheet, report, part, timed)
    if sending:
        sheet.title("By line")
        _communication_heads(sheet, {0: "line"}, timed)
        shown, most = comm.in_source_order(report, sending[:LINES]), weigh(sending[0].group) or 1
        for line, name in zip(shown, comm.line_labels(shown, UNKNOWN), strict=True):
            room = columns_in(LINE_BAR - SOURCE - 12, mono=True)
            known = line.number is not None
            source = code_text(line.text, line.callers, room) if known else clip(comm.UNTRACED, room)
            sheet.text(0, _clipped(name, columns_in(SOURCE)), down=12)
            sheet.text(SOURCE, source, down=12, mono=True)
            parts = comm.group_by_kind(report, line.group.collectives)
            sheet.draw(LINE_BAR, _share_bar(report, parts, most, SENT - 80 - LINE_BAR), down=3)
            _communication_figures(sheet, report, line.group, timed)
    left = len(sending) - LINES
    sheet.small(f"{count_text(left)} more lines send less" if left > 0 else "")
    add_figures(sheet, ring_figures(report), report.mesh)
    return sheet.svg("communication", theme)


def _communication_heads(sheet: Sheet, names: dict[int, str], timed: bool) -> None:
    for x, name in names.items():
        sheet.text(x, [Span(name, "quiet")], down=11, end=x == COUNT, size=11)
    sheet.text(SENT, [Span("sent per device", "quiet")], down=11, end=True, size=11)
    sheet.text(CONTENT_WIDTH, [Span("predicted" if timed else "share", "quiet")], down=11, end=True, size=11)
    sheet.skip(SENT_ROW)


def _communication_figures(sheet: Sheet, report: Report, part: comm.CollectiveGroup, timed: bool) -> None:
    total = words.sent_bytes(report)
    sheet.text(SENT, part.sent_text, down=12, end=True)
    share = part.seconds_text if timed else share_text(part.sent / total if total else 0)
    sheet.text(CONTENT_WIDTH, share, down=12, end=True)
    sheet.skip(SENT_ROW)


def _clipped(name: str, room: int) -> str:
    """Shorten the name of a line to `room` columns, and keep its number whole: `long_na…:31`."""
    file, colon, number = name.rpartition(":")
    return clip(file, room - len(colon + number)) + colon + number


def _over_spans(part: comm.CollectiveGroup) -> list[Span]:
    if not part.axes:
        return [Span(clip(part.axes_text, columns_in(COUNT - OVER - 50)))]
    return [span for i, axis in enumerate(part.axes) for span in (Span(" " * bool(i)), Span(axis, "axis"))]


def _share_bar(report: Report, parts: Sequence[comm.CollectiveGroup], most: float, width: float) -> str:
    weigh = comm.weight(report)
    pieces = [
        (
            svg.axis_index(part.axes[0], report.mesh) if part.axes else None,
            weigh(part) / most,
            svg.KIND_OPACITY.get(part.kind, 0.4),
        )
        for part in parts
    ]
    return svg.share_bar(pieces, width, SHARE_HIGH)


def pipeline(p: Pipeline, theme: str) -> str:
    """Draw the timeline of a pipeline with its bubble and a legend; return SVG."""
    sheet = Sheet()
    sheet.sentence(words.pipeline_lead(p))
    sheet.small(words.pipeline_about(p))
    x = 0.0
    sheet.skip(4)
    for kind in timeline_data.kinds_of(p):
        sheet.draw(x, timeline_svg.kind_mark(kind))
        said = f"{kind} {words.KINDS[kind]}"
        sheet.text(x + 18, said, down=9, size=SMALL)
        x += 34 + 6.4 * len(said)
    sheet.draw(x, timeline_svg.idle_mark())
    sheet.text(x + 18, "bubble", down=9, size=SMALL)
    sheet.skip(18)
    sheet.small(timeline_svg.lanes_text(p))
    height, marks = timeline_svg.timeline_marks(p)
    sheet.draw(0, f'<g font-size="11">{marks}</g>', down=4)
    sheet.skip(height + 4)
    return sheet.svg(f"Timeline of {words.size_text(p)}", theme)


def measured(m: Measured, theme: str) -> str:
    """Draw one recorded step in lanes with its time breakdown and a legend; return SVG."""
    sheet = Sheet()
    sheet.sentence(words.measured_lead(m))
    sheet.small(words.sentence_case(words.measured_about(m)))
    x = 0.0
    sheet.skip(4)
    for kind in spent.lane_letters(m):
        sheet.draw(x, timeline_svg.kind_mark(kind))
        sheet.text(x + 18, words.TIME_KINDS[kind], down=9, size=SMALL)
        x += 34 + 6.4 * len(words.TIME_KINDS[kind])
    sheet.draw(x, timeline_svg.idle_mark())
    sheet.text(x + 18, "idle", down=9, size=SMALL)
    sheet.skip(18)
    height, marks = timeline_svg.recorded_step_marks(m)
    sheet.draw(0, f'<g font-size="11">{marks}</g>', down=4)
    sheet.skip(height + 4)
    return sheet.svg("One recorded step in lanes", theme)


def training(metrics: Metrics, theme: str) -> str:
    """Draw the curves of a run, three in a row; return SVG."""
    sheet = Sheet()
    sheet.sentence(curves.summary_spans(metrics))
    sheet.skip(4)
    drawn = curves.charted_curves(metrics)
    for at, curve in enumerate(drawn):
        x = at % ACROSS * (curve_chart.WIDTH + 16)
        said = [Span(curves.label_of(curve), "strong"), Span(f" {curves.newest_text(curve)}")]
        sheet.text(x, said, down=12, size=SMALL)
        sheet.draw(x, curve_chart.chart([curve]), down=16)
        if at % ACROSS == ACROSS - 1 or at == len(drawn) - 1:
            sheet.skip(curve_chart.HEIGHT + 28)
    sheet.small(*curves.notes(metrics))
    return sheet.svg(f"Training: {curves.summary_text(metrics)}", theme)


def comparison(c: Comparison, theme: str) -> str:
    """Draw peak memory against step time with the Pareto front; return SVG."""
    sheet = Sheet(width=chart.WIDTH)
    sheet.sentence(words.comparison_lead(c), 13)
    sheet.small(words.comparison_about(c))
    sheet.draw(0, chart.chart_svg(c)[0], down=8)
    sheet.skip(8 + chart.height_of(c))
    return sheet.svg("peak memory against step time", theme)


def schedules(of: "Schedules") -> Mapping[str, Callable[[str], str]]:
    """Return the drawing functions of compared schedules by name.

    "bubbles" draws the bubble against the number of microbatches, "memory" the bubble against activations on the
    fullest rank. Each function takes a theme and returns SVG.
    """
    drawn = {
        "bubbles": schedule_comparison.bubble_chart(of.rows, of.microbatches),
        "memory": schedule_comparison.memory_chart(of.rows, of.memory_limit),
    }

    def draw(drawing: str, theme: str) -> str:
        sheet = Sheet(width=schedule_comparison.WIDTH)
        sheet.sentence([Span(schedule_comparison.summary(of), "strong")], 13)
        sheet.small(schedule_comparison.setup_text(of))
        sheet.draw(0, drawing, down=8)
        sheet.skip(8 + schedule_comparison.HEIGHT)
        return sheet.svg("compared schedules", theme)

    # `d=drawing` binds the value now: a closure would see the last value of the loop.
    return {name: lambda theme, d=drawing: draw(d, theme) for name, drawing in drawn.items() if drawing}


def add_figures(sheet: Sheet, figures: Iterable[RowFigure], mesh: MeshInfo) -> None:
    """Draw figures on a sheet, below its present content.

    Args:
        sheet: Sheet to draw on.
        figures: Figures, from top to bottom.
        mesh: Gives the hues of axes.
    """
    most = columns_in(CONTENT_WIDTH - FIGURE_TEXT, FIGURE_SIZE)
    for figure in figures:
        sheet.skip(8)
        sheet.small(figure.lead)
        hue, tall = svg.axis_index(figure.axis, mesh), figure.height > FLAT
        for row in figure.rows:
            sheet.text(0, clip(row.name, columns_in(FIGURE_DRAWN - 8, FIGURE_SIZE)), down=11, size=FIGURE_SIZE)
            sheet.stretch(
                FIGURE_DRAWN, row_svg(row, figure.height, hue), FIGURE_TEXT - FIGURE_DRAWN - 12, figure.height, down=2
            )
            said = wrap(row.text, most)[:2] if tall else [clip(row.text, most)]
            for i, line in enumerate(said):
                sheet.text(FIGURE_TEXT, line, down=11 + FIGURE_LINE * i, size=FIGURE_SIZE)
            sheet.skip(figure.height + 2 * FIGURE_GAP)
