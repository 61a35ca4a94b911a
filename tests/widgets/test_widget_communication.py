"""Communication by the user's lines: all that is sent is shown once, by pointer and by keys, in words that hold."""

import json
import re
import zlib
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from support.browsing import Shown, Stage, expect
from support.sample_collectives import GPT_COLLECTIVES, predicted_timing
from support.sample_reports import MIB, SAMPLES, attached, changed, files, hostile, partly, simulated, too_big
from support.thinned import thinned

from jaxshard_magic.report import Collective, Report
from jaxshard_magic.views.payload import payload

if TYPE_CHECKING:
    from playwright.sync_api import Locator

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SHOWN = ("attached", "simulated", "files", "partly", "changed")
"""The reports whose lines are known, in part at least."""


def text(of: "Locator") -> str:
    return of.inner_text().replace("\u202f", " ").replace("\u00a0", " ")


def lines(shown: Shown) -> "Locator":
    """The lines that move something."""
    return shown.panel.locator(".jsm-moving")


def line(shown: Shown, name: str) -> "Locator":
    return shown.panel.get_by_role("button", name=re.compile(rf"^{re.escape(name)}: "))


def detail(shown: Shown) -> "Locator":
    return shown.panel.locator(".jsm-moves")


def rows(shown: Shown) -> list[list[str]]:
    """The open line's detail: the text of each cell."""
    return [[text(cell) for cell in row.locator("td").all()] for row in detail(shown).locator("tbody tr").all()]


def size(told: str) -> float:
    """The bytes in a cell."""
    number, unit = re.fullmatch(r"\u2265?([\d.]+) ?([KMG]?i?B)", told.strip()).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


def told_by(data: dict[str, Any]) -> bytes:
    return zlib.compress(json.dumps(data).encode())


@pytest.mark.parametrize("name", thinned(SHOWN, ("partly",)))
def test_all_lines_together_and_their_details_come_to_what_is_sent(name: str, show: Stage):
    report = SAMPLES[name]()
    shown = show(report, ["communication"])
    column = 5
    whole = parts = 0.0
    for each in lines(shown).all():
        whole += size(text(each.locator(".jsm-by")))
        if each.get_attribute("aria-expanded") != "true":
            each.click()
        for more in shown.panel.get_by_role("button", name="Show all").all():
            more.click()
        parts += sum(size(cells[column]) for cells in rows(shown))
    total = sum(c.wire_bytes for c in report.collectives or ())
    assert whole == pytest.approx(total, rel=0.005)  # three digits each
    assert parts == pytest.approx(total, rel=0.005)


def test_the_axes_are_told_with_their_times_and_their_share_of_the_step(show: Stage):
    shown = show(attached(), ["communication"])
    table = shown.panel.get_by_role("table", name="What is sent over each set of mesh axes")
    first = [text(cell) for cell in table.locator("tbody tr").first.locator("td").all()]
    # 739.1 MB over 34 GB/s are 21.7 ms of 46.0
    assert first[:4] == ["data 4", "21.7 ms", "47%", "705MiB"]
    assert "AG all-gather 14.3 ms, RS reduce-scatter 7.15 ms, A2A all-to-all 278 us" in first[4]


def test_without_a_prediction_bytes_take_the_place_of_times(show: Stage):
    shown = show(simulated(), ["communication"])
    assert [text(head) for head in shown.panel.get_by_role("columnheader").all()][:4] == [
        "over axes", "sent", "share", "by collective",
    ]  # fmt: skip
    assert "predicted" not in text(shown.panel)
    assert "of step" not in text(shown.panel)


def test_the_heaviest_line_is_open_and_tells_what_moves_in_which_phase(show: Stage):
    shown = show(attached(), ["communication"])
    expect(line(shown, "cell [7], line 14")).to_have_attribute("aria-expanded", "true")
    assert lines(shown).count() == 7
    assert len(rows(shown)) == 2
    line(shown, "gpt2.py, line 44").click()
    (up,) = rows(shown)
    # gathered over data in both passes of twelve layers: 24 of 4.5 MiB, three quarters of it sent, at 34 GB/s
    assert up == [
        "all-gather data",
        "",
        "params.blocks.mlp.up.kernel",
        "both",
        "24 \u00d7 4.50 MiB",
        "81.0MiB",
        "2.50 ms",
        "[7]:12",
    ]


