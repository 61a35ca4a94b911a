"""`report.figure(...)`: plotly charts in the report's look, of memory in binary units and of the predicted step."""

from dataclasses import replace

import pytest
from support.sample_reports import (
    MIB,
    SAMPLES,
    attached,
    bare,
    gpt_leaves,
    large,
    measured,
    memory,
    mesh,
    partly,
    simulated,
    too_big,
    unknown,
)

from jaxshard_magic.errors import ShardError
from jaxshard_magic.views.colours import DARK, LIGHT
from jaxshard_magic.views.figures.memory import MOST_BARS
from jaxshard_magic.views.format import SPACE


def plain(text: str) -> str:
    return text.replace(SPACE, " ").replace("\u00a0", " ")


def ticks(figure, axis: str) -> list[str]:
    return [plain(text) for text in figure.layout[axis].ticktext]


@pytest.mark.parametrize("name", [name for name in SAMPLES if SAMPLES[name]().memory is not None])
def test_every_report_with_memory_has_its_figure(name):
    assert SAMPLES[name]().figure("memory").to_json()


def test_bars_are_stacked_by_role_and_add_up_to_the_peak():
    figure = attached().figure("memory")
    assert figure.layout.barmode == "stack"
    assert [plain(bar.name) for bar in figure.data] == [
        "params 78.3 MiB",
        "optimizer 157 MiB",
        "batch 32.0 KiB",
        "temporaries 4.40 GiB",
        "other 475 MiB",
    ]
    peaks = [d.peak for d in attached().memory.per_device]  # type: ignore[union-attr]
    assert [sum(sizes) for sizes in zip(*(bar.x for bar in figure.data), strict=True)] == peaks
    assert ticks(figure, "yaxis") == [f"device {i}" for i in range(8)]


def test_the_byte_axis_has_binary_ticks():
    assert ticks(attached().figure("memory"), "xaxis") == ["0", "4 GiB", "8 GiB", "12 GiB", "16 GiB"]
    assert ticks(unknown().figure("memory"), "xaxis") == ["0", "64 MiB", "128 MiB", "192 MiB"]


def test_the_limit_is_a_red_line_with_its_label():
    figure = too_big().figure("memory")
    (line,) = figure.layout.shapes
    assert (line.x0, line.line.color) == (16128 * MIB, LIGHT["error"])
    assert "limit 15.75 GiB" in [plain(note.text) for note in figure.layout.annotations]
    assert simulated().figure("memory").layout.shapes == ()


def test_hovering_says_the_device_and_the_formatted_bytes():
    bar = attached().figure("memory").data[4]
    assert [plain(text) for text in bar.customdata[0]] == ["device 0", "475 MiB"]
    assert "other" in bar.hovertemplate


def test_other_is_hatched_so_that_grey_tells_it_from_temporaries():
    *solid, other = attached().figure("memory").data
    assert other.marker.pattern.shape == "/"
    assert not any(bar.marker.pattern.shape for bar in solid)


def test_the_theme_chooses_the_colours_and_the_ground_is_clear():
    for theme, colours in (("light", LIGHT), ("dark", DARK)):
        figure = attached().figure("memory", theme)
        assert figure.data[0].marker.color == colours["params"]
        assert figure.layout.font.color == colours["ink"]
        assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"


def test_measured_peaks_are_ticks_that_say_by_how_much_the_computed_ones_are_off():
    *_, ticks = measured().figure("memory").data
    assert (ticks.name, list(ticks.y)) == ("measured peak", list(range(7)))  # the last device told none
    peak = measured().memory.per_device[1].peak  # type: ignore[union-attr]
    assert ticks.x[1] == peak * 102 // 100
    assert [plain(text) for text in ticks.customdata[1]] == ["device 1", "4.63 GiB", "4.72 GiB", "2.0% more"]
    assert not any(trace.name == "measured peak" for trace in attached().figure("memory").data)


def test_a_title_too_long_for_a_line_takes_two_and_the_bars_make_room():
    short, long = attached().figure("memory").layout, measured().figure("memory").layout
    assert "<br>" not in short.title.text and long.title.text.count("<br>") == 1
    assert long.height - short.height == long.margin.t - short.margin.t > 0


