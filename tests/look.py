"""Pictures of a view for its author: `python tests/look.py layout`, `python tests/look.py memory large unknown`.

The timeline stands alone: `python tests/look.py pipeline measured large`.
"""

import sys
import tempfile
from pathlib import Path

from browsing import chromium, stage
from sample_pipelines import PIPELINES
from sample_reports import SAMPLES

from jaxshard_magic.views.timeline_payload import packed_pipeline

WHOLE, ALONE = "report", "pipeline"
VIEWS = (WHOLE, "header", "layout", "memory", "communication", ALONE)


def main(view: str = WHOLE, *names: str) -> None:
    """Draw `view` of the sample reports `names` in both themes and widths, and print where the pictures lie."""
    samples = PIPELINES if view == ALONE else SAMPLES
    if view not in VIEWS or not set(names) <= set(samples):
        sys.exit(f"views: {', '.join(VIEWS)}; reports: {', '.join(samples)}")
    place = Path(tempfile.gettempdir()) / "jaxshard-look"
    place.mkdir(exist_ok=True)
    with chromium() as browser, stage(browser) as show:
        for name in names or ("measured" if view == ALONE else "attached",):
            made = packed_pipeline(PIPELINES[name]()) if view == ALONE else SAMPLES[name]()
            for width, theme in ((900, "light"), (620, "light"), (900, "dark"), (620, "dark")):
                shown = show(made, None if view == WHOLE else [view], width, theme)
                path = place / f"{view}-{name}-{width}-{theme}.png"
                shown.root.screenshot(path=path)
                print(path)
        print(*show.wrong, sep="\n", end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
