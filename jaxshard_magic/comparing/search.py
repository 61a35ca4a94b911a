"""The fastest strategy that fits, searched best first: planned candidates wait by what they take at least, and the best
of them is compiled until none that is left can be faster."""

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from ..analysis.roofline import ERROR
from ..coordination import OtherFailed, from_first
from ..errors import ShardError
from ..placing import hosts_of
from ..report.choice import (
    BOUND,
    CHOSEN,
    ESTIMATE,
    LEFT,
    REFUSED,
    RUNNER_UP,
    SLOWER,
    TOO_LARGE,
    Choice,
    Considered,
)
from ..report.comparison import Comparison
from ..targets import target_of
from .candidates import Candidate, Refused, Requests, candidate_of
from .nodes import Ladder, Node
from .path import path
from .ranking import allowance, as_compared, simplest_first
from .sketch import Sketch, sketch
from .space import AMONG, OF_EXPERTS, Hardware, attending, saving, space
from .told import considered, notes, out_of_time
from .trials import How, Trying, described

if TYPE_CHECKING:
    from ..step import ShardedStep

FAR = 2.0  # times the memory there is: an estimate above is believed, and the candidate not compiled
NEAR = 1.2  # times the memory there is: estimates up to a sixth too high were seen, and the compiler is asked in turn
LESS = 0.98  # of an estimate that turned out too large: what needs more than that is too large as well
WIDER = 1.3  # where steps are measured: of the best prediction, what is still worth a run
BUDGET = 300.0  # seconds


