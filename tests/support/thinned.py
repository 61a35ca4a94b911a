"""Rows of a matrix, some of which run every time while the others wait for a marker."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

CI, FULL = pytest.mark.ci, pytest.mark.full


def thinned(every: Iterable[Any], always: Collection[Any], mark: pytest.MarkDecorator = FULL) -> list:
    """The arguments of `pytest.mark.parametrize`: those of `always` without a marker, the others with `mark`."""
    every = list(every)
    assert all(row in every for row in always), "each of `always` is a row"
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=() if row in always else mark) for row in every
    ]
