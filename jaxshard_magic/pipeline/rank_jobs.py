"""What a rank runs beside its stages' actions, as jobs: before them, after them, and the rest of the step."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..gradients.accumulate import summed_in
from ..gradients.part import Part
from ..gradients.rows import rows_of
from ..gradients.rows import split as in_microbatches
from ..program.ir import Program, Value
from ..program.labels import GRADIENT
from .homes import Homes
from .jobs import Job, shape_of
from .loss_stages import LossStages
from .places import Group
from .programs import HeldParts, PlainParts
from .stage_jobs import StageJobs
from .stages import inputs_read


class Whole:
    """What is made of the whole batch: the sums that a microbatch's loss needs, and results of its gradient call."""

    def __init__(self, loss: LossStages):
        self._loss, self._call = loss, loss.call
        self._norms = list(self._call.followed.norms.values())
        outputs, program = self._call.outputs, self._call.large
        outs = [v for j, v in enumerate(program.outputs) if v is not None and j not in outputs.carried]
        self._norm_operands = inputs_read(program, self._norms, ())
        self._out_operands = inputs_read(program, outs, outputs.how)
        self.norms_read = self._values(self._norm_operands)
        self.outs_read = self._values(self._out_operands)

    def _values(self, operands: Sequence[int]) -> list[Value]:
        return [v for k in operands for v in self._loss.operands[k].values]

    def _given(self, operands: Sequence[int], arrays: Sequence[Any]) -> list:
        """The operands of the loss, of which these come as `arrays`, some in pieces."""
        given: list[Any] = [None] * len(self._call.large.inputs)
        rest = iter(arrays)
        for k in operands:
            parts = [next(rest) for _ in self._loss.operands[k].values]
            given[k] = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return given

    def norms(self, arrays: Sequence[Any]) -> list:
        """The sums, from the values `norms_read`."""
        return Part(self._call.large, self._norms)(self._given(self._norm_operands, arrays))

    def results(self, arrays: Sequence[Any], given: Sequence[Sequence[Any]]) -> list:
        """The results of the gradient call but gradients and state, from the values `outs_read` and from what each
        microbatch gave of each of `Outputs.given`."""
        call = self._call
        sums, stacked = [], []
        for xs, is_sum in zip(given, call.is_sum, strict=True):
            if is_sum:
                sums.append(_sum(xs))
            else:
                stacked.append(jnp.stack(xs))
        state = [None] * len(call.outputs.carried)
        operands = self._given(self._out_operands, arrays)
        outs = call.outputs.whole(operands, call.values(sums, stacked), state)
        return [x for j, x in enumerate(outs) if j not in call.outputs.carried]


def _sum(xs: Sequence[Any]) -> Any:
    wide = summed_in(xs[0].dtype)
    return sum((x.astype(wide) for x in xs[1:]), xs[0].astype(wide))


class Prepared:
    """What a rank's stages of one loss read beside parameters and activations, and the zeros that they add gradients
    to. `stages`: all of the schedule.

    `others[s]`: of each other input of stage s its value around the gradient call, or its place among what the job
    makes. `reads`: the values that the job takes.
    """

    def __init__(self, loss: LossStages, homes: Homes, stages: Sequence[StageJobs], rank: int, whole: Whole):
        self._loss, self._whole = loss, whole
        mine = loss.stages_of[rank]
        self._making: list[tuple[str, int]] = []  # what is made: the kind, and which
        self.others: dict[int, list[tuple[str, int]]] = {}
        outs: list[Any] = []
        sources: dict[Value, None] = {}
        for s in mine:
            others = self.others[s] = []
            for i, sharding in zip(stages[s].program.stage.others, stages[s].others, strict=True):
                kind, which = self._source(i)
                if kind == "value":
                    others.append((kind, which))
                    continue
                others.append(("made", len(self._making)))
                self._making.append((kind, which))
                outs.append(sharding)
                if kind == "examples":
                    sources[self._operand_value(which)] = None
                elif kind == "norm":
                    sources.update(dict.fromkeys(whole.norms_read))
        self.reads = list(sources)
        self._sums = [a for s in mine for a in stages[s].sums]
        zeros = [at for s in mine for at in stages[s].sums_at]
        avals = [shape_of(homes.split.around.program.avals[v]) for v in self.reads]
        at = [homes.sharding(v, rank) for v in self.reads]
        self.job = Job(self.prepare, (avals,), (at,), (outs, zeros))

    def _source(self, i: int) -> tuple[str, int]:
        loss = self._loss
        operand = loss.cut.pieces[i].operand
        if operand == 0:
            return "rows", 0
        if operand < loss.first:
            return "norm", operand - 1
        if operand - loss.first in loss.call.batch:
            return "examples", operand - loss.first
        return "value", loss.input_of[i]

    def _operand_value(self, k: int) -> Value:
        (v,) = self._loss.operands[k].values
        return v

    def prepare(self, arrays: Sequence[Any]) -> tuple[list, list]:
        """What stages read, from the values `reads`, and zeros."""
        call, known = self._loss.call, dict(zip(self.reads, arrays, strict=True))
        cut = call.cut
        norms: list[Any] = []
        if any(kind == "norm" for kind, _ in self._making):
            norms = self._whole.norms([known[v] for v in self._whole.norms_read])
        made = []
        for kind, which in self._making:
            if kind == "rows":
                made.append(rows_of(cut.examples, cut.microbatches, cut.shards))
            elif kind == "norm":
                made.append(norms[which])
            else:
                x = known[self._operand_value(which)]
                made.append(in_microbatches(x, call.batch[which], cut.microbatches, cut.shards))
        return made, [jnp.zeros(a.shape, a.dtype) for a in self._sums]


