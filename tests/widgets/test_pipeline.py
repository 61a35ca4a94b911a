"""The timeline in a real browser: pointed at, moved by keys, zoomed and panned; and what else the work could cost."""

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from support.browsing import Shown, Stage, expect
from support.sample_pipelines import PIPELINES, fused, interleaved, large, measured, one_f_one_b, reported, two_losses
from support.thinned import thinned

from jaxshard_magic.report import Pipeline
from jaxshard_magic.views import words
from jaxshard_magic.views.format import seconds_text
from jaxshard_magic.views.timeline.payload import packed_pipeline

if TYPE_CHECKING:
    from playwright.sync_api import Locator

TOP, PITCH, LANE = 18, 62, 20  # px of a timeline of up to eight ranks with its ideal


def drawn(show: Stage, p: Pipeline, width: int = 900, theme: str = "light") -> Shown:
    return show(packed_pipeline(p), None, width, theme)


def plot(shown: Shown) -> "Locator":
    return shown.root.get_by_role("application")


def tip(shown: Shown) -> "Locator":
    return shown.root.locator(".jsm-pp-tip")


def point(shown: Shown, p: Pipeline, rank: int, time: float, below: float = LANE / 2) -> tuple[float, float]:
    """Put the pointer on a rank at a time, where all of the time is on show."""
    box = plot(shown).bounding_box()
    assert box is not None
    end = max(event.end for event in (*p.events, *p.ideal_events))
    x, y = box["x"] + box["width"] * time / end, box["y"] + TOP + PITCH * rank + below
    shown.page.mouse.move(x, y)
    shown.settle()
    return x, y


def pixels(shown: Shown) -> str:
    """The picture, once it has been drawn."""
    shown.settle()
    return plot(shown).locator("canvas").evaluate("canvas => canvas.toDataURL()")


def event_of(p: Pipeline, action: str):
    return next(event for event in p.events if event.action == action)


@pytest.mark.ci
def test_an_action_under_the_pointer_is_told_with_its_durations(show: Stage):
    p = measured()
    shown, event = drawn(show, p), event_of(p, "1I3")
    point(shown, p, 1, (event.start + event.end) / 2)
    expect(tip(shown)).to_contain_text("1I3 input gradient, microbatch 3, stage 1")
    expect(tip(shown)).to_contain_text(f"measured {seconds_text(event.end - event.start)}")
    expect(tip(shown)).to_contain_text("ideal 1.14\u202fms")  # (3 x 1.10 + 1.24) / 4


def test_a_wait_names_what_was_waited_for(show: Stage):
    p = measured()
    shown, event = drawn(show, p), event_of(p, "0I0")
    point(shown, p, 0, (event.start + event.end) / 2)
    expect(tip(shown)).to_contain_text("before, waiting for 1I0")
    point(shown, p, 0, event.start - 1e-3)
    expect(tip(shown)).to_contain_text("waiting for 1I0, then 0I0")


@pytest.mark.ci
def test_the_first_action_of_a_loss_waits_for_no_stage_of_the_one_before(show: Stage):
    """Drawn as one loss of eight stages, the same action would wait for stage 3."""
    p = two_losses()
    late = tuple(replace(e, start=e.start + 2, end=e.end + 2) if int(e.action[0]) > 3 else e for e in p.events)
    for losses, waits in ((2, False), (1, True)):
        shown = drawn(show, made := replace(p, events=late, losses=losses))
        event = event_of(made, "4F0")
        point(shown, made, 0, (event.start + event.end) / 2)
        expect(tip(shown)).to_contain_text("4F0 forward, microbatch 0, stage 4")
        assert ("waiting for 3F0" in tip(shown).inner_text()) == waits


def test_the_curve_tells_what_is_held_with_its_bytes(show: Stage):
    p = measured()
    shown, event = drawn(show, p), event_of(p, "0F3")
    point(shown, p, 0, event.end, below=46)
    expect(tip(shown)).to_contain_text("stage 0 holds 4 (1.62\u202fGiB)")


