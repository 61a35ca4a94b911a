"""`%mesh` on a real shell: what it makes, shows and returns, and the lines it answers bad input with."""

import jax
import pytest
from IPython.core.error import UsageError


def test_it_returns_the_mesh_and_shows_its_grid(notebook, capsys):
    mesh = notebook.run("%mesh data=4 model=2")
    assert isinstance(mesh, jax.sharding.Mesh)
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    shown = capsys.readouterr().out
    assert "data=4 model=2" in shown
    assert all(str(device.id) in shown for device in mesh.devices.flat)


def test_its_value_can_be_assigned(notebook):
    notebook.run("mesh = %mesh data=4 model=2")
    assert notebook["mesh"].devices.shape == (4, 2)


@pytest.mark.parametrize(
    ("line", "axes"),
    [
        ("data=8", {"data": 8}),
        ("data=-1 model=2", {"data": 4, "model": 2}),
        ('[[4,2],["fsdp","tp"]]', {"fsdp": 4, "tp": 2}),
        ("cpu:8 data=4 model=2", {"data": 4, "model": 2}),
        ("data=2", {"data": 2}),
    ],
)
def test_every_notation_of_the_command_line(notebook, line, axes):
    assert dict(notebook.run(f"%mesh {line}").shape) == axes


def test_alone_it_shows_the_current_one(notebook, capsys):
    made = notebook.run("%mesh data=2 model=4")
    capsys.readouterr()
    assert notebook.run("%mesh") == made
    assert "data=2 model=4" in capsys.readouterr().out


def test_alone_before_there_is_one_it_says_how_to_make_one(notebook, capsys):
    assert notebook.run("%mesh") is None
    assert capsys.readouterr().out == (
        "no mesh yet: %mesh data=4 model=2 makes one; without one, %%shard takes all devices\n"
    )


def test_a_semicolon_hides_it(notebook, capsys):
    assert notebook.run("%mesh data=8;") is None
    assert "data=8" not in capsys.readouterr().out
    assert notebook.run("%mesh") is not None


@pytest.mark.parametrize("line", ["data", "data=x", "data=3 model=-1", "data=0", "tpu:4x4 data=16", "[[4,2]"])
def test_bad_text_is_one_line_and_the_mesh_stays(notebook, capsys, line):
    made = notebook.run("%mesh data=8")
    capsys.readouterr()
    error = notebook.fails(f"%mesh {line}")
    assert type(error) is UsageError
    assert capsys.readouterr().err == f"UsageError: {error}\n"
    assert "\n" not in str(error)
    assert notebook.run("%mesh") == made


def test_help_lists_the_notations(notebook, capsys):
    notebook.run("%mesh --help")
    shown = capsys.readouterr().out
    assert "cpu:8 data=4 model=2" in shown
    assert '[[4,2],["fsdp","tp"]]' in shown
