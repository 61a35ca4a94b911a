"""`Report`: what one sharded step did, as frozen plain data with JSON there and back.

No jax arrays and no widgets: a Report outlives the kernel that made it.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report.parts import Advice as Advice
from jaxshard_magic.report.parts import Alternative as Alternative
from jaxshard_magic.report.parts import Buffer as Buffer
from jaxshard_magic.report.parts import Check as Check
from jaxshard_magic.report.parts import Collective as Collective
from jaxshard_magic.report.parts import DeviceMemory as DeviceMemory
from jaxshard_magic.report.parts import Leaf as Leaf
from jaxshard_magic.report.parts import Live as Live
from jaxshard_magic.report.parts import Memory as Memory
from jaxshard_magic.report.parts import MeshInfo as MeshInfo
from jaxshard_magic.report.parts import Source as Source
from jaxshard_magic.report.parts import Spec as Spec
from jaxshard_magic.report.parts import Spread as Spread
from jaxshard_magic.report.parts import Timing as Timing
from jaxshard_magic.report.pipeline import Bubble as Bubble
from jaxshard_magic.report.pipeline import Pipeline as Pipeline
from jaxshard_magic.report.pipeline import PipelineEvent as PipelineEvent
from jaxshard_magic.report.pipeline import Rank as Rank
from jaxshard_magic.report.pipeline import Refused as Refused
from jaxshard_magic.report.pipeline import WhatIf as WhatIf
from jaxshard_magic.report.plain import build, kind, plain

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from jaxshard_magic.views.widget import ReportView

SCHEMA = 1


@dataclass(frozen=True, repr=False)
class Report:
    """All that is known of one strategy on one step. A part that does not apply is None."""

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
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers, ready for `json.dumps`.

        Figures that are not finite become the strings `NaN`, `Infinity` and `-Infinity`; option values
        that are not plain data become their text.
        """
        return plain(self)

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON text, from which `Report.from_json` makes an equal one."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Report":
        """The report that `to_dict` wrote. Raises ShardError naming the field that is wrong."""
        if not isinstance(data, Mapping):
            raise ShardError(f"a report is an object with fields, not {kind(data)}")
        schema = data.get("schema")
        if schema != SCHEMA:
            raise _schema_error(schema)
        return build(cls, data, "report")

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """The report in JSON `text`. Raises ShardError where the text is not JSON or not a report."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ShardError(f"not a report: {error.msg} at line {error.lineno} of the JSON") from None
        return cls.from_dict(data)

    def to_text(self, width: int | None = None, leaves: str | int = 8) -> str:
        """The report for a terminal.

        Args:
            width: columns, held between 60 and 100; the terminal's own by default.
            leaves: how many of the largest leaves to list, or "all".
        """
        from jaxshard_magic.views import text

        return text.render(self, width, leaves)

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | os.PathLike[str]) -> Path: ...

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str | Path:
        """The report as HTML without script: a fragment to embed, or a whole document written to `path`.

        Returns the fragment, or the path that was written.
        """
        from jaxshard_magic.views import html

        if path is None:
            return html.fragment(self)
        written = Path(path)
        written.write_text(html.page(self), encoding="utf-8")
        return written

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

    def __getstate__(self) -> dict[str, Any]:
        """A widget belongs to one kernel: copies and pickles go without it."""
        return {name: value for name, value in self.__dict__.items() if name != "view"}

    def __repr__(self) -> str:
        axes = " ".join(f"{axis}={size}" for axis, size in self.mesh.axes.items())
        return f"<Report {self.name!r}: {self.strategy} on {axes}, {len(self.leaves)} leaves>"

    def _ipython_display_(self) -> None:
        from jaxshard_magic.views.show import show

        show(self)

    def _repr_html_(self) -> str:
        return self.to_html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self) if cycle else self.to_text())


def _schema_error(schema: Any) -> ShardError:
    if isinstance(schema, int) and schema > SCHEMA:
        return ShardError(
            f"this report has schema {schema}; this version of jaxshard_magic reads schema {SCHEMA}."
            " A newer jaxshard_magic reads it",
            fix="pip install --upgrade jaxshard_magic",
        )
    given = "no schema" if schema is None else f"schema {schema!r}"
    return ShardError(f"this is no report: it has {given}, a report has schema {SCHEMA}")
