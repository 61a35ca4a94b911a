"""A step compared under several strategies: run on copies, checked and measured, and what a failure leaves."""

import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.cells import STEP

import jaxshard_magic
from jaxshard_magic.analysis import check
from jaxshard_magic.program.compiling import compile_lowered
from jaxshard_magic.report.comparison import Trial
from jaxshard_magic.search import Requests, TrialOptions, TrialRunner, candidates
from jaxshard_magic.views.words.comparison import trial_names

WIDTH = 16
COMPILES = "jaxshard_magic.program.compiling.compile_lowered"


def step(params, batch):
    def loss(params):
        x = batch
        for w in params:
            x = x + jax.nn.gelu(x @ w)
        return jnp.square(x).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value


def arguments() -> tuple:
    keys = jax.random.split(jax.random.key(0), 4)
    return [0.1 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys], jnp.ones((16, WIDTH))


def devices(text: str) -> Mesh:
    return jaxshard_magic.mesh(f"cpu:8 {text}")


def test_each_candidate_is_run_on_copies_checked_and_measured():
    params, batch = arguments()
    before = [np.asarray(w) for w in params]
    said: list[str] = []
    found = jaxshard_magic.compare(
        step, "dp,fsdp,tp,pp", (params, batch), mesh="cpu:8 data=8", repeat=2, say=said.append
    )
    assert [t.strategy for t in found.trials] == ["dp", "fsdp", "tp", "pp"]
    counted = [words.rpartition(", ")[2] for words in said if words.startswith("compiling")]
    assert list(dict.fromkeys(counted)) == [f"{n} of 4 done" for n in (0, 1, 2, 3)]
    assert found.source == "predicted" and {t.report.timing.on for t in found.trials} == {"TPU v5e"}
    for trial in found.trials:
        assert trial.why is None
        assert trial.report.check.passed
        assert trial.report.timing.timed == 2
        assert trial.measured > 0
        assert trial.peak > 0
    bytes_of_weights = 4 * WIDTH * WIDTH * 4
    assert found["dp"].sent["data"] >= bytes_of_weights  # an all-reduce over 8 sends 14/8 of it
    assert all(np.array_equal(w, x) for w, x in zip(params, before, strict=True))
    assert not any(w.is_deleted() for w in params)


def test_objects_of_the_user_are_not_changed():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.calls[...] += 1
            return self.inner(x)

    def train_step(model, batch):
        loss, grads = nnx.value_and_grad(lambda m: jnp.square(m(batch)).mean())(model)
        state = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, state, nnx.state(grads, nnx.Param)))
        return loss

    model = Model(nnx.Rngs(0))
    before = np.asarray(model.inner.kernel[...])
    found = jaxshard_magic.compare(train_step, "dp,fsdp", (model, jnp.ones((8, WIDTH))), mesh="cpu:8 data=8")
    assert [t.why for t in found.trials] == [None, None]
    assert np.array_equal(model.inner.kernel[...], before)
    assert int(model.calls[...]) == 0


def test_the_plain_step_is_compiled_once_for_all(monkeypatch):
    made = []
    compiled = check.PlainStep._compiled
    monkeypatch.setattr(check.PlainStep, "_compiled", lambda self, *given: made.append(self) or compiled(self, *given))
    found = jaxshard_magic.compare(step, "dp,fsdp,tp", arguments(), mesh="cpu:8 data=8", repeat=1)
    assert all(trial.report.check.passed for trial in found.trials)
    assert len(made) == 1


def test_a_candidate_that_fails_is_a_row_with_its_reason_and_the_others_go_on():
    params, _ = arguments()
    found = jaxshard_magic.compare(step, "dp,sp,tp", (params, jnp.ones((6, WIDTH))), mesh="cpu:8 data=8", repeat=1)
    uneven, positions, tensor = found.trials
    assert "6" in uneven.why
    assert uneven.report is None
    assert uneven.measured is None
    assert "positions" in positions.why
    assert tensor.why is None
    assert found.fastest is tensor


def test_what_the_step_itself_raises_is_raised():
    def broken(params, batch):
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        jaxshard_magic.compare(broken, "dp,fsdp", arguments(), mesh="cpu:8 data=8")
    with pytest.raises(ValueError, match="no such layer"):  # a word that is no strategy does not hide it
        jaxshard_magic.compare(broken, "dp,fsd", arguments(), mesh="cpu:8 data=8", keep_going=True)