def bars(figure) -> dict[str, float]:
    """Seconds of each bar of the roofline by its label, its pieces together."""
    labels = figure.layout.yaxis.ticktext
    return {label: sum(t.x[0] for t in figure.data if t.y[0] == i) for i, label in enumerate(labels)}


def test_the_roofline_is_what_the_step_waits_for_and_the_measured_step_beside_it():
    figure = attached().figure("roofline")
    found = bars(figure)
    assert list(found)[:2] == ["compute", "over data"]
    assert list(found)[-2:] == ["step, predicted", "step, measured"]
    assert (found["compute"], found["step, measured"]) == (0.0176, 0.0473)
    # 705 MiB over links of 34 GB/s
    assert found["over data"] == pytest.approx(705 * MIB / 34e9, rel=2e-3)
    over = sum(seconds for label, seconds in found.items() if label.startswith("over"))
    assert found["compute"] + over == pytest.approx(found["step, predicted"])
    assert plain(figure.layout.title.text).startswith("<b>Bound by communication on TPU v5e:</b>")
    assert "predicted 46.0 ms a step" in plain(figure.layout.title.text)


def test_predicted_is_hollow_and_measured_solid():
    *_, predicted, measured_step = attached().figure("roofline").data
    assert (predicted.marker.color, predicted.marker.line.color) == ("rgba(0,0,0,0)", LIGHT["ink"])
    assert measured_step.marker.color == LIGHT["ink"]


def test_a_cpu_measures_no_chip():
    report = replace(attached(), mesh=mesh({"data": 4, "model": 2}, "simulated"))
    assert "step, measured" not in bars(report.figure("roofline"))
    assert bars(SAMPLES["dry"]().figure("roofline"))["step, predicted"] > 0


def test_memory_has_its_bar_where_its_time_is_known_and_names_are_text():
    report = attached()
    assert report.timing is not None
    figure = replace(report, timing=replace(report.timing, memory_s=0.002, bound=None, on="<i>v5e")).figure("roofline")
    assert bars(figure)["memory"] == 0.002
    assert figure.layout.title.text.startswith("<b>Predicted for &lt;i&gt;v5e:</b>")


def test_what_the_program_decides_while_it_runs_is_a_least():
    told = [plain(note.text) for note in partly().figure("roofline").layout.annotations]
    assert told[1].startswith("≥") and "≥" not in told[0]


def test_a_chip_of_which_no_time_is_known_is_said_in_one_line():
    report = attached()
    assert report.timing is not None
    timing = replace(report.timing, compute_s=None, communication_s=None, predicted_step_s=None, step_s=None)
    with pytest.raises(ShardError, match="no time of this step is known on TPU v5e"):
        replace(report, timing=timing).figure("roofline")


def test_above_16_devices_those_that_are_alike_share_a_bar():
    assert ticks(large().figure("memory"), "yaxis") == [
        "device 17",
        "devices 0 to 16, 18 to 63",
        "devices 64 to 511",
    ]


def test_devices_that_are_all_different_are_cut_and_counted():
    leaves = gpt_leaves()
    spread = {d: d * 100 * MIB for d in range(512)}
    report = replace(large(), memory=memory(leaves, 512, 10 * MIB, None, spread))
    figure = report.figure("memory")
    assert len(figure.data[0].x) == MOST_BARS
    assert "more devices hold less" in figure.layout.title.text


def test_what_is_not_known_is_said_and_not_drawn():
    figure = unknown().figure("memory")
    assert "Temporaries and peak are not known." in figure.layout.title.text
    assert not any("temporaries" in bar.name for bar in figure.data)


@pytest.mark.parametrize(
    ("report", "arguments", "message"),
    [
        (
            attached(),
            ("memroy",),
            "no figure 'memroy'. Did you mean 'memory'? The figures are memory, roofline, timeline",
        ),
        (attached(), ("memory", "drak"), "no theme 'drak'. Did you mean 'dark'? The themes are light, dark"),
        (bare(), ("memory",), "this report knows nothing of memory, so it has no memory figure"),
        (
            simulated(),
            ("roofline",),
            "this report predicts no step time, so it has no roofline figure: add --on v5e, or another chip",
        ),
    ],
)
def test_what_there_is_no_figure_for_is_said_in_one_line(report, arguments, message):
    with pytest.raises(ShardError) as error:
        report.figure(*arguments)
    assert str(error.value) == message
