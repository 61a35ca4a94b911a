"""One rank's part of a step: programs to run, values to receive, and values to send to the ranks that read them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..program.ir import Value
from .actors import Actor
from .equation_groups import EquationGroup
from .rank_jobs import PrepareJob, SettleJob
from .shardings import StepShardings
from .split_step import LossStages
from .transfer import ArrayTransfer

Call = Callable[..., Any]


@dataclass(frozen=True)
class _SendPlan:
    """Values that become available on a rank at one time, and their readers on other ranks.

    Attributes:
        values: The values.
        by_rank: For each reading rank, the positions in `values` to send and the transfer to use.
    """

    values: tuple[Value, ...]
    by_rank: Mapping[int, tuple[list[int], ArrayTransfer]]


def plan_sends(
    rank: int, values: Sequence[Value], values_read: Sequence[set[Value]], homes: StepShardings
) -> _SendPlan:
    """Plan the sends of `values` from `rank`, where `values_read[r]` holds the values that rank r reads."""
    to = {}
    for other, wanted in enumerate(values_read):
        places = [k for k, v in enumerate(values) if v in wanted]
        if other != rank and places:
            to[other] = places, ArrayTransfer([homes.sharding(values[k], other) for k in places])
    return _SendPlan(tuple(values), to)


@dataclass(frozen=True)
class StagePlan:
    """Everything a rank needs to run one stage, equal for all microbatches.

    Looked up once per compile, not per action: an action takes microseconds.

    Attributes:
        number: The stage.
        programs: Programs by action kind.
        receives_activations: Whether the stage reads activations from the stage before.
        receives_cotangents: Whether the stage reads cotangents of its outgoing activations.
        outgoing_count: Number of outgoing activations.
        loss_outputs: Positions of the loss outputs, which follow the outgoing activations.
        cotangent_count: Number of cotangents sent back.
        forward_transfer: Transfer to the next stage, with the rank at its end; None for the last stage of a loss.
        backward_transfer: Transfer to the stage before, with the rank at its end; None for the first stage of a loss.
        loss_cotangents: Cotangents of the loss, if the stage computes the loss.
    """

    number: int
    programs: Mapping[str, Call]
    receives_activations: bool
    receives_cotangents: bool
    outgoing_count: int
    loss_outputs: tuple[int, ...]
    cotangent_count: int
    forward_transfer: tuple[ArrayTransfer, int] | None
    backward_transfer: tuple[ArrayTransfer, int] | None
    loss_cotangents: Sequence[Any]


@dataclass(frozen=True)
class LossPlan:
    """Everything a rank needs to run one loss.

    Attributes:
        loss: The loss.
        prepare_job: Description of the program before the actions.
        settle_job: Description of the program after the actions.
        prepare: Program before the actions.
        settle: Program after the actions.
        finish: Program for the results of the loss; None except on the rank of the loss.
        gradient_sends: Sends of gradients.
        result_sends: Sends of the results.
        state_sends: Sends of state, by position among the loss outputs.
        finish_inputs: Outer values read by `finish`.
        actions: Kind, stage, microbatch and name of each action, in order.
        sum_transfers: Transfers of gradient sums to the ranks that own the parameters.
        microbatch_outputs: Loss outputs computed here, and their transfer to the rank of the loss; None without outputs
            and on that rank itself.
    """

    loss: LossStages
    prepare_job: PrepareJob
    settle_job: SettleJob
    prepare: Call
    settle: Call
    finish: Call | None
    gradient_sends: _SendPlan
    result_sends: _SendPlan
    state_sends: Mapping[int, _SendPlan]
    finish_inputs: Sequence[Value]
    actions: Sequence[tuple[str, StagePlan, int, str]]
    sum_transfers: Mapping[int, ArrayTransfer]
    microbatch_outputs: tuple[list[int], ArrayTransfer | None]


@dataclass(frozen=True)
class RankPlan:
    """Everything a rank needs for a step, equal for all steps.

    Attributes:
        rank: The rank.
        losses: The losses, in order.
        input_sends: Sends of the step inputs.
        groups: Equation groups: group, program, values read without donation, donated values, sends of the results.
        donates_inputs: Whether a program donates step inputs. An error must not lose them.
        step_outputs: Outputs of the step on this rank.
        microbatch_numbers: Microbatch numbers as arrays on the rank.
    """

    rank: int
    losses: Sequence[LossPlan]
    input_sends: _SendPlan
    groups: Sequence[tuple[EquationGroup, Call, list[Value], list[Value], _SendPlan]]
    donates_inputs: bool
    step_outputs: Sequence[Value]
    microbatch_numbers: Sequence[Any]


class RankRun:
    """One step of a rank.

    Actions run in the order of the schedule, whatever arrives first. A rank waits for nothing but the value that its
    next action reads, so a schedule without deadlock in the simulator has none here.

    Args:
        plan: The plan of the rank.
        actor: The thread of the rank.
        actors: The threads of all ranks.
        initial_values: Step inputs on this rank.
        start: `time.perf_counter()` at the start of the step; None for an untimed step.

    Attributes:
        events: Name, start and end of each action, if timed.
        handovers: Fields of each `Handover` received from another rank, if timed.
        peak: Maximum number of activations held.
        outputs: Outputs of the step on this rank.
    """

    def __init__(
        self,
        plan: RankPlan,
        actor: Actor,
        actors: Sequence[Actor],
        initial_values: dict[Value, Any],
        start: float | None,
    ):
        self.plan, self._actor, self._actors, self._values, self._start = (plan, actor, actors, initial_values, start)
        self.events: list[tuple[str, float, float]] = []
        self.handovers: list[tuple[int, int, int, float, float]] = []
        self.outputs: dict[Value, Any] = {}
        self.peak = 0
        self._residuals: dict[tuple[int, int], tuple] = {}
        self._weight_operands: dict[tuple[int, int], tuple] = {}

    def run(self) -> None:
        """Run all losses and equation groups of the rank, in order."""
        plan = self.plan
        self._send_values(plan.input_sends)
        act = {"F": self._forward, "B": self._backward, "I": self._input_gradient, "W": self._weight_gradient}
        for phase, loss in enumerate(plan.losses):
            self._loss_plan = loss
            self._run_groups(phase)
            self._prepare()
            for kind, stage, m, name in loss.actions:
                try:
                    act[kind](stage, m, name)
                except Exception as error:
                    error.add_note(f"in action {name} of the pipeline: stage {stage.number}, microbatch {m}")
                    raise
            # Donation deletes step inputs. After a failed step the user still needs them, so no rank donates before all
            # ranks have their gradients.
            if plan.donates_inputs and loss is plan.losses[-1]:
                self._await_all_gradients()
            self._settle_loss()
        self._run_groups(len(plan.losses))
        self.outputs = {v: self._fetch_value(v) for v in plan.step_outputs}

    def _send_values(self, send_plan: _SendPlan, arrays: Sequence[Any] | None = None) -> None:
        if arrays is not None:
            self._values.update(zip(send_plan.values, arrays, strict=True))
        for other, (places, route) in send_plan.by_rank.items():
            values = [send_plan.values[k] for k in places]
            moved = route([self._values[v] for v in values])
            for v, x in zip(values, moved, strict=True):
                self._actors[other].put(("value", v), x)

    def _fetch_value(self, v: Value) -> Any:
        if v not in self._values:
            self._values[v] = self._actor.take(("value", v))
        return self._values[v]

    def _run_groups(self, phase: int) -> None:
        for group, program, kept, given, send in self.plan.groups:
            if group.phase == phase:
                args = [self._fetch_value(v) for v in kept], [self._fetch_value(v) for v in given]
                for v in given:
                    del self._values[v]
                self._send_values(send, program(*args))

    def _prepare(self) -> None:
        """Collect the arrays read by the stages of this rank, and zeros for the sums of gradients."""
        plan, loss = self._loss_plan, self._loss_plan.loss
        prepared = plan.prepare_job
        made, zeros = plan.prepare([self._fetch_value(v) for v in prepared.inputs])
        rest = iter(zeros)
        self._parameters, self._other_inputs, self._sums, self._loss_outputs = {}, {}, {}, {}
        for s in loss.stages_by_rank[self.plan.rank]:
            stage = loss.stage_program(s).stage
            self._parameters[s] = [self._fetch_value(loss.input_values[i]) for i in stage.parameters]
            self._other_inputs[s] = [
                self._fetch_value(which) if kind == "value" else made[which]
                for kind, which in prepared.input_sources[s]
            ]
            self._sums[s] = [next(rest) for _ in stage.parameters]

    def _call_program(self, name: str, program: Call, *args: Any) -> Any:
        if self._start is None:
            return program(*args)
        start = time.perf_counter()
        # Only timed steps wait: a rank that waits for its own result starts the next action late.
        outs = jax.block_until_ready(program(*args))
        self.events.append((name, start - self._start, time.perf_counter() - self._start))
        return outs

    def _forward(self, stage: StagePlan, m: int, name: str) -> None:
        s, n = stage.number, stage.outgoing_count
        ins = self._receive("forward", s - 1, s, m) if stage.receives_activations else []
        others = self._other_inputs[s]
        outs = self._call_program(
            name, stage.programs["F"], self.plan.microbatch_numbers[m], self._parameters[s], others, ins
        )
        if n:
            self._send_to_stage("forward", stage.forward_transfer, s, s + 1, m, outs[:n])
        kept = n
        for j in stage.loss_outputs:
            self._store_output(s, j, outs[kept])
            kept += 1
        self._residuals[s, m] = others, outs[kept:]
        self.peak = max(self.peak, len(self._residuals) + len(self._weight_operands))

    def _store_output(self, s: int, j: int, x: Any) -> None:
        """Store a loss output of a microbatch, or pass state on to the next microbatch."""
        loss = self._loss_plan.loss
        outputs = loss.call.outputs
        first = len(outputs.computed)
        if j < first:
            self._loss_outputs.setdefault(j, []).append(x)
            return
        operand = list(outputs.carried.values())[j - first]
        stage = loss.stage_program(s).stage
        self._other_inputs[s] = [
            x if loss.split_loss.pieces[i].operand == loss.first_operand + operand else old
            for i, old in zip(stage.other_inputs, self._other_inputs[s], strict=True)
        ]
        # State of the last microbatch replaces that of earlier ones.
        self._loss_outputs[j] = [x]

    def _backward_operands(self, stage: StagePlan, m: int, kept: Sequence[Any]) -> list:
        """Return the operands of a backward pass: cotangents of outgoing activations, of the loss, and residuals."""
        s = stage.number
        cotangents = self._receive("backward", s + 1, s, m) if stage.receives_cotangents else []
        return [*cotangents, *stage.loss_cotangents, *kept]

    def _backward(self, stage: StagePlan, m: int, name: str) -> None:
        s = stage.number
        others, kept = self._residuals.pop((s, m))
        rest, number = self._backward_operands(stage, m, kept), self.plan.microbatch_numbers[m]
        back, self._sums[s] = self._call_program(
            name, stage.programs["B"], self._sums[s], number, self._parameters[s], others, rest
        )
        if back:
            self._send_to_stage("backward", stage.backward_transfer, s, s - 1, m, back)

    def _input_gradient(self, stage: StagePlan, m: int, name: str) -> None:
        s, n = stage.number, stage.cotangent_count
        others, kept = self._residuals.pop((s, m))
        rest, number = self._backward_operands(stage, m, kept), self.plan.microbatch_numbers[m]
        outs = self._call_program(name, stage.programs["I"], number, self._parameters[s], others, rest)
        self._weight_operands[s, m] = others, [*rest, *outs[n:]]
        if n:
            self._send_to_stage("backward", stage.backward_transfer, s, s - 1, m, outs[:n])

    def _weight_gradient(self, stage: StagePlan, m: int, name: str) -> None:
        s = stage.number
        others, rest = self._weight_operands.pop((s, m))
        _, self._sums[s] = self._call_program(
            name,
            stage.programs["W"],
            *(self._sums[s], self.plan.microbatch_numbers[m], self._parameters[s], others, rest),
        )

    def _send_to_stage(
        self, key: str, transfer: tuple[ArrayTransfer, int] | None, s: int, to: int, m: int, arrays: Sequence[Any]
    ) -> None:
        assert transfer is not None, f"stage {s} hands on to stage {to}"
        route, rank = transfer
        # Between two stages of one rank, as in V-shaped schedules, nothing is transferred: a value waits in the inbox
        # until the schedule reads it, and that wait is no transfer time.
        sent = None if self._start is None or rank == self.plan.rank else time.perf_counter() - self._start
        self._actors[rank].put((key, to, m), (route(arrays), sent))

    def _receive(self, key: str, source: int, s: int, m: int) -> list:
        arrays, sent = self._actor.take((key, s, m))
        if self._start is not None:
            # Only timed steps wait for arrivals.
            jax.block_until_ready(arrays)
            if sent is not None:
                self.handovers.append((source, s, m, sent, time.perf_counter() - self._start))
        return arrays

    def _await_all_gradients(self) -> None:
        """Wait until every rank has all of its gradients and all updates between losses."""
        # Raises the error of a failed program, before any input is donated.
        jax.block_until_ready((self._sums, self._loss_outputs))
        if len(self.plan.losses) > 1:
            jax.block_until_ready(self._values)
        others = [a for a in self._actors if a.rank != self.plan.rank]
        for actor in others:
            actor.put(("well", self.plan.rank), None)
        for actor in others:
            self._actor.take(("well", actor.rank))

    def _settle_loss(self) -> None:
        """Send sums of gradients to the owners of the parameters and loss outputs to the rank of the loss."""
        plan, settled, rank, loss_number = (
            self._loss_plan,
            self._loss_plan.settle_job,
            self.plan.rank,
            self._loss_plan.loss.number,
        )
        for other, sent in settled.sent_sums.items():
            arrays = plan.sum_transfers[other]([self._sums[s][k] for s, k in sent])
            self._actors[other].put(("sums", loss_number, rank), arrays)
        mine, route = plan.microbatch_outputs
        if route is not None:
            moved = iter(route([x for j in mine for x in self._loss_outputs[j]]))
            loss_actor, m = self._actors[plan.loss.loss_rank], len(self.plan.microbatch_numbers)
            for j in mine:
                loss_actor.put(("given", loss_number, j), [next(moved) for _ in range(m)])
        sums = [self._sums[s][k] for s, k in settled.local_sums]
        for other in settled.sending_ranks:
            sums += self._actor.take(("sums", loss_number, other))
        self._sums.clear()
        self._send_values(plan.gradient_sends, plan.settle(sums))
        for j, sending in plan.state_sends.items():
            self._send_values(sending, self._loss_outputs[j])
        if plan.finish is not None:
            all_outputs = [
                self._loss_outputs[j] if j in mine else self._actor.take(("given", loss_number, j))
                for j in range(len(plan.loss.call.outputs.computed))
            ]
            outs = plan.finish([self._fetch_value(v) for v in plan.finish_inputs], all_outputs)
            self._send_values(plan.result_sends, outs)
