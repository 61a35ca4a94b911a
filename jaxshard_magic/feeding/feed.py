"""`feed`: a loop's batches, taken ahead in a thread and put on the devices in the step's own sharding."""

import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import ShardError, quoted
from ..step import ShardedStep
from .ahead import Ahead, Source
from .batches import as_numpy, mapped, rows
from .places import Places
from .position import Position, kind_of, read


class Feed:
    """A loop's batches, `feed` makes it. Iterate over it as over what it was made of: each loop is a pass over that,
    and where that is an iterator each goes on where the last one was.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        step: ShardedStep | None = None,
        *,
        ahead: int = 2,
        drop_last: bool = False,
        convert: bool = True,
    ):
        self.iterable = iterable
        self._ahead = ahead
        self._places = Places(step, weakref.ref(self))
        source_rows = _Rows() if drop_last else None
        places = self._places

        def ready(batch: Any) -> Any:
            return places.placed(mapped(as_numpy, batch) if convert else batch)

        wanted = _all if source_rows is None else source_rows.wanted
        self._source = Source(iterable, threading.Lock(), wanted, ready)
        self._own = Ahead(self._source, ahead) if isinstance(iterable, Iterator) else None
        self._passes: list[int] = []
        self._state: Any = None
        self._begin: tuple[Any, int] | None = None
        self._first: _Kept | None = None  # batch, until the second is asked for
        self._until: Position | None = None  # batches before are not loaded

    def __iter__(self) -> "Passing":
        state, skip = self._begin or (None, 0)
        if self._begin is None and (self._own is None or not self._passes):
            self._passes.append(0)
        self._begin = None
        if self._own is None:
            return Passing(self, Ahead(self._source, self._ahead, state, skip))
        if state is not None or skip:
            self._own.go_to(state, skip)
        return Passing(self, self._own)

    def __len__(self) -> int:
        """The length of what it was made of, those that `drop_last` leaves out too. Raises TypeError where that has
        none."""
        return len(self.iterable)  # pyright: ignore[reportArgumentType]

    @property
    def wait_share(self) -> float | None:
        """The share of the time from the second batch on that the devices had nothing to do for want of a batch; None
        before the third."""
        return self._places.waits.share

    def position(self) -> dict[str, Any]:
        """How far the loop has come, as data that JSON takes: batches that are taken ahead don't count.

        `kind` says what brings the loader there again: "grain" and "state", the `state` that its iterator had behind
        the loop's last batch; "count", nothing but the number of `batches`: the loader must give the same ones in the
        same order, and those before are loaded again and dropped. `passes` are the batches of each loop so far.

        Raises ShardError for a state that JSON can't hold.
        """
        return self.reached.data()

    @property
    def reached(self) -> Position:
        """The same as it is, to be kept for each call of a step; its `data()` is what `position` gives."""
        kind, state = self._state or ("count", None)
        return Position(kind, tuple(self._passes), state)

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Have the next loop go on behind a `position`. Of "count" the pass that was under way is loaded
        again up to there.

        Raises ShardError for what is no position.
        """
        found = read(position)
        passes = found.passes
        self._passes = list(passes) or [0]
        self._state = None if found.state is None else (found.kind, found.state)
        self._begin = found.state, 0 if found.state is not None else self._passes[-1]

    def skip_to(self, position: Mapping[str, Any]) -> None:
        """Have the loop that runs come to a `position` without what is before it being loaded: the first batch stands
        for each of those, in as many loops as there were, and then comes what is behind the position. Of "count" the
        batches of the position's own loop are loaded then, and dropped.

        Raises ShardError for what is no position, one that the loop has passed, and after the second batch.
        """
        found = read(position)
        given = sum(self._passes)
        if given > found.batches or (given and self._first is None):
            raise ShardError(
                f"skip_to takes a loop at its first batch to one behind; this one has had {given}, and the position is "
                f"behind {found.batches}"
            )
        self._until = found if found.batches else None

    def _stand_in(self, ahead: Ahead) -> "_Kept | None":
        """The first batch once more, for one that is not loaded; None at the position that the loop is brought to,
        where `ahead` goes on. Raises StopIteration where a loop ended before it."""
        until, here = self._until, len(self._passes) - 1
        if until is None or self._first is None:
            return None
        if here == len(until.passes):  # the loop at the position was left there
            self._until = None
            return None
        if self._passes[here] < until.passes[here]:
            self._passes[here] += 1
            at = tuple(self._passes) == until.passes
            self._state = (until.kind, until.state) if at and until.state is not None else None
            return self._first
        if here < len(until.passes) - 1:
            raise StopIteration
        self._until = None
        if until.state is None:
            ahead.leave_out(until.passes[here] - ahead.given)
        else:
            ahead.go_to(until.state)
        return None


