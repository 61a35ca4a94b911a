"""Cells as people write them, in a real shell: the step is found and bound, wherever it stands, and the loop around it
runs as plain Python."""

import sys

import numpy as np
import pytest
from support.cells import GIVEN, LOOP, STEP, one_line

from jaxshard_magic.step import ShardedStep

BODY = STEP.split("\n", 2)[2]
UPDATE = f"@jax.jit\ndef update(state, batch):\n{BODY}"


def indented(text: str, by: int = 4) -> str:
    return "\n".join(" " * by + line if line.strip() else line for line in text.strip("\n").split("\n"))


def main(step: str, name: str, call: str = "main()") -> str:
    """A script: everything in one function, which prints the loss."""
    return f"""
def main(steps=3):
    state = {{"w": jnp.ones((16, 8)), "b": jnp.zeros(8)}}
{indented(step)}
    for i in range(steps):
        state, loss = {name}(state, batch)
        print(f"{{i}} {{loss:.6f}}")
    return state
{call}
"""


TRAINER = f"""
class Trainer:
    def __init__(self, state):
        self.state = state
        self.train_step = jax.jit(self._step)
    def _step(self, state, batch):
{indented(BODY)}
    def fit(self, n):
        for _ in range(n):
            self.state, self.loss = self.train_step(self.state, batch)
        return self.state
"""
STATIC = f"""
class Trainer:
    def __init__(self, state):
        self.state = state
    @functools.partial(jax.jit, static_argnums=0)
    def improve(self, state, batch):
{indented(BODY)}
    def fit(self, n):
        for _ in range(n):
            self.state, self.loss = self.improve(self.state, batch)
        return self.state
"""
CREATED = f"""
class Trainer:
    def __init__(self, state):
        self.state = state
        self.create_functions()
    def create_functions(self):
        def train_step(state, batch):
{indented(BODY, 8)}
        def eval_step(state, batch):
            return loss_fn(state, batch)
        self.train_step, self.eval_step = jax.jit(train_step), jax.jit(eval_step)
    def fit(self, n):
        for _ in range(n):
            self.state, self.loss = self.train_step(self.state, batch)
        return self.state
"""
FACTORY = f"""
def make_step(rate):
    @jax.jit
    def step(state, batch):
{indented(BODY, 4).replace("0.1", "rate")}
    return step
"""
NNX = """
from flax import nnx
model = nnx.Linear(16, 8, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
@nnx.jit
def nnx_step(model, batch):
    grads = nnx.grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(model)
    model.kernel[...] -= 0.1 * grads.kernel[...]
    model.bias[...] -= 0.1 * grads.bias[...]
"""
FIT = """
def fit(step, state, n):
    for _ in range(n):
        state, loss = step(state, batch)
    return state
"""
# By what is written: the cells before, the cell, what its step is called. `end` is the state after three steps.
CELLS = {
    "a jitted step in main": ("", main(UPDATE, "update", "end = main()"), "update"),
    "a step in main that nothing jits": ("", main(STEP, "train_step", "end = main()"), "train_step"),
    "a wrapped step in main": (
        STEP,
        main(
            "p_train_step = jax.jit(functools.partial(train_step), donate_argnums=0)",
            "p_train_step",
            "end = main()",
        ),
        "p_train_step",
    ),
    "a factory's step in main": (FACTORY, main("step = make_step(0.1)", "step", "end = main()"), "step"),
    "an imported main guard": (
        "",
        main(UPDATE, "update", "if __name__ == '__main__':\n    end = main(3)"),
        "update",
    ),
    "a jitted method": ("", STATIC + "end = Trainer(state).fit(3)", "Trainer.improve"),
    "what __init__ jits": (
        "",
        TRAINER + "trainer = Trainer(state)\nend = trainer.fit(3)",
        "Trainer.train_step",
    ),
    "what a method makes": (
        "",
        CREATED + "trainer = Trainer(state)\nend = trainer.fit(3)",
        "Trainer.train_step",
    ),
    "an object of an earlier cell": (
        TRAINER + "trainer = Trainer(state)",
        "end = trainer.fit(3)",
        "trainer.train_step",
    ),
    "a class of an earlier cell": (STATIC, "t = Trainer(state)\nend = t.fit(3)", "t.improve"),
    "a method called in a loop": (
        STATIC + "trainer = Trainer(state)",
        "end = state\nfor _ in range(3):\n    end, loss = trainer.improve(end, batch)",
        "trainer.improve",
    ),
    "a loop of an earlier cell": (
        UPDATE
        + "\ndef fit(state, n):\n    for _ in range(n):\n        state, loss = update(state, batch)\n    return state",
        "end = fit(state, 3)",
        "update",
    ),
    "a step handed to the loop": (
        FIT,
        UPDATE + "\nend = fit(update, state, 3)",
        "update",
    ),
    "a cached partial of an earlier cell": (
        NNX + "step = nnx.cached_partial(nnx_step, model)",
        "for _ in range(3):\n    step(batch)\nend = {'w': model.kernel[...], 'b': model.bias[...]}",
        "step",
    ),
    "a cached partial": (
        NNX,
        "step = nnx.cached_partial(nnx_step, model)\nfor _ in range(3):\n    step(batch)\n"
        "end = {'w': model.kernel[...], 'b': model.bias[...]}",
        "step",
    ),
    "a partial in jit": (
        STEP.replace("train_step(state, batch)", "_step(rate, state, batch)").replace("0.1", "rate"),
        "step = jax.jit(functools.partial(_step, 0.1))\nend = state\nwith jax.default_matmul_precision('highest'):\n"
        "    for _ in range(3):\n        end, loss = step(end, batch)",
        "step",
    ),
    "a lambda": (
        "",
        "step = lambda s, b: jax.tree.map(lambda p, g: p - 0.1 * g, s, jax.grad(loss_fn)(s, b))\nend = state\n"
        "for _ in range(3):\n    end = step(end, batch)",
        "step",
    ),
}


