"""Batches as pytrees, and their shardings, read from the first call of a step that receives one.

Containers keep their types, and dicts their key order.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from ..compilation.compiled_step import CompiledStep
from ..compilation.completion_probe import is_done
from ..device_arrays import from_host_rows, is_host_aligned, is_local, put
from ..program import jax_settings
from ..step import ShardedStep
from ..step.feed_waits import FeedWaits, waiting_matchers

MAX_TRIES = 8  # batches to look for in calls of steps; without a match, later batches are only prefetched


class BatchPlacement:
    """Shardings for the arrays of a feed's batches, by shape, dtype and tree.

    A batch is recognised in a step's call because the call receives the same array objects. An array changed by the
    loop first stays on the host.

    Args:
        step: The only step considered, or None for any.
        feed: Weak reference to the feed.
    """

    def __init__(self, step: ShardedStep | None, feed: "weakref.ref[Any]") -> None:
        self.feed = feed
        self.waits = FeedWaits()
        self._step = None if step is None else weakref.ref(step)
        self._targets: dict[tuple[Any, ...], dict[int, tuple[Any, int | None]]] = {}
        self._watched: list[Any] = []
        self._failed_tries = 0

    def watch_for(self, batch: Any) -> None:
        """Watch for `batch` in the next calls of steps, unless shardings for batches like it are known."""
        self.stop_watching()
        flat = batch_leaves(batch)
        if self._failed_tries < MAX_TRIES and tuple(map(_leaf_signature, flat)) not in self._targets:
            self._failed_tries += 1
            self._watched = flat
            waiting_matchers.append(self)

    def stop_watching(self) -> None:
        """Watch for no batch."""
        self._watched = []
        if self in waiting_matchers:
            waiting_matchers.remove(self)

    def match_inputs(self, step: ShardedStep, entry: CompiledStep, leaves: Sequence[Any]) -> FeedWaits | None:
        """Record the shardings of the watched batch in this call of a step.

        Args:
            step: The step called.
            entry: Its compiled step.
            leaves: Its flat inputs.

        Returns:
            The feed's record of waiting times, or None where no input is from the watched batch.
        """
        if self._step is not None and self._step() is not step:
            return None
        # Of an array that is in the batch twice, the first position counts.
        position_by_id = {id(x): i for i, x in reversed(list(enumerate(self._watched))) if is_array(x)}
        input_by_leaf = {position_by_id[id(x)]: i for i, x in enumerate(leaves) if id(x) in position_by_id}
        if not input_by_leaf:
            return None
        targets = {
            j: (entry.shardings[i], entry.per_host_dims.get(i))
            for j, i in input_by_leaf.items()
            if i not in entry.padding and not (i in entry.per_host_dims and step.keep_arguments)
        }
        self._targets[tuple(map(_leaf_signature, self._watched))] = targets
        self._failed_tries = 0
        self.stop_watching()
        return self.waits

    def to_devices(self, batch: Any) -> Any:
        """Return the batch with its arrays on the devices, as far as shardings are known. Transfers are complete on
        return.

        Arrays already on several hosts stay, as do rows that hosts have to exchange.
        """
        flat = batch_leaves(batch)
        targets = self._targets.get(tuple(map(_leaf_signature, flat)), {})
        # A loader may write its next batch into the same arrays while these are on their way.
        flat = [_copy_numpy(x) for x in flat]
        transferred = [j for j, (to, dim) in targets.items() if dim is None and _needs_transfer(flat[j], to)]
        with jax_settings.allow_transfers():
            for j, x in zip(
                transferred, put([flat[j] for j in transferred], [targets[j][0] for j in transferred]), strict=True
            ):
                flat[j] = x
            # This thread must not wait for other hosts, so an exchange of rows is left to the step's call.
            for j, (to, dim) in targets.items():
                if dim is not None and is_local(flat[j]) and is_host_aligned(to, _global_shape(flat[j], to, dim), dim):
                    flat[j] = from_host_rows(flat[j], to, dim)
            jax.block_until_ready([flat[j] for j in targets if isinstance(flat[j], jax.Array)])
        # The placed batch has other signatures, and must not be watched for when the loop gets it.
        if targets:
            self._targets.setdefault(tuple(map(_leaf_signature, flat)), targets)
        remaining = iter(flat)
        return map_leaves(lambda _: next(remaining), batch)

    def is_busy(self) -> bool:
        """Return whether the step's devices have unfinished work."""
        step = None if self.waits.step is None else self.waits.step()
        sign = None if step is None or step.entry is None else step.entry.clock.probe
        return sign is not None and not is_done(sign)


def _needs_transfer(x: Any, to: Any) -> bool:
    if isinstance(x, np.ndarray):
        return True
    return is_local(x) and not x.sharding.is_equivalent_to(to, x.ndim)


def _global_shape(x: Any, to: Any, dim: int) -> tuple[int, ...]:
    """Return the global shape of an array, given one host's rows."""
    hosts = len({device.process_index for device in to.device_set})
    return tuple(n * hosts if d == dim else n for d, n in enumerate(x.shape))


def map_leaves(f: Callable[[Any], Any], batch: Any) -> Any:
    """Return the batch with `f` applied to each leaf.

    Unlike `jax.tree.map`, keep the key order of dicts.

    >>> map_leaves(lambda x: x + 1, {"y": 1, "x": [2, (3,)]})
    {'y': 2, 'x': [3, (4,)]}
    """
    # `jax.tree.map` sorts the keys of dicts.
    if type(batch) is dict:
        return {key: map_leaves(f, value) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(map_leaves(f, value) for value in batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(f, value) for value in batch))
    return jax.tree.map(f, batch)


def batch_leaves(batch: Any) -> list[Any]:
    """Return the leaves of a batch, in the order of `map_leaves`."""
    flat: list[Any] = []
    map_leaves(flat.append, batch)
    return flat


def is_array(x: Any) -> bool:
    """Return whether a step accepts `x` as an array."""
    # Not objects, bytes, text, dates and time differences.
    return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind not in "OSUMm")


def as_numpy(x: Any) -> Any:
    """Return tensors of other libraries as NumPy arrays in the same memory, or as JAX arrays by DLPack where NumPy
    cannot.

    Anything else is returned unchanged.
    """
    if isinstance(x, (np.ndarray, np.generic, jax.Array)) or not (hasattr(x, "__array__") and hasattr(x, "__dlpack__")):
        return x
    with suppress(TypeError, RuntimeError, BufferError):  # a tensor on an accelerator, or of a dtype that NumPy lacks
        return np.asarray(x)
    return jax.numpy.from_dlpack(x)


def _copy_numpy(x: Any) -> Any:
    """Return a copy of a NumPy array, because loaders may write the next batch into the same memory."""
    return x.copy() if isinstance(x, np.ndarray) else x


def _leaf_signature(x: Any) -> Any:
    """Return a key equal for leaves that go to the same devices: shape, dtype and whether the array is a host's
    part."""
    return (x.shape, x.dtype, is_local(x)) if isinstance(x, (jax.Array, np.ndarray)) else type(x)


def row_count(batch: Any) -> int | None:
    """Return the size of dimension 0 of the first array with one; None without any."""
    return next((x.shape[0] for x in batch_leaves(batch) if is_array(x) and x.ndim), None)
