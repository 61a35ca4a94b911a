"""`Plan`: the sharding of every array of a step, and the reason. Frozen; made by `strategies`, run by `step`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from .program.flops import Work
    from .program.routing import RoutedLayer
    from .program.trace import Traced

# Bytes sent by one device on a ring of n, as a multiple of the array: a * (n - 1) / n + b.
RING_FACTORS = {
    "all-gather": (1, 0),
    "all-reduce": (2, 0),
    "reduce-scatter": (1, 0),
    "all-to-all": (1, 0),
    "ragged-all-to-all": (1, 0),
    "collective-permute": (0, 1),
    "collective-broadcast": (0, 1),
}
REPLICATED = "a copy on every device"  # `LeafPlan.reason` of a leaf that nothing shards


@dataclass(frozen=True)
class LeafPlan:
    """Planned sharding of an input of the step.

    Attributes:
        path: Name.
        role: Role, as in `program/roles.py`.
        shape: Global shape.
        dtype: Data type.
        spec: PartitionSpec.
        reason: Reason for the sharding, in words.
        unsharded_axes: Mesh axes over which the strategy could not shard the input.
        replicated_bytes: Bytes per device that this costs.
        memory: Memory kind; None in device memory.
    """

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    reason: str
    unsharded_axes: tuple[str, ...] = ()
    replicated_bytes: int = 0
    memory: str | None = None


@dataclass(frozen=True)
class Finding:
    """Message that the user should see.

    Attributes:
        code: Name of the finding.
        level: "info", "warning" or "error".
        message: Text.
        fix: Text to paste; None without.
    """

    code: str
    level: str
    message: str
    fix: str | None = None


@dataclass(frozen=True)
class DeviceWork:
    """Work of a single device for a product in a step, loop trips multiplied in.

    Attributes:
        flops: FLOPs.
        bytes: Bytes read and written.
        dtype: Data type.
        recomputed: Done a second time, for the backward pass.
        exact: False for a loop of unknown length.
        weights: Those of `bytes` that do not grow with the number of examples.
        matrix_dims: Rows, columns and contracted size of one of the multiplied matrices; None if the product is not
            made of matrices.
        passes: Passes of a TPU's matrix unit per product: these units multiply bfloat16 at most.
    """

    flops: int
    bytes: int
    dtype: str
    recomputed: bool = False
    exact: bool = True
    weights: int = 0
    matrix_dims: tuple[int, int, int] | None = None
    passes: int = 1


@dataclass(frozen=True)
class PlannedCollective:
    """Collective that a plan needs, known before anything is compiled.

    Attributes:
        kind: Kind of collective, such as "reduce-scatter".
        axes: Mesh axes.
        group_size: Devices along these axes.
        bytes: Bytes on a device of the gathered (or not yet reduced) array.
        count: Runs per step, loop trips multiplied in.
        stride: Distance along an axis between neighbours in a group, for groups over part of an axis.
        equation: Index of the equation that needs it; None if unknown.
        value: Array that moves, in full or in part; None if unknown.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    bytes: int
    count: int
    stride: int = 1
    equation: int | None = field(default=None, compare=False)
    value: int | None = field(default=None, compare=False)

    @property
    def exact(self) -> bool:
        """True for every plan, even where it guesses: a loop of unknown length is counted as one trip."""
        return True

    @property
    def network(self) -> int | None:
        """Bytes that leave an island of the mesh; None, since a plan does not know."""
        return None


def wire_bytes(kind: str, group_size: int, size: int) -> int:
    """Return the bytes sent by one device in a ring collective.

    An all-reduce is a reduce-scatter followed by an all-gather. Each sends (n - 1) / n of the array (Thakur,
    Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 4).

    Args:
        kind: Opcode without "-start".
        group_size: Number of devices in the ring.
        size: Bytes of the gathered or unreduced array.

    >>> wire_bytes("all-reduce", 4, 1000)
    1500
    """
    a, b = RING_FACTORS[kind]
    return (2 * a * size * (group_size - 1) + group_size) // (2 * group_size) + b * size


@dataclass(frozen=True)
class DividedExperts:
    """Experts divided over mesh axes.

    Attributes:
        expert_count: Number of experts.
        axes: Mesh axes.
        work: Rows multiplied by an expert: "places" (its capacity), "sorted" (the rows sorted to it) or "all" tokens.
        layers: Layers that choose among the experts.
    """

    expert_count: int
    axes: tuple[str, ...]
    work: str
    layers: "tuple[RoutedLayer, ...]" = ()


