"""Edits of the user's text: what they put in stands where it should, and everything else stays as it was."""

import ast

import pytest

from jaxshard_magic.codegen.cells import Cells, SourceSpan, UserStatement, imported_names
from jaxshard_magic.codegen.constraints import Constraint
from jaxshard_magic.codegen.edits import (
    Edit,
    apply_edits,
    checkpoint_edits,
    constraint_edits,
    is_gradient,
    regather_edits,
    statement_text,
    vmap_edits,
)
from jaxshard_magic.notebook.cells import ExecutedCell

FILE = "<cell>"


def cells(text: str, lines: set[int] | None = None, imports: str | None = None) -> Cells:
    """One cell; `lines`: those that are pieces, `imports`: a text that imports for it, where it does not itself."""
    lines = set(range(1, text.count("\n") + 2)) if lines is None else lines
    names = imported_names(ast.parse(text if imports is None else imports))
    return Cells({FILE: text.splitlines(True)}, {FILE: ast.parse(text)}, {FILE: lines}, names, str)


def place(text: str, expression: str, first: int = 1) -> SourceSpan:
    """Where an expression stands, as Python tells it."""
    found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.expr) and ast.unparse(n) == expression]
    assert len(found) == 1, f"{expression} stands there {len(found)} times"
    (n,) = found
    assert n.end_lineno is not None and n.end_col_offset is not None
    return SourceSpan(FILE, n.lineno + first - 1, n.col_offset, n.end_lineno + first - 1, n.end_col_offset)


def around(text: str, *expressions: str) -> str:
    """`text` with `h1(...)` around the first expression, `h2(...)` around the second."""
    edits = [Edit(place(text, e), f"h{i}(", ")") for i, e in enumerate(expressions, 1)]
    return "\n".join(apply_edits(text.split("\n"), 1, edits))


def test_an_edit_stands_around_its_expression():
    assert around("y = a @ b + c", "a @ b") == "y = h1(a @ b) + c"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_nested_edits_nest_whatever_their_order(order: tuple[int, ...]):
    text = "y = f(a @ b + c)"
    names = ("f(a @ b + c)", "a @ b + c", "a @ b")
    edits = [Edit(place(text, name), f"h{i}(", ")") for i, name in enumerate(names)]
    assert apply_edits([text], 1, [edits[i] for i in order]) == ["y = h0(f(h1(h2(a @ b) + c)))"]


def test_nested_edits_that_end_together_nest():
    assert around("y = a + b @ c", "b @ c", "a + b @ c") == "y = h2(a + h1(b @ c))"
    assert around("y = a + b @ c", "a + b @ c", "b @ c") == "y = h1(a + h2(b @ c))"


def test_of_two_edits_at_one_place_the_later_is_outside():
    assert around("y = f(x)", "f(x)", "f(x)") == "y = h2(h1(f(x)))"


def test_an_edit_that_ends_where_another_begins_is_closed_first():
    first, second = SourceSpan(FILE, 1, 0, 1, 1), SourceSpan(FILE, 1, 1, 1, 2)
    assert apply_edits(["ab"], 1, [Edit(first, "(", ")"), Edit(second, "[", "]")]) == ["(a)[b]"]
    assert apply_edits(["ab"], 1, [Edit(second, "[", "]"), Edit(first, "(", ")")]) == ["(a)[b]"]


def test_letters_of_several_bytes_before_an_edit_move_nothing():
    assert around("\u03b8 = '\u91cd\u307f\U0001f600', a @ \u03b2", "a @ \u03b2") == (
        "\u03b8 = '\u91cd\u307f\U0001f600', h1(a @ \u03b2)"
    )


def test_an_edit_over_several_lines_leaves_the_lines_between_alone():
    text = "y = f(\n    a @ b,  # first\n    c,\n)"
    assert around(text, "f(a @ b, c)", "a @ b") == "y = h1(f(\n    h2(a @ b),  # first\n    c,\n))"


def test_an_edit_over_several_lines_is_outside_one_that_begins_with_it():
    assert around("y = (a @ b\n     + c)", "a @ b", "a @ b + c") == "y = (h2(h1(a @ b)\n     + c))"


def test_places_are_those_of_the_file_whatever_line_the_text_begins_at():
    text = "y = a @ b"
    edit = Edit(place(text, "a @ b", first=7), "hold(", ")")
    assert apply_edits([text], 7, [edit]) == ["y = hold(a @ b)"]
    assert apply_edits([text], 8, [edit]) == [text]


