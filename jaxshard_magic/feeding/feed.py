"""`feed`: prefetch a loop's batches in a thread and put them on the devices in the step's sharding."""

import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import ShardError, quoted
from ..step import ShardedStep
from .batches import BatchPlacement, as_numpy, map_leaves, row_count
from .position import Position, parse_position, state_kind
from .prefetch import Prefetcher, SharedLoader


class Feed:
    """Batches for a loop, made by `feed`.

    Each loop over a feed is a pass over the loader. Where the loader is an iterator, each loop continues where the last
    one stopped.
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
        self._limit = ahead
        self._placement = BatchPlacement(step, weakref.ref(self))
        row_filter = _RowFilter() if drop_last else None
        placement = self._placement

        # `ready` must not refer to `self`: the prefetch thread would keep the feed alive.
        def ready(batch: Any) -> Any:
            return placement.to_devices(map_leaves(as_numpy, batch) if convert else batch)

        accepts = _accept_all if row_filter is None else row_filter.accepts
        self._loader = SharedLoader(iterable, threading.Lock(), accepts, ready)
        self._shared_prefetcher = Prefetcher(self._loader, ahead) if isinstance(iterable, Iterator) else None
        self._passes: list[int] = []
        self._state: Any = None
        self._start: tuple[Any, int] | None = None
        self._first_batch: _BatchCopy | None = None  # until the second batch is requested
        self._skip_target: Position | None = None  # of `skip_to`: earlier batches are not loaded

    def __iter__(self) -> "FeedIterator":
        state, skip = self._start or (None, 0)
        if self._start is None and (self._shared_prefetcher is None or not self._passes):
            self._passes.append(0)
        self._start = None
        if self._shared_prefetcher is None:
            return FeedIterator(self, Prefetcher(self._loader, self._limit, state, skip))
        if state is not None or skip:
            self._shared_prefetcher.seek(state, skip)
        return FeedIterator(self, self._shared_prefetcher)

    def __len__(self) -> int:
        """Return the loader's length, batches dropped by `drop_last` included.

        Raises:
            TypeError: The loader has no length.
        """
        return len(self.iterable)  # pyright: ignore[reportArgumentType]

    @property
    def wait_share(self) -> float | None:
        """Share of the time, from the second batch on, in which the devices were idle for lack of a batch.

        None before the third batch.
        """
        return self._placement.waits.share

    def position(self) -> dict[str, Any]:
        """Return the loop's position in its data, as JSON data. Prefetched batches do not count.

        `kind` says how the loader returns to the position. For "grain" and "state": by `state`, the iterator's state
        behind the loop's last batch. For "count": by the number of `batches` alone; the loader must give the same
        batches in the same order, and earlier batches are loaded again and dropped. `passes` has the number of batches
        of each loop so far.

        Raises:
            ShardError: The loader's state cannot be written as JSON.
        """
        return self.reached.to_json()

    @property
    def reached(self) -> Position:
        """The same position as an object, cheap enough to record at each call of a step."""
        kind, state = self._state or ("count", None)
        return Position(kind, tuple(self._passes), state)

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Start the next loop at a `position`. For kind "count" the unfinished pass is loaded again up to there.

        Raises:
            ShardError: `position` is no position.
        """
        target = parse_position(position)
        passes = target.passes
        self._passes = list(passes) or [0]
        self._state = None if target.state is None else (target.kind, target.state)
        self._start = target.state, 0 if target.state is not None else self._passes[-1]

    def skip_to(self, position: Mapping[str, Any]) -> None:
        """Bring the running loop to a `position` without loading the data before.

        The first batch is repeated in place of each skipped batch, over as many loops as there were; then real batches
        follow. For kind "count" the batches of the position's own loop are loaded, and dropped.

        Raises:
            ShardError: `position` is no position or lies before the loop's, or the loop is past its first batch.
        """
        target = parse_position(position)
        batch_count = sum(self._passes)
        if batch_count > target.batches or (batch_count and self._first_batch is None):
            raise ShardError(
                f"skip_to takes a loop at its first batch to one behind; this one has had {batch_count}, "
                "and the position is "
                f"behind {target.batches}"
            )
        self._skip_target = target if target.batches else None

    def _placeholder_batch(self, prefetcher: Prefetcher) -> "_BatchCopy | None":
        """Return the first batch again in place of a skipped one, or None once at the target position of `skip_to`.

        At the target `prefetcher` continues there. Raises StopIteration where a skipped loop ended.
        """
        target, loop_index = self._skip_target, len(self._passes) - 1
        if target is None or self._first_batch is None:
            return None
        if loop_index == len(target.passes):  # the saved run left its last loop at the position
            self._skip_target = None
            return None
        if self._passes[loop_index] < target.passes[loop_index]:
            self._passes[loop_index] += 1
            is_reached = tuple(self._passes) == target.passes
            self._state = (target.kind, target.state) if is_reached and target.state is not None else None
            return self._first_batch
        if loop_index < len(target.passes) - 1:
            raise StopIteration
        self._skip_target = None
        if target.state is None:
            prefetcher.skip(target.passes[loop_index] - prefetcher.returned_count)
        else:
            prefetcher.seek(target.state)
        return None


