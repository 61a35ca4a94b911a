"""The name that a cell binds is its own step, wherever it is looked up, and stays so."""

import textwrap

import pytest
from support.cells import LOOP, STEP, one_line

from jaxshard_magic.step import ShardedStep

HELPERS = """
def fit(state, n):
    for _ in range(n): state, loss = train_step(state, batch)
    return state
def each(state, n):
    for _ in range(n):
        state, loss = train_step(state, batch)
        yield state
class Fit:
    def __init__(self): self.callback = lambda state: train_step(state, batch)[0]
    def __call__(self, state): return fit(state, 3)
    step = staticmethod(lambda state: train_step(state, batch)[0])
    @property
    def once(self): return train_step(state, batch)[0]
fitting = Fit()
later = functools.partial(fit, n=3)
start = state
"""
CALLS = [
    "state = fit(start, 3)",
    "for state in each(start, 3): pass",
    "state = fitting(start)",
    "state = fitting.callback(start)",
    "state = Fit.step(start)",
    "state = fitting.once",
    "state = later(start)",
    "state = [f(start, 3) for f in [fit]][0]",
    "exec('state = fit(start, 3)')",
]


@pytest.mark.parametrize("call", CALLS)
def test_a_helper_of_an_earlier_cell_finds_the_step_of_the_cell_that_runs(given, call):
    given.run(HELPERS)
    for factor in (0.1, 0.2):
        given.run("%%shard dp" + STEP.replace("0.1", str(factor)) + call)
        assert given["train_step"].calls >= 1
        assert f"p - {factor} * g" in given["train_step"].cell[1]
        assert len(given["state"]["w"].sharding.device_set) == 8


def test_a_step_of_another_name_is_the_cells_too(given):
    given.run(HELPERS.replace("train_step", "improve"))
    for factor in (0.1, 0.2):
        given.run("%%shard dp" + STEP.replace("train_step", "improve").replace("0.1", str(factor)) + CALLS[0])
        assert given["improve"].calls == 3 and str(factor) in given["improve"].cell[1]


def test_a_step_that_is_bound_unseen_is_sharded_from_there_on(given, tmp_path):
    script = tmp_path / "steps.py"
    for factor, bind in ((0.2, f"%run -i {script}"), (0.3, f"exec(open({str(script)!r}).read())")):
        script.write_text(STEP + f"train_step.factor = {factor}")
        given.run(STEP)
        given.run(f"%%shard dp --step train_step\n{bind}{LOOP}")
        assert given["train_step"].calls == 3
        assert given["train_step"].__wrapped__.factor == factor
    assert given.run("%shard").timing.calls == 3


@pytest.mark.parametrize("magic", ["%%time", "%%capture out", "%%timeit -n 1"])
def test_another_magic_below_the_line_is_one_line_and_above_it_is_none(given, capsys, magic):
    given.run(STEP)
    before = given["train_step"]
    name = magic.split()[0]
    said = one_line(given, capsys, f"%%shard dp --step train_step\n\n{magic}" + STEP + LOOP)
    assert said.startswith(f"{name} below %%shard takes the rest of the cell as text") and f"write {name} above" in said
    assert given["train_step"] is before
    if name != "%%timeit":
        given.run(f"{magic}\n%%shard dp" + STEP + LOOP)
        assert given["train_step"].calls == 3


def test_after_an_error_of_its_cell_a_step_stays_sharded_also_before_it_ran(given):
    given.run("start = state")
    given.fails("%%shard fsdp" + STEP + "1 / 0" + LOOP)
    assert isinstance(given["train_step"], ShardedStep) and given["train_step"].calls == 0
    assert "has not run yet" in str(given.fails("%shard"))
    given.run(LOOP)
    assert given.run("%shard").timing.calls == 3
    given.fails("%%shard dp" + STEP + LOOP.replace("train_step(state, batch)", "train_step(state)"))
    assert isinstance(given["train_step"], ShardedStep)


def test_a_step_that_can_not_be_sharded_is_plain_again(given):
    given.fails("%%shard dp --mesh data=7" + STEP + LOOP)
    assert not isinstance(given.shell.user_ns.get("train_step"), ShardedStep)
    given.fails("%%shard dp --spec batch.x=P('rows')" + STEP + LOOP)
    assert not isinstance(given["train_step"], ShardedStep)


def test_a_step_that_a_function_of_the_cell_binds_as_global_is_the_cells(given):
    given.run("%%shard dp\ndef make():\n    global train_step\n" + textwrap.indent(STEP, "    ") + "make()" + LOOP)
    assert isinstance(given["train_step"], ShardedStep) and given["train_step"].calls == 3


def test_a_step_that_an_object_is_given_later_is_told_by_the_class_that_makes_it(given, capsys):
    made = textwrap.indent(STEP, " " * 8) + "        self.train_step = jax.jit(train_step)"
    given.run(f"""
class Trainer:
    def __init__(self): self.train_step = None
    def setup(self):{made}
trainer = Trainer()
""")
    said = one_line(given, capsys, "%%shard dp\ntrainer.setup()" + LOOP.replace("train_step", "trainer.train_step"))
    assert "train_step is bound inside Trainer" in said
