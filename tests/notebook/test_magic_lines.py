"""What goes wrong under `%%shard`: one line each, or the user's own exception; and the lines of `%shard`."""

import signal

import jax
import psutil
import pytest
from IPython.core import completer
from IPython.core.completer import provisionalcompleter
from support.cells import FAST, LOOP, STEP, one_line

from jaxshard_magic import targets
from jaxshard_magic.config.strategies import WORDS
from jaxshard_magic.hardware import chip, chips
from jaxshard_magic.notebook.options import COMMANDS, HELP, ShardOptions
from jaxshard_magic.step import ShardedStep


def test_an_exception_in_the_cell_is_the_users_own_with_their_lines(given):
    error = given.fails("%%shard fsdp" + STEP + LOOP + "1 / 0\n")
    assert type(error) is ZeroDivisionError
    files, trace = [], error.__traceback__
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        last, trace = trace, trace.tb_next
    assert not any("jaxshard_magic" in file for file in files)
    assert last.tb_lineno == 1 + (STEP + LOOP).count("\n")
    assert isinstance(given["train_step"], ShardedStep)
    assert "loss" in given.shell.user_ns


def test_a_message_about_the_step_names_its_cell_and_its_line(given):
    branches = STEP.replace("return", "if loss > 3: pass\n    return")
    said = str(given.fails("%%shard fsdp" + branches + LOOP))
    assert f"cell [{given.shell.execution_count - 1}], line 4, `if loss > 3: pass`," in said


def test_an_exception_in_the_step_shows_its_line(given, capsys):
    error = given.fails("%%shard fsdp" + STEP.replace("return", "1 / 0\n    return") + LOOP)
    assert type(error) is ZeroDivisionError
    shown = capsys.readouterr().out
    assert "---> 4     1 / 0" in shown
    assert "jaxshard_magic/step" not in shown
    assert isinstance(given["train_step"], ShardedStep)


@pytest.mark.parametrize("line", ["dp", "dp --check", "pp --mesh pipe=2", "dp --microbatches 2"])
def test_between_the_users_frames_stands_no_frame_that_we_caused(given, capsys, line):
    bad = STEP.replace("return", "batch['x'] @ jnp.zeros((3, 3))\n    return")
    error = given.fails(f"%%shard {line}" + bad + LOOP)
    assert type(error) is TypeError
    shown = capsys.readouterr().out
    assert "---> 4     batch['x'] @ jnp.zeros((3, 3))" in shown
    assert "contextlib" not in shown and "jaxshard_magic" not in shown


def test_a_step_of_an_earlier_cell_stays_sharded_unless_it_can_not_be(given):
    given.run(STEP)
    plain = given["train_step"]
    given.fails("%%shard fsdp --spec batch=P('rows')" + LOOP)
    assert given["train_step"] is plain
    given.fails("%%shard fsdp" + LOOP + "1 / 0")
    assert isinstance(given["train_step"], ShardedStep)


def test_a_syntax_error_is_pythons_own(given, capsys):
    assert type(given.fails("%%shard fsdp\ndef train_step(:\n    pass")) is SyntaxError
    assert "def train_step(:" in capsys.readouterr().out


