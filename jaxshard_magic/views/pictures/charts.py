"""The pictures of a pipeline, of a training, of compared strategies and compared schedules: charts, each on a sheet."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from jaxshard_magic.report import Measured, Pipeline
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.report.metrics import Metrics
from jaxshard_magic.views import schedule_charts, words
from jaxshard_magic.views import schedules as compared
from jaxshard_magic.views.comparison import chart
from jaxshard_magic.views.measured import data as spent
from jaxshard_magic.views.measured.html import drawn
from jaxshard_magic.views.pictures.sheet import SMALL, Sheet
from jaxshard_magic.views.timeline import data, svg
from jaxshard_magic.views.training import chart as curve_chart
from jaxshard_magic.views.training import data as curves
from jaxshard_magic.views.words import Span

if TYPE_CHECKING:
    from jaxshard_magic.schedule.compare import Comparison as Schedules

ACROSS = 3  # charts of a training


def pipeline(p: Pipeline, theme: str) -> str:
    """A pipeline's timeline, with what its bubble is and a legend."""
    sheet = Sheet()
    sheet.sentence(words.pipeline_lead(p))
    sheet.small(words.pipeline_about(p))
    x = 0.0
    sheet.down(4)
    for kind in data.kinds_of(p):
        sheet.draw(x, svg.kind_mark(kind))
        said = f"{kind} {words.KINDS[kind]}"
        sheet.text(x + 18, said, down=9, size=SMALL)
        x += 34 + 6.4 * len(said)
    sheet.draw(x, svg.idle_mark())
    sheet.text(x + 18, "bubble", down=9, size=SMALL)
    sheet.down(18)
    sheet.small(svg.lanes_text(p))
    height, marks = svg.drawn(p)
    sheet.draw(0, f'<g font-size="11">{marks}</g>', down=4)
    sheet.down(height + 4)
    return sheet.svg(f"Timeline of {words.size_text(p)}", theme)


def measured(m: Measured, theme: str) -> str:
    """One recorded step in lanes, with how its time divides and a legend."""
    sheet = Sheet()
    sheet.sentence(words.spent_lead(m))
    sheet.small(words.sentence_case(words.spent_about(m)))
    x = 0.0
    sheet.down(4)
    for kind in spent.kinds(m):
        sheet.draw(x, svg.kind_mark(kind))
        sheet.text(x + 18, words.SPENT[kind], down=9, size=SMALL)
        x += 34 + 6.4 * len(words.SPENT[kind])
    sheet.draw(x, svg.idle_mark())
    sheet.text(x + 18, "idle", down=9, size=SMALL)
    sheet.down(18)
    height, marks = drawn(m)
    sheet.draw(0, f'<g font-size="11">{marks}</g>', down=4)
    sheet.down(height + 4)
    return sheet.svg("One recorded step in lanes", theme)


def training(metrics: Metrics, theme: str) -> str:
    """The curves of a run, three beside each other."""
    sheet = Sheet()
    sheet.sentence(curves.lead(metrics))
    sheet.down(4)
    drawn = curves.drawn(metrics)
    for at, curve in enumerate(drawn):
        x = at % ACROSS * (curve_chart.WIDTH + 16)
        said = [Span(curves.label_of(curve), "strong"), Span(f" {curves.value_text(curve, curve.last[-1])}")]
        sheet.text(x, said, down=12, size=SMALL)
        sheet.draw(x, curve_chart.chart([curve]), down=16)
        if at % ACROSS == ACROSS - 1 or at == len(drawn) - 1:
            sheet.down(curve_chart.HEIGHT + 28)
    sheet.small(*curves.notes(metrics))
    return sheet.svg(f"Training: {curves.lead_text(metrics)}", theme)


def comparison(c: Comparison, theme: str) -> str:
    """Peak memory against step time, with the Pareto front."""
    sheet = Sheet(room=chart.WIDTH)
    sheet.sentence(words.comparison_lead(c), 13)
    sheet.small(words.comparison_about(c))
    sheet.draw(0, chart.drawn(c)[0], down=8)
    sheet.down(8 + chart.height_of(c))
    return sheet.svg("peak memory against step time", theme)


def schedules(of: "Schedules") -> Mapping[str, Callable[[str], str]]:
    """Of compared schedules: the bubble against microbatches, and against what the fullest rank holds."""
    drawn = {
        "bubbles": schedule_charts.bubbles(of.rows, of.microbatches),
        "memory": schedule_charts.memory(of.rows, of.memory_limit),
    }

    def draw(drawing: str, theme: str) -> str:
        sheet = Sheet(room=schedule_charts.WIDTH)
        sheet.sentence([Span(compared.lead(of), "strong")], 13)
        sheet.small(compared.sizes(of))
        sheet.draw(0, drawing, down=8)
        sheet.down(8 + schedule_charts.HEIGHT)
        return sheet.svg("compared schedules", theme)

    return {name: lambda theme, d=drawing: draw(d, theme) for name, drawing in drawn.items() if drawing}
