"""Explorers made by hand: a GPT-2-sized step's arrays, without a step behind them that could be compiled."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from support.sample_collectives import GPT, GPT_COLLECTIVES, MIB
from support.sample_leaves import ITEM, gpt_leaves, leaf
from support.sample_reports import attached

from jaxshard_magic.errors import ShardError
from jaxshard_magic.explorer import (
    DeviceSource,
    ExploredArray,
    ExploredLayout,
    ExploredStep,
    Explorer,
    ShardLine,
    find_arrays,
)
from jaxshard_magic.explorer.explored_step import CompiledLine, LinePrediction
from jaxshard_magic.explorer.shard_sizes import dim_axes
from jaxshard_magic.report import Leaf

CELL = "state, loss = train_step(state, batch)"


class Slice(DeviceSource):
    """Devices of which only the number is known."""

    count = 8  # pyright: ignore

    def mesh(self, axes: Any, *, exactly: bool = False) -> Any:
        return None

    def ids(self, axes: Mapping[str, int], own: Any = None) -> tuple[int, ...]:
        return tuple(range(prod(axes.values())))


class Turned(Slice):
    """Devices that a mesh has in the order of a ring: the last first."""

    def ids(self, axes: Mapping[str, int], own: Any = None) -> tuple[int, ...]:
        return tuple(reversed(super().ids(axes)))


class Known(ExploredStep):
    """A step of which one layout is known, and nothing else can be planned or compiled."""

    def plan(self, line: str, mesh: Any) -> ExploredLayout:
        if not line.startswith(f"%%shard {self.layout.strategy}") or "--mesh" in line:
            raise ShardError("there is no kernel behind this page")
        return self.layout


def array(leaf: Leaf, classes: tuple[int, ...]) -> ExploredArray:
    return ExploredArray(leaf.path, leaf.role, leaf.shape, leaf.dtype, 8 * ITEM[leaf.dtype], classes)


def of_leaves(leaves: tuple[Leaf, ...], axes: Mapping[str, int], note: str = "") -> Explorer:
    """An explorer of a step that lay so; moments follow the parameter that their path ends with."""
    numbers: dict[str, tuple[int, ...]] = {}
    arrays = []
    for n, each in enumerate(leaves):
        name = each.path.removeprefix("opt.mu.").removeprefix("opt.nu.")
        fresh = tuple(100 * n + dim for dim in range(len(each.shape)))
        arrays.append(array(each, numbers.setdefault(name, fresh)))
    cuts = tuple(dim_axes(each.spec, len(each.shape)) for each in leaves)
    laid = ExploredLayout("fsdp+tp", dict(axes), cuts, tuple(each.why for each in leaves))
    unknown: Any = None
    stepped = Known("train_step", tuple(arrays), laid, laid, unknown, CELL, unknown, unknown, {})
    home = " ".join(f"{axis}={size}" for axis, size in axes.items())
    return Explorer(
        tuple(arrays),
        axes,
        place=Slice(),
        line=ShardLine(default_mesh=home),
        strategy="fsdp+tp",
        stepped=stepped,
        note=note,
    )


def gpt() -> Explorer:
    """As it lay when it ran."""
    return of_leaves(gpt_leaves(), GPT)


def edited() -> Explorer:
    """The mock's: the embedding cut eightfold along its second dimension."""
    ex = gpt()
    ex["wte.embedding"] = "P(None, ('data', 'model'))"
    return ex


def many() -> Explorer:
    """1,000 arrays in layers, on 256 devices along five axes."""
    axes = {"replica": 2, "data": 8, "fsdp": 4, "seq": 2, "model": 2}
    rows = []
    for i in range(250):
        for name, shape, spec in (
            ("attn.qkv.kernel", (8192, 3, 64, 128), ("data", None, "model")),
            ("attn.out.kernel", (64, 128, 8192), ("model", None, ("data", "fsdp"))),
            ("mlp.up.kernel", (8192, 28672), (("data", "fsdp"), "model")),
            ("ln_1.scale", (8192,), ()),
        ):
            rows.append(leaf(f"params.blocks.{i}.{name}", shape, spec, axes, why="fsdp+tp"))
    return of_leaves(tuple(rows), axes)


def odd() -> Explorer:
    """No step: a scalar, an empty array, dimensions of one, a long path."""
    words = [
        "step=i32[]",
        "none=f32[0,768]",
        "thin=bf16[1,1,30]",
        f"{'a_long_name.' * 4}w=f32[7,11,13,17,19]",
    ]
    return Explorer(find_arrays(words, {}), {"data": 3, "model": 2}, place=DeviceSource(), line=ShardLine())


def compiled() -> Explorer:
    """Another mesh, and its line compiled; the plan had told a little less."""
    ex = edited()
    told = tuple(c for c in GPT_COLLECTIVES if c.kind != "all-to-all")
    ex.compiled = CompiledLine(ex.line, attached(), LinePrediction(380 * MIB, 4200 * MIB, told))
    return ex


def hostile() -> Explorer:
    """Paths that break out of markup or move a cursor, and an axis that is no ASCII."""
    evil = "<script>alert('x')</script>&\"'\x1b[2J\nq"
    leaves = (
        leaf(f"{evil}.kernel", (64, 64), ("d\u00e4ta", None), {"d\u00e4ta": 2, "m": 2}, why=evil),
        leaf("\u91cd\u307f.\u5c64_0", (64, 63), (), {"d\u00e4ta": 2, "m": 2}),
    )
    return of_leaves(leaves, {"d\u00e4ta": 2, "m": 2}, evil)


EXPLORERS: dict[str, Callable[[], Explorer]] = {
    "gpt": gpt,
    "edited": edited,
    "many": many,
    "odd": odd,
    "compiled": compiled,
}
