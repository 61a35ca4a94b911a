"""Progress of a training loop in words: step, loss, time a call, time left.

Imported when a cell runs, as it imports the words of the views.
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median

from ..views.format import count_text, number_text, seconds_text

EVIDENT = 0.5  # seconds after the first finished call, from which on a cell counts as training
STANDS = 0.4  # seconds that a text stays: long enough to be read, and cheap
REMEMBERED = 50  # marks, one for each check at which further calls had finished
PAUSE = 4  # times the median: a slower stretch is an evaluation or a checkpoint, not a step

Mark = tuple[float, int]  # seconds, and number of finished calls


class LoopProgress:
    """Text of the progress line for a loop.

    Args:
        finished: Returns the number of finished calls, and the newest loss among them or None.
        total: Returns the expected number of calls; None if unknown.
        sample: Called at regular intervals.
        resumed: Returns the calls made by an earlier run that the loop continues; None without such a run.

    Attributes:
        share: Finished part of the expected calls, 0 to 1, as of the last text; None if unknown.
    """

    def __init__(
        self,
        finished: Callable[[], tuple[int, float | None]],
        total: Callable[[], int | None],
        sample: Callable[[], None] = lambda: None,
        resumed: Callable[[], int | None] = lambda: None,
    ):
        self._finished, self._total, self._sample, self._resumed = finished, total, sample, resumed
        self._began_at: int | None = None  # calls made by the run that the loop continues
        self._began: float | None = None
        self._marks: deque[Mark] = deque(maxlen=REMEMBERED)
        self._said, self._said_at = "", 0.0
        self.share: float | None = None

    def pause(self) -> None:
        """Leave the current time out of the time a call: something else runs, for example another compile."""
        self._marks.clear()

    def line(self, now: float, charted: bool = False) -> str:
        """Return `step 340 of 1,000, loss 0.0421, 12.3 ms a call, 8 s left`.

        Args:
            now: Current time in seconds.
            charted: Leave out the time a call, as a chart shows it.

        Returns:
            The text; "" while there is no evidence of a loop. A text stays for at least 0.4 s.
        """
        self._sample()
        if self._said and now - self._said_at < STANDS:
            return self._said
        step, loss = self._finished()
        if not step:
            return ""
        # Calls skipped by a resumed run finish at once, so the time up to here says nothing about a step.
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
        parts = [*_line_parts(step, loss, total, self._marks, charted)]
        if resumed is not None:
            parts.append(f"resumed at step {count_text(resumed)}")
        self._said, self._said_at = ", ".join(parts), now
        self.share = step / total if total and step <= total else None
        return self._said


def _line_parts(
    step: int, loss: float | None, total: int | None, marks: Iterable[Mark], charted: bool
) -> Iterable[str]:
    """Yield the parts of the text."""
    left = None if total is None or step > total else total - step
    yield f"step {count_text(step)}" if left is None else f"step {count_text(step)} of {count_text(total)}"
    if loss is not None:
        yield f"loss {number_text(loss)}"
    stretches = [(t1 - t0, n1 - n0) for (t0, n0), (t1, n1) in pairwise(marks)]
    if stretches and not charted:
        yield f"{seconds_text(_call_time(stretches))} a call"
    if stretches and left:
        # Evaluations and checkpoints will come again, so the time left includes them.
        seconds, steps = map(sum, zip(*stretches, strict=True))
        yield f"{duration_text(left * seconds / steps)} left"


def _call_time(stretches: list[tuple[float, int]]) -> float:
    """Return the seconds a call over `(seconds, steps)` pairs, without pauses: evaluations, checkpoints."""
    usual = median(seconds / steps for seconds, steps in stretches)
    going = [(seconds, steps) for seconds, steps in stretches if seconds / steps <= PAUSE * usual]
    return sum(seconds for seconds, _ in going) / sum(steps for _, steps in going)


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units: `8 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = max(1, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
