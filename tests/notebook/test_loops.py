"""Loops of a cell say how many steps they will make, and run as they would without that."""

import ast
import itertools
import pickle
import textwrap
from collections.abc import Iterator
from types import CodeType
from typing import Any

import numpy as np
import pytest
from support.cells import LOOP, STEP, close

from jaxshard_magic.notebook import shard_cell
from jaxshard_magic.notebook.cells import StepLocation
from jaxshard_magic.notebook.cells.injected_calls import InjectedCalls, PassThrough
from jaxshard_magic.notebook.cells.loops import LoopLengths, track_loops


class tqdm:
    """As tqdm is: it has a length where what it shows has one."""

    def __init__(self, of: Any, total: int | None = None):
        self.of, self.total = of, total

    def __iter__(self) -> Iterator[Any]:
        return iter(self.of)

    def __len__(self) -> int:
        return self.total if self.total is not None else len(self.of)


class Cell:
    """Runs code whose calls of `train_step` are counted; `totals` are those known at each of them."""

    def __init__(self, **namespace: Any):
        self.lengths, self.totals = LoopLengths(), []
        self.namespace = {
            "train_step": self.step,
            "tqdm": tqdm,
            "np": np,
            "itertools": itertools,
            **namespace,
        }

    def step(self, *_: Any) -> None:
        self.totals.append(self.lengths.expected_total())

    def run(self, code: str, path: str = "train_step") -> list[int | None]:
        tree = ast.parse(textwrap.dedent(code))
        constants = InjectedCalls()
        track_loops(tree, "<cell>", StepLocation(path, in_cell=True), self.namespace, self.lengths, constants)
        with self.lengths.counting(lambda: len(self.totals)):
            exec(constants.insert_callables(compile(tree, "<cell>", "exec")), self.namespace)
        return self.totals


FLAT = {
    "a range": "range(3)",
    "a list": "['a', 'b', 'c']",
    "a dict's items": "{1: 2, 3: 4, 5: 6}.items()",
    "an array": "np.ones((3, 2))",
    "an iterator over a list": "iter([1, 2, 3])",
    "something reversed": "reversed(range(3))",
    "a list of a generator": "list(x for x in range(3))",
    "enumerate": "enumerate([1, 2, 3], start=1)",
    "zip, to the shortest": "zip(range(5), 'abc', itertools.count())",
    "map": "map(abs, range(3))",
    "islice of what has no end": "itertools.islice(itertools.count(), 3)",
    "tqdm": "tqdm(range(3))",
    "tqdm with a total": "tqdm((x for x in range(3)), total=3)",
    "all of it": "enumerate(tqdm(zip(range(3), itertools.repeat(1))))",
    "repeat": "itertools.repeat(None, 3)",
}


@pytest.mark.parametrize("iterable", FLAT.values(), ids=FLAT)
def test_a_loop_over(iterable):
    assert Cell().run(f"for x in {iterable}:\n    train_step(x)") == [None, 3, 3]


UNKNOWN = {
    "a generator": "for x in (x for x in range(2)): train_step()",
    "a while loop": "i = 0\nwhile i < 2:\n    train_step()\n    i += 1",
    "loops inside a while loop": "i = 0\nwhile i < 2:\n    for x in range(1): train_step()\n    i += 1",
    "steps under a condition": "for x in range(4):\n    if x % 2: train_step()",
    "a comprehension that leaves out": "[train_step() for x in range(4) if x % 2]",
    "no loop": "train_step()\ntrain_step()",
}


@pytest.mark.parametrize("code", UNKNOWN.values(), ids=UNKNOWN)
def test_nothing_is_claimed_of(code):
    assert Cell().run(code) == [None, None]