def test_a_comparison_can_be_read_while_other_threads_add_to_it():
    trying = TrialRunner(step, [], TrialOptions("step"))
    ended = threading.Event()

    def add() -> None:
        while not ended.is_set():
            trying._trials = {}
            for i in range(300):
                trying._trials[i] = Trial("dp", {}, {}, str(i))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=add)
    thread.start()
    try:
        for _ in range(300):
            lines = [int(trial.line) for trial in trying.comparison.trials]
            assert lines == sorted(lines)
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)


def test_without_a_run_shapes_are_enough():
    shapes = jax.eval_shape(lambda: arguments())
    found = jaxshard_magic.compare(step, "dp,fsdp", shapes, mesh="cpu:8 data=8", run=False, on="v5e")
    assert [t.measured for t in found.trials] == [None, None]
    assert found.source == "predicted"
    assert all(t.predicted > 0 and t.peak > 0 for t in found.trials)


def test_the_line_of_a_trial_runs_it_again_and_its_name_stays_short(given):
    said = """--rule "b=P()" --no-donate --on v5p --name gpt"""
    cell = f"%%shard {{}}{STEP}train_step(state, batch)"
    found = given.run(cell.format(f"dp,fsdp --remat full --step train_step {said}"))
    line = f'dp --mesh "data=8" --remat full --step train_step {said}'
    assert found.trials[0].line == line
    assert f"    %%shard {line}" in found.to_text().splitlines()
    assert [name.text for name in trial_names(found).values()] == ["dp", "fsdp"]
    again = given.run(cell.format(line))
    first = found.trials[0].report
    assert (again.name, again.timing.on) == (first.name, first.timing.on) == ("gpt", "TPU v5p")
    assert again.timing.predicted_step_s == first.timing.predicted_step_s
    assert [leaf.spec for leaf in again.leaves] == [leaf.spec for leaf in first.leaves]


def test_a_line_names_the_chip_of_a_prediction_only_where_it_was_said(given):
    found = given.run(f"%%shard dp,fsdp{STEP}train_step(state, batch)")
    assert [trial.line for trial in found.trials] == ['dp --mesh "data=8"', 'fsdp --mesh "data=8"']


def test_from_python_a_line_has_what_the_call_has(given):
    shapes = jax.eval_shape(lambda: arguments())
    rules = {"w": P(None, "data")}
    (trial,) = jaxshard_magic.compare(step, "dp", shapes, mesh="cpu:8 data=8", run=False, rules=rules, on="v5p").trials
    assert trial.line == """dp --mesh "data=8" --rule "w=P(None, 'data')" --on v5p"""


def test_while_two_compile_at_once_it_is_told_how_many_are_done(monkeypatch):
    together, said = threading.Barrier(2), list[str]()

    def both(lowered):
        together.wait(60)
        return compile_lowered(lowered)

    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(COMPILES, both)
    jaxshard_magic.compare(step, "dp,fsdp", arguments(), mesh="cpu:8 data=8", run=False, say=said.append)
    first, second, third = said[:3]
    assert first == 'compiling dp --mesh "data=8", 0 of 2 done'
    assert second == 'compiling dp --mesh "data=8" and 1 more, 0 of 2 done'
    assert third.endswith("1 of 2 done")


def test_an_interrupt_keeps_what_is_done():
    seen = []

    def interrupt(comparison):
        seen.append(comparison)
        if any(trial.measured for trial in comparison.trials):
            raise KeyboardInterrupt

    found = jaxshard_magic.compare(step, "dp,fsdp,tp", arguments(), mesh="cpu:8 data=8", show=interrupt)
    assert [trial.measured is not None for trial in found.trials] == [True, False, False]
    assert all(trial.peak for trial in found.trials)
    assert found.notes == ("Interrupted: 1 of 3 have run.",)
    assert found.left == ()