class Searching:
    """A search of `step` as it is made.

    Args:
        requests: what is asked of all that is searched.
        how: how candidates are tried; with `run`, the measured times choose.
        hardware: what is predicted for.
        budget: seconds; None for no limit.
        compile: False ends with what is planned.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        requests: Requests,
        how: How,
        hardware: Hardware,
        *,
        budget: float | None = BUDGET,
        compile: bool = True,
    ):
        self._chip, self._known, self._limit = hardware.chip, hardware.known, hardware.limit
        self._requests, self._budget = requests, budget
        self._compile, self._say = compile, how.say
        self._hosts = 1 if target_of(requests.mesh) is not None else hosts_of(requests.mesh)
        self._run = how.run and compile and hardware.runs and self._hosts == 1
        self._step: ShardedStep | None = None  # of the choice, where another host made it
        self._trying = Trying(step, [], replace(how, run=self._run))
        self._trying.traces.captures = True  # for what saves memory, and for pipelines
        self._trying.over, self._trying.keeps, self._trying.waiting = self._over, True, self._waiting
        self._nodes = [Node(each) for each in space(requests)]
        self._families = list(self._nodes)
        self._order_of = {node.candidate.strategy: at for at, node in reversed([*enumerate(self._nodes)])}
        self._heap: list[tuple[bool, float, float, int, Node | Ladder]] = []
        self._order = itertools.count()
        self._end = math.inf
        self._interrupted = False
        self._failures: list[Exception] = []

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Choice:
        """Search for a call with these arguments, which may be shapes where nothing is run.

        On several hosts, which all come here, the first searches, compiles and predicts, and tells the others. Raises
        `ShardError` where the budget ends before anything has compiled, and what the user's own code raises.
        """
        if self._hosts == 1:
            return self._searched(args, kwargs)
        try:
            said = from_first(lambda: self._searched(args, kwargs).to_json())
        except OtherFailed as failed:
            raise ShardError(str(failed)) from None
        choice = Choice.from_json(said)
        if choice.chosen is not None and jax.process_index() > 0 and self._compile:
            self._step = self._trying.sharded(self._candidate(choice.chosen))
        return choice

    def _candidate(self, chosen: Considered) -> Candidate:
        made = candidate_of(chosen.strategy, self._requests, tuple(chosen.mesh.items()), chosen.options)
        assert isinstance(made, Candidate)
        return made

    def _searched(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Choice:
        start = time.monotonic()
        self._end = start + (math.inf if self._budget is None else self._budget)
        try:
            self._plan_all(args, kwargs)
            if self._compile:
                self._trying.compile(args, kwargs, lambda: self._feed(args, kwargs))
                self._settle()
                if self._run:
                    self._run_best(args, kwargs)
            else:
                self._plan_only(args, kwargs)
        except KeyboardInterrupt:
            if self._compile and not self._trying.comparison.trials:
                raise
            self._interrupted = True
        finally:
            self._say("")
        self._settle()
        seconds = time.monotonic() - start
        self._has_something(seconds)
        return self._choice(seconds)

    @property
    def step(self) -> "ShardedStep | None":
        """The step of the choice, as it was compiled and without the calls that were its trial; None without one."""
        chosen = (n.position for n in self._nodes if n.outcome == CHOSEN and n.position is not None)
        step = self._step or next(map(self._trying.step, chosen), None)
        if step is not None:
            step.restart()
        return step

    def _over(self) -> bool:
        return self._interrupted or time.monotonic() >= self._end

    def _plan_all(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for at, node in enumerate(self._nodes):
            if self._over():
                return
            if isinstance(node.candidate, Refused):
                node.outcome, node.why = REFUSED, node.candidate.why
            elif self._planned(node, args, kwargs, f", {at + 1} of {len(self._nodes)}"):
                self._put(node, node.least)
                forms = [Node(each) for each in attending(node.candidate, self._requests)]
                self._nodes += forms  # planned in their turn
                self._families += forms
            if at + 1 == len(self._nodes):
                self._with_experts()

    def _with_experts(self) -> None:
        """What divides experts is searched, too, where nobody said among which strategies and the step has some."""
        found = any(node.sketch is not None and node.sketch.experts for node in self._nodes)
        if found and tuple(self._requests.strategies) == AMONG and "ep" not in self._order_of:
            more = [Node(each) for each in space(replace(self._requests, strategies=OF_EXPERTS))]
            self._nodes += more
            self._families += more
            self._order_of |= {name: len(self._nodes) + k for k, name in enumerate(OF_EXPERTS)}

    def _planned(self, node: Node, args: Sequence[Any], kwargs: dict[str, Any], place: str = "") -> bool:
        """Plan a candidate; whether it can be planned, and may fit. `place`: which it is, as it is said."""
        assert isinstance(node.candidate, Candidate)
        self._say(f"planning {node.candidate.label}{place}")
        try:
            with self._trying.python:
                step = self._trying.sharded(node.candidate)
                node.sketch = sketch(step, node.candidate, args, kwargs, self._chip)
        except ShardError as error:
            node.outcome, node.why = REFUSED, " ".join(str(error).split())
            return False
        except Exception as error:  # another candidate may go where this one can't
            node.outcome, node.why = REFUSED, described(error)
            self._failures.append(error)
            able = sum(isinstance(each.candidate, Candidate) for each in self._families)
            if (
                len(self._failures) == min(2, able)
                and not self._heap
                and len(set(map(repr, self._failures))) == 1
            ):
                raise self._failures[0] from None  # the step's own
            return False
        node.least = max(node.sketch.least or 0.0, 0.0 if node.least == math.inf else node.least)
        return True

    def _put(self, waiting: Node | Ladder, least: float) -> None:
        """Let a candidate, or more of them, wait for their turn; what is likely to fit goes first, and of those that
        take as little at least what is guessed to be the fastest."""
        late = isinstance(waiting, Node) and not self._likely(waiting)
        known = waiting.sketch if isinstance(waiting, Node) else waiting.of.sketch
        guess = least if known is None or known.seconds is None else known.seconds
        heapq.heappush(self._heap, (late, least, guess, next(self._order), waiting))

    def _waiting(self) -> int:
        """The candidates that may still be compiled."""
        heap = [waiting for *_, waiting in list(self._heap)]
        return sum(len(each.rungs) if isinstance(each, Ladder) else 1 for each in heap)

    def _likely(self, node: Node) -> bool:
        needs = None if node.sketch is None else node.sketch.needs
        return needs is None or self._limit is None or needs <= self._limit * (NEAR if self._compile else 1)

    def _next(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Node | None:
        """The candidate to try next; None where none is left that could be better, or none for now."""
        while self._heap and not self._over():
            _, least, *_, node = heapq.heappop(self._heap)
            if isinstance(node, Ladder):
                self._climbed(node, least, args, kwargs)
            elif self._too_large(node):
                self._open(node)
            elif self._slower(node.least, node):
                node.outcome = BOUND
            elif not self._likely(node) and self._open(node):
                self._put(node, node.least)  # after those that save memory
            else:
                return node
        return None

    def _feed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
        """The position of the next candidate to compile."""
        self._settle()
        node = self._next(args, kwargs) or self._smallest()
        if node is None:
            return None
        assert isinstance(node.candidate, Candidate)
        node.position, node.outcome, node.why = self._trying.add(node.candidate), LEFT, ""
        return node.position

    def _smallest(self) -> Node | None:
        """Where estimates alone rule everything out, what needs least by them: the compiler has the last word."""
        if self._over() or any(n.position is not None for n in self._nodes):
            return None
        room = [
            (n.sketch.needs, k, n)
            for k, n in enumerate(self._nodes)
            if n.outcome == ESTIMATE and n.sketch is not None and n.sketch.needs is not None
            if self._limit is None or (n.sketch.holds or 0) <= self._limit
        ]
        return min(room)[-1] if room else None

    def _plan_only(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Take plans for what they say: none is known to be any better."""
        while (node := self._next(args, kwargs)) is not None:
            node.outcome = SLOWER if self._likely(node) else ESTIMATE
            node.why = "" if self._likely(node) else "it needs more than a device has"

    def _climbed(self, ladder: Ladder, least: float, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Plan the next rung, which waits for its turn like any other; the rest wait until one as fast is tried. None
        is planned where the candidate itself is too slow."""
        if self._slower(least):
            return
        node = Node(ladder.rungs.pop(0), least=ladder.of.least)
        self._nodes.append(node)
        if isinstance(node.candidate, Refused):
            node.outcome, node.why = REFUSED, node.candidate.why
        elif self._planned(node, args, kwargs):
            if self._saves(node, ladder.of):
                self._put(node, node.least)
            else:
                node.outcome, node.why = ESTIMATE, "it needs hardly less than without"
            least = max(least, node.least)
        if ladder.rungs:
            self._put(ladder, least)

    def _saves(self, node: Node, of: Node) -> bool:
        """Whether a candidate is estimated to need less than what it is to save memory of."""
        mine, theirs = (None if n.sketch is None else n.sketch.needs for n in (node, of))
        return mine is None or theirs is None or mine <= LESS * theirs

    def _slower(self, least: float, node: Node | None = None) -> bool:
        """Whether what takes so many seconds at least can't be faster than the best that is known to fit, nor a `node`
        that is simpler and near enough."""
        return self._known and least >= self._best() * (WIDER if self._run else self._more(node))

    def _more(self, node: Node | None) -> float:
        first = self._first(self._fitting(), self._seconds)
        return 1.0 if node is None or not first else allowance(node, first[0], self._order_of)

    def _first(self, ranked: list[Node], seconds: Callable[[Node], float | None]) -> list[Node]:
        return simplest_first(ranked, seconds, self._order_of)

    def _too_large(self, node: Node) -> bool:
        known, limit = node.sketch, self._limit
        if known is None or known.holds is None or known.needs is None or limit is None:
            return False
        if known.holds > limit:
            node.outcome, node.why = ESTIMATE, "its arrays alone take more than a device has"
            return True
        if known.needs > FAR * limit:
            node.outcome, node.why = ESTIMATE, "it needs far more than a device has"
            return True
        return False

    def _open(self, node: Node) -> bool:
        """Let the same strategy wait with what takes less memory, where its arrays leave room for that; whether there
        is any that did not wait before."""
        held = 0 if node.sketch is None else node.sketch.holds or 0
        if node.opened or node not in self._families or (self._limit is not None and held > self._limit):
            return False
        node.opened = True
        assert isinstance(node.candidate, Candidate)
        known = node.sketch or Sketch()
        rungs = list(saving(node.candidate, known.own or 0.0, known.sent or 0.0, self._requests))
        if rungs:
            self._put(Ladder(node, rungs), node.least)
        return bool(rungs)

    def _settle(self) -> None:
        """Read what came of those that were compiled since; what does not fit waits with options that save memory."""
        for node in [n for n in self._nodes if n.position is not None and n.outcome == LEFT]:
            assert node.position is not None
            node.trial = self._trying.trial(node.position)
            if node.trial is None:
                continue
            if node.trial.fits is False:
                node.outcome = TOO_LARGE
                self._open(node)
            elif node.trial.report is None:
                node.outcome, node.why = REFUSED, node.trial.why or ""
            else:
                node.outcome = SLOWER

    def _fitting(self) -> list[Node]:
        """Those that are known to fit, the fastest first, as predicted of their programs, or planned."""
        fit = [n for n in self._nodes if n.outcome == SLOWER]
        return sorted(fit, key=lambda n: math.inf if (t := self._seconds(n)) is None else t)

    def _seconds(self, node: Node) -> float | None:
        if not self._compile:
            return None if node.sketch is None else node.sketch.seconds
        return None if node.trial is None else node.trial.predicted

    def _best(self) -> float:
        known = [t for n in self._fitting() if (t := self._seconds(n)) is not None]
        best = 0 if self._compile else 1  # nothing is certain of a plan: the second is wanted as well
        return known[best] if len(known) > best else math.inf

    def _run_best(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Run those that fit, on copies, the best predictions first."""
        order = [n.position for n in self._fitting() if n.position is not None]
        self._trying.run_all(args, kwargs, order)
        for node in self._nodes:
            if node.position is not None and node.outcome == SLOWER:
                node.trial = self._trying.trial(node.position)

    def _has_something(self, seconds: float) -> None:
        if not self._compile or self._interrupted or any(n.trial is not None for n in self._nodes):
            return
        if self._over():
            raise out_of_time(self._nodes, self._budget or 0.0, seconds)
        refused = {n.why for n in self._nodes if n.outcome == REFUSED}
        if len(refused) == 1 and all(n.outcome == REFUSED for n in self._nodes):
            raise ShardError(next(iter(refused)))

    def _choice(self, seconds: float) -> Choice:
        comparison = self._trying.comparison
        ranked, compared = self._ranked(comparison)
        for node in self._nodes:
            if node.outcome == LEFT and node.position is None and self._slower(node.least):
                node.outcome = BOUND
            if self._compile and node.outcome == SLOWER and node not in ranked:
                why = None if node.trial is None else node.trial.why
                node.outcome, node.why = REFUSED, why or "its numbers are not those of the plain step"
        for node, outcome in zip(ranked, (CHOSEN, RUNNER_UP), strict=False):
            node.outcome = outcome
        first = [*ranked, *(n for n in self._nodes if n not in ranked)]
        return Choice(
            name=self._trying.how.name,
            comparison=comparison,
            candidates=tuple(map(considered, first)),
            path=path(self._nodes, self._chip, self._limit, compared),
            source=(comparison.source or "predicted") if self._compile else "planned",
            on=self._chip.name if self._known else None,
            error=None if comparison.source == "measured" else ERROR,
            limit=self._limit,
            budget=self._budget,
            seconds=seconds,
            notes=notes(self._interrupted, None if self._known else self._chip),
        )

    def _ranked(self, comparison: Comparison) -> tuple[list[Node], Callable[[Node], float | None]]:
        """Those that are an answer, the fastest first, and the seconds that they are compared by; where times are
        predicted the simplest of those that can't be told from the fastest comes before it."""
        if not self._compile:
            return self._first(self._fitting(), self._seconds), self._seconds
        fit, seconds = as_compared(self._fitting(), comparison)
        return fit if comparison.source == "measured" else self._first(fit, seconds), seconds
