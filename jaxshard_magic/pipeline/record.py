"""What was measured of one step in a pipeline, as plain data, and what its actions and transfers took."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low

from ..errors import ShardError
from ..schedule import Action, Costs, Schedule
from ..schedule.actions import parse_step


@dataclass(frozen=True)
class Event:
    """One action of a rank, `2F0`, in seconds from the step's start. Parts of a fused action have an event each."""

    rank: int
    action: str
    start: float
    end: float


@dataclass(frozen=True)
class Handover:
    """A stage's result for one microbatch on its way to a stage of another rank, in seconds from the step's start.

    `sent`: when the program that made it had ended. `arrived`: when the receiver saw that it was there, which is later
    than it came where the receiver was busy.
    """

    from_stage: int
    to_stage: int
    microbatch: int
    sent: float
    arrived: float


@dataclass(frozen=True)
class Run:
    """One timed step of a pipeline.

    `peaks`: of each rank, the most activations that it held, one for each microbatch of each stage. `seconds`: of the
    whole step, with what runs before and after the actions.
    """

    schedule: Schedule
    events: tuple[Event, ...]
    handovers: tuple[Handover, ...]
    peaks: tuple[int, ...]
    seconds: float

    @property
    def start(self) -> float:
        """When the first action starts, in seconds from the step's start."""
        return min(event.start for event in self._timed())

    @property
    def makespan(self) -> float:
        """Seconds from the first start of an action to the last end."""
        return max(event.end for event in self._timed()) - self.start

    @property
    def work(self) -> tuple[float, ...]:
        """The seconds that each rank was busy with actions."""
        busy = [0.0] * self.schedule.stages
        for event in self.events:
            busy[event.rank] += event.end - event.start
        return tuple(busy)

    def bubble(self) -> float:
        """The share of all ranks' time, 0 to 1, between the first start and the last end, in which they ran no action.

        Raises ShardError for a run without events.
        """
        time = self.schedule.stages * self.makespan
        return max(0.0, 1 - sum(self.work) / time) if time else 0.0

    def costs(self, split: Sequence[float] | None = None, alike: Sequence[Hashable] | None = None) -> Costs:
        """What each stage's actions took, in seconds: medians over the microbatches, so that a slow one does not count.

        A transfer takes as long as the quickest one over that boundary, since a receiver may look late. Where a stage's
        result goes both forward and back, its transfer is the mean of both.

        Args:
            split: of each stage, the share of a whole backward pass, 0 to 1, that is its input gradient; where the
                stage runs the halves, they are measured. By default half, and none of a loss's first stage.
            alike: of each stage, what it shares with those that run the same programs and no other: medians are over
                the events of all of them. By default every stage is by itself.

        Raises ShardError for lists of another length, and where a stage has no event of one of its passes.
        """
        stages = self.schedule.all_stages
        first = range(0, stages, self.schedule.stages_of_loss)
        shares = [0.0 if s in first else 0.5 for s in range(stages)] if split is None else list(split)
        if len(shares) != stages:
            raise ShardError(
                f"split has {len(shares)} shares for {stages} stages; write one per stage, or None"
            )
        if alike is not None and len(alike) != stages:
            raise ShardError(
                f"alike has {len(alike)} entries for {stages} stages; write one per stage, or None"
            )
        times = _together(self._times(), range(stages) if alike is None else alike)
        backward = [_backward(times, stage, share) for stage, share in enumerate(shares)]
        sent = [[t for (sender, _), t in self._quickest().items() if sender == s] for s in range(stages)]
        return Costs(
            [_median(times, stage, "F") for stage in range(stages)],
            [input_grad for input_grad, _ in backward],
            [weight_grad for _, weight_grad in backward],
            [fmean(both) if both else 0.0 for both in sent],
        )

    def transfers(self) -> tuple[float | None, ...]:
        """What each boundary between a stage and the next takes, in seconds, the mean of both ways; None where nothing
        was handed over, as between stages of one rank."""
        stages = self.schedule.all_stages
        quickest = self._quickest()
        ways = [[quickest.get((s, s + 1)), quickest.get((s + 1, s))] for s in range(stages - 1)]
        known = [[seconds for seconds in both if seconds is not None] for both in ways]
        return tuple(fmean(both) if both else None for both in known)

    def _timed(self) -> tuple[Event, ...]:
        if not self.events:
            raise ShardError("this run of a pipeline has no events: it was not timed")
        return self.events

    def _times(self) -> dict[tuple[int, str], list[float]]:
        """The seconds of each stage's actions of each kind."""
        times: dict[tuple[int, str], list[float]] = {}
        for event in self.events:
            action = parse_step(event.action)
            assert isinstance(action, Action), "parts of a fused action have an event each"
            times.setdefault((action.stage, action.kind), []).append(event.end - event.start)
        return times

    def _quickest(self) -> dict[tuple[int, int], float]:
        """Seconds of the quickest transfer from each stage to another."""
        quickest: dict[tuple[int, int], float] = {}
        for each in self.handovers:
            way, seconds = (each.from_stage, each.to_stage), max(0.0, each.arrived - each.sent)
            quickest[way] = min(seconds, quickest.get(way, seconds))
        return quickest


_Times = Mapping[tuple[int, str], Sequence[float]]


def _together(times: _Times, alike: Sequence[Hashable]) -> _Times:
    """For each stage that has some the times of all stages like it."""
    groups: dict[tuple[Hashable, str], list[float]] = {}
    for (stage, kind), each in times.items():
        groups.setdefault((alike[stage], kind), []).extend(each)
    return {(stage, kind): groups[alike[stage], kind] for stage, kind in times}


def _median(times: _Times, stage: int, kind: str) -> float:
    if (stage, kind) not in times:
        raise ShardError(f"this run of a pipeline has no event of stage {stage}, {kind}: it did not end")
    return median_low(times[stage, kind])


def _backward(times: _Times, stage: int, share: float) -> tuple[float, float]:
    """The input and the weight gradient of a stage, of which `share` is the former where it only runs both in one.

    Where it does both, the halves say how it divides, and both together how long it takes.
    """
    whole, halved = len(times.get((stage, "B"), ())), len(times.get((stage, "I"), ()))
    halves = (_median(times, stage, "I"), _median(times, stage, "W")) if halved or not whole else (0.0, 0.0)
    if not whole:
        return halves
    total = (whole * _median(times, stage, "B") + halved * sum(halves)) / (whole + halved)
    share = halves[0] / sum(halves) if sum(halves) else share
    return share * total, (1 - share) * total
