"""Pipeline part of a report: actions on each rank over time, compared with the ideal."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from jaxshard_magic.display import renderer
from jaxshard_magic.report.exports import Exportable
from jaxshard_magic.report.records import write_file


@dataclass(frozen=True)
class Bubble:
    """Idle share of all ranks' time, 0 to 1.

    Attributes:
        ideal: With equal stages and transfers that take no time.
        uneven: With each stage's own times.
        predicted: With each stage's own times and transfer times.
        measured: In the run; None if unknown.
    """

    ideal: float
    uneven: float
    predicted: float
    measured: float | None = None


@dataclass(frozen=True)
class PipelineEvent:
    """An action of a rank in time.

    Attributes:
        rank: Number of the rank.
        action: The action, "2F0", or fused actions, "2F4+3B1".
        start: Start since the first start, in the pipeline's `unit`.
        end: End, likewise.
    """

    rank: int
    action: str
    start: float
    end: float


@dataclass(frozen=True)
class PipelineRank:
    """A rank of a pipeline.

    Attributes:
        stages: Stages on the rank.
        devices: Ids of its devices.
        holds: Part of the model on the rank ("wte, blocks 0-3").
        bubble: Idle share of the rank's time.
        ideal: Idle share with equal stages and transfers that take no time.
        peak_activations: Most activations held at the same time, counted per microbatch and stage.
        activation_bytes: Bytes of these activations on a device.
        work: Busy time in the pipeline's `unit`.
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
    """Prediction for the same work under another schedule or other sizes.

    Other cuts into stages are assumed to be even.

    Attributes:
        schedule: Name of the schedule.
        stages: Number of ranks.
        microbatches: Number of microbatches.
        chunks: Chunks per rank.
        ideal: Ideal bubble.
        bubble: Predicted bubble.
        makespan: Predicted makespan.
        peak: Most activations of a rank, in microbatches of a whole rank of the pipeline as it ran.
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
class RefusedSchedule:
    """A schedule that is impossible at these sizes.

    Attributes:
        schedule: Name of the schedule.
        stages: Number of ranks.
        microbatches: Number of microbatches.
        chunks: Chunks per rank.
        why: Reason: "interleaved: 6 microbatches don't divide by 4 stages".
    """

    schedule: str
    stages: int
    microbatches: int
    chunks: int
    why: str


@dataclass(frozen=True, repr=False)
class Pipeline(Exportable):
    """A schedule in time.

    Attributes:
        schedule: Name of the schedule.
        stages: Number of ranks.
        microbatches: Number of microbatches.
        chunks: Chunks per rank.
        source: "measured" if `events` are from a run, otherwise "predicted".
        unit: "s", or "" for costs in their own units.
        bubble: Idle shares.
        makespan: Ideal, predicted and measured time from the first start to the last end.
        ranks: The ranks.
        grid: For each rank, its actions in order.
        events: Actions in time, measured or predicted.
        ideal_events: Actions in time with equal stages.
        costs: For each stage: forward, input gradient, weight gradient, transfer.
        what_if: Predictions for other schedules and sizes.
        refused: Schedules impossible at these sizes.
        kept: For each stage, the share of a microbatch's activations held until the end of its weight gradient; empty
            for all of them.
        losses: Number of losses differentiated in sequence, each with its own stages, numbered consecutively.
        recorded: Measured operation by operation by the profiler; no action was timed by itself.
    """

    schedule: str
    stages: int
    microbatches: int
    chunks: int
    source: str
    unit: str
    bubble: Bubble
    makespan: tuple[float, float, float | None]
    ranks: tuple[PipelineRank, ...]
    grid: tuple[tuple[str, ...], ...]
    events: tuple[PipelineEvent, ...]
    ideal_events: tuple[PipelineEvent, ...]
    costs: tuple[tuple[float, float, float, float], ...]
    what_if: tuple[WhatIf, ...] = ()
    refused: tuple[RefusedSchedule, ...] = ()
    kept: tuple[float, ...] = ()
    losses: int = 1
    recorded: bool = False

    @overload
    def to_chrome_trace(self, path: None = None) -> str: ...
    @overload
    def to_chrome_trace(self, path: str | os.PathLike[str]) -> Path: ...

    def to_chrome_trace(self, path: str | os.PathLike[str] | None = None) -> str | Path:
        """Return the timeline as a trace for Perfetto and chrome://tracing.

        Each rank is a thread of a process; the ideal is a second process. Costs without a unit take 1 ms each.

        Args:
            path: File for the trace. Without a path the JSON text is returned.

        Returns:
            The JSON text, or the path of the file.
        """
        text = renderer(self, "chrome_trace")(self)
        return text if path is None else write_file(path, text)

    def _summary_line(self) -> str:
        size = f"{self.stages} stages x {self.microbatches} microbatches"
        return f"<Pipeline {self.schedule}: {size}, {'recorded' if self.recorded else self.source}>"

    def _ipython_display_(self) -> None:
        renderer(self, "show")(self)