SHAPES = {
    "epochs of batches": ("for e in range(2):\n  for b in range(2): train_step()", [None, 4, 4, 4]),
    "three levels": ("for a in 'ab':\n  for b in 'ab':\n    for c in 'ab': train_step()", [None] + [8] * 7),
    "two steps in one pass": ("for x in range(2):\n  train_step()\n  train_step()", [None, None, 4, 4]),
    "one step either way": ("for x in 'ab':\n  if x: train_step(1)\n  else: train_step(2)", [None, 2]),
    "a comprehension": ("losses = [train_step() for x in range(2)]", [None, 2]),
    "a comprehension of two loops": ("[train_step() for x in range(2) for y in range(3)]", [None] + [6] * 5),
    "one loop after the other": (
        "for x in 'ab': train_step()\nfor x in 'cd': train_step()",
        [None, 2, None, 4],
    ),
    "a step before and in each epoch": (
        "train_step()\nfor e in 'ab':\n  train_step()\n  for b in 'ab': train_step()",
        [None, None, None, 7, 7, 7, 7],
    ),
    "a function with the loop": ("def fit():\n  for x in 'ab': train_step()\nfit()", [None, 2]),
    "a function with the inner loop": (
        "def epoch():\n  for x in 'ab': train_step()\nfor e in range(2): epoch()",
        [None, 4, 4, 4],
    ),
    "a function with the step": ("def go():\n  train_step()\nfor x in 'ab': go()", [None, 2]),
    "a method with the step": (
        "class T:\n  def fit(self):\n    for x in 'ab': self.go()\n  def go(self): train_step()\nT().fit()",
        [None, 2],
    ),
    "other loops inside": ("for x in 'ab':\n  train_step()\n  for y in range(9): abs(y)", [None, 2]),
}


@pytest.mark.parametrize(("code", "totals"), SHAPES.values(), ids=SHAPES)
def test_the_total_of(code, totals):
    assert Cell().run(code) == totals


def test_epochs_of_unknown_length_are_taken_to_be_as_long_as_the_last():
    code = "for e in range(3):\n  for b in (b for b in range(2)): train_step()"
    assert Cell().run(code) == [None, None, 6, 6, 6, 6]


def test_a_break_is_learnt_from():
    code = "for e in range(3):\n  for b in range(10):\n    train_step()\n    if b: break"
    assert Cell().run(code) == [None, 30, 6, 6, 6, 6]


def test_a_loop_under_another_is_known_by_where_it_was_called_from():
    cell = Cell()
    cell.run("def epoch():\n  for x in 'ab': train_step()")
    assert cell.run("for e in range(2): epoch()") == [None, 4, 4, 4]
    del cell.totals[:]
    assert cell.run("epoch()\nepoch()") == [None, 2, None, 4]


def test_the_length_of_a_loop_that_hides_its_steps_is_known_after_a_pass():
    cell = Cell()
    exec("def epoch():\n  for x in 'ab': train_step()", cell.namespace)
    cell.namespace["epoch"].__module__ = "__main__"
    assert cell.run("for e in range(2): epoch()") == [None, None, 4, 4]


def test_steps_of_an_object_are_known_inside_it_as_its_own():
    cell = Cell()
    cell.namespace["trainer"] = type("Trainer", (), {"step": lambda self: cell.step()})()
    assert cell.run("for x in 'ab': trainer.step()", "trainer.step") == [None, 2]


class Loader:
    """Counts what is asked of it."""

    def __init__(self, error: BaseException | None = None):
        self.iterated, self.error = 0, error

    def __iter__(self) -> Iterator[int]:
        self.iterated += 1
        return iter(range(2))

    def __len__(self) -> int:
        if self.error:
            raise self.error
        return 2


def test_iterables_are_iterated_once_and_are_what_the_cell_made():
    loader = Loader()
    cell = Cell(loader=loader, same=lambda x: assert_is(x, loader))
    assert cell.run("for x in loader: train_step()") == [None, 2]
    assert loader.iterated == 1
    cell.run("for x in same(loader): train_step()")
    assert loader.iterated == 2


def assert_is(x, y):
    assert x is y
    return x


