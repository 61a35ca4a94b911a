"""The book, as it is written: its blocks run, its links lead somewhere, and it names all that there is.

What it is once it is built: test_book_built.py.
"""

import ast
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.forked import printed
from support.pages import BOOK, DOCS, ROOT, anchors, cells, links

from jaxshard_magic.config.flags import LineOptions
from jaxshard_magic.config.strategies import WORDS
from jaxshard_magic.notebook import options

START = DOCS / "start.md"
ALONE = [
    DOCS / "schedules.md",
    DOCS / "explore.md",
    DOCS / "measured.md",
]  # cheap, and with no step of the first page
AFTER_START = [page for page in BOOK if cells(page) and page not in (START, *ALONE)]
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *BOOK]
WRITTEN += [ROOT / "jaxshard_magic/README.md", ROOT / "benchmarks/README.md"]
NEEDS_LIBTPU = "will_it_fit.md"
RUN = f"""
import json, os, sys
folder, root = sys.argv[1], {str(ROOT)!r}
sys.path.insert(0, root)
os.environ.pop("NPROC", None)
os.environ.update(PYTHONPATH=root, IPYTHONDIR=folder, JAXSHARD_HISTORY=folder + "/history.sqlite3", JAX_PLATFORMS="cpu")
os.chdir(folder)
import jax
jax.config.update("jax_platforms", "cpu")
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.loads(sys.argv[2]):
    shell.run_cell(cell, store_history=True).raise_error()
"""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run(blocks: list[str], folder: Path) -> None:
    """Run the blocks as cells of a fresh shell, in a folder that has a history of its own."""
    printed(RUN, folder, json.dumps(blocks))


# What it shows runs


@pytest.mark.ci
def test_the_cells_of_the_first_page_run_and_show_what_its_text_says(tmp_path):
    mesh, model, sharded, *rest = cells(START)
    lies = "assert {leaf.path: leaf.spec for leaf in shown.leaves}['model.up.kernel'] == "
    kept = sharded.replace("--check", "--check -o shown")
    one_word_else = sharded.replace("fsdp+tp --check", "dp -o shown")
    told = [kept, f"{lies}('data', 'model')", one_word_else, f"{lies}(None, None)"]
    run([mesh, model, *told, sharded, *rest], tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize("page", AFTER_START, ids=name)
def test_the_cells_of_a_page_run_after_those_of_the_first(page: Path, tmp_path: Path):
    if page.name == NEEDS_LIBTPU and find_spec("libtpu") is None:
        pytest.skip("no libtpu: pip install -e '.[tpu]'")
    assert "[Start here](start.md)" in page.read_text(), "it says what its cells go on from"
    run(cells(START) + cells(page), tmp_path)


@pytest.mark.parametrize("page", ALONE, ids=name)
def test_the_cells_of_a_page_run_alone(page: Path, bare_shell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for cell in cells(page):
        bare_shell.run_cell(cell).raise_error()


def test_the_example_of_the_readme_is_that_of_the_first_page():
    assert cells(ROOT / "README.md") == cells(START)[:4]


# Its links lead somewhere


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_a_link_leads_somewhere(page: Path):
    wrong = []
    for link in links(page):
        if "://" in link or link.startswith("mailto:"):
            assert re.fullmatch(r"https://[\w.-]+\.\w+(/[^\s]*)?", link), link
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        if there.is_relative_to(DOCS / "notebooks"):  # laid there when the book is built
            there = ROOT / "notebooks" / there.name
        if not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(link)
    assert wrong == []


# It names all that there is


def test_every_line_has_its_table_of_options():
    lines = {
        each.__name__ for each in vars(options).values() if isinstance(each, type) and issubclass(each, LineOptions)
    }
    shown = set(re.findall(r"^```{options} (\w+)$", (DOCS / "options.md").read_text(), re.MULTILINE))
    assert shown == lines - {"LineOptions"}


def test_what_is_said_of_an_option_is_of_one_that_exists():
    said = re.findall(r"^(`-.*)$", (DOCS / "options.md").read_text(), re.MULTILINE)
    named = {word for line in said for word in re.findall(r"`(--?[\w-]+)`", line)}
    assert len(named) > 15 and named <= {flag.name for flag in options.ShardOptions.flags()}


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "strategies.md"], ids=name)
def test_the_table_of_strategies_has_all_of_them(page: Path):
    rows = re.findall(r"^\| `(\w+)` \|", page.read_text(), re.MULTILINE)
    assert rows == list(WORDS)


def test_the_messages_that_the_book_explains_are_those_that_the_package_writes():
    """Three words in a row of each: names and numbers in between are the case's."""
    written = "\n".join(literals())
    shown = re.findall(r"^\| `(.*?)`", (DOCS / "messages.md").read_text(), re.MULTILINE)
    assert len(shown) > 30
    for message in shown:
        words = message.split()
        runs = [" ".join(words[i : i + 3]) for i in range(max(1, len(words) - 2))]
        assert any(run in written for run in runs), message


def literals() -> Iterator[str]:
    """The text that stands in the package's code, a gap where an expression is filled in."""
    for file in (ROOT / "jaxshard_magic").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_readme_is_short_and_leads_to_every_page_of_the_book():
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= 140
    found = {ROOT / link for link in links(readme)}
    apart = {DOCS / "schedules.md"}  # a part of pipelines.md
    assert {page for page in BOOK if page.parent == DOCS} - apart <= found


def test_the_versions_of_the_package_the_changelog_and_the_citation_agree():
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    newest = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert newest is not None and cited is not None
    assert newest[1] == cited[1] == version[1]
