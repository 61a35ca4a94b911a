"""A headless browser, and a page that shows a report's widget alone, with a stub in the place of its model."""

import base64
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

try:
    from playwright.sync_api import expect, sync_playwright
except ImportError:  # the tests that need it are skipped, and say so
    expect = sync_playwright = None

from jaxshard_magic.explorer import Explorer
from jaxshard_magic.report import Report
from jaxshard_magic.report.choice import Choice
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.views.choice.payload import packed_choice
from jaxshard_magic.views.comparison.payload import packed_comparison
from jaxshard_magic.views.explorer_payload import packed_explorer, state
from jaxshard_magic.views.payload import packed_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Route

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage"]
STATIC = Path(__file__).parents[2] / "jaxshard_magic" / "static"
MODULES = (
    *(STATIC / f"{name}.js" for name in ("report", "compare", "explore", "live", "loader")),
    Path(__file__).with_name("stub_model.js"),
)
PAGE = "https://report.test/"  # never looked up: the page answers for itself
BLANK = '<!doctype html><html lang="en"><title>A report</title><link rel="icon" href="data:,"><body></body></html>'

# Elements whose right edge lies outside the widget, where nothing around them scrolls or clips.
OVERFLOWING = """root => {
  const limit = root.getBoundingClientRect().right + 1;
  const clipped = node => {
    for (let at = node; at !== root.parentElement; at = at.parentElement) {
      const { overflowX, clipPath } = getComputedStyle(at);
      if (clipPath !== "none" || (at !== node && !(at instanceof SVGElement) && overflowX !== "visible")) return true;
    }
    return false;
  };
  const wide = [...root.querySelectorAll("*")].filter(node => {
    const box = node.getBoundingClientRect();
    return box.width > 0 && box.right > limit && !clipped(node);
  });
  if (root.scrollWidth > root.clientWidth) wide.unshift(root);
  return wide.map(node => `${node.tagName}.${node.getAttribute("class")}: ${node.textContent.slice(0, 40)}`);
}"""


def required() -> bool:
    """Return whether tests in a browser must run here: where there is none they fail."""
    return bool(os.environ.get("CI") or os.environ.get("JAXSHARD_REQUIRE_BROWSER"))


def refused(reason: str) -> NoReturn:
    """Skip, or fail where the browser tests must run."""
    if required():
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def reason_for_none() -> str | None:
    """Say what is missing for tests in a browser, with the command that installs it; None where there is one."""
    if sync_playwright is None:
        return "no playwright: pip install -e '.[test]'"
    if any(map(shutil.which, NAMES)):
        return None
    with sync_playwright() as playwright:
        downloaded = Path(playwright.chromium.executable_path).exists()
    return None if downloaded else "no browser: apt-get install chromium, or python -m playwright install chromium"


@contextmanager
def chromium() -> "Iterator[Browser]":
    """The first browser found. While it is open its thread has a running asyncio loop: close it soon."""
    if reason := reason_for_none():
        refused(reason)
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, NAMES)), None) or playwright.chromium.executable_path
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


@dataclass(frozen=True)
class Shown:
    """A report as it stands in the page."""

    page: "Page"
    root: "Locator"

    @property
    def panel(self) -> "Locator":
        """The view on show."""
        return self.root.locator("[role=tabpanel]:visible")

    def settle(self) -> None:
        """Wait until the widget has drawn what has changed, and told Python all that it has to tell."""
        self.page.evaluate("stub.settled()")

    def traits(self) -> dict[str, Any]:
        """What Python would read, once the widget has told it all that it has to tell."""
        self.settle()
        return self.page.evaluate("({leaf: model.get('leaf'), device: model.get('device'), tab: model.get('tab')})")

    def trait(self, name: str) -> Any:
        """One that Python would read."""
        self.settle()
        return self.page.evaluate("name => model.get(name)", name)

    def saved(self) -> list[dict[str, Any]]:
        """Every message to Python, in order."""
        self.settle()
        return self.page.evaluate("model.saved")

    def fire(self, **traits: Any) -> None:
        """Set traits as Python does."""
        self.page.evaluate("traits => stub.fire(traits)", traits)

    def overflowing(self) -> list[str]:
        """The elements that stand out of the widget on its right."""
        return self.root.evaluate(OVERFLOWING)

    def violations(self, part: "Locator | None" = None) -> list[str]:
        """What axe-core finds in the whole widget or a part of it, a line for each element."""
        run = "part => axe.run(part, {resultTypes: ['violations']}).then(found => found.violations)"
        rules = (part or self.root).evaluate(run)
        return [
            f"{rule['id']}: {node['html'][:120]}: {node['failureSummary']}" for rule in rules for node in rule["nodes"]
        ]


