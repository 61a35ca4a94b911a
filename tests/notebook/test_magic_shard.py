"""`%%shard` on a real shell: given a notebook, when the cell runs, then what it leaves, shows and returns."""

import sys

import numpy as np
import pytest
from support.cells import FAST, GIVEN, LOOP, STEP, close, one_line

from jaxshard_magic.report import Report
from jaxshard_magic.step import ShardedStep


def test_a_step_defined_and_called_in_its_cell_trains_with_the_same_numbers(given, trained):
    report = given.run("%%shard fsdp" + STEP + LOOP)
    assert isinstance(report, Report)
    assert (report.strategy, report.name) == ("fsdp", "train_step")
    assert report.timing is not None and report.timing.calls == 3
    assert close(given["state"], trained)
    assert len(given["state"]["w"].sharding.device_set) == 8
    assert isinstance(given["train_step"], ShardedStep)


def test_a_step_of_an_earlier_cell_is_sharded_where_it_is_called(given, trained):
    given.run(STEP)
    assert given.run("%%shard dp" + LOOP).timing.calls == 3
    assert close(given["state"], trained)


def test_a_function_of_an_earlier_cell_that_calls_the_step_runs_the_sharded_one(given, trained):
    given.run(STEP + "def fit(state):" + LOOP.replace("\n", "\n    ") + "\n    return state")
    assert given.run("%%shard fsdp\nstate = fit(state)").timing.calls == 3
    assert close(given["state"], trained)


