"""Functions run other code for a while, wherever they are bound, and their own again afterwards."""

import ast
import builtins
import types
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest

from jaxshard_magic.codegen.latest_call import swap_code

FILE = "<cell of a test>"
MARK = "mark_of_a_test"


def ran(source: str) -> dict[str, Any]:
    """The names of a cell that ran."""
    names: dict[str, Any] = {}
    exec(compile(source, FILE, "exec"), names)
    return names


def instead(
    source: str, *changes: tuple[str, str], given: Mapping[str, Any] | None = None, file: str = FILE
) -> AbstractContextManager[None]:
    """While it is open, functions of `source` run its text with the changes in it."""
    other = source
    for old, new in changes:
        assert old in other
        other = other.replace(old, new)
    return swap_code({file: (ast.parse(source), ast.parse(other))}, given or {})


ADD = "def add(x):\n    return x + 1\n"
TWO = ("x + 1", "x + 2")


def test_a_function_runs_the_other_code_meanwhile_and_its_own_again():
    add = ran(ADD)["add"]
    own = add.__code__
    with instead(ADD, TWO):
        assert add(1) == 3
    assert add(1) == 2
    assert add.__code__ is own


def test_an_exception_passes_and_the_function_runs_its_own_again():
    add = ran(ADD)["add"]
    with pytest.raises(RuntimeError, match="stop"), instead(ADD, TWO, given={MARK: None}):
        raise RuntimeError("stop")
    assert add(1) == 2
    assert not hasattr(builtins, MARK)


def test_the_other_code_may_fail_and_the_function_runs_its_own_again():
    add = ran(ADD)["add"]
    with pytest.raises(ZeroDivisionError), instead(ADD, ("x + 1", "x / 0")):
        add(1)
    assert add(1) == 2


def test_nothing_of_the_cell_runs_again():
    source = "ran = []\nran.append(1)\n" + ADD
    names = ran(source)
    with instead(source, TWO):
        assert names["add"](1) == 3
    assert names["ran"] == [1]


def test_names_that_are_given_are_known_meanwhile_and_then_no_longer():
    add = ran(ADD)["add"]
    with instead(ADD, ("x + 1", f"{MARK}(x)"), given={MARK: lambda x: 10 * x}):
        assert add(2) == 20
    assert not hasattr(builtins, MARK)


def test_a_name_of_pythons_own_is_refused_before_anything_changes():
    add = ran(ADD)["add"]
    with (
        pytest.raises(ValueError, match="len is a name of Python's own"),
        instead(ADD, TWO, given={MARK: 1, "len": 1}),
    ):
        pytest.fail("it was not refused")
    assert add(1) == 2 and not hasattr(builtins, MARK) and len("ab") == 2


def test_a_function_bound_elsewhere_and_under_another_name_runs_the_other_code():
    kept = {"model": [ran(ADD)["add"]]}
    with instead(ADD, TWO):
        assert kept["model"][0](1) == 3
    assert kept["model"][0](1) == 2


def test_a_closure_keeps_what_it_closes_over():
    source = "def make(n):\n    def add(x):\n        return x + n\n    return add\n"
    make = ran(source)["make"]
    one, ten = make(1), make(10)
    with instead(source, ("x + n", "x - n")):
        assert (one(5), ten(5)) == (4, -5)
        assert make(2)(5) == 3, "one made meanwhile runs the other code"
    assert (one(5), ten(5), make(2)(5)) == (6, 15, 7)


def test_a_function_made_meanwhile_is_of_the_other_code_for_good():
    """It has no code of its own to go back to."""
    source = "def make(n):\n    def add(x):\n        return x + n\n    return add\n"
    make = ran(source)["make"]
    with instead(source, ("x + n", "x - n")):
        made = make(2)
    assert made(5) == 3