def test_a_fused_action_tells_of_both(show: Stage):
    p = fused()
    shown, event = drawn(show, p), event_of(p, "1F2+2B0")
    point(shown, p, 1, (event.start + event.end) / 2)
    expect(tip(shown)).to_contain_text("1F2 forward, microbatch 2, stage 1")
    expect(tip(shown)).to_contain_text("2B0 backward, microbatch 0, stage 2")


def test_pointing_marks_a_microbatch_and_moves_nothing_else(show: Stage):
    p = measured()
    shown = drawn(show, p)
    before, height = pixels(shown), shown.root.evaluate("root => root.scrollHeight")
    event = event_of(p, "2F4")
    point(shown, p, 2, (event.start + event.end) / 2)
    assert pixels(shown) != before
    assert shown.root.evaluate("root => root.scrollHeight") == height
    shown.page.mouse.move(5, 5)
    assert pixels(shown) == before
    expect(tip(shown)).to_be_hidden()


def test_a_click_keeps_the_mark_and_a_second_one_takes_it_away(show: Stage):
    p = measured()
    shown, event = drawn(show, p), event_of(p, "2F4")
    shown.page.mouse.move(5, 5)
    before = pixels(shown)
    x, y = point(shown, p, 2, (event.start + event.end) / 2)
    shown.page.mouse.click(x, y)
    shown.page.mouse.move(5, 5)
    plot(shown).evaluate("node => node.blur()")
    assert pixels(shown) != before
    shown.page.mouse.click(x, y)
    shown.page.mouse.move(5, 5)
    plot(shown).evaluate("node => node.blur()")
    assert pixels(shown) == before


def test_keys_go_from_action_to_action_and_say_them(show: Stage):
    shown = drawn(show, one_f_one_b())
    spoken = shown.root.locator(".jsm-pp-chart [aria-live]")
    shown.root.get_by_role("button", name="Show the whole time").focus()
    shown.page.keyboard.press("Tab")
    expect(plot(shown)).to_be_focused()
    expect(spoken).to_contain_text("0F0 forward, microbatch 0, stage 0")
    for key, said in (
        ("ArrowRight", "0F1"),
        ("ArrowDown", "1F0"),  # runs while 0F1 does
        ("ArrowDown", "2F0"),
        ("End", "2B7"),
        ("Home", "2F0"),
        ("ArrowLeft", "2F0"),
        ("ArrowUp", "1F1"),  # which runs while 2F0 does
    ):
        shown.page.keyboard.press(key)
        expect(spoken).to_contain_text(said)
    expect(tip(shown)).to_contain_text("predicted 1 unit from 2 units")
    shown.page.keyboard.press("Enter")
    expect(spoken).to_have_text("microbatch 1 marked")
    shown.page.keyboard.press("Escape")
    expect(tip(shown)).to_be_hidden()


def test_keys_and_the_wheel_zoom_and_0_shows_all_again(show: Stage):
    p = measured()
    shown = drawn(show, p)
    whole = pixels(shown)
    point(shown, p, 1, 0.02)
    shown.page.keyboard.down("Control")
    shown.page.mouse.wheel(0, -400)
    shown.page.keyboard.up("Control")
    shown.page.mouse.move(5, 5)
    near = pixels(shown)
    assert near != whole
    shown.root.get_by_role("button", name="Show the whole time").click()
    shown.page.mouse.move(5, 5)
    assert pixels(shown) == whole
    plot(shown).focus()
    for key in ("+", "-", "0"):
        shown.page.keyboard.press(key)
    plot(shown).evaluate("node => node.blur()")
    assert pixels(shown) == whole


def test_the_wheel_alone_scrolls_the_page_and_not_the_time(show: Stage):
    p = measured()
    shown = drawn(show, p)
    before = pixels(shown)
    point(shown, p, 1, 0.02)
    shown.page.mouse.wheel(0, 100)
    shown.page.mouse.move(5, 5)
    shown.page.mouse.wheel(0, -100)
    assert pixels(shown) == before


