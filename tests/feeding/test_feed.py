"""Batches taken ahead of a loop: the same ones in the same order, on the devices, by a thread that ends."""

import gc
import json
import threading
import time
import traceback

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard_magic
from jaxshard_magic import ShardError, feed
from jaxshard_magic.step.feed_waits import waiting_matchers


def train_step(w, batch):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(w)
    return w - 0.1 * grads, loss


def batches(count, rows=8):
    draws = np.random.default_rng(0)
    return [{"y": draws.normal(size=(rows, 2)), "x": draws.normal(size=(rows, 4))} for _ in range(count)]


def threads():
    return [t for t in threading.enumerate() if t.name == "jaxshard_magic feed"]


def ended():
    """All threads of feeds end within some seconds."""
    gc.collect()
    until = time.monotonic() + 5
    while threads() and time.monotonic() < until:
        time.sleep(0.01)
    return not threads()


def trained(step, loop):
    w, losses = jnp.ones((4, 2)), []
    for batch in loop:
        w, loss = step(w, batch)
        losses.append(float(loss))
    return np.asarray(w), losses


def sharded(strategy="fsdp", mesh="data=8", **options):
    return jaxshard_magic.shard(train_step, strategy, mesh=mesh, **options)


@pytest.mark.parametrize(("strategy", "mesh"), [("dp", "data=8"), ("fsdp+tp", "data=4 model=2")])
def test_numbers_are_those_of_the_loop_without_and_one_program_runs(strategy, mesh):
    plain, fed = sharded(strategy, mesh), sharded(strategy, mesh)
    want, losses = trained(plain, batches(6))
    got, others = trained(fed, feed(batches(6)))
    assert np.array_equal(got, want) and others == losses
    assert fed.calls == 6 and len(fed.programs.entries) == 1 and not waiting_matchers


def test_later_batches_lie_as_the_step_has_them_and_dicts_keep_their_order():
    step, w = sharded(), jnp.ones((4, 2))
    for n, batch in enumerate(feed(batches(8))):
        assert n < 8 and list(batch) == ["y", "x"]
        w, _ = step(w, batch)
    assert n == 7 and batch["x"].sharding.spec == jax.P("data", None)
    assert batch["x"].dtype == jnp.float32


def test_a_step_that_has_run_already_is_found_too():
    step = sharded()
    trained(step, batches(2))
    for batch in feed(batches(6), step):
        step(jnp.ones((4, 2)), batch)
    assert isinstance(batch["x"], jax.Array) and step.feed_waits is not None


def test_a_loader_that_writes_each_batch_over_the_last_gives_the_same_batches():
    def loader():
        kept = {}
        buffer = np.zeros((8, 4))
        for n in range(6):
            buffer[:] = n
            kept["x"] = buffer
            yield kept

    step = jaxshard_magic.shard(lambda w, x: w + jnp.sum(x), "dp", mesh="data=8")
    seen = []
    for batch in feed(loader()):
        seen.append(float(np.asarray(batch["x"])[0, 0]))
        step(jnp.zeros(()), batch["x"])
    assert seen == [0, 1, 2, 3, 4, 5]


@pytest.mark.ci
def test_no_more_than_so_many_batches_are_taken_ahead():
    asked = []

    def endless():
        while True:
            asked.append(threading.get_ident())
            yield len(asked)

    for n, batch in enumerate(feed(endless(), ahead=3), 1):
        time.sleep(0.05)
        assert batch == n and len(asked) == n + 3
        if n == 4:
            break
    assert len(set(asked)) == 1 and asked[0] != threading.get_ident()
    assert ended()


def test_an_iterator_goes_on_where_the_loop_was_left_and_a_list_begins_anew():
    over, anew = feed(iter(range(10))), feed(list(range(10)))
    assert next(iter(over)) == 0 and next(iter(anew)) == 0
    assert list(over) == list(range(1, 10)) and list(over) == []
    assert list(anew) == list(range(10)) and len(anew) == 10
    with pytest.raises(TypeError):
        len(over)
    assert ended()


def test_what_the_loader_raises_is_raised_at_its_place_with_its_own_lines():
    def broken():
        yield 1
        yield 2
        raise OSError("disk")

    seen = []
    with pytest.raises(OSError, match="disk") as caught:
        for x in feed(broken()):
            seen.append(x)
    assert seen == [1, 2]
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "broken"
    assert all("ahead.py" not in frame.filename for frame in traceback.extract_tb(caught.value.__traceback__))
    assert ended()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_thread_ends_with_a_loop_that_raises(error):
    def loop():
        for x in feed(iter(int, 1)):
            raise error(x)

    with pytest.raises(error):
        loop()
    assert ended()


def test_two_loops_at_once_touch_the_loader_one_at_a_time():
    class Loader:
        inside = 0

        def __iter__(self):
            return Once(self)

    class Once:
        def __init__(self, of):
            self.of, self.n = of, 0

        def __iter__(self):
            return self

        def __next__(self):
            self.of.inside += 1
            time.sleep(0.002)
            assert self.of.inside == 1
            self.of.inside -= 1
            self.n += 1
            if self.n > 8:
                raise StopIteration
            return self.n

    both = feed(Loader())
    assert list(zip(both, both, strict=True)) == [(n, n) for n in range(1, 9)]


def test_a_smaller_last_batch_is_kept_padded_or_dropped_as_was_said():
    data = [*batches(4), *batches(1, rows=6)]
    want, losses = trained(jaxshard_magic.shard(train_step, "dp", mesh="data=1"), data)
    got, others = trained(sharded(pad=True), feed(data))
    assert np.allclose(got, want, atol=1e-6) and np.allclose(losses, others)
    assert len(list(feed(data))) == 5 and len(list(feed(data, drop_last=True))) == 4


