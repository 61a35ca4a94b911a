"""Report of a sharded step: frozen plain data, convertible to JSON and back.

A report contains no jax arrays and no widgets, so it outlives the kernel.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxshard_magic.display import renderer
from jaxshard_magic.report.experts_positions import ExpertLoad as ExpertLoad
from jaxshard_magic.report.experts_positions import Experts as Experts
from jaxshard_magic.report.experts_positions import Positions as Positions
from jaxshard_magic.report.experts_positions import Ring as Ring
from jaxshard_magic.report.exports import Exportable
from jaxshard_magic.report.measured import CollectiveTime as CollectiveTime
from jaxshard_magic.report.measured import DeviceLane as DeviceLane
from jaxshard_magic.report.measured import DeviceTime as DeviceTime
from jaxshard_magic.report.measured import LineTime as LineTime
from jaxshard_magic.report.measured import Measured as Measured
from jaxshard_magic.report.metrics import Curve as Curve
from jaxshard_magic.report.metrics import Metrics as Metrics
from jaxshard_magic.report.parts import BY_HAND as BY_HAND
from jaxshard_magic.report.parts import Advice as Advice
from jaxshard_magic.report.parts import Alternative as Alternative
from jaxshard_magic.report.parts import Buffer as Buffer
from jaxshard_magic.report.parts import Check as Check
from jaxshard_magic.report.parts import Checkpoints as Checkpoints
from jaxshard_magic.report.parts import Collective as Collective
from jaxshard_magic.report.parts import DeviceMemory as DeviceMemory
from jaxshard_magic.report.parts import EarlyEnd as EarlyEnd
from jaxshard_magic.report.parts import Leaf as Leaf
from jaxshard_magic.report.parts import LiveMemory as LiveMemory
from jaxshard_magic.report.parts import Memory as Memory
from jaxshard_magic.report.parts import MeshInfo as MeshInfo
from jaxshard_magic.report.parts import PredictedWait as PredictedWait
from jaxshard_magic.report.parts import Save as Save
from jaxshard_magic.report.parts import SourceExcerpt as SourceExcerpt
from jaxshard_magic.report.parts import Spec as Spec
from jaxshard_magic.report.parts import TimeSpread as TimeSpread
from jaxshard_magic.report.parts import Timing as Timing
from jaxshard_magic.report.parts import mesh_text
from jaxshard_magic.report.pipeline import Bubble as Bubble
from jaxshard_magic.report.pipeline import Pipeline as Pipeline
from jaxshard_magic.report.pipeline import PipelineEvent as PipelineEvent
from jaxshard_magic.report.pipeline import PipelineRank as PipelineRank
from jaxshard_magic.report.pipeline import RefusedSchedule as RefusedSchedule
from jaxshard_magic.report.pipeline import WhatIf as WhatIf
from jaxshard_magic.report.records import JsonRecord

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SCHEMA = 1


@dataclass(frozen=True, repr=False)
class Report(Exportable, JsonRecord):
    """Facts about a step under a strategy. Parts that do not apply are None.

    Attributes:
        name: Name of the step.
        strategy: Strategy as requested; empty for arrays alone.
        options: Options as requested.
        mesh: Axes and devices.
        leaves: All arrays of the step with their sharding.
        memory: Bytes on each device.
        collectives: Communication.
        timing: Seconds, measured and predicted.
        pipeline: Schedule in time, for `pp`.
        advice: Problems and possible improvements.
        check: Comparison with the plain step.
        sources: The user's code that lines refer to.
        alternatives: The step with other options.
        ended: Premature end of the cell.
        metrics: Numbers of a run over time.
        number: Number of the report in its notebook and in the history.
        measured: Time by line, from the profiler, if requested.
        checkpoints: Cost of saving the loop's state.
        experts: Experts divided over devices, for each number of experts.
        positions: Sequence positions divided over devices, for each number of positions.
        schema: Version of the JSON format.

    >>> import jaxshard_magic
    >>> import jax.numpy as jnp
    >>> report = jaxshard_magic.layout({"w": jnp.ones((4, 2))})
    >>> Report.from_json(report.to_json()) == report
    True
    """

    name: str
    strategy: str
    options: dict[str, Any]
    mesh: MeshInfo
    leaves: tuple[Leaf, ...] = ()
    memory: Memory | None = None
    collectives: tuple[Collective, ...] | None = None
    timing: Timing | None = None
    pipeline: Pipeline | None = None
    advice: tuple[Advice, ...] = ()
    check: Check | None = None
    sources: tuple[SourceExcerpt, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    ended: EarlyEnd | None = None
    metrics: Metrics | None = None
    number: int | None = None
    measured: Measured | None = None
    checkpoints: Checkpoints | None = None
    experts: tuple[Experts, ...] = ()
    positions: tuple[Positions, ...] = ()
    schema: int = SCHEMA

    _what, _schema = "report", SCHEMA

    @property
    def of_step(self) -> bool:
        """Return whether the report is about a step. Arrays alone, as listed by `jaxshard_magic.layout`, have no
        strategy."""
        return bool(self.strategy)

    def to_text(self, width: int | None = None, leaves: str | int = 8) -> str:
        """Return the report as text for a terminal.

        Args:
            width: Columns, clipped to 60 to 100; the width of the terminal by default.
            leaves: Number of largest leaves to list, or "all".
        """
        return renderer(self, "text")(self, width, leaves)

    def to_markdown(self, leaves: str | int = 8) -> str:
        """Return the report as GitHub-flavoured Markdown, for a pull request.

        Args:
            leaves: Number of largest leaves to list, or "all".
        """
        return renderer(self, "markdown")(self, leaves)

    @cached_property
    def rows(self) -> list[Any]:
        """Leaves with repeated layers folded into a row each, as listed in text and HTML; computed once."""
        return renderer(self, "rows")(self.leaves)

    @cached_property
    def view(self) -> Any:
        """Widget of the report, created once. `report.view.leaf` is the leaf selected by the reader."""
        return renderer(self, "widget")(self)

    def figure(self, name: str, theme: str = "light") -> "Figure":
        """Return a plotly figure to zoom, restyle or save.

        Args:
            name: "memory": bytes on each device by role, against its limit. "roofline": the predicted step time on a
                chip by compute, memory and communication over each mesh axis, beside the measured time. "timeline":
                actions on each rank of a pipeline over time, above the ideal.
            theme: "light" or "dark".

        Raises:
            ShardError: Another name, or a report without the data of the figure.
        """
        return renderer(self, "figure")(self, name, theme)

    def _summary_line(self) -> str:
        return f"<Report {self.name!r}: {self.strategy} on {mesh_text(self.mesh.axes)}, {len(self.leaves)} leaves>"

    def _ipython_display_(self) -> None:
        renderer(self, "show")(self)


def options_text(report: Report) -> str:
    """Return the given options as typed: `--rule "wte=P('model')" --precision bf16`.

    A pipeline's options begin with its schedule, given or not.
    """
    schedule: dict[str, Any] = {} if report.pipeline is None else {"schedule": report.pipeline.schedule}
    words: list[str] = []
    for name, value in (schedule | report.options).items():
        flag = "--" + {"specs": "spec", "rules": "rule"}.get(name, name).replace("_", "-")
        if value is True:
            words.append(flag)
        elif isinstance(value, dict):
            words += [f'{flag} "{key}={item}"' for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            words += [f'{flag} "{item}"' for item in value]
        elif value is not None and value is not False and value != "":
            text = str(value)
            words.append(f'{flag} "{text}"' if " " in text else f"{flag} {text}")
    return " ".join(words)
