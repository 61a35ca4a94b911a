"""A split step compiled for its ranks and run: one actor a rank, each with its own actions."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..plan import Plan
from ..program.ir import Value
from ..program.settings import own_work
from ..schedule.actions import KINDS, parts
from ..temporary import Held, within
from .actors import Actor, together
from .homes import Homes, Insides, Ranks
from .jobs import Elsewhere, Job, Key, Made, made_elsewhere, make, shape_of
from .leaves import Leaf, Output
from .loss_stages import LossStages
from .programs import HeldParts
from .rank import LossPlan, RankPlan, RankRun, StagePlan
from .rank_jobs import Prepared, Settled, Whole, group_job
from .record import Event, Handover, Run
from .routes import sending
from .split import Split
from .stage_jobs import StageJobs
from .transfer import Route

_KEPT = 32  # timed calls that are looked back on


class Pipeline:
    """A `Split` on the ranks of a mesh, where `plan` says where arrays lie on the sub-mesh of one rank.

    Called with the flat inputs of the step, as `leaves` says where, it gives the flat outputs. `donated`: inputs whose
    memory it may take over. `peaks`: of the last call, the most activations that each rank held, one for each
    microbatch of each stage.
    """

    def __init__(self, split: Split, plan: Plan, ranks: Ranks, donated: Collection[int] = ()):
        self.split, self.plan, self.ranks = split, plan, ranks
        self.homes = Homes(split, plan, ranks)
        self._insides, alike = [Insides(loss, self.homes) for loss in split.losses], {}
        rank_of, m = split.schedule.rank_of, split.schedule.microbatches
        self.stages = [
            StageJobs(s, p, rank_of[s], self.homes, m, alike, self.insides(s).of(p))
            for s, p in enumerate(split.programs)
        ]
        self._whole = [Whole(loss) for loss in split.losses]
        each = range(len(ranks))
        self._prepared = [
            Prepared(loss, self.homes, self.stages, rank, whole)
            for loss, whole in zip(split.losses, self._whole, strict=True)
            for rank in each
        ]
        self.settled = [
            Settled(loss, self.homes, self.stages, rank) for loss in split.losses for rank in each
        ]
        self.wants = [self._wanted(rank) for rank in each]
        self.leaves = [Leaf(i, self.homes, self.wants) for i in range(len(split.leaves))]
        self.outputs = [Output(o, self.homes) for o in range(len(split.outputs))]
        self._taken = self._may_take(donated)
        around, layout = split.around.program, self.homes.around
        self.beside = None if layout is None else HeldParts(layout, handed_on=layout.read_elsewhere)
        self.groups = [
            group_job(around, self.beside, g, self.homes, self._taken) for g in split.placed.groups
        ]
        self._lock = threading.RLock()
        self._actors: list[Actor] = []
        self._runs: deque[Run] = deque(maxlen=_KEPT)
        self.peaks: tuple[int, ...] = (0,) * len(ranks)

    def insides(self, stage: int) -> Insides:
        """The layouts of the loss that a stage belongs to."""
        return self._insides[self.split.loss_of(stage).number]

    def _number(self, loss: LossStages, rank: int) -> int:
        """Of what there is once for each loss on each rank."""
        return loss.number * len(self.ranks) + rank

    def _wanted(self, rank: int) -> set[Value]:
        """The values around the gradient calls that a rank reads."""
        split, wanted = self.split, set()
        for group in split.placed.groups:
            if group.place == rank:
                wanted.update(group.reads)
        for loss, whole in zip(split.losses, self._whole, strict=True):
            for s in loss.stages_of[rank]:
                wanted.update(loss.input_of[i] for i in loss.program(s).stage.parameters)
            prepared = self._prepared[self._number(loss, rank)]
            wanted.update(prepared.reads)
            wanted.update(
                which for others in prepared.others.values() for kind, which in others if kind == "value"
            )
            if rank == loss.hub:
                wanted.update(whole.outs_read)
        if rank == split.hub:
            wanted.update(v for part in split.outputs for v in part.values if v not in split.placed.at)
        return wanted

    def _may_take(self, donated: Collection[int]) -> frozenset[Value]:
        """The values of donated inputs that one group alone reads, after all gradients, and no stage keeps."""
        split = self.split
        values = {v for i in donated for v in split.leaves[i].values}
        ends = {v for part in split.outputs for v in part.values}
        readers: dict[Value, list[Any]] = {v: [] for v in values}
        for group in split.placed.groups:
            for v in values.intersection(group.reads):
                readers[v].append(group)
        at = split.placed.at
        return frozenset(
            v
            for v, groups in readers.items()
            if len(groups) == 1
            and groups[0].phase == len(split.losses)
            and groups[0].place == at.get(v)
            and v not in ends
            and not any(v in wanted for r, wanted in enumerate(self.wants) if r != at.get(v))
        )

    @property
    def last(self) -> Run | None:
        """What was measured in the last call that was timed."""
        return self._runs[-1] if self._runs else None

    @property
    def typical(self) -> Run | None:
        """What was measured in the call that took longer than half of those that were timed of late."""
        runs = sorted(self._runs, key=lambda run: run.seconds)
        return runs[(len(runs) - 1) // 2] if runs else None

    def order(self, rank: int) -> list[tuple[Key, str | None]]:
        """The programs that a rank runs in a step, in the order in which it calls them, each with the action that it
        is, where it is one."""
        split, placed = self.split, self.split.placed.groups
        calls: list[tuple[Key, str | None]] = []

        def groups(phase: int) -> None:
            here = (g for g, group in enumerate(placed) if (group.place, group.phase) == (rank, phase))
            calls.extend((("group", g), None) for g in here)

        actions = [a for step in split.schedule.grid[rank] for a in parts(step)]
        for loss in split.losses:
            groups(loss.number)
            number = self._number(loss, rank)
            calls.append((("prepare", number), None))
            calls += [((a.kind, a.stage), str(a)) for a in actions if a.stage in loss.stages_of[rank]]
            calls.append((("settle", number), None))
            if rank == loss.hub:
                calls.append((("finish", loss.number), None))
        groups(len(split.losses))
        return calls

    def rank_of(self, key: Key) -> int:
        """Where a program runs."""
        kind, number = key
        if kind in KINDS:
            return self.split.schedule.rank_of[number]
        if kind == "group":
            return self.split.placed.groups[number].place
        return self.split.losses[number].hub if kind == "finish" else number % len(self.ranks)

    def jobs(self) -> dict[Key, Job]:
        """All programs of the pipeline."""
        split = self.split
        jobs: dict[Key, Job] = {}
        for grid in split.schedule.grid:
            for action in (a for step in grid for a in parts(step)):
                key = action.kind, action.stage
                if key not in jobs:
                    jobs[key] = self.stages[action.stage].job(action.kind)
        for number, (prepared, settled) in enumerate(zip(self._prepared, self.settled, strict=True)):
            jobs["prepare", number] = prepared.job
            jobs["settle", number] = settled.job
        for g, (job, _, _) in enumerate(self.groups):
            jobs["group", g] = job
        for loss in split.losses:
            jobs["finish", loss.number] = self._finish(loss)
        return jobs

    def _finish(self, loss: LossStages) -> Job:
        """The results of a gradient call, on the rank that has the loss."""
        split, homes, whole = self.split, self.homes, self._whole[loss.number]
        m = split.schedule.microbatches
        avals = [shape_of(split.around.program.avals[v]) for v in whole.outs_read]
        at = [homes.sharding(v, loss.hub) for v in whole.outs_read]
        given, given_at = [], []
        for j in range(len(loss.call.outputs.given)):
            s, k = loss.giver(j)
            given.append([shape_of(loss.cut.program.closed.out_avals[j])] * m)
            given_at.append([homes.at(loss.hub, self.stages[s].made[k].spec)] * m)
        outs = [homes.sharding(v, loss.hub) for v in loss.made_by_hub]
        return Job(whole.results, (avals, given), (at, given_at), outs)

    def compile(self, *, calls_host: bool = False) -> None:
        """Compile everything and start the actors; `calls_host`: the step calls functions of the host that may
        raise."""
        self.programs = make(self.jobs(), calls_host=calls_host)
        self._plans = [self._rank(rank, self.programs) for rank in range(len(self.ranks))]
        self._actors = [Actor(rank) for rank in range(len(self.ranks))]

    def compile_elsewhere(self, compiler: Elsewhere, say: Callable[[str], None]) -> None:
        """Compile everything for devices that are not attached: it can't be called then."""
        self.programs = made_elsewhere(self.jobs(), compiler, say)

    def _rank(self, rank: int, made: Mapping[Key, Made]) -> RankPlan:
        split, homes, wants = self.split, self.homes, self.wants
        at = split.placed.at
        leaves = [v for i, part in enumerate(split.leaves) for v in part.values if at.get(v) == rank]
        groups = []
        for g, group in enumerate(split.placed.groups):
            if group.place == rank:
                _, kept, given = self.groups[g]
                send = sending(rank, group.wanted, wants, homes)
                groups.append((group, made["group", g].call, kept, given, send))
        return RankPlan(
            rank=rank,
            losses=[self._loss(loss, rank, made) for loss in split.losses],
            leaves=sending(rank, leaves, wants, homes),
            groups=groups,
            takes=bool(self._taken),
            ends=[v for part in split.outputs for v in part.values if at.get(v, split.hub) == rank],
            numbers=[jax.device_put(np.int32(m), homes.at(rank)) for m in range(split.schedule.microbatches)],
        )

    def _loss(self, loss: LossStages, rank: int, made: Mapping[Key, Made]) -> LossPlan:
        schedule, homes, wants = self.split.schedule, self.homes, self.wants
        number, of_hub = self._number(loss, rank), rank == loss.hub
        settled = self.settled[number]
        carried = {
            len(loss.call.outputs.given) + n: loss.results[j].values[0]
            for n, j in enumerate(loss.call.outputs.carried)
        }
        mine = {j: v for j, v in carried.items() if rank == schedule.rank_of[loss.giver(j)[0]]}
        stages = {s: self._stage(s, made) for s in loss.stages_of[rank]}
        actions = (a for step in schedule.grid[rank] for a in parts(step) if a.stage in stages)
        return LossPlan(
            loss=loss,
            prepared=self._prepared[number],
            settled=settled,
            prepare=_call(made["prepare", number]),
            settle=_call(made["settle", number]),
            finish=_call(made["finish", loss.number]) if of_hub else None,
            gradients=sending(rank, [loss.gradient_of[i] for i in settled.owned], wants, homes),
            results=sending(rank, loss.made_by_hub if of_hub else [], wants, homes),
            carried={j: sending(rank, [v], wants, homes) for j, v in mine.items()},
            outs_read=self._whole[loss.number].outs_read if of_hub else [],
            actions=[(a.kind, stages[a.stage], a.microbatch, str(a)) for a in actions],
            sums={o: self._route_of_sums(settled.sent[o], o) for o in settled.sent},
            given=self._given_of(loss, rank),
        )

    def _stage(self, s: int, made: Mapping[Key, Made]) -> StagePlan:
        program, stage = self.split.programs[s], self.split.programs[s].stage
        return StagePlan(
            number=s,
            programs={kind: m.call for (kind, n), m in made.items() if n == s and m.call is not None},
            takes=bool(stage.ins),
            returns=bool(program.moving_outs),
            outs=len(stage.outs),
            gives=tuple(stage.gives),
            backs=len(program.moving_ins),
            on=self._way(s, s + 1),
            back=self._way(s, s - 1),
            seed=self._seed(s),
        )

    def _seed(self, s: int) -> list:
        """The cotangent of the loss, where the stage makes it."""
        if not self.split.programs[s].makes_loss:
            return []
        loss = self.split.loss_of(s)
        dtype = loss.cut.program.closed.out_avals[0].dtype
        return [jax.device_put(np.asarray(loss.call.seed, dtype), self.stages[s].cotangents[-1])]

    def _way(self, s: int, to: int) -> tuple[Route, int] | None:
        """The way of a stage's results to the next stage, or to the one before, and the rank of that."""
        if to not in self.split.loss_of(s).stages:
            return None
        there = self.stages[to]
        targets = there.ins if to > s else there.cotangents[: len(there.program.moving_outs)]
        return Route(targets, of_programs=True), self.split.schedule.rank_of[to]

    def _route_of_sums(self, sent: Sequence[tuple[int, int]], owner: int) -> Route:
        return Route([self.homes.at(owner, self.stages[s].sums_at[k].spec) for s, k in sent])

    def _given_of(self, loss: LossStages, rank: int) -> tuple[list[int], Route | None]:
        """What the rank's stages give of a loss, and its way to the hub."""
        mine, targets = [], []
        hub, m = loss.hub, self.split.schedule.microbatches
        for j in range(len(loss.call.outputs.given)):
            s, k = loss.giver(j)
            if self.split.schedule.rank_of[s] == rank:
                mine.append(j)
                targets += [self.homes.at(hub, self.stages[s].made[k].spec)] * m
        return mine, Route(targets) if mine and rank != hub else None

    def __call__(self, arrays: Sequence[Any], *, timed: bool = False) -> list:
        """One step. Where a rank fails, or the user interrupts, all ranks are stopped first, and inputs are whole."""
        with Held(self._lock):
            here: list[dict[Value, Any]] = [{} for _ in self._actors]
            for leaf, x in zip(self.leaves, arrays, strict=True):
                leaf.hand_out(x, here)
            start = time.perf_counter()
            runs = [
                RankRun(plan, actor, self._actors, given, start if timed else None)
                for plan, actor, given in zip(self._plans, self._actors, here, strict=True)
            ]
            together(self._actors, within(own_work)(lambda actor: runs[actor.rank].run()))
            self.peaks = tuple(run.peak for run in runs)
            made = {v: x for run in runs for v, x in run.made.items()}
            if timed:
                self._runs.append(self._measured(runs, time.perf_counter() - start))
            return [output.put_together(made) for output in self.outputs]

    def _measured(self, runs: Sequence[RankRun], seconds: float) -> Run:
        events = sorted(
            (Event(run.plan.rank, *event) for run in runs for event in run.events),
            key=lambda e: (e.rank, e.start),
        )
        handovers = tuple(Handover(*h) for run in runs for h in run.handovers)
        return Run(self.split.schedule, tuple(events), handovers, self.peaks, seconds)


def _call(made: Made) -> Callable[..., Any]:
    """A program of devices that are attached, as a function."""
    assert made.call is not None
    return made.call
