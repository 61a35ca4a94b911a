"""One rank's part of a step: what it runs, what it takes from other ranks, and what it hands to them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from ..program.ir import Value
from ..schedule.actions import parts
from .actors import Actor
from .places import Group
from .rank_jobs import Prepared, Settled
from .routes import Sending
from .split import Split
from .transfer import Route

Call = Callable[..., Any]


@dataclass(frozen=True)
class RankPlan:
    """All of a rank's part that is the same in every step.

    `programs` by kind and number. `forward`, `backward`: of each of its stages the way to the next one and to the one
    before. `sums`: the way of sums of gradients to the ranks that own the parameters; `given`: which outputs of the
    loss its stages give, and their way to the hub. `takes`: some program takes over memory of the step's inputs, which
    must not be lost to an error. `ends`: the step's outputs here. `seed`: the cotangent of the loss.
    """

    rank: int
    split: Split
    programs: Mapping[Any, Call]
    prepared: Prepared
    settled: Settled
    leaves: Sending
    groups: Sequence[tuple[Group, Call, list[Value], list[Value], Sending]]
    gradients: Sending
    results: Sending
    carried: Mapping[int, Sending]
    outs_read: Sequence[Value]
    forward: Mapping[int, Route]
    backward: Mapping[int, Route]
    sums: Mapping[int, Route]
    given: tuple[list[int], Route | None]
    takes: bool
    ends: Sequence[Value]
    seed: Any
    numbers: Sequence[Any]

    @cached_property
    def actions(self) -> list[tuple[str, int, int, str]]:
        """Kind, stage, microbatch and name of each, in order."""
        found = [a for step in self.split.schedule.grid[self.rank] for a in parts(step)]
        return [(a.kind, a.stage, a.microbatch, str(a)) for a in found]


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
        self._given: dict[int, list[Any]] = {}

    def run(self) -> None:
        plan = self.plan
        self._send(plan.leaves)
        self._run_groups(before=True)
        self._prepare()
        act = {"F": self._forward, "B": self._backward, "I": self._input, "W": self._weight}
        for kind, s, m, name in plan.actions:
            try:
                act[kind](s, m, name)
            except Exception as error:
                error.add_note(f"in action {name} of the pipeline: stage {s}, microbatch {m}")
                raise
        if plan.takes:
            self._all_well()
        self._settle()
        self._run_groups(before=False)
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

    def _run_groups(self, *, before: bool) -> None:
        for group, program, kept, given, send in self.plan.groups:
            if group.before == before:
                args = [self._want(v) for v in kept], [self._want(v) for v in given]
                for v in given:
                    del self._have[v]
                self._send(send, program(*args))

    def _prepare(self) -> None:
        """What the stages of this rank read, and where they add up."""
        plan, split = self.plan, self.plan.split
        prepared = plan.prepared
        made, zeros = plan.programs["prepare", plan.rank]([self._want(v) for v in prepared.reads])
        rest = iter(zeros)
        self._parameters, self._others, self._sums = {}, {}, {}
        for s in split.schedule.stages_of[plan.rank]:
            stage = split.programs[s].stage
            self._parameters[s] = [self._want(split.input_of[i]) for i in stage.parameters]
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

    def _forward(self, s: int, m: int, name: str) -> None:
        plan, program = self.plan, self.plan.split.programs[s]
        stage = program.stage
        ins = self._taken("forward", s - 1, s, m) if stage.ins else []
        others = self._others[s]
        outs = self._timed(name, plan.programs["F", s], plan.numbers[m], self._parameters[s], others, ins)
        n, g = len(stage.outs), len(stage.gives)
        if n:
            self._hand("forward", plan.forward[s], s, s + 1, m, outs[:n])
        for j, x in zip(stage.gives, outs[n : n + g], strict=True):
            self._give(s, j, x)
        self._held[s, m] = others, outs[n + g :]
        self.peak = max(self.peak, len(self._held) + len(self._waiting))

    def _give(self, s: int, j: int, x: Any) -> None:
        """A value that a microbatch gives of its loss, or state for the next one."""
        split = self.plan.split
        outputs = split.call.outputs
        first = len(outputs.given)
        if j < first:
            self._given.setdefault(j, []).append(x)
            return
        operand = list(outputs.carried.values())[j - first]
        stage = split.programs[s].stage
        self._others[s] = [
            x if split.loss.pieces[i].operand == split.first + operand else old
            for i, old in zip(stage.others, self._others[s], strict=True)
        ]
        self._given[j] = [x]

    def _cotangents(self, s: int, m: int) -> list:
        program = self.plan.split.programs[s]
        found = self._taken("backward", s + 1, s, m) if program.moving_outs else []
        return [*found, self.plan.seed] if program.makes_loss else found

    def _backward(self, s: int, m: int, name: str) -> None:
        others, kept = self._held.pop((s, m))
        rest = [*self._cotangents(s, m), *kept]
        program = self.plan.programs["B", s]
        back, self._sums[s] = self._timed(
            name, program, self._sums[s], self.plan.numbers[m], self._parameters[s], others, rest
        )
        self._hand_back(s, m, back)

    def _input(self, s: int, m: int, name: str) -> None:
        others, kept = self._held.pop((s, m))
        rest = [*self._cotangents(s, m), *kept]
        program, plan = self.plan.programs["I", s], self.plan
        outs = self._timed(name, program, plan.numbers[m], self._parameters[s], others, rest)
        n = len(plan.split.programs[s].moving_ins)
        self._waiting[s, m] = others, [*rest, *outs[n:]]
        self._hand_back(s, m, outs[:n])

    def _weight(self, s: int, m: int, name: str) -> None:
        others, rest = self._waiting.pop((s, m))
        program = self.plan.programs["W", s]
        _, self._sums[s] = self._timed(
            name, program, self._sums[s], self.plan.numbers[m], self._parameters[s], others, rest
        )

    def _hand_back(self, s: int, m: int, arrays: Sequence[Any]) -> None:
        if arrays:
            self._hand("backward", self.plan.backward[s], s, s - 1, m, arrays)

    def _hand(self, key: str, route: Route, s: int, to: int, m: int, arrays: Sequence[Any]) -> None:
        sent = None if self._start is None else time.perf_counter() - self._start
        other = self._actors[self.plan.split.schedule.rank_of[to]]
        other.give((key, to, m), (route(arrays), sent))

    def _taken(self, key: str, source: int, s: int, m: int) -> list:
        arrays, sent = self._actor.take((key, s, m))
        if self._start is not None:
            jax.block_until_ready(arrays)
            self.handovers.append((source, s, m, sent, time.perf_counter() - self._start))
        return arrays

    def _all_well(self) -> None:
        """Wait until every rank has all of its gradients: from here on memory of the step's inputs is taken over."""
        jax.block_until_ready((self._sums, self._given))
        others = [a for a in self._actors if a.rank != self.plan.rank]
        for actor in others:
            actor.give(("well", self.plan.rank), None)
        for actor in others:
            self._actor.take(("well", actor.rank))

    def _settle(self) -> None:
        """Gradients to the ranks that own their parameters, and what the loss gives to the hub."""
        plan, settled = self.plan, self.plan.settled
        for other, sent in settled.sent.items():
            arrays = plan.sums[other]([self._sums[s][k] for s, k in sent])
            self._actors[other].give(("sums", plan.rank), arrays)
        mine, route = plan.given
        if route is not None:
            moved = iter(route([x for j in mine for x in self._given[j]]))
            hub, m = self._actors[plan.split.hub], len(plan.numbers)
            for j in mine:
                hub.give(("given", j), [next(moved) for _ in range(m)])
        sums = [self._sums[s][k] for s, k in settled.own]
        for other in settled.received:
            sums += self._actor.take(("sums", other))
        self._sums.clear()
        self._send(plan.gradients, plan.programs["settle", plan.rank](sums))
        for j, sending in plan.carried.items():
            self._send(sending, self._given[j])
        if plan.rank == plan.split.hub:
            self._finish(mine)

    def _finish(self, mine: Sequence[int]) -> None:
        plan = self.plan
        given = [
            self._given[j] if j in mine else self._actor.take(("given", j))
            for j in range(len(plan.split.call.outputs.given))
        ]
        outs = plan.programs["finish", 0]([self._want(v) for v in plan.outs_read], given)
        self._send(plan.results, outs)
