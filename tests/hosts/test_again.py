"""Notebooks that ran without hosts go on with them behind the step's cell, and run again: with the same numbers."""

import re
from collections.abc import Iterator

import pytest
from support.hosts_cells import NOTEBOOKS, step_of
from support.hosts_notebook import Hosts, unopened
from support.thinned import thinned

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """A shell with the extension; a test opens and closes its hosts."""
    with unopened(tmp_path_factory.mktemp("hosts")) as found:
        found.cell("%config ShardSession.options_limit = 0\n%config ShardSession.progress = False")
        yield found


def printed(hosts: Hosts, cells: list[str]) -> list[list[str]]:
    """The first line of numbers that each of the cells prints, word by word."""
    said = [hosts.cell(cell).stdout.splitlines() for cell in cells]
    return [next((line.split() for line in lines if line[:1].isdigit()), []) for lines in said]


def assert_alike(one: list[list[str]], two: list[list[str]]) -> None:
    for a, b in zip(one, two, strict=True):
        numbers = [[float(x) for x in words if re.fullmatch(r"[\d.e-]+", x)] for words in (a, b)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4) and len(a) == len(b)


@pytest.mark.parametrize("name", thinned(NOTEBOOKS, ("nnx",)))
def test_a_notebook_goes_on_on_hosts_behind_its_step_and_all_its_cells_run_again(hosts: Hosts, name: str):
    cells = NOTEBOOKS[name]
    middle = step_of(cells) + 1
    hosts.cell("%mesh data=4;")
    first = printed(hosts, cells)
    assert all(first[middle - 1 :])
    hosts.cell("%mesh hosts:2 data=4;")
    went_on = printed(hosts, cells[middle:])
    assert_alike(printed(hosts, cells), first)
    hosts.cell("%mesh --close")
    hosts.cell("%mesh data=4;")
    assert_alike(printed(hosts, cells[middle:]), went_on)