def test_a_line_says_all_of_itself_to_a_screen_reader(show: Stage):
    name = line(show(attached(), ["communication"]), "cell [7], line 14").get_attribute("aria-label") or ""
    assert name.replace("\u202f", " ") == (
        "cell [7], line 14: 10.2 ms; 22% of the step; 331 MiB sent; all-gather over data, 2 times;"
        ' reduce-scatter over data, 1 time. logits = (x @ params["wte"].T).astype(jnp.float32)'
    )


def test_a_click_opens_one_line_and_closes_it(show: Stage):
    shown = show(attached(), ["communication"])
    line(shown, "cell [7], line 9").click()
    assert [row[0] for row in rows(shown)] == ["all-to-all data"]
    expect(detail(shown)).to_have_count(1)
    line(shown, "cell [7], line 9").click()
    expect(detail(shown)).to_have_count(0)
    expect(shown.panel.locator("[aria-expanded=true]")).to_have_count(0)


def test_arrows_move_between_lines_of_all_sources_and_enter_opens(show: Stage):
    shown = show(files(), ["communication"])
    expect(shown.panel.locator(".jsm-moving[tabindex='0']")).to_have_count(1)
    line(shown, "cell [12], line 90").focus()
    show.page.keyboard.press("ArrowDown")
    expect(line(shown, "model.py, line 31")).to_be_focused()
    show.page.keyboard.press("Enter")
    expect(line(shown, "model.py, line 31")).to_have_attribute("aria-expanded", "true")
    show.page.keyboard.press("End")
    expect(line(shown, "layers.py, line 1")).to_be_focused()
    show.page.keyboard.press("Home")
    expect(line(shown, "cell [12], line 20")).to_be_focused()


def test_a_cell_is_shown_whole_and_a_long_one_around_its_lines(show: Stage):
    numbers = ".jsm-line-number"
    both = [*range(1, 24), *range(28, 47)]  # the cell, and what is there of the file
    assert show(attached(), ["communication"]).panel.locator(numbers).all_inner_texts() == [*map(str, both)]
    shown = show(files(), ["communication"])
    cell = shown.panel.get_by_role("region", name="cell [12]")
    kept = [*range(17, 28), *range(87, 94)]
    assert cell.locator(numbers).all_inner_texts() == [str(n) for n in kept]
    cell.get_by_role("button", name="\u2026 59 lines").click()
    assert cell.locator(numbers).all_inner_texts() == [str(n) for n in (*range(17, 94),)]
    expect(cell.locator(".jsm-line", has_text="x28 = f(x27, 28)")).to_be_focused()
    model = shown.panel.get_by_role("region", name="model.py")
    expect(model).to_contain_text("\u2026 172 lines")
    assert model.get_by_role("button", name="172").count() == 0, "there is no text to show"


@pytest.mark.ci
def test_what_no_line_is_known_of_stands_last(show: Stage):
    shown = show(partly(), ["communication"])
    last = shown.panel.get_by_role("region").last
    expect(last).to_have_attribute("aria-label", "not traced to a line")
    last.locator(".jsm-moving").click()
    last.get_by_role("button", name="Show all").click()
    kinds = {row[0] for row in rows(shown)}
    assert {"all-reduce data", "collective-permute groups of 2", "all-to-all model"} <= kinds
    unknown = next(row for row in rows(shown) if row[0].startswith("collective-permute"))
    assert unknown[1:4] == ["\u2013", "\u2013", "\u2013"] and unknown[6] == "\u2013"


def test_a_source_without_text_says_why_and_keeps_its_lines(show: Stage):
    shown = show(changed(), ["communication"])
    expect(shown.panel).to_contain_text("train.py: this file has changed since the step was traced")
    assert line(shown, "train.py, line 44").count() == line(shown, "gpt2.py, line 9").count() == 1
    expect(line(shown, "train.py, line 44")).to_contain_text("text not known")


def test_what_runs_at_least_so_often_says_so(show: Stage):
    shown = show(partly(), ["communication"])
    line(shown, "cell [7], line 14").click()
    (row,) = rows(shown)
    assert row[4:7] == ["\u226512 \u00d7 2.00 MiB", "\u226524.0MiB", "\u2265559 us"]
    reason = "The program decides while it runs how often: at least so much"
    assert detail(shown).get_by_title(reason).count() == 3
    assert "at least 12 times" in (line(shown, "cell [7], line 14").get_attribute("aria-label") or "")


