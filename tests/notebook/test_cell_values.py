"""Values that no cell gives and a program writes down: those that have a text, and those that have none."""

import enum
import functools
import math
import os
import textwrap
from collections import OrderedDict

import numpy as np
import pytest

from jaxshard_magic.notebook import cells as notebook_cells


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "x = 3"),
        (-0.25, "x = -0.25"),
        (1e-05, "x = 1e-05"),
        (True, "x = True"),
        (None, "x = None"),
        ("it's\n", 'x = "it\'s\\n"'),
        (math, "import math as x"),
        (os.path, f"import {os.path.__name__} as x"),
        (textwrap.dedent, "from textwrap import dedent as x"),
        (OrderedDict, "from collections import OrderedDict as x"),
    ],
)
def test_a_value_that_python_can_write_is_written(value: object, text: str):
    assert notebook_cells.as_source("x", value) == text
    names: dict[str, object] = {}
    exec(text, names)
    assert names["x"] == value


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(3),
        [1, 2],
        object(),
        lambda: 1,
        "a".join,
        functools.partial(print),
        math.inf,
        math.nan,
        np.float64(0.5),
        enum.IntEnum("Size", "SMALL")(1),
    ],
)
def test_a_value_that_has_no_such_form_is_not_written(value: object):
    assert notebook_cells.as_source("x", value) is None


def test_a_function_that_its_module_no_longer_has_is_not_written():
    def dedent(text: str) -> str:
        return text

    dedent.__module__, dedent.__qualname__ = "textwrap", "dedent"
    assert notebook_cells.as_source("x", dedent) is None
