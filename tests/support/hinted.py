"""A hint's line, pasted and followed in a notebook."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Notebook, shell

import jaxshard_magic

from .hint_rows import IMPORTS

PACKAGE = Path(jaxshard_magic.__file__).parent

MANY = ("--rule", "--spec")  # may stand several times

WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with pytest.MonkeyPatch.context() as patch, shell() as opened:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        opened.run_line_magic("load_ext", "jaxshard_magic")
        of_cells = Notebook(opened)
        of_cells.run("%config ShardSession.options_limit = 0")
        of_cells.run(IMPORTS)
        yield of_cells


def followed(line: str, fix: str) -> str:
    """The line of a `%%shard` cell with a fix typed in: another strategy, options added or in the place of others."""
    (first, *old), (word, *new) = (_parts(text) for text in (line, fix.removeprefix("%%shard ")))
    if not fix.startswith("%%shard "):
        word, new = first, [word, *new]
    given = {option.split()[0] for option in new}
    kept = [option for option in old if option.split()[0] not in given or option.split()[0] in MANY]
    return " ".join([word, *kept, *new])


def _parts(text: str) -> list[str]:
    """The words of a line, each option with its value."""
    parts: list[str] = []
    for word in WORD.findall(text):
        value = not word.startswith("-") and parts and parts[-1].startswith("-") and " " not in parts[-1]
        parts[-1:] = [f"{parts[-1]} {word}"] if value else [*parts[-1:], word]
    return parts


def pasted(fix: str, text: str) -> str:
    (indent,) = re.findall(r"^( *)# here$", text, re.MULTILINE)
    return text.replace(f"{indent}# here", "\n".join(indent + part for part in [*fix.splitlines(), "# here"]))