def test_what_is_gone_has_its_edit_in_its_place():
    text = "y = jax.jit(step)(β, x)"
    edits = [
        Edit(place(text, "jax.jit(step)"), "run", replaces=True),
        Edit(place(text, "β"), "b", replaces=True),
        Edit(place(text, "x"), "f(", ")"),
    ]
    assert apply_edits([text], 1, edits) == ["y = run(b, f(x))"]


def test_edits_nest_however_many_stand_elsewhere():
    inner, outer = (
        Edit(SourceSpan(FILE, 1, 4, 1, 5), "in(", ")"),
        Edit(SourceSpan(FILE, 1, 4, 1, 5), "out(", ")"),
    )
    elsewhere = [Edit(SourceSpan(FILE, 9, 0, 9, 1), "", "")] * 2000
    longer = Edit(SourceSpan(FILE, 1, 3, 1, 5), "", "!")
    assert apply_edits(["x + y"], 1, [longer, inner, *elsewhere, outer]) == ["x + out(in(y))!"]


def test_no_edit_changes_nothing():
    assert apply_edits(["y = a @ b", "", "# \u91cd"], 1, []) == ["y = a @ b", "", "# \u91cd"]


def test_a_pin_of_two_specs_is_held_by_the_first_and_then_by_the_second():
    text = "y = table[ids]"
    pin = Constraint(place(text, "table[ids]"), ('P("data")', 'P("data", None, "model")'))
    assert apply_edits([text], 1, constraint_edits([pin], "hold", "sharding_P")) == [
        'y = hold(hold(table[ids], sharding_P("data")), sharding_P("data", None, "model"))'
    ]


def again(text: str, lines: set[int] | None = None) -> str:
    return "\n".join(apply_edits(text.split("\n"), 1, regather_edits(cells(text, lines), "again")))


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("g = jax.grad(loss)(p)", "g = jax.grad(again(loss))(p)"),
        (
            "v, g = jax.value_and_grad(loss, has_aux=True)(p)",
            "v, g = jax.value_and_grad(again(loss), has_aux=True)(p)",
        ),
        ("g = jax.grad(lambda p: p @ x)(p)", "g = jax.grad(again(lambda p: p @ x))(p)"),
        ("g = nnx.value_and_grad(loss)(m)", "g = nnx.value_and_grad(again(loss, nnx.remat))(m)"),
        ("g = nnx.grad(loss)(m)", "g = nnx.grad(again(loss, nnx.remat))(m)"),
        ("g = eqx.filter_grad(loss)(m)", "g = eqx.filter_grad(again(loss, eqx.filter_checkpoint))(m)"),
        (
            "v, g = eqx.filter_value_and_grad(loss)(m)",
            "v, g = eqx.filter_value_and_grad(again(loss, eqx.filter_checkpoint))(m)",
        ),
        (
            "g = jax.grad(\n    loss,\n    argnums=1,\n)(p)",
            "g = jax.grad(\n    again(loss),\n    argnums=1,\n)(p)",
        ),
        ("y = jax.vmap(loss)(p)", "y = jax.vmap(loss)(p)"),
        ("g = state.grad(loss)(p)", "g = state.grad(loss)(p)"),
        ("g = grad(loss)(p)", "g = grad(loss)(p)"),
        ("from jax import grad\ngrad(loss)(p)", "from jax import grad\ngrad(again(loss))(p)"),
        (
            "from jax import value_and_grad as vg\nvg(loss)(p)",
            "from jax import value_and_grad as vg\nvg(again(loss))(p)",
        ),
        ("from ours import grad\ngrad(loss)(p)", "from ours import grad\ngrad(loss)(p)"),
        ("import ours as jax\njax.grad(loss)(p)", "import ours as jax\njax.grad(loss)(p)"),
        ("import jax as j\nj.grad(loss)(p)", "import jax as j\nj.grad(again(loss))(p)"),
        ("import flax\nflax.nnx.grad(f)(m)", "import flax\nflax.nnx.grad(again(f, flax.nnx.remat))(m)"),
        (
            "from flax import nnx\nfrom flax.nnx import grad\ngrad(f)(m)",
            "from flax import nnx\nfrom flax.nnx import grad\ngrad(again(f, nnx.remat))(m)",
        ),
        ("from flax.nnx import grad\ngrad(f)(m)", "from flax.nnx import grad\ngrad(f)(m)"),
        (
            "import equinox as e\ne.filter_grad(f)(m)",
            "import equinox as e\ne.filter_grad(again(f, e.filter_checkpoint))(m)",
        ),
        ("g = jax.grad", "g = jax.grad"),
        ("h = jax.grad(jax.grad(f))", "h = jax.grad(again(jax.grad(again(f))))"),
    ],
)
def test_differentiated_functions_are_checkpointed_by_whose_gradient_it_is(text: str, after: str):
    assert again(text) == after


