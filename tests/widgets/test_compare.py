"""A comparison in a real browser: its table sorted, chosen from by pointer and keys, told to Python; drawn whole."""

from typing import TYPE_CHECKING

import pytest
from support.browsing import Shown, Stage, expect
from support.comparison_page import BF16, DP, FSDP, STAGED, names, pair, point, row, rows, side, traits
from support.sample_comparisons import COMPARISONS, many, measured_trials, none_ran, predicted
from support.sample_reports import attached
from support.thinned import thinned

from jaxshard_magic.views.format import SPACE

if TYPE_CHECKING:
    from playwright.sync_api import Locator

BY_STEP = ["fsdp+tp bf16", "dp", "pp+dp zb-h1", "fsdp+tp", "fsdp", "tp"]


def head(shown: Shown, name: str) -> "Locator":
    return shown.root.get_by_role("columnheader", name=name)


@pytest.mark.ci
def test_trials_stand_by_step_time_and_the_failed_one_last(show: Stage):
    shown = show(measured_trials())
    assert names(shown) == BY_STEP
    expect(head(shown, "step time")).to_have_attribute("aria-sort", "ascending")


def test_a_head_sorts_up_then_down_and_what_is_not_known_stays_last(show: Stage):
    shown = show(measured_trials())
    head(shown, "peak").get_by_role("button").click()
    ascending = ["pp+dp zb-h1", "fsdp+tp bf16", "fsdp", "fsdp+tp", "dp"]  # 3.12, 3.44, 4.18, 5.09, 5.66 GiB
    assert names(shown) == [*ascending, "tp"]
    head(shown, "peak").get_by_role("button").click()
    assert names(shown) == [*reversed(ascending), "tp"]
    expect(head(shown, "peak")).to_have_attribute("aria-sort", "descending")
    assert head(shown, "step time").get_attribute("aria-sort") is None
    head(shown, "model").get_by_role("button").click()
    assert set(names(shown)[:2]) == {"fsdp+tp", "fsdp+tp bf16"}, "the others have no such axis"
    head(shown, "model").get_by_role("button").click()
    assert set(names(shown)[:2]) == {"fsdp+tp", "fsdp+tp bf16"}


def test_the_table_is_sorted_by_keyboard(show: Stage):
    shown = show(measured_trials())
    head(shown, "strategy").get_by_role("button").press("Enter")
    assert names(shown)[:2] == ["dp", "fsdp"]
    head(shown, "strategy").get_by_role("button").press(" ")
    assert names(shown)[0] == "pp+dp zb-h1"


def test_a_trial_that_is_clicked_is_told_and_python_hears_of_it_once(show: Stage):
    shown = show(measured_trials())
    row(shown, "fsdp").click()
    expect(row(shown, "fsdp")).to_have_attribute("aria-selected", "true")
    expect(point(shown, "fsdp")).to_have_attribute("aria-selected", "true")
    said = side(shown).inner_text().replace(SPACE, " ")
    assert "53.6 ms, predicted 52.1 ms, \u22122.8%" in said  # 52.1/53.6 - 1
    assert "4.18 GiB, 27% of the limit" in said  # of 15.75
    assert "no: fsdp+tp bf16 and pp+dp zb-h1 are faster and smaller" in said
    assert shown.saved() == [{"chosen": FSDP}]


def test_the_line_that_runs_a_trial_is_copied_as_it_is_pasted(show: Stage):
    shown = show(measured_trials(), chosen=BF16)
    button = side(shown).get_by_role("button", name="Copy")
    button.click()
    expect(button).to_have_text("copied")
    line = '%%shard fsdp+tp --mesh "data=4 model=2" --precision bf16'
    assert shown.page.evaluate("navigator.clipboard.readText()") == line


def test_keys_move_among_the_rows_and_choose_one_and_another(show: Stage):
    shown = show(measured_trials(), chosen=BF16)
    shown.root.get_by_role("columnheader").last.get_by_role("button").focus()
    keys = shown.page.keyboard
    keys.press("Tab")
    expect(row(shown, "fsdp+tp bf16")).to_be_focused()
    keys.press("ArrowDown")
    expect(row(shown, "dp")).to_be_focused()
    assert traits(shown) == [BF16, None], "moving chooses nothing"
    keys.press("Enter")
    keys.press("End")
    expect(row(shown, "tp")).to_be_focused()
    keys.press("ArrowUp")
    keys.press("Shift+Enter")
    assert traits(shown) == [DP, FSDP]
    keys.press("Escape")
    assert traits(shown) == [DP, None]
    keys.press("Escape")
    assert traits(shown) == [None, None]
    keys.press("Home")
    expect(row(shown, "fsdp+tp bf16")).to_be_focused()


