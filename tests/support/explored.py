"""The explorer in a browser as tests read and press it."""

import re
from typing import TYPE_CHECKING

from support.browsing import Shown

from jaxshard_magic.explorer import Explorer
from jaxshard_magic.views.format import SPACE

if TYPE_CHECKING:
    from playwright.sync_api import Locator

WTE = "wte.embedding"
RULE = """%%shard fsdp+tp --rule "wte.embedding=P(None, ('data', 'model'))\""""


def chip(shown: Shown, dim: int, axis: str) -> "Locator":
    return shown.root.get_by_role("button", name=f"cut dim {dim} over {axis}", exact=True)


def button(shown: Shown, name: str) -> "Locator":
    return shown.root.get_by_role("button", name=name, exact=True)


def size(shown: Shown, axis: str) -> "Locator":
    return shown.root.get_by_role("spinbutton", name=f"size of {axis}")


def line(shown: Shown) -> str:
    return shown.root.locator(".jsm-ex-line code").inner_text()


def figures(shown: Shown) -> list[str]:
    """What stands below the dimensions: a text for each figure, units behind a space."""
    texts = shown.root.locator(".jsm-ex-figures > div").all_inner_texts()
    return [re.sub(r"(?<=\d)(?=([KMG]i)?B\b)", " ", " ".join(t.replace(SPACE, " ").split())) for t in texts]


def mesh(shown: Shown) -> dict[str, int]:
    names = shown.root.get_by_role("textbox", name=re.compile("name of axis")).all()
    return {name.input_value(): int(size(shown, name.input_value()).input_value()) for name in names}


def follow(shown: Shown, ex: Explorer) -> Explorer:
    """The sample after Python has heard all that the browser told it."""
    for said in shown.saved():
        ex.change(
            axes=dict(said["axes"]) if "axes" in said else None,
            strategy=said.get("strategy"),
            wishes=None if "wishes" not in said else {k: tuple(map(tuple, v)) for k, v in said["wishes"].items()},
        )
    return ex
