"""`Plan`: where every array of a step goes, and why. Frozen; made by `strategies`, carried out by `step`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from .program.flops import Work
    from .program.routing import Route
    from .program.trace import Traced

WHOLE = "a copy on every device"  # why a leaf lies where it does, where nothing divides it


@dataclass(frozen=True)
class LeafPlan:
    """One input of the step. `wanted`: mesh axes that the strategy could not shard it over; `lost`: the bytes
    per device that this costs. `memory`: its memory kind, None on the devices."""

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    why: str
    wanted: tuple[str, ...] = ()
    lost: int = 0
    memory: str | None = None


@dataclass(frozen=True)
class Finding:
    """Something that the user should know: `level` is info, warning or error; `fix` a text to paste."""

    code: str
    level: str
    message: str
    fix: str | None = None


@dataclass(frozen=True)
class Share:
    """What one device does of one product in a step, loop trips multiplied in: FLOPs, and bytes read and written.
    `recomputed`: done a second time for the backward pass. `exact`: False where a loop's trips are not known.
    `weights`: of the bytes those that are the same however few examples there are. `dims`: rows, columns and what is
    summed over, of one of the matrices that it multiplies; None where a product is no such thing. `passes`: how often a
    TPU multiplies for it, whose units know no more than bfloat16."""

    flops: int
    bytes: int
    dtype: str
    recomputed: bool = False
    exact: bool = True
    weights: int = 0
    dims: tuple[int, int, int] | None = None
    passes: int = 1


@dataclass(frozen=True)
class Sent:
    """A collective that a plan needs, told before anything is compiled: over which mesh axes, how many devices they
    are, bytes on one device of the gathered (before: unreduced) array, and how often in a step, loop trips multiplied
    in. The devices of a part of an axis are `apart` places along it from each to the next. `equation`: the index of the
    equation that needs it, and `value`: what moves, where that is an array or a part of one; each None where it is
    not known."""

    kind: str
    axes: tuple[str, ...]
    group_size: int
    bytes: int
    count: int
    apart: int = 1
    equation: int | None = field(default=None, compare=False)
    value: int | None = field(default=None, compare=False)

    @property
    def exact(self) -> bool:
        """Whether `count` is certain: loops of unknown length count once, as in all of a plan's figures."""
        return True

    @property
    def network(self) -> int | None:
        """Bytes that leave an island of the mesh: not told of a plan."""
        return None


@dataclass(frozen=True)
class DividedExperts:
    """`number` experts divided over `axes`. `work`: what an expert multiplies: the rows in its "places", the rows that
    were "sorted" to it, or "all" tokens. `routes`: the layers that choose among them."""

    number: int
    axes: tuple[str, ...]
    work: str
    routes: "tuple[Route, ...]" = ()


@dataclass(frozen=True)
class RingOf:
    """Attention as a ring, forward and backward. `turns`: the keys of how many devices each meets, with its own;
    `count`: how often in a step. `bytes`: of keys and values that a device holds, and sends in a turn; `gradients`: of
    their gradients, which follow them in the backward pass, as often, None without one. `zigzag`: the positions of a
    device are two parts, from the beginning and from the end. `file` and `line`: of the attention, as Python knows
    them."""

    positions: int
    turns: int
    count: int
    bytes: int
    gradients: int | None
    zigzag: bool
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class DividedPositions:
    """`number` positions divided over `axes`; `rings`: the attentions over them that are rings."""

    number: int
    axes: tuple[str, ...]
    rings: tuple[RingOf, ...] = ()


@dataclass(frozen=True)
class Plan:
    """`run(*arrays) -> list of arrays` is the step with its constraints, same numbers as the traced one: `traced` where
    that is not the step as it was given, but rewritten.

    `in_specs` and `out_specs` follow the order of the trace's inputs and outputs, and so do `in_memory` and
    `out_memory`, the memory kinds of those that lie on the host, none where all are on devices; `state_pairs`
    says which output is the next value of which input, `loss` which one is the loss, or has it as its last
    element. `batch_axes` are the mesh axes that the examples are divided over, `idle_axes` those along which all
    devices do the same work, `jobs` those of each part of the strategy. `examples` is the size of the batch.
    `work` is all that the step multiplies, `shares` what one device does of it, None where the compiler decides.
    `unseen` names primitives that may do more. `attention`: how attention gets at positions that other devices
    hold ("gather", "heads", "ring"), None where none are divided. `largest_weight`: bytes of the largest weight
    that an operation reads, None where it is not known. `experts` and `positions`: those that are divided, of
    each number of them.
    """

    mesh: Mesh
    strategy: str
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    leaves: tuple[LeafPlan, ...]
    run: Callable[..., list]
    state_pairs: Mapping[int, int] = field(default_factory=dict)
    loss: int | None = None
    batch_axes: tuple[str, ...] = ()
    idle_axes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    jobs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    examples: int | None = None
    work: "tuple[Work, ...]" = ()
    shares: tuple[Share, ...] | None = None
    unseen: tuple[str, ...] = ()
    traced: "Traced | None" = None
    largest_weight: int | None = None
    attention: str | None = None
    experts: tuple[DividedExperts, ...] = ()
    positions: tuple[DividedPositions, ...] = ()
    in_memory: tuple[str | None, ...] = ()
    out_memory: tuple[str | None, ...] = ()

    @property
    def in_shardings(self) -> list[NamedSharding]:
        """Where the trace's inputs lie."""
        return self._shardings(self.in_specs, self.in_memory)

    @property
    def out_shardings(self) -> list[NamedSharding]:
        """Where its outputs lie."""
        return self._shardings(self.out_specs, self.out_memory)

    def _shardings(self, specs: Sequence[PartitionSpec], kinds: Sequence[str | None]) -> list[NamedSharding]:
        pairs = zip(specs, kinds or (None,) * len(specs), strict=True)
        return [NamedSharding(self.mesh, spec, memory_kind=kind) for spec, kind in pairs]

    @property
    def shards(self) -> int:
        """In how many parts the batch is divided over devices."""
        return prod(self.mesh.shape[axis] for axis in self.batch_axes)
