"""Pictures of a view for its author: `python tests/look.py layout`, `python tests/look.py memory large unknown`.

The timeline, the comparison, a choice and the explorer stand alone: `python tests/look.py pipeline measured large`,
`... compare many`, `... choice planned`, `... explore edited`; the comparison's document without script is
`... static many`.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from support.browsing import chromium, stage
from support.sample_choices import CHOICES
from support.sample_comparisons import COMPARISONS
from support.sample_explorers import EXPLORERS
from support.sample_pipelines import PIPELINES
from support.sample_reports import SAMPLES

from jaxshard_magic.views.timeline.payload import packed_pipeline

WHOLE = "report"
ALONE = {
    "pipeline": (PIPELINES, "measured"),
    "compare": (COMPARISONS, "measured_trials"),
    "choice": (CHOICES, "predicted"),
    "explore": (EXPLORERS, "edited"),
}
STATIC = "static"
VIEWS = (WHOLE, "header", "layout", "memory", "communication", "measured", *ALONE, STATIC)
SIZES: tuple[tuple[int, Literal["light", "dark"]], ...] = (
    (900, "light"),
    (868, "light"),
    (620, "light"),
    (900, "dark"),
    (620, "dark"),
)


def main(view: str = WHOLE, *names: str) -> None:
    """Draw `view` of the sample reports `names` in both themes and widths, and print where the pictures lie."""
    samples, first = ALONE.get("compare" if view == STATIC else view, (SAMPLES, "attached"))
    if view not in VIEWS or not set(names) <= set(samples):
        sys.exit(f"views: {', '.join(VIEWS)}; reports: {', '.join(samples)}")
    place = Path(tempfile.gettempdir()) / "jaxshard-look"
    place.mkdir(exist_ok=True)
    if view == STATIC:
        documents(place, names or (first,))
        return
    with chromium() as browser, stage(browser) as show:
        for name in names or (first,):
            made = samples[name]()
            made = packed_pipeline(made) if view == "pipeline" else made
            for width, theme in SIZES:
                shown = show(made, None if view == WHOLE else [view], width, theme)
                path = place / f"{view}-{name}-{width}-{theme}.png"
                shown.root.screenshot(path=path)
                print(path)
        print(*show.wrong, sep="\n", end="")


def documents(place: Path, names: Sequence[str]) -> None:
    """The same of comparisons as whole documents without script."""
    with chromium() as browser:
        for name in names:
            written = COMPARISONS[name]().to_html(place / f"{STATIC}-{name}.html")
            for width, theme in SIZES:
                page = browser.new_page(
                    viewport={"width": width, "height": 600}, color_scheme=theme, device_scale_factor=2
                )
                page.goto(written.as_uri())
                path = place / f"{STATIC}-{name}-{width}-{theme}.png"
                page.screenshot(path=path, full_page=True)
                page.close()
                print(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
