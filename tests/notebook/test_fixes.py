"""What a refusal offers as its fix is followed as it is written, and then nothing is refused any more."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Notebook
from IPython.core.error import UsageError
from support.fix_rows import ROWS, WITHOUT_A_CELL, Refused
from support.hinted import PACKAGE, followed, notebook, pasted

from jaxshard_magic.config.request import is_line
from jaxshard_magic.errors import ShardError

__all__ = ["notebook"]
MOST = 4  # fixes in a row: a strategy may then want a mesh, or options of its own


def refusing() -> Iterator[str]:
    """The functions of the package that refuse something with a fix of their own."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if "fix=" not in text:
            continue
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                own = [n for n in ast.walk(function) if isinstance(n, ast.Call) and _has_own_fix(n)]
                inner = [f for f in ast.walk(function) if isinstance(f, ast.FunctionDef) and f is not function]
                if any(not any(call in ast.walk(f) for f in inner) for call in own):
                    yield f"{module}.{function.name}"


def _has_own_fix(call: ast.Call) -> bool:
    if ast.unparse(call.func) not in ("ShardError", "HistoryError"):
        return False
    return any(k.arg == "fix" and not ast.unparse(k.value).endswith(".fix") for k in call.keywords)


def test_each_refusal_that_has_a_fix_has_a_cell_or_says_why_it_has_none():
    found = set(refusing())
    shown = {row.where for row in ROWS} | {*WITHOUT_A_CELL}
    assert found - shown == set() and shown - found == set()


@pytest.mark.parametrize(
    "row", [pytest.param(r, id=f"{r.where} {r.line}", marks=[pytest.mark.ci] * r.slow) for r in ROWS]
)
def test_a_fix_can_be_typed_and_then_nothing_is_refused(notebook: Notebook, row: Refused, tmp_path: Path):
    line, cell, mesh = row.line.replace("{folder}", str(tmp_path)), row.cell, row.mesh
    notebook.run(f"%mesh {mesh or 'cpu:8 data=8'};")
    if not mesh:
        notebook.shell.run_line_magic("reload_ext", "jaxshard_magic")
    notebook.run(row.before)
    if line.startswith("%"):
        notebook.run(f"%%shard dp\n{cell}")
    for turn in range(MOST):
        error = tried(notebook, line, cell)
        if error is None:
            break
        fix = error.fix
        assert fix is not None and (turn or fix.startswith(row.fix)), error
        if line.startswith("%"):
            line = line if fix.startswith("!") else fix
            assert not fix.startswith("!") or subprocess.run(fix[1:], shell=True, check=True)
        elif fix.startswith("%mesh "):
            notebook.run(f"{fix};")
        elif is_line(fix):
            assert followed(line, fix) != line
            line = followed(line, fix)
        else:
            ast.parse(fix)
            notebook.run(fix if row.pasted == "above" else "")
            cell = cell if row.pasted == "above" else pasted(fix, cell)
    assert turn and error is None, error


def tried(notebook: Notebook, line: str, cell: str) -> ShardError | None:
    """What a cell, or a line alone, is refused with; None where it runs."""
    result = notebook.cell(f"{line};" if line.startswith("%") else f"%%shard {line}\n{cell};")
    error = result.error_before_exec or result.error_in_exec
    if error is None:
        return None
    assert isinstance(error, UsageError) and isinstance(error.__context__, ShardError), repr(error)
    assert error.__context__.fix is None or error.__context__.fix in str(error)
    return error.__context__
