"""The committed notebook on several hosts: it ran from its top, ends where it says, and goes on after a death."""

import runpy
from pathlib import Path

import nbformat
import pytest
from support.saved_notebooks import assert_as_it_ran

from jaxshard_magic.views.widget_page import MIME

PATH = Path(__file__).parents[2] / "notebooks/07_hosts.ipynb"
FAILED = ("different", "error", "death")


def said(notebook: nbformat.NotebookNode, name: str) -> str:
    (cell,) = [cell for cell in notebook.cells if cell.id == name]
    return "".join(output.get("text", "") for output in cell.outputs)


def loss(notebook: nbformat.NotebookNode, name: str) -> float:
    return float(said(notebook, name).partition("loss ")[2])


def assert_it_tells(notebook: nbformat.NotebookNode) -> None:
    assert "is not the same on all 2 hosts" in said(notebook, "different")
    assert "host 1: FileNotFoundError: data-00003.npz" in said(notebook, "error")
    assert said(notebook, "death").startswith("UsageError: host 1 died ")
    assert "brought to this kernel from host 0" in said(notebook, "rescue")
    assert loss(notebook, "dp") > loss(notebook, "per-host") > loss(notebook, "again-step")
    shown = [c.id for c in notebook.cells if any(MIME in o.get("data", {}) for o in c.get("outputs", ()))]
    assert shown == ["dp", "per-host", "again-step"]


def test_the_saved_notebook_is_as_it_ran():
    assert_as_it_ran(PATH, FAILED)
    assert_it_tells(nbformat.read(PATH, 4))


@pytest.mark.ci
def test_it_runs_again(tmp_path: Path):
    executed = runpy.run_path(str(PATH.parent / "execute.py"))["executed"]
    assert_it_tells(executed(nbformat.read(PATH, 4), tmp_path))
