"""Reports, comparisons and choices as Markdown: the figures of the text form, and no sign of the user's is markup."""

import re

import pytest
from markdown_it import MarkdownIt
from support.sample_choices import CHOICES
from support.sample_comparisons import COMPARISONS
from support.sample_extremes import hostile
from support.sample_pipelines import reported
from support.sample_reports import SAMPLES, attached

from jaxshard_magic.errors import ShardError, printable
from jaxshard_magic.report import Advice, Leaf, Report
from jaxshard_magic.views import words

MADE = {
    **SAMPLES,
    "reported": reported,
    **{f"comparison {name}": made for name, made in COMPARISONS.items()},
    **{f"choice {name}": made for name, made in CHOICES.items()},
}
# An ellipsis cuts a figure in a terminal.
_FIGURE = re.compile(r"(?<![\w.+])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w.\u2026])")
COMMENT = "<!-- -->"
BACKSLASH = re.compile(r"\\([!-/:-@[-`{-~])")


def figures(text: str) -> set[str]:
    return set(_FIGURE.findall(text.replace("\u2212", "-")))


def tokens(markdown: str) -> list:
    """The tokens of a document for a reader of GitHub's tables."""
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown)


def inline(markdown: str) -> list:
    return [child for token in tokens(markdown) for child in token.children or ()]


def read(token) -> str:
    """What a reader sees of a cell or a paragraph."""
    kinds = {"text", "code_inline", "html_inline"}
    return "".join(child.content for child in token.children or () if child.type in kinds and child.content != COMMENT)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("width", [60, 100])
def test_each_figure_of_the_text_is_in_the_markdown(name: str, width: int):
    made = MADE[name]()
    text, markdown = made.to_text(width), BACKSLASH.sub(r"\1", made.to_markdown())
    memory = getattr(made, "memory", None)
    note = words.scale_note(memory) if memory and memory.per_device else None
    # Without bars there is no note on their scale; the timeline is that of a wide terminal.
    _, drawn, below = text.rpartition("bubble holds")
    lanes = figures(below) if drawn else set()
    assert figures(text) - figures(markdown) - figures(note or "") - lanes == set()


@pytest.mark.parametrize("name", MADE)
def test_each_row_of_a_table_has_a_cell_for_each_column(name: str):
    width, cells, rows = 0, 0, 0
    for token in tokens(MADE[name]().to_markdown()):
        if token.type == "tr_open":
            cells = 0
        elif token.type in ("th_open", "td_open"):
            cells += 1
        elif token.type == "thead_close":
            width = cells
        elif token.type == "tr_close" and width:
            assert cells == width
            rows += 1
        elif token.type == "table_close":
            width = 0
    # A reader drops cells beyond the columns: pipes that part cells are counted in the lines, too.
    in_lines = 0
    for block in re.findall(r"(?:^\|.*\n)+", MADE[name]().to_markdown(), re.MULTILINE):
        pipes = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in block.splitlines()]
        assert len(set(pipes)) == 1
        in_lines += len(pipes) - 2
    assert rows == in_lines


@pytest.mark.parametrize("name", MADE)
def test_no_sign_of_a_name_is_markup(name: str):
    found = inline(MADE[name]().to_markdown())
    assert {child.content for child in found if child.type == "html_inline"} <= {"<br>", COMMENT}
    kinds = {child.type for child in found}
    assert kinds <= {"text", "code_inline", "html_inline", "strong_open", "strong_close", "softbreak"}
    assert {token.type for token in tokens(MADE[name]().to_markdown())}.isdisjoint({"html_block", "blockquote_open"})


def test_leaves_read_as_they_are_named():
    report = hostile()
    seen = "\n".join(read(token) for token in tokens(report.to_markdown("all")) if token.type == "inline")
    for leaf in report.leaves:
        assert printable(leaf.path).strip() in seen


NAMES = ["a|b", "a`b", "``", "`a", "a\\|b", "a\\", "<b>x</b>", "*x*", "a\nb", "![x](y)", "# x", "1. x", "\\`|`", " x "]


@pytest.mark.parametrize("path", NAMES)
def test_a_name_is_read_back_from_its_cell(path: str):
    leaf = Leaf(path, "params", (4,), "float32", (), 16, 16, "replicated")
    report = Report("step", "dp", {}, attached().mesh, leaves=(leaf,))
    markdown = report.to_markdown()
    cells = [read(token) for token in tokens(markdown) if token.type == "inline"]
    assert printable(path).strip() in [cell.partition("<br>")[0].strip() for cell in cells]


def test_lines_to_paste_stand_in_a_fence_that_nothing_in_them_closes():
    fix = "%%shard fsdp\n```\n# <b>x</b>"
    report = Report("step", "fsdp", {}, attached().mesh, advice=(Advice("hint", "warning", "1. Do *this*.", fix),))
    fences = [token.content for token in tokens(report.to_markdown()) if token.type == "fence"]
    assert fences == [f"{fix}\n"]
    items = [token for token in tokens(report.to_markdown()) if token.type == "inline"]
    assert "warning: 1. Do *this*." in [read(item) for item in items]


def test_an_address_in_a_message_is_no_link_and_dollars_are_no_formula():
    message = "See https://example.org, www.example.org and $x$."
    report = Report("step", "fsdp", {}, attached().mesh, advice=(Advice("hint", "info", message),))
    markdown = report.to_markdown()
    assert r"https\://example.org, www\.example.org and \$x\$." in markdown
    assert f"info: {message}" in [read(token) for token in tokens(markdown) if token.type == "inline"]


def test_nobody_is_mentioned_and_no_issue_is_linked():
    message = "Ask @octocat of a@b.org, #12 or :100:, not C# or 3:4."
    report = Report("step", "fsdp", {}, attached().mesh, advice=(Advice("hint", "info", message),))
    markdown = report.to_markdown()
    assert f"info: {message}" in [read(token) for token in tokens(markdown) if token.type == "inline"]
    # GitHub looks for them in each piece of text as it is read.
    texts = [child.content for child in inline(markdown) if child.type == "text"]
    assert not [text for text in texts if re.search(r"@\w|#\d|:[\w+-]+:", text)]


def test_blanks_of_a_drawing_stay_where_they_are():
    curves = [child.content for child in inline(SAMPLES["trained"]().to_markdown()) if child.type == "code_inline"]
    assert [curve for curve in curves if curve.startswith(" \u2588")]


def test_hints_are_a_list_and_those_behind_the_first_are_counted():
    markdown = SAMPLES["hinted"]().to_markdown()
    assert markdown.count("\n- **") == 7
    assert "\n\n4 more:\n\n- **" in markdown


def test_all_leaves_are_listed_if_asked():
    report = attached()
    assert all(f"`{leaf.path}`" in report.to_markdown(leaves="all") for leaf in report.leaves)
    assert report.to_markdown(leaves=1).count("\n| `") < report.to_markdown().count("\n| `")
    with pytest.raises(ShardError, match="leaves is 'few'"):
        report.to_markdown(leaves="few")