@dataclass(frozen=True)
class PlannedRing:
    """Attention computed as a ring, forward and backward.

    Attributes:
        positions: Sequence length.
        turns: Number of devices whose keys each device meets, its own included.
        count: Runs per step.
        bytes: Bytes of keys and values that a device holds, and sends in a turn.
        gradients: Bytes of their gradients, sent as often in the backward pass; None without one.
        zigzag: A device has two parts of the positions, from the beginning and from the end.
        file: File of the attention, as Python knows it.
        line: Line of the attention.
    """

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
    """Sequence positions divided over mesh axes.

    Attributes:
        position_count: Number of positions.
        axes: Mesh axes.
        rings: Ring attentions over these positions.
    """

    position_count: int
    axes: tuple[str, ...]
    rings: tuple[PlannedRing, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Sharding of a step.

    Attributes:
        mesh: Mesh.
        strategy: Name of the strategy.
        in_specs: PartitionSpec of each input of the trace.
        out_specs: PartitionSpec of each output of the trace.
        leaves: Plan of each input of the step.
        run: `run(*arrays)` returns a list of arrays: the step with its sharding constraints, and the same numbers as
            the traced step.
        state_pairs: Output to input, for each output that is the next value of an input.
        loss: Output that is the loss, or has it as its last element; None without.
        batch_axes: Mesh axes that the examples are divided over.
        idle_axes: Mesh axes along which all devices do the same work.
        findings: Messages for the user.
        axes_by_strategy: Mesh axes of each part of the strategy.
        examples: Batch size; None if unknown.
        work: All products of the step.
        shares: Work of a single device, for each of `work`; None if the compiler decides.
        uncounted_primitives: Names of primitives that may do further work.
        traced: Rewritten step that `run` follows; None for the step as given.
        largest_weight: Bytes of the largest weight that an equation reads; None if unknown.
        attention: How attention reads positions on other devices: "gather", "heads" or "ring". None if none are
            divided.
        experts: Divided experts, an entry per number of experts.
        positions: Divided positions, an entry per number of positions.
        in_memory: Memory kind of each input; empty if all are in device memory.
        out_memory: Memory kind of each output; empty if all are in device memory.
        explicit_axes: The step is written for a mesh with explicit axes.
        caller_mesh: Mesh of the arrays that the caller gets: `mesh` with the explicit axes of the caller's; None for
            `mesh` itself.
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
    axes_by_strategy: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    examples: int | None = None
    work: "tuple[Work, ...]" = ()
    shares: tuple[DeviceWork, ...] | None = None
    uncounted_primitives: tuple[str, ...] = ()
    traced: "Traced | None" = None
    largest_weight: int | None = None
    attention: str | None = None
    experts: tuple[DividedExperts, ...] = ()
    positions: tuple[DividedPositions, ...] = ()
    in_memory: tuple[str | None, ...] = ()
    out_memory: tuple[str | None, ...] = ()
    explicit_axes: bool = False
    caller_mesh: Mesh | None = None

    @property
    def in_shardings(self) -> list[NamedSharding]:
        """Shardings of the trace's inputs."""
        return self._shardings(self.mesh, self.in_specs, self.in_memory)

    @property
    def placed_shardings(self) -> list[NamedSharding]:
        """Shardings of the trace's inputs as arrays that the caller may meet again: over the caller's mesh."""
        return self._shardings(self.caller_mesh or self.mesh, self.in_specs, self.in_memory)

    @property
    def out_shardings(self) -> list[NamedSharding]:
        """Shardings of the trace's outputs."""
        return self._shardings(self.caller_mesh or self.mesh, self.out_specs, self.out_memory)

    @staticmethod
    def _shardings(mesh: Mesh, specs: Sequence[PartitionSpec], kinds: Sequence[str | None]) -> list[NamedSharding]:
        pairs = zip(specs, kinds or (None,) * len(specs), strict=True)
        return [NamedSharding(mesh, spec, memory_kind=kind) for spec, kind in pairs]

    @property
    def batch_shards(self) -> int:
        """Number of shards of the batch."""
        return prod(self.mesh.shape[axis] for axis in self.batch_axes)
