"""`%%shard --feed` in a notebook: the cell's loop as it stands, with its batches taken ahead."""

import threading

import numpy as np
import pytest
from cells import STEP

LOOP = """
import threading
from jaxshard_magic.step import Entry
at = []
def batches():
    for n in range(6):
        at.append(threading.current_thread().name)
        yield jnp.full((16, 64), n / 8)
losses, kinds = [], []
for n, x in HEADER:
    state, loss = train_step(state, x)
    losses.append(float(loss))
"""


@pytest.mark.parametrize("header", ["enumerate(batches())", "zip(range(6), batches())"])
def test_the_loop_has_the_same_numbers_and_a_thread_of_its_own_loads(given, header):
    before = given["state"]
    given.run("%%shard fsdp" + STEP + LOOP.replace("HEADER", header))
    want, own = given["losses"], set(given["at"])
    given["state"] = before
    report = given.run("%%shard fsdp --feed" + STEP + LOOP.replace("HEADER", header))
    assert given["losses"] == want and set(given["at"]) == {"jaxshard_magic feed"} != own
    assert report.timing.calls == 6 and report.timing.data_share is not None
    assert np.isfinite(want).all()


def test_a_cell_without_a_loop_says_what_to_write(given):
    said = given.fails("%%shard fsdp --feed" + STEP + "\nstate, loss = train_step(state, batch)")
    assert "--feed: no for loop of the cell calls train_step" in str(said)
    assert threading.main_thread().is_alive()
