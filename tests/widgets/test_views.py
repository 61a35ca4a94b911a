"""What each view says: Python's own words, a row for each thing, and a way to what is left out."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.browsing import Shown, Stage, expect
from support.sample_pipelines import reported
from support.sample_reports import (
    MIB,
    SAMPLES,
    attached,
    divided,
    dry,
    gpt_leaves,
    hinted,
    large,
    looped,
    measured,
    memory,
    over_hosts,
    simulated,
    too_big,
    toy,
    unknown,
    wrong,
)
from support.sample_staged import staged

from jaxshard_magic.report import Buffer, Collective, LiveMemory, Report, SourceExcerpt
from jaxshard_magic.views.payload import payload
from jaxshard_magic.views.payload_encoding import compressed

if TYPE_CHECKING:
    from playwright.sync_api import Locator


def words(text: str) -> str:
    """Text without what separates its pieces in the page."""
    return "".join(text.replace("\u202f", "").replace("\u00a0", "").split())


def said(shown: Shown, part: str) -> str:
    return words(shown.root.locator(part).first.inner_text())


@pytest.mark.parametrize("name", SAMPLES)
def test_the_header_says_what_python_says(name: str, show: Stage):
    data = payload(SAMPLES[name]())
    shown = show(SAMPLES[name](), ["header"])
    header = said(shown, "header")
    assert words("".join(text for text, _ in data["verdict"]["spans"])) in header
    for piece in [*data["notes"], data["mesh"]["text"], data["title"]["strategy"]]:
        assert words(piece) in header
    for figure in data["figures"]:
        label = words(figure["label"])
        assert label[0].upper() + label[1:] + words(figure["value"]) in header
        assert words(figure["note"]) in header
    for advice in data["advice"][: data["hints"]]:
        assert words(advice["head"] + advice["rest"]) in header


@pytest.mark.parametrize("made", [looped, simulated])
def test_where_figures_come_from_and_leaves_with_noise_are_told_under_the_view(made: Callable[[], Report], show: Stage):
    shown, data = show(made()), payload(made())
    foot = shown.root.get_by_role("group", name="Notes")
    told = words(foot.inner_text())
    assert data["foot"]
    assert all(words(note) in told for note in data["foot"])
    for line, leaves in (data["check"] or {"noise": ()})["noise"]:
        assert words(line) in told and all(words(path + much) in told for path, much in leaves)
    box, view = foot.bounding_box(), shown.panel.bounding_box()
    assert box is not None and view is not None and box["y"] >= view["y"] + view["height"]


def test_a_payload_that_an_earlier_version_saved_is_drawn(show: Stage):
    data = payload(wrong())
    del data["foot"], data["time"]["own"], data["check"]["noise"]
    data["time"]["parts"][0][0] = None
    data["check"]["lines"] = [[line, [path for path, _ in leaves]] for line, leaves in data["check"]["lines"]]
    shown = show(compressed(data, 4), ["header"])
    header = said(shown, "header")
    assert "compute38%" in header and "2leavesnotthesame:params.wte.embedding" in header
    assert not show.wrong


def test_a_report_that_does_not_fit_says_so_with_a_sign_and_by_how_much(show: Stage):
    shown = show(too_big(), tab="memory")
    verdict = shown.root.locator(".jsm-verdict")
    expect(verdict).to_contain_text("Does not fit")
    expect(verdict.get_by_role("img", name="error")).to_be_visible()
    expect(shown.panel).to_contain_text("too much")


def test_three_hints_have_a_line_each_and_the_others_open_on_demand(show: Stage):
    shown = show(hinted(), ["header"])
    hints = shown.root.locator(".jsm-advice li")
    assert hints.locator("visible=true").locator(".jsm-hint").count() == 3
    assert all(height(hint) < 28 for hint in hints.all()[:3])
    shown.root.get_by_role("button", name="4 more").click()
    assert shown.root.locator(".jsm-advice li:visible").count() == 7
    expect(hints.nth(3)).to_be_focused()


def test_a_click_shows_a_hint_whole_and_another_folds_it(show: Stage):
    shown = show(hinted(), ["header"])
    hint = shown.root.locator(".jsm-advice li").nth(1)
    one_line = height(hint)
    said = hint.get_by_role("button").first
    for expanded in ("true", "false"):
        said.click()
        expect(said).to_have_attribute("aria-expanded", expanded)
        assert (height(hint) > 1.5 * one_line) == (expanded == "true")


def height(part: "Locator") -> float:
    box = part.bounding_box()
    assert box is not None
    return box["height"]


@pytest.mark.parametrize("made", [attached, hinted, looped, simulated, staged, dry])
def test_the_views_of_a_usual_report_begin_within_330_px(made: Callable[[], Report], show: Stage):
    shown = show(made())
    box = shown.root.get_by_role("tablist").bounding_box()
    top = shown.root.bounding_box()
    assert box is not None and top is not None
    assert box["y"] - top["y"] <= 330


@pytest.mark.parametrize(("made", "tab"), [(attached, "Layout"), (too_big, "Memory"), (reported, "Pipeline")])
def test_what_does_not_fit_opens_on_memory_and_a_pipeline_on_its_timeline(
    made: Callable[[], Report], tab: str, show: Stage
):
    expect(show(made()).root.get_by_role("tab", selected=True)).to_contain_text(tab)


def test_up_to_sixteen_devices_have_a_bar_each(show: Stage):
    shown = show(attached(), ["memory"])
    expect(shown.panel.get_by_role("option")).to_have_count(8)
    expect(shown.panel).to_contain_text("limit 15.75\u202fGiB")


def test_512_devices_share_bars_and_the_one_that_differs_has_its_own(show: Stage):
    shown = show(large(), ["memory"])
    names = [words(each.get_attribute("aria-label") or "") for each in shown.panel.get_by_role("option").all()]
    assert 2 <= len(names) <= 9
    assert names[0].startswith("device17:")
    assert any(name.startswith("devices64to511,448alike:") for name in names)


def test_the_mesh_is_filled_by_memory_or_outlined_where_there_is_no_limit(show: Stage):
    def filled(made: Report) -> list[float]:
        cells = show(made, ["header"]).root.locator(".jsm-glyph rect:not(.jsm-frame)")
        return cells.evaluate_all("cells => cells.map(cell => Number(cell.getAttribute('height')))")

    assert filled(simulated()) == [0] * 8
    first, *others = filled(attached())
    assert first == pytest.approx(11 * 5.09 / 15.75, abs=0.1) and first > others[0] > 0
    assert filled(toy()) == [1] * 8, "what is there is seen"


def test_a_line_in_the_mesh_stands_where_another_host_begins(show: Stage):
    shown = show(over_hosts(), ["header"])
    glyph = shown.root.locator(".jsm-glyph svg")
    assert (glyph.get_attribute("aria-label") or "").startswith("8 devices on 2 hosts: data 4 by model 2")
    cells = [float(each.get_attribute("x") or 0) for each in glyph.locator("rect.jsm-frame").all()]
    across = sorted(set(cells))
    drawn = shown.root.locator(".jsm-glyph-hosts").get_attribute("d") or ""
    lines = [float(x) for x in re.findall(r"M([\d.]+) ", drawn)]
    assert len(lines) == 2 and len(set(lines)) == 1, "one for each of the two rows"
    assert across[1] < lines[0] < across[2], "between the second and the third of data"
    assert show(simulated(), ["header"]).root.locator(".jsm-glyph-hosts").count() == 0
    shown = show(over_hosts(), ["layout"])
    shown.panel.locator(".jsm-map").press("Enter")
    expect(shown.panel).to_contain_text(", host ")


@pytest.mark.parametrize("width", [900, 620])
def test_bars_far_below_the_limit_have_a_scale_of_their_own_and_say_so(width: int, show: Stage):
    shown = show(toy(), ["memory"], width)
    expect(shown.panel).to_contain_text("Bars below are drawn 7,681 times as long as on the scale of the limit, 15.75")
    longest = shown.panel.locator(".jsm-bar-row").first.locator("rect").last.bounding_box()
    whole, seen = (shown.panel.locator(f".jsm-whole-{part}").bounding_box() for part in ("all", "seen"))
    assert longest and whole and seen
    assert longest["x"] + longest["width"] > 0.9 * width - 80 and 1 <= seen["width"] <= 2 < whole["width"]
    expect(shown.panel.locator(".jsm-bars")).not_to_contain_text("limit")
    assert shown.overflowing() == []
    assert "jsm-whole" not in show(attached(), ["memory"]).panel.inner_html()


def test_memory_that_is_not_known_is_a_dash_and_not_nothing(show: Stage):
    shown = show(unknown(), ["memory"])
    assert "\u2013" in shown.panel.inner_text()
    assert "temporaries not known" in (shown.panel.get_by_role("option").first.get_attribute("aria-label") or "")


def test_every_collective_has_a_row_and_the_many_are_listed_on_demand(show: Stage):
    report = replace(attached(), sources=())
    shown = show(report, ["communication"])
    expect(shown.panel.locator(".jsm-collectives tbody tr")).to_have_count(len(report.collectives or ()))
    many = tuple(Collective("all-gather", ("data",), 4, 1, MIB, i + 1) for i in range(100))
    shown = show(replace(report, collectives=many), ["communication"])
    expect(shown.panel).to_contain_text("40 more send 820\u202fB")
    shown.panel.get_by_role("button", name="Show all").click()
    expect(shown.panel.locator(".jsm-collectives tbody tr")).to_have_count(100)


def test_nothing_sent_is_a_sentence_and_no_table(show: Stage):
    shown = show(replace(attached(), collectives=()), ["communication"])
    assert shown.panel.get_by_role("table").count() == 0
    assert len(shown.panel.inner_text()) > 10


def test_a_bar_tells_its_parts_under_the_pointer(show: Stage):
    even = replace(attached(), memory=memory(gpt_leaves(), 8, 4506 * MIB, None))
    shown = show(even, ["memory"])
    shown.panel.get_by_role("option").nth(2).hover()
    tip = shown.panel.locator(".jsm-tip")
    expect(tip).to_contain_text("device 2")
    for role in ("params", "optimizer", "batch", "temporaries", "peak"):
        expect(tip).to_contain_text(role)
    show.page.mouse.move(5, 890)
    expect(tip).to_be_hidden()


def filled(live: LiveMemory | None, buffers: tuple[Buffer, ...] | None) -> Report:
    report = attached()
    assert report.memory is not None
    held = replace(report.memory, live=live, buffers=buffers, others=(3, 5 * MIB) if buffers else None)
    cell = SourceExcerpt("cell [7]", (1, 2), ("%%shard dp", "scores = q @ k.T  # <b>here</b>"), home=True)
    return replace(report, memory=held, sources=(cell,))


CURVE = LiveMemory((0, 4, 9), (MIB, 6 * MIB, 2 * MIB), 12, 1, (("forward", 0), ("backward", 5)), "cell [7]", 2)


def test_live_bytes_and_the_largest_buffers_are_told_with_their_lines(show: Stage):
    scores = Buffer(4 * MIB, 2, "f32", (1024, 512), "dot_general", "forward", "cell [7]", 2)
    stranger = Buffer(MIB, 1, "bf16", (8, 4), "a.very.long.path.of.a.<i>leaf</i>, gathered", None, None, None)
    shown = show(filled(CURVE, (scores, stranger)), ["memory"])
    curve = shown.panel.get_by_role("img", name="Live bytes through the step")
    expect(curve).to_have_attribute(
        "aria-label", "Live bytes through the step: at most 6.00\u202fMiB in use, cell [7], line 2"
    )
    expect(curve).to_contain_text("backward")
    rows = shown.panel.locator(".jsm-buffers tbody tr")
    expect(rows).to_have_count(2)
    assert words(rows.nth(0).inner_text()) == words(
        "4.00 MiB f32[1024,512] \u00d72 matmul forward [7]:2 scores = q @ k.T  # <b>here</b>"
    )
    expect(rows.nth(1).locator(".jsm-what")).to_have_attribute("title", stranger.what)
    expect(rows.nth(1)).to_contain_text("a.very.l\u2026/i>, gathered")
    assert "\u2013" in rows.nth(1).inner_text()
    expect(shown.panel).to_contain_text("3 buffers are 50% of the temporaries in use there; 3 more are 5.00\u202fMiB")
    assert show.wrong == []


def test_a_compiler_that_tells_no_buffers_gets_no_empty_table(show: Stage):
    shown = show(filled(None, None), ["memory"])
    assert shown.panel.locator(".jsm-buffers, .jsm-live").count() == 0


def test_a_measured_peak_stands_beside_the_computed_one(show: Stage):
    report = attached()
    assert report.memory is not None
    rows = [replace(d, measured=round((d.peak or 0) * 1.05)) for d in report.memory.per_device]
    shown = show(replace(report, memory=replace(report.memory, per_device=tuple(rows))), ["memory"])
    expect(shown.panel.locator(".jsm-lead")).to_contain_text("on device 0, 5.0% more than computed")


def test_a_bar_has_a_tick_at_the_measured_peak_and_tells_the_difference(show: Stage):
    shown = show(measured(), ["memory"])
    rows = shown.panel.get_by_role("option")
    expect(shown.panel.locator(".jsm-bar-row .jsm-bar-measured")).to_have_count(7)  # the last device told none
    expect(rows.nth(7).locator("text").last).to_have_text("\u2013")
    assert "measured 4.72\u202fGiB, 2.0% more than computed;" in (rows.nth(1).get_attribute("aria-label") or "")
    expect(shown.panel.locator(".jsm-legend")).to_contain_text("measured peak")
    rows.nth(1).hover()
    tip = words(shown.panel.locator(".jsm-tip").inner_text())
    assert "peak,computed4.63GiBmeasured4.72GiBerror2.0%more" in tip


def test_a_report_that_measured_nothing_says_nothing_of_it(show: Stage):
    shown = show(attached(), ["memory"])
    assert "measured" not in shown.panel.inner_text()
    assert shown.panel.locator(".jsm-bar-measured").count() == 0


def test_a_tick_lies_where_the_scale_has_its_bytes(show: Stage):
    report = measured()
    assert report.memory is not None
    rows = [replace(d, measured=4 * 2**30) for d in report.memory.per_device]
    shown = show(replace(report, memory=replace(report.memory, per_device=tuple(rows))), ["memory"])
    tick = shown.panel.locator(".jsm-bar-row .jsm-bar-measured").first.bounding_box()
    label = shown.panel.locator(".jsm-bars-frame text", has_text="4").filter(has_not_text=".").first.bounding_box()
    assert tick and label
    assert abs(tick["x"] + tick["width"] / 2 - label["x"] - label["width"] / 2) < 2


def test_the_line_of_a_buffer_opens_it_in_the_communication(show: Stage):
    shown = show(measured(), tab="memory")
    links = shown.panel.locator(".jsm-buffers").get_by_role("button")
    expect(links).to_have_count(6)  # of one of the seven no line is known
    links.nth(2).click()
    expect(shown.root.get_by_role("tab", name="Communication")).to_have_attribute("aria-selected", "true")
    line = shown.panel.locator(".jsm-line.jsm-chosen")
    expect(line).to_contain_text("return cross_entropy(logits, targets).mean()")
    expect(line).to_have_attribute("aria-expanded", "true")


def test_a_line_that_the_communication_does_not_show_is_no_link(show: Stage):
    shown = show(replace(measured(), collectives=()), ["memory", "communication"], tab="memory")
    assert shown.panel.locator(".jsm-buffers").get_by_role("button").count() == 0
    expect(shown.panel.locator(".jsm-buffers tbody tr").nth(2)).to_contain_text("15")


def test_ranges_of_positions_are_not_broken_where_a_row_is_narrow(show: Stage):
    ranges = show(divided(), ["communication"], 620).panel.locator(".jsm-drawn span span")
    lines = ranges.evaluate_all("all => all.map((one) => [one.textContent, one.getClientRects().length])")
    assert ["2304-2559", 1] in lines and {n for _, n in lines} == {1}
