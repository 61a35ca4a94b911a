"""A mesh axis looks the same everywhere: its hue is its job's, decided alike in Python and in the browser."""

import json
import re
from pathlib import Path

import pytest
from support.browsing import Stage
from support.sample_choices import CHOICES
from support.sample_comparisons import COMPARISONS
from support.sample_reports import SAMPLES

from jaxshard_magic.config.strategies import AXIS_JOBS
from jaxshard_magic.views import svg
from jaxshard_magic.views.colours import BOTH, HUES, LIGHT, hues

CASES = json.loads((Path(__file__).parents[1] / "data" / "axis_hues.json").read_text(encoding="utf-8"))
COLOURED = """root => Object.fromEntries(
  [...root.querySelectorAll('.jsm-ax')].map(node => [node.textContent.split(' ')[0], getComputedStyle(node).color])
)"""


@pytest.mark.parametrize(("axes", "numbers"), CASES)
def test_an_axis_has_the_hue_of_its_job_and_others_take_what_is_left(axes: list[str], numbers: list[int]):
    assert list(hues(axes).values()) == numbers
    assert len(set(numbers)) == len(axes), "no two axes of one mesh are alike"


def test_every_job_of_a_mesh_axis_has_a_hue_of_its_own():
    assert sorted(job.hue for job in AXIS_JOBS.values()) == [*range(len(AXIS_JOBS))]


def test_the_browser_decides_as_the_table_says(show: Stage):
    found = show.page.evaluate("names => names.map(each => report.axes.hues(each))", [axes for axes, _ in CASES])
    assert found == [numbers for _, numbers in CASES]


@pytest.mark.parametrize("made", [SAMPLES["toy"], COMPARISONS["measured_trials"], CHOICES["planned"]])
def test_widget_and_html_draw_the_axes_of_a_view_in_the_same_hues(made, show: Stage):
    shown = made()
    told = show(shown).root.evaluate(COLOURED)
    said = dict(re.findall(r'<b class="jss-a(\d)">(\w+)</b>', shown.to_html()))
    html = {name: int(number) for number, name in said.items()}
    assert len(html) > 1 and html.items() <= {n: v % HUES for n, v in hues(told).items()}.items()
    rgb = {name: LIGHT[f"a{number}"] for name, number in html.items()}
    assert {name: told[name] for name in html} == {
        name: f"rgb({', '.join(str(int(c[i : i + 2], 16)) for i in (1, 3, 5))})" for name, c in rgb.items()
    }


def test_more_axes_than_hues_differ_in_their_dashes():
    axes = [f"x{i}" for i in range(3 * HUES)]
    drawn = {svg.stroke(number) for number in hues(axes).values()}
    assert len(drawn) == len(axes) and tuple(BOTH[f"a{i}"] for i in range(HUES)) == svg.AXES
