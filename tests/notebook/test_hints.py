"""A hint's line is followed as it is written: it can be typed, is new, and does what the hint says."""

import ast
import re
import shlex
from importlib import import_module

import jax
import pytest
from conftest import Notebook
from support.hint_rows import ELSEWHERE, ROWS, Row
from support.hinted import PACKAGE, followed, pasted
from support.hinted import notebook as notebook

from jaxshard_magic.notebook.options import parse, with_strategy
from jaxshard_magic.report import Advice, Report


def run(notebook: Notebook, row: Row, line: str, *, mesh: str, before: str, cell: str) -> Report:
    notebook.run(f"%mesh {mesh};")
    notebook.run(before)
    return notebook.run(f"%%shard {line}\n{cell}")


def hints(report: Report, row: Row) -> list[Advice]:
    return [a for a in report.advice if a.code == row.code and (a.fix or "").startswith(row.fix)]


@pytest.mark.parametrize(
    "row",
    [pytest.param(r, id=f"{r.code} {r.fix}", marks=[pytest.mark.ci] * r.slow) for r in ROWS],
)
def test_a_hint_s_line_can_be_typed_is_new_and_does_what_it_says(notebook: Notebook, row: Row):
    as_it_is = {"mesh": row.mesh, "before": row.before, "cell": row.cell}
    before = run(notebook, row, row.line, **as_it_is)
    found = hints(before, row)
    assert found, [(a.code, a.fix) for a in before.advice]
    advice, line, changed = found[0], row.line, dict(as_it_is)
    fix = advice.fix or ""
    if row.pasted:
        ast.parse(fix)
        changed["cell"] = pasted(fix, row.cell) if row.pasted == "here" else row.cell
        changed["before"] = f"{row.before}\n{fix}" if row.pasted == "above" else row.before
    elif fix.startswith("%mesh "):
        changed["mesh"] = fix.removeprefix("%mesh ")
    else:
        line = followed(row.line, fix)
        assert with_strategy(parse(line)) != with_strategy(parse(row.line)), "it is on already"
    assert (line, changed) != (row.line, as_it_is)
    if row.raises is not None:
        try:
            with pytest.raises(row.raises):
                run(notebook, row, line, **changed)
        finally:
            jax.config.update("jax_debug_nans", False)
        return
    after = run(notebook, row, line, **changed)
    assert advice not in after.advice and advice.fix not in [a.fix for a in hints(after, row)]
    assert row.claim(before, after, advice), (advice, line)


def written_codes() -> dict[str, bool]:
    """The codes of all hints, as the package's text has them, and whether one may have a line."""
    found: dict[str, bool] = {}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if path.parent.name == "doctor" or not re.search(r"\b(Advice|Finding|Complaint)\b", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "Advice",
                "Finding",
                "Complaint",
                "replace",
            ):
                code, fix = _code_and_fix(node)
                for each in code:
                    found[each] = found.get(each, False) or fix
    return found


def _code_and_fix(call: ast.Call) -> tuple[list[str], bool]:
    named = {k.arg: k.value for k in call.keywords}
    positional = call.args if ast.unparse(call.func) in ("Advice", "Finding") else []
    code = positional[0] if positional else named.get("code")
    fix = positional[3] if len(positional) > 3 else named.get("fix")
    has = fix is not None and not (isinstance(fix, ast.Constant) and fix.value is None)
    match code:
        case ast.Constant(value=str(text)):
            return [text], has
        case ast.JoinedStr():  # by the part of the strategy that it is of
            return [ast.unparse(code)[2:-1].replace("{part}", part) for part in ("tp", "fsdp")], has
    return [], has


def test_each_hint_that_has_a_line_has_a_cell_that_shows_it():
    codes = written_codes()
    shown = {row.code for row in ROWS} | {*ELSEWHERE}
    assert len(codes) > 50
    assert {code for code, has in codes.items() if has} - shown == set()
    assert shown - {*codes} == set()


def test_the_tests_that_follow_other_lines_are_there():
    for name in ELSEWHERE.values():
        module, _, test = name.rpartition(".")
        assert callable(getattr(import_module(module), test))


def test_lines_are_followed_as_they_are_typed():
    for line, fix, new in (
        ("dp --on v5e", "%%shard fsdp+tp@x --attention heads", "fsdp+tp@x --on v5e --attention heads"),
        ('dp --mesh "data=4 model=2" --check', "--mesh data=8", "dp --check --mesh data=8"),
        ("fsdp --rule a$=P('data')", '--rule "b$=P(None)"', "fsdp --rule a$=P('data') --rule \"b$=P(None)\""),
    ):
        assert followed(line, fix) == new and shlex.split(new)
