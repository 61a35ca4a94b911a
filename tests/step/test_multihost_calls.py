"""Calls on several hosts: how often their values are compared."""

from types import SimpleNamespace

import pytest

from jaxshard_magic.step import multihost_calls
from jaxshard_magic.step.multihost_calls import MultihostCalls


class Program:
    """A program that places nothing."""

    def place_on_hosts(self, inputs, leaves, own_outputs):
        return inputs


@pytest.fixture
def compared(monkeypatch):
    programs = []
    monkeypatch.setattr(multihost_calls, "_check_equal_values", lambda program, leaves: programs.append(program))
    monkeypatch.setattr(MultihostCalls, "cell_number", 1)
    return programs


def call(hosts, *programs):
    for program in programs:
        hosts.place_inputs(program, (), (), None)


def test_programs_called_in_turn_are_each_compared_ever_more_rarely(compared):
    hosts, train, evaluate = MultihostCalls(SimpleNamespace(data="same"), 2), Program(), Program()
    call(hosts, *[train, evaluate] * 17)
    # Before calls 1, 2, 3, 5, 9 and 17: after 0, 1, 2, 4, 8 and 16.
    assert (compared.count(train), compared.count(evaluate)) == (6, 6)


def test_the_first_calls_of_a_new_cell_are_compared_again(compared, monkeypatch):
    hosts, train = MultihostCalls(SimpleNamespace(data="same"), 2), Program()
    call(hosts, *[train] * 10)
    before = len(compared)
    monkeypatch.setattr(MultihostCalls, "cell_number", 2)
    call(hosts, train)
    assert len(compared) == before + 1
