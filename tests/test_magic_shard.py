"""`%%shard` and `%shard` on a real shell: given a notebook, when the cell runs, then what it leaves."""

import io
import signal
import sys

import numpy as np
import pytest
from IPython.core.error import UsageError

from jaxshard_magic import _options, _progress
from jaxshard_magic.report import Report
from jaxshard_magic.step import ShardedStep

GIVEN = """
import functools
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
state = {"w": jnp.ones((16, 8)), "b": jnp.zeros(8)}
batch = {"x": jnp.arange(8 * 16.0).reshape(8, 16) / 100, "y": jnp.ones((8, 8))}
def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)
"""
STEP = """
def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss
"""
LOOP = """
for _ in range(3):
    state, loss = train_step(state, batch)
"""
FAST = STEP.replace("def ", "@jax.jit\ndef ")


@pytest.fixture
def given(notebook):
    notebook.run(GIVEN)
    notebook.run("%mesh data=8;")
    return notebook


@pytest.fixture
def trained(given):
    """The state after three plain steps."""
    given.run(STEP + "expected = state\nfor _ in range(3):\n    expected, _ = train_step(expected, batch)")
    given.run("del train_step")
    return {name: np.asarray(value) for name, value in given["expected"].items()}


def close(state, expected) -> bool:
    return all(np.allclose(state[name], expected[name], rtol=1e-5, atol=1e-6) for name in expected)


def one_line(notebook, capsys, cell: str) -> str:
    """The cell fails with one printed line, and leaves every name of the notebook as it was."""
    hidden = {"_", "__", "___", "In", "Out", "_ih", "_oh", "_i", "_ii", "_iii", "_exit_code"}
    before = {k: v for k, v in notebook.shell.user_ns.items() if k not in hidden}
    capsys.readouterr()
    error = notebook.fails(cell)
    assert type(error) is UsageError, repr(error)
    assert capsys.readouterr().err == f"UsageError: {error}\n"
    assert "\n" not in str(error)
    after = notebook.shell.user_ns
    assert all(after[name] is value for name, value in before.items())
    return str(error)


# ---- where the step lives ----


def test_a_step_defined_and_called_in_the_cell_trains_sharded_with_the_same_numbers(given, trained):
    report = given.run("%%shard fsdp" + STEP + LOOP)
    assert isinstance(report, Report)
    assert report.strategy == "fsdp"
    assert report.timing.calls == 3
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
    made = (
        "class Trainer:"
        + STEP.replace("\n", "\n    ").replace("(state", "(self, state")
        + "\ntrainer = Trainer()"
    )
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


# ---- a cell that only defines the step ----


def test_it_runs_once_on_copies_and_stays_bound(given):
    before = given["state"]
    report = given.run("%%shard fsdp" + STEP)
    assert report.timing.calls == 1
    assert given["state"] is before
    assert isinstance(given["train_step"], ShardedStep)


def test_the_loop_in_the_next_cell_trains_sharded_and_the_report_counts_its_calls(given, trained):
    given.run("%%shard fsdp" + STEP)
    given.run(LOOP)
    assert close(given["state"], trained)
    assert given.run("%shard").timing.calls == 4


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


# ---- what the cell shows and returns ----


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
    assert [(report.name, report.timing.calls) for report in session.history] == [("first", 4), ("second", 1)]


def test_repeat_adds_timed_calls_and_changes_nothing(given):
    given.run(
        "%%shard fsdp --repeat 5 -o kept" + FAST + "state, loss = train_step(state, batch)\nbefore = state"
    )
    assert given["kept"].timing.timed >= 5
    assert given["state"] is given["before"]


def test_check_compares_with_the_plain_step(given):
    check = given.run("%%shard fsdp --check" + STEP).check
    assert check.passed
    assert check.max_abs_diff < 1e-5


def test_specs_come_from_the_line_and_from_annotations(given):
    spec = {
        leaf.path: leaf.spec for leaf in given.run("%%shard spmd --spec \"batch=P('data')\"" + STEP).leaves
    }
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


# ---- what goes wrong ----


def test_an_exception_in_the_cell_is_the_users_own_with_their_lines(given):
    error = given.fails("%%shard fsdp" + STEP + LOOP + "1 / 0\n")
    assert type(error) is ZeroDivisionError
    files, trace = [], error.__traceback__
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        last, trace = trace, trace.tb_next
    assert not any("jaxshard_magic" in file for file in files)
    assert last.tb_lineno == 1 + (STEP + LOOP).count("\n")
    assert not isinstance(given["train_step"], ShardedStep)
    assert "loss" in given.shell.user_ns