def test_a_report_without_sources_has_the_plain_table(show: Stage):
    shown = show(too_big(), ["communication"])
    expect(shown.panel.get_by_role("table", name="Collectives").locator("tbody tr")).to_have_count(1)
    assert lines(shown).count() == 0


@pytest.mark.parametrize("name", SHOWN)
def test_a_group_is_drawn_as_the_devices_that_talk(name: str, show: Stage):
    shown = show(SAMPLES[name](), ["communication"])
    for label in detail(shown).get_by_role("img").all():
        said = label.get_attribute("aria-label") or ""
        assert said in (
            "2 groups of 4 devices, the first is 0, 2, 4, 6",
            "4 groups of 2 devices, the first is 0, 1",
        )


def linked(report: Report, said: str) -> bytes:
    """The payload with one more piece in its verdict, which leads to a line."""
    data = payload(report)
    data["verdict"]["spans"].append([said, "line"])
    return told_by(data)


@pytest.mark.parametrize(
    ("report", "said", "opened"),
    [
        (attached(), "cell [7], line 14", "cell [7], line 14"),
        (files(), "model.py, line 210", "model.py, line 210"),
        (files(), "layers.py, line 1", "layers.py, line 1"),
    ],
)
def test_a_line_in_the_verdict_opens_it(report: Report, said: str, opened: str, show: Stage):
    shown = show(linked(report, said))
    shown.root.locator("header").get_by_role("button", name=said).click()
    expect(shown.root.get_by_role("tab", selected=True)).to_contain_text("Communication")
    expect(line(shown, opened)).to_have_attribute("aria-expanded", "true")
    expect(line(shown, opened)).to_be_in_viewport()


def test_a_line_of_the_verdict_leads_to_its_row_or_nowhere(
    show: Stage,
):
    shown = show(linked(attached(), "cell [7], line 3"))
    shown.root.locator("header").get_by_role("button", name="cell [7], line 3").click()
    expect(shown.root.get_by_role("tab", selected=True)).to_contain_text("Communication")
    expect(shown.panel.locator(".jsm-chosen")).to_contain_text("3")
    expect(shown.panel.locator(".jsm-chosen")).to_be_in_viewport()
    shown = show(linked(attached(), "cell [2], line 3"))
    header = shown.root.locator("header")
    expect(header).to_contain_text("cell [2], line 3")
    assert header.get_by_role("button", name="cell [2], line 3").count() == 0


def test_code_is_coloured_and_stays_as_it_was_typed(show: Stage):
    shown = show(attached(), ["communication"])
    code = shown.panel.locator("pre")
    assert [each.text_content() for each in code.all()] == [
        text for source in attached().sources for text in source.text
    ]
    assert code.nth(6).locator(".jsm-kw").all_inner_texts() == ["def"]
    assert code.nth(8).locator(".jsm-str").all_inner_texts() == ['"wte"', '"wpe"']
    assert code.nth(4).locator(".jsm-value").all_inner_texts() == ["3e-4", "0.1"]
    assert code.nth(10).locator(".jsm-com").count() == 1
    assert code.nth(0).locator(".jsm-kw").count() == 1


@pytest.mark.parametrize(
    ("typed", "coloured"),
    [
        ("x1 = f2(3)", ["3"]),
        ("s = 'it''s'  # no", ["'it'", "'s'", "# no"]),
        (r"s = 'a\'b' + \"c\"".replace('\\"', '"'), [r"'a\'b'", '"c"']),
        ("s = f'{x}' + rb'y'", ["f'{x}'", "rb'y'"]),
        ("y = x if x is None else not x", ["if", "is", "None", "else", "not"]),
        ("iffy = android", []),
        ("n = 0xff + 1_000 + .5 + 2e-3j", ["0xff", "1_000", ".5", "2e-3j"]),
    ],
)
def test_words_of_python_are_told_apart(typed: str, coloured: list[str], show: Stage):
    report = attached()
    source = replace(report.sources[0], text=(typed, *report.sources[0].text[1:]))
    shown = show(replace(report, sources=(source,)), ["communication"])
    first = shown.panel.locator("pre").first
    assert first.text_content() == typed
    assert first.locator("span").all_inner_texts() == coloured