@pytest.fixture
def interruptible():
    """A shell starts what it runs in the background with interrupts ignored; a kernel listens to them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_after_a_step_leaves_the_session_usable_and_it_sharded(given, interruptible):
    error = given.fails("%%shard fsdp" + STEP + LOOP + "import signal\nsignal.raise_signal(signal.SIGINT)\n")
    assert isinstance(error, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert isinstance(given["train_step"], ShardedStep)  # as its arrays lie
    given.run("%%shard fsdp" + STEP)


def test_nothing_is_left_patched(given):
    watched = ["jax.grad", "jax.value_and_grad", "jax.vjp", "jax.jit", "jax._src.api.vjp"]
    before = [eval(name, {"jax": jax}) for name in watched]
    given.run("%%shard fsdp" + STEP + LOOP)
    given.fails("%%shard fsdp" + STEP + "1 / 0")
    assert [eval(name, {"jax": jax}) for name in watched] == before
    assert not [name for name in given.shell.user_ns if not name.isidentifier()]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "%%shard needs a strategy: dp, fsdp, tp, sp, ep, pp, pmap, spmd, auto"),
        ("fdsp", "'fdsp' is no strategy. Did you mean 'fsdp'? %%shard --help lists them"),
        ("dp --on v55", "'v55' names no known chip. Did you mean 'v5p'? %mesh --list has all"),
        ("fsdp+tq", "'tq' is no strategy"),
        ("auto+fsdp", "auto searches for a strategy and stands alone"),
        ("fsdp tp", "unexpected: tp"),
        ("fsdp --mesh data=4 model=2", 'quote the mesh: --mesh "data=4 model=2"'),
        ("fsdp --chek", "Did you mean '--check'?"),
        ("fsdp --check=yes", "--check takes no value"),
        ("fsdp --microbatches none", "--microbatches takes a whole number from 1 on, not 'none'"),
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


def test_a_comment_behind_a_line_says_nothing(given, capsys):
    mesh = given.run("%mesh data=4 model=2   # data=8; before")
    assert dict(mesh.shape) == {"data": 4, "model": 2} and given.run("%mesh data=8;   # quiet") is None
    given.run("%%shard fsdp          # one word changed; it's quick" + STEP + LOOP)
    report = given.run('%shard   # "again')
    assert report.strategy == "fsdp" and report.options == {}
    named = given.run('%%shard dp --name "run #2" -o kept   # kept' + STEP + LOOP)
    assert named.name == "run #2" and given["kept"] is named
    assert given.run("%shard ;# nothing shown") is None
    assert given.run("%shard schedule 1f1b --stages 2  # the usual one").stages == 2
    assert "it repeats" not in one_line(given, capsys, "%%shard fsdp --rule a#b=Q  # no spec" + STEP + LOOP)


def test_wrong_names_numbers_and_expressions_are_one_line_before_a_run(given, capsys):
    given.run(FAST)
    many, lose = "9" * 5000, "has that name, and would lose it; take another: -o found"
    for line, says in (
        ("-o for", "-o takes the name of a variable, not 'for'"),
        ("-o __builtins__", "-o __builtins__: Python or IPython needs that name"),
        ("-o print", "-o print: Python or IPython needs that name"),
        ("-o train_step", f"-o train_step: this cell {lose}"),
        ("-o jax", f"-o jax: this cell {lose}"),
        ("-o ｂatch", f"-o batch: this cell {lose}"),
        (f"--microbatches {many}", "not '999999999999999999999999999999...', 5,000 characters"),
        (f"--remat {many}", "--remat takes 1,000,000 segments at most, not a number of 5,000 digits"),
        (f"--remat '{'(' * 5000}'", "it repeats or nests more than Python's re can compile"),
        ("--rule 'a{99999999999}=P()'", "it repeats or nests more than Python's re can compile"),
        ("--rule '*=P()'", "rule '*' is no regular expression"),
        (f'--spec "state=P({"a." * 3000}a)"', "is no PartitionSpec: write it as P('data', None)"),
        (f'--mesh "{" ".join(f"a{i}=1" for i in range(200))}"', "a mesh has 1 to 32 axes"),
        (f"--mesh [[0x{'f' * 9000}],['data']]", "a mesh has 1 to 32 axes, of 1,000,000,000 devices at most"),
    ):
        assert says in one_line(given, capsys, f"%%shard fsdp {line}\nprint(jax)\n1 / 0{LOOP}")


def test_a_line_binds_its_result_to_no_name_that_the_step_or_line_uses(given, capsys):
    given.run("%%shard dp;" + STEP + LOOP)
    for name in ("train_step", "state", "batch"):
        assert f"-o {name}: the last step has that name" in one_line(given, capsys, f"%shard doctor -o {name}")
    given.run("other = state")
    assert "what the line explores" in one_line(given, capsys, "%shard explore other.w -o other")


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


def test_help_has_every_option_and_is_what_introspection_shows(given, capsys):
    given.run("%shard --help")
    shown = capsys.readouterr().out
    assert shown == HELP + "\n"
    assert all(flag.name in shown for flag in ShardOptions.flags())
    assert all(name in shown for name in WORDS)
    given.run("%%shard --help\npass")
    assert capsys.readouterr().out == shown
    assert given.shell.object_inspect("%%shard")["docstring"].strip() == HELP


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "no report yet: write %%shard fsdp above a cell with a train step"),
        ("compare", "no report yet: write %%shard fsdp above a cell with a train step"),
        ("explore", "nothing to explore yet: run a %%shard cell first"),
        ("fsdp", "%shard fsdp has no cell: write %%shard fsdp as the first line of the step's cell"),
        ("hstory", "%shard has no command 'hstory'. Did you mean 'history'? %shard --help lists them"),
        ("1", "%shard has no command '1'. Did you mean %shard history 1? It shows report 1"),
        ("--leavs", "%%shard has no option --leavs"),
    ],
)
def test_a_line_that_can_not_be_answered(notebook, capsys, line, says):
    assert says in one_line(notebook, capsys, f"%shard {line}")


def completed(notebook, text: str) -> list[str]:
    with provisionalcompleter():
        return [found.text for found in notebook.shell.Completer.completions(text, len(text))]


def test_strategies_options_and_functions_are_completed(given):
    assert "fsdp" in completed(given, "%%shard fs")
    assert "tp" in completed(given, "%%shard fsdp+t")
    assert "--dry-run" in completed(given, "%%shard fsdp --dr")
    assert "loss_fn" in completed(given, "%%shard fsdp --step loss")
    assert "history" in completed(given, "%shard h")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("%%shard fsdp --precision ", {"bf16", "fp16", "f32"}),
        ("%%shard fsdp --precision=b", {"bf16"}),
        ("%%shard fsdp --reduce o", {"once", "once-gathered"}),
        ("%%shard fsdp --remat n", {"nothing"}),
        ("%%shard pp --balance ", {"flops", "measured"}),
        ("%%shard sp --attention ", {"gather", "heads", "ring", "auto"}),
        ("%%shard pp --schedule zb", {"zb-h1", "zb-h2", "zb-v"}),
        ("%%shard fsdp --on v5", {"v5e", "v5p"}),
        ("%%shard auto --among dp,fs", {"fsdp"}),
        ("%%shard dp,fsdp --vary prec", {"precision="}),
        ("%%shard dp,fsdp --vary precision=b", {"bf16"}),
        ("%shard history --strategy fs", {"fsdp"}),
        ("%mesh v5", {"v5e", "v5p"}),
        ("%mesh v5e:8", {"8x8", "8x16"}),
        ("%mesh --", {"--list", "--help"}),
        ("%mesh data=4 m", {"model="}),
        ("%mesh data=4 model=2 ", {"fsdp=", "seq=", "pipe=", "expert="}),
        ("%%shard ", set(WORDS)),
        ("%%shard fsdp+", set(WORDS)),
        ("%shard ", {*WORDS, *COMMANDS}),
    ],
)
def test_an_option_that_is_being_given_its_value_offers_its_values_alone(given, line, offered):
    found = {word.rpartition(" ")[2].rpartition(":")[2] for word in completed(given, line)}
    if hasattr(completer, "context_matcher"):
        assert found == offered
    else:  # before IPython 8.6 Python's own names stand beside ours, but none other of ours
        ours = {*WORDS, *COMMANDS, *(flag.name for flag in ShardOptions.flags()), *chips()}
        assert found >= offered and found & ours == offered & ours


def test_options_are_offered_behind_a_strategy_and_once_a_dash_is_typed(given):
    for line in ("%%shard fsdp ", "%%shard --", "%%shard fsdp --"):
        found = completed(given, line)
        assert "--check" in found and not {"fsdp", "schedule"} & set(found)


def test_behind_a_whole_value_and_for_a_number_no_values_are_offered(given):
    assert "--check" in completed(given, "%%shard fsdp --precision bf16 --ch")
    assert not {"dp", "fsdp", "--check"} & set(completed(given, "%%shard fsdp --microbatches "))


def test_unloading_takes_the_magics_away_and_loading_again_brings_them_back(notebook):
    notebook.run("%unload_ext jaxshard_magic")
    for kind, name in (("line", "mesh"), ("line", "shard"), ("cell", "shard")):
        assert name not in notebook.shell.magics_manager.magics[kind]
    assert "UsageError" in repr(notebook.fails("%shard --help"))
    notebook.run("%load_ext jaxshard_magic")
    notebook.run("%shard --help")


def test_unloading_ends_the_compiler_s_process(notebook):
    target = targets.Target(chip("v5e"), (2, 2))
    targets.compiler_of(target).preload(target.topology())
    pid = targets.compiler_of(target).pid
    notebook.run("%unload_ext jaxshard_magic")
    assert pid is not None and not psutil.pid_exists(pid)


def test_the_sessions_traits_are_configured_with_config(notebook):
    notebook.run("%config ShardSession.progress = False")
    assert notebook.shell.magics_manager.registry["ShardMagics"].session.progress is False
