"""What can be sent: each picture as a file, and a page with the widget itself that needs no notebook and no network."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from support.browsing import OVERFLOWING, Stage
from support.markup import Reader, assert_inert
from support.sample_choices import CHOICES, predicted
from support.sample_comparisons import COMPARISONS, measured_trials
from support.sample_explorers import EXPLORERS, edited
from support.sample_pipelines import PIPELINES, interleaved
from support.sample_reports import SAMPLES, attached, bare, hostile
from support.thinned import thinned

from jaxshard_magic import schedule
from jaxshard_magic.errors import ShardError
from jaxshard_magic.report.exports import THEMES, Exportable, HasPictures
from jaxshard_magic.views import words
from jaxshard_magic.views.colours import DARK, LIGHT
from jaxshard_magic.views.format import SPACE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

MOST = 600_000  # bytes of a page
GROUPS: dict[str, dict[str, Callable[[], Any]]] = {
    "report": SAMPLES,
    "comparison": COMPARISONS,
    "pipeline": PIPELINES,
    "choice": CHOICES,
    "explorer": EXPLORERS,
}
EVERY = thinned(
    [(group, name) for group, made in GROUPS.items() for name in made],
    [
        *(("report", name) for name in ("attached", "large", "hostile", "bare")),
        *(("comparison", name) for name in ("many", "hostile")),
        *(("pipeline", name) for name in ("measured", "large", "hostile")),
        *(("choice", name) for name in ("planned", "hostile")),
        ("explorer", "edited"),
    ],
)
COLOUR = re.compile(r"#[0-9a-f]{3,6}|rgba?\([^)]*\)")


def made(group: str, name: str) -> Any:
    return GROUPS[group][name]()


def compared() -> schedule.ScheduleComparison:
    return schedule.compare("gpipe,1f1b,zb-h1", stages=4, microbatches=8)


SVG = "{http://www.w3.org/2000/svg}"


def text_of(svg: str) -> str:
    """The texts of a picture in their order, a space between two."""
    texts = ("".join(each.itertext()) for each in ElementTree.fromstring(svg).iter(f"{SVG}text"))
    return " ".join(" ".join(texts).replace(SPACE, " ").split())


@pytest.mark.parametrize(("group", "name"), EVERY)
def test_a_page_is_small_asks_for_nothing_and_names_cannot_break_out_of_it(group: str, name: str):
    page = made(group, name).to_html(interactive=True)
    assert len(page.encode()) < MOST
    scripts = re.findall(r"<script[^>]*>", page)
    if scripts or group != "choice":  # a choice of which nothing was compiled has no widget
        assert scripts == [
            "<script>",
            "<script nomodule>",
            '<script type="application/json" id="jsm-page">',
            '<script type="module">',
        ]
    assert not re.search(r'(?:src|href)="(?!data:,")', page)
    assert "https://" not in page


def test_without_being_asked_a_page_has_no_script():
    for shown in (attached(), measured_trials(), interleaved(), edited()):
        assert_inert(shown.to_html())
    assert "<script" not in attached().to_html() + interleaved().to_html()


def test_a_page_with_the_widget_has_the_page_without_it_as_well(tmp_path: Path):
    report = attached()
    path = report.to_html(tmp_path / "report.html", interactive=True)
    assert path == tmp_path / "report.html"
    text = path.read_text("utf-8")
    assert report.to_html() in text and text == report.to_html(interactive=True)


@pytest.mark.parametrize(("group", "name"), EVERY)
def test_every_picture_is_an_svg_of_its_own_in_the_colours_of_its_theme(group: str, name: str):
    shown: HasPictures = made(group, name)
    for picture in shown._pictures():
        light, dark = (shown.drawn(picture, theme) for theme in THEMES)
        assert ElementTree.fromstring(light).get("viewBox")
        for text, own, other in ((light, LIGHT, DARK), (dark, DARK, LIGHT)):
            assert f'fill="{own["bg"]}"' in text and f'color="{own["ink"]}"' in text
            assert own["a0"] in text and other["a0"] not in text
        assert COLOUR.sub("", light) == COLOUR.sub("", dark)
        assert "<script" not in light and "\x1b" not in light


def test_a_report_has_a_picture_of_each_tab_and_these_hold_its_figures():
    report = attached()
    layout, memory, communication = (text_of(report.drawn(p)) for p in ("layout", "memory", "communication"))
    assert "fsdp+tp on data=4 model=2" in layout
    assert "f32[50257,768@data] 36.8 MiB" in layout
    assert "Device 0 is fullest, 5.09 of 15.75 GiB." in memory
    assert "all-gather data 98 464 MiB 14.3 ms" in communication
    assert "Bubble 17.8% predicted" in text_of(interleaved().drawn("pipeline"))
    assert "fsdp+tp bf16" in text_of(measured_trials().drawn("comparison"))


def test_a_bar_of_memory_is_as_long_as_its_share_of_the_limit():
    root = ElementTree.fromstring(attached().drawn("memory"))
    bars = [s for s in root.iter(f"{SVG}svg") if s.get("preserveAspectRatio") == "none"]
    report = attached()
    assert report.memory is not None
    for bar, device in zip(bars, report.memory.per_device[:2], strict=True):
        roles = [r for r in bar.iter(f"{SVG}rect") if "jss-r-" in (r.get("class") or "")]
        drawn = sum(float(r.get("width", 0)) for r in roles)
        assert device.peak and device.limit
        assert drawn / 1000 == pytest.approx(device.peak / device.limit, abs=1e-3)


def test_the_name_of_the_file_says_which_picture_unless_it_is_said(tmp_path: Path):
    report = attached()
    for path in (report.save(tmp_path / "memory.svg"), report.save(tmp_path / "a.SVG", "memory")):
        assert path.read_text("utf-8") == report.drawn("memory")
    over = report.save(tmp_path / "memory.svg", theme="dark")
    assert over.read_text("utf-8") == report.drawn("memory", "dark")


@pytest.mark.parametrize(
    ("shown", "path", "picture", "said"),
    [
        (attached, "memry.svg", None, "no picture 'memry' here. Did you mean 'memory'? "
         "The pictures are layout, memory, communication"),
        (attached, "x.svg", "timeline", "no picture 'timeline' here; the pictures are layout, memory, communication"),
        (bare, "layout.svg", None, "no picture 'layout' here; there is nothing to draw"),
        (attached, "layout.pdf", None, "layout.pdf ends in .pdf; a picture is saved as .svg or .png"),
        (attached, "layout", None, "layout has no ending; a picture is saved as .svg or .png"),
        (attached, "nowhere/layout.png", None, "nowhere/layout.png can't be written: there is no folder nowhere."),
        (interleaved, "timeline.svg", None, "no picture 'timeline' here. Did you mean 'pipeline'? "
         "The pictures are pipeline"),
        (compared, "bubble.svg", None, "no picture 'bubble' here. Did you mean 'bubbles'? "
         "The pictures are bubbles, memory"),
    ],
)  # fmt: skip
def test_a_picture_that_is_not_there_is_one_line(
    shown: Callable[[], HasPictures],
    path: str,
    picture: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: Any,
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ShardError) as error:
        shown().save(path, picture)
    assert str(error.value) == said
    assert list(tmp_path.iterdir()) == []


def test_a_theme_that_is_none_is_one_line():
    wrong: Any = "drak"
    with pytest.raises(ShardError, match=r"^no theme 'drak'. Did you mean 'dark'\? The themes are light, dark$"):
        attached().drawn("layout", wrong)


def test_a_png_has_two_pixels_for_each_px(tmp_path: Path):
    pytest.importorskip("resvg_py", reason="pip install -e '.[test]'")
    data = attached().save(tmp_path / "layout.png", theme="dark").read_bytes()
    width, height = (int.from_bytes(data[at : at + 4]) for at in (16, 20))
    root = ElementTree.fromstring(attached().drawn("layout"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (width, height) == (2 * float(root.get("width", 0)), 2 * float(root.get("height", 0)))


def test_without_its_package_a_png_is_one_line_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(ShardError) as error:
        attached().save(tmp_path / "layout.png")
    assert str(error.value) == (
        "a .png takes the package resvg-py, which is not installed: pip install resvg-py; a .svg needs nothing"
    )
    assert error.value.fix == "pip install resvg-py" and list(tmp_path.iterdir()) == []


def test_the_kernel_answers_with_the_picture_that_python_saves(monkeypatch: pytest.MonkeyPatch):
    report, sent = attached(), list[Any]()
    monkeypatch.setattr(report.view, "send", sent.append)
    for name in ("memory", "nothing", None):
        report.view._handle_custom_msg({"kind": "picture", "name": name, "theme": "dark"}, [])
    text = report.drawn("memory", "dark")
    assert sent == [{"kind": "picture", "name": "memory", "theme": "dark", "text": text}]


@pytest.mark.ci
def test_a_button_saves_the_picture_that_the_kernel_draws(show: Stage):
    report = attached()
    shown = show(report, theme="dark")
    shown.fire(tab="memory")
    shown.root.get_by_role("button", name="Save this picture as svg").click()
    asked = {"kind": "picture", "name": "memory", "theme": "dark"}
    assert show.page.evaluate("model.sent") == [asked]
    with show.page.expect_download() as download:
        answer = {**asked, "text": report.drawn("memory", "dark")}
        show.page.evaluate("answer => model.tell('msg:custom', answer)", answer)
    assert download.value.suggested_filename == "memory.svg"
    assert Path(download.value.path()).read_text("utf-8") == answer["text"]
    shown.root.get_by_role("button", name="Save this picture as svg").get_by_text("saved").wait_for()


class Opened:
    """Pages opened from their files, in a browser that is offline."""

    def __init__(self, browser: "Browser", folder: Path):
        self.browser, self.folder = browser, folder
        self.contexts, self.wrong = list["BrowserContext"](), list[str]()

    def __call__(self, shown: Exportable, theme: Any = "light", width: int = 900, **context: Any) -> "Page":
        path = shown.to_html(self.folder / "page.html", interactive=True)
        opened = self.browser.new_context(
            color_scheme=theme, viewport={"width": width, "height": 800}, offline=True, **context
        )
        self.contexts.append(opened)
        opened.set_default_timeout(5_000)
        page = opened.new_page()
        page.on(
            "request",
            lambda r: self._told(r.url) if not r.url.startswith(("file:", "blob:", "data:")) else None,
        )
        page.on("pageerror", lambda error: self._told(f"uncaught: {error}"))
        page.on("console", lambda m: self._told(m.text) if m.type in ("error", "warning") else None)
        page.goto(path.as_uri())
        if context.get("java_script_enabled", True):
            page.locator(".jsm, .jsm-views details").first.wait_for()
        return page

    def _told(self, what: str) -> None:
        self.wrong.append(what)


@pytest.fixture
def opened(browser: "Browser", tmp_path: Path) -> Iterator[Opened]:
    pages = Opened(browser, tmp_path)
    yield pages
    for context in pages.contexts:
        context.close()
    assert pages.wrong == []


def plain(text: str) -> str:
    return " ".join(text.replace(SPACE, " ").split())


@pytest.mark.ci
def test_a_report_is_opened_offline_pointed_at_and_its_pictures_saved(opened: Opened):
    report = attached()
    for theme in ("light", "dark"):
        page = opened(report, theme)
        assert page.locator(".jsm").get_attribute("data-theme") == theme
        told = [plain(text).replace(" ", "") for text in page.locator(".jsm-figure-value").all_inner_texts()]
        assert told == [plain(f.value).replace(" ", "") for f in words.key_figures_of(report)]
        assert page.locator(".jsm-twin").is_hidden(), "the HTML without script gives way"
        page.get_by_role("tab", name="Communication").click()
        assert "62% of the predicted step is communication" in page.get_by_role("tabpanel").inner_text()
        for ending in ("svg", "png"):
            with page.expect_download() as download:
                page.get_by_role("button", name=f"Save this picture as {ending}").click()
            data = Path(download.value.path()).read_bytes()
            assert download.value.suggested_filename == f"communication.{ending}"
            if ending == "svg":
                assert data.decode() == report.drawn("communication", theme)
            else:
                assert data[:4] == b"\x89PNG" and int.from_bytes(data[16:20]) == 2 * 892


@pytest.mark.ci
@pytest.mark.parametrize("name", thinned(["large", "hostile", "staged", "bare"], ["large", "hostile"]))
def test_nothing_stands_out_of_a_narrow_page(name: str, opened: Opened):
    page = opened(SAMPLES[name](), width=620)
    assert page.locator(".jsm").evaluate(OVERFLOWING) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 620


@pytest.mark.ci
def test_a_comparison_a_timeline_and_a_choice_are_opened_offline(opened: Opened):
    comparison = measured_trials()
    page = opened(comparison)
    assert page.get_by_role("grid").locator("tbody tr").count() == len(comparison.trials)
    page.get_by_role("option", name=re.compile("^dp: ")).click()
    assert "dp" in page.get_by_role("group", name="The chosen trial").inner_text()

    page = opened(interleaved(), "dark")
    assert "Bubble 17.8% predicted" in plain(page.locator(".jsm").inner_text())
    assert page.locator("canvas").count() > 0

    page = opened(predicted())
    page.get_by_text("The report of the choice").click()
    page.locator(".jsm-verdict").wait_for()
    assert plain(page.locator(".jsm-verdict").inner_text()) == plain(words.verdict(predicted().report).text)


@pytest.mark.ci
def test_compared_schedules_open_the_timeline_of_each(opened: Opened):
    page = opened(compared())
    assert "Smallest bubble: zb-h1" in plain(page.locator(".jsm-above").inner_text())
    page.locator("summary", has_text="1f1b").click()
    page.locator(".jsm canvas").first.wait_for()
    assert "Bubble 27.3%" in plain(page.locator(".jsm").inner_text())
    assert page.locator(".jsm").count() == 1, "one that is not opened is not drawn"


@pytest.mark.ci
def test_an_explorer_works_offline_and_says_what_needs_the_notebook(opened: Opened):
    page = opened(edited())
    assert page.get_by_role("button", name="compile").count() == 0
    assert page.get_by_role("combobox", name="strategy").count() == 0
    assert "compiling it needs the notebook" in page.locator(".jsm").inner_text()
    before = page.locator(".jsm-ex-line").inner_text()
    size = page.get_by_role("spinbutton").first
    size.fill("2")
    size.press("Enter")
    page.get_by_text("planning another needs the notebook").wait_for()
    assert page.locator(".jsm-ex-line").inner_text() != before


@pytest.mark.ci
def test_without_scripts_the_page_shows_the_report_as_html(opened: Opened):
    page = opened(hostile(), java_script_enabled=False)
    assert Reader(hostile().to_html()).text[:40] in plain(page.locator("body").inner_text())
    assert page.locator(".jsm").count() == 0