def test_names_may_be_imported_in_another_text():
    names = imported_names(ast.parse("import jax\nfrom jax import grad as g, vmap"))
    assert names == {"jax": "jax", "g": "jax.grad", "vmap": "jax.vmap"}
    cell = cells("g(vmap(f))(x)", imports="import jax\nfrom jax import grad as g, vmap")
    edits = [*regather_edits(cell, "again"), *vmap_edits(cell, ["data"])]
    assert apply_edits(["g(vmap(f))(x)"], 1, edits) == ["g(again(vmap(f, spmd_axis_name=('data',))))(x)"]


@pytest.mark.parametrize(
    ("text", "whether"),
    [
        ("jax.grad(f)", True),
        ("vg(f, has_aux=True)", True),
        ("eqx.filter_value_and_grad(f)", True),
        ("jax.grad", False),
        ("jax.grad(f)(x)", False),
        ("state.grad(f)", False),
        ("jax.jit(f)", False),
    ],
)
def test_what_makes_a_gradient_is_told_by_whose_it_is(text: str, whether: bool):
    names = imported_names(ast.parse("import jax, equinox as eqx\nfrom jax import value_and_grad as vg"))
    assert is_gradient(ast.parse(text, mode="eval").body, names) is whether


def test_only_gradients_on_the_lines_asked_for_are_checkpointed():
    assert again("a = jax.grad(f)\nb = jax.grad(f)", {2}) == "a = jax.grad(f)\nb = jax.grad(again(f))"


def with_remat(text: str, policy: str | None = None, lines: set[int] | None = None) -> str:
    return "\n".join(apply_edits(text.split("\n"), 1, checkpoint_edits(cells(text, lines), policy)))


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("x, _ = jax.lax.scan(block, x, ws)", "x, _ = jax.lax.scan(jax.checkpoint(block), x, ws)"),
        ("x, _ = lax.scan(block, x, ws)", "x, _ = lax.scan(jax.checkpoint(block), x, ws)"),
        ("g = jax.grad(loss)(p)", "g = jax.grad(jax.checkpoint(loss))(p)"),
        ("g = nnx.grad(loss)(p)", "g = nnx.grad(nnx.remat(loss))(p)"),
        ("g = eqx.filter_grad(loss)(p)", "g = eqx.filter_grad(eqx.filter_checkpoint(loss))(p)"),
        (
            "x, _ = jax.lax.scan(block, x, ws)\ng = jax.grad(loss)(p)",
            "x, _ = jax.lax.scan(jax.checkpoint(block), x, ws)\ng = jax.grad(loss)(p)",
        ),
        ("y = other.scan(block, x)", "y = other.scan(block, x)"),
        ("from jax.lax import scan\nscan(f, x)", "from jax.lax import scan\nscan(jax.checkpoint(f), x)"),
    ],
)
def test_what_is_scanned_over_is_rematerialized_else_what_is_differentiated(text: str, after: str):
    assert with_remat(text) == after


def test_a_policy_says_what_is_kept():
    assert with_remat("g = nnx.grad(loss)(p)", "dots") == "g = nnx.grad(nnx.remat(loss, policy=dots))(p)"
    assert with_remat("x, _ = lax.scan(block, x)", "dots") == ("x, _ = lax.scan(jax.checkpoint(block, policy=dots), x)")


def test_scans_on_other_lines_do_not_count():
    text = "x, _ = lax.scan(block, x)\ng = jax.grad(loss)(p)"
    assert with_remat(text, lines={2}) == "x, _ = lax.scan(block, x)\ng = jax.grad(jax.checkpoint(loss))(p)"


