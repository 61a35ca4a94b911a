"""Programs of a rank other than its stages' actions: before them, after them, and for the outer program."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..gradients.accumulate import accumulation_dtype
from ..gradients.partial_replay import PartialReplay
from ..gradients.rows import microbatch_rows
from ..gradients.rows import split_microbatches as in_microbatches
from ..program.ir import Program, Value
from ..program.op_labels import GRADIENT
from .equation_groups import EquationGroup
from .jobs import CompileJob, shape_dtype_of
from .programs import PlainSubprograms, ShardedSubprograms
from .shardings import StepShardings
from .split_step import LossStages
from .stage_jobs import StageJobs
from .stages import input_positions_read


class FullBatchValues:
    """Computations on the full batch: sums needed by the loss of a microbatch, and results of the gradient call.

    No layout constrains them: they combine a few numbers.

    Args:
        loss: The loss.
    """

    def __init__(self, loss: LossStages):
        self._loss, self._call = loss, loss.call
        self._norms = list(self._call.followed.full_batch_values.values())
        outputs, program = self._call.outputs, self._call.large
        outs = [v for j, v in enumerate(program.outputs) if v is not None and j not in outputs.carried]
        self._norm_operands = input_positions_read(program, self._norms, ())
        self._out_operands = input_positions_read(program, outs, outputs.combinations)
        self.norm_inputs = self._values(self._norm_operands)
        self.result_inputs = self._values(self._out_operands)

    def _values(self, operands: Sequence[int]) -> list[Value]:
        return [v for k in operands for v in self._loss.operands[k].values]

    def _loss_operands(self, operands: Sequence[int], arrays: Sequence[Any]) -> list:
        """Return all operands of the loss, None where absent; operands in pieces are concatenated."""
        given: list[Any] = [None] * len(self._call.large.inputs)
        rest = iter(arrays)
        for k in operands:
            parts = [next(rest) for _ in self._loss.operands[k].values]
            given[k] = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return given

    def compute_norms(self, arrays: Sequence[Any]) -> list:
        """Compute the sums from the values `norm_inputs`."""
        return PartialReplay(self._call.large, self._norms)(self._loss_operands(self._norm_operands, arrays))

    def results(self, arrays: Sequence[Any], given: Sequence[Sequence[Any]]) -> list:
        """Compute the results of the gradient call except gradients and state.

        Args:
            arrays: The values `result_inputs`.
            given: For each loss output, the arrays of all microbatches.
        """
        call = self._call
        sums, stacked = [], []
        for xs, is_sum in zip(given, call.is_sum, strict=True):
            if is_sum:
                sums.append(_wide_sum(xs))
            else:
                stacked.append(jnp.stack(xs))
        state = [None] * len(call.outputs.carried)
        operands = self._loss_operands(self._out_operands, arrays)
        outs = call.outputs.whole(operands, call.values(sums, stacked), state)
        return [x for j, x in enumerate(outs) if j not in call.outputs.carried]


def _wide_sum(xs: Sequence[Any]) -> Any:
    """Add up arrays in the dtype for sums over microbatches, float32 for shorter ones."""
    wide = accumulation_dtype(xs[0].dtype)
    return sum((x.astype(wide) for x in xs[1:]), xs[0].astype(wide))


class PrepareJob:
    """Job that runs before the actions of one loss: other inputs of the stages, and zeros for the sums of gradients.

    Args:
        loss: The loss.
        homes: Shardings of the step.
        stages: All stages of the schedule.
        rank: The rank.
        full_batch: Computations on the full batch.

    Attributes:
        input_sources: For each stage, the source of each other input: ("value", outer value) or ("made", position in
            the results).
        inputs: Outer values read by the job.
        job: The program.
    """

    def __init__(
        self,
        loss: LossStages,
        homes: StepShardings,
        stages: Sequence[StageJobs],
        rank: int,
        full_batch: FullBatchValues,
    ):
        self._loss, self._full_batch = loss, full_batch
        own_stages = loss.stages_by_rank[rank]
        self._making: list[tuple[str, int]] = []  # kind and position of each computed input
        self.input_sources: dict[int, list[tuple[str, int]]] = {}
        outs: list[Any] = []
        sources: dict[Value, None] = {}
        for s in own_stages:
            others = self.input_sources[s] = []
            for i, sharding in zip(stages[s].program.stage.other_inputs, stages[s].other_shardings, strict=True):
                kind, which = self._input_source(i)
                if kind == "value":
                    others.append((kind, which))
                    continue
                others.append(("made", len(self._making)))
                self._making.append((kind, which))
                outs.append(sharding)
                if kind == "examples":
                    sources[self._operand_value(which)] = None
                elif kind == "norm":
                    sources.update(dict.fromkeys(full_batch.norm_inputs))
        self.inputs = list(sources)
        self._sums = [a for s in own_stages for a in stages[s].sum_avals]
        zeros = [at for s in own_stages for at in stages[s].sum_shardings]
        avals = [shape_dtype_of(homes.split.outer.program.avals[v]) for v in self.inputs]
        at = [homes.sharding(v, rank) for v in self.inputs]
        self.job = CompileJob(self.prepare, (avals,), (at,), (outs, zeros))

    def _input_source(self, i: int) -> tuple[str, int]:
        """Return the kind of a loss input ("rows", "norm", "examples" or "value"), and its position or outer value."""
        loss = self._loss
        operand = loss.split_loss.pieces[i].operand
        if operand == 0:
            return "rows", 0
        if operand < loss.first_operand:
            return "norm", operand - 1
        if operand - loss.first_operand in loss.call.batch:
            return "examples", operand - loss.first_operand
        return "value", loss.input_values[i]

    def _operand_value(self, k: int) -> Value:
        (v,) = self._loss.operands[k].values
        return v

    def prepare(self, arrays: Sequence[Any]) -> tuple[list, list]:
        """Compute what the stages read from the outer values `inputs`, and the zeros."""
        call, values = self._loss.call, dict(zip(self.inputs, arrays, strict=True))
        cut = call.cut
        norms: list[Any] = []
        if any(kind == "norm" for kind, _ in self._making):
            norms = self._full_batch.compute_norms([values[v] for v in self._full_batch.norm_inputs])
        produced = []
        for kind, which in self._making:
            if kind == "rows":
                produced.append(microbatch_rows(cut.examples, cut.microbatches, cut.shards))
            elif kind == "norm":
                produced.append(norms[which])
            else:
                x = values[self._operand_value(which)]
                produced.append(in_microbatches(x, call.batch[which], cut.microbatches, cut.shards))
        return produced, [jnp.zeros(a.shape, a.dtype) for a in self._sums]


class SettleJob:
    """Job that runs after the actions of one loss: the gradients owned by a rank, from sums of all stages that read
    them.

    Args:
        loss: The loss.
        homes: Shardings of the step.
        stages: All stages of the schedule.
        rank: The rank.

    Attributes:
        owned_inputs: Loss inputs with gradients on this rank.
        sum_sources: Arguments of the job in order: loss input, stage, and position among the parameters of the stage.
        local_sums: Stage and position of the sums that stay on this rank.
        sent_sums: For each other rank, stage and position of the sums sent to it.
        sending_ranks: Ranks that send sums to this one.
        job: The program.
    """

    def __init__(self, loss: LossStages, homes: StepShardings, stages: Sequence[StageJobs], rank: int):
        pieces = loss.split_loss.program.closed.in_avals
        self.loss = loss
        self.owned_inputs = [i for i in loss.gradient_values if loss.owner_rank(i) == rank]
        self.sum_sources: list[tuple[int, int, int]] = []
        self.sent_sums: dict[int, list[tuple[int, int]]] = {}
        self._stages = stages
        avals, at, source_ranks = [], [], []
        stages_of = loss.stages_by_rank
        # Own sums first, then those of other ranks: the order in which `RankRun._settle_loss` collects them.
        for source_rank in sorted(range(len(stages_of)), key=lambda r: r != rank):
            for s in stages_of[source_rank]:
                jobs = stages[s]
                for k, i in enumerate(jobs.program.stage.parameters):
                    owner = loss.owner_rank(i)
                    if owner == rank:
                        self.sum_sources.append((i, s, k))
                        source_ranks.append(source_rank)
                        avals.append(jobs.sum_avals[k])
                        at.append(homes.on_rank(rank, jobs.sum_shardings[k].spec))
                    elif source_rank == rank:
                        self.sent_sums.setdefault(owner, []).append((s, k))
        self.local_sums = [
            (s, k) for (_, s, k), maker in zip(self.sum_sources, source_ranks, strict=True) if maker == rank
        ]
        self.sending_ranks = [maker for maker in dict.fromkeys(source_ranks) if maker != rank]
        self._avals = [shape_dtype_of(pieces[i]) for i in self.owned_inputs]
        values = [loss.gradient_values[i] for i in self.owned_inputs]
        outs = [homes.sharding(v, rank) for v in values]
        self.job = CompileJob(self.settle, (avals,), (at,), outs)

    def settle(self, sums: Sequence[Any]) -> list:
        """Compute the gradients of `owned_inputs` from `sums`."""
        total: dict[int, Any] = {}
        for (i, s, k), parts in zip(self.sum_sources, sums, strict=True):
            with jax.named_scope(f"{GRADIENT}.{self.owned_inputs.index(i)}"):
                x = self._stages[s].reduce_partial_sums(k, parts)
            total[i] = total[i] + x if i in total else x
        return [
            total[i].astype(a.dtype) if i in total else jnp.zeros(a.shape, a.dtype)
            for i, a in zip(self.owned_inputs, self._avals, strict=True)
        ]


def group_job(
    program: Program,
    lowering: ShardedSubprograms | None,
    group: EquationGroup,
    homes: StepShardings,
    donatable: Collection[Value],
) -> tuple[CompileJob, list[Value], list[Value]]:
    """Build the job of one equation group.

    Args:
        program: The outer program.
        lowering: Emitter with the layout of all groups. One group at a time is chosen, when its job is lowered. None
            for ranks of one device.
        group: The group.
        homes: Shardings of the step.
        donatable: Values with memory that may be reused.

    Returns:
        The job, the values that it reads without donation, and the donated values.
    """
    emitter = PlainSubprograms(program) if lowering is None else lowering
    input_positions = {v: i for i, v in enumerate(program.inputs)}
    other_values = [v for v in group.inputs if v not in input_positions]
    retained, donated = ([v for v in group.inputs if v not in donatable], [v for v in group.inputs if v in donatable])

    def update(kept_arrays: list, given_arrays: list) -> list:
        inputs: list[Any] = [None] * len(program.inputs)
        known = dict(zip((*retained, *donated), (*kept_arrays, *given_arrays), strict=True))
        for v, x in known.items():
            if v in input_positions:
                inputs[input_positions[v]] = x
        # At trace time: all groups share one emitter.
        emitter.choose(group.outputs, other_values)
        return emitter.make(inputs, known)

    def avals_and_shardings(values: Sequence[Value]) -> tuple[list, list]:
        return [shape_dtype_of(program.avals[v]) for v in values], [homes.sharding(v, group.rank) for v in values]

    (retained_avals, retained_shardings), (donated_avals, donated_shardings) = (
        avals_and_shardings(retained),
        avals_and_shardings(donated),
    )
    _, outs = avals_and_shardings(group.outputs)
    return (
        CompileJob(update, (retained_avals, donated_avals), (retained_shardings, donated_shardings), outs, (1,)),
        retained,
        donated,
    )
