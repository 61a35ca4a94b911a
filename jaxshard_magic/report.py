"""`Report`: what one sharded step did, as frozen plain data with JSON there and back.

No jax arrays and no widgets: a Report outlives the kernel that made it.
"""

import dataclasses
import json
import math
import numbers
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from jaxshard_magic.errors import ShardError, did_you_mean, one_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from jaxshard_magic.views.widget import ReportView

SCHEMA = 1

Spec = tuple[str | tuple[str, ...] | None, ...]


@dataclass(frozen=True)
class MeshInfo:
    """The mesh of a run. `devices` holds one id per device in the mesh's order (row-major over `axes`)."""

    axes: dict[str, int]
    platform: str
    device_kind: str
    source: str  # attached | simulated | topology
    devices: tuple[int, ...]
    processes: int


@dataclass(frozen=True)
class Leaf:
    """One array of the step. `bytes_per_device` is what one device stores; `wanted` names mesh axes
    that the strategy wanted to shard this leaf over and could not, `lost` the bytes per device that cost."""

    path: str
    role: str  # params | optimizer | batch | rng | other
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    bytes: int
    bytes_per_device: int
    why: str
    wanted: tuple[str, ...] = ()
    lost: int = 0


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device while the step runs; None where it is not known.

    `measured` is the device's own peak, of all that it held: the notebook's other arrays, too.
    """

    device: int
    params: int
    optimizer: int
    batch: int
    other: int
    temporaries: int | None
    peak: int | None
    limit: int | None
    measured: int | None = None


@dataclass(frozen=True)
class Buffer:
    """Temporaries that are live at the peak on one device: `count` alike ones of the same line.

    `bytes` is of all of them, `shape` and `dtype` (as HLO writes it) of one. `what` names the operation that made them;
    `line` of `file`, one of the report's `sources`.
    """

    bytes: int
    count: int
    dtype: str
    shape: tuple[int, ...]
    what: str
    phase: str | None = None
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Live:
    """Bytes live on one device through the step, in the compiler's order of instructions: arguments, outputs and
    temporaries. `bytes[i]` holds from instruction `at[i]` until `at[i + 1]`, of `instructions` in all; the largest
    is `bytes[peak]`. `phases` are (name, first instruction) in order; `line` of `file` is where the peak lies."""

    at: tuple[int, ...]
    bytes: tuple[int, ...]
    instructions: int
    peak: int
    phases: tuple[tuple[str, int], ...] = ()
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Memory:
    """`buffers` are the largest temporaries live at the peak, `others` how many more there are and their bytes; both
    None, and `live`, where the compiler does not tell."""

    per_device: tuple[DeviceMemory, ...]
    source: str  # where the figures come from: "compiled" (XLA's memory analysis) or "measured"
    buffers: tuple[Buffer, ...] | None = None
    others: tuple[int, ...] | None = None
    live: Live | None = None


@dataclass(frozen=True)
class Collective:
    """One kind of collective over one set of axes, merged from all of the program's that are alike.

    `bytes` is the size on one device of the gathered (or unreduced) array of one such collective;
    `wire_bytes` what one device sends per step on a ring, all `count` of them together, `seconds` the time that this
    is predicted to take. `axes` is None where the replica groups match no set of mesh axes. `phase` is forward,
    backward or update. `line` of `file`, one of the report's `sources`, is the user's line that caused it, `source` its
    text, `at` the user's code that this line called, `model.py:31`, where that is deeper. `what` names what moves.
    `exact` is False where the program decides while it runs how often: then `count` is at least so.
    """

    kind: str
    axes: tuple[str, ...] | None
    group_size: int
    count: int
    bytes: int
    wire_bytes: int
    seconds: float | None = None
    phase: str | None = None
    line: int | None = None
    source: str | None = None
    file: str | None = None
    at: str | None = None
    what: str | None = None
    exact: bool = True


@dataclass(frozen=True)
class Source:
    """The user's code that a report's lines are of: a cell whole, of a file the parts that matter.

    `text[i]` is line `numbers[i]`. `home` says that the step is defined here; `note` why there is no text.
    """

    name: str  # "cell 7", "model.py"
    numbers: tuple[int, ...]
    text: tuple[str, ...]
    home: bool = False
    note: str | None = None


@dataclass(frozen=True)
class Spread:
    """Seconds."""

    min: float
    median: float
    max: float


@dataclass(frozen=True)
class Timing:
    """`calls` counts every call; `step_s` is over the `timed` calls whose result was waited for.

    `flops` are those of the step's matrix products and convolutions on all devices together, `recomputed` those among
    them that remat does a second time, `device_flops` what one device does. The rest is predicted for the chip `on`:
    the seconds that one device computes (`compute_s`), reads and writes its memory (`memory_s`) and communicates
    (`communication_s`, over `links` of so many bytes a second by axis); `predicted_step_s` is the sum of products, each
    bound by compute or memory, and communication.
    `mfu`: the share of the chip's peak that the step's FLOPs without recomputed ones are in the measured step.
    """

    compile_s: float | None
    calls: int
    timed: int
    step_s: Spread | None
    predicted_step_s: float | None = None
    bound: str | None = None
    flops: float | None = None
    recomputed: float | None = None
    device_flops: float | None = None
    on: str | None = None
    compute_s: float | None = None
    memory_s: float | None = None
    communication_s: float | None = None
    links: dict[str, float] = field(default_factory=dict)
    mfu: float | None = None


@dataclass(frozen=True)
class Advice:
    code: str
    level: str  # info | warning | error
    message: str
    fix: str | None = None


@dataclass(frozen=True)
class Check:
    """The sharded step against the plain one on the same inputs.

    `noise` names leaves that differ by no more than the plain step's own rounding noise does.
    """

    passed: bool
    max_abs_diff: float | None
    max_rel_diff: float | None
    limit: float
    reference: str
    noise: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


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
    pipeline: None = None
    advice: tuple[Advice, ...] = ()
    check: Check | None = None
    sources: tuple[Source, ...] = ()
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers, ready for `json.dumps`.

        Figures that are not finite become the strings `NaN`, `Infinity` and `-Infinity`; option values
        that are not plain data become their text.
        """
        return _plain(self)

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON text, from which `Report.from_json` makes an equal one."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Report":
        """The report that `to_dict` wrote. Raises ShardError naming the field that is wrong."""
        if not isinstance(data, Mapping):
            raise ShardError(f"a report is an object with fields, not {_kind(data)}")
        schema = data.get("schema")
        if schema != SCHEMA:
            raise _schema_error(schema)
        return _build(cls, data, "report")

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
            name: "memory": what each device holds, by role, against its limit.
            theme: "light" or "dark".
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


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else json.dumps(number)
    return str(value)


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _build(wanted: Any, value: Any, where: str) -> Any:
    """`value` from JSON as the annotated type `wanted`; `where` names it in errors."""
    origin, args = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return _build_one_of(args, value, where)
    if isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
        return _build_fields(wanted, value, where)
    if origin is tuple and isinstance(value, list):
        kinds = args if args[-1] is not Ellipsis else (args[0],) * len(value)
        if len(kinds) != len(value):
            raise ShardError(f"{where} must have {len(kinds)} items, not {len(value)}")
        return tuple(_build(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if origin is dict and isinstance(value, Mapping):
        return {str(k): _build(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if wanted is float and isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if wanted is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if wanted is types.NoneType and value is None:
        return None
    if isinstance(wanted, type) and type(value) is wanted:
        return value
    raise ShardError(f"{where} must be {_expected(wanted)}, not {_kind(value)}")


def _build_one_of(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and types.NoneType in choices:
        return None
    rest = [choice for choice in choices if choice is not types.NoneType]
    for choice in rest[:-1]:
        if type(value) is choice:
            return value
    return _build(rest[-1], value, where)


def _build_fields(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ShardError(f"{where} must be {_expected(cls)}, not {_kind(value)}")
    fields, hints = _fields(cls)
    for name in value:
        if name not in fields:
            allowed = one_of(fields)
            raise ShardError(
                f"{where} has no field '{name}'; its fields are {allowed}.{did_you_mean(name, fields)}"
            )
    for name, known in fields.items():
        needed = known.default is dataclasses.MISSING and known.default_factory is dataclasses.MISSING
        if name not in value and needed:
            raise ShardError(f"{where} lacks the field '{name}'")
    return cls(**{name: _build(hints[name], v, f"{where}.{name}") for name, v in value.items()})


@cache
def _fields(cls: Any) -> tuple[dict[str, dataclasses.Field], dict[str, Any]]:
    return {f.name: f for f in dataclasses.fields(cls)}, typing.get_type_hints(cls)


_NAMES = {
    type(None): "null",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    tuple: "a list",
    dict: "an object",
}


def _kind(value: Any) -> str:
    return _NAMES.get(type(value), f"a {type(value).__name__}")


def _expected(wanted: Any) -> str:
    if dataclasses.is_dataclass(wanted):
        return "an object"
    return _NAMES.get(typing.get_origin(wanted) or wanted, str(wanted))


def _schema_error(schema: Any) -> ShardError:
    if isinstance(schema, int) and schema > SCHEMA:
        return ShardError(
            f"this report has schema {schema}; this version of jaxshard_magic reads schema {SCHEMA}."
            " A newer jaxshard_magic reads it",
            fix="pip install --upgrade jaxshard_magic",
        )
    given = "no schema" if schema is None else f"schema {schema!r}"
    return ShardError(f"this is no report: it has {given}, a report has schema {SCHEMA}")
