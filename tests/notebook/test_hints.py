"""A hint's line is followed as it is written: it can be typed, is new, and does what the hint says."""

import ast
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import jax
import pytest
from conftest import Notebook, shell
from support.hint_rows import ELSEWHERE, IMPORTS, ROWS, Row

import jaxshard_magic
from jaxshard_magic.notebook.options import parse, with_strategy
from jaxshard_magic.report import Advice, Report

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


def run(notebook: Notebook, row: Row, line: str, *, mesh: str, before: str, cell: str) -> Report:
    notebook.run(f"%mesh {mesh};")
    notebook.run(before)
    return notebook.run(f"%%shard {line}\n{cell}")


def pasted(fix: str, text: str) -> str:
    (indent,) = re.findall(r"^( *)# here$", text, re.MULTILINE)
    return text.replace(f"{indent}# here", "\n".join(indent + part for part in [*fix.splitlines(), "# here"]))


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
        module, test = name.split(".")
        assert callable(getattr(import_module(module), test))


def test_lines_are_followed_as_they_are_typed():
    for line, fix, new in (
        ("dp --on v5e", "%%shard fsdp+tp@x --attention heads", "fsdp+tp@x --on v5e --attention heads"),
        ('dp --mesh "data=4 model=2" --check', "--mesh data=8", "dp --check --mesh data=8"),
        ("fsdp --rule a$=P('data')", '--rule "b$=P(None)"', "fsdp --rule a$=P('data') --rule \"b$=P(None)\""),
    ):
        assert followed(line, fix) == new and shlex.split(new)
