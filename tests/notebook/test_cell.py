"""Binding the sharded step in the plain one's place, and running the cell."""

import functools
import sys
import textwrap

import IPython
import pytest
from support.cells import made

from jaxshard_magic.errors import ShardError
from jaxshard_magic.notebook import cells


def shard(function):
    """Stands for `api.shard`: the same function, with a mark on its results."""

    @functools.wraps(function)
    def sharded(*args):
        return "sharded", function(*args)

    sharded.calls = 0
    return sharded


@pytest.fixture
def run(bare_shell):
    """Runs a cell as the magic does, around a step that marks what it returns; gives the namespace."""

    def run(source: str, name: str | None = None, make=shard):
        cell = cells.parse(bare_shell, textwrap.dedent(source))
        step = cells.find_step(cell.tree, bare_shell.user_ns, name)
        with cells.Binding(bare_shell.user_ns, step, make) as binding:
            cells.run(bare_shell, cell, binding)
        assert binding.bound
        return bare_shell.user_ns

    return run


@pytest.mark.parametrize(
    "source",
    [
        "def train_step(x): return x\nout = train_step(1)",
        "train_step = lambda x: x\nout = train_step(1)",
        "train_step = int\ndef train_step(x): return x\nout = train_step(1)",
        "if True:\n    def train_step(x): return x\n    out = train_step(1)",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    def train_step(x): return x\nout = train_step(1)",
        "with open('/dev/null'):\n    train_step = lambda x: x\n    out = train_step(1)",
        "train_step = lambda x: x\nif False:\n    train_step = None\nout = train_step(1)",
        "for train_step in [lambda x: x]:\n    pass\nout = train_step(1)",
        "def train_step(x): return x\ndef fit(x):\n    return train_step(x)\nout = fit(1)",
        "from operator import pos as train_step\nout = train_step(1)",
    ],
)
def test_calls_below_the_binding_reach_the_sharded_step(run, source):
    assert run(source)["out"] == ("sharded", 1)


def test_the_last_binding_is_the_one_that_is_sharded(run):
    source = """
    def train_step(x): return x
    train_step = (lambda inner: lambda x: ("outer", inner(x)))(train_step)
    out = train_step(1)
    """
    assert run(source)["out"] == ("sharded", ("outer", 1))


def test_functions_of_earlier_cells_see_the_sharded_step(run, bare_shell):
    bare_shell.run_cell("def train_step(x): return x\ndef fit(x): return train_step(x)")
    assert run("out = fit(1)")["out"] == ("sharded", 1)


def test_a_method_of_an_object_made_in_the_cell_is_sharded_on_that_object_alone(run):
    source = """
    class Trainer:
        def step(self, x): return x
    trainer, other = Trainer(), Trainer()
    out, plain = trainer.step(1), other.step(1)
    """
    namespace = run(source, "trainer.step")
    assert (namespace["out"], namespace["plain"]) == (("sharded", 1), 1)


def test_a_cell_that_raises_leaves_its_step_bound(run, bare_shell):
    with pytest.raises(ZeroDivisionError):
        run("def train_step(x): return x\nbefore = train_step(1)\n1 / 0\nafter = 1")
    assert bare_shell.user_ns["train_step"](1) == ("sharded", 1)
    assert bare_shell.user_ns["before"] == ("sharded", 1)
    assert "after" not in bare_shell.user_ns


def test_a_step_that_can_not_be_sharded_leaves_an_object_as_it_was(run, bare_shell):
    def refused(function):
        def sharded(x):
            raise ShardError("it can't be")

        sharded.calls = 0
        return sharded

    bare_shell.run_cell("class Trainer:\n    def step(self, x): return x\ntrainer = Trainer()")
    with pytest.raises(ShardError):
        run("trainer.step(1)", "trainer.step", refused)
    assert vars(bare_shell.user_ns["trainer"]) == {}


def test_no_name_is_left_behind(run, bare_shell):
    before = set(bare_shell.user_ns)
    assert set(run("def train_step(x): return x")) - before == {"train_step"}
    with pytest.raises(ZeroDivisionError):
        run("def train_step(x): return x\n1 / 0")
    assert set(bare_shell.user_ns) - before == {"train_step"}


def test_a_step_that_is_no_function_is_refused(run):
    with pytest.raises(ShardError, match="train_step is no function but a int"):
        run("train_step = 3")
    with pytest.raises(ShardError, match="train_step is no function but the class train_step"):
        run("class train_step: pass")


def test_an_attribute_that_is_not_there_gets_the_nearest_one(run, bare_shell):
    bare_shell.run_cell("class Trainer:\n    def step(self, x): return x\ntrainer = Trainer()")
    with pytest.raises(ShardError, match=r"a Trainer has no attribute 'stp'. Did you mean 'step'\?"):
        run("trainer.step(1)", "trainer.stp")


def test_an_object_that_takes_no_attributes_says_what_to_do(run, bare_shell):
    bare_shell.run_cell(
        "from typing import NamedTuple\n"
        "class Trainer(NamedTuple):\n    n: int\n    def step(self): return 1\n"
        "trainer = Trainer(1)"
    )
    with pytest.raises(ShardError, match=r"bind it to a name first: train_step = trainer\.step"):
        run("trainer.step()", "trainer.step")