def test_a_zoomed_timeline_is_dragged_and_moved_by_keys(show: Stage):
    p = measured()
    shown = drawn(show, p)
    for _ in range(3):
        shown.root.get_by_role("button", name="Zoom in").click()
    x, y = point(shown, p, 1, 0.02)
    before = pixels(shown)
    shown.page.mouse.down()
    shown.page.mouse.move(x - 80, y, steps=4)
    shown.page.mouse.up()
    shown.page.mouse.move(5, 5)
    dragged = pixels(shown)
    assert dragged != before
    plot(shown).focus()
    shown.page.keyboard.press("Shift+ArrowRight")
    assert pixels(shown) != dragged


def test_many_actions_have_an_overview_whose_frame_is_dragged(show: Stage):
    shown = drawn(show, large())
    frame = shown.root.locator(".jsm-pp-frame")
    box, before = frame.bounding_box(), pixels(shown)
    assert box is not None and box["width"] < 200
    shown.page.mouse.move(box["x"] + 5, box["y"] + 20)
    shown.page.mouse.down()
    shown.page.mouse.move(box["x"] + 305, box["y"] + 20, steps=3)
    shown.page.mouse.up()
    after = frame.bounding_box()
    assert after is not None and after["x"] == pytest.approx(box["x"] + 300, abs=2)
    assert pixels(shown) != before


def test_a_few_actions_need_no_overview(show: Stage):
    assert drawn(show, measured()).root.locator(".jsm-pp-overview").count() == 0


def cells(shown: Shown) -> list[list[str]]:
    """The figures of now, and of what if."""
    rows = shown.root.locator(".jsm-pp-table tbody tr").all()
    return [row.get_by_role("cell").all_inner_texts() for row in rows]


def pick(shown: Shown, group: str, value: str) -> None:
    shown.root.get_by_role("radiogroup", name=group).get_by_role("radio", name=value, exact=True).click()


def line(shown: Shown) -> str:
    return shown.root.locator(".jsm-pp-table code").inner_text()


def test_what_if_begins_with_twice_the_microbatches(show: Stage):
    shown = drawn(show, one_f_one_b())
    # (p-1)/(m+p-1): 3/11, and 3/19; half as large microbatches, of which as many are held
    assert cells(shown)[0] == ["27.3%", "15.8%"]
    assert cells(shown)[3] == ["4", "2"]
    assert line(shown) == "--schedule 1f1b --stages 4 --microbatches 16"


def test_a_choice_changes_the_numbers_and_the_line_to_copy(show: Stage):
    shown = drawn(show, one_f_one_b())
    pick(shown, "stages", "2")
    pick(shown, "microbatches", "8")
    assert cells(shown)[1] == ["27.3%", "11.1%"]  # 1/9
    pick(shown, "schedule", "interleaved")
    assert line(shown) == "--schedule interleaved --stages 2 --microbatches 8 --chunks 2"
    assert cells(shown)[1][1] == "5.9%"  # (p-1)/(v m+p-1) = 1/17
    shown.root.get_by_role("button", name="Copy").click()
    expect(shown.root.get_by_role("button", name="Copy")).to_have_text("copied")
    assert shown.page.evaluate("navigator.clipboard.readText()") == line(shown)


def test_what_cannot_be_is_struck_through_and_says_why(show: Stage):
    shown = drawn(show, one_f_one_b())
    three = shown.root.get_by_role("radiogroup", name="chunks").get_by_role("radio", name="3", exact=True)
    expect(three).to_have_attribute("aria-disabled", "true")
    assert "1 chunk" in (three.get_attribute("title") or "")
    before = line(shown)
    three.click(force=True)
    assert line(shown) == before
    expect(shown.root.locator(".jsm-pp-reason")).to_contain_text("1 chunk")


