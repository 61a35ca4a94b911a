"""One rank's part of a step: what it runs, what it takes from other ranks, and what it hands to them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..program.ir import Value
from .actors import Actor
from .loss_stages import LossStages
from .places import Group
from .rank_jobs import Prepared, Settled
from .routes import Sending
from .transfer import Route

Call = Callable[..., Any]


@dataclass(frozen=True)
class StagePlan:
    """What a rank runs of one stage, the same for every microbatch: looked up once, since an action takes microseconds.

    `takes`, `returns`: whether it reads what the stage before it hands on, and cotangents of what it hands on itself.
    `outs`, `backs`: how many results go on, and how many cotangents back. `gives`: the outputs of the loss that it
    makes, behind `outs`. `on`, `back`: the ways of both, with the ranks of their ends. `seed`: the cotangents of the
    loss, where the stage makes it.
    """

    number: int
    programs: Mapping[str, Call]
    takes: bool
    returns: bool
    outs: int
    gives: tuple[int, ...]
    backs: int
    on: tuple[Route, int] | None
    back: tuple[Route, int] | None
    seed: Sequence[Any]


@dataclass(frozen=True)
class LossPlan:
    """What a rank runs of one loss. `prepare`, `settle`: its programs before the actions and after them; `finish`: on
    the hub, the one that makes the loss's results. `actions`: kind, stage, microbatch and name of each, in order.
    `sums`: the way of sums of gradients to the ranks that own the parameters; `given`: which outputs of the loss its
    stages give, and their way to the hub.
    """

    loss: LossStages
    prepared: Prepared
    settled: Settled
    prepare: Call
    settle: Call
    finish: Call | None
    gradients: Sending
    results: Sending
    carried: Mapping[int, Sending]
    outs_read: Sequence[Value]
    actions: Sequence[tuple[str, StagePlan, int, str]]
    sums: Mapping[int, Route]
    given: tuple[list[int], Route | None]


@dataclass(frozen=True)
class RankPlan:
    """All of a rank's part that is the same in every step.

    `losses`, in the order in which they run. `takes`: some program takes over memory of the step's inputs, which must
    not be lost to an error. `ends`: the step's outputs here.
    """

    rank: int
    losses: Sequence[LossPlan]
    leaves: Sending
    groups: Sequence[tuple[Group, Call, list[Value], list[Value], Sending]]
    takes: bool
    ends: Sequence[Value]
    numbers: Sequence[Any]


class RankRun:
    """One step of a rank. `start`: when the step began, in seconds; None where it is not timed. `events`: action, start
    and end of each; `handovers`: as `record.Handover`. `peak`: the most activations held. `made`: the step's
    outputs."""

    def __init__(
        self,
        plan: RankPlan,
        actor: Actor,
        actors: Sequence[Actor],
        here: dict[Value, Any],
        start: float | None,
    ):
        self.plan, self._actor, self._actors, self._have, self._start = plan, actor, actors, here, start
        self.events: list[tuple[str, float, float]] = []
        self.handovers: list[tuple[int, int, int, float, float]] = []
        self.made: dict[Value, Any] = {}
        self.peak = 0
        self._held: dict[tuple[int, int], tuple] = {}
        self._waiting: dict[tuple[int, int], tuple] = {}

    def run(self) -> None:
        plan = self.plan
        self._send(plan.leaves)
        act = {"F": self._forward, "B": self._backward, "I": self._input, "W": self._weight}
        for phase, loss in enumerate(plan.losses):
            self._loss = loss
            self._run_groups(phase)
            self._prepare()
            for kind, stage, m, name in loss.actions:
                try:
                    act[kind](stage, m, name)
                except Exception as error:
                    error.add_note(f"in action {name} of the pipeline: stage {stage.number}, microbatch {m}")
                    raise
            if plan.takes and loss is plan.losses[-1]:
                self._all_well()
            self._settle()
        self._run_groups(len(plan.losses))
        self.made = {v: self._want(v) for v in plan.ends}

    def _send(self, sending: Sending, arrays: Sequence[Any] | None = None) -> None:
        if arrays is not None:
            self._have.update(zip(sending.values, arrays, strict=True))
        for other, (places, route) in sending.to.items():
            values = [sending.values[k] for k in places]
            moved = route([self._have[v] for v in values])
            for v, x in zip(values, moved, strict=True):
                self._actors[other].give(("value", v), x)

    def _want(self, v: Value) -> Any:
        if v not in self._have:
            self._have[v] = self._actor.take(("value", v))
        return self._have[v]

    def _run_groups(self, phase: int) -> None:
        for group, program, kept, given, send in self.plan.groups:
            if group.phase == phase:
                args = [self._want(v) for v in kept], [self._want(v) for v in given]
                for v in given:
                    del self._have[v]
                self._send(send, program(*args))

    def _prepare(self) -> None:
        """What the stages of this rank read, and where they add up."""
        plan, loss = self._loss, self._loss.loss
        prepared = plan.prepared
        made, zeros = plan.prepare([self._want(v) for v in prepared.reads])
        rest = iter(zeros)
        self._parameters, self._others, self._sums, self._given = {}, {}, {}, {}
        for s in loss.stages_of[self.plan.rank]:
            stage = loss.program(s).stage
            self._parameters[s] = [self._want(loss.input_of[i]) for i in stage.parameters]
            self._others[s] = [
                self._want(which) if kind == "value" else made[which] for kind, which in prepared.others[s]
            ]
            self._sums[s] = [next(rest) for _ in stage.parameters]

    def _timed(self, name: str, program: Call, *args: Any) -> Any:
        if self._start is None:
            return program(*args)
        start = time.perf_counter()
        outs = jax.block_until_ready(program(*args))
        self.events.append((name, start - self._start, time.perf_counter() - self._start))
        return outs

    def _forward(self, stage: StagePlan, m: int, name: str) -> None:
        s, n = stage.number, stage.outs
        ins = self._taken("forward", s - 1, s, m) if stage.takes else []
        others = self._others[s]
        outs = self._timed(name, stage.programs["F"], self.plan.numbers[m], self._parameters[s], others, ins)
        if n:
            self._hand("forward", stage.on, s, s + 1, m, outs[:n])
        kept = n
        for j in stage.gives:
            self._give(s, j, outs[kept])
            kept += 1
        self._held[s, m] = others, outs[kept:]
        self.peak = max(self.peak, len(self._held) + len(self._waiting))

    def _give(self, s: int, j: int, x: Any) -> None:
        """A value that a microbatch gives of its loss, or state for the next one."""
        loss = self._loss.loss
        outputs = loss.call.outputs
        first = len(outputs.given)
        if j < first:
            self._given.setdefault(j, []).append(x)
            return
        operand = list(outputs.carried.values())[j - first]
        stage = loss.program(s).stage
        self._others[s] = [
            x if loss.cut.pieces[i].operand == loss.first + operand else old
            for i, old in zip(stage.others, self._others[s], strict=True)
        ]
        self._given[j] = [x]

    def _behind(self, stage: StagePlan, m: int, kept: Sequence[Any]) -> list:
        """What a backward pass reads: cotangents of what the stage has handed on, of the loss, and what is kept."""
        s = stage.number
        cotangents = self._taken("backward", s + 1, s, m) if stage.returns else []
        return [*cotangents, *stage.seed, *kept]

    def _backward(self, stage: StagePlan, m: int, name: str) -> None:
        s = stage.number
        others, kept = self._held.pop((s, m))
        rest, number = self._behind(stage, m, kept), self.plan.numbers[m]
        back, self._sums[s] = self._timed(
            name, stage.programs["B"], self._sums[s], number, self._parameters[s], others, rest
        )
        if back:
            self._hand("backward", stage.back, s, s - 1, m, back)

    def _input(self, stage: StagePlan, m: int, name: str) -> None:
        s, n = stage.number, stage.backs
        others, kept = self._held.pop((s, m))
        rest, number = self._behind(stage, m, kept), self.plan.numbers[m]
        outs = self._timed(name, stage.programs["I"], number, self._parameters[s], others, rest)
        self._waiting[s, m] = others, [*rest, *outs[n:]]
        if n:
            self._hand("backward", stage.back, s, s - 1, m, outs[:n])

    def _weight(self, stage: StagePlan, m: int, name: str) -> None:
        s = stage.number
        others, rest = self._waiting.pop((s, m))
        _, self._sums[s] = self._timed(
            name,
            stage.programs["W"],
            *(self._sums[s], self.plan.numbers[m], self._parameters[s], others, rest),
        )

    def _hand(
        self, key: str, way: tuple[Route, int] | None, s: int, to: int, m: int, arrays: Sequence[Any]
    ) -> None:
        assert way is not None, f"stage {s} hands on to stage {to}"
        route, rank = way
        sent = None if self._start is None else time.perf_counter() - self._start
        self._actors[rank].give((key, to, m), (route(arrays), sent))

    def _taken(self, key: str, source: int, s: int, m: int) -> list:
        arrays, sent = self._actor.take((key, s, m))
        if self._start is not None:
            jax.block_until_ready(arrays)
            self.handovers.append((source, s, m, sent, time.perf_counter() - self._start))
        return arrays

    def _all_well(self) -> None:
        """Wait until every rank has all of its gradients, and what updates between the losses made: from here on memory
        of the step's inputs is taken over."""
        jax.block_until_ready((self._sums, self._given))
        if len(self.plan.losses) > 1:
            jax.block_until_ready(self._have)
        others = [a for a in self._actors if a.rank != self.plan.rank]
        for actor in others:
            actor.give(("well", self.plan.rank), None)
        for actor in others:
            self._actor.take(("well", actor.rank))

    def _settle(self) -> None:
        """Gradients to the ranks that own their parameters, and what the loss gives to the hub."""
        plan, settled, rank, c = self._loss, self._loss.settled, self.plan.rank, self._loss.loss.number
        for other, sent in settled.sent.items():
            arrays = plan.sums[other]([self._sums[s][k] for s, k in sent])
            self._actors[other].give(("sums", c, rank), arrays)
        mine, route = plan.given
        if route is not None:
            moved = iter(route([x for j in mine for x in self._given[j]]))
            hub, m = self._actors[plan.loss.hub], len(self.plan.numbers)
            for j in mine:
                hub.give(("given", c, j), [next(moved) for _ in range(m)])
        sums = [self._sums[s][k] for s, k in settled.own]
        for other in settled.received:
            sums += self._actor.take(("sums", c, other))
        self._sums.clear()
        self._send(plan.gradients, plan.settle(sums))
        for j, sending in plan.carried.items():
            self._send(sending, self._given[j])
        if plan.finish is not None:
            given = [
                self._given[j] if j in mine else self._actor.take(("given", c, j))
                for j in range(len(plan.loss.call.outputs.given))
            ]
            outs = plan.finish([self._want(v) for v in plan.outs_read], given)
            self._send(plan.results, outs)