@dataclass
class Stage:
    """A blank page that shows one report after another, and hears of everything that goes wrong in it."""

    page: "Page"
    wrong: list[str] = field(default_factory=list)

    def __call__(
        self,
        report: Report | Comparison | Choice | Explorer | bytes,
        only: Sequence[str] | None = None,
        width: int = 900,
        theme: str | None = "light",
        bundle: str = "report",
        **traits: Any,
    ) -> Shown:
        """Draw `report`, all of it or the views named in `only`; `theme` None leaves it to the system. `bundle` draws
        bytes."""
        self.page.set_viewport_size({"width": width, "height": 900})
        if isinstance(report, Explorer):
            bundle, data, traits = "explore", packed_explorer(report), state(report) | traits
        elif isinstance(report, Comparison):
            bundle, data = "compare", packed_comparison(report)
        elif isinstance(report, Choice):
            bundle, data = "compare", packed_choice(report)
        else:
            data = report if isinstance(report, bytes) else packed_report(report)
        given = {
            "packed": base64.b64encode(data).decode(),
            "traits": traits,
            "only": None if only is None else list(only),
            "width": width,
            "theme": theme,
        }
        self.page.evaluate(f"given => stub.show({bundle}, given)", given)
        return Shown(self.page, self.page.locator(".jsm"))

    @staticmethod
    def packed(report: Report) -> bytes:
        """To draw the same report several times."""
        return packed_report(report)

    def remove(self) -> int:
        """Take the report away; how many listeners it leaves on its model and the page."""
        return self.page.evaluate("stub.remove()")


@contextmanager
def stage(browser: "Browser") -> Iterator[Stage]:
    """A page with the widgets' module and the stub loaded, cut off from every network."""
    import axe_playwright_python

    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    context.set_default_timeout(5_000)
    page = context.new_page()
    made = Stage(page)
    served = {path.name: (path.read_text("utf-8"), "text/javascript") for path in MODULES}
    served[""] = (BLANK, "text/html")

    def answer(route: "Route") -> None:
        body = served.get(route.request.url.removeprefix(PAGE))
        if body is None:
            made.wrong.append(f"asked the network for {route.request.url}")
            route.abort()
        else:
            route.fulfill(body=body[0], content_type=f"{body[1]}; charset=utf-8")

    def hear(message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):
            made.wrong.append(f"console: {message.text}")

    page.route("**/*", answer)
    page.on("console", hear)
    page.on("pageerror", lambda error: made.wrong.append(f"uncaught: {error}"))
    page.on("dialog", lambda dialog: (made.wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.goto(PAGE)
    page.locator("body").all_inner_texts()  # here playwright adds its own listeners, before the stub counts
    page.evaluate(
        "Promise.all(['report', 'compare', 'explore', 'live', 'stub_model'].map(name => import(`/${name}.js`)))"
        ".then(([report, compare, explore, live, stub]) =>"
        " Object.assign(globalThis, {report, compare, explore, live, stub}))"
    )
    page.evaluate((files(axe_playwright_python) / "axe.min.js").read_text(encoding="utf-8"))
    yield made
    context.close()
