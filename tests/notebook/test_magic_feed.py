"""`%%shard --feed` in a notebook: the cell's loop as it stands, with its batches taken ahead."""

import numpy as np
import pytest
from support.cells import STEP

LOOP = """
import threading
import numpy as np
at = []
def batches():
    for n in range(6):
        at.append(threading.current_thread().name)
        yield {"x": np.full((8, 16), n / 8, np.float32), "y": np.ones((8, 8), np.float32)}
state = {"w": jnp.ones((16, 8)), "b": jnp.zeros(8)}
losses = []
for n, x in HEADER:
    state, loss = train_step(state, x)
    losses.append(float(loss))
"""


@pytest.mark.parametrize("header", ["enumerate(batches())", "zip(range(6), batches())"])
def test_the_loop_has_the_same_numbers_and_a_thread_of_its_own_loads(given, header):
    given.run("%%shard fsdp" + STEP + LOOP.replace("HEADER", header))
    want, own = given["losses"], set(given["at"])
    report = given.run("%%shard fsdp --feed" + STEP + LOOP.replace("HEADER", header))
    assert given["losses"] == want and set(given["at"]) == {"jaxshard_magic feed"} != own
    assert report.timing.calls == 6 and report.timing.data_share is not None
    assert np.isfinite(want).all()


def test_a_cell_without_a_loop_says_what_to_write(given):
    said = given.fails("%%shard fsdp --feed" + STEP + "\nstate, loss = train_step(state, batch)")
    assert "--feed: no for loop of the cell calls train_step" in str(said)