def with_axes(text: str, axes: tuple[str, ...], lines: set[int] | None = None) -> str:
    return "\n".join(apply_edits(text.split("\n"), 1, vmap_edits(cells(text, lines), axes)))


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("y = jax.vmap(f)(x)", "y = jax.vmap(f, spmd_axis_name=('data',))(x)"),
        (
            "y = jax.vmap(f, in_axes=(None, 0))(p, x)",
            "y = jax.vmap(f, spmd_axis_name=('data',), in_axes=(None, 0))(p, x)",
        ),
        ("y = jax.vmap(f, 0, 1)(x)", "y = jax.vmap(f, 0, 1, spmd_axis_name=('data',))(x)"),
        (
            "y = jax.vmap(\n    f,\n    in_axes=0,\n)(x)",
            "y = jax.vmap(\n    f,\n    spmd_axis_name=('data',), in_axes=0,\n)(x)",
        ),
        ("jax.vmap(f, in_axes=(0))(x)", "jax.vmap(f, spmd_axis_name=('data',), in_axes=(0))(x)"),
        ("from jax import vmap; vmap(f)(x)", "from jax import vmap; vmap(f, spmd_axis_name=('data',))(x)"),
        ("import jax as j; j.vmap(f)(x)", "import jax as j; j.vmap(f, spmd_axis_name=('data',))(x)"),
        ("y = jax.lax.map(f, x)", "y = jax.lax.map(f, x)"),
    ],
)
def test_calls_of_vmap_are_told_the_axes_along_the_examples(text: str, after: str):
    assert with_axes(text, ("data",)) == after


@pytest.mark.parametrize(
    "text",
    [
        "y = jax.vmap(f, spmd_axis_name='data')(x)",
        "y = jax.vmap(f, 0, 0, None, None, 'data')(x)",
        "y = jax.vmap(f, **options)(x)",
        "y = jax.vmap(*both)(x)",
        "y = jax.vmap((f))(x)",
        "y = jax.vmap(f,)(x)",
        "y = frames.vmap(f)(x)",
        "y = vmap(f)(x)",
    ],
)
def test_calls_of_vmap_that_may_have_axes_and_those_of_others_are_left_alone(text: str):
    assert with_axes(text, ("data",)) == text


def test_vmap_over_several_axes_and_only_on_the_lines_asked_for():
    after = with_axes("a = jax.vmap(f)\nb = jax.vmap(f)", ("data", "fsdp"), {2})
    assert after == "a = jax.vmap(f)\nb = jax.vmap(f, spmd_axis_name=('data', 'fsdp'))"


def test_a_checkpointed_function_may_hold_what_is_mapped_and_held_inside():
    text = "g = jax.grad(lambda p: jax.vmap(f)(x @ p))(p)"
    edits = [
        *regather_edits(cells(text), "again"),
        *constraint_edits([Constraint(place(text, "x @ p"), ("P()",))], "hold", "P"),
        *vmap_edits(cells(text), ["data"]),
    ]
    assert apply_edits([text], 1, edits) == [
        "g = jax.grad(again(lambda p: jax.vmap(f, spmd_axis_name=('data',))(hold(x @ p, P()))))(p)"
    ]


def test_a_piece_has_the_edits_of_its_own_file_and_lines():
    text = "def f(x):\n    return x @ w"
    piece = UserStatement(text, FILE, 5, "cell 2")
    here = Edit(SourceSpan(FILE, 6, 11, 6, 16), "hold(", ")")
    below = Edit(SourceSpan(FILE, 7, 0, 7, 1), "hold(", ")")
    assert statement_text(piece, {FILE: [here, below]}) == "def f(x):\n    return hold(x @ w)"
    assert statement_text(piece, {"<other>": [here]}) == text
    assert statement_text(piece, {}) == text


def test_a_piece_begins_behind_another_statement_on_its_first_line():
    """`before` is in bytes: the first letter takes two of them."""
    text = "\u03b8 = 1; g = jax.grad(f)"
    piece = UserStatement(text, FILE, 1, "cell 2", byte_offset=len("\u03b8 = 1; ".encode()))
    edits = regather_edits(cells(text), "again")
    assert statement_text(piece, {FILE: edits}) == "g = jax.grad(again(f))"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("g = jax.grad(loss); h = 3", ["g = jax.grad(again(loss))", "h = 3"]),
        ("h = 3; g = jax.grad(loss)", ["h = 3", "g = jax.grad(again(loss))"]),
        ("a = jax.grad(f); b = jax.grad(g)", ["a = jax.grad(again(f))", "b = jax.grad(again(g))"]),
    ],
)
def test_statements_on_one_line_have_their_own_edits(text: str, pieces: list[str]):
    edits = regather_edits(cells(text), "again")
    statements = ExecutedCell("cell 1", text).statements
    found = [
        statement_text(UserStatement(s.text, FILE, s.first, "cell 1", s.before), {FILE: edits}) for s in statements
    ]
    assert found == pieces