class Stateful:
    def __init__(self):
        self.n = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        return self.n

    def get_state(self):
        return b"%d" % self.n

    def set_state(self, state):
        self.n = int(state)


@pytest.mark.parametrize(("made", "kind"), [(Stateful, "state"), (lambda: range(1, 99), "count")])
def test_the_position_is_that_of_the_loop_and_not_of_what_was_taken_ahead(made, kind):
    first = feed(made())
    for x in first:
        if x == 5:
            break
    position = json.loads(json.dumps(first.position()))
    assert position["kind"] == kind and position["batches"] == 5
    again = feed(made())
    again.go_to(position)
    loop = iter(again)
    assert [next(loop), next(loop)] == [6, 7] and again.position()["batches"] == 7


def test_a_grain_dataset_goes_on_at_the_same_element_and_each_host_has_its_part():
    parts = []
    for host in range(2):
        data = grain.MapDataset.range(40).shuffle(seed=3)[host::2].batch(4)
        first = feed(data.to_iter_dataset())
        loop = iter(first)
        seen = [next(loop), next(loop)]
        again = feed(data.to_iter_dataset())
        again.go_to(json.loads(json.dumps(first.position())))
        assert first.position()["kind"] == "grain"
        parts += np.concatenate([*seen, *again]).tolist()
    assert sorted(parts) == list(range(40))


class Counting:
    """Batches of which it is counted how many are loaded, as a list has them: each loop has all."""

    def __init__(self, count):
        self.count, self.loaded = count, 0

    def __iter__(self):
        for n in range(self.count):
            self.loaded += 1
            yield [n]


class Epochs(Counting):
    """The same, of which an iterator has a state."""

    def __iter__(self):
        return Within(self)


class Within(Stateful):
    def __init__(self, of):
        self.of, self.n = of, 0

    def __next__(self):
        if self.n == self.of.count:
            raise StopIteration
        self.n, self.of.loaded = self.n + 1, self.of.loaded + 1
        return [self.n - 1]


class Lists(Stateful):
    def __next__(self):
        return [super().__next__()]


def three_loops(of, at_first=lambda: None, left_at=None):
    """What each turn of three loops is given, and how far the feed has come then."""
    seen = []
    for _ in range(3):
        for n, batch in enumerate(of):
            if not seen:
                at_first()
            seen.append((batch.pop(), of.reached))  # the loop may change the batch
            if n == left_at:
                break
    return seen


@pytest.mark.parametrize("calls", [1, 2, 4, 6, 8, 11, 12])
@pytest.mark.parametrize(
    ("made", "left_at"),
    [
        (lambda: Counting(6), None),
        (lambda: Counting(6), 3),
        (lambda: Epochs(6), None),
        (lambda: Epochs(6), 3),
        (Lists, 3),
        (lambda: iter(Counting(99)), 3),
    ],
)
def test_a_loop_comes_to_a_position_without_loading_what_is_before(made, left_at, calls):
    first = three_loops(feed(made()), left_at=left_at)
    position = json.loads(json.dumps(first[calls - 1][1].to_json()))
    loader = made()
    again = feed(loader)
    seen = three_loops(again, lambda: again.skip_to(position), left_at)
    assert [batch for batch, _ in seen[:calls]] == [first[0][0]] * calls
    assert seen[calls:] == first[calls:] and seen[calls - 1][1] == first[calls - 1][1]
    if isinstance(loader, Counting):
        own = 0 if isinstance(loader, Epochs) else position["passes"][-1]  # of "count"
        ahead = 3 * (4 - len(position["passes"]))  # three at most where a loop begins or is left
        assert loader.loaded <= 3 + own + len(first) - calls + ahead


def test_a_step_knows_its_feed_and_a_loop_under_way_is_not_moved():
    step, of = sharded(), feed(batches(4))
    for n, batch in enumerate(of):
        step(jnp.ones((4, 2)), batch)
        assert step.feed_ref() is of
        if n == 1:
            with pytest.raises(ShardError, match="has had 2, and the position is behind 3"):
                of.skip_to({"kind": "count", "passes": [3], "state": None})
    del of
    gc.collect()
    assert step.feed_ref() is None


def test_the_report_has_the_share_of_time_that_the_step_waited_for_data():
    def slow():
        for batch in batches(12):
            time.sleep(0.03)
            yield batch

    step = sharded()
    trained(step, feed(slow()))
    timing = step.report().timing
    assert timing is not None and timing.data_share is not None and timing.data_share > 0.5
    fast = sharded()
    trained(fast, batches(4))
    assert fast.report().timing.data_share is None


def test_tensors_of_other_libraries_come_as_numpy_arrays():
    class Tensor:
        def __array__(self, dtype=None, copy=None):
            return np.ones((8, 4), np.float32)

        def __dlpack__(self, **_):
            raise AssertionError

    (x,) = feed([Tensor()])
    assert isinstance(x, np.ndarray)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: feed(3), "feed takes what a loop gets its batches from, not int"),
        (lambda: feed([], print), "takes a step that shard\\(\\) made, not builtin"),
        (lambda: feed([], ahead=0), "whole number from 1 on, not '0'"),
        (lambda: feed([]).go_to({"kind": "count"}), "go_to takes what position\\(\\) gave"),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(call, said):
    with pytest.raises(ShardError, match=said):
        call()
