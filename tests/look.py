"""Pictures of a view for its author: `python tests/look.py layout`, `python tests/look.py memory large unknown`."""

import sys
import tempfile
from pathlib import Path

from browsing import chromium, stage
from sample_reports import SAMPLES

WHOLE = "report"
VIEWS = (WHOLE, "header", "layout", "memory", "communication")


def main(view: str = WHOLE, *names: str) -> None:
    """Draw `view` of the sample reports `names` in both themes and widths, and print where the pictures lie."""
    if view not in VIEWS or not set(names) <= set(SAMPLES):
        sys.exit(f"views: {', '.join(VIEWS)}; reports: {', '.join(SAMPLES)}")
    place = Path(tempfile.gettempdir()) / "jaxshard-look"
    place.mkdir(exist_ok=True)
    with chromium() as browser, stage(browser) as show:
        for name in names or ("attached",):
            for width, theme in ((900, "light"), (620, "light"), (900, "dark"), (620, "dark")):
                shown = show(SAMPLES[name](), None if view == WHOLE else [view], width, theme)
                path = place / f"{view}-{name}-{width}-{theme}.png"
                shown.root.screenshot(path=path)
                print(path)
        print(*show.wrong, sep="\n", end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
