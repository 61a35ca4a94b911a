"""`report.figure("memory")`: a plotly chart in the report's look, with its figures in binary units."""

from dataclasses import replace

import pytest
from sample_reports import (
    MIB,
    SAMPLES,
    attached,
    bare,
    gpt_leaves,
    large,
    memory,
    simulated,
    too_big,
    unknown,
)

from jaxshard_magic.errors import ShardError
from jaxshard_magic.views.colours import DARK, LIGHT
from jaxshard_magic.views.figures import MOST_BARS
from jaxshard_magic.views.format import SPACE


def plain(text: str) -> str:
    return text.replace(SPACE, " ").replace("\u00a0", " ")


def ticks(figure, axis: str) -> list[str]:
    return [plain(text) for text in figure.layout[axis].ticktext]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", [name for name in SAMPLES if SAMPLES[name]().memory is not None])
def test_every_report_with_memory_has_its_figure(name, theme):
    assert SAMPLES[name]().figure("memory", theme=theme).to_json()


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
        (attached(), ("memroy",), "no figure 'memroy'; the figures are memory. Did you mean 'memory'?"),
        (attached(), ("memory", "drak"), "no theme 'drak'; the themes are light, dark. Did you mean 'dark'?"),
        (bare(), ("memory",), "this report knows nothing of memory, so it has no memory figure"),
    ],
)
def test_what_there_is_no_figure_for_is_said_in_one_line(report, arguments, message):
    with pytest.raises(ShardError) as error:
        report.figure(*arguments)
    assert str(error.value) == message
