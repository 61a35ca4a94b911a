"""A loop that was ended goes on where it was: the numbers, the state and the data order of one never stopped."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cells import one_line
from support.resumed import CALLS, new_state, new_step, numbers, same, train_step, trained

from jaxshard_magic import ShardError
from jaxshard_magic.report import Report
from jaxshard_magic.step import save_schedule


@pytest.mark.parametrize("donate", [None, pytest.param(True, marks=pytest.mark.ci)], ids=["kept", "donated"])
def test_a_loop_that_was_ended_twice_gives_the_numbers_of_one_never_ended(tmp_path, donate):
    whole = trained(new_step(donate=donate))
    trained(new_step(donate=donate), stop=6, folder=tmp_path, every=4)
    trained(new_step(donate=donate), stop=9, folder=tmp_path, every=4, resume=True)
    step = new_step(donate=donate)
    assert same(trained(step, folder=tmp_path, every=4, resume=True), whole)
    assert step.calls == CALLS - 8, "those before are not computed"
    report = step.report()
    assert report.checkpoints.resumed == 8 and [save.step for save in report.checkpoints.saves] == [12, 14]
    assert (report.checkpoints.copy > 0) is bool(donate)
    assert report.metrics is None and Report.from_json(report.to_json()) == report
    assert "Resumed at step 8" in report.to_text() and "2 saves took the loop" in report.to_text()


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        pytest.param("fsdp+tp", "data=2 model=2", marks=pytest.mark.full),
        pytest.param("dp", "data=2", marks=pytest.mark.full),
        pytest.param("pp", "pipe=2", marks=pytest.mark.ci),
        ("dp", "data=1"),
    ],
)
def test_resumed_on_another_mesh_it_is_as_if_never_ended(tmp_path, strategy, mesh):
    whole = trained(new_step())
    trained(new_step(), stop=6, folder=tmp_path, every=5)
    options = {"microbatches": 2} if strategy == "pp" else {}
    got = trained(new_step(strategy, mesh, **options), folder=tmp_path, every=5, resume=True)
    for mine, theirs in zip(got[0], whole[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
    np.testing.assert_allclose(got[1], whole[1], rtol=1e-5)


@pytest.mark.ci
def test_a_run_that_had_ended_is_not_computed_again(tmp_path):
    whole = trained(new_step(), folder=tmp_path)
    step = new_step()
    assert same(trained(step, folder=tmp_path, resume=True), whole) and step.calls == 0


@pytest.mark.ci
def test_a_state_saved_by_hand_after_a_resumed_loop_has_all_calls_behind_it(tmp_path):
    trained(new_step(), stop=9, folder=tmp_path / "loop", every=4)
    step = new_step()
    trained(step, folder=tmp_path / "loop", every=4, resume=True)
    assert step.save(tmp_path / "own", {"w": jnp.ones(8)}) == CALLS


@pytest.mark.ci
def test_calls_whose_state_is_dropped_are_no_part_of_the_way(tmp_path):
    """One to warm up, and an evaluation after every third call with the same step, at which saves are due."""

    def run(step, stop=None, **saving):
        state, rng, losses = new_state(), np.random.default_rng(3), []
        keeper = step.checkpoint(tmp_path, every=4, **saving) if saving else None
        step(state, np.ones((16, 16), "f"))
        for i in range(9):
            if i == stop:
                keeper.end()
                return None
            state, metrics = step(state, rng.normal(size=(16, 16)).astype("f"))
            losses.append(float(metrics["loss"]))
            if i % 3 == 2:
                _, metrics = step(state, np.ones((16, 16), "f"))
                losses.append(float(metrics["loss"]))
        if keeper is not None:
            keeper.end()
        return numbers(state), losses

    whole = run(new_step())
    for stop in (3, 6, 7):  # 3 and 6: right after an evaluation
        run(new_step(), stop, resume=True)
    assert same(run(new_step(), resume=True), whole)
    assert same(run(new_step(), resume=True), whole), "its last call was one of these"


def test_what_the_loop_itself_does_to_the_state_between_calls_is_saved_too(tmp_path):
    def step(w, x):
        return w - x, jnp.sum(w)

    def run(step, stop=None, **saving):
        w, rng = jnp.ones(64), np.random.default_rng(0)
        keeper = step.checkpoint(tmp_path, every=2, **saving) if saving else None
        for i in range(8):
            if i == stop:
                keeper._store.close()
                return None
            w, _ = step(w, rng.normal(size=64).astype("f"))
            w = w * 0.5
        return np.asarray(w)

    whole = run(new_step(step=step))
    run(new_step(step=step), 5, resume=True)
    assert np.array_equal(run(new_step(step=step), resume=True), whole)


def test_large_outputs_that_are_no_state_are_those_of_the_last_call(tmp_path, capsys):
    def step(w, x):
        return w - jnp.mean(x), x @ jnp.ones((16, 16))

    def run(step, **saving):
        w, keeper = jnp.ones(64), step.checkpoint(tmp_path, **saving)
        outs = []
        for i in range(3):
            w, out = step(w, np.full((16, 16), float(i), "f"))
            outs.append(float(out[0, 0]))
        keeper.end()
        return outs

    assert run(new_step(step=step)) == [0, 16, 32]
    assert run(new_step(step=step), resume=True) == [0, 0, 32]
    assert "return.1: too large to be kept for every step" in capsys.readouterr().out


@pytest.mark.ci
def test_nnx_objects_are_left_alone_until_the_call_that_was_saved(tmp_path):
    from flax import nnx

    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def run(step, stop=None, **saving):
        model = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.Dropout(0.1, rngs=nnx.Rngs(1)))
        optimizer, rng = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), np.random.default_rng(0)
        before = np.asarray(model.layers[0].kernel[...])
        keeper = step.checkpoint(tmp_path, every=3, **saving) if saving else None
        losses = []
        for i in range(8):
            if i == stop:
                keeper._store.close()
                return None
            losses.append(float(step(model, optimizer, rng.normal(size=(16, 16)).astype("f"))))
            if step.skipping:
                assert np.array_equal(model.layers[0].kernel[...], before)
        if keeper is not None:
            keeper.end()
        return numbers(nnx.state((model, optimizer))), losses

    whole = run(new_step(step=step))
    run(new_step(step=step), 5, resume=True)
    assert same(run(new_step(step=step), resume=True), whole)


def halved(w):
    return w / 2, jnp.sum(w)


def test_a_folder_with_checkpoints_is_not_written_into_unless_asked(tmp_path):
    w, step = jnp.ones(64), new_step(step=halved)
    with step.checkpoint(tmp_path, every=2):
        for _ in range(3):
            w, _ = step(w)
    with pytest.raises(ShardError, match=r"it has checkpoints up to 3 of a run before: --resume goes on"):
        step.checkpoint(tmp_path)


def test_an_interval_of_time_begins_with_each_save_and_ends_with_a_call(tmp_path, monkeypatch):
    now, w, step = 0.0, jnp.ones(64), new_step(step=halved)
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(save_schedule, "time", clock)
    with step.checkpoint(tmp_path, every="10m", keep=None):
        for _ in range(7):
            now += 250
            w, _ = step(w)
    # Call 3 begins at 750 s, call 6 at 1,500 s: they save what calls 2 and 5 gave.
    assert [save.step for save in step.report().checkpoints.saves] == [2, 5, 7]


@pytest.mark.ci
def test_a_folder_without_checkpoints_begins_the_loop(tmp_path, capsys):
    step = new_step()
    trained(step, folder=tmp_path / "new", resume=True)
    said = capsys.readouterr().out
    assert "no checkpoint in" in said and "Did you mean" not in said and step.calls == CALLS
    new_step().checkpoint(tmp_path / "nwe", resume=True)
    assert "Did you mean 'new'?" in capsys.readouterr().out


@pytest.mark.ci
def test_a_loop_shorter_than_the_checkpoint_says_so(tmp_path):
    trained(new_step(), folder=tmp_path)
    keeper = (step := new_step()).checkpoint(tmp_path, resume=True)
    step(new_state(), np.ones((16, 16), "f"))
    assert "the loop ended after 1 calls, before step 14 of the checkpoint" in keeper.end()


@pytest.mark.ci
def test_a_checkpoint_of_another_state_is_told_before_it_is_read(tmp_path):
    trained(new_step(), folder=tmp_path)

    def other(state, batch):
        return train_step((({"up": state["up"], "down": state["down"]}), state["opt"], state["key"]), batch)

    params, opt, key = new_state()
    step = new_step(step=other)
    step.checkpoint(tmp_path, resume=True)
    with pytest.raises(
        ShardError,
        match=r"has no state\.opt\.0\.count\. Did you mean 'state\.1",
    ):
        step({**params, "opt": opt, "key": key}, np.ones((16, 16), "f"))
    step = new_step()
    step.checkpoint(tmp_path, resume=True)
    half = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    with pytest.raises(ShardError, match=r"bfloat16\[.*\] here; go on with the dtype that was saved$"):
        step((half, opt, key), np.ones((16, 16), "f"))  # there is no --cast with --resume


def test_the_state_of_a_loops_checkpoint_is_loaded_by_hand_too(tmp_path):
    """Its names begin with those of the step's arguments."""
    whole = trained(new_step(), folder=tmp_path / "one", calls=3)
    step = new_step("fsdp", "data=4")
    step.prepare(new_state(), np.ones((16, 16), "f"))
    back = step.restore(tmp_path / "one", like=new_state())
    assert all(map(np.array_equal, numbers(back), whole[0]))
    assert jax.tree.structure(back) == jax.tree.structure(new_state())


