"""Search for the fastest strategy that fits, best first.

Planned candidates wait in a queue ordered by the lower bound of their step time. The best is compiled, then the next,
until no candidate in the queue can be faster.
"""

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from ..analysis.roofline import PREDICTION_ERROR
from ..config.strategies import EXPERT_STRATEGIES, SEARCHED_STRATEGIES
from ..coordination import ProcessFailed, run_on_first
from ..device_arrays import count_hosts
from ..errors import ShardError
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
    SearchCandidate,
)
from ..report.comparison import Comparison
from ..step import ShardedStep
from ..targets import target_of
from .candidates import Candidate, RefusedCandidate, Requests, candidate_of
from .decision_path import decision_questions
from .nodes import (
    MemoryVariants,
    SearchNode,
    allowance,
    as_compared,
    as_considered,
    budget_error,
    notes,
    simplest_first,
)
from .plan_estimate import PlanEstimate, estimate_plan
from .search_space import (
    Hardware,
    attention_variants,
    memory_variants,
    strategy_space,
)
from .trials import TrialOptions, TrialRunner, described

FAR = 2.0  # multiple of the memory limit: a candidate with a larger estimate is not compiled
# Multiple of the memory limit: estimates were up to a sixth too high, so that below it the compiler decides.
NEAR = 1.2
# Share of an estimate that turned out too large: a variant that needs more is too large as well.
LESS = 0.98
# Where measured times decide: ratio to the best prediction up to which a candidate is worth a run.
WIDER = 1.3
BUDGET = 300.0  # seconds


