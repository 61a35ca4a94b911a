"""A list that scrolls by itself does not hold the page that it stands in."""

import pytest
from support.browsing import Shown, Stage
from support.sample_comparisons import COMPARISONS
from support.sample_reports import attached

LISTS = {"layout": (".jsm-tree", attached), "comparison": (".jsm-cmp-long", COMPARISONS["many"])}


def over(show: Stage, name: str) -> Shown:
    """A page longer than its window, the pointer over the list."""
    where, made = LISTS[name]
    shown = show(made(), ["layout"] if name == "layout" else None)
    shown.page.evaluate("document.body.append(Object.assign(document.createElement('hr'), {style: 'height: 3000px'}))")
    shown.root.locator(where).hover()
    return shown


@pytest.mark.ci
@pytest.mark.parametrize("name", LISTS)
def test_the_page_scrolls_on_in_the_same_gesture_where_the_list_ends(name: str, show: Stage):
    shown = over(show, name)
    box = shown.root.locator(LISTS[name][0])
    box.evaluate("box => { box.scrollTop = box.scrollHeight - box.clientHeight - 150; }")
    at = box.bounding_box()
    assert at is not None
    wheel = {
        "x": at["x"] + 90,
        "y": at["y"] + 90,
        "yDistance": -800,
        "gestureSourceType": "mouse",
        "speed": 4000,
    }
    shown.page.context.new_cdp_session(shown.page).send("Input.synthesizeScrollGesture", wheel)
    shown.page.wait_for_function("scrollY > 300")
    assert box.evaluate("box => box.scrollTop + box.clientHeight >= box.scrollHeight - 1")


@pytest.mark.parametrize("name", LISTS)
def test_the_list_scrolls_first_and_the_page_stays(name: str, show: Stage):
    shown = over(show, name)
    shown.page.mouse.wheel(0, 60)
    shown.page.wait_for_function(f"document.querySelector('{LISTS[name][0]}').scrollTop > 0")
    assert shown.page.evaluate("scrollY") == 0
