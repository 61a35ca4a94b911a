"""Compared strategies for a reader: what the sentences answer, one row a trial, text."""

import re
from dataclasses import replace
from typing import Any

import pytest
from support.browsing import chromium
from support.markup import Reader, assert_inert, without_svg
from support.sample_collectives import GPT, MIB
from support.sample_comparisons import (
    COMPARISONS,
    HEADS,
    alone,
    hostile,
    interrupted,
    many,
    measured_trials,
    none_ran,
    one_too_big,
    predicted,
    simulated,
    trial,
)
from support.sample_reports import wrong

from jaxshard_magic.report.comparison import Comparison, Trial
from jaxshard_magic.views import words
from jaxshard_magic.views.comparison import data
from jaxshard_magic.views.comparison import html as views
from jaxshard_magic.views.format import SPACE, UNKNOWN
from jaxshard_magic.views.terminal import display_width


def told(text: str) -> str:
    return text.replace(SPACE, " ").replace("\u00a0", " ")


def lead(found: Comparison) -> str:
    return told("".join(span.text for span in words.comparison_lead(found)))


def of(*trials: Trial) -> Comparison:
    return Comparison("train_step", trials)


def small(strategy: str, peak: float, step: float | None = 40.0, **options: Any) -> Trial:
    return trial(strategy, {"data": 8}, peak, (step, None), {"data": 8}, **options)


def rows(found: Comparison) -> dict[str, list[str]]:
    """The cells of each trial's row by what it is called, in the order of the table."""
    table = without_svg(found.to_html()).partition("</table>")[0]
    lines = re.findall(r"<tr>(.*?)</tr>", table.partition("<tbody>")[2], flags=re.DOTALL)
    read = [[Reader(cell).text for cell in re.findall(r"<td.*?>(.*?)</td>", line)] for line in lines]
    return {row[0]: row[1:] for row in read}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            measured_trials(),
            "Fastest: fsdp+tp bf16, 39.0 ms at 3.44 GiB. Least memory: pp+dp zb-h1, 3.12 GiB at 41.6 ms."
            " One of six could not run.",
        ),
        (
            predicted(),
            "Fastest, and least memory: pp+dp, 39.2 ms predicted, 3.12 GiB. One of five could not run."
            " One of five does not fit.",
        ),
        (
            simulated(),
            "Least memory: fsdp, 4.18 GiB.",
        ),
        (alone(), "fsdp: 53.6 ms, 4.18 GiB."),
        (none_ran(), "None of two could run."),
        (
            interrupted(),
            "Fastest, and least memory: fsdp+tp bf16, 39.0 ms, 3.44 GiB."
            " One of three did not run to the end. Two were not tried.",
        ),
        (
            one_too_big(),
            "Fastest, and least memory: fsdp+tp, 47.3 ms, 5.09 GiB. One of three does not fit."
            " One of three has other numbers than the plain step.",
        ),
        (of(small("dp", 20.0)), "It does not fit."),
        (of(small("dp", 20.0), small("fsdp", 16.0)), "None of two fits."),
        (of(small("dp", 20.0), HEADS), "One of two could not run. One of two does not fit."),
        (of(), "Nothing has been tried."),
    ],
)
def test_the_first_sentence_answers(found: Comparison, said: str):
    assert lead(found) == said


def test_a_trial_is_called_by_what_tells_it_from_the_others():
    common = {"microbatches": 8, "precision": "bf16"}
    found = of(
        small("dp", 4.0, **common),
        small("fsdp", 4.0, **common, remat="full"),
        small("fsdp", 4.0, **common),
        trial("fsdp", {"data": 4, "model": 2}, 4.0, (40.0, None), {}, **common),
    )
    assert [name.text for name in words.trial_names(found).values()] == [
        "dp",
        "fsdp remat full",
        "fsdp data=8",
        "fsdp data=4 model=2",
    ]
    assert "; all with --microbatches 8 --precision bf16." in words.comparison_about(found)


def test_trials_stand_by_step_time_then_not_fitting_then_not_run():
    names = words.trial_names(measured_trials())
    assert [names[t.line].text for t in data.sorted_trials(measured_trials())] == [
        "fsdp+tp bf16",
        "dp",
        "pp+dp zb-h1",
        "fsdp+tp",
        "fsdp",
        "tp",
    ]
    assert [t.strategy for t in data.sorted_trials(predicted())] == ["pp+dp", "fsdp+tp", "fsdp", "dp", "tp"]


