"""A comparison in a real browser: sorted, chosen from by pointer and keys, two trials side by side, told to Python."""

import re
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from browsing import Shown, Stage, expect
from sample_comparisons import COMPARISONS, many, measured_trials, none_ran, one_too_big, predicted, simulated
from sample_reports import attached

from jaxshard_magic.views.format import SPACE

if TYPE_CHECKING:
    from playwright.sync_api import Locator

# Positions of the sample's trials.
WHOLE, BF16, DP, FSDP, STAGED, HEADS = range(6)
BY_STEP = ["fsdp+tp bf16", "dp", "pp+dp zb-h1", "fsdp+tp", "fsdp", "tp"]


def rows(shown: Shown) -> "Locator":
    return shown.root.get_by_role("grid").locator("tbody tr")


def row(shown: Shown, name: str) -> "Locator":
    """The row of the trial with this name."""
    return rows(shown).filter(
        has=shown.page.locator(".jsm-cmp-name > :first-child").get_by_text(name, exact=True)
    )


def names(shown: Shown) -> list[str]:
    """The trials as they stand in the table."""
    return rows(shown).locator(".jsm-cmp-name > :first-child").all_inner_texts()


def head(shown: Shown, name: str) -> "Locator":
    return shown.root.get_by_role("columnheader", name=name)


def point(shown: Shown, name: str) -> "Locator":
    return shown.root.get_by_role("option", name=re.compile(f"^{re.escape(name)}: "))


def side(shown: Shown) -> "Locator":
    return shown.root.get_by_role("group", name="The chosen trial")


def pair(shown: Shown) -> "Locator":
    return shown.root.get_by_role("region", name="What differs")


def figures(shown: Shown, table: str) -> dict[str, list[str]]:
    """The cells of each row of a table of the pair, by what its row is called."""
    found = pair(shown).get_by_role("table", name=table).locator("tbody tr").all()
    cells = (each.get_by_role("cell").all_inner_texts() for each in found)
    heads = (each.get_by_role("rowheader").inner_text() for each in found)
    return {name: [text.strip() for text in texts] for name, texts in zip(heads, cells, strict=True)}


def traits(shown: Shown) -> list[int | None]:
    return [shown.trait("chosen"), shown.trait("other")]


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


def test_keys_move_among_the_points_by_time_and_by_memory(show: Stage):
    shown = show(measured_trials(), chosen=DP)
    keys = shown.page.keyboard
    point(shown, "dp").focus()
    for key, name in (
        ("ArrowRight", "pp+dp zb-h1"),  # 40.4 ms, then 41.6
        ("End", "fsdp"),  # 53.6
        ("ArrowUp", "fsdp+tp"),  # 4.18 GiB, then 5.09
        ("ArrowDown", "fsdp"),
        ("Home", "fsdp+tp bf16"),
        ("ArrowLeft", "fsdp+tp bf16"),
    ):
        keys.press(key)
        expect(point(shown, name)).to_be_focused()
        expect(shown.root.locator(".jsm-cmp-tip")).to_contain_text(name)
    keys.press("Enter")
    point(shown, "fsdp").press("Shift+Enter")
    assert traits(shown) == [BF16, FSDP]


def test_a_point_under_the_pointer_is_told_and_moves_nothing(show: Stage):
    shown = show(measured_trials(), chosen=BF16)
    height = shown.root.evaluate("root => root.scrollHeight")
    point(shown, "dp").hover()
    expect(shown.root.locator(".jsm-cmp-tip")).to_contain_text(f"5.66{SPACE}GiB, 36% of the limit")
    expect(row(shown, "dp")).to_have_class(re.compile("jsm-pointed"))
    assert shown.root.evaluate("root => root.scrollHeight") == height
    shown.page.mouse.move(5, 5)
    expect(shown.root.locator(".jsm-cmp-tip")).to_be_hidden()
    assert shown.saved() == []


def test_points_of_the_front_are_told_and_those_above_the_limit(show: Stage):
    shown = show(predicted())
    assert point(shown, "pp+dp").get_attribute("aria-label") == (
        f"pp+dp: 39.2{SPACE}ms, 3.12{SPACE}GiB, on the Pareto front"
    )
    assert "does not fit" in (point(shown, "dp").get_attribute("aria-label") or "")
    expect(shown.root.locator(".jsm-cmp-limit")).to_have_count(1)


def test_a_second_trial_shows_what_differs(show: Stage):
    shown = show(measured_trials(), chosen=BF16)
    expect(pair(shown)).to_be_hidden()
    row(shown, "fsdp").click(modifiers=["Shift"])
    said = pair(shown).inner_text().replace(SPACE, " ")
    # 53.6 - 39.0 ms, of 53.6; 4.18 - 3.44 GiB, of 4.18
    assert (
        "fsdp+tp bf16 takes 14.6 ms (27%) less than fsdp, and holds 758 MiB (18%) less at its peak." in said
    )
    sent = figures(shown, "Sent per device and step")
    assert sent["all-reduce data"] == ["473MiB", "1.22GiB", "\u2212772MiB"]
    assert sent["all-reduce model"] == ["288MiB", "\u2013", "+288MiB"]
    held = figures(shown, "Memory of the fullest device")
    assert held["batch"] == ["32.0KiB", "16.0KiB", "+16.0KiB"]  # 128 KiB over 4 and 8
    assert held["other"][2] == "same"
    assert held["peak"] == ["3.44GiB", "4.18GiB", "\u2212758MiB"]
    expect(rows(shown).get_by_text("A", exact=True)).to_have_count(1)
    expect(row(shown, "fsdp").get_by_text("B", exact=True)).to_have_count(1)


