"""A program to take home, shown: the text is the program, the page says what it moves, and no text of it is markup."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import Notebook
from support.markup import Reader, assert_inert
from support.thinned import CI

from jaxshard_magic.codegen import Code, wrappers
from jaxshard_magic.report import Collective
from jaxshard_magic.views.format import SPACE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MIB = 2**20
WIDE = "x = " + " + ".join(f"w{n}" for n in range(60))
PROGRAM = (
    f'''"""train_step under fsdp, in <plain> JAX & more."""

import jax as j  # the "library"


def step(p, *, rate=1e-3, flags=0xFF):
\treturn not p if rate is None else f"{{p!r}} \u91cd\u307f"


{WIDE}
'''
    + "# the end\n" * 40
)
EVIL = "</pre><script>alert('x')</script>&amp;<b onclick=\"x\">\x1b[2J"


def gathers(count: int, axes: tuple[str, ...] | None = ("data",)) -> Collective:
    """Each of 1 MiB over 8 devices: one device sends 7/8 of it."""
    return Collective("all-gather", axes, 8, count, MIB, count * MIB * 7 // 8)


REDUCES = Collective("all-reduce", ("data",), 8, 4, MIB, 7 * MIB)  # 4 of 1 MiB, each sent as 2 x 7/8


def code(planned: tuple[Collective, ...] | None, sent: tuple[Collective, ...] | None) -> Code:
    return Code("train_step", "fsdp", {"data": 8}, PROGRAM, planned, sent)


SAME = code((gathers(8), REDUCES), (REDUCES, gathers(8)))
MORE = code((gathers(8), REDUCES), (gathers(16), REDUCES))
LESS = code((gathers(8), REDUCES), (gathers(4), REDUCES))
OTHER = code((gathers(8),), (REDUCES,))
UNKNOWN = code((gathers(8),), None)
NOTHING = code((), ())
HOSTILE = Code(
    EVIL,
    EVIL,
    {EVIL: 8, "d\u00e4ta": 1},
    f'"""{EVIL}"""\n# {EVIL}\nx = {EVIL}\n',
    (Collective(EVIL, (EVIL,), 8, 1, MIB, MIB),),
    (Collective(EVIL, None, 8, 1, MIB, MIB), gathers(8, None)),
    (EVIL,),
)
ALL = {
    "same": SAME,
    "more": MORE,
    "less": LESS,
    "other": OTHER,
    "unknown": UNKNOWN,
    "nothing": NOTHING,
    "hostile": HOSTILE,
}


class Shown(Reader):
    """A page's `<pre>` texts: the lines' numbers and the program; and its other tables' cells, row by row."""

    def __init__(self, html: str):
        self.blocks: list[str] = []
        self.rows: list[list[str]] = []
        super().__init__(html)
        self.rows = [row for row in self.rows if row and self.blocks[0] not in row]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        if tag == "pre":
            self.blocks.append("")
        elif tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        super().handle_data(data)
        if "pre" in self.open:
            self.blocks[-1] += data
        if "td" in self.open:
            self.rows[-1][-1] += data.replace(SPACE, " ")


