"""The examples in the docstrings run, and there are some."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxshard_magic"
WITH_EXAMPLES = sorted(path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


def name(path: Path) -> str:
    """`jaxshard_magic.analysis.compiler_diagnostics`; of a package its own name."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=name)
def test_the_examples_are_true(path: Path):
    done = doctest.testmod(import_module(name(path)))
    assert done.attempted and not done.failed
