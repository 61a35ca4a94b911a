"""The pipeline part of a report: what ran when on each rank, and what that is beside the ideal."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from jaxshard_magic.report.sent import PageWidget, Picture, Sendable
from jaxshard_magic.report.written import saved


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
class Refused:
    """A schedule that has no form for these sizes, and why: "interleaved: 6 microbatches don't divide by 4 stages"."""

    schedule: str
    stages: int
    microbatches: int
    chunks: int
    why: str


@dataclass(frozen=True, repr=False)
class Pipeline(Sendable):
    """A schedule in time. `unit` is "s", or "" where costs are given in units of their own.

    `makespan` holds the ideal one, the predicted one and the measured one, from first start to last end. `events` are
    measured where there was a run, else predicted (`source`: "measured" | "predicted"); `ideal_events` are those of
    even stages. `costs` of each stage: forward, input gradient, weight gradient, transfer. `kept`: of each stage, the
    share of a microbatch's activations that is held until its weight gradient ends; empty: all of them. `losses`: how
    many the step differentiates one after the other, each in stages of its own, numbered on. `recorded`: the
    profiler recorded what is measured, operation by operation; no action was timed by itself.
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
    refused: tuple[Refused, ...] = ()
    kept: tuple[float, ...] = ()
    losses: int = 1
    recorded: bool = False

    @overload
    def to_chrome_trace(self, path: None = None) -> str: ...
    @overload
    def to_chrome_trace(self, path: str | os.PathLike[str]) -> Path: ...

    def to_chrome_trace(self, path: str | os.PathLike[str] | None = None) -> str | Path:
        """The timeline as a trace that Perfetto and chrome://tracing open: JSON text, or a file written to `path`.

        Each rank is a thread of one process; the ideal stands in a second one. Costs without a unit take 1 ms each.
        Returns the text, or the path that was written.
        """
        from jaxshard_magic.views import chrome_trace

        text = chrome_trace.to_json(self)
        return text if path is None else saved(path, text)

    def _short(self) -> str:
        size = f"{self.stages} stages x {self.microbatches} microbatches"
        return f"<Pipeline {self.schedule}: {size}, {'recorded' if self.recorded else self.source}>"

    def _ways(self) -> tuple[Any, Any, Any]:
        from jaxshard_magic.views.timeline import html, text

        return text.to_text, html.to_html, html.page

    def _pictures(self) -> Mapping[str, Picture]:
        from jaxshard_magic.views.pictures import named

        return named.of_pipeline(self)

    def _live(self) -> Sequence[PageWidget]:
        from jaxshard_magic.views.timeline.payload import packed_pipeline

        return [PageWidget("report", packed_pipeline(self), pictures=self._pictures())]

    def _ipython_display_(self) -> None:
        from jaxshard_magic.views.show import show_pipeline

        show_pipeline(self)
