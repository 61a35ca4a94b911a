"""Candidates tried side by side: compiled several at a time, run one after the other, checked against one reference."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from ..analysis.check import Plain
from ..errors import ShardError
from ..placing import hosts_of
from ..program.compiling import compilers
from ..report.comparison import Comparison, Trial
from ..step import ShardedStep
from ..step.copies import copies
from ..step.tracing import Traces
from ..targets import given_up
from .candidates import Candidate, Refused

if TYPE_CHECKING:
    from ..program.peel import Peeled
    from ..report import Check

REPEAT, ENOUGH = 3, 1.0  # timed calls of each candidate: so many, or as many as take so many seconds


@dataclass(frozen=True)
class How:
    """How candidates are tried, and who is told.

    Args:
        name: of the step, in what is shown.
        run: False compiles only.
        check: compare each with the plain step on the same inputs, which is compiled and run once for all.
        repeat: timed calls of each; None for three, or fewer where they take more than a second together.
        say: is told what is being done, "" for nothing.
        show: is given the comparison so far whenever a candidate has compiled or run.
        prepare: is given each step before it is compiled.
    """

    name: str
    run: bool = True
    check: bool = True
    repeat: int | None = None
    say: Callable[[str], None] = lambda _: None
    show: Callable[[Comparison], None] = lambda _: None
    prepare: Callable[[ShardedStep], None] = lambda _: None


class Trying:
    """A comparison of `step` as it is made: `chosen` is what to try.

    Python's own part of compiling (tracing, planning, reading what was compiled) is one candidate's at a time: user's
    code and its objects are never in two threads at once. Compilers work beside it, as many at a time as there are
    cores. Then steps run one after the other, so that none disturbs another's time, each on copies of the arguments;
    what a step holds on the devices is let go of before the next one.

    An interrupt ends it with what is done: what has compiled and has not run stays so, what has not compiled is left. A
    compiler at work is not waited for; what it gives is not looked at, so that no user's code runs after the end.
    """

    def __init__(self, step: Callable[..., Any], chosen: Sequence[Candidate | Refused], how: How):
        self._step, self._chosen, self.how = step, list(chosen), how
        self._say, self._show = how.say, how.show
        self._reference = _Reference() if how.check and how.run else None
        self._trials: dict[int, Trial] = {}
        self._steps: dict[int, ShardedStep] = {}
        self._failures: list[Exception] = []
        self.python = threading.Lock()
        self.traces = Traces()  # that all candidates share
        self.over: Callable[[], bool] = lambda: False  # whether compilers are to give up
        self.waiting: Callable[[], int] = lambda: 0  # candidates that may be added
        self.keeps = False  # hold on to steps that have run
        self._at_work: dict[int, str] = {}  # what is being compiled
        self._stopped = False

    def sharded(self, candidate: Candidate) -> ShardedStep:
        """The step as a candidate asks for it, nothing of it traced."""
        step = ShardedStep(self._step, candidate.request)
        step.traces = self.traces
        self.how.prepare(step)
        return step

    @property
    def stopped(self) -> bool:
        """Whether an interrupt ended it."""
        return self._stopped

    @property
    def comparison(self) -> Comparison:
        """What is known so far."""
        known = dict(self._trials)  # other threads go on with theirs
        notes = () if self._reference is None else self._reference.notes
        ran = sum(trial.measured is not None for trial in known.values())
        if self._stopped and self.how.run:
            notes = (*notes, f"Interrupted: {ran} of {len(self._chosen)} have run.")
        left = [each.line for i, each in enumerate(self._chosen) if self._stopped and i not in known]
        return Comparison(self.how.name, tuple(known[i] for i in sorted(known)), tuple(left), notes)

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Comparison:
        """Try all of them for a call with these arguments, which may be shapes where nothing is run.

        Raises what the user's own code raises where it raises it under every candidate.
        """
        able = []
        for i, each in enumerate(self._chosen):
            if isinstance(each, Refused):
                self._told(i, why=each.why, fix=each.fix)
            else:
                able.append(i)
        feed = iter(able)
        try:
            self.compile(args, kwargs, lambda: next(feed, None))
            if self.how.run:
                self.run_all(args, kwargs)
        except KeyboardInterrupt:
            self._stopped = True
        finally:
            self._say("")
        return self.comparison

    def add(self, candidate: Candidate) -> int:
        """One more to try; its position."""
        self._chosen.append(candidate)
        return len(self._chosen) - 1

    def trial(self, position: int) -> Trial | None:
        """What came of a candidate so far."""
        return self._trials.get(position)

    def step(self, position: int) -> ShardedStep | None:
        """The step of a candidate as it was compiled; None where it is not held."""
        return self._steps.get(position)

    def compile(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        feed: Callable[[], int | None],
    ) -> None:
        """Compile the candidates whose positions `feed` gives, beside each other as many as there are cores. It is
        asked for the next whenever there is room, and again after each that ends; None: none for now.

        Raises what the user's own code raises where it raises it under every candidate.
        """
        workers = os.cpu_count() or 1
        waiting: set[Future[None]] = set()
        try:
            with compilers(workers) as pool:
                while True:
                    while len(waiting) < workers and (i := feed()) is not None:
                        waiting.add(pool.submit(self._compiled, i, args, kwargs))
                    if not waiting:
                        break
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for each in done:
                        each.result()
                    self._show(self.comparison)
        except BaseException:
            self._stopped = True
            with self.python:  # once Python's part of a candidate is done, none begins
                raise
        able = sum(isinstance(each, Candidate) for each in self._chosen)
        if able and len(self._failures) == able and len(set(map(repr, self._failures))) == 1:
            raise self._failures[0]

    def _compiled(self, i: int, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        candidate = self._chosen[i]
        assert isinstance(candidate, Candidate)
        given_up.set(lambda: self._stopped or self.over())
        with self.python:
            if self._stopped:
                return
            self._at_work[i] = candidate.label
            self._say_compiling()
            try:
                step = self.sharded(candidate)
                step.beside, step.read_ahead = self._beside, True
                own_args, own_kwargs = copies((args, kwargs))
                step.prepare(*own_args, **own_kwargs)
                self._told(i, step)
                self._steps[i] = step
            except ShardError as error:
                if not (self._stopped or self.over()):
                    self._told(i, why=_one_line(error), fix=error.fix)
            except Exception as error:  # another candidate may go where this one can't
                self._failures.append(error)
                self._told(i, why=described(error))
            finally:
                del self._at_work[i]
                self._say_compiling()

    def _say_compiling(self) -> None:
        """`compiling dp --mesh "data=8" and 1 more, 0 of 3 done`; `of at most 12` where more may be added."""
        if self._stopped or not self._at_work:
            return
        able = [i for i, each in enumerate(self._chosen) if isinstance(each, Candidate)]
        done = sum(i in self._trials for i in able)
        most = f"at most {len(able) + more}" if (more := self.waiting()) else f"{len(able)}"
        first, *others = self._at_work.values()
        beside = f" and {len(others)} more" if others else ""
        self._say(f"compiling {first}{beside}, {done} of {most} done")

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """While a compiler works, another candidate may have Python."""
        self.python.release()
        try:
            yield
        finally:
            self.python.acquire()
        if self._stopped:
            raise ShardError("stopped")

    def run_all(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        which: Sequence[int] | None = None,
    ) -> None:
        """Run what has compiled, or `which` of it, each after the other, until it is `over`."""
        waiting = sorted(self._steps) if which is None else which
        for place, i in enumerate(waiting):
            if self.over():
                break
            step = (
                self._steps[i] if self.keeps else self._steps.pop(i)
            )  # what it holds on the devices goes with it
            candidate = self._chosen[i]
            assert isinstance(candidate, Candidate)
            self._say(f"running {candidate.label}, {place + 1} of {len(waiting)}")
            step.keep_arguments = True
            if self._reference is not None:
                step.check, step.reference = True, self._reference
            try:
                own_args, own_kwargs = copies((args, kwargs))
                step(*own_args, **own_kwargs)
                self._time(step)
                self._told(i, step)
            except ShardError as error:
                self._told(i, step, _one_line(error), error.fix)
            except Exception as error:  # it ran out of memory, or a device refused: the others go on
                self._told(i, step, described(error))
            step.keep_arguments = False
            self._show(self.comparison)

    def _time(self, step: ShardedStep) -> None:
        if self.how.repeat is not None:
            step.repeat(self.how.repeat)
            return
        start, alone = time.perf_counter(), hosts_of(step.mesh) == 1  # several hosts repeat it as often
        for _ in range(REPEAT):
            step.repeat(1)
            if alone and time.perf_counter() - start > ENOUGH:
                break

    def _told(
        self, i: int, step: ShardedStep | None = None, why: str | None = None, fix: str | None = None
    ) -> None:
        each = self._chosen[i]
        report = None if step is None else step.report()
        options = dict(each.options) if report is None else report.options
        self._trials[i] = Trial(each.strategy, dict(each.axes), options, each.line, report, why, fix)


class _Reference:
    """The plain step of one call, compiled and run once for all candidates. `notes`: why there is none."""

    def __init__(self) -> None:
        self._known: dict[Any, Plain] = {}
        self.notes: tuple[str, ...] = ()

    def __call__(self, peeled: "Peeled") -> "_Reference":
        if peeled.key not in self._known:
            self._known[peeled.key] = Plain(peeled)
        self._plain = self._known[peeled.key]
        return self

    def against(self, *given: Any) -> "Check | None":
        """The check of `Plain`, None where the plain step can't run on one device."""
        if self.notes:
            return None
        try:
            return self._plain.against(*given)
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            self.notes = (f"Not checked: the plain step does not run on one device: {described(error)}.",)
            return None


def _one_line(error: ShardError) -> str:
    return " ".join(str(error).split())


def described(error: Exception) -> str:
    """An exception of somebody else's in one line."""
    message = " ".join(str(error).partition("\n")[0].split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
