"""Monitor a running step: finished calls and their returned scalars, without waiting for a device."""

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, KeyPath

from ..analysis.throughput import work_per_call
from ..compilation.compiled_step import CompiledStep
from ..compilation.completion_probe import is_done, outputs_getter
from ..live import CallSequence, CallWork, LiveRun, MetricsRow, PendingCalls, RateMeter
from ..program.source_lines import innermost_user_location
from ..program.trace import path_name
from ..targets.device_memory import bytes_in_use
from ..temporary import AcquiredLock

READ_INTERVAL_S = 0.25  # seconds without a read after which a call of the step reads
MAX_STRIDE = 64  # calls, at most, from one look at the clock to the next
LOSS = "loss"  # name of a loss returned without one: training curves look for this name

Write = Callable[[MetricsRow], object]


class _ReturnedScalars(NamedTuple):
    """Scalars returned by a program.

    Attributes:
        names: Names, the loss first.
        pick: Takes the scalars' arrays from the program's results.
    """

    names: tuple[str, ...]
    pick: Callable[[Any], Sequence[Any]]


def _returned_scalars(entry: CompiledStep) -> _ReturnedScalars:
    """Return the scalars that calls of `entry` return.

    Among them are the loss (for the losses of an epoch, the last) and scalars of float or integer dtype, except next
    values of inputs and values written into the step's arguments. The name has the keys and attributes on the path,
    `eval.acc`, without positions in tuples; or is the whole path, if several names would be equal or there is none.
    """
    loss, avals = entry.plan.loss, entry.traced.closed.out_avals
    paths, written = entry.traced.out_paths, set(entry.traced.in_paths)
    positions = [] if loss is None else [loss]
    for o, aval in enumerate(avals):
        number = isinstance(aval.dtype, np.dtype) and (
            jnp.issubdtype(aval.dtype, jnp.floating) or jnp.issubdtype(aval.dtype, jnp.integer)
        )
        if number and not aval.shape and o != loss and o not in entry.plan.state_pairs and paths[o] not in written:
            positions.append(o)
    names = [_name(paths[o]) or (LOSS if o == loss else "") for o in positions]
    # Values are recorded by name, so equal names would overwrite each other.
    name_counts = Counter(names)
    unique = (
        name if name and name_counts[name] == 1 else path_name(paths[o]).partition(".")[2] or path_name(paths[o])
        for name, o in zip(names, positions, strict=True)
    )
    return _ReturnedScalars(tuple(unique), outputs_getter(entry, positions))


def _name(path: KeyPath) -> str:
    """Return the keys and attributes of an output's path, without positions: `train.loss`."""
    keys = (key.key if isinstance(key, DictKey) else getattr(key, "name", None) for key in path[1:])
    return ".".join(key for key in keys if isinstance(key, str))


class Monitored(Protocol):
    """Step that tells a monitor of its calls.

    `watch` is the monitor of the next call; None without one.
    """

    watch: "LoopMonitor | None"

    def followed(self, watch: "LoopMonitor") -> None:
        """Use `watch` as the monitor from the next call on."""
        ...


@dataclass(frozen=True)
class _Program:
    """Scalars and known figures of one program.

    Attributes:
        returned: Scalars returned by the program.
        known: Figures for throughput.
    """

    returned: _ReturnedScalars
    known: CallWork


