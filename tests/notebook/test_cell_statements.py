"""Cells statement by statement: the text of each with its comments, and what it reads and when."""

import pytest

from jaxshard_magic.notebook import cells


def texts(cell: str) -> list[str]:
    """Each statement's, without what another has of its first line."""
    return [s.text.encode()[s.before :].decode() for s in cells.ExecutedCell("cell 1", cell).statements]


@pytest.mark.parametrize(
    ("text", "at_once", "later"),
    [
        ("y = f(x, k=z)", {"f", "x", "z"}, set()),
        ("def f(a, b=d, *c, e: T) -> R:\n    g = a + h\n    return g", {"d", "T", "R"}, {"h"}),
        ("def f():\n    x = 1\n    def g():\n        return x + y\n    return g", set(), {"y"}),
        ("y = [i + k for i in xs if i]", {"k", "xs"}, set()),
        ("y = {k: v for k, v in d.items()}", {"d"}, set()),
        ("y = {f(i) for i in (lambda: n)()}", {"f"}, {"n"}),
        ("f = lambda a: [a + b for a in c]", set(), {"b", "c"}),
        (
            "class A(B):\n    n = 1\n    m = n + k\n    def f(self):\n        return self.m + w",
            {"B", "k"},
            {"w"},
        ),
        ("@wrapped(n)\ndef f(x):\n    return x", {"wrapped", "n"}, set()),
        ("cfg['a'] = v", {"cfg", "v"}, set()),
        ("model.w = v", {"model", "v"}, set()),
        ("n += m", {"n", "m"}, set()),
        ("del n, cfg['a']", {"n", "cfg"}, set()),
        ("x: T", {"T"}, set()),
        ("with mesh:\n    y = m\n    z = y", {"mesh", "m"}, set()),
        ("with open(a) as f, g(f) as h:\n    h.read()", {"open", "a", "g"}, set()),
        ("while n:\n    total = total + n", {"n", "total"}, set()),
        ("for i, x in xs:\n    y = i * x\n    z = y", {"xs"}, set()),
        ("if fast:\n    y = 1\nelse:\n    z = y", {"fast", "y"}, set()),
        ("try:\n    f()\nexcept Failed as e:\n    g(e)\nfinally:\n    h()", {"f", "Failed", "g", "h"}, set()),
        ("match p:\n    case [a, *b]:\n        q = a, b, c", {"p", "c"}, set()),
        ("if (n := f()) and n > m:\n    y = n", {"f", "m"}, set()),
        ("def f():\n    global n\n    n = m", set(), {"m"}),
        ("print(len(x), max(y))", {"print", "len", "max", "x", "y"}, set()),
        ("y = f'{a:{b}} c'", {"a", "b"}, set()),
    ],
)
def test_a_statement_reads_at_once_what_stands_outside_of_functions_bodies(
    text: str, at_once: set[str], later: set[str]
):
    (statement,) = cells.ExecutedCell("cell 1", text).statements
    assert (statement.reads, statement.reads_later) == (at_once, later)


def test_comments_right_above_a_definition_and_beside_it_are_kept():
    rate = "# how fast\n# it learns\n@cached  # once\ndef rate():\n    # half\n    return 0.5  # less"
    assert texts(f"x = 1\n\n# far away\n\n{rate}") == ["x = 1", rate]


def test_a_comment_behind_a_statement_is_kept_with_it():
    assert texts("rate = 0.1  # as in the paper\nx = 2") == ["rate = 0.1  # as in the paper", "x = 2"]


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("a = 1; b = 2", ["a = 1", "b = 2"]),
        ("a = 1; b = 2; ", ["a = 1", "b = 2"]),
        ("x = 0; a = 1; y = 3; b = 2  # why", ["x = 0", "a = 1", "y = 3", "b = 2  # why"]),
        ("\u03b8 = '\u91cd\u307f'; a = \u03b8; b = 2", ["\u03b8 = '\u91cd\u307f'", "a = \u03b8", "b = 2"]),
    ],
)
def test_statements_on_one_line_are_told_apart(line: str, kept: list[str]):
    assert texts(line) == kept


def test_a_comment_above_two_statements_on_one_line_is_the_firsts():
    assert texts("# sizes of all\nb = 4; d = 8") == ["# sizes of all\nb = 4", "d = 8"]


def test_the_end_of_a_text_above_is_no_comment():
    statements = ['x = """a\n# b"""', "y = 1"]
    assert texts("\n".join(statements)) == statements


@pytest.mark.parametrize("character", ["\x0c", "\u2028", "\x85", "\x1c"])
def test_a_line_ends_where_python_ends_it(character: str):
    statements = [f"x = 'a{character}b'", "y = 1"]
    assert texts("\n".join(statements)) == statements


def test_a_statement_over_several_lines_is_kept_whole():
    cell = 'table = {\n    "a": 1,  # one\n\n    "b": """\n# no comment\n""",\n}'
    assert texts(cell) == [cell]


def test_where_a_statement_begins_is_told_as_python_counts_lines():
    unit = cells.ExecutedCell("cell 3", "\n# of x\nx = 1\n\n\n@f\n@g\ndef y():\n    pass")
    assert [s.first for s in unit.statements] == [2, 6]
    assert [s.text.partition("\n")[0] for s in unit.statements] == ["# of x", "@f"]


@pytest.mark.parametrize(
    ("cell", "code"),
    [
        ("x = 1\n", "x = 1\n"),
        ("%%shard fsdp -o report;\n\nx = 1\n", "\nx = 1\n"),
        ("%%shard\nx = 1", "x = 1"),
        ("%%time\nx = 1", "x = 1"),
        ("%%timeit -n 1\nx = 1", "x = 1"),
        ("%%capture out\nx = 1", "x = 1"),
        ("\n\n%%shard dp\nx = 1", "x = 1"),
        ("  \n%%shard fsdp\nx = 1", "x = 1"),
        ("%%time\n%%shard fsdp\nx = 1", "x = 1"),
        ("%%time\n\n%%bash\nls", ""),
        ("%%bash\nls", ""),
        ("%%html\n<b>", ""),
        ("%%writefile a.py\nx = 1", ""),
        ("%%shard fsdp", ""),
        ("%%", ""),
        ("%mesh data=8\nx = 1", "%mesh data=8\nx = 1"),
        ("# %%shard\nx = 1", "# %%shard\nx = 1"),
        ("", ""),
    ],
)
def test_the_code_of_a_cell_is_what_stands_below_a_magic_that_runs_python(cell: str, code: str):
    assert cells.below_magic(cell) == code
