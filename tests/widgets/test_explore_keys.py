"""The explorer by keyboard alone: everything is reached, edited and left again, and the focus is never lost."""

from typing import TYPE_CHECKING

from support.browsing import Shown, Stage, expect
from support.explored import RULE, WTE, chip, figures, line, mesh, size
from support.sample_explorers import edited, gpt, many, odd

if TYPE_CHECKING:
    from playwright.sync_api import Locator


def press(shown: Shown, *keys: str) -> None:
    for key in keys:
        shown.page.keyboard.press(key)


def focused(shown: Shown) -> str:
    """What the focused element is called: its `data-k`."""
    return shown.page.evaluate("document.activeElement.dataset.k ?? document.activeElement.tagName")


def box(shown: Shown) -> "Locator":
    return shown.root.get_by_role("combobox", name="array")


def test_tab_reaches_every_part_in_the_order_in_which_it_stands(show: Stage):
    shown = show(edited())
    order = []
    for _ in range(40):
        press(shown, "Tab")
        if focused(shown) == "BODY":
            break
        order.append(focused(shown))
    assert order == [
        *("name-0", "less-0", "size-0", "more-0", "drop-0", "name-1", "less-1", "size-1", "more-1", "drop-1"),
        *("axis", "strategy", "array", "reset", "chip-0-data", "blocks", "mesh", "copy", "write", "compile"),
        *("svg", "png"),
    ]


def test_arrows_walk_over_the_chips_and_enter_or_space_toggle_them(show: Stage):
    shown = show(gpt())
    chip(shown, 0, "data").focus()
    press(shown, "ArrowRight", "ArrowDown")
    assert focused(shown) == "chip-1-model"
    press(shown, "Enter")
    assert line(shown) == RULE and focused(shown) == "chip-1-model"
    press(shown, " ")
    assert line(shown) == "%%shard fsdp+tp"
    press(shown, "ArrowRight", "ArrowDown")
    assert focused(shown) == "chip-1-model", "at the edge they stay"
    press(shown, "ArrowLeft", "Tab", "Shift+Tab")
    assert focused(shown) == "chip-1-data", "Tab comes back to where the arrows were"


def test_a_chip_that_does_not_divide_is_reached_and_says_why(show: Stage):
    shown = show(gpt())
    chip(shown, 0, "model").focus()
    expect(chip(shown, 0, "model")).to_have_attribute("title", "50257 does not divide by model=2")
    press(shown, "Enter")
    assert line(shown) == "%%shard fsdp+tp"


def test_shift_and_an_arrow_change_the_order_of_axes(show: Stage):
    shown = show(edited())
    chip(shown, 1, "model").focus()
    press(shown, "Shift+ArrowLeft")
    assert "P(None, ('model', 'data'))" in line(shown)
    press(shown, "Shift+ArrowRight")
    assert line(shown) == RULE
    press(shown, "Shift+ArrowRight")
    assert line(shown) == RULE and focused(shown) == "chip-1-model"


def test_arrows_and_signs_double_and_halve_a_size_and_digits_set_it(show: Stage):
    shown = show(gpt())
    size(shown, "model").focus()
    press(shown, "ArrowUp")
    assert mesh(shown) == {"data": 2, "model": 4} and focused(shown) == "size-1"
    press(shown, "+")
    assert mesh(shown) == {"data": 1, "model": 8}
    press(shown, "-", "ArrowDown")
    assert mesh(shown) == {"data": 4, "model": 2}
    shown.page.keyboard.type("3")
    press(shown, "Enter")
    assert mesh(shown) == {"data": 4, "model": 3} and focused(shown) == "size-1"
    assert figures(shown)[0] == "per device 36.8 MiB as now", "768 over data=4; model=3 cuts nothing"


def test_a_name_is_typed_and_escape_takes_it_back(show: Stage):
    shown = show(gpt())
    shown.root.get_by_role("textbox", name="name of axis 2").focus()
    press(shown, "Control+a")
    shown.page.keyboard.type("tp")
    press(shown, "Escape", "Tab")
    assert list(mesh(shown)) == ["data", "model"]


def test_an_axis_is_added_and_removed_by_enter(show: Stage):
    shown = show(gpt())
    shown.root.get_by_role("button", name="+ axis").focus()
    press(shown, "Enter")
    assert list(mesh(shown)) == ["data", "model", "seq"] and focused(shown) == "axis"
    shown.root.get_by_role("button", name="remove seq").focus()
    press(shown, "Enter")
    assert list(mesh(shown)) == ["data", "model"]


def test_an_array_is_typed_and_taken_with_enter(show: Stage):
    shown = show(gpt())
    box(shown).focus()
    press(shown, "Control+a")
    shown.page.keyboard.type("mlp up bias")
    press(shown, "Enter")
    expect(box(shown)).to_have_value("blocks.mlp.up.bias")
    assert focused(shown) == "array" and shown.trait("leaf") == "blocks.mlp.up.bias"


def test_arrows_walk_through_the_list_and_the_picture_goes_along(show: Stage):
    shown = show(gpt())
    box(shown).focus()
    press(shown, "ArrowDown", "ArrowDown")
    expect(shown.root.get_by_role("tree")).to_be_focused()
    assert shown.trait("leaf") == "wpe.embedding"
    press(shown, "Enter")
    expect(shown.root.get_by_role("tree")).to_have_count(0)
    assert focused(shown) == "array"
    expect(box(shown)).to_have_value("wpe.embedding")


def test_escape_closes_the_list_and_nothing_changes(show: Stage):
    shown = show(many())
    box(shown).focus()
    shown.page.keyboard.type("zzz")
    expect(shown.root.locator(".jsm-ex-list")).to_contain_text("0 of 1,000 arrays")
    press(shown, "Escape")
    expect(shown.root.get_by_role("tree")).to_have_count(0)
    assert shown.saved() == [] and focused(shown) == "array"


def test_devices_are_walked_by_arrows_in_the_mesh_and_in_the_array(show: Stage):
    shown = show(edited())
    shown.root.locator(".jsm-map").focus()
    press(shown, "Enter", "ArrowRight", "ArrowDown")
    expect(shown.root.locator(".jsm-detail-read")).to_contain_text("device 3")
    shown.root.locator(".jsm-blocks").focus()
    press(shown, "ArrowRight")
    expect(shown.root.locator(".jsm-detail-read")).to_contain_text("[:, 384:480]")
    assert shown.trait("device") == 4


def test_what_is_done_is_said_aloud(show: Stage):
    shown = show(edited())
    shown.root.get_by_role("button", name="copy the whole cell").focus()
    press(shown, "Enter")
    expect(shown.root.get_by_role("status").filter(has_text="the whole cell is copied")).to_be_visible()


def test_a_scalar_has_nothing_to_walk_through_and_no_trap(show: Stage):
    shown = show(odd(), leaf="step")
    box(shown).focus()
    press(shown, "Tab")
    assert focused(shown) == "blocks"


def test_keys_are_the_widgets_and_not_the_notebooks(show: Stage):
    shown = show(gpt())
    for part in (
        size(shown, "data"),
        box(shown),
        shown.root.locator(".jsm-ex-dims"),
        shown.root.locator(".jsm-map"),
    ):
        expect(part).to_have_attribute("data-lm-suppress-shortcuts", "true")
    assert box(shown).input_value() == WTE