def test_an_interrupt_while_compiling_leaves_the_rest(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # where there are many, all of them have begun

    def interrupt(_):
        raise KeyboardInterrupt

    params, batch = arguments()
    names = ["dp", "fsdp", "tp", "fsdp+tp", "pp", "pp+fsdp"]
    found = jaxshard_magic.compare(step, names, (params, batch), mesh="cpu:8 data=8", show=interrupt)
    assert 1 <= len(found.trials) < len(names)
    assert len(found.trials) + len(found.left) == len(names)


def test_an_interrupt_waits_for_no_compiler_and_no_user_code_runs_after_it(monkeypatch):
    let_go, ended, traced, begun = threading.Event(), threading.Event(), [], iter(range(9))

    def compiled(lowered):
        if next(begun):  # all but the first wait
            assert let_go.wait(60)
            ended.set()
        return compile_lowered(lowered)

    @jax.jit  # whose Python runs when it is traced, and then alone
    def traced_step(*args):
        traced.append(args)
        return step(*args)

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(COMPILES, compiled)
    found = jaxshard_magic.compare(
        traced_step, ["dp", "fsdp", "tp"], arguments(), mesh="cpu:8 data=8", show=interrupt, check=False
    )
    before = len(traced)
    assert not ended.is_set() and len(found.left) == 2
    let_go.set()
    assert ended.wait(60)
    time.sleep(0.5)
    assert len(traced) == before


def test_where_the_plain_step_has_no_room_the_rest_is_told_without_a_check():
    class Full:
        def __init__(self, *_):
            pass

        def against(self, *_):
            raise MemoryError("Unable to allocate 80 GiB")

    original, check_module = check.PlainStep, "jaxshard_magic.search.trials.PlainStep"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_module, Full)
        found = jaxshard_magic.compare(step, "dp,fsdp", arguments(), mesh="cpu:8 data=8", repeat=1)
    assert check.PlainStep is original
    assert [t.why for t in found.trials] == [None, None]
    assert [t.report.check for t in found.trials] == [None, None]
    assert "Not checked: the plain step does not run on one device: MemoryError" in found.notes[0]


def test_comparisons_grow_while_they_are_made():
    sizes, left = [], set()

    def seen(comparison):
        sizes.append((len(comparison.trials), sum(t.measured is not None for t in comparison.trials)))
        left.add(comparison.left)

    asked = candidates(Requests(["dp", "fsdp"], devices("data=8")))
    trying = TrialRunner(step, asked, TrialOptions("step", show=seen, repeat=1))
    trying(arguments(), {})
    assert sizes[-2:] == [(2, 1), (2, 2)]
    assert sizes[0][1] == 0
    assert left == {()}  # they are still to come


def test_a_cell_with_several_strategies_leaves_the_notebook_as_it_was(given, capsys):
    given.run("""
def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss
""")
    plain, state = given["train_step"], given["state"]
    found = given.run("%%shard dp,fsdp --name mine\nfor _ in range(3):\n    state, loss = train_step(state, batch)")
    assert [t.strategy for t in found.trials] == ["dp", "fsdp"]
    assert found.name == "mine"
    assert all(t.report.check.passed for t in found.trials)
    assert given["train_step"] is plain
    assert given["state"] is state
    assert "loss" not in given.shell.user_ns
    again = given.run("%shard")
    assert again is found


def test_a_cell_that_only_defines_the_step_is_compared_on_what_the_notebook_holds(given):
    found = given.run("""%%shard fsdp --mesh "data=2" --vary microbatches=none,4 --dry-run
def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss
""")
    assert [t.options.get("microbatches") for t in found.trials] == [None, 4]
    assert all(t.measured is None and t.peak for t in found.trials)
    assert type(given["train_step"]).__name__ == "function"


@pytest.mark.ci
def test_reports_of_the_past_are_compared_by_their_numbers(given):
    cell = """%%shard {}
def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss
"""
    one, other = (
        given.run(cell.format("dp -o kept")),
        given.run(cell.format('fsdp --mesh "data=2" --microbatches 2')),
    )
    found = given.run(f"%shard compare {other.number} {one.number}")
    assert [t.number for t in found.trials] == [other.number, one.number]
    assert [t.report for t in found.trials] == [other, one]
    assert found.trials[0].line == 'fsdp --mesh "data=2" --microbatches 2'
    assert [t.number for t in given.run("%shard compare").trials] == [one.number, other.number]
    assert [t.report for t in given.run(f"%shard compare kept {other.number}").trials] == [one, other]
    assert "no report 999999 in the history" in str(given.fails("%shard compare 999999"))
    assert "takes the numbers of reports, as %shard history lists them, or names of reports, not 'step'" in str(
        given.fails("%shard compare step")
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("dp,fsdp --check", "each is checked anyway"),
        ("dp,fsdp --donate", "each runs on copies"),
        ("dp,fsd", "--keep-going compares the others"),
        ("dp --vary microbatches", "--vary 'microbatches' has no '='"),
        ("dp --vary microbatches=1,x", "microbatches takes whole numbers from 1 on"),
        ("dp,fsdp --on v99", "v99"),
        ("dp --keep-going", "--keep-going is for a comparison"),
    ],
)
def test_a_line_that_can_not_be_compared_says_so_before_the_cell_runs(given, line, said):
    error = given.fails(f"%%shard {line}\nran = True\ndef train_step(state, batch):\n    return state")
    assert said in str(error)
    assert "ran" not in given.shell.user_ns
