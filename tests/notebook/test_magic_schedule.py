"""`%shard schedule` on a real shell: what it makes, takes for itself and shows, and what it answers bad input with."""

from types import SimpleNamespace

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.utils.capture import capture_output
from support.cells import one_line

from jaxshard_magic.notebook.options import HELP, ScheduleOptions
from jaxshard_magic.notebook.schedule_line import parse_costs
from jaxshard_magic.report import Pipeline
from jaxshard_magic.schedule import NAMES, Costs, Schedule, compare, make, parse, simulate
from jaxshard_magic.schedule.compare import split_costs
from jaxshard_magic.views import schedule_comparison as views
from jaxshard_magic.views import show

MINE = "# mine: by hand\nrank 0:,0F0,0F1,0B0,0B1\nrank 1:,1F0,1B0,1F1,1B1\n"


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A schedule of the user's own in the folder where the notebook runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text(MINE, encoding="utf-8")
    return tmp_path / "mine.csv"


def test_one_name_is_a_schedule(notebook, capsys):
    notebook.run("made = %shard schedule 1f1b --stages 4 --microbatches 16")
    assert notebook["made"] == make("1f1b", stages=4, microbatches=16)
    assert capsys.readouterr().out == ""


def test_it_is_the_cells_result_and_kept_under_a_name(notebook):
    result = notebook.run("%shard schedule gpipe --stages 2 --microbatches 2 -o kept")
    assert isinstance(result, Schedule)
    assert notebook["kept"] is result is notebook.run("Out[1]")


def test_a_semicolon_hides_it(notebook):
    assert notebook.run("%shard schedule gpipe -o kept;") is None
    assert notebook["kept"].name == "gpipe"


def test_sizes_that_are_not_said_are_taken_and_told(notebook, capsys):
    notebook.run("made = %shard schedule 1f1b")
    assert (notebook["made"].stages, notebook["made"].microbatches) == (4, 16)
    assert capsys.readouterr().out == "taking 4 stages and 16 microbatches\n"
    notebook.run("made = %shard schedule 1f1b --stages 2")
    assert notebook["made"].microbatches == 8
    assert capsys.readouterr().out == "taking 8 microbatches\n"


@pytest.mark.parametrize("axis", ["pp", "stage"])
def test_stages_are_those_of_the_meshs_pipeline_axis(notebook, capsys, axis):
    notebook.run(f"%mesh data=4 {axis}=2;")
    capsys.readouterr()
    notebook.run("made = %shard schedule gpipe --microbatches 3")
    assert notebook["made"].stages == 2
    assert capsys.readouterr().out == f"taking 2 stages, the mesh's {axis}\n"


def test_a_mesh_without_a_pipeline_axis_says_nothing_of_stages(notebook):
    notebook.run("%mesh data=8;")
    notebook.run("made = %shard schedule gpipe")
    assert notebook["made"].stages == 4


def test_chunks_are_passed_on(notebook):
    notebook.run("made = %shard schedule interleaved --stages 2 --microbatches 4 --chunks 3")
    assert notebook["made"] == make("interleaved", stages=2, microbatches=4, chunks=3)


# Costs


@pytest.mark.parametrize(
    ("text", "costs"),
    [
        ("1,2,3", Costs(1, 2, 3)),
        ("1, 2, 3, 0.5", Costs(1, 2, 3, 0.5)),
        ("forward=1,2 transfer=0.1", Costs(forward=(1, 2), transfer=0.1)),
        ("F=1 I=2 W=3", Costs(1, 2, 3)),
        ("input-grad=2 kept_for_weight_grad=0.5", Costs(input_grad=2, kept_for_weight_grad=0.5)),
    ],
)
def test_costs_are_written_in_two_forms(text, costs):
    assert parse_costs(text) == costs


def test_a_schedule_is_made_for_the_costs_of_the_line(notebook):
    notebook.run('made = %shard schedule 1f1b --stages 2 --microbatches 3 --costs "F=1,2 I=1,2 W=1,2"')
    assert simulate(notebook["made"]).makespan == 1 + 18 + 2  # as by hand in test_schedule


def test_chunks_share_the_time_of_their_part_of_the_model(notebook):
    """Two parts of 2 and 4 in two chunks each: stages of 1, 1, 2 and 2, in the model's order."""
    notebook.run('made = %shard schedule interleaved --stages 2 --microbatches 2 --chunks 2 --costs "F=2,4 transfer=1"')
    assert notebook["made"].costs == Costs((1, 1, 2, 2), 0.5, 0.5, 1)


