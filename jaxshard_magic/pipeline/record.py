"""Measurements of one pipelined step as plain data, and durations of its actions and transfers."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low

from ..errors import ShardError
from ..schedule import Action, Costs, Schedule
from ..schedule.actions import parse_entry


@dataclass(frozen=True)
class ActionEvent:
    """One executed action; parts of a fused action have one event each.

    Attributes:
        rank: The rank.
        action: The action as text, `2F0`.
        start: Seconds from the start of the step.
        end: Seconds from the start of the step.
    """

    rank: int
    action: str
    start: float
    end: float


@dataclass(frozen=True)
class Handover:
    """Transfer of a stage's result for one microbatch to an adjacent stage on another rank.

    Attributes:
        from_stage: The sending stage.
        to_stage: The receiving stage.
        microbatch: The microbatch.
        sent: Seconds from the start of the step to the end of the producing program.
        arrived: Seconds from the start of the step until the receiver noticed the arrival. A busy receiver notices
            late.
    """

    from_stage: int
    to_stage: int
    microbatch: int
    sent: float
    arrived: float


@dataclass(frozen=True)
class PipelineRun:
    """One timed step of a pipeline.

    Attributes:
        schedule: The schedule.
        events: All actions.
        handovers: All transfers between ranks.
        peaks: For each rank, the maximum number of activations held, one per microbatch and stage.
        seconds: Duration of the complete step, including work before and after the actions.
    """

    schedule: Schedule
    events: tuple[ActionEvent, ...]
    handovers: tuple[Handover, ...]
    peaks: tuple[int, ...]
    seconds: float

    @property
    def start(self) -> float:
        """Start of the first action, in seconds from the start of the step."""
        return min(event.start for event in self._require_events())

    @property
    def makespan(self) -> float:
        """Seconds from the first start of an action to the last end."""
        return max(event.end for event in self._require_events()) - self.start

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds that each rank was busy with actions."""
        busy = [0.0] * self.schedule.stages
        for event in self.events:
            busy[event.rank] += event.end - event.start
        return tuple(busy)

    def bubble(self) -> float:
        """Return the idle fraction of all ranks, 0 to 1, between the first start and the last end of an action.

        Raises:
            ShardError: The run has no events.
        """
        time = self.schedule.stages * self.makespan
        return max(0.0, 1 - sum(self.busy_seconds) / time) if time else 0.0

    def costs(self, split: Sequence[float] | None = None, alike: Sequence[Hashable] | None = None) -> Costs:
        """Return the seconds of each stage's actions: medians over the microbatches, robust against a slow one.

        A transfer counts with its fastest instance per boundary. A stage that sends forward and backward gets the mean
        of both directions.

        Args:
            split: For each stage, the input gradient's share of a full backward pass, 0 to 1. Measured halves take
                precedence. By default 0.5, and 0 for the first stage of a loss.
            alike: For each stage, a key shared by all stages with the same programs; medians pool their events. By
                default each stage has a key of its own.

        Raises:
            ShardError: A list has another length, or a stage has no event of one of its passes.
        """
        stages = self.schedule.all_stages
        first = range(0, stages, self.schedule.stages_per_loss)
        # The first stage of a loss has no input gradient: no stage is before it.
        shares = [0.0 if s in first else 0.5 for s in range(stages)] if split is None else list(split)
        if len(shares) != stages:
            raise ShardError(f"split has {len(shares)} shares for {stages} stages; write one per stage, or None")
        if alike is not None and len(alike) != stages:
            raise ShardError(f"alike has {len(alike)} entries for {stages} stages; write one per stage, or None")
        times = _pool_by_program(self._times(), range(stages) if alike is None else alike)
        backward = [_backward(times, stage, share) for stage, share in enumerate(shares)]
        transfer_seconds = [
            [t for (sender, _), t in self._quickest_transfers().items() if sender == s] for s in range(stages)
        ]
        return Costs(
            [_median(times, stage, "F") for stage in range(stages)],
            [input_grad for input_grad, _ in backward],
            [weight_grad for _, weight_grad in backward],
            [fmean(both) if both else 0.0 for both in transfer_seconds],
        )

    def boundary_seconds(self) -> tuple[float | None, ...]:
        """Return the seconds per boundary between consecutive stages, the mean of both directions; None without a
        transfer.

        Consecutive stages on one rank have no transfer.
        """
        stages = self.schedule.all_stages
        quickest = self._quickest_transfers()
        ways = [[quickest.get((s, s + 1)), quickest.get((s + 1, s))] for s in range(stages - 1)]
        known = [[seconds for seconds in both if seconds is not None] for both in ways]
        return tuple(fmean(both) if both else None for both in known)

    def _require_events(self) -> tuple[ActionEvent, ...]:
        if not self.events:
            raise ShardError("this run of a pipeline has no events: it was not timed")
        return self.events

    def _times(self) -> dict[tuple[int, str], list[float]]:
        """Return the seconds of each stage's actions by kind."""
        times: dict[tuple[int, str], list[float]] = {}
        for event in self.events:
            action = parse_entry(event.action)
            assert isinstance(action, Action), "parts of a fused action have an event each"
            times.setdefault((action.stage, action.kind), []).append(event.end - event.start)
        return times

    def _quickest_transfers(self) -> dict[tuple[int, int], float]:
        """Return the seconds of the fastest transfer per pair of stages."""
        quickest: dict[tuple[int, int], float] = {}
        for each in self.handovers:
            way, seconds = (each.from_stage, each.to_stage), max(0.0, each.arrived - each.sent)
            # The fastest instance, since a busy receiver notices an arrival late.
            quickest[way] = min(seconds, quickest.get(way, seconds))
        return quickest


_Times = Mapping[tuple[int, str], Sequence[float]]


def _pool_by_program(times: _Times, alike: Sequence[Hashable]) -> _Times:
    """Give each stage the times of all stages with the same key."""
    groups: dict[tuple[Hashable, str], list[float]] = {}
    for (stage, kind), each in times.items():
        groups.setdefault((alike[stage], kind), []).extend(each)
    return {(stage, kind): groups[alike[stage], kind] for stage, kind in times}


def _median(times: _Times, stage: int, kind: str) -> float:
    if (stage, kind) not in times:
        raise ShardError(f"this run of a pipeline has no event of stage {stage}, {kind}: it did not end")
    return median_low(times[stage, kind])


def _backward(times: _Times, stage: int, share: float) -> tuple[float, float]:
    """Return the seconds of the input gradient and of the weight gradient of a stage.

    A stage with full backward passes only is divided by `share`. With both kinds, the measured halves give the ratio,
    and all passes together the total.
    """
    whole, halved = len(times.get((stage, "B"), ())), len(times.get((stage, "I"), ()))
    halves = (_median(times, stage, "I"), _median(times, stage, "W")) if halved or not whole else (0.0, 0.0)
    if not whole:
        return halves
    total = (whole * _median(times, stage, "B") + halved * sum(halves)) / (whole + halved)
    share = halves[0] / sum(halves) if sum(halves) else share
    return share * total, (1 - share) * total
