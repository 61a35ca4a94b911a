"""Pictures with one chart each: pipeline, recorded step, training, compared strategies, compared schedules."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from jaxshard_magic.report import Measured, Pipeline
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.report.metrics import Metrics
from jaxshard_magic.views import schedule_charts, words
from jaxshard_magic.views import schedule_comparison as compared
from jaxshard_magic.views.comparison import chart
from jaxshard_magic.views.measured import data as spent
from jaxshard_magic.views.measured.lanes import lane_drawing
from jaxshard_magic.views.pictures.sheet import SMALL, Sheet
from jaxshard_magic.views.timeline import data, svg
from jaxshard_magic.views.training import chart as curve_chart
from jaxshard_magic.views.training import data as curves
from jaxshard_magic.views.words import Span

if TYPE_CHECKING:
    from jaxshard_magic.schedule.compare import ScheduleComparison as Schedules

ACROSS = 3  # charts of a training in a row


def pipeline(p: Pipeline, theme: str) -> str:
    """Draw the timeline of a pipeline with its bubble and a legend; return SVG."""
    sheet = Sheet()
    sheet.sentence(words.pipeline_lead(p))
    sheet.small(words.pipeline_about(p))
    x = 0.0
    sheet.skip(4)
    for kind in data.kinds_of(p):
        sheet.draw(x, svg.kind_mark(kind))
        said = f"{kind} {words.KINDS[kind]}"
        sheet.text(x + 18, said, down=9, size=SMALL)
        x += 34 + 6.4 * len(said)
    sheet.draw(x, svg.idle_mark())
    sheet.text(x + 18, "bubble", down=9, size=SMALL)
    sheet.skip(18)
    sheet.small(svg.lanes_text(p))
    height, marks = svg.timeline_marks(p)
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
        sheet.draw(x, svg.kind_mark(kind))
        sheet.text(x + 18, words.TIME_KINDS[kind], down=9, size=SMALL)
        x += 34 + 6.4 * len(words.TIME_KINDS[kind])
    sheet.draw(x, svg.idle_mark())
    sheet.text(x + 18, "idle", down=9, size=SMALL)
    sheet.skip(18)
    height, marks = lane_drawing(m)
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
        said = [Span(curves.label_of(curve), "strong"), Span(f" {curves.value_text(curve, curve.last[-1])}")]
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
        "bubbles": schedule_charts.bubble_chart(of.rows, of.microbatches),
        "memory": schedule_charts.memory_chart(of.rows, of.memory_limit),
    }

    def draw(drawing: str, theme: str) -> str:
        sheet = Sheet(width=schedule_charts.WIDTH)
        sheet.sentence([Span(compared.summary(of), "strong")], 13)
        sheet.small(compared.setup_text(of))
        sheet.draw(0, drawing, down=8)
        sheet.skip(8 + schedule_charts.HEIGHT)
        return sheet.svg("compared schedules", theme)

    # `d=drawing` binds the value now: a closure would see the last value of the loop.
    return {name: lambda theme, d=drawing: draw(d, theme) for name, drawing in drawn.items() if drawing}
