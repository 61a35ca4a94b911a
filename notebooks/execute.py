"""Run a notebook and save it as it is committed: `python notebooks/execute.py notebooks/01_quickstart.ipynb`.

Reports are saved as HTML, which needs no widget, and with what the book needs to show the widget itself. What differs
from run to run without a meaning is left out: times of execution, the kernel's own description, outputs that the
progress line left empty. A notebook whose outputs name a folder of this machine is not saved.
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
SECONDS = 600  # a cell may take


def executed(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """`notebook` after a fresh kernel ran it in `folder`; the one that was given stays as it is."""
    client = NotebookClient(
        nbformat.from_dict(notebook),
        timeout=SECONDS,
        kernel_name="python3",
        store_widget_state=False,
        resources={"metadata": {"path": str(folder)}},
    )
    own = {"JAXSHARD_VIEW": "page", "JAXSHARD_HISTORY": str(folder / "history.db")}  # reports count from 1
    return tidied(client.execute(env={**os.environ, **own}))


def tidied(notebook: NotebookNode) -> NotebookNode:
    """`notebook` without what belongs to this run or this machine alone."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = NotebookNode({k: v for k, v in cell.metadata.items() if k == "tags"})
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _empty(output)]
    return notebook


def machine_paths(notebook: NotebookNode) -> list[str]:
    """The lines of the outputs that name a folder of this machine."""
    home, here = str(Path.home()), str(Path(__file__).resolve().parents[1])
    places = {home, here, sys.prefix, sys.base_prefix, tempfile.gettempdir()} - {"/"}
    texts = [text for cell in notebook.cells for output in cell.get("outputs", ()) for text in _texts(output)]
    lines = [line for text in texts for line in text.splitlines()]
    return [line for line in lines if any(f"{place}{os.sep}" in line for place in places)]


def _texts(output: NotebookNode) -> list[str]:
    kept = (output.get("text"), *output.get("data", {}).values(), *output.get("traceback", ()))
    return [text for text in kept if isinstance(text, str)]


def _empty(output: NotebookNode) -> bool:
    return output.output_type == "display_data" and not any(output.data.values())


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(nbformat.read(path, as_version=4), Path(folder))
        if named := machine_paths(notebook):
            sys.exit(f"{path} is not saved: its outputs name folders of this machine\n" + "\n".join(named))
        nbformat.write(notebook, path)
        print(f"{path}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells")


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