def test_a_row_tells_what_was_asked():
    found = rows(measured_trials())
    # the pipeline's own bubble is measured; 8.35 T: an eighth of the step's 66.8 T
    assert found["pp+dp zb-h1pipe=4 data=2"] == [
        "\u2714\ufe0e yes",
        "3.12 GiB",
        "41.6 ms",
        "255",
        UNKNOWN,
        "24.0",
        words.percent_text(measured_trials()["pp+dp"].bubble),
        "8.35 T",
        "\u2714\ufe0e yes 4e\u22126",
    ]
    assert found["fsdp+tp bf16data=4 model=2"][-1] == "\u2714\ufe0e to bf16 0.0031"
    assert found["tpmodel=8"] == [
        "\u2716 no",
        '12 heads do not divide by model=8 (blocks.attn.qkv.kernel, dim 3). Try --mesh "data=2 model=4"',
    ]


def test_what_does_not_fit_or_is_not_the_same_has_its_sign_and_its_word():
    found = rows(one_too_big())
    assert found["dpdata=8"][:3] == ["\u2716 no", "17.2 GiB", "20.5 ms predicted"]
    assert found["fsdpdata=8"][-1] == "\u2716 no 4.3e\u22124"
    assert found["dpdata=8"][-1] == "not checked"
    assert [row[0] for row in rows(simulated()).values()] == ["no limit"] * 3


def test_a_trial_with_other_numbers_is_no_answer():
    quick, other = small("fsdp", 4.0, 1.0), small("dp", 5.0, 40.0)
    assert quick.report is not None
    quick = replace(quick, report=replace(quick.report, check=wrong().check))
    found = of(quick, other)
    assert found.fastest is other and found.smallest is other and found.front == (other,)
    assert words.front_text(found, quick) == "no: its numbers are not the same"


def test_simulated_devices_measure_no_chip_so_a_prediction_for_one_comes_first():
    both = trial("dp", {"data": 8}, 4.0, (1800.0, 46.0), {}, source="simulated")
    other = trial("fsdp", {"data": 8}, 4.0, (1600.0, 52.0), {}, source="simulated")
    assert of(both, other).source == "predicted"
    assert of(both, other).fastest is both
    attached = trial("fsdp", {"data": 8}, 4.0, (50.0, 46.0), {})
    beside = of(attached, both)
    assert beside.source == "measured" and beside.seconds(both) is None
    assert beside.fastest is attached and words.is_predicted(beside, both)


@pytest.mark.parametrize(
    ("peak", "step", "said"),
    [
        (4.0, 50.0, "on it"),
        (6.0, 50.0, "no: dp is faster and smaller"),
        (5.0, 50.0, "no: dp is faster and as small"),
        (6.0, 40.0, "no: dp is smaller and as fast"),
        (20.0, 50.0, "no: it does not fit"),
        (6.0, None, "unknown: no step time is known"),
    ],
)
def test_the_front_is_told_with_who_is_better(peak: float, step: float | None, said: str):
    found = of(small("dp", 5.0, 40.0), small("fsdp", peak, step))
    assert words.front_text(found, found["fsdp"]) == said


def test_who_is_better_is_named_up_to_two_and_then_counted():
    better = [small("dp", 5.0 - i, 40.0 + i, remat=f"r{i}") for i in range(4)]
    found = of(*better, small("fsdp", 6.0, 50.0))
    assert words.front_text(found, found["fsdp"]) == (
        "no: dp remat r0, dp remat r1 and two more are faster and smaller"
    )
    assert words.front_text(measured_trials(), measured_trials()[0]) == (
        "no: fsdp+tp bf16 and pp+dp zb-h1 are faster and smaller"
    )


def test_bytes_sent_have_a_column_for_each_axis_in_one_unit():
    sent = data.sent_columns(measured_trials())
    assert (sent.names, sent.unit) == (("data", "model", "pipe"), "MiB")
    # the loss is summed over both axes: 7 of 993 MiB, which would be a column of its own
    assert sent.has_omitted
    assert sent.text(1245 * MIB) == "1,245"
    assert sent.text(7) == "<0.01"
    assert sent.bytes_of(HEADS) == [None, None, None]
    text = Reader(measured_trials().to_html()).text
    assert "What goes over several axes at once, less than 0.1% of what a trial sends, is left out." in text


