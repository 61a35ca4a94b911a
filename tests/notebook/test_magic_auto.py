"""`%%shard auto` on a real shell: the cell goes on with the choice, and nothing of the user's is lost."""

from importlib.util import find_spec

import pytest
from support.cells import LOOP, STEP, close

from jaxshard_magic.report.choice import Choice
from jaxshard_magic.step import ShardedStep


def test_a_cell_goes_on_with_the_choice_and_has_the_numbers_of_the_plain_step(given, trained):
    found = given.run("%%shard auto --budget 200" + STEP + LOOP)
    assert isinstance(found, Choice)
    assert found.chosen is not None
    assert close(given["state"], trained)
    step = given["train_step"]
    assert isinstance(step, ShardedStep)
    assert step.strategy == found.chosen.strategy
    assert dict(step.mesh.shape) == found.chosen.mesh
    assert step.calls == 3
    assert given.run("%shard").strategy == found.chosen.strategy  # the report of the run


def test_the_choice_is_not_compiled_again_and_its_trial_is_none_of_its_calls(given, monkeypatch):
    from jaxshard_magic.step import step_programs

    built = []

    def counted(*args, **how):
        built.append(build(*args, **how))
        return built[-1]

    build = step_programs.compile_step
    monkeypatch.setattr(step_programs, "compile_step", counted)
    found = given.run("%%shard auto --among dp,fsdp" + STEP + LOOP)
    assert len(built) == len(found.comparison.trials)
    assert given["train_step"].entry in built
    report = given.run("%shard")
    assert (report.timing.calls, report.timing.timed) == (3, 2)


def test_a_cell_that_only_defines_the_step_chooses_on_copies_of_the_state(given):
    before = given["state"]
    found = given.run("%%shard auto --among dp,fsdp -o kept" + STEP)
    assert given["kept"] is found
    assert given["state"] is before
    assert isinstance(given["train_step"], ShardedStep) and given["train_step"].calls == 1


def test_plans_alone_leave_the_plain_step_and_run_nothing(given):
    found = given.run("%%shard auto --plan-only" + STEP + LOOP + "\nafter = True")
    assert found.source == "planned" and found.comparison.trials == ()
    assert not isinstance(given["train_step"], ShardedStep)
    assert "after" not in given.shell.user_ns  # the cell ended at the step's first call
    assert given.run("%shard") is found


def test_a_dry_run_compiles_and_runs_nothing(given):
    found = given.run("%%shard auto --dry-run --among dp,fsdp" + STEP + LOOP)
    assert found.source == "predicted" and found.trial is not None
    assert not isinstance(given["train_step"], ShardedStep)


def test_the_choice_may_be_checked_and_has_the_options_of_the_line(given):
    found = given.run("%%shard auto --among dp,fsdp --precision bf16 --check" + STEP + LOOP)
    report = given.run("%shard")
    assert report.check is not None and report.check.passed
    assert report.options["precision"] == "bf16"
    assert found.chosen is not None and found.chosen.options["precision"] == "bf16"


def test_the_choice_is_run_again_by_a_line_with_all_that_the_user_said(given):
    found = given.run('%%shard auto --among dp,fsdp --on v5p --rule "b=P()"' + STEP + LOOP)
    assert found.chosen is not None and found.runner_up is not None
    for each in (found.chosen, found.runner_up):
        assert each.line == f'{each.strategy} --mesh "data=8" --rule "b=P()" --on v5p'
        assert f"    %%shard {each.line}" in found.to_text().splitlines()
    assert "--rule" not in found.to_text().partition("Run the choice")[0]


def test_a_cell_that_raises_after_its_step_goes_on_with_the_choice(given):
    given.fails("%%shard auto --among dp,fsdp" + STEP + LOOP + "\n1 / 0")
    assert isinstance(given["train_step"], ShardedStep)


def test_a_method_is_planned_and_compiled_and_not_called(given):
    trainer = "class Trainer:" + STEP.replace("\n", "\n    ").replace("(state", "(self, state")
    trainer = trainer.replace("(loss_fn)(self, state", "(loss_fn)(state") + "\ntrainer = Trainer()\n"
    found = given.run(
        "%%shard auto --among dp,fsdp --step trainer.train_step\n" + trainer + "trainer.train_step(state, batch)"
    )
    assert found.chosen is not None and found.name == "trainer.train_step"


@pytest.mark.ci
@pytest.mark.skipif(find_spec("libtpu") is None, reason="no TPU compiler: libtpu is not installed")
def test_a_slice_that_is_not_attached_is_compiled_for_and_the_plain_step_stays(given):
    found = given.run('%%shard auto --among dp,fsdp --mesh "v5e:2x4 data=8"' + STEP + LOOP)
    assert found.report.mesh.source == "topology"
    assert not isinstance(given["train_step"], ShardedStep)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("auto dp", "auto takes options alone; unexpected: dp"),
        ("auto --compare", "--compare: under auto"),
        ("auto --keep-going", "--keep-going: under auto"),
        ("auto --budget soon", "--budget takes a number above 0, not 'soon'"),
        ("auto --budget 0", "--budget takes a number above 0, not '0'"),
        ("auto --among dp,fsd", "Did you mean 'fsdp'?"),
        ("auto --vary microbatches=x", "microbatches takes whole numbers"),
        ('auto --meshes "data=3"', "data=3"),
        ("auto --on v99", "v99"),
        ("fsdp --budget 5", "--budget is for a search"),
        ("dp,fsdp --among dp", "--among is for a search"),
        ("fsdp --plan-only", "--plan-only is for a search"),
        ("fsdp,auto", "auto searches for a strategy and stands alone"),
        ("auto+dp", "auto searches for a strategy and stands alone"),
    ],
)
def test_a_line_that_can_not_be_searched_says_so_before_the_cell_runs(given, line, said):
    error = given.fails(f"%%shard {line}\nran = True\ndef train_step(state, batch):\n    return state")
    assert said in str(error)
    assert "ran" not in given.shell.user_ns