def test_python_moves_the_picture(show: Stage):
    shown = show(measured_trials())
    expect(side(shown)).to_contain_text("Choose a trial")
    shown.fire(chosen=STAGED)
    expect(side(shown)).to_contain_text("pp+dp zb-h1")
    expect(row(shown, "pp+dp zb-h1")).to_have_attribute("aria-selected", "true")
    shown.fire(other=DP)
    expect(pair(shown)).to_contain_text("pp+dp zb-h1 takes 1.20\u202fms (3.0%) more")
    shown.fire(chosen=None, other=None)
    expect(pair(shown)).to_be_hidden()
    expect(side(shown)).to_contain_text("Choose a trial")
    assert shown.saved() == [], "what Python set it is not told again"


def test_a_trial_that_could_not_run_says_why_and_its_fix_is_copied(show: Stage):
    shown = show(measured_trials())
    said = rows(shown).last
    expect(said).to_contain_text("12 heads do not divide by model=8 (blocks.attn.qkv.kernel, dim 3). Try")
    said.get_by_role("button", name="Copy").click()
    assert shown.page.evaluate("navigator.clipboard.readText()") == '--mesh "data=2 model=4"'
    assert shown.trait("chosen") is None, "the button is not the row"


def test_where_none_ran_the_reasons_are_all_there_is(show: Stage):
    shown = show(none_ran())
    assert shown.root.get_by_role("columnheader").all_inner_texts() == ["strategy \u2191", "fits", "why not"]
    expect(shown.root.get_by_role("listbox")).to_have_count(0)
    rows(shown).last.click()
    expect(side(shown)).to_contain_text("sp needs a sequence axis")


def test_predictions_are_called_so_and_have_no_tails(show: Stage):
    shown = show(predicted())
    expect(head(shown, "predicted step")).to_have_count(1)
    expect(shown.root.locator(".jsm-cmp-tail")).to_have_count(0)
    expect(row(shown, "dp")).to_contain_text("no")
    assert show(measured_trials()).root.locator(".jsm-cmp-tail").count() == 5


def test_forty_trials_are_all_reached_and_the_chosen_row_is_seen(show: Stage):
    shown = show(many())
    rows(shown).first.focus()
    shown.page.keyboard.press("End")
    expect(rows(shown).nth(39)).to_be_focused()
    expect(rows(shown).nth(39)).to_be_in_viewport()
    where = shown.page.evaluate("scrollY")
    shown.fire(chosen=0)
    table = shown.root.locator(".jsm-cmp-long").bounding_box()
    chosen = rows(shown).and_(shown.page.locator("[aria-selected=true]")).bounding_box()
    assert table and chosen
    assert table["y"] <= chosen["y"] <= table["y"] + table["height"] - chosen["height"]
    assert shown.page.evaluate("scrollY") == where, "the page stays where it is"


@pytest.mark.parametrize("name", thinned(COMPARISONS, ("measured_trials", "hostile")))
def test_every_comparison_is_drawn_in_both_themes_and_nothing_stands_out_of_it(name: str, show: Stage):
    found = COMPARISONS[name]()
    both = {"chosen": 0, "other": 1} if len(found.trials) > 1 else {"chosen": 0}
    for width, theme in ((900, "light"), (620, "light"), (620, "dark")):
        shown = show(found, None, width, theme, **both)
        assert "could not be drawn" not in shown.root.inner_text()
        assert shown.overflowing() == [], (width, theme)
        scroll = shown.root.locator(".jsm-cmp-scroll").evaluate("node => node.scrollWidth - node.clientWidth")
        assert scroll <= 0, (width, theme)
        if width == 620:
            assert shown.violations() == []


def test_whatever_the_tab_key_reaches_shows_a_focus_ring(show: Stage):
    shown = show(measured_trials(), chosen=BF16, other=STAGED)
    reached = set()
    for _ in range(40):
        shown.page.keyboard.press("Tab")
        focused = shown.root.locator(":focus")
        if not focused.count():
            break
        outline = focused.evaluate(
            "node => (({outlineStyle: s, outlineWidth: w}) => `${s} ${w}`)(getComputedStyle(node))"
        )
        assert outline == "solid 2px", focused.evaluate("node => node.outerHTML.slice(0, 100)")
        reached.add(focused.evaluate("node => node.getAttribute('role') ?? node.tagName"))
    assert reached == {"BUTTON", "TR", "option", "SELECT"}


def test_names_are_text(show: Stage):
    shown = show(COMPARISONS["hostile"](), chosen=0, other=1)
    tags = set(shown.root.evaluate("root => [...root.querySelectorAll('*')].map(n => n.tagName.toLowerCase())"))
    assert not {"script", "img", "iframe", "a", "link", "object", "style"} & tags
    expect(rows(shown).first).to_contain_text("<script>alert('x')</script>&\"'")


def test_a_comparison_and_a_report_share_one_style_sheet(show: Stage):
    show(attached())
    show(measured_trials())
    assert show.page.evaluate("document.querySelectorAll('style[data-jsm]').length") == 1


def test_a_comparison_that_is_taken_away_leaves_nothing_behind(show: Stage):
    show(measured_trials(), chosen=BF16)
    assert show.remove() == 0