class Passing:
    """One loop over a feed. What takes batches for it ends when nobody holds it any more."""

    def __init__(self, of: Feed, ahead: Ahead):
        self._of, self._taken_ahead, self._places = of, ahead, of._places
        self._ended = weakref.finalize(self, _end, ahead, of._places)

    def __iter__(self) -> "Passing":
        return self

    def __next__(self) -> Any:
        of = self._of
        stands = of._stand_in(self._taken_ahead)
        if stands is not None:
            return stands.batch()
        of._first = None
        taken, waited = self._taken_ahead.take(self._places.busy)
        if taken.error is not None:
            self._places.let_go()
            error, taken = taken.error, None
            if isinstance(error, StopIteration):
                raise StopIteration
            trace = error.__traceback__
            while (
                trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in _OURS
            ):
                trace = trace.tb_next
            raise error.with_traceback(trace)
        of._passes[-1] += 1
        if sum(of._passes) == 1:
            of._first = _Kept(taken.batch)
        of._state = None if taken.state is None else (kind_of(of.iterable), taken.state)
        self._places.waits.gave(time.perf_counter(), waited)
        self._places.handed(taken.batch)
        return taken.batch


class _Kept:
    """A batch whose containers the loop may change."""

    def __init__(self, batch: Any):
        self._batch = mapped(_same, batch)

    def batch(self) -> Any:
        return mapped(_same, self._batch)


class _Rows:
    """Tells batches of fewer rows than the first."""

    def __init__(self) -> None:
        self._first: int | None = None

    def wanted(self, batch: Any) -> bool:
        here = rows(batch)
        if self._first is None:
            self._first = here
        return here is None or self._first is None or here >= self._first


def _all(_: Any) -> bool:
    return True


def _same(x: Any) -> Any:
    return x


def _end(ahead: Ahead, places: Places) -> None:
    ahead.stop()
    places.let_go()


_OURS = {__file__, Ahead.take.__code__.co_filename}


def feed(
    iterable: Iterable[Any], step: ShardedStep | None = None, *, ahead: int = 2, drop_last: bool = False
) -> Feed:
    """Take a loop's batches ahead, in a thread, and put them on the devices in the step's own sharding.

    The loop's batches are the same ones in the same order. From the second or third on their arrays lie on the devices:
    the first shows which inputs of a step they are, and until then they stay as the loader gave them. `ahead` batches
    take their memory on the devices beside the one that the step works on. A loader that draws from the same generator
    of random numbers as the loop gets other draws, as it runs earlier.

    Args:
        iterable: what gives batches: any pytrees of arrays of NumPy, JAX or a library with DLPack. Only one thread at a
            time touches it. On several hosts it gives what the step takes on each (`shard(data="per-host")`).
        step: the sharded step that they go to; by default the first one that is called with one.
        ahead: so many batches are taken ahead, and no more.
        drop_last: leave out batches with fewer rows (dimension 0) than the first. A step with `pad=True` fills them up
            by itself.

    Returns:
        A `Feed`: what a loop iterates over.

    Raises:
        ShardError: for what can't be iterated over, a step that is none, and an `ahead` below 1. What the loader raises
            is raised in the loop, at its batch's place.

    >>> import jax, jaxshard_magic
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> def descend(w, x):
    ...     return w - 0.5 * jax.grad(lambda w: jnp.mean(x @ w))(w)
    >>> step, w = jaxshard_magic.shard(descend, "dp", mesh="cpu:8 data=8"), jnp.zeros(4)
    >>> for x in feed(np.ones((8, 4), "f") for _ in range(5)):
    ...     w = step(w, x)
    >>> w.tolist()
    [-2.5, -2.5, -2.5, -2.5]
    """
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        raise ShardError(f"feed takes what a loop gets its batches from, not {type(iterable).__name__}")
    if step is not None and not isinstance(step, ShardedStep):
        raise ShardError(
            f"feed(step=...) takes a step that shard() made, not {type(step).__name__}; leave it out, and the step "
            "that is called with a batch is found"
        )
    if type(ahead) is not int or ahead < 1:
        raise ShardError(f"feed(ahead=...) takes a whole number from 1 on, not {quoted(str(ahead))}")
    return Feed(iterable, step, ahead=ahead, drop_last=drop_last)