def rows(found: Code) -> list[list[str]]:
    """Of the table of collectives, without its head."""
    return Shown(found.to_html()).rows


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("width", [None, 20, 80])
def test_as_text_it_is_the_program_at_every_width(name: str, width: int | None):
    found = ALL[name]
    assert found.to_text(width) == str(found) == found.text


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (SAME, "\u2714\ufe0e Moves what the plan moves: 14.0 MiB per device and step."),
        (
            MORE,
            "\u26a0\ufe0e Sends 7.00 MiB more per device and step than the plan: 21.0 MiB instead of 14.0 MiB.",
        ),
        (
            LESS,
            "\u2139\ufe0e Sends 3.50 MiB less per device and step than the plan: 10.5 MiB instead of 14.0 MiB.",
        ),
        (
            OTHER,
            "\u2139\ufe0e Sends as much as the plan, by other collectives: 7.00 MiB per device and step.",
        ),
        (UNKNOWN, "\u2139\ufe0e What it moves is not known: the compiler gave no text to read that from."),
        (
            code(None, (gathers(8),)),
            "\u2139\ufe0e What it moves is not known: the compiler gave no text to read that from.",
        ),
        (NOTHING, "\u2714\ufe0e Moves nothing between devices, as the plan."),
        (
            code((), (gathers(8),)),
            "\u26a0\ufe0e Sends 7.00 MiB more per device and step than the plan: 7.00 MiB instead of 0 B.",
        ),
        (
            code((gathers(8),), (replace(gathers(16), exact=False),)),
            "\u26a0\ufe0e Sends 7.00 MiB more per device and step than the plan: \u226514.0 MiB instead of 7.00 MiB.",
        ),
    ],
)
def test_the_page_says_what_the_program_moves_beside_the_plan(found: Code, said: str):
    assert f" {said} " in Reader(found.to_html()).text


def test_the_page_says_what_the_program_is_of():
    assert Reader(SAME.to_html()).text.startswith("train_step under fsdp data=8 50 lines of plain JAX ")
    one = replace(SAME, text="x = 1\n", mesh={"data": 4, "model": 2})
    assert Reader(one.to_html()).text.startswith("train_step under fsdp data=4 model=2 1 line of plain JAX ")


def test_differing_collectives_stand_side_by_side_and_first():
    assert rows(MORE) == [
        ["all-gather", "data", "1.00 MiB", "16", "8", "+7.00 MiB"],
        ["all-reduce", "data", "1.00 MiB", "4", "4", "the same"],
    ]
    assert sorted(rows(OTHER)) == [
        ["all-gather", "data", "1.00 MiB", "none", "8", "\u22127.00 MiB"],
        ["all-reduce", "data", "1.00 MiB", "4", "none", "+7.00 MiB"],
    ]


def test_collectives_over_no_axes_of_the_mesh_are_told_by_their_groups():
    assert rows(code((), (gathers(8, None),))) == [["all-gather", "groups of 8", "1.00 MiB", "8", "none", "+7.00 MiB"]]


@pytest.mark.parametrize("found", [SAME, UNKNOWN, NOTHING])
def test_collectives_have_no_table_where_there_is_nothing_to_compare(found: Code):
    assert rows(found) == []


def test_of_many_collectives_those_that_differ_and_weigh_most_are_shown():
    planned = tuple(replace(gathers(1), bytes=n, wire_bytes=n) for n in range(1, 31))
    sent = (*planned[:2], *(replace(c, count=2, wire_bytes=2 * c.bytes) for c in planned[2:]))
    found = code(planned, sent)
    assert [row[2] for row in rows(found)] == [f"{n} B" for n in range(30, 18, -1)]
    assert "18 more are told where the program begins." in Reader(found.to_html()).text


@pytest.mark.parametrize("name", list(ALL))
def test_the_html_is_well_formed_without_script_and_hostile_text_stays_text(name: str, tmp_path: Path):
    found = ALL[name]
    assert_inert(found.to_html())
    page = found.to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert Shown(page).blocks == Shown(found.to_html()).blocks
    assert "<script" not in page and "<b onclick" not in page


def test_no_name_can_move_a_cursor():
    above, _, _ = HOSTILE.to_html().partition('<div role="region"')
    assert "[2J" in above and "\x1b" not in above


@pytest.mark.parametrize(
    "text",
    [
        PROGRAM,
        HOSTILE.text,
        Path(wrappers.__file__).read_text(encoding="utf-8"),
        "x = 1",
        "x = 1\n\n\n",
        "\ufeffx = '\u91cd\u307f\u2028\x0c\x0b'\n",
        "not python at all ))) ''' \" \\\n",
        "",
    ],
)
def test_the_page_has_the_program_to_the_letter_with_lines_numbered(text: str):
    numbers, program = Shown(replace(SAME, text=text).to_html()).blocks
    assert program == text
    lines = text.removesuffix("\n").count("\n") + 1
    assert numbers.split("\n") == [str(n) for n in range(1, lines + 1)]


