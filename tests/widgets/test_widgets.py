"""The views in a real browser, each with a stub in the place of its model."""

import pytest
from support.browsing import Shown, Stage
from support.sample_reports import SAMPLES, attached, profiled
from support.thinned import thinned

VIEWS = ("header", "layout", "memory", "communication")
LOOKS = [(width, theme) for width in (900, 620) for theme in ("light", "dark")]
COLOURED = ("attached", "wrong", "too_big", "large", "shapes", "hostile")
"""The reports that have among them every colour there is."""


def tabs(shown: Shown) -> list[str]:
    """The names of the views that this report has."""
    return [name.split()[0].lower() for name in shown.root.get_by_role("tab").all_inner_texts()]


@pytest.mark.parametrize("name", thinned(SAMPLES, ("wrong", "hostile")))
def test_every_report_is_drawn_in_both_themes_and_nothing_stands_out_of_it(name: str, show: Stage):
    packed = show.packed(SAMPLES[name]())
    for width, theme in LOOKS:
        shown = show(packed, width=width, theme=theme)
        assert shown.root.get_attribute("data-theme") == theme
        assert "could not be drawn" not in shown.root.inner_text()
        for tab in tabs(shown) or [None]:
            shown.fire(tab=tab)
            assert shown.overflowing() == [], (tab, width, theme)


@pytest.mark.parametrize(
    ("name", "theme"),
    thinned(
        [(name, "light") for name in SAMPLES] + [(name, "dark") for name in COLOURED],
        [
            ("wrong", "dark"),
            ("too_big", "light"),
        ],
    ),
)
def test_axe_finds_nothing_in_any_report(name: str, theme: str, show: Stage):
    report = SAMPLES[name]()
    seen = name != "attached" and (report.leaves, report.check) == (attached().leaves, attached().check)
    shown = show(report, [view for view in VIEWS if not (seen and view == "layout")], theme=theme)
    assert shown.violations() == []
    for tab in tabs(shown)[1:]:
        shown.fire(tab=tab)
        assert shown.violations(shown.panel) == [], tab


@pytest.mark.parametrize("view", thinned(VIEWS, ("layout", "communication")))
def test_a_view_stands_alone_at_both_widths_in_both_themes(view: str, show: Stage):
    packed = show.packed(attached())
    for width, theme in LOOKS:
        shown = show(packed, [view], width, theme)
        assert len(shown.root.inner_text()) > 100
        assert tabs(shown) == ([] if view == "header" else [view])
        assert shown.overflowing() == []
        if theme == "light":
            assert shown.violations() == []


@pytest.mark.ci
def test_measured_time_stands_alone_and_beside_what_lines_send(show: Stage):
    packed = show.packed(profiled())
    for view in ("measured", "communication"):
        for width, theme in LOOKS:
            shown = show(packed, [view], width, theme)
            assert shown.overflowing() == []
            if theme == "light":
                assert shown.violations() == []
            text = shown.root.inner_text().replace("\u202f", " ")
            assert ("17.0 ms" if view == "measured" else "25.0 ms") in text


def test_a_piece_of_a_lane_is_told_with_its_line(show: Stage):
    shown = show(profiled(), ["measured"])
    box = shown.root.get_by_role("application").bounding_box()
    assert box is not None
    shown.page.mouse.move(box["x"] + 0.1 * box["width"], box["y"] + 18 + 32 + 10)  # of device 1
    shown.settle()
    told = shown.root.locator(".jsm-pp-tip").inner_text().replace("\u202f", " ")
    assert "gpt2.py:46 from [7]:12 forward" in told and "measured 8.93 ms from 0 us" in told
    shown.page.keyboard.press("Tab")
    shown.root.get_by_role("button", name="Zoom in (key +, or Ctrl and the wheel)").click()
    shown.settle()
    assert shown.overflowing() == []


def test_without_a_word_from_the_host_the_theme_is_the_systems(show: Stage):
    for theme in ("dark", "light"):
        show.page.emulate_media(color_scheme=theme)
        assert show(attached(), ["header"], theme=None).root.get_attribute("data-theme") == theme
    show.page.emulate_media(color_scheme=None)


def test_the_theme_follows_the_host_while_the_report_is_on_show(show: Stage):
    shown = show(attached(), theme="light")
    before = shown.root.evaluate("root => getComputedStyle(root).color")
    show.page.evaluate("document.body.setAttribute('data-jp-theme-light', 'false')")
    show.page.wait_for_selector(".jsm[data-theme=dark]")
    assert shown.root.evaluate("root => getComputedStyle(root).color") != before


def test_a_report_that_cannot_be_read_says_so_in_its_place(show: Stage):
    shown = show(b"neither zlib nor JSON")
    assert shown.root.inner_text().startswith("This report could not be drawn: ")
    said, show.wrong = show.wrong, []
    assert len(said) == 1


def test_a_live_widget_hides_its_static_twin_and_gives_it_back(show: Stage):
    shown = show(attached(), _static="twin-of-this")
    twin = show.page.locator("p.twin-of-this")
    hidden = "twin => getComputedStyle(twin).display === 'none'"
    assert twin.evaluate(hidden)
    show.remove()
    assert shown.root.count() == 0
    assert not twin.evaluate(hidden)


def test_the_twin_gives_way_to_the_widget_in_one_frame(show: Stage):
    """What is seen in each frame while the widget comes: the twin, then the widget, never both and never nothing."""
    show(attached(), _static="before")
    watched = """async () => {
      const [box, twin] = [document.querySelector("main"), document.querySelector("p.before")];
      await stub.remove();
      twin.textContent = "twin";
      const seen = [];
      let on = true;
      const look = () => {
        const [old, root] = [getComputedStyle(twin).display !== "none", box.querySelector(".jsm")];
        seen.push(`${old ? "twin" : ""}${root?.getBoundingClientRect().height > 300 ? "widget" : ""}`);
        if (on) requestAnimationFrame(look);
      };
      await new Promise((then) => requestAnimationFrame(() => (look(), then())));
      await report.render({ model, el: box });
      await stub.settled();
      on = false;
      return seen;
    }"""
    seen = show.page.evaluate(watched)
    assert set(seen) == {"twin", "widget"} and seen == sorted(seen)


@pytest.mark.parametrize("name", ["attached", "large", "shapes"])
def test_a_widget_that_is_taken_away_leaves_nothing_behind(name: str, show: Stage):
    shown = show(SAMPLES[name]())
    for tab in tabs(shown):
        shown.fire(tab=tab)
    assert show.remove() == 0
    assert show.page.evaluate("document.querySelectorAll('style[data-jsm]').length") == 1, "one style for all"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_html_of_another_report_looks_the_same_beside_a_live_one(theme: str, show: Stage):
    """A reopened notebook has many such; the page has one style sheet as soon as one of its cells runs."""
    looks = """([html, theme]) => {
      const place = document.createElement("div");
      place.style.color = theme === "dark" ? "#ddd" : "#222";
      place.innerHTML = html;
      document.body.append(place);
      const looks = [...place.querySelectorAll("*")].map(node => {
        const { color, backgroundColor, display, fontSize, margin, fill } = getComputedStyle(node);
        return [node.tagName, color, backgroundColor, display, fontSize, margin, fill].join(" ");
      });
      place.remove();
      return looks;
    }"""
    given = [attached().to_html(), theme]
    show(attached(), theme=theme)
    show.page.evaluate("document.querySelector('style[data-jsm]').disabled = true")
    alone = show.page.evaluate(looks, given)
    show.page.evaluate("document.querySelector('style[data-jsm]').disabled = false")
    assert show.page.evaluate(looks, given) == alone
