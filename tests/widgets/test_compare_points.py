"""The chart of a comparison in a real browser: its points by pointer and keys, their names apart from each other."""

import re
from itertools import combinations

import pytest
from support.browsing import Shown, Stage, expect
from support.comparison_page import BF16, DP, FSDP, names, point, row, traits
from support.sample_comparisons import many, measured_trials, one_too_big, predicted

from jaxshard_magic.views.format import SPACE

pytestmark = pytest.mark.ci


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


def test_one_that_has_no_measured_time_is_no_point_beside_those_that_have(show: Stage):
    shown = show(one_too_big())
    assert sorted(shown.root.get_by_role("option").evaluate_all("all => all.map(n => n.ariaLabel.split(':')[0])")) == [
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