def test_an_exception_in_the_step_shows_its_line(given, capsys):
    error = given.fails("%%shard fsdp" + STEP.replace("return", "1 / 0\n    return") + LOOP)
    assert type(error) is ZeroDivisionError
    shown = capsys.readouterr().out
    assert "---> 4     1 / 0" in shown
    assert "jaxshard_magic/step" not in shown
    assert not isinstance(given["train_step"], ShardedStep)


def test_a_step_of_an_earlier_cell_is_put_back_when_the_cell_raises(given):
    given.run(STEP)
    plain = given["train_step"]
    given.fails("%%shard fsdp" + LOOP + "1 / 0")
    assert given["train_step"] is plain


def test_a_syntax_error_is_pythons_own(given, capsys):
    assert type(given.fails("%%shard fsdp\ndef train_step(:\n    pass")) is SyntaxError
    assert "def train_step(:" in capsys.readouterr().out


def test_ctrl_c_in_the_cell_leaves_the_session_usable_and_the_step_plain(given, trained):
    error = given.fails(
        "%%shard fsdp" + STEP + LOOP + "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    assert type(error) is KeyboardInterrupt
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not isinstance(given["train_step"], ShardedStep)
    given.run("%%shard fsdp" + STEP)


def test_nothing_is_left_patched(given):
    watched = ["jax.grad", "jax.value_and_grad", "jax.vjp", "jax.jit", "jax._src.api.vjp"]
    import jax

    before = [eval(name, {"jax": jax}) for name in watched]
    given.run("%%shard fsdp" + STEP + LOOP)
    given.fails("%%shard fsdp" + STEP + "1 / 0")
    assert [eval(name, {"jax": jax}) for name in watched] == before
    assert not [name for name in given.shell.user_ns if not name.isidentifier()]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "%%shard needs a strategy: dp, fsdp, tp, spmd"),
        ("fdsp", "Did you mean 'fsdp'?"),
        ("fsdp+tq", "'tq' is no strategy"),
        ("pp", "comes in a later version"),
        ("auto", "comes in a later version"),
        ("fsdp tp", "unexpected: tp"),
        ("fsdp --mesh data=4 model=2", 'quote the mesh: --mesh "data=4 model=2"'),
        ("fsdp --chek", "Did you mean '--check'?"),
        ("fsdp --check=yes", "--check takes no value"),
        ("fsdp --microbatches 4", "--microbatches comes later"),
        ("fsdp --remat 2", "--remat comes later"),
        ("fsdp --repeat none", "--repeat takes a whole number from 1 on, not 'none'"),
        ("fsdp --repeat", "--repeat needs a value: --repeat N"),
        ("fsdp -o 3", "-o takes the name of a variable, not '3'"),
        ("fsdp --spec batch", "has no '='"),
        ("fsdp --spec \"batch=Q('data')\"", "no PartitionSpec"),
        ("fsdp --name it's", "a quote is not closed"),
        ("fsdp --mesh dta", "no mesh"),
        ("fsdp --step trian_step", "Did you mean 'train_step'?"),
        ("fsdp@dta", "Did you mean 'data'?"),
        ("tp", "tp needs a mesh axis for it"),
        ("spmd --spec \"batch=P('dta')\"", "Did you mean 'data'?"),
        ("spmd --spec \"batch=P('data', 'data')\"", "twice"),
        ("spmd --spec \"batch=P(None, None, None, 'data')\"", "dimensions"),
        ("spmd --spec \"bach=P('data')\"", "Did you mean 'batch'?"),
        ("fsdp --rule \"nothing=P('data')\"", "matches no leaf"),
    ],
)
def test_bad_input_is_one_line_and_the_notebook_stays_as_it_was(given, capsys, line, says):
    given.run(FAST)
    assert says in one_line(given, capsys, f"%%shard {line}{LOOP}")


def test_a_batch_that_does_not_divide_is_one_line(given, capsys):
    given.run(FAST + "batch = {'x': jnp.ones((6, 16)), 'y': jnp.ones((6, 8))}")
    line = one_line(given, capsys, "%%shard dp --spec \"batch=P('data')\"" + LOOP)
    assert "6" in line and "8" in line


