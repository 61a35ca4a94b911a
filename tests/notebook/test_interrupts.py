"""A cell that is interrupted at any moment leaves a notebook in which the next one runs, and nothing else behind."""

import random
from pathlib import Path
from types import FrameType

import pytest
from interrupts import KINDS, Moment, faults, notebook

from jaxshard_magic import temporary

CHANGES = str(Path(temporary.__file__).parent)
FEW = {kind: KINDS[kind] for kind in ("plain", "--checkpoint", "--feed")}


def test_a_cell_interrupted_at_random_leaves_nothing_behind():
    assert faults(6, 3, FEW) == []


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 21))
def test_a_thousand_cells_interrupted_at_random_leave_nothing_behind(seed):
    assert faults(50, seed) == []


def changes(frame: FrameType) -> bool:
    """Whether a function runs to begin or end a change that lasts for a while."""
    caller: FrameType | None = frame
    while caller is not None and not caller.f_code.co_filename.startswith(CHANGES):
        caller = caller.f_back
    # The others run what stands inside of a change.
    return caller is not None and caller.f_code.co_name not in ("call", "run")


def interrupted_where_changes_are(kind: str, most: int, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong after interrupts at the lines that begin and end changes in a cell: of one of so many parts of
    them, at most so many, evenly chosen."""
    found: list[str] = []
    with notebook({kind: KINDS[kind]}) as opened:
        lines = [*opened.run(kind, changes).lines][part::parts]
        opened.after()
        assert len(lines) > 50 // parts
        for line in random.Random(0).sample(lines, min(most, len(lines))):
            found += opened.faults(kind, Moment(line=line))
    return found


OTHERS = ["--profile", "--feed", "--checkpoint", "--microbatches"]


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["plain", *OTHERS])
def test_cells_interrupted_where_changes_begin_and_end_leave_nothing_behind(kind):
    assert interrupted_where_changes_are(kind, 15) == []


@pytest.mark.full
@pytest.mark.parametrize("part", range(12))
@pytest.mark.parametrize("kind", ["plain", *OTHERS])
def test_a_cell_interrupted_at_any_change_of_the_process_leaves_nothing(kind, part):
    assert interrupted_where_changes_are(kind, 10_000, part, 12) == []
