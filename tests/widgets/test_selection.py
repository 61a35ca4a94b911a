"""One selection for all views: pointed at, clicked, moved by keys, told to Python and set from there."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from string import ascii_lowercase
from typing import TYPE_CHECKING

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.browsing import Shown, Stage, expect
from support.sample_reports import attached, hostile, large, leaf, mesh, shapes
from support.thinned import thinned

from jaxshard_magic.report import Report

if TYPE_CHECKING:
    from playwright.sync_api import Locator

UP, DOWN = "blocks.mlp.up.kernel", "blocks.mlp.down.kernel"


def shuffled() -> Report:
    """Devices whose ids are not their places in the mesh, as on a TPU slice."""
    report = attached()
    ids = (0, 1, 3, 2, 6, 7, 5, 4)
    return replace(report, mesh=replace(report.mesh, devices=ids))


def row(shown: Shown, path: str) -> "Locator":
    """The row of a leaf in the tree."""
    return shown.root.locator(f'[role=treeitem][title^="{path} "]')


def rows(shown: Shown) -> "Locator":
    """The rows of the tree that are in the page."""
    return shown.root.get_by_role("treeitem")


def device(shown: Shown, number: int) -> "Locator":
    """The cell of a device in the mesh of the layout; what marks it lies above its number, so point by force."""
    return shown.root.locator(".jsm-map").get_by_text(str(number), exact=True).first


def held(shown: Shown) -> "Locator":
    """What the layout says of the device on show."""
    return shown.root.locator(".jsm-detail-read [aria-live]")


def chosen(shown: Shown) -> "Locator":
    """The path of the leaf on show."""
    return shown.root.locator(".jsm-detail-path")


def test_a_leaf_that_is_clicked_is_on_show_and_python_hears_of_it_once(show: Stage):
    shown = show(attached())
    row(shown, UP).click()
    expect(chosen(shown)).to_have_text(UP)
    expect(row(shown, UP)).to_have_attribute("aria-selected", "true")
    assert shown.saved() == [{"leaf": UP}]


def test_a_device_that_is_clicked_is_told_to_python_by_its_id(show: Stage):
    shown = show(shuffled())
    device(shown, 6).click(force=True)
    expect(held(shown)).to_contain_text("device 6")
    assert shown.traits()["device"] == 6


def test_a_device_chosen_in_one_view_is_chosen_in_all(show: Stage):
    shown = show(shuffled(), tab="memory")
    bar = shown.panel.get_by_role("option", name="device 3:")
    bar.click()
    expect(bar).to_have_attribute("aria-selected", "true")
    shown.fire(tab="layout")
    expect(held(shown)).to_contain_text("device 3")
    device(shown, 5).click(force=True)
    shown.fire(tab="memory")
    expect(shown.panel.get_by_role("option", selected=True)).to_have_count(1)
    expect(shown.panel.get_by_role("option", name="device 5:")).to_have_attribute("aria-selected", "true")


def test_a_hover_tells_what_is_there_moves_nothing_and_leaves_no_mark(show: Stage):
    places = "root => [...root.querySelectorAll('.jsm-layout *')].filter(n => !n.closest('svg, [aria-live]'))"
    places += ".map(n => n.getBoundingClientRect()).map(b => [b.x, b.y, b.width, b.height])"
    shown = show(attached(), leaf=UP)
    shown.settle()
    before = shown.root.evaluate(places), held(shown).inner_text()
    device(shown, 5).hover(force=True)
    expect(held(shown)).to_contain_text("device 5")
    assert shown.root.evaluate(places) == before[0]
    show.page.mouse.move(450, 2)
    expect(held(shown)).to_have_text(before[1])
    assert shown.root.evaluate(places) == before[0]
    assert shown.saved() == []


@pytest.mark.parametrize("tab", thinned(["layout", "memory", "communication"], ["memory"]))
def test_the_page_stays_as_high_wherever_the_pointer_is(tab: str, show: Stage):
    shown = show(attached(), tab=tab)
    height = "root => root.getBoundingClientRect().height"
    shown.settle()
    box, before = shown.panel.bounding_box(), shown.root.evaluate(height)
    assert box is not None
    for x, y in product(range(10, int(box["width"]), 90), range(10, int(box["height"]), 40)):
        show.page.mouse.move(box["x"] + x, box["y"] + y)
        assert shown.root.evaluate(height) == before, (x, y)
    show.page.mouse.move(450, 2)
    assert shown.saved() == []


def test_python_moves_the_views(show: Stage):
    shown = show(shuffled())
    shown.fire(leaf=DOWN, device=7)
    expect(chosen(shown)).to_have_text(DOWN)
    expect(row(shown, DOWN)).to_have_attribute("aria-selected", "true")
    expect(held(shown)).to_contain_text("device 7")
    shown.fire(tab="memory", device=4)
    expect(shown.root.get_by_role("tab", selected=True)).to_contain_text("Memory")
    expect(shown.panel.get_by_role("option", name="device 4:")).to_have_attribute("aria-selected", "true")
    shown.fire(leaf=None, device=None, tab="layout")
    expect(held(shown)).not_to_contain_text("device 4")
    assert shown.saved() == [], "what Python set it is not told again"


def test_what_python_has_chosen_is_on_show_from_the_start(show: Stage):
    shown = show(shuffled(), leaf=UP, device=5, tab="layout")
    expect(chosen(shown)).to_have_text(UP)
    expect(held(shown)).to_contain_text("device 5")


def test_arrows_move_through_the_tabs(show: Stage):
    shown = show(attached())
    shown.root.get_by_role("tab").first.focus()
    for key, name in [
        ("ArrowRight", "Memory"),
        ("End", "Communication"),
        ("ArrowLeft", "Memory"),
        ("Home", "Layout"),
    ]:
        show.page.keyboard.press(key)
        expect(shown.root.get_by_role("tab", selected=True)).to_contain_text(name)
        expect(shown.root.get_by_role("tab", selected=True)).to_be_focused()
    assert shown.traits()["tab"] == "layout"


def test_arrows_move_through_the_tree_and_open_and_close_its_roles(show: Stage):
    shown = show(attached())
    tree = shown.root.get_by_role("tree")
    tree.focus()
    show.page.keyboard.press("Home")
    show.page.keyboard.press("ArrowDown")
    expect(chosen(shown)).to_have_text("wte.embedding")
    show.page.keyboard.press("ArrowDown")
    expect(chosen(shown)).to_have_text("wpe.embedding")
    assert shown.traits()["leaf"] == "wpe.embedding"
    active = shown.root.locator(f"#{tree.get_attribute('aria-activedescendant')}")
    expect(active).to_contain_text("wpe")
    show.page.keyboard.press("Home")
    show.page.keyboard.press("ArrowLeft")
    expect(rows(shown).first).to_have_attribute("aria-expanded", "false")
    expect(row(shown, "wpe.embedding")).to_have_count(0)
    show.page.keyboard.press("Enter")
    expect(rows(shown).first).to_have_attribute("aria-expanded", "true")
    show.page.keyboard.press("End")
    assert shown.traits()["leaf"] == "rng"


def test_arrows_move_through_the_mesh(show: Stage):
    shown = show(shuffled(), leaf=UP)
    shown.root.locator(".jsm-map").focus()
    seen = []
    for key in ["ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp"]:
        show.page.keyboard.press(key)
        seen.append(shown.traits()["device"])
    assert seen[0] == 0
    assert seen[-1] == seen[0], "a step there and one back"
    assert len(set(seen)) == 4


def ring(part: "Locator") -> str:
    return part.evaluate(
        "node => (({outlineStyle, outlineWidth}) => `${outlineStyle} ${outlineWidth}`)(getComputedStyle(node))"
    )


@pytest.mark.parametrize("tab", ["layout", "memory", "communication"])
def test_whatever_the_tab_key_reaches_shows_a_focus_ring(tab: str, show: Stage):
    shown = show(attached(), tab=tab)
    reached = set()
    for _ in range(40):
        show.page.keyboard.press("Tab")
        focused = shown.root.locator(":focus")
        if not focused.count():
            break
        assert ring(focused) == "solid 2px", focused.evaluate("node => node.outerHTML.slice(0, 100)")
        reached.add(focused.evaluate("node => node.getAttribute('role') ?? node.tagName"))
    assert "tab" in reached
    assert {"layout": {"tree", "INPUT"}, "memory": {"option"}, "communication": set()}[tab] <= reached


def test_the_filter_lists_the_leaves_that_have_all_its_words(show: Stage):
    shown = show(attached())
    find = shown.root.get_by_role("searchbox")
    find.fill("mlp bias")
    found = [title.split()[0] for title in titles(shown)]
    assert found
    assert all("mlp" in path and path.endswith("bias") for path in found)
    expect(shown.root.get_by_text(f"of {len(attached().leaves)} leaves")).to_be_visible()
    find.fill("@model")
    assert all("model" in title for title in titles(shown))
    find.fill("no such leaf")
    assert titles(shown) == []
    expect(shown.root.get_by_text("No leaf matches")).to_be_visible()
    find.press("Escape")
    expect(find).to_have_value("")
    assert len(titles(shown)) > 10


def titles(shown: Shown) -> list[str]:
    """The leaves listed: path, spec and size each."""
    return [title for each in rows(shown).all() if (title := each.get_attribute("title"))]


def test_the_verdict_leads_to_the_fullest_device(show: Stage):
    shown = show(attached(), device=3)
    shown.root.get_by_role("button", name="the fullest device").click()
    assert shown.traits() == {"leaf": None, "device": 0, "tab": "memory"}


def test_a_figure_leads_to_its_view(show: Stage):
    shown = show(attached())
    shown.root.locator("button.jsm-figure", has_text="sen").click()
    expect(shown.root.get_by_role("tab", selected=True)).to_contain_text("Communication")


def test_a_fix_is_copied_as_it_is_pasted(show: Stage):
    shown = show(attached())
    (fix,) = [advice.fix for advice in attached().advice if advice.fix]
    button = shown.root.locator("header").get_by_role("button", name=f"Copy {fix}")
    button.click()
    expect(button).to_have_text("copied")
    assert show.page.evaluate("navigator.clipboard.readText()") == fix
    expect(button).to_have_text("copy")


def test_a_leaf_whose_numbers_differ_is_one_click_from_the_header(show: Stage):
    report = attached()
    assert report.check is not None
    failed = replace(report, check=replace(report.check, passed=False, failed=(UP,)))
    shown = show(failed, tab="memory")
    shown.root.locator("header").get_by_role("button", name=UP).click()
    assert shown.traits() == {"leaf": UP, "device": None, "tab": "layout"}
    expect(shown.panel).to_contain_text("Its numbers differ")


def test_names_are_text_in_every_view(show: Stage):
    kinds = "root => [...new Set([...root.querySelectorAll('*')].map(node => node.tagName.toLowerCase()))]"
    shown = show(hostile())
    for tab in ("layout", "memory", "communication"):
        shown.fire(tab=tab)
        assert not {"script", "img", "iframe", "a", "link", "object", "style"} & set(shown.root.evaluate(kinds))
    header = shown.root.locator("header").inner_text()
    assert "<b>" in header
    assert "TPU <i>v5</i>" in header
    shown.fire(tab="layout")
    rows(shown).nth(1).click()
    expect(chosen(shown)).to_contain_text("<script>alert('x')</script>&\"'")


def many() -> Report:
    """2,000 leaves that are not alike, on 512 devices."""
    axes = {"data": 64, "model": 8}
    words = map("".join, product(ascii_lowercase, repeat=3))
    leaves = tuple(
        leaf(f"{word}.kernel", (64, 8 + i), ("data",), axes) for i, word in zip(range(2000), words, strict=False)
    )
    return replace(large(), leaves=leaves)


def test_2000_leaves_on_512_devices_are_few_elements_and_all_can_be_reached(show: Stage):
    report = many()
    shown = show(report)
    tree = shown.root.get_by_role("tree")
    assert 10 < rows(shown).count() < 120
    assert shown.root.evaluate("root => root.querySelectorAll('*').length") < 3000
    seen = set()
    for share in (0.25, 0.5, 0.75, 1):
        tree.evaluate("(tree, share) => { tree.scrollTop = share * tree.scrollHeight; }", share)
        shown.settle()
        assert rows(shown).count() < 120
        seen.add(titles(shown)[-1].split()[0])
    assert len(seen) == 4
    assert report.leaves[-1].path in {title.split()[0] for title in titles(shown)}
    shown.fire(leaf=report.leaves[1000].path)
    expect(row(shown, report.leaves[1000].path)).to_be_visible()


def test_repeated_layers_are_one_row_until_one_of_them_is_wanted(show: Stage):
    shown = show(large())
    assert rows(shown).count() < 12
    shown.fire(leaf="blocks.217.mlp.up.kernel")
    expect(row(shown, "blocks.217.mlp.up.kernel")).to_be_visible()
    assert rows(shown).count() < 120


@pytest.mark.parametrize("rank", range(6))
def test_an_array_of_any_rank_is_drawn_and_answers_the_pointer(rank: int, show: Stage):
    shown = show(shapes())
    for each in (each for each in shapes().leaves if len(each.shape) == rank):
        shown.fire(leaf=each.path, device=None)
        expect(chosen(shown)).to_have_text(each.path)
        assert shown.overflowing() == []
        picture = shown.root.locator(".jsm-blocks")
        assert picture.locator("rect, path").count() > 0
        shown.root.locator(".jsm-map").press("Enter")
        expect(held(shown)).to_contain_text("device 0")


def layouts() -> Iterator[tuple[tuple[int, ...], PartitionSpec]]:
    yield (), PartitionSpec()
    yield (24,), PartitionSpec("b")
    yield (16, 12), PartitionSpec("c", "a")
    yield (16, 12), PartitionSpec(("a", "c"), "b")
    yield (16, 12), PartitionSpec(("c", "a"))
    yield (4, 6, 8), PartitionSpec(None, "b", ("c", "a"))
    yield (2, 4, 6, 8), PartitionSpec("a", None, "b", "c")
    yield (2, 2, 2, 4, 8), PartitionSpec(None, "c", None, None, ("a", "b"))


def test_every_device_is_said_to_hold_what_jax_puts_there(show: Stage):
    axes = {"a": 2, "b": 2, "c": 2}
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    made = tuple(
        leaf(f"w{i}", shape, tuple(spec) + (None,) * (len(shape) - len(spec)), axes)
        for i, (shape, spec) in enumerate(layouts())
    )
    report = replace(shapes(), mesh=mesh(axes, "simulated"), leaves=made, collectives=None)
    shown = show(report)
    for i, (shape, spec) in enumerate(layouts()):
        placed = NamedSharding(jax.sharding.Mesh(devices, tuple(axes)), spec).devices_indices_map(shape)
        shown.fire(leaf=f"w{i}")
        said, expected = {}, {}
        for at in jax.devices()[:8]:
            shown.fire(device=at.id)
            said[at.id] = held(shown).locator(".jsm-mono").inner_text()
            ranges = (":" if part == slice(None) else f"{part.start}:{part.stop}" for part in placed[at])
            expected[at.id] = f"[{', '.join(ranges)}]"
        assert said == expected, spec
