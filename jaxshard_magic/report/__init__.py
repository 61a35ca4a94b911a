"""`Report`: what one sharded step did, as frozen plain data with JSON there and back.

No jax arrays and no widgets: a Report outlives the kernel that made it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxshard_magic.report.checkpoints import Checkpoints as Checkpoints
from jaxshard_magic.report.checkpoints import Save as Save
from jaxshard_magic.report.divided import Experts as Experts
from jaxshard_magic.report.divided import Load as Load
from jaxshard_magic.report.divided import Positions as Positions
from jaxshard_magic.report.divided import Ring as Ring
from jaxshard_magic.report.measured import Busy as Busy
from jaxshard_magic.report.measured import Lane as Lane
from jaxshard_magic.report.measured import Measured as Measured
from jaxshard_magic.report.measured import Moved as Moved
from jaxshard_magic.report.measured import Spent as Spent
from jaxshard_magic.report.metrics import Curve as Curve
from jaxshard_magic.report.metrics import Metrics as Metrics
from jaxshard_magic.report.parts import BY_HAND as BY_HAND
from jaxshard_magic.report.parts import Advice as Advice
from jaxshard_magic.report.parts import Alternative as Alternative
from jaxshard_magic.report.parts import Buffer as Buffer
from jaxshard_magic.report.parts import Check as Check
from jaxshard_magic.report.parts import Collective as Collective
from jaxshard_magic.report.parts import DeviceMemory as DeviceMemory
from jaxshard_magic.report.parts import Ended as Ended
from jaxshard_magic.report.parts import Leaf as Leaf
from jaxshard_magic.report.parts import Live as Live
from jaxshard_magic.report.parts import Memory as Memory
from jaxshard_magic.report.parts import MeshInfo as MeshInfo
from jaxshard_magic.report.parts import Source as Source
from jaxshard_magic.report.parts import Spec as Spec
from jaxshard_magic.report.parts import Spread as Spread
from jaxshard_magic.report.parts import Timing as Timing
from jaxshard_magic.report.parts import Wait as Wait
from jaxshard_magic.report.parts import mesh_text
from jaxshard_magic.report.pipeline import Bubble as Bubble
from jaxshard_magic.report.pipeline import Pipeline as Pipeline
from jaxshard_magic.report.pipeline import PipelineEvent as PipelineEvent
from jaxshard_magic.report.pipeline import Rank as Rank
from jaxshard_magic.report.pipeline import Refused as Refused
from jaxshard_magic.report.pipeline import WhatIf as WhatIf
from jaxshard_magic.report.sent import PageWidget, Picture, Sendable
from jaxshard_magic.report.written import Written

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from jaxshard_magic.views.leaf_rows import Row
    from jaxshard_magic.views.widget import ReportView

SCHEMA = 1


@dataclass(frozen=True, repr=False)
class Report(Sendable, Written):
    """All that is known of one strategy on one step. A part that does not apply is None.

    `name`: of the step. `strategy` and `options`: as they were asked for. `mesh`: its axes and devices. `leaves`: every
    array of the step, and how it lies. `memory`: bytes by device. `collectives`: what moves. `timing`: seconds,
    measured and predicted. `measured`: where they went, as the profiler saw it, where it was asked. `pipeline`: of
    `pp`, the schedule in time. `advice`: what is off, or could be better.
    `check`: the comparison with the plain step. `sources`: the user's code that lines are of. `alternatives`: the step
    with other options. `ended`: how a cell ended before its end. `metrics`: the numbers of a run, over time. `number`:
    its notebook's and the history's for it. `checkpoints`: what saving the loop's state cost it.
    `experts`, `positions`: those that are divided over devices, of each number of them.

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
    sources: tuple[Source, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    ended: Ended | None = None
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
        """Whether it is of a step; arrays alone, as `jaxshard_magic.layout` lists them, have no strategy."""
        return bool(self.strategy)

    def to_text(self, width: int | None = None, leaves: str | int = 8) -> str:
        """The report for a terminal.

        Args:
            width: columns, held between 60 and 100; the terminal's own by default.
            leaves: how many of the largest leaves to list, or "all".
        """
        from jaxshard_magic.views import text

        return text.render(self, width, leaves)

    def _ways(self) -> tuple[Any, Any, Any]:
        from jaxshard_magic.views import html, text

        return text.render, html.fragment, html.page

    def _pictures(self) -> Mapping[str, Picture]:
        from jaxshard_magic.views.pictures import named

        return named.of_report(self)

    def _live(self) -> Sequence[PageWidget]:
        from jaxshard_magic.views.payload import packed

        return [PageWidget("report", packed(self), pictures=self._pictures())]

    @cached_property
    def rows(self) -> "list[Row]":
        """The leaves with repeated layers folded into one row each, as text and HTML list them; worked out once."""
        from jaxshard_magic.views import leaf_rows

        return leaf_rows.fold(self.leaves)

    @cached_property
    def view(self) -> "ReportView":
        """The report's widget, the same each time: `report.view.leaf` is what the reader selected in it."""
        from jaxshard_magic.views.widget import ReportView

        return ReportView(self)

    def figure(self, name: str, theme: str = "light") -> "Figure":
        """A plotly figure to zoom, restyle or save.

        Args:
            name: "memory": what each device holds, by role, against its limit; "roofline": the step that is predicted
                for a chip by compute, memory and communication over each mesh axis, beside the measured one;
                "timeline": what ran when on each rank of a pipeline, above its ideal.
            theme: "light" or "dark".

        Raises ShardError for other names, and for a report that does not hold what the figure shows.
        """
        from jaxshard_magic.views import figures

        return figures.figure(self, name, theme)

    def _short(self) -> str:
        return f"<Report {self.name!r}: {self.strategy} on {mesh_text(self.mesh.axes)}, {len(self.leaves)} leaves>"

    def _ipython_display_(self) -> None:
        from jaxshard_magic.views.show import show

        show(self)
