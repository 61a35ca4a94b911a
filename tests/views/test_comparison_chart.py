"""Peak memory against step time: names that cover nothing, round axes, the limit, and the same as a plotly figure."""

import pytest
from support.sample_comparisons import (
    COMPARISONS,
    GIB,
    LIMIT,
    alone,
    measured_trials,
    none_ran,
    predicted,
    trial,
)

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.views.colours import DARK, LIGHT
from jaxshard_magic.views.comparison import data
from jaxshard_magic.views.comparison.plane import PlotArea, axes_for, place_labels
from jaxshard_magic.views.format import SPACE


def told(text: str) -> str:
    return text.replace(SPACE, " ").replace("\u00a0", " ")


@pytest.mark.parametrize("name", list(COMPARISONS))
@pytest.mark.parametrize("width", [584, 900])
def test_names_in_the_chart_cover_neither_each_other_nor_a_point(name: str, width: int):
    found = COMPARISONS[name]()
    points = data.trial_points(found)
    if not points:
        return
    plane = PlotArea(*axes_for(points, data.limit_of(found)), width, 340, 40, 22, 12, 36)
    boxes = [label.box for label in place_labels(plane, points, data.limit_of(found))]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    for box in boxes:
        assert plane.margin_left <= box.x and box.x + box.width <= plane.right
        assert plane.margin_top <= box.y and box.y + box.height <= plane.floor
        for point in points:
            x, y = plane.x(point.seconds), plane.y(point.peak)
            assert not (box.x < x < box.x + box.width and box.y < y < box.y + box.height)


def test_every_point_of_a_small_chart_has_its_name():
    found = measured_trials()
    points = data.trial_points(found)
    plane = PlotArea(*axes_for(points, LIMIT), 584, 248, 40, 22, 12, 36)
    assert {label.text for label in place_labels(plane, points, LIMIT)} == {
        name for point in points for name in point.names
    }


def test_the_axes_are_round_and_hold_every_point_and_its_prediction():
    seconds, size = axes_for(data.trial_points(measured_trials()), LIMIT)
    assert [label for _, label in seconds.ticks] == ["35", "40", "45", "50", "55"]
    assert (seconds.unit, size.unit) == ("ms", "GiB")
    assert [label for _, label in size.ticks] == ["2", "3", "4", "5", "6"]
    near, far = axes_for(data.trial_points(predicted()), LIMIT)[1], size
    assert near.high > LIMIT > far.high  # a limit far above the points would press them together


def test_the_limit_is_a_line_where_points_come_near_it_and_else_above_the_plot():
    assert "limit 15.75 GiB is above the plot \u2191" in told(measured_trials().to_html())
    assert "is above the plot" not in predicted().to_html()
    assert ">limit 15.75 GiB</text>" in told(predicted().to_html())
    without = [trial("dp", {"data": 8}, gib, (ms, 46.0), {}, limit=None) for gib, ms in ((5.0, 47.0), (4.0, 53.0))]
    assert ">limit" not in told(Comparison("train_step", tuple(without)).to_html())


def test_trials_at_one_place_share_a_point():
    found = Comparison(
        "train_step",
        tuple(
            trial(name, {"data": 8}, peak, (40.0, None), {}) for name, peak in (("dp", 4.0), ("fsdp", 4.0), ("tp", 5.0))
        ),
    )
    first, second = data.trial_points(found)
    assert (first.names, second.names) == (("dp", "fsdp"), ("tp",))
    assert first.on_front and not second.on_front


def test_one_point_or_none_has_no_chart():
    assert "<circle" not in alone().to_html() + none_ran().to_html()
    assert "<circle" in measured_trials().to_html()


def test_the_figure_is_a_scatter_with_its_front_tails_and_theme():
    for theme, colours in (("light", LIGHT), ("dark", DARK)):
        figure = measured_trials().figure(theme)
        front, tails, on, others = figure.data
        assert (on.name, others.name) == ("on the Pareto front", "others")
        assert list(on.x) == pytest.approx([39.0, 41.6]) and list(on.y) == pytest.approx([3.44, 3.12])
        assert on.marker.color == colours["ink"] and others.marker.color == "rgba(0,0,0,0)"
        assert list(tails.x[:2]) == pytest.approx([38.1, 39.0])
        assert front.line.shape == "hv" and figure.layout.paper_bgcolor == "rgba(0,0,0,0)"
        assert figure.layout.xaxis.title.text == "step time, ms (measured)"


def test_hovering_says_the_trial_its_times_and_its_peak():
    on = measured_trials().figure().data[2]
    assert [told(text) for text in on.customdata[0]] == [
        "<b>fsdp+tp bf16</b>",
        "39.0 ms measured, predicted 38.1 ms",
        "3.44 GiB, 22% of 15.75 GiB",
    ]


def test_what_does_not_fit_is_crossed_in_the_figure_above_the_limit():
    figure = predicted().figure()
    crossed = figure.data[-1]
    assert (crossed.marker.symbol, crossed.marker.line.color) == ("x-thin", LIGHT["error"])
    (line,) = figure.layout.shapes
    assert crossed.y[0] > line.y0 == LIMIT / GIB


@pytest.mark.parametrize("name", list(COMPARISONS))
def test_what_has_no_figure_says_so_in_one_line(name: str):
    found = COMPARISONS[name]()
    if data.trial_points(found):
        assert found.figure().to_json()
        return
    with pytest.raises(ShardError, match=r"^no trial of this comparison has both a step time and a peak"):
        found.figure()


def test_an_unknown_theme_is_told_with_the_themes():
    with pytest.raises(ShardError, match=r"no theme 'drak'. Did you mean 'dark'. The themes are light, dark"):
        measured_trials().figure("drak")