def test_a_cell_without_a_function(given, capsys):
    assert "no function that may be the train step" in one_line(given, capsys, "%%shard fsdp\nx = 1")


def test_two_candidates_are_named(given):
    cell = "%%shard fsdp" + STEP.replace("train_step", "d_step") + STEP.replace("train_step", "g_step")
    assert "d_step, g_step; say which: --step d_step" in str(given.fails(cell))
    assert given.run(cell.replace("fsdp", "fsdp --step g_step", 1)).name == "g_step"


def test_await_at_the_top_of_the_cell(given, capsys):
    assert "can't await at its top level" in one_line(given, capsys, "%%shard fsdp\nawait something()")


def test_a_name_that_is_no_function(given, capsys):
    line = one_line(given, capsys, "%%shard fsdp --step state\nstate")
    assert line == "state is no function but a dict"


# ---- %shard ----


def test_help_has_every_option_and_is_what_introspection_shows(given, capsys):
    given.run("%shard --help")
    shown = capsys.readouterr().out
    assert shown == _options.HELP + "\n"
    assert all(flag.name in shown for flag in _options.FLAGS)
    assert all(name in shown for name in _options.STRATEGIES)
    given.run("%%shard --help\npass")
    assert capsys.readouterr().out == shown
    assert given.shell.object_inspect("%%shard")["docstring"].strip() == _options.HELP


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "no report yet: write %%shard fsdp above a cell with a train step"),
        ("doctor", "%shard doctor comes later"),
        ("compare dp fsdp", "%shard compare comes later"),
        ("fsdp", "%shard fsdp has no cell: write %%shard fsdp as the first line of the step's cell"),
        ("hstory", "Did you mean 'history'?"),
        ("--leavs", "%%shard has no option --leavs"),
    ],
)
def test_a_line_that_can_not_be_answered(notebook, capsys, line, says):
    assert says in one_line(notebook, capsys, f"%shard {line}")


def test_every_strategy_of_the_help_is_one():
    from jaxshard_magic.strategies.names import JOBS

    assert set(_options.STRATEGIES) == set(JOBS)


def test_strategies_options_and_functions_are_completed(given):
    def completed(text: str) -> list[str]:
        return given.shell.complete(None, text, len(text))[1]

    assert "fsdp" in completed("%%shard fs")
    assert "tp" in completed("%%shard fsdp+t")
    assert "--dry-run" in completed("%%shard fsdp --dr")
    assert "loss_fn" in completed("%%shard fsdp --step loss")


def test_unloading_takes_the_magics_away_and_loading_again_brings_them_back(notebook):
    notebook.run("%unload_ext jaxshard_magic")
    for kind, name in (("line", "mesh"), ("line", "shard"), ("cell", "shard")):
        assert name not in notebook.shell.magics_manager.magics[kind]
    assert "UsageError" in repr(notebook.fails("%shard --help"))
    notebook.run("%load_ext jaxshard_magic")
    notebook.run("%shard --help")


def test_the_sessions_traits_are_configured_with_config(notebook):
    notebook.run("%config ShardSession.progress = False")
    assert notebook.shell.magics_manager.registry["ShardMagics"].session.progress is False


# ---- progress ----


def test_long_work_is_one_line_that_is_updated_and_cleared(monkeypatch):
    import time

    monkeypatch.setattr(_progress, "FIRST", 0.0)
    monkeypatch.setattr(_progress, "TICK", 0.01)
    drawn: list[str] = []
    with _progress.Progress(drawn.append) as progress:
        progress("compiling for 8 devices")
        time.sleep(0.3)
    assert drawn[0] == "compiling for 8 devices, 0.0 s"
    assert "compiling for 8 devices, 0.1 s" in drawn
    assert drawn[-1] == ""


def test_short_work_and_no_work_show_nothing():
    drawn: list[str] = []
    with _progress.Progress(drawn.append) as progress:
        progress("tracing train_step")
    assert drawn == []


def test_a_terminal_gets_the_line_written_over_and_a_pipe_gets_nothing(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert _progress.line_for(object()) is None
    monkeypatch.setattr(sys, "stderr", Terminal())
    draw = _progress.line_for(object())
    assert draw is not None
    draw("tracing, 1.0 s")
    draw("")
    assert sys.stderr.getvalue() == "\r\x1b[Ktracing, 1.0 s\r\x1b[K"
