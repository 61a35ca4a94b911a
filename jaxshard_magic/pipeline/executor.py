"""Compile a split step for its ranks, and run it with one thread per rank.

Footguns:
- A rank's programs run in its own thread only. On CPU a program with available inputs runs inside the call, so that one
  thread with two ranks would run their programs one after the other.
- All ranks share one interpreter. An action costs about 20 us of Python, and whenever a call releases the interpreter
  lock, another rank goes first.
- Two ranks' shardings are never equal, even for equal programs: HLO numbers devices by position in the sub-mesh.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..plan import Plan
from ..program.ir import Value
from ..program.jax_settings import suspend_checks
from ..schedule.actions import KINDS, entry_actions
from ..temporary import AcquiredLock, run_in_context
from .actors import Actor, run_on_actors
from .jobs import (
    CompiledProgram,
    CompileJob,
    ProgramKey,
    TargetCompiler,
    compile_jobs,
    compile_jobs_for_target,
    shape_dtype_of,
)
from .programs import ShardedSubprograms
from .rank_jobs import FullBatchValues, PrepareJob, SettleJob, group_job
from .rank_run import LossPlan, RankPlan, RankRun, StagePlan, plan_sends
from .record import ActionEvent, Handover, PipelineRun
from .shardings import RankMeshes, StageLayouts, StepShardings
from .split_step import LossStages, SplitStep
from .stage_jobs import StageJobs
from .step_arrays import StepInput, StepOutput
from .transfer import ArrayTransfer

_KEPT = 32  # recent timed calls, for `median_run`
_TIMES = 3


class PipelineExecutor:
    """A split step on the ranks of a mesh.

    A call takes the flat inputs of the step, placed as `leaves` say, and returns the flat outputs.

    Args:
        split: The split step.
        plan: Plan of the whole step on the sub-mesh of one rank.
        ranks: The sub-meshes.
        donated: Inputs with memory that may be reused.

    Attributes:
        peaks: For each rank, the maximum number of activations held in the last call, one per microbatch and stage.
    """

    def __init__(self, split: SplitStep, plan: Plan, ranks: RankMeshes, donated: Collection[int] = ()):
        self.split, self.plan, self.ranks = split, plan, ranks
        self.shardings = StepShardings(split, plan, ranks)
        self._layouts, known_functions = [StageLayouts(loss, self.shardings) for loss in split.losses], {}
        rank_of, m = split.schedule.rank_of, split.schedule.microbatches
        self.stages = [
            StageJobs(s, p, rank_of[s], self.shardings, m, known_functions, self.stage_layouts(s).layout_if_sharded(p))
            for s, p in enumerate(split.programs)
        ]
        self._full_batch = [FullBatchValues(loss) for loss in split.losses]
        rank_numbers = range(len(ranks))
        self._prepared = [
            PrepareJob(loss, self.shardings, self.stages, rank, whole)
            for loss, whole in zip(split.losses, self._full_batch, strict=True)
            for rank in rank_numbers
        ]
        self.settle_jobs = [
            SettleJob(loss, self.shardings, self.stages, rank) for loss in split.losses for rank in rank_numbers
        ]
        self.values_read = [self._values_read_by(rank) for rank in rank_numbers]
        self.leaves = [StepInput(i, self.shardings, self.values_read) for i in range(len(split.leaves))]
        self.outputs = [StepOutput(o, self.shardings) for o in range(len(split.outputs))]
        self._donatable = self._find_donatable(donated)
        outer_program, layout = split.outer.program, self.shardings.outer_layout
        self.outer_lowering = (
            None if layout is None else ShardedSubprograms(layout, external_reads=layout.external_reads)
        )
        self.group_jobs = [
            group_job(outer_program, self.outer_lowering, g, self.shardings, self._donatable)
            for g in split.assignment.groups
        ]
        self._lock = threading.RLock()
        self._actors: list[Actor] = []
        self._runs: deque[PipelineRun] = deque(maxlen=_KEPT)
        self.peaks: tuple[int, ...] = (0,) * len(ranks)

    def stage_layouts(self, stage: int) -> StageLayouts:
        """Return the layouts of the loss to which a stage belongs."""
        return self._layouts[self.split.loss_of(stage).number]

    def _job_number(self, loss: LossStages, rank: int) -> int:
        """Return the index of a loss and rank among objects made once per loss and rank."""
        return loss.number * len(self.ranks) + rank

    def _values_read_by(self, rank: int) -> set[Value]:
        """Return the outer values read by a rank."""
        split, values_read = self.split, set()
        for group in split.assignment.groups:
            if group.rank == rank:
                values_read.update(group.inputs)
        for loss, whole in zip(split.losses, self._full_batch, strict=True):
            for s in loss.stages_by_rank[rank]:
                values_read.update(loss.input_values[i] for i in loss.stage_program(s).stage.parameters)
            prepared = self._prepared[self._job_number(loss, rank)]
            values_read.update(prepared.inputs)
            values_read.update(
                which for others in prepared.input_sources.values() for kind, which in others if kind == "value"
            )
            if rank == loss.loss_rank:
                values_read.update(whole.result_inputs)
        # Outputs without a rank, such as the batch returned unchanged, are read on the rank of the losses.
        if rank == split.loss_rank:
            values_read.update(
                v for part in split.outputs for v in part.values if v not in split.assignment.rank_of_value
            )
        return values_read

    def _find_donatable(self, donated: Collection[int]) -> frozenset[Value]:
        """Return the values of donated inputs that can be donated.

        A single group reads such a value, on the rank of the value and after all gradients. No other rank reads it, and
        it is no output of the step. Stages of its own rank may read it: they are done by then.
        """
        split = self.split
        values = {v for i in donated for v in split.leaves[i].values}
        step_outputs = {v for part in split.outputs for v in part.values}
        readers: dict[Value, list[Any]] = {v: [] for v in values}
        for group in split.assignment.groups:
            for v in values.intersection(group.inputs):
                readers[v].append(group)
        rank_of_value = split.assignment.rank_of_value
        return frozenset(
            v
            for v, groups in readers.items()
            # A donated array has a single reader: any other would find it deleted.
            if len(groups) == 1
            # The last phase: an error in any gradient leaves the inputs of the step intact.
            and groups[0].phase == len(split.losses)
            and groups[0].rank == rank_of_value.get(v)
            and v not in step_outputs
            and not any(v in wanted for r, wanted in enumerate(self.values_read) if r != rank_of_value.get(v))
        )

    @property
    def last_run(self) -> PipelineRun | None:
        """Measurements of the last timed call; None without one."""
        return self._runs[-1] if self._runs else None

    @property
    def median_run(self) -> PipelineRun | None:
        """Measurements of the timed call with the median duration among recent ones; None without one."""
        runs = sorted(self._runs, key=lambda run: run.seconds)
        return runs[(len(runs) - 1) // 2] if runs else None

    def call_order(self, rank: int) -> list[tuple[ProgramKey, str | None]]:
        """Return the programs of a rank in call order, each with its action as text, or None outside of actions."""
        split, placed = self.split, self.split.assignment.groups
        # Must match the order of calls in `RankRun.run`: a profiler's trace is assigned to programs by this order.
        calls: list[tuple[ProgramKey, str | None]] = []

        def groups(phase: int) -> None:
            here = (g for g, group in enumerate(placed) if (group.rank, group.phase) == (rank, phase))
            calls.extend((("group", g), None) for g in here)

        actions = [a for step in split.schedule.grid[rank] for a in entry_actions(step)]
        for loss in split.losses:
            groups(loss.number)
            number = self._job_number(loss, rank)
            calls.append((("prepare", number), None))
            calls += [((a.kind, a.stage), str(a)) for a in actions if a.stage in loss.stages_by_rank[rank]]
            calls.append((("settle", number), None))
            if rank == loss.loss_rank:
                calls.append((("finish", loss.number), None))
        groups(len(split.losses))
        return calls

    def rank_of(self, key: ProgramKey) -> int:
        """Return the rank on which a program runs."""
        kind, number = key
        if kind in KINDS:
            return self.split.schedule.rank_of[number]
        if kind == "group":
            return self.split.assignment.groups[number].rank
        return self.split.losses[number].loss_rank if kind == "finish" else number % len(self.ranks)

    def jobs(self) -> dict[ProgramKey, CompileJob]:
        """Return all programs of the pipeline."""
        split = self.split
        jobs: dict[ProgramKey, CompileJob] = {}
        for grid in split.schedule.grid:
            for action in (a for step in grid for a in entry_actions(step)):
                key = action.kind, action.stage
                if key not in jobs:
                    jobs[key] = self.stages[action.stage].job(action.kind)
        for number, (prepared, settled) in enumerate(zip(self._prepared, self.settle_jobs, strict=True)):
            jobs["prepare", number] = prepared.job
            jobs["settle", number] = settled.job
        for g, (job, _, _) in enumerate(self.group_jobs):
            jobs["group", g] = job
        for loss in split.losses:
            jobs["finish", loss.number] = self._finish_job(loss)
        return jobs

    def _finish_job(self, loss: LossStages) -> CompileJob:
        """Return the job for the results of a gradient call, on the rank of the loss."""
        split, homes, whole = self.split, self.shardings, self._full_batch[loss.number]
        m = split.schedule.microbatches
        avals = [shape_dtype_of(split.outer.program.avals[v]) for v in whole.result_inputs]
        at = [homes.sharding(v, loss.loss_rank) for v in whole.result_inputs]
        given, given_at = [], []
        for j in range(len(loss.call.outputs.computed)):
            s, k = loss.output_source(j)
            given.append([shape_dtype_of(loss.split_loss.program.closed.out_avals[j])] * m)
            given_at.append([homes.on_rank(loss.loss_rank, self.stages[s].forward_output_shardings[k].spec)] * m)
        outs = [homes.sharding(v, loss.loss_rank) for v in loss.combined_results]
        return CompileJob(whole.results, (avals, given), (at, given_at), outs)

    def compile(self, *, calls_host: bool = False) -> None:
        """Compile all programs and start the threads.

        Args:
            calls_host: The step calls host functions that may raise.
        """
        self.programs = compile_jobs(self.jobs(), calls_host=calls_host)
        self._plans = [self._rank_plan(rank, self.programs) for rank in range(len(self.ranks))]
        self._actors = [Actor(rank) for rank in range(len(self.ranks))]

    def compile_for_target(self, compiler: TargetCompiler, say: Callable[[str], None]) -> None:
        """Compile all programs for devices that are not attached. The pipeline can't be called afterwards.

        Args:
            compiler: The compiler of these devices.
            say: Called with the progress.
        """
        self.programs = compile_jobs_for_target(self.jobs(), compiler, say)

    def _rank_plan(self, rank: int, made: Mapping[ProgramKey, CompiledProgram]) -> RankPlan:
        split, homes, wants = self.split, self.shardings, self.values_read
        rank_of_value = split.assignment.rank_of_value
        leaves = [v for i, part in enumerate(split.leaves) for v in part.values if rank_of_value.get(v) == rank]
        groups = []
        for g, group in enumerate(split.assignment.groups):
            if group.rank == rank:
                _, retained, donated = self.group_jobs[g]
                send_plan = plan_sends(rank, group.outputs, wants, homes)
                groups.append((group, made["group", g].call, retained, donated, send_plan))
        return RankPlan(
            rank=rank,
            losses=[self._loss_plan(loss, rank, made) for loss in split.losses],
            input_sends=plan_sends(rank, leaves, wants, homes),
            groups=groups,
            donates_inputs=bool(self._donatable),
            step_outputs=[
                v for part in split.outputs for v in part.values if rank_of_value.get(v, split.loss_rank) == rank
            ],
            # Placed once per compile: a Python int would be transferred to the devices in each action.
            microbatch_numbers=[
                jax.device_put(np.int32(m), homes.on_rank(rank)) for m in range(split.schedule.microbatches)
            ],
        )

    def _loss_plan(self, loss: LossStages, rank: int, made: Mapping[ProgramKey, CompiledProgram]) -> LossPlan:
        schedule, homes, wants = self.split.schedule, self.shardings, self.values_read
        number, is_loss_rank = self._job_number(loss, rank), rank == loss.loss_rank
        settled = self.settle_jobs[number]
        carried = {
            len(loss.call.outputs.computed) + n: loss.results[j].values[0]
            for n, j in enumerate(loss.call.outputs.carried)
        }
        mine = {j: v for j, v in carried.items() if rank == schedule.rank_of[loss.output_source(j)[0]]}
        stages = {s: self._stage_plan(s, made) for s in loss.stages_by_rank[rank]}
        actions = (a for step in schedule.grid[rank] for a in entry_actions(step) if a.stage in stages)
        return LossPlan(
            loss=loss,
            prepare_job=self._prepared[number],
            settle_job=settled,
            prepare=_call(made["prepare", number]),
            settle=_call(made["settle", number]),
            finish=_call(made["finish", loss.number]) if is_loss_rank else None,
            gradient_sends=plan_sends(rank, [loss.gradient_values[i] for i in settled.owned_inputs], wants, homes),
            result_sends=plan_sends(rank, loss.combined_results if is_loss_rank else [], wants, homes),
            state_sends={j: plan_sends(rank, [v], wants, homes) for j, v in mine.items()},
            finish_inputs=self._full_batch[loss.number].result_inputs if is_loss_rank else [],
            actions=[(a.kind, stages[a.stage], a.microbatch, str(a)) for a in actions],
            sum_transfers={o: self._sums_transfer(settled.sent_sums[o], o) for o in settled.sent_sums},
            microbatch_outputs=self._microbatch_outputs(loss, rank),
        )

    def _stage_plan(self, s: int, made: Mapping[ProgramKey, CompiledProgram]) -> StagePlan:
        program, stage = self.split.programs[s], self.split.programs[s].stage
        return StagePlan(
            number=s,
            programs={kind: m.call for (kind, n), m in made.items() if n == s and m.call is not None},
            receives_activations=bool(stage.incoming),
            receives_cotangents=bool(program.differentiable_outgoing),
            outgoing_count=len(stage.outgoing),
            loss_outputs=tuple(stage.loss_outputs),
            cotangent_count=len(program.differentiable_incoming),
            forward_transfer=self._stage_transfer(s, s + 1),
            backward_transfer=self._stage_transfer(s, s - 1),
            loss_cotangents=self._loss_cotangents(s),
        )

    def _loss_cotangents(self, s: int) -> list:
        """Place the cotangent of the loss on the devices of a stage that computes the loss; empty elsewhere."""
        if not self.split.programs[s].makes_loss:
            return []
        loss = self.split.loss_of(s)
        dtype = loss.split_loss.program.closed.out_avals[0].dtype
        return [jax.device_put(np.asarray(loss.call.seed, dtype), self.stages[s].cotangent_shardings[-1])]

    def _stage_transfer(self, s: int, to: int) -> tuple[ArrayTransfer, int] | None:
        """Return the transfer of a stage's results to an adjacent stage, with its rank; None across losses."""
        if to not in self.split.loss_of(s).stages:
            return None
        there = self.stages[to]
        targets = (
            there.incoming_shardings
            if to > s
            # The last cotangent of a stage may be that of the loss, which no other stage sends.
            else there.cotangent_shardings[: len(there.program.differentiable_outgoing)]
        )
        return ArrayTransfer(targets, from_programs=True), self.split.schedule.rank_of[to]

    def _sums_transfer(self, sent: Sequence[tuple[int, int]], owner: int) -> ArrayTransfer:
        return ArrayTransfer([self.shardings.on_rank(owner, self.stages[s].sum_shardings[k].spec) for s, k in sent])

    def _microbatch_outputs(self, loss: LossStages, rank: int) -> tuple[list[int], ArrayTransfer | None]:
        """Return the loss outputs computed on a rank, and their transfer to the rank of the loss."""
        mine, targets = [], []
        hub, m = loss.loss_rank, self.split.schedule.microbatches
        for j in range(len(loss.call.outputs.computed)):
            s, k = loss.output_source(j)
            if self.split.schedule.rank_of[s] == rank:
                mine.append(j)
                targets += [self.shardings.on_rank(hub, self.stages[s].forward_output_shardings[k].spec)] * m
        return mine, ArrayTransfer(targets) if mine and rank != hub else None

    def __call__(self, arrays: Sequence[Any], *, timed: bool = False) -> list:
        """Run one step; `timed` records its actions.

        If a rank raises or the user interrupts, all ranks stop first, and the inputs stay intact.
        """
        with AcquiredLock(self._lock):
            values_by_rank: list[dict[Value, Any]] = [{} for _ in self._actors]
            for leaf, x in zip(self.leaves, arrays, strict=True):
                leaf.distribute(x, values_by_rank)
            start = time.perf_counter()
            runs = [
                RankRun(plan, actor, self._actors, given, start if timed else None)
                for plan, actor, given in zip(self._plans, self._actors, values_by_rank, strict=True)
            ]
            # A part of a step may have NaNs that the whole step never shows: the user's checks for them are off.
            run_on_actors(self._actors, run_in_context(suspend_checks)(lambda actor: runs[actor.rank].run()))
            self.peaks = tuple(run.peak for run in runs)
            computed = {v: x for run in runs for v, x in run.outputs.items()}
            if timed:
                self._runs.append(self._make_run(runs, time.perf_counter() - start))
            return [output.assemble(computed) for output in self.outputs]

    def _make_run(self, runs: Sequence[RankRun], seconds: float) -> PipelineRun:
        events = sorted(
            (ActionEvent(run.plan.rank, *event) for run in runs for event in run.events),
            key=lambda e: (e.rank, e.start),
        )
        handovers = tuple(Handover(*h) for run in runs for h in run.handovers)
        return PipelineRun(self.split.schedule, tuple(events), handovers, self.peaks, seconds)


