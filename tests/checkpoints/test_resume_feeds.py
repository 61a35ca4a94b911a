"""A loop over a feed goes on at its place in the data, which is not loaded again."""

import numpy as np
import pytest
from support.resumed import CALLS, new_state, new_step, numbers, same

import jaxshard_magic
from jaxshard_magic import ShardError


class Loader:
    """Batches by their number; an iterator of it has a state. Remembers which it loaded."""

    def __init__(self, state=True):
        self.loaded, self.state = [], state

    def __iter__(self):
        return Place(self) if self.state else map(self.load, range(CALLS))

    def load(self, i):
        self.loaded.append(i)
        return np.random.default_rng(i).normal(size=(16, 16)).astype("f")


class Place:
    """Where an iteration over a loader is."""

    def __init__(self, loader):
        self.loader, self.at = loader, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == CALLS:
            raise StopIteration
        self.at += 1
        return self.loader.load(self.at - 1)

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def fed(folder=None, stop=None, looks=False, feeds=1, state=True, **saving):
    """The numbers after a loop over a feed, and which batches were loaded. `looks`: the loop drops some batches by
    what is in them; `feeds`: it has so many, one after the other."""
    step, at, losses, loader = new_step(), new_state(), [], Loader(state)
    keeper = step.checkpoint(folder, **saving) if folder is not None else None
    for _ in range(feeds):
        for batch in jaxshard_magic.feed(loader):
            if len(losses) == stop:
                keeper._store.close()  # as the end of the process does
                return None
            if looks and np.asarray(batch)[0, 0] > 0.5:
                continue
            at, metrics = step(at, batch)
            losses.append(metrics["loss"])
    if keeper is not None:
        keeper.end()
    return numbers(at), [float(x) for x in losses], loader.loaded


@pytest.mark.parametrize(
    ("state", "loaded"),
    [(True, [0, 8, 9, 10, 11, 12, 13]), (False, [*range(CALLS)])],
    ids=["a loader with a state", "batches counted"],
)
def test_a_feed_goes_on_at_its_place_in_the_data(tmp_path, state, loaded):
    whole = fed(state=state)
    fed(tmp_path, stop=9, every=4, state=state)
    again = fed(tmp_path, every=4, state=state, resume=True)
    assert same(again[:2], whole[:2])
    assert [i for i in again[2] if i not in (1, 2)] == [i for i in loaded if i not in (1, 2)], "two are taken ahead"


@pytest.mark.ci
def test_of_several_feeds_all_data_is_loaded_again(tmp_path):
    whole = fed(feeds=2)
    fed(tmp_path, feeds=2, stop=CALLS + 3, every=CALLS + 2)
    again = fed(tmp_path, feeds=2, every=CALLS + 2, resume=True)
    assert same(again[:2], whole[:2]) and again[2] == whole[2]


def test_a_loop_that_looks_into_its_batches_is_told_that_they_are_not_loaded(tmp_path):
    fed(tmp_path, looks=True, stop=6, every=4)
    with pytest.raises(ShardError, match="iterate without a feed") as raised:
        fed(tmp_path, looks=True, every=4, resume=True)
    assert "\n" not in str(raised.value)