def test_the_last_expression_is_displayed_unless_it_ends_with_a_semicolon(run, capsys):
    run("def train_step(x): return x\n'shown'")
    assert "'shown'" in capsys.readouterr().out
    run("def train_step(x): return x\n'hidden';")
    assert "hidden" not in capsys.readouterr().out


def test_lines_count_as_in_the_editor_with_the_magic_as_line_1(run):
    with pytest.raises(ZeroDivisionError) as raised:
        run("\n\ndef train_step(x):\n    return x\n\n1 / 0\n")
    frame = raised.traceback[-1]
    assert frame.lineno + 1 == 7
    assert str(frame.statement) == "1 / 0"


@pytest.mark.skipif(
    IPython.version_info < (8,) and sys.version_info >= (3, 12),
    reason="IPython 7 transforms no such line itself",
)
def test_what_ipython_transforms_is_transformed(run, capsys):
    namespace = run("def train_step(x): return x\nlines = !echo hello\n%precision 3")
    assert list(namespace["lines"]) == ["hello"]


@pytest.mark.parametrize("source", ["await x", "async with x: pass", "if x:\n    async for y in z: pass"])
def test_await_outside_a_function_is_refused_with_its_line(bare_shell, source):
    with pytest.raises(ShardError, match=r"^cell \[\d+\], line \d: a %%shard cell can't await at its top level"):
        cells.parse(bare_shell, "\n" + source)


def test_await_inside_a_function_is_fine(bare_shell):
    cells.parse(bare_shell, "async def f():\n    await x\n")


def test_a_traceback_has_no_frames_of_ours_above_the_users(run):
    with pytest.raises(ZeroDivisionError) as raised:
        run("def train_step(x): return 1 / x\ntrain_step(0)")
    names, trace = [], cells.user_traceback(raised.value.__traceback__)
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert names[-3:] == ["<module>", "sharded", "train_step"]
    assert "jaxshard_magic" not in str([sys.modules[__name__]]) and "run" not in names[-3:]


def test_arguments_are_taken_by_name_and_defaults_fill_in():
    def train_step(state, batch, lr=0.1, *rest, flag, scale=2, **more):
        pass

    given = {"state": 1, "batch": 2, "flag": 3, "scale": 4, "other": 5}
    assert cells.from_namespace(train_step, given, "train_step") == ((1, 2), {"flag": 3, "scale": 4})


def test_what_comes_behind_a_default_that_is_left_out_is_given_by_name():
    def train_step(state, lr=0.1, batch=None, *, flag=True):
        pass

    assert cells.from_namespace(train_step, {"state": 1, "batch": 2}, "s") == ((1,), {"batch": 2})


@pytest.mark.parametrize(
    ("positions", "names", "wanted"),
    [
        (2, (), ((1, 2), {})),
        (1, ("batch",), ((1,), {"batch": 2})),
        (3, ("flag",), ((1, 2, 0.1), {"flag": 3})),  # of a default that was given nothing else is known
    ],
)
def test_another_call_is_given_what_the_last_one_was_in_the_same_way(positions, names, wanted):
    def train_step(state, batch, lr=0.1, *rest, flag=False):
        pass

    given = {"state": 1, "batch": 2, "flag": 3}
    assert cells.like_before(train_step, given, "train_step", positions, names) == wanted


def test_a_call_that_can_not_be_made_again_is_told():
    def train_step(state, *rest):
        pass

    with pytest.raises(cells.MissingArguments) as raised:
        cells.like_before(train_step, {}, "train_step", 2, ("more",))
    assert str(raised.value) == (
        "train_step has run, and its arguments were not kept: the notebook has no state and no *rest and no more. "
        "%%shard --profile above its cell keeps them."
    )


def test_arguments_that_the_notebook_lacks_are_named():
    with pytest.raises(cells.MissingArguments) as raised:
        cells.from_namespace(lambda state, batch, key: 0, {"state": 1}, "train_step")
    assert raised.value.names == ["batch", "key"]
    assert str(raised.value) == (
        "train_step has not run yet: the notebook has no batch and no key. Call it, then %shard shows the report."
    )


def test_an_iterator_is_not_consumed():
    batches = iter([1, 2])
    with pytest.raises(cells.MissingArguments, match="batch is an iterator"):
        cells.from_namespace(lambda batch: 0, {"batch": batches}, "train_step")
    assert list(batches) == [1, 2]


def test_annotations_that_are_partition_specs_are_found_under_any_jit():
    import jax
    from jax.sharding import PartitionSpec as P

    source = 'def train_step(state: dict, batch: P("data"), key: "P(None)" = None) -> P("out"): pass'
    train_step = made(source, P=P)["train_step"]
    wanted = {"batch": P("data"), "key": P(None)}
    for step in (train_step, jax.jit(train_step), functools.partial(jax.jit(train_step), 1)):
        assert cells.annotated_specs(step) == wanted