def test_much_over_several_axes_has_a_column_and_of_many_the_smallest_go_together():
    both = trial("dp", GPT, 4.0, (40.0, None), {"data": 10, "data+model": 30})
    assert data.sent_columns(of(both)).names == ("data", "data+model")
    axes = dict.fromkeys("abcdef", 2)
    wide = trial("dp", axes, 4.0, (40.0, None), {name: 60 - 12 * i for i, name in enumerate("fedcb")})
    sent = data.sent_columns(of(wide))
    assert sent.names == ("d", "e", "f", "others")
    assert sent.bytes_of(wide) == [36 * MIB, 48 * MIB, 60 * MIB, (24 + 12) * MIB]


def test_an_axis_has_one_hue_in_all_trials():
    html = measured_trials().to_html()
    assert set(re.findall(r'<b class="jss-a(\d)">data</b>', html)) == {"0"}
    assert set(re.findall(r'<b class="jss-a(\d)">pipe</b>', html)) == {"3"}


def test_a_prediction_stands_beside_what_was_measured_on_that_chip():
    # 46.0 is 2.7% less than 47.3
    found = measured_trials()
    assert told(words.prediction_text(found, found[0])) == "46.0 ms, \u22122.7%"
    assert words.prediction_text(predicted(), predicted()[0]) == ""


def test_predicted_bars_are_hollow_and_measured_ones_have_a_tick():
    bar = re.compile(r'viewBox="0 0 1000 9"[^>]*>(.*?)</svg>', flags=re.DOTALL)
    hollow = [drawn for drawn in bar.findall(predicted().to_html()) if 'fill="none"' in drawn]
    assert len(hollow) == 4 + 1  # the step times, and the bubble of one
    measured = bar.findall(measured_trials().to_html())
    assert sum("V9" in drawn for drawn in measured) == 5
    assert not any('fill="none" stroke="currentColor"' in drawn for drawn in measured)


@pytest.mark.parametrize("name", list(COMPARISONS))
def test_every_comparison_is_well_formed_without_script_or_anything_fetched(name: str):
    assert_inert(COMPARISONS[name]().to_html())


def test_names_cannot_break_out_of_the_markup_nor_move_a_cursor():
    html, text = hostile().to_html(), hostile().to_text(80)
    assert "<script" not in html and "<b>=2" not in html
    assert "\x1b" not in html + text


def test_key_numbers_stand_as_text_where_svg_and_styles_are_stripped():
    stripped = re.sub(r' (style|class)="[^"]*"', "", without_svg(measured_trials().to_html()))
    text = Reader(stripped).text
    for said in (
        "Fastest: fsdp+tp bf16, 39.0 ms at 3.44 GiB.",
        "peak of 15.75 GiB",
        "On the Pareto front, solid: fsdp+tp bf16, pp+dp zb-h1.",
        "38.1 ms, \u22122.3%",
        "no: fsdp+tp bf16 is faster and smaller",
        '%%shard fsdp+tp --mesh "data=4 model=2" --precision bf16',
        "train_step on 8 \u00d7 TPU v5 lite, attached.",
    ):
        assert said in re.sub(r"peak of ?15", "peak of 15", text), said


def test_each_trial_says_how_it_is_run_again():
    for found in (measured_trials(), interrupted()):
        for each in found.trials:
            if each.report is not None:
                assert f"    %%shard {each.line}" in found.to_text(60).splitlines()
                assert f"%%shard {each.line}" in Reader(found.to_html()).text


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("name", list(COMPARISONS))
def test_no_line_is_wider_than_asked_but_one_to_paste(name: str, width: int):
    for line in COMPARISONS[name]().to_text(width).split("\n"):
        assert display_width(line) <= width or line.startswith("    ")
        assert line.isprintable()


def test_the_width_stays_between_60_and_100():
    found = measured_trials()
    assert found.to_text(20) == found.to_text(60)
    assert found.to_text(500) == found.to_text(100)


