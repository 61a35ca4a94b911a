"""The committed notebook on a training that is killed: it ran from its top, and ended as one that was never stopped."""

import re
import runpy
from pathlib import Path

import nbformat
import pytest
from support.saved_notebooks import assert_as_it_ran

from jaxshard_magic.views.widget_page import MIME

PATH = Path(__file__).parents[2] / "notebooks/09_keep_training.ipynb"


def said(notebook: nbformat.NotebookNode, name: str) -> str:
    (cell,) = [cell for cell in notebook.cells if cell.id == name]
    return "".join(output.get("text", "") for output in cell.outputs)


def assert_it_tells(notebook: nbformat.NotebookNode) -> None:
    assert re.match(r"killed at step 230, loss 0\.\d+; its process ended with -9", said(notebook, "killed"))
    numbers = [int(n) for n in re.findall(r"^checkpoint (\d+):", said(notebook, "there"), re.M)]
    last = max(numbers)
    assert last in (150, 200), "a save that was under way is not whole"
    assert f"{last} steps by the process, {400 - last} by this kernel" in said(notebook, "whole")
    mine, whole, apart = re.findall(r"(?:loss|stopped|most) ([\d.e-]+)", said(notebook, "whole"))
    assert float(mine) == pytest.approx(float(whole), abs=2e-6) and float(apart) < 1e-5
    assert said(notebook, "last") == f"resumed at 400, last loss {mine}\n"
    pictures = [c.id for c in notebook.cells if any("image/png" in o.get("data", {}) for o in c.get("outputs", ()))]
    reports = [c.id for c in notebook.cells if any(MIME in o.get("data", {}) for o in c.get("outputs", ()))]
    assert (pictures, reports) == (["pictures", "whole"], ["resumed"])


def test_the_saved_notebook_is_as_it_ran():
    assert_as_it_ran(PATH)
    assert_it_tells(nbformat.read(PATH, 4))


@pytest.mark.ci
def test_it_runs_again(tmp_path: Path):
    executed = runpy.run_path(str(PATH.parent / "execute.py"))["executed"]
    assert_it_tells(executed(nbformat.read(PATH, 4), tmp_path))
