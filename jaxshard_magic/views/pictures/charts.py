"""The pictures of a pipeline, of compared strategies and of compared schedules: their charts, each on a sheet."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from jaxshard_magic.report import Pipeline
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.views import schedule_charts, words
from jaxshard_magic.views import schedules as compared
from jaxshard_magic.views.comparison import chart
from jaxshard_magic.views.pictures.sheet import SMALL, Sheet
from jaxshard_magic.views.timeline import data, svg
from jaxshard_magic.views.words import Span

if TYPE_CHECKING:
    from jaxshard_magic.schedule.compare import Comparison as Schedules


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