def test_keywords_strings_comments_and_numbers_have_a_hue_each():
    html = SAME.to_html()
    for hue, told in {
        "kw": ("import", "def", "return", "not", "None"),
        "str": ('"""train_step under fsdp, in &lt;plain&gt; JAX &amp; more."""',),
        "com": ("# the &quot;library&quot;", "# the end"),
        "num": ("1e-3", "0xFF"),
    }.items():
        for each in told:
            assert f'<span style="color:var(--jss-{hue})">{each.replace(chr(34), "&quot;")}</span>' in html


def sent(notebook: Notebook, found: Code) -> dict[str, Any]:
    """What a notebook's front end gets of it."""
    formatter: Any = notebook.shell.display_formatter
    return formatter.format(found)[0]


@pytest.mark.parametrize(("view", "html"), [("text", False), ("widget", True), ("html", True)])
def test_a_notebook_shows_it_as_its_view_says(notebook: Notebook, view: str, html: bool):
    notebook.run(f"%config ShardSession.view = '{view}'")
    data = sent(notebook, MORE)
    assert data["text/plain"] == PROGRAM
    assert data.get("text/html") == (MORE.to_html() if html else None)


def test_unloading_the_extension_takes_its_display_away(notebook: Notebook):
    notebook.run("%config ShardSession.view = 'text'\n%unload_ext jaxshard_magic")
    data = sent(notebook, MORE)
    assert data["text/html"] == MORE.to_html()


CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const light = colour => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = light(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll("pre, pre span")].map(node => {
    const [low, high] = [light(getComputedStyle(node).color), ground].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  });
}"""
SELECTED = """() => {
  const range = document.createRange(), selection = getSelection();
  range.selectNodeContents(document.querySelector("[role=region]"));
  selection.removeAllRanges();
  selection.addRange(range);
  return selection.toString();
}"""


@pytest.fixture(
    params=[
        (868, "light"),
        pytest.param((620, "light"), marks=CI),
        pytest.param((868, "dark"), marks=CI),
        (620, "dark"),
    ],
    ids=str,
)
def shown(browser: "Browser", request: pytest.FixtureRequest, tmp_path: Path) -> Iterator["Page"]:
    width, theme = request.param
    page = browser.new_page(viewport={"width": width, "height": 700}, color_scheme=theme)
    page.goto(MORE.to_html(tmp_path / "page.html").as_uri())
    yield page
    page.close()


def test_the_program_scrolls_in_its_own_window(shown: "Page"):
    assert shown.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    window = shown.locator("[role=region]")
    box = window.bounding_box()
    assert box is not None and box["height"] <= 422
    assert window.evaluate("at => at.scrollWidth > at.clientWidth && at.scrollHeight > at.clientHeight")
    window.focus()
    shown.keyboard.press("End")
    shown.wait_for_function("document.querySelector('[role=region]').scrollTop > 0")


def test_numbers_stand_at_their_lines(shown: "Page"):
    numbers, program = (shown.locator("pre").nth(n).bounding_box() for n in (0, 1))
    assert numbers is not None and program is not None
    assert (numbers["y"], numbers["height"]) == (program["y"], program["height"]) == (numbers["y"], 50 * 18)


def test_what_is_selected_is_the_program_without_numbers(shown: "Page"):
    assert shown.evaluate(SELECTED).strip() == PROGRAM.strip()


def test_every_hue_is_read_on_its_ground(shown: "Page"):
    found = shown.evaluate(CONTRASTS)
    assert len(found) > 10 and min(found) >= 4.5


def test_axe_finds_nothing(shown: "Page"):
    import axe_playwright_python

    shown.evaluate((files(axe_playwright_python) / "axe.min.js").read_text(encoding="utf-8"))
    run = "axe.run(document.querySelector('.jss'), {resultTypes: ['violations']})"
    assert shown.evaluate(f"{run}.then(found => found.violations.map(rule => rule.id))") == []
