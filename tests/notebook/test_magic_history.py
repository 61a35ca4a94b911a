"""`%shard history` on a real shell: what ran is found again, and nothing that runs is held up by it."""

import json
import re

import pytest
from support.cells import LOOP, STEP
from support.sample_reports import bare

from jaxshard_magic import api
from jaxshard_magic.errors import ShardError
from jaxshard_magic.history import History, Store
from jaxshard_magic.report import Report
from jaxshard_magic.views.comparison.payload import payload


@pytest.fixture
def own(given, tmp_path, monkeypatch):
    """A notebook whose history is its own."""
    monkeypatch.setenv("JAXSHARD_HISTORY", str(tmp_path / "history.sqlite3"))
    return given


def test_a_report_is_found_again_with_its_cell_and_the_versions_that_ran_it(own):
    report = own.run("%%shard fsdp --name mine" + STEP + LOOP)
    found = own.run("%shard history")
    assert isinstance(found, History)
    (row,) = found.rows
    assert (row.name, row.strategy, row.mesh) == ("mine", "fsdp", "data=8")
    assert {"python", "jax"} <= row.versions.keys()
    assert "def train_step" in (Store().cell(row.id) or "")
    again = own.run(f"%shard history {row.id}")
    assert isinstance(again, Report)
    assert Report.from_json(again.to_json()) == Report.from_json(report.to_json())


def test_the_same_run_told_again_takes_its_own_place(own):
    own.run("%%shard fsdp" + STEP + LOOP)
    own.run(LOOP + LOOP)
    own.run("%shard")
    (row,) = own.run("%shard history").rows
    assert own.run(f"%shard history {row.id}").timing.calls == 6
    own.run("%%shard dp" + STEP + LOOP)
    assert [r.strategy for r in own.run("%shard history").rows] == ["dp", "fsdp"]


def test_a_report_has_its_number_of_the_notebook_and_the_history(own):
    cell = "%%shard fsdp" + STEP + LOOP + "inside = train_step.report()\n"
    first = own.run(cell)
    assert own["inside"].number is None, "the cell has no report yet"
    step = own["train_step"]
    assert step.report().number == first.number == own.run("%shard history").rows[0].id
    assert f"train_step, report {first.number}" in step.report().to_text()
    own.run(LOOP)
    assert own.run("train_step.report()") == own.run("%shard")
    other = own.run("%%shard dp" + STEP + LOOP)
    assert (step.report().number, own["train_step"].report().number) == (first.number, other.number)
    assert api.shard(lambda x: x, "dp").report_number is None, "a script has no history"


def test_the_trials_of_a_comparison_are_told_with_their_numbers(own):
    found = own.run("%%shard dp,fsdp" + STEP + LOOP)
    numbers = [str(trial.report.number) for trial in found.trials]
    assert numbers == [str(row.id) for row in reversed(own.run("%shard history").rows)]
    assert [trial["facts"][0] for trial in payload(found)["trials"]] == [["report", n] for n in numbers]
    assert all(re.search(rf"<td[^>]*>{n}</td>", found.to_html()) for n in numbers)
    lines = iter(line.split() for line in found.to_text().splitlines())
    assert any(line[-1:] == ["report"] for line in lines)
    assert sorted([next(lines)[-1], next(lines)[-1]]) == sorted(numbers)
    past = own.run(f"%shard compare {' '.join(numbers)}")
    assert "report" not in dict(payload(past)["trials"][0]["facts"]), "their names say it"


def test_every_trial_of_a_comparison_and_the_run_of_a_choice_are_kept(own):
    own.run("%%shard dp,fsdp" + STEP + LOOP)
    assert {r.strategy for r in own.run("%shard history").rows} == {"dp", "fsdp"}
    choice = own.run("%%shard auto --among dp,fsdp" + STEP + LOOP)
    newest = own.run("%shard history --limit 1").rows[0]
    assert newest.strategy == choice.chosen.strategy
    assert own.run(f"%shard history {newest.id}").timing.calls == 3