def test_a_model_takes_as_long_in_any_number_of_chunks():
    costs = Costs((1, 2, 3), 2, 1, 0.5, 0.5)
    for chunks in (1, 2, 4):
        own = split_costs(costs, 3, chunks).per_stage(3 * chunks)
        assert sum(own.forward) == pytest.approx(6) and sum(own.backward) == pytest.approx(9)
        assert set(own.transfer) == {0.5} and set(own.kept_for_weight_grad) == {0.5}


# A file


def test_a_file_is_a_schedule_of_the_users_own(notebook, file):
    made = notebook.run("made = %shard schedule mine.csv --costs 1,1,2\nmade")
    assert made == parse(MINE) and made.name == "mine"
    assert made.costs == Costs(1, 1, 2)


def test_a_file_without_a_name_is_called_as_the_file(notebook, file):
    file.write_text(MINE.partition("\n")[2], encoding="utf-8")
    notebook.run(f'made = %shard schedule "{file}"')
    assert notebook["made"].name == "mine"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("0F0 0B0\n1F0 1X0", "mine.csv: line 2: '1X0' is no action"),
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1", "mine.csv: schedule custom: rank 1 lacks 1B1, or 1I1 and 1W1"),
        ("", "mine.csv: a schedule needs a line for each rank"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_place(notebook, capsys, file, content, says):
    file.write_text(content, encoding="utf-8")
    assert one_line(notebook, capsys, "%shard schedule mine.csv").startswith(says)


def test_a_file_whose_ranks_wait_for_each_other_is_refused_before_it_is_shown(notebook, capsys, file):
    file.write_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", encoding="utf-8")
    said = one_line(notebook, capsys, "%shard schedule mine.csv")
    assert said.startswith("mine.csv: schedule mine never ends: rank 0 stands at action 1, 0B0, until rank 1")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("mien.csv", "mien.csv can't be read: No such file or directory. Did you mean 'mine.csv'?"),
        ("./", "can't be read: Is a directory"),
        (
            "mine.csv --stages 2",
            "it has its own sizes: 2 stages, 2 microbatches, 1 chunks; leave --stages out",
        ),
        ("mine.csv --memory-limit 2", "leave --memory-limit out"),
        ("1f1b,mine.csv", "a file stands alone: %shard schedule mine.csv; names are compared"),
        ("mine.csv --costs F=1,2,3", "cost forward has 3 numbers for 2 stages"),
    ],
)
def test_a_file_that_does_not_do_is_told(notebook, capsys, file, line, says):
    assert says in one_line(notebook, capsys, f"%shard schedule {line}")


# Several


def test_several_names_are_compared(notebook):
    notebook.run("found = %shard schedule 1f1b,interleaved --stages 4 --microbatches 16")
    assert notebook["found"] == compare(["1f1b", "interleaved"], stages=4, microbatches=16)
    assert notebook["found"] == compare("1f1b, interleaved", stages=4, microbatches=16)
    assert repr(notebook["found"]) == "<Comparison of 1f1b, interleaved: 4 stages x 16 microbatches>"


@pytest.mark.parametrize("names", ["1f1b, gpipe", "1f1b gpipe", "1f1b,gpipe,1f1b"])
def test_names_may_be_parted_as_one_likes(notebook, names):
    notebook.run(f"found = %shard schedule {names} --stages 2 --microbatches 2")
    assert [row.name for row in notebook["found"].rows] == ["1f1b", "gpipe"]


def test_all_is_every_schedule(notebook):
    notebook.run("found = %shard schedule all --stages 2 --microbatches 4")
    assert [row.name for row in notebook["found"].rows] == [*NAMES]


def test_rows_hold_the_closed_forms():
    """At one unit a part, 1F1B idles p - 1 of m + p - 1 slots, two chunks p - 1 of 2m + p - 1."""
    found = compare(["gpipe", "1f1b", "interleaved", "looped-bfs"], stages=4, microbatches=16)
    assert [row.bubble for row in found.rows] == pytest.approx([3 / 19, 3 / 19, 3 / 35, 3 / 35])
    assert [row.peak_microbatches for row in found.rows] == [16, 4, (2 * 3 + 4 + 1) / 2, 16]
    assert [row.makespan for row in found.rows] == pytest.approx([57, 57, 48 * 35 / 32, 48 * 35 / 32])
    for row in found.rows[:2]:
        assert row.curve == tuple((m, pytest.approx(3 / (m + 3))) for m in (4, 8, 16, 32))


def test_the_front_is_what_none_beats_in_both():
    """gpipe has 1f1b's bubble and holds more; looped-bfs has interleaved's and holds more."""
    found = compare(list(NAMES)[:4], stages=4, microbatches=16)
    assert [row.name for row in found.rows if row.on_front] == ["1f1b", "interleaved"]


def test_schedules_that_are_alike_are_on_the_front_together():
    found = compare(["gpipe", "looped-bfs"], stages=2, microbatches=4, chunks=1)
    assert all(row.on_front for row in found.rows)