@pytest.fixture
def end(given):
    """The state after three plain steps."""
    given.run(STEP + "end = state\nfor _ in range(3):\n    end, loss = train_step(end, batch)\ndel train_step")
    return {name: np.asarray(value) for name, value in given["end"].items()}


FAST = (
    "a jitted step in main",
    "a wrapped step in main",
    "a jitted method",
    "what __init__ jits",
    "a class of an earlier cell",
    "a loop of an earlier cell",
    "a cached partial of an earlier cell",
    "a step handed to the loop",
)
ROWS = [pytest.param(*row, id=k, marks=() if k in FAST else pytest.mark.full) for k, row in CELLS.items()]


@pytest.mark.parametrize(("before", "cell", "name"), ROWS)
def test_it_is_found_and_trains(given, end, before, cell, name):
    given.run(before)
    report = given.run(f"%%shard dp\n{cell}")
    assert (report.name, report.timing.calls) == (name, 3)
    for leaf, expected in end.items():
        assert np.allclose(given["end"][leaf], expected, rtol=1e-5, atol=1e-6)


def test_the_loop_around_a_nested_step_prints_numbers(given, capsys):
    given.run("%%shard fsdp" + main(UPDATE, "update"))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
    assert [line[0] for line in lines] == ["0", "1", "2"]
    assert all(float(loss) > 0 for _, loss in lines)


def test_a_main_that_a_later_cell_calls_runs_sharded_there(given, end, capsys):
    assert given.run("%%shard fsdp --name nested" + main(UPDATE, "update", "")) is None
    assert capsys.readouterr().out == "update has not run yet: call main, then %shard shows the report.\n"
    given.run("end = main()")
    report = given.run("%shard")
    assert (report.name, report.strategy, report.timing.calls) == ("nested", "fsdp", 3)
    assert np.allclose(given["end"]["w"], end["w"], rtol=1e-5)