def test_leaves_are_listed_that_lie_differently_and_no_others(show: Stage):
    shown = show(measured_trials(), chosen=BF16, other=FSDP)
    told = figures(shown, "Leaves that lie differently")
    # 147 MiB over 4 and 8; what is cut over data=4 and model=2 has as many bytes as over data=8
    layout = "f32[50257,768@data]"
    assert told["wte.embedding"] == [layout, "36.8MiB", layout, "18.4MiB", "+18.4MiB"]
    assert list(told) == [
        "wte.embedding",
        "wpe.embedding",
        "blocks.mlp.up.bias",
        "blocks.attn.qkv.bias",
        "batch.tokens",
    ]
    assert "13 leaves, 8 of them the optimizer's" in pair(shown).inner_text()


def test_repeated_layers_are_one_row_and_a_long_list_is_cut(show: Stage):
    shown = show(measured_trials(), chosen=BF16, other=STAGED)
    told = figures(shown, "Leaves that lie differently")
    assert len(told) == 12
    more = pair(shown).get_by_role("button", name="Show all")
    more.click()
    told = figures(shown, "Leaves that lie differently")
    layer = next(cells for name, cells in told.items() if name == "blocks.0-11.mlp.up \u00d712")
    assert layer[0] == "\u2013" and "on one of pipe=0-3" in layer[2]
    assert len(told) > 12
    expect(pair(shown).get_by_role("row").nth(-len(told) + 12)).to_be_focused()


def test_trials_that_lie_alike_say_so(show: Stage):
    shown = show(simulated(), chosen=1, other=2)
    expect(pair(shown)).to_contain_text("None: all lie alike.")


def test_a_trial_is_set_beside_another_by_a_control_as_well(show: Stage):
    shown = show(measured_trials(), chosen=BF16)
    control = side(shown).get_by_label("compare with")
    control.select_option("fsdp")
    expect(pair(shown)).to_be_visible()
    assert traits(shown) == [BF16, FSDP]
    assert control.locator("option").all_inner_texts() == [
        "\u2013",
        "fsdp+tp",
        "dp",
        "fsdp",
        "pp+dp zb-h1",
        "tp",
    ]
    control.select_option("\u2013")
    expect(pair(shown)).to_be_hidden()
    assert traits(shown) == [BF16, None]


def test_choosing_the_second_of_a_pair_makes_it_the_first(show: Stage):
    shown = show(measured_trials(), chosen=BF16, other=FSDP)
    row(shown, "fsdp").click()
    assert traits(shown) == [FSDP, BF16]
    expect(pair(shown)).to_contain_text("fsdp takes 14.6\u202fms (37%) more")  # of 39.0
    row(shown, "fsdp+tp bf16").click(modifiers=["Shift"])
    assert traits(shown) == [FSDP, None]


def test_one_that_could_not_be_compiled_has_nothing_to_lay_beside(show: Stage):
    shown = show(measured_trials(), chosen=BF16, other=HEADS)
    expect(pair(shown)).to_contain_text("No figure is known of both.")
    expect(pair(shown).get_by_role("table")).to_have_count(0)


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


def test_one_that_has_no_measured_time_is_no_point_beside_those_that_have(show: Stage):
    shown = show(one_too_big())
    assert sorted(
        shown.root.get_by_role("option").evaluate_all("all => all.map(n => n.ariaLabel.split(':')[0])")
    ) == [
        "fsdp",
        "fsdp+tp",
    ]
    assert names(shown)[-1] == "dp"


def boxes(shown: Shown, selector: str) -> list[list[float]]:
    read = "all => all.map(n => n.getBoundingClientRect()).map(b => [b.left, b.top, b.right, b.bottom])"
    return shown.root.locator(selector).evaluate_all(read)


@pytest.mark.parametrize("width", [900, 620])
def test_names_of_forty_points_lie_on_no_other(width: int, show: Stage):
    shown = show(many(), None, width)
    found = boxes(shown, ".jsm-cmp-label")
    assert 6 < len(found) < 40
    for a, b in combinations(found, 2):
        across, down = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
        assert across <= 1 or down <= 3, "a line is higher than its letters"
    assert shown.overflowing() == []


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


def test_trials_at_one_place_are_chosen_one_after_the_other(show: Stage):
    shown = show(many())
    at = shown.root.get_by_role("option", name=f"70.0{SPACE}ms, 3.10{SPACE}GiB")
    expect(at).to_have_count(2)
    seen = set()
    for _ in range(2):
        at.last.click(force=True)
        seen.add(shown.trait("chosen"))
    assert len(seen) == 2
    expect(shown.root.locator(".jsm-cmp-tip")).to_contain_text("also here: ")


@pytest.mark.parametrize("name", COMPARISONS)
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
    tags = set(
        shown.root.evaluate("root => [...root.querySelectorAll('*')].map(n => n.tagName.toLowerCase())")
    )
    assert not {"script", "img", "iframe", "a", "link", "object", "style"} & tags
    expect(rows(shown).first).to_contain_text("<script>alert('x')</script>&\"'")


def test_a_comparison_and_a_report_share_one_style_sheet(show: Stage):
    show(attached())
    show(measured_trials())
    assert show.page.evaluate("document.querySelectorAll('style[data-jsm]').length") == 1


def test_a_comparison_that_is_taken_away_leaves_nothing_behind(show: Stage):
    show(measured_trials(), chosen=BF16)
    assert show.remove() == 0