def test_words_and_options_narrow_it_and_it_is_written_as_json(own, tmp_path, capsys):
    own.run("%%shard dp" + STEP + LOOP)
    own.run("%%shard fsdp --remat full --name small" + STEP + LOOP)
    assert [r.strategy for r in own.run("%shard history REMAT").rows] == ["fsdp"]
    assert [r.strategy for r in own.run("%shard history --strategy dp").rows] == ["dp"]
    assert own.run("%shard history --name small --since 1h -o kept") is own["kept"]
    assert len(own["kept"]) == 1
    assert own["kept"].asked == "--name small --since 1h", "what is searched for, not what it is kept under"
    assert own.run("%shard history --limit 3").to_text(100).startswith("2 reports, newest first.")
    assert len(own.run("%shard history --since 2020-01-01")) == 2
    own.run(f"%shard history small --json {tmp_path / 'kept.json'}")
    (row,) = json.loads((tmp_path / "kept.json").read_text())["rows"]
    assert row["report"]["name"] == "small"
    assert own.run("%shard history;") is None


def test_nothing_is_kept_where_the_notebook_says_so(own):
    own.run("%config ShardSession.remember = False")
    own.run("%%shard dp" + STEP + LOOP)
    assert own.run("%shard history").rows == ()


def test_a_history_that_can_t_be_written_is_told_once_and_the_step_runs(own, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXSHARD_HISTORY", str(tmp_path / "file" / "history.sqlite3"))
    capsys.readouterr()
    assert own.run("%%shard dp" + STEP + LOOP).timing.calls == 3
    assert capsys.readouterr().out.count("not kept: the history") == 1
    assert own.run("%%shard fsdp" + STEP + LOOP).timing.calls == 3
    assert "not kept" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("history 7", "no report 7: the history is empty"),
        ("history --since soon", "--since takes 3h, 7d, 2w, or a day"),
        ("history --limit none", "--limit takes a whole number from 1 on"),
        ("history --stratgy dp", "Did you mean '--strategy'?"),
    ],
)
def test_a_line_that_can_not_be_answered_says_so(own, line, says):
    assert says in str(own.fails(f"%shard {line}"))


def test_the_help_is_printed(own, capsys):
    assert own.run("%shard history --help") is None
    assert "--since WHEN" in capsys.readouterr().out


def test_a_report_has_the_number_of_the_history_wherever_it_stands(own, tmp_path):
    Store().add(bare(), cell=None, notebook="another", versions={})
    one, other = own.run("%%shard dp" + STEP + LOOP), own.run("%%shard fsdp" + STEP)
    assert [one.number, other.number] == [2, 3]
    assert own.run("%shard").number == 3  # the same run, told again
    assert [row.id for row in own.run("%shard history").rows] == [3, 2, 1]
    assert own.run("%shard history 2").number == 2
    assert "train_step, report 2" in one.to_text(100) and "train_step, report 2" in one.to_html()
    assert [t.number for t in own.run("%shard compare 3 1").trials] == [3, 1]  # also another notebook's
    trials = own.run("%%shard dp,fsdp" + STEP + LOOP).trials
    assert {t.report.number for t in trials} == {4, 5}
    assert {row.id for row in own.run("%shard history").rows} == {1, 2, 3, 4, 5}


def test_without_a_history_reports_are_numbered_within_their_session(own):
    own.run("%config ShardSession.remember = False")
    Store().add(bare(), cell=None, notebook="another", versions={})
    first = own.run("%%shard dp" + STEP + LOOP)
    assert [first.number, own.run("%%shard fsdp" + STEP).number] == [1, 2]
    assert own.run("%shard compare 1").trials[0].report is first


def test_a_number_that_is_gone_names_the_nearest(own):
    own.run("%%shard dp" + STEP + LOOP)
    number = own.run("%shard history").rows[0].id
    with pytest.raises(ShardError, match=f"the latest is {number}"):
        Store().report(number + 5)
