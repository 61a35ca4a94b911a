"""The pipeline part of a report: what ran when on each rank, and what that is beside the ideal."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bubble:
    """The share of all ranks' time, 0 to 1, that is idle.

    `ideal`: of the schedule, were all stages alike and results with the next rank at once. `uneven`: with each stage's
    own times. `predicted`: with the time that results take between ranks, too. `measured`: of the run. None: not known.
    """

    ideal: float
    uneven: float
    predicted: float
    measured: float | None = None


@dataclass(frozen=True)
class PipelineEvent:
    """One action of a rank in time, from the first start, in the pipeline's `unit`."""

    rank: int
    action: str  # "2F0", fused "2F4+3B1"
    start: float
    end: float


@dataclass(frozen=True)
class Rank:
    """One rank: the stages it holds, the devices it is, and what of the model that is ("wte, blocks 0-3").

    `peak_activations`: the most that it holds at once, one for each microbatch of each stage; `activation_bytes` the
    bytes of them on one device. `work`: busy time in the pipeline's `unit`.
    """

    stages: tuple[int, ...]
    devices: tuple[int, ...] = ()
    holds: str | None = None
    bubble: float | None = None
    ideal: float | None = None
    peak_activations: float | None = None
    activation_bytes: int | None = None
    work: float | None = None


@dataclass(frozen=True)
class WhatIf:
    """The same work under another schedule or other sizes: predicted, with its stages taken as even where others are
    cut.

    `peak` is of the fullest rank, in microbatches of a whole rank of the pipeline as it ran.
    """

    schedule: str
    stages: int
    microbatches: int
    chunks: int
    ideal: float
    bubble: float
    makespan: float
    peak: float


@dataclass(frozen=True)
class Pipeline:
    """A schedule in time. `unit` is "s", or "" where costs are given in units of their own.

    `makespan` holds the ideal one, the predicted one and the measured one, from first start to last end. `events` are
    measured where there was a run, else predicted (`source`: "measured" | "predicted"); `ideal_events` are those of
    even stages. `costs` of each stage: forward, input gradient, weight gradient, transfer.
    """

    schedule: str
    stages: int
    microbatches: int
    chunks: int
    source: str
    unit: str
    bubble: Bubble
    makespan: tuple[float, float, float | None]
    ranks: tuple[Rank, ...]
    grid: tuple[tuple[str, ...], ...]
    events: tuple[PipelineEvent, ...]
    ideal_events: tuple[PipelineEvent, ...]
    costs: tuple[tuple[float, float, float, float], ...]
    what_if: tuple[WhatIf, ...] = ()