def test_a_step_imported_from_a_module(given, trained, tmp_path, monkeypatch):
    (tmp_path / "my_steps.py").write_text("import jax, jax.numpy as jnp\n" + GIVEN.split("\n\n")[-1] + STEP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_steps", raising=False)
    report = given.run("%%shard fsdp\nfrom my_steps import train_step" + LOOP)
    assert report.timing.calls == 3
    assert close(given["state"], trained)
    assert not isinstance(sys.modules["my_steps"].train_step, ShardedStep)


@pytest.mark.parametrize("where", ["cell", "notebook"])
def test_a_method_of_an_object(given, trained, where):
    made = "class Trainer:" + STEP.replace("\n", "\n    ").replace("(state", "(self, state") + "\ntrainer = Trainer()"
    made = made.replace("(loss_fn)(self, state", "(loss_fn)(state")
    loop = LOOP.replace("train_step", "trainer.train_step")
    if where == "notebook":
        given.run(made)
        made = ""
    report = given.run("%%shard fsdp --step trainer.train_step\n" + made + loop)
    assert (report.name, report.timing.calls) == ("trainer.train_step", 3)
    assert close(given["state"], trained)


@pytest.mark.parametrize(
    "decorator",
    ["@jax.jit", "@functools.partial(jax.jit, donate_argnums=0)", "@nnx.jit", "@eqx.filter_jit"],
)
def test_a_decorated_step(given, trained, decorator):
    given.run("from flax import nnx\nimport equinox as eqx")
    assert given.run("%%shard fsdp" + STEP.replace("def ", f"{decorator}\ndef ") + LOOP).timing.calls == 3
    assert close(given["state"], trained)


def test_a_step_that_is_assigned(given, trained):
    cell = STEP.replace("train_step", "step") + "train_step = jax.jit(step)" + LOOP
    assert given.run("%%shard fsdp\n" + cell).timing.calls == 3
    assert close(given["state"], trained)


def test_an_epoch_in_one_scan(given, trained):
    cell = (
        STEP
        + """
def epoch(state, batches):
    return jax.lax.scan(train_step, state, batches)
state, losses = epoch(state, jax.tree.map(lambda x: jnp.stack([x] * 3), batch))
"""
    )
    assert given.run("%%shard fsdp" + cell).name == "epoch"
    assert close(given["state"], trained)


def test_a_method_that_the_cell_does_not_call_is_compiled_and_changes_nothing(given):
    given.run("""
from flax import nnx
class Trainer(nnx.Module):
    def __init__(self):
        self.model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    def step(self, batch):
        grads = nnx.grad(lambda m: jnp.mean(m(batch["x"]) ** 2))(self.model)
        self.model.kernel[...] -= grads.kernel[...]
trainer = Trainer()
before = jnp.array(trainer.model.kernel[...])
""")
    assert "call trainer.step" in str(given.fails("%%shard dp --repeat 2 --step trainer.step\npass"))
    assert given.run("%%shard dp --dry-run --step trainer.step\npass").timing.calls == 0
    assert "step" not in vars(given["trainer"])
    report = given.run("%%shard dp --step trainer.step\npass")
    assert report.timing.calls == 0
    assert np.array_equal(given["trainer"].model.kernel[...], given["before"])
    given.run("trainer.step(batch)")
    assert not np.array_equal(given["trainer"].model.kernel[...], given["before"])
    assert given.run("%shard").timing.calls == 1


def test_a_sharded_step_is_sharded_anew_not_twice(given, trained):
    given.run("%%shard dp" + STEP + "start = state" + LOOP)
    report = given.run("%%shard fsdp\nstate = start" + LOOP)
    assert (report.strategy, report.timing.calls) == ("fsdp", 3)
    assert not isinstance(given["train_step"].__wrapped__, ShardedStep)
    assert close(given["state"], trained)


def test_a_step_that_is_defined_again_is_plain_again(given):
    given.run("%%shard fsdp" + STEP)
    given.run(STEP)
    assert not isinstance(given["train_step"], ShardedStep)


def test_it_runs_once_on_copies_and_stays_bound(given):
    before = given["state"]
    report = given.run("%%shard fsdp" + STEP)
    assert report.timing.calls == 1
    assert given["state"] is before
    assert isinstance(given["train_step"], ShardedStep)


def test_the_loop_in_the_next_cell_trains_sharded_and_the_report_is_of_its_calls(given, trained):
    given.run("%%shard fsdp" + STEP)
    given.run(LOOP)
    assert close(given["state"], trained)
    timing = given.run("%shard").timing
    assert (timing.calls, timing.timed) == (3, 3)
    given.run("1 + 1")
    given.run("train_step(state, batch)")  # to look at it, and no loop
    assert given.run("%shard").timing == timing


def test_exploring_does_not_advance_an_nnx_model(given):
    given.run(
        "from flax import nnx\nimport optax\n"
        "model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))\n"
        "optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)\n"
        "before = jnp.array(model.kernel[...])"
    )
    cell = """%%shard fsdp
def train_step(model, optimizer, batch):
    grads = nnx.grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(model)
    optimizer.update(model, grads)
"""
    assert given.run(cell).timing.calls == 1
    assert np.array_equal(given["model"].kernel[...], given["before"])
    assert int(given["optimizer"].step[...]) == 0
    given.run("train_step(model, optimizer, batch)")
    assert not np.array_equal(given["model"].kernel[...], given["before"])


def test_arguments_that_are_missing_are_named_and_the_step_stays_bound(given, capsys):
    given.run("del batch")
    assert given.run("%%shard fsdp" + STEP) is None
    assert capsys.readouterr().out == (
        "train_step has not run yet: the notebook has no batch. Call it, then %shard shows the report.\n"
    )
    given.run("state, loss = train_step(state, {'x': jnp.ones((8, 16)), 'y': jnp.ones((8, 8))})")
    assert given.run("%shard").timing.calls == 1


def test_a_dry_run_runs_nothing_and_leaves_the_step_plain(given, capsys):
    report = given.run("%%shard fsdp --dry-run" + STEP)
    assert report.memory is not None
    assert report.timing.calls == 0
    assert not isinstance(given["train_step"], ShardedStep)


def test_a_dry_run_of_a_cell_that_trains_ends_at_the_first_call(given):
    before = given["state"]
    report = given.run("%%shard fsdp --dry-run" + STEP + LOOP + "\nafter = 1")
    assert report.timing.calls == 0
    assert given["state"] is before
    assert "after" not in given.shell.user_ns


def test_the_report_is_out_n_and_kept_under_o(given):
    report = given.run("%%shard fsdp -o kept" + STEP + LOOP)
    assert given["kept"] is report
    assert given["Out"][given.shell.execution_count - 1] is report


def test_what_the_line_alone_tells_is_said_before_the_cell_runs(given, capsys):
    assert "tp needs a mesh axis" in one_line(given, capsys, "%%shard tp\nmark = 1" + STEP)
    assert "mark" not in given.shell.user_ns


def test_a_semicolon_hides_the_report_and_the_session_keeps_it(given, capsys):
    assert given.run("%%shard fsdp" + STEP + "loss = train_step(state, batch)[1]\nloss;") is None
    assert capsys.readouterr().out == ""
    assert given.run("%shard").timing.calls == 1


def test_the_last_expression_is_displayed_and_the_report_returned(given, capsys):
    report = given.run("%%shard fsdp" + STEP + "state, loss = train_step(state, batch)\n'the value'")
    assert isinstance(report, Report)
    assert "'the value'" in capsys.readouterr().out


def test_the_history_holds_one_report_for_each_cell(given):
    session = given.shell.magics_manager.registry["ShardMagics"].session
    given.run("%%shard fsdp --name first" + STEP)
    given.run(LOOP)
    given.run("%shard")
    given.run("%%shard dp --name second" + STEP)
    assert [(report.name, report.timing.calls) for report in session.history] == [("first", 3), ("second", 1)]


def test_repeat_adds_timed_calls_and_changes_nothing(given):
    given.run("%%shard fsdp --repeat 5 -o kept" + FAST + "state, loss = train_step(state, batch)\nbefore = state")
    assert given["kept"].timing.timed >= 5
    assert given["state"] is given["before"]


def test_a_batch_is_said_to_have_grown_only_where_the_same_step_ran_before(given):
    def grown(cell: str) -> list[str]:
        report = given.run("%%shard dp" + cell)
        return [advice.message for advice in report.advice if advice.code == "learning-rate"]

    twice = "\nbatch = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)"
    assert grown(STEP + LOOP) == []
    assert "from 8 to 16 examples" in grown(STEP + twice + LOOP)[0]
    assert grown(STEP + LOOP + "\ntrain_step(state, jax.tree.map(lambda x: x[:8], batch))") == []  # the rest
    assert grown(STEP + LOOP) == []
    other = "\nstate = {'w': jnp.ones((16, 8)), 'b': jnp.zeros((1, 8))}"  # another model's step
    assert grown(STEP + other + twice + LOOP) == []


def test_check_compares_with_the_plain_step(given):
    check = given.run("%%shard fsdp --check" + STEP).check
    assert check.passed
    assert check.max_rel_diff < 1e-5


def test_specs_come_from_the_line_and_from_annotations(given):
    spec = {leaf.path: leaf.spec for leaf in given.run("%%shard spmd --spec \"batch=P('data')\"" + STEP).leaves}
    assert spec["batch.x"][:1] == ("data",)
    annotated = STEP.replace("batch)", "batch: P(None, 'data'))", 1)
    spec = {leaf.path: leaf.spec for leaf in given.run("%%shard spmd" + annotated).leaves}
    assert spec["batch.x"] == (None, "data")


def test_rules_give_leaves_their_specs(given):
    report = given.run("%%shard dp --rule \"state.w=P(None, 'data')\"" + STEP)
    assert {leaf.path: leaf.spec for leaf in report.leaves}["state.w"] == (None, "data")


def test_a_mesh_on_the_line_is_for_this_cell_only(given):
    report = given.run('%%shard fsdp+tp --mesh "data=4 model=2"' + STEP)
    assert report.mesh.axes == {"data": 4, "model": 2}
    assert given.run("%%shard fsdp" + STEP).mesh.axes == {"data": 8}


def test_without_a_mesh_it_says_which_one_it_takes(notebook, capsys):
    notebook.run(GIVEN)
    assert notebook.run("%%shard fsdp+tp" + STEP).mesh.axes == {"data": 4, "model": 2}
    assert capsys.readouterr().out.startswith("no %mesh yet, taking data=4 model=2")
    notebook.run("%%shard fsdp" + STEP)
    assert "no %mesh yet" not in capsys.readouterr().out  # it is known by now


DEEP = """
layers = [{"w": jnp.eye(16) / 2, "b": jnp.zeros(16)} for _ in range(4)]
def predicted(layers, x):
    for layer in layers:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x
def train_step(layers, batch):
    loss, grads = jax.value_and_grad(lambda p: (predicted(p, batch["x"]) ** 2).mean())(layers)
    return jax.tree.map(lambda p, g: p - 0.1 * g, layers, grads), loss
"""


EVALUATED = """
import optax
evaluate = jax.jit(predicted)
def validate(layers):
    return evaluate(layers, batch["x"])
"""


@pytest.mark.ci
def test_a_function_that_meets_the_state_of_a_pipeline_is_told_how_to_gather_it(given, capsys):
    given.run(DEEP.partition("def train_step")[0] + EVALUATED)
    step = "%%shard pp --mesh pipe=2" + DEEP
    in_the_loop = step + "for _ in range(2):\n    layers, loss = train_step(layers, batch)\n    validate(layers)"
    given.run(step + "layers, loss = train_step(layers, batch)")
    for cell, function in (
        ("evaluate(layers, batch['x'])", "predicted"),
        ("validate(layers)", "predicted"),
        ("optax.tree.norm(layers)", "add"),
        (in_the_loop, "predicted"),
    ):
        capsys.readouterr()
        error = given.fails(cell)
        told = capsys.readouterr().out
        (line,) = (each for each in told.splitlines() if each.startswith("ValueError: "))
        assert line == f"ValueError: {error}" and line.startswith(f"ValueError: {function} (cell [")
        assert "which lie on different stages of the pipeline train_step: state = train_step.gather(state)" in line
        assert "Traceback" not in told


def test_other_errors_of_later_cells_stay_as_they_are(given, capsys):
    given.run("%%shard pp --mesh pipe=2" + DEEP + "layers, loss = train_step(layers, batch)")
    capsys.readouterr()
    given.fails("jax.device_put(1.0, jax.devices()[6]) + jax.device_put(1.0, jax.devices()[7])")
    assert "incompatible devices" in (told := capsys.readouterr().out) and "gather" not in told
    given.fails("raise ValueError('another')")
    assert "Traceback" in (told := capsys.readouterr().out) and "gather" not in told
    given.run("layers = train_step.gather(layers)\njax.jit(predicted)(layers, batch['x'])")
    given.run("%unload_ext jaxshard_magic")
    assert "showtraceback" not in vars(given.shell)