def test_methods_of_objects_and_of_their_class_run_the_other_code():
    source = """
class Model:
    def __init__(self, w): self.w = w
    def __call__(self, x): return self.inner(x) + 1
    def inner(self, x): return self.w * x
    @staticmethod
    def fixed(x): return x + 1
    @classmethod
    def named(cls): return cls.__name__
    @property
    def weight(self): return self.w
"""
    model = ran(source)["Model"](3)
    changes = [("self.w * x", "self.w * x * 10"), ("fixed(x): return x + 1", "fixed(x): return x + 2")]
    changes += [
        ("cls.__name__", "cls.__name__ + '!'"),
        ("weight(self): return self.w", "weight(self): return -self.w"),
    ]
    with instead(source, *changes):
        assert (model(2), model.fixed(1), model.named(), model.weight) == (61, 3, "Model!", -3)
    assert (model(2), model.fixed(1), model.named(), model.weight) == (7, 2, "Model", 3)


def test_a_method_that_calls_super_runs_the_other_code():
    source = """
class Base:
    def f(self, x): return x
class Model(Base):
    def f(self, x): return super().f(x) + 1
"""
    model = ran(source)["Model"]()
    with instead(source, ("super().f(x) + 1", "super().f(x) + 2")):
        assert model.f(1) == 3
    assert model.f(1) == 2


def test_two_functions_of_one_name_run_each_the_code_at_its_own_place():
    source = "def f(x):\n    return x + 1\ng = f\ndef f(x):\n    return x * 3\n"
    names = ran(source)
    with instead(source, ("x + 1", "x + 10"), ("x * 3", "x * 30")):
        assert (names["g"](1), names["f"](1)) == (11, 30)
    assert (names["g"](1), names["f"](1)) == (2, 3)


def test_methods_of_one_name_in_two_classes_are_told_apart():
    source = "class A:\n    def f(self): return 1\nclass B:\n    def f(self): return 2\n"
    names = ran(source)
    a, b = names["A"](), names["B"]()
    with instead(source, ("return 1", "return 10")):
        assert (a.f(), b.f()) == (10, 2)
    assert (a.f(), b.f()) == (1, 2)


def test_a_decorated_function_runs_the_other_code_below_its_decorator():
    source = """
import functools
def twice(f):
    @functools.wraps(f)
    def run(x):
        return 2 * f(x)
    return run
@twice
def add(x):
    return x + 1
"""
    add = ran(source)["add"]
    with instead(source, TWO):
        assert add(1) == 6
    assert add(1) == 4


def test_defaults_annotations_and_attributes_stay_the_functions_own():
    source = "def f(x: int, n=[7], *, k=1):\n    return x + n[0] + k\n"
    f = ran(source)["f"]
    f.note = "kept"
    with instead(source, ("x + n[0] + k", "x - n[0] - k")):
        assert f(10) == 2 and f.note == "kept" and f.__annotations__ == {"x": int}
    assert f(10) == 18


def test_lambdas_on_lines_of_their_own_run_the_other_code():
    source = "f = lambda x: x + 1\ng = lambda x: x * 3\n"
    names = ran(source)
    with instead(source, ("x + 1", "x + 10")):
        assert (names["f"](1), names["g"](1)) == (11, 3)
    assert names["f"](1) == 2


def test_lambdas_on_one_line_are_not_told_apart_and_stay_as_they_are():
    source = "f, g = lambda x: x + 1, lambda x: x * 3\n"
    names = ran(source)
    with instead(source, ("x + 1", "x + 10"), ("x * 3", "x * 30")):
        assert (names["f"](1), names["g"](1)) == (2, 3)


def test_generators_run_the_other_code():
    source = "def count(n):\n    for i in range(n):\n        yield i + 1\n"
    count = ran(source)["count"]
    with instead(source, ("i + 1", "i + 2")):
        assert list(count(2)) == [2, 3]
    assert list(count(2)) == [1, 2]


def test_functions_of_other_files_are_left_alone():
    add = ran(ADD)["add"]
    with instead(ADD, TWO, file="<another cell>"):
        assert add(1) == 2


def test_a_function_that_closes_over_other_names_in_the_other_text_stays_as_it_is():
    source = "def make(n, m):\n    def add(x):\n        return x + n\n    return add\n"
    add = ran(source)["make"](1, 2)
    with instead(source, ("x + n", "x + n + m")):
        assert add(1) == 2


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No test leaves a name behind."""
    before = set(vars(builtins))
    yield
    assert set(vars(builtins)) == before
    assert isinstance(len, types.BuiltinFunctionType)