def test_a_text_over_several_lines_is_one_colour(show: Stage):
    report = attached()
    text = ('def f():\n    """One.\n\n    def two\n    """\n    return 1' + "\n" * 18).split("\n")
    source = replace(report.sources[0], text=tuple(text), numbers=tuple(range(1, len(text) + 1)))
    shown = show(replace(report, sources=(source,)), ["communication"])
    code = shown.panel.locator("pre")
    assert code.nth(1).locator(".jsm-str").all_inner_texts() == ['"""One.']
    assert [code.nth(i).locator(".jsm-kw").count() for i in (0, 3, 5)] == [1, 0, 1]


def test_names_from_code_are_text(show: Stage):
    shown = show(hostile(), ["communication"])
    for each in lines(shown).all():
        if each.get_attribute("aria-expanded") != "true":
            each.click()
        assert shown.panel.locator("script, i, a, img").count() == 0
        expect(shown.panel.locator("pre").first).to_contain_text("<script>alert('x')</script>")


@pytest.mark.parametrize(
    ("name", "width"),
    thinned(product([*SHOWN, "hostile"], (900, 620)), [("partly", 900), ("hostile", 620)]),
)
def test_every_line_fits_when_it_is_open_and_axe_finds_nothing(name: str, width: int, show: Stage):
    shown = show(SAMPLES[name](), ["communication"], width, "dark" if width == 620 else "light")
    for each in lines(shown).all():
        if each.get_attribute("aria-expanded") != "true":
            each.click()
        assert shown.overflowing() == []
    assert shown.violations(shown.panel) == []


@pytest.mark.ci
def test_a_line_that_moves_many_arrays_lists_the_rest_on_demand(show: Stage):
    many = tuple(replace(GPT_COLLECTIVES[0], what=f"w{i}", wire_bytes=MIB * (40 - i)) for i in range(40))
    shown = show(replace(attached(), collectives=many), ["communication"])
    assert len(rows(shown)) == 12
    expect(detail(shown)).to_contain_text("28 more send 406\u202fMiB")  # 28 + 27 + ... + 1
    detail(shown).get_by_role("button", name="Show all").click()
    assert len(rows(shown)) == 40


def strip(shown: Shown) -> "Locator":
    return shown.root.locator(".jsm-strip")


def labels(shown: Shown) -> list[str]:
    return [" ".join(text(each).split()) for each in strip(shown).locator(".jsm-strip-label:visible").all()]


def test_parts_of_the_predicted_step_are_labelled_where_they_have_room(show: Stage):
    shown = show(attached(), ["header"])
    assert labels(shown) == [
        "compute 38% 17.6 ms",
        "all-gather data 31% 14.3 ms",
        "reduce-scatter data 16% 7.15 ms",
        "all-reduce model 15% 6.71 ms",
    ]


def test_a_narrow_strip_drops_times_before_labels(show: Stage):
    shown = show(attached(), ["header"], 500)
    found = labels(shown)
    assert found[0] == "compute 38% 17.6 ms"
    assert all(not each.endswith("ms") for each in found[2:])
    assert shown.overflowing() == []


def test_the_strip_says_all_its_parts_to_a_screen_reader(show: Stage):
    label = strip(show(attached(), ["header"])).get_by_role("img").first.get_attribute("aria-label") or ""
    assert label.replace("\u202f", " ").startswith(
        "Predicted step of 46.0 ms: compute 38%, 17.6 ms; all-gather over data"
    )
    assert label.count(";") == 5


def test_many_small_parts_of_the_step_are_counted(show: Stage):
    report = attached()
    assert report.timing is not None
    kinds = [f"kind-{i}" for i in range(9)]
    small = tuple(Collective(kind, ("data",), 4, 1, MIB, MIB, 3e-4, exposed=3e-4) for kind in kinds)
    timing = replace(predicted_timing(small, None, 0), predicted_step_s=0.02)
    shown = show(replace(report, collectives=small, timing=timing), ["header"])
    expect(strip(shown)).to_contain_text("and 6 more, 9.0% together")


def test_without_a_prediction_there_is_no_strip(show: Stage):
    assert strip(show(simulated(), ["header"])).count() == 0