def test_a_schedule_that_is_refused_says_why_and_the_others_stand():
    found = compare("1f1b,interleaved", stages=4, microbatches=10)
    row = found["interleaved"]
    assert row.why == "interleaved: 10 microbatches don't divide by 4 stages; use 8 or 12"
    assert (row.bubble, row.peak_microbatches, row.makespan, row.on_front) == (None, None, None, False)
    assert found["1f1b"].bubble == pytest.approx(3 / 13)
    assert [m for m, _ in found["1f1b"].curve] == [4, 8, 10, 16, 32]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "",
            f"%shard schedule takes a name, several with commas, all, or a file; the names are {', '.join(NAMES)}",
        ),
        ("1f1v", "no schedule '1f1v'. Did you mean '1f1b'? %shard schedule --help has all"),
        ("1f1b,gpip", "no schedule 'gpip'"),
        ("interleaved --stages 4 --microbatches 10", "10 microbatches don't divide by 4 stages; use 8 or 12"),
        ("1f1b,gpipe --stages 4 --costs F=1,2", "cost forward has 2 numbers for 4 stages"),
        ("1f1b --stages 0", "--stages takes a whole number from 1 on, not '0'"),
        ("1f1b --stages", "--stages needs a value: --stages P"),
        ("1f1b --memory-limit much", "--memory-limit takes a number above 0, not 'much'"),
        ("1f1b --memory-limit 2", "1f1b takes no memory limit"),
        ("1f1b --chunks 2", "1f1b has 1 chunks a rank, not 2"),
        ("1f1b --stages 5000 --microbatches 5000", "50,000,000 actions; at most 1,000,000"),
        ("1f1b --step train", "%shard schedule has no option --step"),
        ("1f1b --stage 4", "Did you mean '--stages'?"),
        ("1f1b --costs 1,2", "has 2 numbers; write F,I,W or F,I,W,transfer"),
        ("1f1b --costs 1,x,1", "'x' is no number"),
        ("1f1b --costs -1,1,1", "cost forward is -1.0; it must be a number from 0"),
        ("1f1b --costs backward=2", "--costs has no 'backward'; it has forward, input_grad"),
        ("1f1b --costs 'F=1 forward=2'", "--costs says forward twice"),
        ("1f1b --costs 'F=1 2'", "'2' has no '='"),
    ],
)
def test_bad_input_is_one_line_and_the_notebook_stays_as_it_was(notebook, capsys, line, says):
    assert says in one_line(notebook, capsys, f"%shard schedule {line}")


# What is shown


def bundle(notebook, name: str) -> dict[str, str]:
    """What IPython shows of a variable of the notebook."""
    return notebook.shell.display_formatter.format(notebook[name])[0]


@pytest.fixture
def drawn(monkeypatch) -> list[tuple[Pipeline, str]]:
    """The timelines that are shown, each with the session's view, in the place of their drawings."""
    given = []
    monkeypatch.setattr(show, "show_pipeline", lambda pipeline, how: given.append((pipeline, how)))
    return given


def test_a_schedule_made_by_hand_is_shown_as_its_timeline(notebook, drawn):
    notebook.run("from jaxshard_magic import schedule")
    notebook.run("schedule.make('1f1b', stages=2, microbatches=2)")
    ((pipeline, _),) = drawn
    assert (pipeline.schedule, pipeline.stages, pipeline.makespan[1]) == ("1f1b", 2, 9)


def test_a_timeline_is_of_the_costs_that_a_schedule_was_made_for(notebook, drawn):
    """Schedules are equal whatever their costs; their timelines are not."""
    cheap = notebook.run("%shard schedule 1f1b --stages 2 --microbatches 2")
    dear = notebook.run("%shard schedule 1f1b --stages 2 --microbatches 2 --costs 5,5,5")
    assert cheap == dear
    assert [pipeline.makespan[1] for pipeline, _ in drawn] == [9, 45]


def test_a_schedule_and_a_pipeline_are_shown_in_the_sessions_way(notebook, drawn):
    notebook.run("%config ShardSession.view = 'widget'")
    notebook.run("%shard schedule 1f1b --stages 2 --microbatches 3")
    notebook.shell.user_ns["pipeline"] = drawn[0][0]
    notebook.run("pipeline")
    assert [how for _, how in drawn] == ["widget", "widget"]
    assert drawn[1][0] is drawn[0][0]


def test_a_comparison_is_shown_as_its_table_and_charts(notebook):
    notebook.run("found = %shard schedule 1f1b,gpipe --stages 2 --microbatches 2")
    shown = bundle(notebook, "found")
    assert shown == {
        "text/plain": views.to_text(notebook["found"]),
        "text/html": views.to_html(notebook["found"]),
    }


