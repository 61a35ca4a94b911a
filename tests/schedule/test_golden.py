"""The grids of `golden/`, one schedule a file, written from the papers' rules and figures and readable by eye.

A file is a schedule's text: its sizes in the first line, then what there is to see, then a line for each rank.
"""

import re
from pathlib import Path

import pytest

from jaxshard_magic.schedule import NAMES, Schedule, make, parse

FILES = sorted((Path(__file__).parent / "golden").glob("*.txt"))
HEAD = re.compile(r"# (\S+): (\d+) stages, (\d+) microbatches, (\d+) chunks")


def generated(text: str) -> Schedule:
    """The schedule of the name and sizes that the text begins with."""
    head = HEAD.match(text)
    assert head is not None, "the first line gives the name and the sizes, as a schedule prints them"
    name, stages, microbatches, chunks = head.groups()
    return make(name, stages=int(stages), microbatches=int(microbatches), chunks=int(chunks))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_generator_makes_the_grid_of_the_file(path):
    text = path.read_text(encoding="utf-8")
    head, *rest = text.splitlines()
    said = [line for line in rest if line.startswith("#")]
    assert said, "a comment says what there is to see, and where it comes from"
    grid = [line for line in rest if not line.startswith("#")]
    assert "\n".join([head, *grid, ""]) == str(generated(text))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_read_as_a_schedule_of_ones_own(path):
    text = path.read_text(encoding="utf-8")
    assert parse(text) == generated(text)


@pytest.mark.parametrize("name", [name for name, named in NAMES.items() if not named.uses_search])
def test_every_schedule_that_follows_a_rule_has_a_file(name):
    assert any(path.read_text(encoding="utf-8").startswith(f"# {name}: ") for path in FILES)
