"""Cells under the names that a terminal, ipykernel and Colab give their files."""

import linecache
from zlib import crc32

import pytest

from jaxshard_magic.notebook import cells

NET = """def train_step(w, x):
    def loss_of(w):
        return jnp.mean((jax.nn.gelu(x @ w["in"]) @ w["out"]) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(w)
    return jax.tree.map(lambda w, g: w - g, w, grad), loss
"""
GIVEN = """import jax, jax.numpy as jnp
w, x = {"in": jnp.ones((64, 256)), "out": jnp.ones((256, 32))}, jnp.ones((16, 64))
"""
RUN = "%%shard fsdp\ndef ours(): pass\nw, loss = train_step(w, x)"


@pytest.fixture(
    params=[
        "/tmp/ipykernel_81/{code}.py",
        pytest.param("/tmp/ipython-input-{code}.py", marks=pytest.mark.full),
        "/tmp/ipython-input-{number}-{code}.py",
        pytest.param(None, marks=pytest.mark.ci),
    ]
)
def named(request, notebook, monkeypatch):
    """A notebook whose cells' files have names of this form."""
    monkeypatch.setattr(linecache, "cache", {**linecache.cache})
    # IPython 7 fills the first from the second.
    monkeypatch.setattr(linecache, "_ipython_cache", {}, raising=False)
    if request.param is not None:

        class Compiler(type(notebook.shell.compile)):
            def get_code_name(self, raw_code, transformed_code, number):
                return request.param.format(code=crc32(raw_code.encode()), number=number)

        notebook.shell.compile = Compiler()
    return notebook


def number_of(notebook, function) -> int | None:
    return cells.execution_number(notebook.shell, notebook[function].__code__.co_filename)


def test_a_cell_is_known_by_its_number_and_a_report_names_it(named):
    for cell in ("%mesh data=8;", GIVEN, NET, RUN):
        named.run(cell)
    assert number_of(named, "ours") == 4
    assert named.run("%shard").sources
    assert cells.execution_number(named.shell, cells.__file__) is None
    named.run(NET)
    assert number_of(named, "train_step") == 6


def test_constraints_of_a_program_stand_at_its_lines(named):
    for cell in ("%mesh data=8;", GIVEN, NET, RUN):
        named.run(cell)
    program = named.run("%shard code")
    assert 'hold(x @ w["in"], P("data"))' in program.text
    assert program.same


def test_a_cell_that_raised_is_taken_as_far_as_it_ran(named):
    ran = ("%mesh data=8;", GIVEN, NET)
    for cell in ran:
        named.run(cell)
    named.fails("shift = 0\n1 / 0\nx = None")
    named.run(RUN)
    assert "x = None" not in named.run("%shard code").text
