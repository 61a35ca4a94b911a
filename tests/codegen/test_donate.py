"""`%shard code` under `--donate`: results take the memory of the old state, and nothing of the caller's is lost."""

import pytest
from support.forked import printed
from support.taken_home import FIVE, bare, code

pytestmark = pytest.mark.usefixtures("as_asked")
STATE = {
    "dict_of_arrays": ("params",),
    "transformer_scanned": ("params", "opt_state"),
    "linen_train_state": ("state",),
    "nnx_transformer": ("model", "optimizer"),
    "equinox_filter_jit": ("model", "opt_state"),
}
TWICE = """
import jax
first = [x for x in jax.tree.leaves([{state}]) if isinstance(x, jax.Array) and x.ndim]
assert not any(x.is_deleted() for x in first), "the caller's own"
held = [x for x in jax.tree.leaves({held}) if isinstance(x, jax.Array) and x.ndim]
assert held and not any(x.is_deleted() for x in held)
train_step({again})
gone = [x for x in held if x.is_deleted()]
print("taken over:", len(gone), "of", len(held))
"""
AGAIN = {
    "dict_of_arrays": ("result[0]", "result[0], batch"),
    "transformer_scanned": ("result[:2]", "*result[:2], tokens"),
    "linen_train_state": ("result[0]", "result[0], batch"),
    "nnx_transformer": ("[nnx.state(model), nnx.state(optimizer)]", "model, optimizer, batch"),
    "equinox_filter_jit": ("result[:2]", "*result[:2], x, y"),
}


def rows():
    marks = dict.fromkeys(("dict_of_arrays", "equinox_filter_jit"), pytest.mark.ci)
    return [pytest.param(home, id=home.name, marks=marks.get(home.name, pytest.mark.full)) for home in FIVE]


@pytest.mark.parametrize("home", rows())
def test_a_step_takes_over_what_it_gave_back_and_copies_what_the_caller_made(notebook, tmp_path, home):
    program = code(notebook, home, "fsdp --donate", "data=4")
    assert f"DONATED = {STATE[home.name]!r}".replace("'", '"') in program.text
    assert "Without --donate" not in program.text
    assert bare(program, tmp_path).moves == program.moves
    held, again = AGAIN[home.name]
    state = "" if home.changes else ", ".join(STATE[home.name])
    said = printed(program.text + TWICE.format(state=state, held=held, again=again))
    _, count, _, of = said.strip().splitlines()[-1].rsplit(" ", 3)
    assert int(count) == int(of)


def test_a_step_that_donates_nothing_is_compiled_as_ever(notebook):
    assert "donat" not in code(notebook, FIVE[0], "fsdp", "data=4").text
