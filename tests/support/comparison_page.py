"""The parts of a comparison's widget in the page, by the trials of `measured_trials` that they are of."""

import re
from typing import TYPE_CHECKING

from support.browsing import Shown

if TYPE_CHECKING:
    from playwright.sync_api import Locator

# Positions of the sample's trials.
WHOLE, BF16, DP, FSDP, STAGED, HEADS = range(6)


def rows(shown: Shown) -> "Locator":
    return shown.root.get_by_role("grid").locator("tbody tr")


def row(shown: Shown, name: str) -> "Locator":
    """The row of the trial with this name."""
    return rows(shown).filter(has=shown.page.locator(".jsm-cmp-name > :first-child").get_by_text(name, exact=True))


def names(shown: Shown) -> list[str]:
    """The trials as they stand in the table."""
    return rows(shown).locator(".jsm-cmp-name > :first-child").all_inner_texts()


def point(shown: Shown, name: str) -> "Locator":
    return shown.root.get_by_role("option", name=re.compile(f"^{re.escape(name)}: "))


def side(shown: Shown) -> "Locator":
    return shown.root.get_by_role("group", name="The chosen trial")


def pair(shown: Shown) -> "Locator":
    return shown.root.get_by_role("region", name="What differs")


def traits(shown: Shown) -> list[int | None]:
    return [shown.trait("chosen"), shown.trait("other")]
