"""Chips: published peak FLOP/s, memory, links and networks, from `hardware.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from .errors import ShardError, unknown_name

GIB = 2**30
# Share of a GPU's memory that JAX gives to programs: https://docs.jax.dev/en/latest/gpu_memory_allocation.html
DEFAULT_SHARE = 0.75
# NumPy's name of a dtype -> key in `Chip.flops`.
RATES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "int8": "int8", "uint8": "int8"}


# Fields of `Chip` that have the same name and form in a row of hardware.toml.
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
    """Connection of the devices of one node or slice.

    Attributes:
        name: Name such as "ICI" or "NVLink 4".
        topology: "torus2d", "torus3d", "switch", "cube" or "pcie".
        links: Links per chip.
        bandwidth: Bytes/s of one link, one way; None if none is published.
        wrap: Size at which a dimension of a torus closes into a ring.
        inside: Bytes/s one way between the devices of one chip.
    """

    name: str
    topology: str
    links: int
    bandwidth: float | None = None
    wrap: int = 0
    inside: float | None = None


@dataclass(frozen=True)
class Network:
    """Connection of nodes or slices.

    Attributes:
        name: Name of the network.
        bandwidth: Bytes/s that one device sends.
    """

    name: str
    bandwidth: float


@dataclass(frozen=True)
class Chip:
    """Kind of accelerator. Figures are per device as JAX counts devices, `per_chip` of them to a chip.

    Attributes:
        key: Short name, such as "v5e".
        name: Full name.
        aliases: Other names, among them JAX's `device_kind`.
        kind: "tpu" or "gpu".
        flops: FLOP/s of a dense matmul by type; see `peak`.
        hbm: Bytes of memory.
        usable: Bytes that a program gets: on a TPU what the compiler leaves, on a GPU JAX's default share of `visible`;
            None if not known.
        hbm_bandwidth: Bytes/s of memory.
        node: Most devices that `link` joins: in a node of GPUs, or in the largest slice of TPUs.
        link: Connection inside a node or slice.
        network: Connection between nodes or slices; None if none is published.
        source: Pages with the figures.
        per_chip: Devices per chip.
        visible: Bytes of a GPU's memory that the driver shows.
        compiler: Properties that XLA needs to compile for a GPU; None for a TPU.
        slices: Slices on offer, in chips per dimension.
        cores: Cores per chip, as counted by the number in the vendor's names of slices.
        marketed: Text before the number in the vendor's names.
        whole_above: On slices of more chips, a program is for all devices or for one; None: for any part of them.
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
        """Return the peak FLOP/s of a matmul (integers: operations/s); None if none is published.

        float32 has the rate of JAX's default precision: bfloat16 on TPU, tensorfloat32 on a GPU that has it, else
        float32 (`jax.lax.Precision.DEFAULT`).

        Args:
            dtype: dtype of the arrays by numpy's name.

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
    """Return all known chips by their short names."""
    return {key: _chip(key, row) for key, row in _table()["chips"].items()}


@cache
def interconnects() -> dict[str, float]:
    """Return the bytes/s that one device sends in one direction, by kind of link or network.

    >>> interconnects()["NVLink 4"]
    450000000000.0
    """
    return {name: row["bandwidth"] for name, row in _table()["interconnects"].items()}


def chip(name: str) -> Chip:
    """Return the chip of a name, in any case: "v5e", "h100", "a100-80", "TPU v5 lite". Raises ShardError for other
    names."""
    named = chip_of(name)
    if named is None:
        raise ShardError(unknown_name(f"'{name}' names no known chip", _word(name), _by_word(), "%mesh --list has all"))
    return named


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip of JAX's `Device.device_kind`; None if it is not in the table.

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
