"""How a running step is coming along: its calls that have finished, and their numbers, without waiting for anything."""

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..live import Known, Queue, Rates, Row, Run, Stretch
from ..program.lines import users_frame
from ..temporary import Held
from .entry import Entry
from .returned import Returned, returned_by
from .sign import is_done

if TYPE_CHECKING:
    from .followed import Followed

LOOK = 0.25  # seconds after which a call looks itself, where no other thread does
EACH = 64  # calls, at most, that make do with one look at the clock

Write = Callable[[Row], object]


@dataclass(frozen=True)
class _Program:
    returned: Returned
    known: Known


class Watch:
    """The calls of the step that it follows, and of those that it followed before, with the `run` that they make.

    jax returns from a call before the device has done the work. So each call leaves the numbers that it will give
    here, and they are read once they are there: by whoever looks, `look` from any thread, or a later call. What is read
    goes to the `run`, and as rows to each of `writers`, in the thread that calls the step. A step that nobody follows
    does nothing of this. A call itself costs half a microsecond: all that can wait until somebody looks does.
    """

    def __init__(self, total: Callable[[], int | None] = lambda: None) -> None:
        self.calls = 0
        self.skipping = False  # are calls made that are not computed, as a run before made them?
        self.resumed: int | None = None  # the calls before the first that was computed after those
        self.run = Run(total=total)
        self.writers: list[Write] = []
        self.first: Callable[[], object] | None = None  # what its first call calls
        self.idle_at: Counter[tuple[str, int]] = Counter()  # the user's lines that ran while no device worked
        self._queue, self._rates = Queue(is_done), Rates()
        self._programs: dict[Entry, _Program] = {}
        self._entry: Entry | None = None
        self._stretch = Stretch()
        self._pick: Callable[[Any], Sequence[Any]] = tuple
        self._due, self._stride, self._checked = (
            1,
            1,
            0.0,
        )  # when a call looks at the clock
        self._loss: float | None = None
        self._now = 0.0  # seconds into the run at the look that is going on
        self.rows: deque[Row] = deque()  # that have come, and that `begin` hands on
        self._busy: list[bool] = []  # of the samples since the last rates
        self._step: Followed | None = None
        self._thread: int | None = None
        self._began = self._looked = 0.0
        self._lock = threading.RLock()

    def follow(self, step: "Followed") -> None:
        self.leave()
        self._step = step
        step.followed(self)

    def leave(self) -> None:
        """The loop has ended: follow no step from here on, but one whose rows somebody takes. What its last calls gave
        is still read, and the time that passes is none of theirs."""
        self.look()
        self._rates.breaks()
        if self._step is not None and not self.writers:
            self._step.watch = None
            self._step = None

    def begin(self) -> None:
        """A call of the step begins: rows that have come go to those who take them. Raises what these raise."""
        while self.rows:
            row = self.rows.popleft()
            for write in self.writers:
                write(row)

    def called(self, entry: Entry, outs: Any, ran: bool = True) -> None:
        """A call was made, and gave `outs`, which may not be there yet; or, not `ran`, it gave what it gave in a run
        before, which is no time of a step."""
        if entry is not self._entry:
            self._entered(entry)
        if ran is self.skipping:
            self.skipping, self.resumed = not ran, self.calls if ran else None
            self._due = self._stride = 1
            self._rates.breaks()
        self.calls = number = self.calls + 1
        self._queue.put((number, self._stretch, entry.clock.sign if ran else None, self._pick(outs)))
        if number >= self._due:
            self._look_if_due()

    def finished(self) -> tuple[int, float | None]:
        """How many calls have finished, and the newest loss that was read of them."""
        self.look()
        return self._queue.done.calls, self._loss

    def look(self, *, everything: bool = False) -> None:
        """Read what is there by now. While another thread does that nothing is done."""
        with Held(self._lock, waits=everything) as turn:
            if turn.taken:
                self._look(everything)

    def sample(self) -> None:
        """Note whether the devices work, and if not what the loop does instead; from another thread, evenly in time."""
        if not self.calls or self._thread is None or self.skipping:
            return
        in_step, at = users_frame(sys._current_frames().get(self._thread))
        busy = in_step or not self._queue.idle
        self._busy.append(busy)
        if not busy and at is not None:
            self.idle_at[at] += 1

    def settle(self) -> None:
        """All calls have finished: read what is left of them, and hand it on."""
        self.look(everything=True)
        self.begin()

    def _entered(self, entry: Entry) -> None:
        """Calls of another program begin."""
        if entry not in self._programs:
            from ..analysis.throughput import known_of

            self._programs[entry] = _Program(returned_by(entry), known_of(entry))
        if self._entry is None:
            self._began = self._looked = self._checked = time.perf_counter()
            self._thread = threading.get_ident()
            if self.first is not None:
                self.first()
        (names, self._pick), known = self._programs[entry].returned, self._programs[entry].known
        self._stretch = Stretch(self._stretch.done(self.calls), known, names)
        self._entry, self.run.known = entry, known
        self.run.loss = self.loss_name or self.run.loss
        self._rates.breaks()

    def _look_if_due(self) -> None:
        """Look at the clock, and at the calls where nobody has for long; the faster calls come, the fewer do this."""
        now = time.perf_counter()
        fast, self._checked = now - self._checked < LOOK / 4, now
        self._stride = min(EACH, 2 * self._stride) if fast else 1
        self._due = self.calls + self._stride
        if now - self._looked > LOOK:
            self.look()

    def _look(self, everything: bool) -> None:
        now = self._looked = time.perf_counter()
        self._now = now - self._began
        self._queue.take(self._take, everything=everything)
        done = self._queue.done
        self.run.steps, self.run.skipped = done.calls, self._queue.skipped
        counted = self._step is not None and not self.skipping
        rates = self._rates.look(now, done) if counted else {}
        if rates:
            self.run.measure(done.calls, self._now, rates | self._sampled())

    def _take(self, number: int, values: dict[str, float]) -> None:
        """The numbers of a call, which has finished; none where it has none, or they are gone."""
        if not values:
            return
        self._loss = values.get(self.loss_name, self._loss)
        row = Row(number, self._now, values)
        self.run.add(row)
        if self.writers:
            self.rows.append(row)

    @property
    def loss_name(self) -> str:
        """The name of the loss among the run's numbers; empty where the step has none."""
        if self._entry is None or self._entry.plan.loss is None:
            return ""
        return self._programs[self._entry].returned.names[0]

    def _sampled(self) -> dict[str, float]:
        """What a look finds beside rates: the fullest device's memory, the share of samples with devices at work."""
        from ..analysis.memory import in_use

        assert self._entry is not None
        busy, self._busy = self._busy, []
        held = in_use(self._entry.plan.mesh)
        found = {"memory": held, "busy": sum(busy) / len(busy) if busy else None}
        return {name: float(value) for name, value in found.items() if value is not None}
