"""A cell that is interrupted at any moment leaves a notebook in which the next one runs, and nothing else behind."""

import random
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import pytest
from interrupts import KINDS, Moment, faults, notebook

from jaxshard_magic import temporary

CHANGES = str(Path(temporary.__file__).parent)
FEW = {kind: KINDS[kind] for kind in ("plain", "--checkpoint", "--feed")}


def test_a_cell_interrupted_at_random_leaves_nothing_behind():
    assert faults(15, 3, FEW) == []


@pytest.mark.full
def test_a_thousand_cells_interrupted_at_random_leave_nothing_behind():
    assert faults(1000, 1) == []


def changes(frame: FrameType) -> bool:
    """Whether a function runs to begin or end a change that lasts for a while."""
    caller: FrameType | None = frame
    while caller is not None and not caller.f_code.co_filename.startswith(CHANGES):
        caller = caller.f_back
    # The others run what stands inside of a change.
    return caller is not None and caller.f_code.co_name not in ("call", "run")


def interrupted_at_each_line(kinds: Mapping[str, str], most: int) -> list[str]:
    """What is wrong after interrupts at the lines that begin and end changes in cells, at most so many of each cell,
    evenly chosen."""
    found: list[str] = []
    with notebook(kinds) as opened:
        for kind in kinds:
            lines = [*opened.run(kind, changes).lines]
            opened.after()
            assert len(lines) > 50
            chosen = random.Random(0).sample(lines, min(most, len(lines)))
            for line in chosen:
                found += opened.faults(kind, Moment(line=line))
    return found


def test_a_cell_interrupted_where_changes_begin_and_end_leaves_nothing_behind():
    assert interrupted_at_each_line({"plain": KINDS["plain"]}, 15) == []


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["plain", "--profile", "--feed", "--checkpoint", "--microbatches"])
def test_a_cell_interrupted_at_every_line_that_changes_the_process_leaves_nothing_behind(kind):
    assert interrupted_at_each_line({kind: KINDS[kind]}, 10_000) == []
