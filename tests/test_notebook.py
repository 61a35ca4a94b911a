"""The committed notebook in a real kernel: it runs, and what it saved is what a reader without one can see."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

PATH = Path(__file__).parents[1] / "notebooks" / "first_look.ipynb"


def reports(notebook):
    """The saved forms of the results of `%%shard` and `%shard` cells."""
    cells = [c for c in notebook.cells if c.cell_type == "code" and c.source.lstrip("%").startswith("shard")]
    return [[o.data for o in c.outputs if o.output_type == "execute_result"] for c in cells]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    notebook = nbformat.read(PATH, 4)
    place = tmp_path_factory.mktemp("notebook")
    resources = {"metadata": {"path": str(place)}}
    return NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()


@pytest.mark.parametrize("which", ["saved", "run"])
def test_every_sharded_cell_shows_a_report_as_text_and_as_html_without_script(which, request):
    notebook = nbformat.read(PATH, 4) if which == "saved" else request.getfixturevalue("run")
    found = reports(notebook)
    assert found
    for (shown,) in found:
        assert "simulated CPU devices" in shown["text/plain"]
        assert "<svg" in shown["text/html"]
        assert "<script" not in shown["text/html"]


def test_the_notebook_proves_the_same_numbers(run):
    first = reports(run)[0][0]["text/plain"]
    assert "The same numbers as the plain step" in first