def test_a_folder_of_other_things_is_told_before_anything_runs(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ShardError, match=r"has other things in it"):
        new_step().checkpoint(tmp_path)


@pytest.mark.parametrize("every", ["x", "0", "10d", "-3"])
def test_an_interval_that_is_none_is_told(tmp_path, every):
    with pytest.raises(ShardError, match=r"--every takes a number of steps, or a time such as 90s, 10m or 2h"):
        new_step().checkpoint(tmp_path, every=every)


STEP = """
import numpy as np, jax, jax.numpy as jnp
def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - 1) ** 2))(w)
    return w - 0.1 * grad, loss
"""
CELL = """
w, rng, losses, best = np.ones((16, 16), "f"), np.random.default_rng(0), [], 1e9
for i in range(12):
    if i == stop:
        raise KeyboardInterrupt
    w, loss = train_step(w, rng.normal(size=(16, 16)).astype("f"))
    losses.append(float(loss))
    best = min(best, losses[-1])
"""


def test_a_cell_that_was_stopped_saves_once_more_and_goes_on(notebook, tmp_path):
    notebook.run(STEP + "stop = None")
    notebook.run("%%shard fsdp" + CELL)
    whole = np.asarray(notebook["w"]), notebook["losses"], notebook["best"]
    notebook.run(STEP + "stop = 7")
    line = f"%%shard fsdp --checkpoint {tmp_path}/run --every 3"
    error = notebook.fails(line + CELL)
    assert str(error).endswith(f"; saved at step 7 in {tmp_path}/run")
    notebook.run(STEP + "stop = None")
    report = notebook.run(line + " --resume" + CELL)
    assert np.array_equal(notebook["w"], whole[0]) and (notebook["losses"], notebook["best"]) == whole[1:]
    assert notebook["train_step"].calls == 5 and report.checkpoints.resumed == 7
    assert notebook["train_step"].watched.resumed == 7, "what the line of progress says"
    loss = report.metrics["loss"]
    assert loss.count == 12 and loss.first == pytest.approx(whole[1][0], rel=1e-5), "the curve is whole"


@pytest.mark.ci
def test_a_cell_whose_steps_were_all_done_is_not_said_to_be_compiled_only(notebook, tmp_path):
    notebook.run(STEP + "stop = None")
    line = f"%%shard fsdp --checkpoint {tmp_path}/run --resume"
    notebook.run(line + CELL)
    notebook.run(STEP)
    report = notebook.run(line + CELL)
    assert "Not run" not in report.to_text() and "Resumed at step 12" in report.to_text()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("fsdp --resume", "--resume is of --checkpoint"),
        ("fsdp --every 3", "--every is of --checkpoint"),
        ("fsdp --keep 3", "--keep is of --checkpoint"),
        ("fsdp --checkpoint a --dry-run", "--dry-run runs none"),
        ("fsdp,dp --checkpoint a", "in a comparison none trains"),
        ("auto --checkpoint a", "under auto the steps of many are tried"),
        ("fsdp --checkpoint a --every never", "--every takes a number of steps"),
    ],
)
def test_a_line_that_can_save_nothing_is_told(notebook, capsys, line, said):
    notebook.run(STEP + "stop = None")
    assert said in one_line(notebook, capsys, f"%%shard {line}" + CELL)
