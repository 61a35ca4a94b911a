"""The line `%shard code`: its file, its help, and what it says where there is nothing to write."""

import pytest
from IPython.core.error import UsageError
from support.coded_cells import CALL, STEP, begun


@pytest.fixture
def prepared(notebook):
    return begun(notebook)


def test_a_file_is_written_where_named_and_never_over_one_of_the_users(prepared, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "runs").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "train.py").write_text("mine")
    (tmp_path / "home" / "train.py").write_text("mine")
    (tmp_path / "link.py").symlink_to("train.py")
    prepared.run(f"%%shard dp;\n{STEP}\n{CALL}")
    there = "is there already: name another file, or write over it with --force"
    for file, said in (
        ("train.py", f"train.py {there}"),
        ("link.py", f"link.py {there}"),
        ("~/train.py", f"~/train.py {there}"),
        ("runs", "runs is a folder: name a file in it, as runs/name"),
        ("run/train.py", "there is no folder run. Did you mean 'runs'? Fix: !mkdir -p run"),
        ("~no-such-user/x.py", "~no-such-user/x.py can't be written: there is no folder ~no-such-user"),
        ("train.py/x", "train.py/x can't be written: there is no folder train.py"),
        ("''", "--file takes the path of a file, not ''"),
    ):
        error = prepared.fails(f"%shard code --file {file}")
        assert type(error) is UsageError and said in str(error) and "\n" not in str(error)
    assert (tmp_path / "train.py").read_text() == (tmp_path / "home" / "train.py").read_text() == "mine"
    prepared.run("%shard code --file link.py --force -o kept;")
    assert (tmp_path / "train.py").read_text() == prepared["kept"].text and (tmp_path / "link.py").is_symlink()
    assert "written to" in capsys.readouterr().out


def test_its_help_and_its_errors_are_one_line(notebook, capsys):
    notebook.run("%shard code --help")
    assert "--file FILE" in capsys.readouterr().out
    for line, said in (
        (
            "%shard code",
            "there is no step yet: write %%shard fsdp above a cell with a train step, then %shard code",
        ),
        ("%shard code fsdp", "%shard code takes no words; unexpected: fsdp"),
        (
            "%shard code --fiel x",
            "%shard code has no option --fiel. Did you mean '--file'? %shard code --help lists them",
        ),
    ):
        error = notebook.fails(line)
        assert isinstance(error, UsageError) and str(error) == said


def test_after_a_comparison_there_is_no_step_to_write(prepared):
    prepared.run(f"%%shard dp,fsdp;\n{STEP}\n{CALL}")
    assert "the last cell compared strategies" in str(prepared.fails("%shard code"))