@pytest.mark.parametrize("error", [TypeError("unsized"), NotImplementedError(), ValueError(), RuntimeError()])
def test_a_length_that_can_not_be_had_is_not_known(error):
    assert Cell(loader=Loader(error)).run("for x in loader: train_step()") == [None, None]


def test_a_generator_is_not_run_ahead():
    drawn: list[str] = []

    def batches():
        for i in range(2):
            drawn.append(f"batch {i}")
            yield i

    cell = Cell(batches=batches, note=drawn.append)
    cell.run("for b in enumerate(batches()):\n  note('step')\n  train_step()")
    assert drawn == ["batch 0", "step", "batch 1", "step"]


@pytest.mark.parametrize("iterable", ["5", "zip(5)", "undefined", "Broken()"])
def test_an_error_is_the_one_it_would_be_with_the_same_lines(iterable):
    class Broken:
        def __iter__(self):
            raise KeyError("inside")

    code = f"def fit():\n  for x in enumerate(\n      {iterable}\n  ):\n    train_step()\nfit()"

    def lines(run) -> tuple[str, list[int]]:
        with pytest.raises((TypeError, NameError, KeyError)) as caught:
            run()
        return repr(caught.value), [entry.lineno + 1 for entry in caught.traceback[1:] if "<" in str(entry.path)]

    cell = Cell(Broken=Broken)
    plain = lines(lambda: exec(compile(code, "<cell>", "exec"), cell.namespace))
    assert lines(lambda: cell.run(code)) == plain


def constants(code: CodeType) -> Iterator[Any]:
    for value in code.co_consts:
        yield from constants(value) if isinstance(value, CodeType) else [value]


def test_a_function_can_be_sent_to_another_process():
    cell = Cell()
    cell.run("def fit():\n  for x in enumerate('ab'): train_step()")
    ours = [c for c in constants(cell.namespace["fit"].__code__) if isinstance(c, PassThrough)]
    assert len(ours) == 2
    for through in ours:
        assert pickle.loads(pickle.dumps(through))(cell) is cell


@pytest.fixture
def watched(given, monkeypatch):
    """A notebook somebody looks at, so that its cells are followed."""
    given.shell.user_ns["drawn"] = drawn = []
    monkeypatch.setattr(shard_cell, "line_for", lambda shell: lambda line, share=None: drawn.append(line))
    return given


def test_a_function_that_outlives_its_cell_trains_on(watched, trained):
    watched.run("%%shard fsdp" + STEP + "def fit(state):" + LOOP.replace("\n", "\n    ") + "\n    return state")
    watched.run("state = fit(state)")
    assert close(watched["state"], trained)


def test_the_next_cell_knows_the_loops_of_a_function_that_outlived_its_own(watched):
    lengths = watched.shell.magics_manager.registry["ShardMagics"].cell_magic.loop_lengths
    watched.shell.user_ns["total"] = lambda: totals.append(lengths.expected_total())
    totals: list[int | None] = []
    loop = LOOP.replace("\n", "\n    ") + "\n        total()"
    watched.run("%%shard fsdp" + STEP + "def fit(state):" + loop + "\n    return state")
    watched.run("state = fit(state)")
    assert totals == [None] * 3
    watched.run("%%shard dp\nfor _ in range(2): state = fit(state)")
    assert totals[3:] == [None] + [6] * 5


def test_no_name_is_left_and_none_is_lost(watched):
    before = set(watched.shell.user_ns)
    watched.run("%%shard fsdp" + STEP + LOOP)
    watched.fails("%%shard fsdp" + STEP + LOOP + "1 / 0")
    assert set(watched.shell.user_ns) - before <= {"train_step", "loss", "_", "_i3", "_3", "_i4", "_4"}


def test_an_error_in_the_loop_shows_the_cell_and_its_line(watched, capsys):
    watched.fails("%%shard fsdp" + STEP + LOOP + "    if loss > 0: raise KeyError('here')")
    shown = capsys.readouterr().out
    assert "KeyError: 'here'" in shown
    assert "----> 8     if loss > 0" in shown
    assert "jaxshard_magic" not in shown
