"""Trials of candidates: compile several at a time, run one after the other, check against one reference."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from ..analysis.check import PlainStep
from ..compilation.tracing import TraceCache
from ..device_arrays import count_hosts
from ..errors import ShardError
from ..program.compiling import compile_pool
from ..report.comparison import Comparison, Trial
from ..step import ShardedStep
from ..step.copies import copy_arguments
from ..targets import given_up
from .candidates import Candidate, RefusedCandidate

if TYPE_CHECKING:
    from ..program.flatten_call import FlatCall
    from ..report import Check

REPEAT, ENOUGH = 3, 1.0  # timed calls of each candidate, and the seconds after which fewer are enough


@dataclass(frozen=True)
class TrialOptions:
    """Options of trials.

    Attributes:
        name: Name of the step, for display.
        run: Whether to run; False compiles only.
        check: Whether to compare each candidate with the plain step on the same inputs; the plain step is compiled and
            run once.
        repeat: Timed calls of each candidate; None for three, or fewer if they take more than a second together.
        say: Progress callback; takes the current work, "" for none.
        show: Takes the comparison so far after each compile and run.
        prepare: Takes each step before compiling.
    """

    name: str
    run: bool = True
    check: bool = True
    repeat: int | None = None
    say: Callable[[str], None] = lambda _: None
    show: Callable[[Comparison], None] = lambda _: None
    prepare: Callable[[ShardedStep], None] = lambda _: None


class TrialRunner:
    """Trials of one step under several candidates.

    Tracing, planning and reading compiled programs go one candidate at a time, so the user's code and objects are never
    in two threads at once. Compilers work in parallel, as many as there are cores. Then steps run one after the other,
    on copies of the arguments, so that no run disturbs the time of another; a step's device memory is freed before the
    next.

    An interrupt ends the trials: compiled steps stay without a run, and the rest is left. A running compiler is not
    awaited and its result not read, so no user code runs after the end.

    Args:
        step: Plain step.
        chosen: Candidates to try.
        how: Options.

    Attributes:
        python: Lock on the part of a compile that runs Python.
        traces: Traces shared by all candidates.
        over: Returns whether compilers should give up.
        waiting: Returns the number of candidates that may be added.
        keeps: Whether to keep steps after their run.
    """

    def __init__(self, step: Callable[..., Any], chosen: Sequence[Candidate | RefusedCandidate], how: TrialOptions):
        self._step, self._chosen, self.how = step, list(chosen), how
        self._say, self._show = how.say, how.show
        self._reference = _Reference() if how.check and how.run else None
        self._trials: dict[int, Trial] = {}
        self._steps: dict[int, ShardedStep] = {}
        self._failures: list[Exception] = []
        self.python = threading.Lock()
        self.traces = TraceCache()
        self.over: Callable[[], bool] = lambda: False
        self.waiting: Callable[[], int] = lambda: 0
        self.keeps = False
        self._at_work: dict[int, str] = {}  # labels of candidates being compiled
        self._stopped = False

    def sharded(self, candidate: Candidate) -> ShardedStep:
        """Return the untraced step of a candidate."""
        step = ShardedStep(self._step, candidate.request)
        step.programs.traces = self.traces
        self.how.prepare(step)
        return step

    @property
    def stopped(self) -> bool:
        """True after an interrupt."""
        return self._stopped

    @property
    def comparison(self) -> Comparison:
        """Comparison so far."""
        known = dict(self._trials)  # a copy, as other threads add to it
        notes = () if self._reference is None else self._reference.notes
        ran = sum(trial.measured is not None for trial in known.values())
        if self._stopped and self.how.run:
            notes = (*notes, f"Interrupted: {ran} of {len(self._chosen)} have run.")
        left = [each.line for i, each in enumerate(self._chosen) if self._stopped and i not in known]
        return Comparison(self.how.name, tuple(known[i] for i in sorted(known)), tuple(left), notes)

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Comparison:
        """Try all candidates for a call with these arguments, which may be shapes if nothing is run.

        Raises an exception of the user's code if all candidates raise the same.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        able = []
        for i, each in enumerate(self._chosen):
            if isinstance(each, RefusedCandidate):
                self._record(i, why=each.why, fix=each.fix)
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
        """Add a candidate and return its position."""
        self._chosen.append(candidate)
        return len(self._chosen) - 1

    def trial(self, position: int) -> Trial | None:
        """Return the result of a candidate so far; None before."""
        return self._trials.get(position)

    def step(self, position: int) -> ShardedStep | None:
        """Return the compiled step of a candidate; None if not kept."""
        return self._steps.get(position)

    def compile(self, args: Sequence[Any], kwargs: dict[str, Any], feed: Callable[[], int | None]) -> None:
        """Compile candidates in parallel, as many at a time as there are cores.

        Raises an exception of the user's code if all candidates raise the same.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            feed: Returns the position of the next candidate, None for none now. Called when a compiler is free, and
                after each end of a compile.
        """
        workers = os.cpu_count() or 1
        waiting: set[Future[None]] = set()
        try:
            with compile_pool(workers) as pool:
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
            # Waits for the part of a compile that runs Python; no other one begins.
            with self.python:
                raise
        able = sum(isinstance(each, Candidate) for each in self._chosen)
        # The same error under every candidate is the step's own.
        if able and len(self._failures) == able and len(set(map(repr, self._failures))) == 1:
            raise self._failures[0]

    def _compiled(self, i: int, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Compile one candidate in a thread of the pool."""
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
                # Reading a program runs Python, so it belongs to the part under the lock.
                step.programs.compiling_context, step.programs.read_on_compile = self._beside, True
                own_args, own_kwargs = copy_arguments((args, kwargs))
                step.prepare(*own_args, **own_kwargs)
                self._record(i, step)
                self._steps[i] = step
            except ShardError as error:
                if not (self._stopped or self.over()):
                    self._record(i, why=_one_line(error), fix=error.fix)
            except Exception as error:  # another candidate may work
                self._failures.append(error)
                self._record(i, why=described(error))
            finally:
                del self._at_work[i]
                self._say_compiling()

    def _say_compiling(self) -> None:
        """Report `compiling dp --mesh "data=8" and 1 more, 0 of 3 done`; `of at most 12` if more may be added."""
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
        """Release the lock on Python while a compiler works."""
        self.python.release()
        try:
            yield
        finally:
            self.python.acquire()
        if self._stopped:
            # The result of a late compile is not read.
            raise ShardError("stopped")

    def run_all(self, args: Sequence[Any], kwargs: dict[str, Any], which: Sequence[int] | None = None) -> None:
        """Run compiled candidates one after the other, until `over()`.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            which: Positions in the order to run; None for all compiled candidates.
        """
        waiting = sorted(self._steps) if which is None else which
        for place, i in enumerate(waiting):
            if self.over():
                break
            # Dropping the step frees its memory on the devices.
            step = self._steps[i] if self.keeps else self._steps.pop(i)
            candidate = self._chosen[i]
            assert isinstance(candidate, Candidate)
            self._say(f"running {candidate.label}, {place + 1} of {len(waiting)}")
            # Timed calls repeat the last call.
            step.keep_arguments = True
            if self._reference is not None:
                step.check, step.reference = True, self._reference
            try:
                # On copies: nothing of the caller's is changed.
                own_args, own_kwargs = copy_arguments((args, kwargs))
                step(*own_args, **own_kwargs)
                self._time(step)
                self._record(i, step)
            except ShardError as error:
                self._record(i, step, _one_line(error), error.fix)
            except Exception as error:  # out of memory, or a device refused: the others go on
                self._record(i, step, described(error))
            # Frees the arguments before the next candidate runs.
            step.keep_arguments = False
            self._show(self.comparison)

    def _time(self, step: ShardedStep) -> None:
        """Repeat the call for timing."""
        if self.how.repeat is not None:
            step.repeat(self.how.repeat)
            return
        # Several hosts must repeat a step equally often, and their clocks differ.
        start, alone = time.perf_counter(), count_hosts(step.mesh) == 1
        for _ in range(REPEAT):
            step.repeat(1)
            if alone and time.perf_counter() - start > ENOUGH:
                break

    def _record(self, i: int, step: ShardedStep | None = None, why: str | None = None, fix: str | None = None) -> None:
        """Store the result of a candidate."""
        each = self._chosen[i]
        report = None if step is None else step.report()
        options = dict(each.options) if report is None else report.options
        self._trials[i] = Trial(each.strategy, dict(each.axes), options, each.line, report, why, fix)


class _Reference:
    """Plain step, compiled and run once for all candidates.

    Attributes:
        notes: Reason for the lack of a reference; empty if there is one.
    """

    def __init__(self) -> None:
        self._known: dict[Any, PlainStep] = {}
        self.notes: tuple[str, ...] = ()

    def __call__(self, peeled: "FlatCall", mesh: Mesh) -> "_Reference":
        if peeled.key not in self._known:
            self._known[peeled.key] = PlainStep(peeled, mesh)
        self._plain = self._known[peeled.key]
        return self

    def against(self, *given: Any) -> "Check | None":
        """Return the check of the plain step's numbers; None if the plain step can't run on one device."""
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
    """Return a foreign exception as one line."""
    message = " ".join(str(error).partition("\n")[0].split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