class StrategySearch:
    """Search for the fastest strategy of one step.

    Args:
        step: Plain step.
        requests: Request for all candidates.
        how: Options of trials; with `run`, measured times decide.
        hardware: Hardware to predict for.
        budget: Seconds; None for no limit.
        compile: Whether to compile; False chooses by plans.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        requests: Requests,
        how: TrialOptions,
        hardware: Hardware,
        *,
        budget: float | None = BUDGET,
        compile: bool = True,
    ):
        self._chip, self._known, self._limit = hardware.chip, hardware.known, hardware.limit
        self._requests, self._budget = requests, budget
        self._compile, self._say = compile, how.say
        self._hosts = 1 if target_of(requests.mesh) is not None else count_hosts(requests.mesh)
        # With several hosts only the first one searches, and it can't run a step alone.
        self._run = how.run and compile and hardware.runs and self._hosts == 1
        self._step: ShardedStep | None = None  # step of the choice, on hosts that did not search
        self._trying = TrialRunner(step, [], replace(how, run=self._run))
        # All candidates share their traces. Options that save memory, and pipelines, need captured gradient calls:
        # captured from the first trace on, so that nothing is traced twice.
        self._trying.traces.captures = True
        self._trying.over, self._trying.keeps, self._trying.waiting = self._over, True, self._waiting
        self._nodes = [SearchNode(each) for each in strategy_space(requests)]
        self._families = list(self._nodes)
        self._order_of = {node.candidate.strategy: at for at, node in reversed([*enumerate(self._nodes)])}
        self._heap: list[tuple[bool, float, float, int, SearchNode | MemoryVariants]] = []
        self._order = itertools.count()
        self._end = math.inf
        self._interrupted = False
        self._failures: list[Exception] = []

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Choice:
        """Search for a call with these arguments, which may be shapes if nothing is run.

        With several hosts, all call this method; the first searches, compiles and predicts, and sends the choice to the
        others.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.

        Raises:
            ShardError: The budget ended before any candidate had compiled. Exceptions of the user's code pass through.
        """
        if self._hosts == 1:
            return self._searched(args, kwargs)
        try:
            said = run_on_first(lambda: self._searched(args, kwargs).to_json())
        except ProcessFailed as failed:
            raise ShardError(str(failed)) from None
        choice = Choice.from_json(said)
        # Only the first host has compiled the chosen step.
        if choice.chosen is not None and jax.process_index() > 0 and self._compile:
            self._step = self._trying.sharded(self._candidate(choice.chosen))
        return choice

    def _candidate(self, chosen: SearchCandidate) -> Candidate:
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
            # Nothing has compiled, so there is nothing to choose from.
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
    def step(self) -> ShardedStep | None:
        """Step of the choice as compiled, without the calls of trials; None without a choice."""
        chosen = (n.position for n in self._nodes if n.outcome == CHOSEN and n.position is not None)
        step = self._step or next(map(self._trying.step, chosen), None)
        if step is not None:
            step.restart()
        return step

    def _over(self) -> bool:
        return self._interrupted or time.monotonic() >= self._end

    def _plan_all(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Plan all candidates, forms of attention and expert strategies included."""
        for at, node in enumerate(self._nodes):
            if self._over():
                return
            if isinstance(node.candidate, RefusedCandidate):
                node.outcome, node.why = REFUSED, node.candidate.why
            elif self._planned(node, args, kwargs, f", {at + 1} of {len(self._nodes)}"):
                self._put(node, node.min_seconds)
                forms = [SearchNode(each) for each in attention_variants(node.candidate, self._requests)]
                self._nodes += forms  # planned later in this loop
                self._families += forms
            if at + 1 == len(self._nodes):
                self._with_experts()

    def _with_experts(self) -> None:
        """Add expert strategies if the step has experts and the user named no strategies."""
        found = any(node.sketch is not None and node.sketch.experts for node in self._nodes)
        if found and tuple(self._requests.strategies) == SEARCHED_STRATEGIES and "ep" not in self._order_of:
            more = [SearchNode(each) for each in strategy_space(replace(self._requests, strategies=EXPERT_STRATEGIES))]
            self._nodes += more
            self._families += more
            self._order_of |= {name: len(self._nodes) + k for k, name in enumerate(EXPERT_STRATEGIES)}

    def _planned(self, node: SearchNode, args: Sequence[Any], kwargs: dict[str, Any], place: str = "") -> bool:
        """Plan a candidate; return whether planning worked.

        Args:
            node: Candidate.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            place: Position of the candidate, as text for the progress line.
        """
        assert isinstance(node.candidate, Candidate)
        self._say(f"planning {node.candidate.label}{place}")
        try:
            # Tracing runs the user's code, in one thread at a time.
            with self._trying.python:
                step = self._trying.sharded(node.candidate)
                node.sketch = estimate_plan(step, node.candidate, args, kwargs, self._chip)
        except ShardError as error:
            node.outcome, node.why = REFUSED, " ".join(str(error).split())
            return False
        except Exception as error:  # another candidate may work
            node.outcome, node.why = REFUSED, described(error)
            self._failures.append(error)
            able = sum(isinstance(each.candidate, Candidate) for each in self._families)
            if (
                # Two candidates with the same error, none without: the step itself fails, and no further candidate is
                # worth planning.
                len(self._failures) == min(2, able) and not self._heap and len(set(map(repr, self._failures))) == 1
            ):
                raise self._failures[0] from None
            return False
        # A variant with less memory is taken to be no faster than its base.
        node.min_seconds = max(
            node.sketch.min_seconds or 0.0, 0.0 if node.min_seconds == math.inf else node.min_seconds
        )
        return True

    def _put(self, waiting: SearchNode | MemoryVariants, least: float) -> None:
        """Queue a candidate or variants by lower bound; likely to fit goes first, and the best guess among equal
        bounds."""
        late = isinstance(waiting, SearchNode) and not self._likely(waiting)
        known = waiting.sketch if isinstance(waiting, SearchNode) else waiting.base.sketch
        guess = least if known is None or known.seconds is None else known.seconds
        # The counter decides between equals: nodes have no order.
        heapq.heappush(self._heap, (late, least, guess, next(self._order), waiting))

    def _waiting(self) -> int:
        """Return the number of candidates that may still be compiled."""
        heap = [waiting for *_, waiting in list(self._heap)]
        return sum(len(each.variants) if isinstance(each, MemoryVariants) else 1 for each in heap)

    def _likely(self, node: SearchNode) -> bool:
        """Return whether a candidate is likely to fit, by estimate."""
        needs = None if node.sketch is None else node.sketch.peak_bytes
        return needs is None or self._limit is None or needs <= self._limit * (NEAR if self._compile else 1)

    def _next(self, args: Sequence[Any], kwargs: dict[str, Any]) -> SearchNode | None:
        """Return the next candidate to try; None if no queued candidate can be better, or none is ready."""
        while self._heap and not self._over():
            _, least, *_, node = heapq.heappop(self._heap)
            if isinstance(node, MemoryVariants):
                self._plan_next_variant(node, least, args, kwargs)
            elif self._too_large(node):
                self._expand(node)
            elif self._slower(node.min_seconds, node):
                node.outcome = BOUND
            elif not self._likely(node) and self._expand(node):
                # Behind its variants that save memory.
                self._put(node, node.min_seconds)
            else:
                return node
        return None

    def _feed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
        """Return the position of the next candidate to compile; None for none now."""
        self._settle()
        node = self._next(args, kwargs) or self._smallest()
        if node is None:
            return None
        assert isinstance(node.candidate, Candidate)
        node.position, node.outcome, node.why = self._trying.add(node.candidate), LEFT, ""
        return node.position

    def _smallest(self) -> SearchNode | None:
        """Return the candidate with the smallest estimated memory, if estimates alone ruled out all candidates."""
        if self._over() or any(n.position is not None for n in self._nodes):
            return None
        # Estimates err, so the compiler has the last word.
        room = [
            (n.sketch.peak_bytes, k, n)
            for k, n in enumerate(self._nodes)
            if n.outcome == ESTIMATE and n.sketch is not None and n.sketch.peak_bytes is not None
            if self._limit is None or (n.sketch.array_bytes or 0) <= self._limit
        ]
        return min(room)[-1] if room else None

    def _plan_only(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Give outcomes by plans alone."""
        while (node := self._next(args, kwargs)) is not None:
            node.outcome = SLOWER if self._likely(node) else ESTIMATE
            node.why = "" if self._likely(node) else "it needs more than a device has"

    def _plan_next_variant(
        self, ladder: MemoryVariants, least: float, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Plan the next variant with less memory and queue it; queue the other variants behind.

        Nothing is planned if the candidate itself is too slow.
        """
        if self._slower(least):
            return
        node = SearchNode(ladder.variants.pop(0), min_seconds=ladder.base.min_seconds)
        self._nodes.append(node)
        if isinstance(node.candidate, RefusedCandidate):
            node.outcome, node.why = REFUSED, node.candidate.why
        elif self._planned(node, args, kwargs):
            if self._saves(node, ladder.base):
                self._put(node, node.min_seconds)
            else:
                node.outcome, node.why = ESTIMATE, "it needs hardly less than without"
            least = max(least, node.min_seconds)
        if ladder.variants:
            # By the bound of the last variant: the next ones wait until a candidate as fast is tried.
            self._put(ladder, least)

    def _saves(self, node: SearchNode, of: SearchNode) -> bool:
        """Return whether a variant is estimated to need clearly less memory than the base candidate."""
        mine, theirs = (None if n.sketch is None else n.sketch.peak_bytes for n in (node, of))
        return mine is None or theirs is None or mine <= LESS * theirs

    def _slower(self, least: float, node: SearchNode | None = None) -> bool:
        """Return whether a candidate can't win.

        A candidate loses if the lower bound `least` is above the best time known to fit, unless `node` is simpler and
        near enough. No candidate loses if the hardware's figures are unknown.
        """
        return self._known and least >= self._best() * (WIDER if self._run else self._more(node))

    def _more(self, node: SearchNode | None) -> float:
        first = self._first(self._fitting(), self._seconds)
        return 1.0 if node is None or not first else allowance(node, first[0], self._order_of)

    def _first(self, ranked: list[SearchNode], seconds: Callable[[SearchNode], float | None]) -> list[SearchNode]:
        return simplest_first(ranked, seconds, self._order_of)

    def _too_large(self, node: SearchNode) -> bool:
        """Return whether a candidate is ruled out by its estimated memory, and set the outcome."""
        known, limit = node.sketch, self._limit
        if known is None or known.array_bytes is None or known.peak_bytes is None or limit is None:
            return False
        if known.array_bytes > limit:
            node.outcome, node.why = ESTIMATE, "its arrays alone take more than a device has"
            return True
        if known.peak_bytes > FAR * limit:
            node.outcome, node.why = ESTIMATE, "it needs far more than a device has"
            return True
        return False

    def _expand(self, node: SearchNode) -> bool:
        """Queue variants of a candidate that take less memory, if the arrays alone fit; return whether any is new."""
        held = 0 if node.sketch is None else node.sketch.array_bytes or 0
        if node.opened or node not in self._families or (self._limit is not None and held > self._limit):
            return False
        node.opened = True
        assert isinstance(node.candidate, Candidate)
        known = node.sketch or PlanEstimate()
        rungs = list(
            memory_variants(
                node.candidate, known.compute_seconds or 0.0, known.communication_seconds or 0.0, self._requests
            )
        )
        if rungs:
            self._put(MemoryVariants(node, rungs), node.min_seconds)
        return bool(rungs)

    def _settle(self) -> None:
        """Read the results of compiled candidates; queue variants with less memory for those that don't fit."""
        for node in [n for n in self._nodes if n.position is not None and n.outcome == LEFT]:
            assert node.position is not None
            node.trial = self._trying.trial(node.position)
            if node.trial is None:
                continue
            if node.trial.fits is False:
                node.outcome = TOO_LARGE
                self._expand(node)
            elif node.trial.report is None:
                node.outcome, node.why = REFUSED, node.trial.why or ""
            else:
                node.outcome = SLOWER

    def _fitting(self) -> list[SearchNode]:
        """Return the candidates known to fit, fastest first, by predictions of their programs, else of their plans."""
        fit = [n for n in self._nodes if n.outcome == SLOWER]
        return sorted(fit, key=lambda n: math.inf if (t := self._seconds(n)) is None else t)

    def _seconds(self, node: SearchNode) -> float | None:
        if not self._compile:
            return None if node.sketch is None else node.sketch.seconds
        return None if node.trial is None else node.trial.predicted

    def _best(self) -> float:
        """Return the seconds to beat; infinity if unknown."""
        known = [t for n in self._fitting() if (t := self._seconds(n)) is not None]
        # Plans are uncertain, and a runner-up is wanted as well: the second best time is to beat.
        best = 0 if self._compile else 1
        return known[best] if len(known) > best else math.inf

    def _run_best(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Run the candidates that fit on copies of the arguments, best predictions first."""
        order = [n.position for n in self._fitting() if n.position is not None]
        self._trying.run_all(args, kwargs, order)
        for node in self._nodes:
            if node.position is not None and node.outcome == SLOWER:
                node.trial = self._trying.trial(node.position)

    def _has_something(self, seconds: float) -> None:
        """Raise ShardError if the budget ended without a result, or all candidates were refused for the same reason."""
        if not self._compile or self._interrupted or any(n.trial is not None for n in self._nodes):
            return
        if self._over():
            raise budget_error(self._nodes, self._budget or 0.0, seconds)
        refused = {n.why for n in self._nodes if n.outcome == REFUSED}
        if len(refused) == 1 and all(n.outcome == REFUSED for n in self._nodes):
            raise ShardError(next(iter(refused)))

    def _choice(self, seconds: float) -> Choice:
        """Set the remaining outcomes and return the choice."""
        comparison = self._trying.comparison
        ranked, compared = self._ranked(comparison)
        for node in self._nodes:
            if node.outcome == LEFT and node.position is None and self._slower(node.min_seconds):
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
            candidates=tuple(map(as_considered, first)),
            path=decision_questions(self._nodes, self._chip, self._limit, compared),
            source=(comparison.source or "predicted") if self._compile else "planned",
            on=self._chip.name if self._known else None,
            error=None if comparison.source == "measured" else PREDICTION_ERROR,
            limit=self._limit,
            budget=self._budget,
            seconds=seconds,
            notes=notes(self._interrupted, None if self._known else self._chip),
        )

    def _ranked(self, comparison: Comparison) -> tuple[list[SearchNode], Callable[[SearchNode], float | None]]:
        """Return the possible answers, fastest first, and a function to the seconds compared.

        By predicted times, the simplest of the candidates within the error comes first.
        """
        if not self._compile:
            return self._first(self._fitting(), self._seconds), self._seconds
        fit, seconds = as_compared(self._fitting(), comparison)
        return fit if comparison.source == "measured" else self._first(fit, seconds), seconds