def test_a_session_that_shows_text_gets_no_html(notebook):
    notebook.run("%config ShardSession.view = 'text'")
    notebook.run("found = %shard schedule 1f1b,gpipe --stages 2 --microbatches 2")
    assert set(bundle(notebook, "found")) == {"text/plain"}


def test_a_terminal_prints_the_table(notebook, capsys):
    notebook.run("%shard schedule 1f1b,gpipe --stages 2 --microbatches 2")
    assert views.to_text(notebook["Out"][1]) in capsys.readouterr().out


def test_a_kernel_sends_the_comparison_once(notebook):
    notebook.shell.kernel = SimpleNamespace()
    notebook.run("found = %shard schedule 1f1b,gpipe --stages 2 --microbatches 2")
    with capture_output() as captured:
        notebook.run("display(found)")
    (output,) = captured.outputs
    assert set(output.data) == {"text/plain", "text/html"}


def test_unloading_takes_the_sessions_choice_away(notebook, drawn):
    notebook.run("%config ShardSession.view = 'text'")
    notebook.run("found = %shard schedule 1f1b,gpipe --stages 2 --microbatches 2")
    notebook.run("%unload_ext jaxshard_magic")
    notebook.run("found['1f1b'].schedule")
    assert set(bundle(notebook, "found")) == {"text/plain", "text/html"} and not drawn


def test_text_has_every_figure_of_a_row():
    lines = views.to_text(compare("1f1b,interleaved", stages=4, microbatches=16), 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "Smallest bubble: interleaved, 8.6%, holding 5.5 microbatches. Least held: 1f1b,"
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert rows["1f1b"] == [
        "1f1b",
        "42.9%",
        "27.3%",
        "15.8%",
        "8.6%",
    ]  # 3 of m + 3, the last of the two tables
    assert ["interleaved", "2", "8.6%", "8.6%", "52.5", "5.5", "on", "the", "front"] in map(str.split, lines)


def test_text_says_why_a_schedule_was_refused():
    told = views.to_text(compare("1f1b,interleaved", stages=4, microbatches=10), 100)
    assert "10 microbatches don't divide by 4 stages; use 8 or 12" in " ".join(told.split())
    assert "on the front" in told


def test_one_schedule_that_is_best_in_both_is_said_once():
    assert views.summary(compare("1f1b,gpipe", stages=4, microbatches=8)) == (
        "Smallest bubble: 1f1b, 27.3%, holding 4 microbatches, and none holds less."
    )


def test_a_schedule_above_the_memory_limit_is_marked():
    told = views.to_text(compare("1f1b,gpipe", stages=2, microbatches=4, memory_limit=3), 100)
    (line,) = [line for line in told.splitlines() if "limit" in line and "gpipe" in line]
    assert line.endswith("! above the limit")


def test_html_has_two_charts_with_a_name_on_each_line_and_each_figure_as_text():
    html = views.to_html(compare("gpipe,1f1b,interleaved", stages=4, microbatches=16))
    assert html.count("<svg") == 2
    drawn = html.partition("<table")[0]
    assert ">gpipe, 1f1b</text>" in drawn and drawn.count(">interleaved</text>") == 2
    assert "<script" not in html and "15.8%" in html.partition("<table")[2]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (64, 64), (3, 7)])
def test_charts_are_drawn_at_every_size(p, m):
    html = views.to_html(compare("gpipe,1f1b,looped-bfs", stages=p, microbatches=m))
    assert html.count("<svg") == 2 and "nan" not in html.lower().replace("nance", "")


def test_charts_are_drawn_where_nothing_costs_anything():
    assert views.to_html(compare("gpipe,1f1b", stages=2, microbatches=2, costs=Costs(0, 0, 0))).count("<svg") == 2


# Help


def test_help_has_every_schedule_with_its_source_and_every_option(notebook, capsys):
    notebook.run("%shard schedule --help")
    told = capsys.readouterr().out
    words = " ".join(told.split())
    assert all(f" {name} {named.about} ({named.source})" in words for name, named in NAMES.items())
    assert all(flag.name in told for flag in ScheduleOptions.flags())
    assert max(map(len, told.splitlines())) <= 120
    assert "%shard schedule" in HELP


def test_names_and_options_are_completed(notebook):
    def completed(text: str) -> list[str]:
        with provisionalcompleter():
            return [found.text for found in notebook.shell.Completer.completions(text, len(text))]

    assert "schedule" in completed("%shard sch")
    assert "1f1b" in completed("%shard schedule 1f")
    assert "interleaved" in completed("%shard schedule 1f1b,inter")
    assert "--microbatches" in completed("%shard schedule 1f1b --mi")
    assert "--remat" not in completed("%shard schedule 1f1b --re")