def test_a_main_of_a_cell_that_failed_runs_sharded_later(given):
    given.fails("%%shard dp" + main(UPDATE, "update", "1 / 0"))
    given.run("end = main()")
    assert len(given["end"]["w"].sharding.device_set) == 8


def test_a_class_of_a_cell_that_failed_has_its_sharded_method(given):
    given.fails("%%shard dp" + STATIC + "1 / 0")
    assert isinstance(given["Trainer"].improve, ShardedStep)


def test_a_nested_step_goes_by_its_own_name_and_with_that_of_what_is_around_it(given):
    two = main(UPDATE + "\n" + UPDATE.replace("update", "improve"), "improve")
    assert given.run("%%shard dp --step improve" + two).name == "improve"
    assert given.run("%%shard dp --step main.improve" + two).name == "improve"


def test_a_dry_run_of_a_nested_step_ends_the_cell_at_its_first_call(given):
    report = given.run("%%shard dp --dry-run" + main(UPDATE, "update") + "after = 1")
    assert report.timing.calls == 0
    assert "after" not in given.shell.user_ns
    assert "has not run yet" in str(given.fails("%%shard dp --dry-run" + main(UPDATE, "update", "")))


def test_nested_steps_and_methods_are_compared_and_chosen(given):
    found = given.run("%%shard --compare dp,fsdp --repeat 1" + main(UPDATE, "update"))
    assert [trial.report is not None for trial in found.trials] == [True, True]
    found = given.run("%%shard --compare dp,fsdp --dry-run" + STATIC + "Trainer(state).fit(1)")
    assert found.trials[0].report is not None


def test_a_step_of_a_module_that_its_own_loop_calls(given, end, tmp_path, monkeypatch):
    text = "import jax, jax.numpy as jnp\n" + GIVEN.split("\n\n")[-1] + UPDATE
    text += "\ndef fit(state, batch):" + indented(LOOP.replace("train_step", "update")) + "\n    return state\n"
    (tmp_path / "my_loops.py").write_text(text.replace("):    for", "):\n    for"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_loops", raising=False)
    given.run("from my_loops import fit")
    report = given.run("%%shard fsdp\nend = fit(state, batch)")
    assert (report.name, report.timing.calls) == ("update", 3)
    assert np.allclose(given["end"]["w"], end["w"], rtol=1e-5)


def test_a_step_inside_a_function_of_an_earlier_cell_is_one_line(given, capsys):
    given.run(main(UPDATE, "update", ""))
    said = one_line(given, capsys, "%%shard dp\nmain()")
    assert said.startswith("update is bound inside main, which this cell does not define: write %%shard above the cell")


def test_async_and_generator_steps_are_one_line_and_no_older_report(given, capsys):
    older = given.run("%%shard dp" + STEP + LOOP)
    for step, says in (
        (STEP.replace("def ", "async def "), "train_step is an async function"),
        (STEP.replace("return", "yield"), "train_step is a generator function"),
    ):
        assert says in one_line(given, capsys, "%%shard fsdp" + step + "\nx = train_step(state, batch)")
    assert given.run("%shard") == older


def test_a_function_that_holds_the_loop_itself_is_no_step(given, capsys):
    loop = """
def train(state, batches):
    for batch in batches:
        grads = jax.grad(loss_fn)(state, batch)
        state = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
    return state
state = train(state, [batch])
"""
    assert "train holds the loop over steps" in one_line(given, capsys, "%%shard dp" + loop)


def test_the_program_of_a_nested_step_is_refused_in_one_line(given, capsys):
    given.run("%%shard dp" + main(UPDATE, "update"))
    assert "main.update is inside main: move it out" in one_line(given, capsys, "%shard code")


def test_names_of_nested_steps_are_completed(given):
    from IPython.core.completer import provisionalcompleter

    given.shell.Completer.use_jedi = False
    cell = "%%shard dp --step upd\n" + main(UPDATE, "update")
    with provisionalcompleter():
        found = [each.text for each in given.shell.Completer.completions(cell, len("%%shard dp --step upd"))]
    assert "update" in found
