"""`%%shard --profile` and `%shard profile` in a notebook."""

import pytest
from support.cells import LOOP, STEP


def sums(report) -> None:
    measured = report.measured
    assert measured.unknown is None or measured.unknown.seconds < 0.01 * measured.step_s.median
    assert measured.lines and all(row.line for row in measured.lines)


def test_a_cell_says_where_the_time_of_its_lines_goes(given):
    report = given.run("%%shard fsdp --profile 2" + STEP + LOOP)
    sums(report)
    assert (report.measured.read, report.timing.calls) == (2, 3)  # copies are none of the loop's
    home, loss = (source.name for source in report.sources)  # the cell that defines the step, and its loss
    lines = {(row.file, row.called and row.called.rpartition(":")[0]) for row in report.measured.lines}
    assert lines == {(home, None), (loss, home)}
    assert given.run("%shard").measured == report.measured


def test_a_cell_that_only_defines_its_step_is_recorded_too(given):
    sums(given.run("%%shard fsdp --profile" + STEP))


def test_the_last_step_is_recorded_afterwards_and_kept_in_the_history(given):
    assert given.run("%%shard fsdp" + STEP + LOOP).measured is None
    before = given["state"]
    report = given.run("%shard profile 1 -o kept")
    sums(report)
    assert given["kept"] is report and given["state"] is before
    given.run("%shard history")
    assert given.run(f"%shard history {report.number}").measured == report.measured


@pytest.mark.ci
def test_a_pipeline_is_recorded_and_the_files_of_its_recording_kept(given, tmp_path):
    line = f"%%shard pp --mesh pipe=2 --microbatches 2 --profile 1 --trace {tmp_path}"
    report = given.run(line + STEP + LOOP)
    sums(report)
    assert report.measured.of_devices == 2 and report.pipeline.recorded
    assert list(tmp_path.rglob("*.xplane.pb"))
    again = given.run("%shard profile 2")
    assert again.measured.read == 2 and again.pipeline.recorded


def test_a_step_with_a_default_is_recorded_as_it_was_called(given):
    given.run("%%shard fsdp" + STEP.replace("batch):", "batch, rate=0.5):") + LOOP)
    report = given.run("%shard profile 1")
    sums(report)
    assert report.timing.calls == 3  # of the program that the loop ran, and no other
    assert "Not run" not in str(report)


def test_a_step_whose_arguments_are_gone_is_not_said_never_to_have_run(given):
    given.run("%%shard fsdp" + STEP + LOOP)
    given.run("del state")
    assert "has run, and its arguments were not kept: the notebook has no state" in str(given.fails("%shard profile"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%shard profile none", "takes a whole number of steps from 1 on, not 'none'"),
        ("%shard profile 1 2", "takes one number, of steps; unexpected: 2"),
        ("%shard profile 101", "profile records 1 to 100 steps, not 101"),
        ("%shard profile --chart", "%shard profile has no option --chart"),
    ],
)
def test_a_line_that_can_not_be_is_refused(given, line, said):
    given.run("%%shard dp" + STEP + LOOP)
    assert said in str(given.fails(line))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("dp --profile 200", "profile records 1 to 100 steps, not 200"),
        ("dp --profile --dry-run", "--profile: it records steps that run, and --dry-run runs none"),
        ("dp --trace there", "--trace is of --profile: add --profile"),
        ("dp,fsdp --profile", "--profile: in a comparison none is recorded"),
        ("auto --profile", "--profile: under auto many are tried"),
        ("dp --profile --mesh 'v5e:2x2 data=4'", "--profile runs the step, and v5e:2x2 is not attached"),
        ("dp --profile --trace /proc/there", "the trace can't be kept in /proc/there"),
    ],
)
def test_what_can_not_be_recorded_is_refused_before_the_step_runs(given, line, said):
    given.run("runs = []")
    cell = STEP.replace("def ", "import jax as j\n@j.jit\ndef ") + "runs.append(1)\n" + LOOP
    assert said in str(given.fails(f"%%shard {line}" + cell))
    assert given["runs"] == []


def test_before_a_step_there_is_nothing_to_record(given):
    assert "there is no step yet" in str(given.fails("%shard profile"))
    given.run("%%shard dp --dry-run" + STEP)
    assert "was compiled and has not run" in str(given.fails("%shard profile"))
    assert given.run("%shard profile --help") is None
