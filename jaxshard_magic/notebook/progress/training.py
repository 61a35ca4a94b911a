"""How far a training loop has come, in words: step, loss, time from call to call, time left."""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median

from ...views.format import count_text, number_text, seconds_text

EVIDENT = 0.5  # seconds from the first finished call before a cell is taken to train
STANDS = 0.4  # seconds before the line says something newer, so that it can be read, and costs little
REMEMBERED = 50  # marks of the way, one for each look at which a further step had finished
PAUSE = 4  # a stretch this much slower than the usual is no step's time: an evaluation, a checkpoint

Mark = tuple[float, int]  # seconds on the clock, and the calls that had finished


class Training:
    """What the line says of a loop.

    `finished()` gives the calls of the step that have finished and the newest loss among them, or None;
    `total()` the calls that there will be, or None where that is not known. `sample()` is called evenly in time.
    `resumed()` is how many calls a run before had made, where the loop goes on with that, else None.
    """

    def __init__(
        self,
        finished: Callable[[], tuple[int, float | None]],
        total: Callable[[], int | None],
        sample: Callable[[], None] = lambda: None,
        resumed: Callable[[], int | None] = lambda: None,
    ):
        self._finished, self._total, self._sample, self._resumed = finished, total, sample, resumed
        self._began_at: int | None = None  # the step that the loop went on from
        self._began: float | None = None
        self._marks: deque[Mark] = deque(maxlen=REMEMBERED)
        self._said, self._said_at = "", 0.0
        self.share: float | None = None  # of the calls that there will be, as `line` last said

    def pause(self) -> None:
        """What happens now (another compilation) is not to count as time of the steps."""
        self._marks.clear()

    def line(self, now: float, charted: bool = False) -> str:
        """`step 340 of 1,000, loss 0.0421, 12.3 ms a call, 8 s left`; empty while no loop is evident. Where it is
        `charted` a chart tells what a call takes."""
        self._sample()
        if self._said and now - self._said_at < STANDS:
            return self._said
        step, loss = self._finished()
        if not step:
            return ""
        if (resumed := self._resumed()) != self._began_at:
            self._began_at = resumed
            self.pause()
        if self._began is None:
            self._began = now
        if not self._marks or step > self._marks[-1][1]:
            self._marks.append((now, step))
        if step < 2 or now - self._began < EVIDENT:
            return ""
        total = self._total()
        parts = [*_parts(step, loss, total, self._marks, charted)]
        if resumed is not None:
            parts.append(f"resumed at step {count_text(resumed)}")
        self._said, self._said_at = ", ".join(parts), now
        self.share = step / total if total and step <= total else None
        return self._said


def _parts(
    step: int, loss: float | None, total: int | None, marks: Iterable[Mark], charted: bool
) -> Iterable[str]:
    left = None if total is None or step > total else total - step
    yield f"step {count_text(step)}" if left is None else f"step {count_text(step)} of {count_text(total)}"
    if loss is not None:
        yield f"loss {number_text(loss)}"
    stretches = [(t1 - t0, n1 - n0) for (t0, n0), (t1, n1) in pairwise(marks)]
    if stretches and not charted:
        yield f"{seconds_text(_call_time(stretches))} a call"
    if stretches and left:
        # Pauses come again, so they count here.
        seconds, steps = map(sum, zip(*stretches, strict=True))
        yield f"{duration_text(left * seconds / steps)} left"


def _call_time(stretches: list[tuple[float, int]]) -> float:
    """Seconds from call to call, over the `(seconds, steps)` that are not pauses."""
    usual = median(seconds / steps for seconds, steps in stretches)
    going = [(seconds, steps) for seconds, steps in stretches if seconds / steps <= PAUSE * usual]
    return sum(seconds for seconds, _ in going) / sum(steps for _, steps in going)


def duration_text(seconds: float) -> str:
    """A time to wait, in its two largest units: `8 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = max(1, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