def _call(made: CompiledProgram) -> Callable[..., Any]:
    """Return the function of a program with attached devices."""
    assert made.call is not None
    return made.call


def measure_unit_seconds(pipeline: PipelineExecutor) -> list[list[float] | None]:
    """Measure the seconds of each loss's units, forward and backward together.

    A unit gets its share, by FLOPs, of the best of three runs of its stage's programs. All inputs are zeros, since
    times do not depend on values.

    Returns:
        One list per loss; None for a loss that can't be split.
    """
    losses: list[list[float] | None] = []
    for loss in pipeline.split.losses:
        if loss.split_error is not None:
            losses.append(None)
            continue
        times = []
        for s, units in zip(loss.stages, loss.split_loss.units, strict=True):
            kinds = [kind for kind, stage in pipeline.programs if kind in KINDS and stage == s]
            seconds = sum(_program_seconds(pipeline, kind, s) for kind in kinds)
            total = sum(unit.cost for unit in units)
            times += [seconds * (unit.cost / total if total else 1 / len(units)) for unit in units]
        losses.append(times)
    return losses


def _program_seconds(pipeline: PipelineExecutor, kind: str, s: int) -> float:
    job, program = pipeline.stages[s].job(kind), pipeline.programs[kind, s].call
    assert program is not None
    best = float("inf")
    for _ in range(_TIMES + 1):  # one more, since the first run is a warm-up
        args = jax.block_until_ready(_zeros(job))
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        best = min(best, time.perf_counter() - start)
    return best


def _zeros(job: CompileJob) -> Any:
    return jax.tree.map(lambda a, at: jax.device_put(_zero(a), at), job.avals, job.in_shardings)


def _zero(aval: jax.ShapeDtypeStruct) -> Any:
    if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.zeros(aval.shape, aval.dtype)
    kinds: list[Any] = []
    # `jax.random.key_impl` takes no ShapeDtypeStruct, but a tracer.
    jax.eval_shape(lambda keys: kinds.append(jax.random.key_impl(keys)), aval)
    return jnp.broadcast_to(jax.random.key(0, impl=kinds[0]), aval.shape)