def test_arrows_choose_among_the_buttons(show: Stage):
    shown = drawn(show, one_f_one_b())
    group = shown.root.get_by_role("radiogroup", name="microbatches")
    group.get_by_role("radio", checked=True).focus()
    shown.page.keyboard.press("ArrowRight")
    expect(group.get_by_role("radio", checked=True)).to_have_text("32")
    assert line(shown).endswith("--microbatches 32")


def test_bytes_of_activations_go_with_what_is_held(show: Stage):
    p = measured()
    shown = drawn(show, p)
    pick(shown, "schedule", "gpipe")
    pick(shown, "microbatches", "8")
    assert cells(shown)[3] == ["1.62\u202fGiB", "3.23\u202fGiB"]  # all 8 microbatches instead of 4


def test_the_lead_the_parts_and_the_ranks_say_what_python_says(show: Stage):
    p = measured()
    text = drawn(show, p).root.inner_text()
    for said in ("".join(s.text for s in words.pipeline_lead(p)), words.pipeline_about(p)):
        assert said in text
    for part in words.bubble_parts(p):
        assert part.what in text and (part.more or "") in text
    for rank in p.ranks:
        assert words.percent_text(rank.bubble) in text and (rank.holds or "") in text


@pytest.mark.parametrize("name", thinned(PIPELINES, ("measured", "hostile")))
def test_every_pipeline_is_drawn_in_both_themes_and_nothing_stands_out_of_it(name: str, show: Stage):
    data = packed_pipeline(PIPELINES[name]())
    for width, theme in ((900, "light"), (620, "light"), (620, "dark")):
        shown = show(data, None, width, theme)
        assert "could not be drawn" not in shown.root.inner_text()
        assert shown.overflowing() == [], (width, theme)
        if width == 620:
            assert shown.violations() == []


def test_the_theme_is_followed_while_the_timeline_is_on_show(show: Stage):
    shown = drawn(show, measured())
    before = pixels(shown)
    show.page.evaluate("document.body.setAttribute('data-jp-theme-light', 'false')")
    show.page.wait_for_selector(".jsm[data-theme=dark]")
    assert pixels(shown) != before


def test_a_report_shows_it_in_a_tab_of_its_own(show: Stage):
    shown = show(reported())
    tab = shown.root.get_by_role("tab", name="Pipeline")
    expect(tab).to_contain_text(f"bubble {words.percent_text(measured().bubble.measured)}")
    expect(tab).to_have_attribute("aria-selected", "true")  # a pipeline opens on it
    expect(shown.panel).to_contain_text("of device time is work")
    box = plot(shown).bounding_box()
    assert box is not None and box["width"] > 500


def test_a_timeline_that_is_taken_away_leaves_nothing_behind(show: Stage):
    drawn(show, interleaved())
    assert show.remove() == 0


@pytest.mark.parametrize("name", ["interleaved", "measured", "large", "wide"])
def test_what_else_there_could_be_is_told_apart_and_touches_nothing_beside_it(name: str, show: Stage):
    shown = drawn(show, PIPELINES[name]())
    panel = shown.root.locator(".jsm-pp-whatif")
    boxes = [panel.locator(part).bounding_box() for part in (".jsm-pp-controls", ".jsm-table", ".jsm-pp-small svg")]
    ends = [(box["x"], box["x"] + box["width"]) for box in boxes if box]
    assert all(right + 20 <= left for (_, right), (left, _) in pairwise(ends)), ends
    curves = panel.locator(".jsm-pp-one")
    names = [text for one in curves.all() for text in one.locator("text").all_text_contents()]
    assert len(set(names)) == len(names) > 1
    tops = curves.locator("text").evaluate_all("texts => texts.map(text => text.getBoundingClientRect().y)")
    assert all(below - above > 11 for above, below in pairwise(sorted(tops)))
    drawings = curves.locator(".jsm-pp-curve").evaluate_all("paths => paths.map(path => path.getAttribute('d'))")
    assert len(set(drawings)) == len(drawings), "schedules that are alike share a line"