class LoopMonitor:
    """Monitor of the calls of a step, and of steps followed before; all calls together make one `run`.

    JAX returns from a call before the device has finished. Each call therefore queues its scalars, and `read_ready`
    (from any thread) or a later call reads them once they are ready. Values go to `run`, and as rows to each function
    in `writers`, in the thread that calls the step. A step without a monitor does none of this.

    Args:
        total: Returns the expected number of calls; None if unknown.
    """

    def __init__(self, total: Callable[[], int | None] = lambda: None) -> None:
        self.calls = 0
        self.skipping = False  # whether the last call was skipped
        self.resumed: int | None = None  # skipped calls before the first computed one
        self.run = LiveRun(total=total)
        self.writers: list[Write] = []
        self.on_first_call: Callable[[], object] | None = None
        self.idle_lines: Counter[tuple[str, int]] = Counter()  # samples without a working device, by file and line
        self._queue, self._rates = PendingCalls(is_done), RateMeter()
        self._programs: dict[CompiledStep, _Program] = {}
        self._entry: CompiledStep | None = None
        self._stretch = CallSequence()
        self._pick: Callable[[Any], Sequence[Any]] = tuple
        self._due, self._stride, self._checked = (1, 1, 0.0)  # next call to look, calls between looks, last look in s
        self._loss: float | None = None
        self._now = 0.0  # seconds into the run at the current read
        self.pending_rows: deque[MetricsRow] = deque()  # read, and not yet passed to `writers`
        self._busy: list[bool] = []  # samples since the last rates
        self._step: Monitored | None = None
        self._thread: int | None = None
        self._began = self._looked = 0.0
        self._lock = threading.RLock()

    def follow(self, step: Monitored) -> None:
        """Follow `step` from here on, in place of the previous step."""
        self.stop()
        self._step = step
        step.followed(self)

    def stop(self) -> None:
        """Stop following at the end of a loop, unless `writers` receive rows.

        Values of the last calls are still read; the time that passes is not counted as step time.
        """
        self.read_ready()
        self._rates.skip_interval()
        if self._step is not None and not self.writers:
            self._step.watch = None
            self._step = None

    def write_rows(self) -> None:
        """Pass new rows to `writers` before a call of the step. Raises the exceptions of `writers`."""
        while self.pending_rows:
            row = self.pending_rows.popleft()
            for write in self.writers:
                write(row)

    def record_call(self, entry: CompiledStep, outs: Any, computed: bool = True) -> None:
        """Queue a call.

        Args:
            entry: Program of the call.
            outs: Results, possibly not finished.
            computed: False for a skipped call with results of a previous run, not counted as step time.
        """
        if entry is not self._entry:
            self._switch_program(entry)
        if computed is self.skipping:
            self.skipping, self.resumed = not computed, self.calls if computed else None
            self._due = self._stride = 1
            self._rates.skip_interval()
        self.calls = number = self.calls + 1
        # A call may spend about 0.5 us here: everything else waits until the values are read.
        self._queue.put((number, self._stretch, entry.clock.probe if computed else None, self._pick(outs)))
        if number >= self._due:
            self._read_if_due()

    def finished_calls(self) -> tuple[int, float | None]:
        """Return the number of finished calls, and the last loss read."""
        self.read_ready()
        return self._queue.done.calls, self._loss

    def read_ready(self, *, everything: bool = False) -> None:
        """Read the values that are ready; do nothing while another thread reads.

        Args:
            everything: Wait for a reading thread, and read the values of all calls.
        """
        with AcquiredLock(self._lock, waits=everything) as turn:
            if turn.is_acquired:
                self._read(everything)

    def sample_activity(self) -> None:
        """Note whether the devices work, and if not, the current line of the loop.

        Call this at even intervals, from another thread.
        """
        if not self.calls or self._thread is None or self.skipping:
            return
        in_step, at = innermost_user_location(sys._current_frames().get(self._thread))
        busy = in_step or not self._queue.is_idle
        self._busy.append(busy)
        if not busy and at is not None:
            self.idle_lines[at] += 1

    def settle(self) -> None:
        """Read the values of all calls, all of them finished, and pass on the rows."""
        self.read_ready(everything=True)
        self.write_rows()

    def _switch_program(self, entry: CompiledStep) -> None:
        """Switch to calls of another program."""
        if entry not in self._programs:
            self._programs[entry] = _Program(_returned_scalars(entry), work_per_call(entry))
        if self._entry is None:
            self._began = self._looked = self._checked = time.perf_counter()
            self._thread = threading.get_ident()
            if self.on_first_call is not None:
                self.on_first_call()
        (names, self._pick), known = self._programs[entry].returned, self._programs[entry].known
        self._stretch = CallSequence(self._stretch.done_after(self.calls), known, names)
        self._entry, self.run.work = entry, known
        self.run.loss_name = self.loss_name or self.run.loss_name
        # The interval contains the compile of the program.
        self._rates.skip_interval()

    def _read_if_due(self) -> None:
        """Check the time, and read values if nobody has for `READ_INTERVAL_S`; frequent calls check less often."""
        now = time.perf_counter()
        fast, self._checked = now - self._checked < READ_INTERVAL_S / 4, now
        self._stride = min(MAX_STRIDE, 2 * self._stride) if fast else 1
        self._due = self.calls + self._stride
        if now - self._looked > READ_INTERVAL_S:
            self.read_ready()

    def _read(self, everything: bool) -> None:
        """Read the values that are ready, and update the run and its rates."""
        now = self._looked = time.perf_counter()
        self._now = now - self._began
        self._queue.read_finished(self._record_values, read_all=everything)
        done = self._queue.done
        self.run.steps, self.run.skipped = done.calls, self._queue.skipped
        counted = self._step is not None and not self.skipping
        rates = self._rates.update(now, done) if counted else {}
        if rates:
            self.run.add_loop_metrics(done.calls, self._now, rates | self._device_metrics())

    def _record_values(self, number: int, values: dict[str, float]) -> None:
        """Record the values of a finished call; empty if the call has none, or they were donated."""
        if not values:
            return
        self._loss = values.get(self.loss_name, self._loss)
        row = MetricsRow(number, self._now, values)
        self.run.add_row(row)
        if self.writers:
            self.pending_rows.append(row)

    @property
    def loss_name(self) -> str:
        """Name of the loss among the run's values; empty for a step without a loss."""
        if self._entry is None or self._entry.plan.loss is None:
            return ""
        return self._programs[self._entry].returned.names[0]

    def _device_metrics(self) -> dict[str, float]:
        """Return the memory of the fullest device in bytes, and the share of samples with busy devices."""
        assert self._entry is not None
        busy, self._busy = self._busy, []
        memory = bytes_in_use(self._entry.plan.mesh)
        metrics = {"memory": memory, "busy": sum(busy) / len(busy) if busy else None}
        return {name: float(value) for name, value in metrics.items() if value is not None}