class Settled:
    """The gradients of one loss that a rank owns, from the sums of its own stages and from those of others that read a
    parameter. `stages`: all of the schedule.

    `owned`: the inputs of the loss whose gradients these are. `sums`: what they are made of, in the order in which the
    job takes it: of which input of the loss, in which stage, and of which of its parameters. `own`: the stages and
    positions of the sums that stay. `sent[rank]`: those that go to another. `received`: the ranks that send to this
    one.
    """

    def __init__(self, loss: LossStages, homes: Homes, stages: Sequence[StageJobs], rank: int):
        pieces = loss.cut.program.closed.in_avals
        self.loss = loss
        self.owned = [i for i in loss.gradient_of if loss.owner(i) == rank]
        self.sums: list[tuple[int, int, int]] = []
        self.sent: dict[int, list[tuple[int, int]]] = {}
        self._stages = stages
        avals, at, makers = [], [], []
        stages_of = loss.stages_of
        for maker in sorted(range(len(stages_of)), key=lambda r: r != rank):
            for s in stages_of[maker]:
                jobs = stages[s]
                for k, i in enumerate(jobs.program.stage.parameters):
                    owner = loss.owner(i)
                    if owner == rank:
                        self.sums.append((i, s, k))
                        makers.append(maker)
                        avals.append(jobs.sums[k])
                        at.append(homes.at(rank, jobs.sums_at[k].spec))
                    elif maker == rank:
                        self.sent.setdefault(owner, []).append((s, k))
        self.own = [(s, k) for (_, s, k), maker in zip(self.sums, makers, strict=True) if maker == rank]
        self.received = [maker for maker in dict.fromkeys(makers) if maker != rank]
        self._avals = [shape_of(pieces[i]) for i in self.owned]
        values = [loss.gradient_of[i] for i in self.owned]
        outs = [homes.sharding(v, rank) for v in values]
        self.job = Job(self.settle, (avals,), (at,), outs)

    def settle(self, sums: Sequence[Any]) -> list:
        """The gradients of `owned`, from `sums`."""
        total: dict[int, Any] = {}
        for (i, s, k), parts in zip(self.sums, sums, strict=True):
            with jax.named_scope(f"{GRADIENT}.{self.owned.index(i)}"):
                x = self._stages[s].summed(k, parts)
            total[i] = total[i] + x if i in total else x
        return [
            total[i].astype(a.dtype) if i in total else jnp.zeros(a.shape, a.dtype)
            for i, a in zip(self.owned, self._avals, strict=True)
        ]


def group_job(
    program: Program, hold: HeldParts | None, group: Group, homes: Homes, taken: Collection[Value]
) -> tuple[Job, list[Value], list[Value]]:
    """The job of a group of the step's equations, the values that it reads, and those that it takes over. `hold` holds
    the equations of all groups to their layout, one group at a time, as jobs are lowered; None where a rank is one
    device."""
    emitter = PlainParts(program) if hold is None else hold
    place = {v: i for i, v in enumerate(program.inputs)}
    made_elsewhere = [v for v in group.reads if v not in place]
    kept, given = [v for v in group.reads if v not in taken], [v for v in group.reads if v in taken]

    def update(kept_arrays: list, given_arrays: list) -> list:
        inputs: list[Any] = [None] * len(program.inputs)
        known = dict(zip((*kept, *given), (*kept_arrays, *given_arrays), strict=True))
        for v, x in known.items():
            if v in place:
                inputs[place[v]] = x
        emitter.choose(group.wanted, made_elsewhere)
        return emitter.make(inputs, known)

    def of(values: Sequence[Value]) -> tuple[list, list]:
        return [shape_of(program.avals[v]) for v in values], [homes.sharding(v, group.place) for v in values]

    (kept_avals, kept_at), (given_avals, given_at) = of(kept), of(given)
    _, outs = of(group.wanted)
    return Job(update, (kept_avals, given_avals), (kept_at, given_at), outs, (1,)), kept, given
