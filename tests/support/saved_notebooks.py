"""What holds of every notebook as it is committed."""

import runpy
from collections.abc import Sequence
from pathlib import Path

import nbformat

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "notebooks/execute.py"))


def assert_as_it_ran(path: Path, failed: Sequence[str] = ()) -> None:
    """It is valid, tidied, ran once from its top, and names no folder of a machine; the cells `failed` raised or
    warned."""
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert SCRIPT["machine_paths"](notebook) == []
    assert notebook == SCRIPT["tidied"](nbformat.read(path, 4))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    raised = [c.id for c in code if any(o.get("name") == "stderr" or "ename" in o for o in c.outputs)]
    assert raised == [*failed]
