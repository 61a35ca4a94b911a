"""Chips: peak FLOP/s, memory, links and networks as published, one row a chip in `hardware.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from .errors import ShardError, none_of

GIB = 2**30
# Of a GPU's memory, for programs: https://docs.jax.dev/en/latest/gpu_memory_allocation.html
DEFAULT_SHARE = 0.75
RATES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "int8": "int8",
    "uint8": "int8",
}


# Figures of a chip that stand in its row as they are here.
_AS_WRITTEN = (
    "name",
    "kind",
    "flops",
    "hbm_bandwidth",
    "node",
    "per_chip",
    "compiler",
    "cores",
    "marketed",
    "whole_above",
)


@dataclass(frozen=True)
class Link:
    """What joins the devices of one node or slice: so many `links` a chip, each with a `bandwidth` in bytes/s
    one way, None where none is published.

    `topology`: "torus2d", "torus3d", "switch", "cube" or "pcie". `wrap`: the size at which a dimension of a
    torus closes into a ring. `inside`: bytes/s one way between the devices of one chip.
    """

    name: str
    topology: str
    links: int
    bandwidth: float | None = None
    wrap: int = 0
    inside: float | None = None


@dataclass(frozen=True)
class Network:
    """What joins nodes or slices; `bandwidth` is what one device sends, in bytes/s."""

    name: str
    bandwidth: float


@dataclass(frozen=True)
class Chip:
    """A kind of accelerator; every figure is per device as JAX counts devices, `per_chip` of them to a chip.

    `kind`: "tpu" or "gpu". `flops`: FLOP/s of a dense matmul by type, see `peak`. `hbm`, `usable`: bytes of
    memory, and what of them a program gets: of a TPU what the compiler leaves, of a GPU the share that jax takes by
    default of what the driver shows, `visible`. `hbm_bandwidth`: bytes/s. `node`: the most devices that `link`
    joins, those of a node of GPUs or of the largest slice of TPUs. `source`: the pages the figures are from.
    `compiler`: what XLA asks of a GPU to compile for it, None for a TPU. `slices`: those that are offered, in chips per
    dimension; `marketed`: what stands before the number in their names, which counts `cores` to a chip. `whole_above`:
    on slices of more chips a program is for all devices or for one; None: for any part of them.
    """

    key: str
    name: str
    aliases: tuple[str, ...]
    kind: str
    flops: Mapping[str, float] = field(hash=False)
    hbm: int
    usable: int | None
    hbm_bandwidth: float
    node: int
    link: Link
    network: Network | None
    source: tuple[str, ...]
    per_chip: int = 1
    visible: int | None = None
    compiler: Mapping[str, Any] | None = field(default=None, hash=False)
    slices: tuple[tuple[int, ...], ...] = ()
    cores: int = 1
    marketed: str | None = None
    whole_above: int | None = None

    def peak(self, dtype: str) -> float | None:
        """FLOP/s of a matmul on arrays of `dtype`, as numpy names it; None where none is published.

        float32 is counted as JAX computes it at its default precision: in bfloat16 on TPU, in tensorfloat32 on a
        GPU that has it, else in float32 (`jax.lax.Precision.DEFAULT`). Integers: operations/s.

        >>> chip("v5e").peak("float32") == chip("v5e").peak("bfloat16") == 197e12
        True
        """
        if dtype == "float32" and self.kind == "tpu":
            return self.flops.get("bf16")
        if dtype == "float32" and "tf32" in self.flops:
            return self.flops["tf32"]
        return self.flops.get("fp8" if dtype.startswith("float8") else RATES.get(dtype, ""))


@cache
def chips() -> dict[str, Chip]:
    """All known chips, by their short names."""
    return {key: _chip(key, row) for key, row in _table()["chips"].items()}


@cache
def interconnects() -> dict[str, float]:
    """Kinds of links and networks: the bytes/s that one device sends in one direction.

    >>> interconnects()["NVLink 4"]
    450000000000.0
    """
    return {name: row["bandwidth"] for name, row in _table()["interconnects"].items()}


def chip(name: str) -> Chip:
    """The chip with this name, in any case: "v5e", "h100", "a100-80", "TPU v5 lite". Raises `ShardError` for a
    name that no chip has."""
    named = chip_of(name)
    if named is None:
        raise ShardError(
            none_of(f"'{name}' names no known chip", _word(name), _by_word(), "%mesh --list has all")
        )
    return named


def chip_of(device_kind: str) -> Chip | None:
    """The chip that JAX's `Device.device_kind` names; None for one that is not in the table.

    >>> chip_of("NVIDIA H100 80GB HBM3").key
    'h100'
    """
    return _by_word().get(_word(device_kind))


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((files("jaxshard_magic") / "hardware.toml").read_text("utf-8"))


def _chip(key: str, row: Mapping[str, Any]) -> Chip:
    visible = row.get("visible_gib")
    usable = row.get("usable_gib", visible and visible * DEFAULT_SHARE)
    return Chip(
        key=key,
        aliases=tuple(row["aliases"]),
        hbm=int(row["hbm_gib"] * GIB),
        usable=None if usable is None else int(usable * GIB),
        link=Link(**row["link"]),
        network=Network(**row["network"]) if "network" in row else None,
        source=tuple(row["source"]),
        visible=None if visible is None else int(visible * GIB),
        slices=tuple(tuple(map(int, text.split("x"))) for text in row.get("slices", ())),
        **{name: row[name] for name in _AS_WRITTEN if name in row},
    )


@cache
def _by_word() -> dict[str, Chip]:
    return {_word(n): chip for chip in chips().values() for n in (chip.key, chip.name, *chip.aliases)}


def _word(name: str) -> str:
    return " ".join(name.lower().split())