def test_text_has_all_figures_in_tables_that_fit():
    lines = measured_trials().to_text(100).splitlines()
    head = next(line for line in lines if "fits" in line)
    row = next(line for line in lines if line.startswith("* fsdp+tp bf16   yes"))
    assert head.split() == ["strategy", "fits", "peak", "step", "predicted", "numbers"]
    assert row.split()[3:] == ["yes", "3.44", "GiB", "39.0", "ms", "38.1", "ms", "to", "bf16", "0.0031"]
    assert any("data 473 model 288" in line for line in lines)
    assert "x tp (model=8): 12 heads do not divide by model=8 (blocks.attn.qkv.kernel, dim 3). Fix:" in lines
    assert '    --mesh "data=2 model=4"' in lines


def test_what_is_not_known_is_a_dash_and_never_0():
    found = of(trial("dp", {"data": 8}, 4.0, (None, None), {}))
    text = found.to_text(80)
    assert not re.search(r"(?<![\d.])0 (ms|s|B)\b", text)
    assert lead(found) == "dp: 4.00 GiB."


def test_notes_of_the_comparison_and_what_was_left_are_told():
    found = replace(interrupted(), notes=("Not checked: the plain step does not run on one device.",))
    for text in (told(found.to_text(100)), Reader(found.to_html()).text):
        assert "Not checked: the plain step does not run on one device." in text
        assert 'Not tried: fsdp --mesh "data=8"; pp+dp --mesh "pipe=4 data=2" --schedule zb-h1.' in text


def test_what_a_cpu_took_is_compared_with_nothing():
    found = simulated()
    assert found.source is found.fastest is None and found.front == () and data.trial_points(found) == []
    said = "What a step took on this CPU says nothing about an accelerator, and is not compared"
    for text in (Reader(found.to_html()).text, " ".join(found.to_text(100).split())):
        assert f"{said}; --on v5e predicts a chip's." in text
        assert "1.62" not in text and "1.99" not in text


def test_to_html_writes_a_whole_document_and_returns_its_path(tmp_path):
    path = measured_trials().to_html(tmp_path / "compared.html")
    html = path.read_text("utf-8")
    assert html.startswith("<!doctype html>") and measured_trials().to_html() in html
    assert "<title>train_step, compared</title>" in html
    assert html == views.page(measured_trials())


def test_a_comparison_shows_itself_where_the_extension_is_not_loaded():
    class Printer:
        said = ""

        def text(self, text: str) -> None:
            self.said += text

    found, printer = measured_trials(), Printer()
    found._repr_pretty_(printer, False)
    assert printer.said == found.to_text() and found._repr_html_() == found.to_html()


def test_forty_trials_are_all_listed():
    assert len(rows(many())) == 40
    assert len(many().to_html()) < 250_000


@pytest.mark.ci
@pytest.mark.parametrize("width", [900, 620])
def test_nothing_is_cut_off_in_a_browser(width: int, tmp_path):
    with chromium() as browser:
        page = browser.new_page(viewport={"width": width, "height": 600})
        for name in ("measured_trials", "predicted", "many", "one_too_big"):
            page.goto(COMPARISONS[name]().to_html(tmp_path / "page.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name


def test_two_that_are_as_fast_as_it_is_told_are_both_named():
    axes = {"data": 8}
    found = of(
        trial("dp", axes, 4.0, (None, 41.62), {}),
        trial("fsdp", axes, 3.0, (None, 41.64), {}),
        trial("tp", {"model": 8}, 3.0, (None, 50.0), {}),
    )
    assert lead(found) == "Fastest, and least memory: fsdp, 41.6 ms predicted, 3.00 GiB."
    apart = of(*found.trials[:1], trial("fsdp", axes, 5.0, (None, 41.64), {}), *found.trials[2:])
    assert lead(apart) == (
        "Fastest: dp and fsdp, 41.6 ms predicted at 4.00 GiB and 5.00 GiB. Least memory: tp, 3.00 GiB at 50.0 ms."
    )
    same = of(*found.trials[:1], replace(found.trials[0], strategy="fsdp", line="fsdp"))
    assert lead(same) == "Fastest, and least memory: dp and fsdp, 41.6 ms predicted, 4.00 GiB."