class FeedIterator:
    """Iterator of one loop over a feed. The prefetch stops when the iterator is garbage collected."""

    def __init__(self, owner: Feed, ahead: Prefetcher):
        self._owner, self._prefetcher, self._placement = owner, ahead, owner._placement
        self._finalizer = weakref.finalize(self, _stop, ahead, owner._placement)

    def __iter__(self) -> "FeedIterator":
        return self

    def __next__(self) -> Any:
        owner = self._owner
        placeholder = owner._placeholder_batch(self._prefetcher)
        if placeholder is not None:
            return placeholder.batch()
        owner._first_batch = None
        taken, waited = self._prefetcher.next_batch(self._placement.is_busy)
        if taken.error is not None:
            self._placement.stop_watching()
            error, taken = taken.error, None
            if isinstance(error, StopIteration):
                raise StopIteration
            # Drop this package's own frames, so that the traceback begins in the loader.
            traceback = error.__traceback__
            while (
                traceback is not None
                and traceback.tb_next is not None
                and traceback.tb_frame.f_code.co_filename in _OWN_FILES
            ):
                traceback = traceback.tb_next
            raise error.with_traceback(traceback)
        owner._passes[-1] += 1
        if sum(owner._passes) == 1:
            owner._first_batch = _BatchCopy(taken.batch)
        owner._state = None if taken.state is None else (state_kind(owner.iterable), taken.state)
        self._placement.waits.record_batch(time.perf_counter(), waited)
        self._placement.watch_for(taken.batch)
        return taken.batch


class _BatchCopy:
    """Copy of a batch's containers, safe from changes by the loop."""

    def __init__(self, batch: Any):
        self._batch = map_leaves(_identity, batch)

    def batch(self) -> Any:
        return map_leaves(_identity, self._batch)


class _RowFilter:
    """Filter of batches with fewer rows than the first."""

    def __init__(self) -> None:
        self._first: int | None = None

    def accepts(self, batch: Any) -> bool:
        count = row_count(batch)
        if self._first is None:
            self._first = count
        return count is None or self._first is None or count >= self._first


def _accept_all(_: Any) -> bool:
    return True


def _identity(x: Any) -> Any:
    return x


def _stop(prefetcher: Prefetcher, placement: BatchPlacement) -> None:
    prefetcher.stop()
    placement.stop_watching()


_OWN_FILES = {__file__, Prefetcher.next_batch.__code__.co_filename}


def feed(iterable: Iterable[Any], step: ShardedStep | None = None, *, ahead: int = 2, drop_last: bool = False) -> Feed:
    """Prefetch a loop's batches in a thread, and put them on the devices in the step's own sharding.

    Batches and their order are unchanged. The first batch shows to which inputs of a step the arrays belong; from the
    second or third on, arrays are on the devices, and until then they stay as the loader gave them. Prefetched batches
    take memory on the devices beside the batch in use. The loader runs earlier than it would in the loop: a loader that
    shares a random generator with the loop draws other numbers.

    Args:
        iterable: Loader of batches: pytrees of arrays of NumPy, JAX or a library with DLPack. Only one thread at a time
            uses it. On several hosts, each host's part of the batch (`shard(data="per-host")`).
        step: The sharded step that receives the batches; by default the first one called with a batch.
        ahead: Most batches to prefetch.
        drop_last: Drop batches with fewer rows (dimension 0) than the first. A step with `pad=True` fills them up by
            itself.

    Returns:
        A `Feed` to iterate over.

    Raises:
        ShardError: `iterable` is not iterable, `step` is no sharded step, or `ahead` is below 1. Errors of the loader
            are raised in the loop, in place of the batch.

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
