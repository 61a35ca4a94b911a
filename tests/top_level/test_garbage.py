"""Garbage collection is held off while a program is read, and never for longer."""

import gc
import threading

import pytest

from jaxshard_magic.program.gc_pause import gc_paused
from jaxshard_magic.temporary import run_in_context


@pytest.fixture(autouse=True)
def as_it_was():
    was = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was else gc.disable)()


def test_collection_goes_on_after_a_function_that_held_it_off():
    assert run_in_context(gc_paused)(gc.isenabled)() is False
    assert gc.isenabled()


def test_collection_goes_on_after_an_error():
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled()


def test_whoever_switched_collection_off_keeps_it_off():
    gc.disable()
    with gc_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_one_thread_that_ends_does_not_let_it_go_on_for_another():
    inside, leave = threading.Event(), threading.Event()

    def held():
        with gc_paused():
            inside.set()
            leave.wait(60)

    other = threading.Thread(target=held)
    other.start()
    inside.wait(60)
    with gc_paused():
        leave.set()
        other.join()
        assert not gc.isenabled()
    assert gc.isenabled()
