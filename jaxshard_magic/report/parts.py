"""Parts of a report: mesh, leaves, memory, collectives, times, advice, check, and the cost of saving."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Self

BY_HAND = "a loop over microbatches written by hand, on one device"  # reference of a check
MAX_SAVES = 200  # saves listed one by one in a report

Spec = tuple[str | tuple[str, ...] | None, ...]
DimAxes = tuple[tuple[str, ...], ...]  # the mesh axes of every dimension, major first


def dim_axes(spec: Iterable[str | Iterable[str] | None], rank: int) -> DimAxes:
    """Return the mesh axes over which a spec shards each dimension.

    Args:
        spec: A spec or a PartitionSpec; missing trailing entries are unsharded.
        rank: Number of dimensions.

    >>> dim_axes((None, ("data", "model")), 3)
    ((), ('data', 'model'), ())
    """
    dims = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return (*dims, *[()] * (rank - len(dims)))[:rank]


def mesh_text(axes: Mapping[str, int]) -> str:
    """Return mesh axes with sizes as text: `data=4 model=2`."""
    return " ".join(f"{axis}={size}" for axis, size in axes.items())


def finite_or_none(number: float | None) -> float | None:
    """Return `number`; None if infinite or not a number."""
    return number if number is not None and isfinite(number) else None


@dataclass(frozen=True)
class MeshInfo:
    """The mesh of a run.

    Attributes:
        axes: Mesh axes with sizes.
        platform: Platform of the devices.
        device_kind: Kind of the devices.
        source: "attached", "simulated" or "topology".
        devices: Id of each device, in mesh order (row-major over `axes`).
        processes: Number of processes.
        hosts: Host of each device in mesh order; empty for a single host.
        islands: Island of each device in mesh order; empty for a single island. Only the network connects islands:
            hosts of GPUs and CPUs, slices of TPUs.
    """

    axes: dict[str, int]
    platform: str
    device_kind: str
    source: str
    devices: tuple[int, ...]
    processes: int
    hosts: tuple[int, ...] = ()
    islands: tuple[int, ...] = ()

    @classmethod
    def of_axes(cls, axes: Mapping[str, int]) -> Self:
        """Return a mesh of which only the axes are known."""
        return cls(dict(axes), "", "", "", (), 1)

    @property
    def numbers(self) -> Sequence[int]:
        """Number of each device in mesh order: `devices` if known."""
        return self.devices or range(prod(self.axes.values()))

    def place(self, index: int) -> dict[str, int]:
        """Return the mesh coordinates of the device at `index` of `devices`.

        >>> MeshInfo({"data": 2, "model": 4}, "", "", "", (), 1).place(6)
        {'data': 1, 'model': 2}
        """
        at = {}
        # Row-major: the last axis varies fastest.
        for axis, size in reversed(self.axes.items()):
            index, at[axis] = divmod(index, size)
        return dict(reversed(at.items()))


def shard_index(place: Mapping[str, int], axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Return the index of a dimension's shard at mesh coordinates.

    Args:
        place: Coordinate along each mesh axis.
        axes: Axes over which the dimension is sharded; the last axis varies fastest.
        sizes: Size of each axis.

    >>> shard_index({"data": 1, "model": 2}, ("model", "data"), {"data": 2, "model": 4})
    5
    """
    part = 0
    for axis in axes:
        part = part * sizes[axis] + place[axis]
    return part


@dataclass(frozen=True)
class Leaf:
    """An array of the step.

    Attributes:
        path: Path in the arguments of the step.
        role: "params", "frozen" (weights without a gradient), "optimizer", "batch", "rng" or "other".
        shape: Shape.
        dtype: Dtype.
        spec: Mesh axes for each dimension.
        bytes: Size of the full array.
        bytes_per_device: Bytes stored on a device; 0 for an array on the host.
        why: Reason for the spec.
        wanted: Mesh axes over which the strategy could not shard the leaf.
        lost: Bytes per device lost for this reason.
        within: For some axes, the range (first, end) of device indices that hold the leaf; empty for a leaf on the
            whole mesh. {"pipe": (2, 3)} is stage 2 of a pipeline. With "pipe" in the spec, {"pipe": (1, 3)} is a stack
            of layers, half on stage 1 and half on stage 2.
    """

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    bytes: int
    bytes_per_device: int
    why: str
    wanted: tuple[str, ...] = ()
    lost: int = 0
    within: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on a device while the step runs; None if unknown.

    Attributes:
        device: Id of the device.
        params: Parameters.
        optimizer: Optimizer state.
        batch: Batch.
        other: Other arguments.
        temporaries: Temporaries.
        peak: Peak of the step.
        limit: Memory available.
        measured: Peak reported by the device, including other arrays of the notebook.
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
    """Temporaries live at the peak on a device: `count` equal buffers from the same line.

    Attributes:
        bytes: Size of all of them.
        count: Number of buffers.
        dtype: Dtype of a buffer, as in HLO.
        shape: Shape of a buffer.
        what: Name of the operation that produced them, or of the leaf they are.
        phase: Phase of the step.
        file: File of the line, one of the report's `sources`.
        line: Number of the line.
        reads: Path of the weight multiplied by the operation.
        toward: Path of the leaf whose gradient the operation contributes to.
        kept: Produced in the forward pass and still live in the backward pass.
        trips: Trip count of the loop that writes the buffers slice by slice.
        of: Path of the leaf, for buffers that are a leaf or a gradient of a leaf.
        called: As in `Collective`.
    """

    bytes: int
    count: int
    dtype: str
    shape: tuple[int, ...]
    what: str
    phase: str | None = None
    file: str | None = None
    line: int | None = None
    reads: str | None = None
    toward: str | None = None
    kept: bool = False
    trips: int | None = None
    of: str | None = None
    called: str | None = None


@dataclass(frozen=True)
class LiveMemory:
    """Bytes live on a device during the step, in the compiler's order of instructions: arguments, outputs and
    temporaries.

    Attributes:
        at: Instructions at which the bytes change.
        bytes: `bytes[i]` is valid from instruction `at[i]` until `at[i + 1]`.
        instructions: Number of instructions.
        peak: Index of the largest entry of `bytes`.
        phases: Pairs (name, first instruction), in order.
        file: File of the line at the peak.
        line: Number of the line.
        called: As in `Collective`.
    """

    at: tuple[int, ...]
    bytes: tuple[int, ...]
    instructions: int
    peak: int
    phases: tuple[tuple[str, int], ...] = ()
    file: str | None = None
    line: int | None = None
    called: str | None = None


@dataclass(frozen=True)
class Memory:
    """Memory of the step on each device.

    Attributes:
        per_device: Bytes on each device.
        source: "measured" or "compiled" (XLA's own figures). After refusal by a compiler "compiled for v5p" or
            "refused". "planned" if the compiler failed or was not called.
        buffers: Largest temporaries live at the peak; None if the compiler does not tell.
        others: Number and bytes of the remaining temporaries; None if the compiler does not tell.
        live: Live bytes during the step; None if the compiler does not tell.
    """

    per_device: tuple[DeviceMemory, ...]
    source: str
    buffers: tuple[Buffer, ...] | None = None
    others: tuple[int, ...] | None = None
    live: LiveMemory | None = None


@dataclass(frozen=True)
class Collective:
    """Collectives of a kind over a set of axes, merged from all similar collectives of the program.

    Attributes:
        kind: Kind of collective.
        axes: Mesh axes; None if the replica groups match no set of mesh axes, and no parts of an axis (see `apart`).
        group_size: Devices per replica group.
        count: Collectives per step; in a pipeline, of all stages together.
        bytes: Size on a device of the gathered (or unreduced) array of a single collective.
        wire_bytes: Bytes sent by a device per step on a ring, for all `count` collectives; in a pipeline the mean over
            stages.
        seconds: Predicted seconds on the links.
        phase: forward, backward or update.
        line: Number of the innermost user line that caused the collective.
        source: Text of the line.
        file: File of the line, one of the report's `sources`.
        at: In reports of earlier versions, the innermost line in addition to `line`.
        what: Name of the transferred data.
        exact: False if the number of executions depends on the data; `count` is then a lower bound.
        apart: Distance along the axis between devices of a group.
        network_bytes: Bytes sent per step by an island of the mesh to other islands, for all `count` collectives; only
            on a mesh with several islands.
        exposed: Part of the predicted step time in which the device waits for the collectives because no computation
            hides them.
        job: Purpose of the transfer: "dispatch" of rows to their experts, "combine" back from them, "turn" of keys and
            values in ring attention, "zig-zag" where positions are permuted and put back.
        called: Line of the step's own cell or file that led to `line`, as `cell [7]:12`, if `line` is elsewhere.
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
    apart: int = 1
    network_bytes: int | None = None
    exposed: float | None = None
    job: str | None = None
    called: str | None = None

    @property
    def waited(self) -> float | None:
        """Seconds for which the device waits, if known; otherwise the seconds on the links."""
        return self.seconds if self.exposed is None else self.exposed


@dataclass(frozen=True)
class SourceExcerpt:
    """The user's code that lines of a report refer to: a complete cell, or the relevant parts of a file.

    Attributes:
        name: "cell [7]" or "model.py".
        numbers: Number of each line.
        text: Text of each line.
        home: The step is defined here.
        note: Reason for a missing text.
    """

    name: str
    numbers: tuple[int, ...]
    text: tuple[str, ...]
    home: bool = False
    note: str | None = None


@dataclass(frozen=True)
class TimeSpread:
    """Minimum, median and maximum of a time in seconds."""

    min: float
    median: float
    max: float


@dataclass(frozen=True)
class PredictedWait:
    """Predicted waiting time of a device per step, for the collectives of a kind over a set of axes.

    Attributes:
        kind: Kind of collective.
        axes: Mesh axes.
        seconds: Waiting time.
    """

    kind: str
    axes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Timing:
    """Times of the step, measured and predicted.

    Predicted fields refer to the chip `on`.

    Attributes:
        compile_s: Seconds of compilation.
        calls: Calls in the last loop over the step: a cell's in a notebook, all calls of a script.
        timed: Number of calls timed.
        step_s: Measured seconds per step, over `timed` calls.
        predicted_step_s: Best estimate: products, each bound by memory or by compute at the efficiency of its shape,
            plus `exposed_s`.
        bound: Largest part: compute, memory or communication.
        flops: FLOPs of the step's matrix products and convolutions, on all devices together.
        recomputed: Part of `flops` repeated by remat.
        device_flops: FLOPs of the products on a device, with those that remat repeats.
        on: Chip of the predictions.
        compute_s: Seconds of computation on a device at the published rate of the chip.
        memory_s: Seconds of memory traffic on a device at the published rate of the chip.
        communication_s: Seconds of all communication on the links, the sum of the collectives' `seconds`.
        links: Published bytes per second of the links along each axis; `communication_s` is at the share of them that
            links reach.
        ways: Path of communication along each axis.
        mfu: FLOPs without recomputed ones in the measured step, as a share of the chip's peak.
        others: Number of `calls` with other shapes, which ran another program.
        how: Method of measurement. "step to step": from the end of a step to the end of the next, without waiting for
            calls. "start to end": calls waited for, each alone. "copies": separate calls, as requested by `--repeat`.
        apart_s: Seconds from call to call, in a loop with so much other work that these are no step times.
        waiting_s: Part of `predicted_step_s` in memory-bound products and the update.
        predicted_low_s: Lower prediction: products at the peak, all possible communication overlapped.
        predicted_high_s: Upper prediction: no overlap, products as far from the peak as observed.
        exposed_s: Seconds for which the device waits for communication, the sum of the collectives' `exposed`.
        overlap: Basis of `exposed_s`: "scheduled", the order of the compiled program, or "by rule", the usual behavior
            of compilers.
        data_share: Share of the loop's time in which devices were idle for lack of a batch, with `feed` as the source.
        waits: `exposed_s` by kind and axes.
    """

    compile_s: float | None
    calls: int
    timed: int
    step_s: TimeSpread | None
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
    ways: dict[str, str] = field(default_factory=dict)
    mfu: float | None = None
    others: int = 0
    how: str | None = None
    apart_s: float | None = None
    waiting_s: float | None = None
    predicted_low_s: float | None = None
    predicted_high_s: float | None = None
    exposed_s: float | None = None
    overlap: str | None = None
    data_share: float | None = None
    waits: tuple[PredictedWait, ...] = ()


@dataclass(frozen=True)
class Alternative:
    """The step compiled with other options. Figures are per device; None if unknown.

    Attributes:
        change: Difference in options: "without --remat full", "--reduce once". The step as it ran has none.
        peak: Peak bytes.
        flops: FLOPs of products, including recomputation.
        sent: Bytes sent per step.
        why: Reason for missing figures: refused, or not compiled.
    """

    change: str
    peak: int | None = None
    flops: int | None = None
    sent: int | None = None
    why: str | None = None


@dataclass(frozen=True)
class EarlyEnd:
    """Premature end of a training cell.

    Attributes:
        calls: Calls of the step.
        of: Planned number of calls, if known.
        loss: Loss of the last finished call.
        error: Exception of the cell, as `KeyError: 'wte'`; None if interrupted by the user.
        file: File of the line at which the cell ended, named as in `sources`.
        line: Number of the line.
    """

    calls: int
    of: int | None = None
    loss: float | None = None
    error: str | None = None
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Advice:
    """A problem or possible improvement.

    Attributes:
        code: Identifier of the advice.
        level: "info", "warning" or "error".
        message: Cause and possible change.
        fix: Text to paste.
        saves: Share of the predicted step time, or of the bytes on the fullest device, saved by the change, 0 to 1;
            None if unknown.
    """

    code: str
    level: str
    message: str
    fix: str | None = None
    saves: float | None = None


@dataclass(frozen=True)
class Check:
    """Comparison of the sharded step with the plain step on the same inputs.

    Attributes:
        passed: No leaf failed.
        max_abs_diff: Largest absolute difference, leaves of `noise` excluded; None if not finite.
        max_rel_diff: Largest relative difference, likewise.
        limit: Largest relative difference allowed.
        reference: Step compared with.
        noise: Leaves that differ by no more than the rounding noise of the plain step.
        failed: Leaves that differ by more.
        failed_by: For each failed leaf, the difference as a share of its largest number; None if a number is NaN.
        compiler: If leaves failed, whether `jax.jit` alone with equally sharded arguments gets the same leaves wrong,
            so that the compiler is at fault; None if not determined.
        noise_in: For each leaf of `noise`, the count of affected numbers and of all numbers; empty if not counted.
    """

    passed: bool
    max_abs_diff: float | None
    max_rel_diff: float | None
    limit: float
    reference: str
    noise: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    failed_by: tuple[float | None, ...] = ()
    compiler: bool | None = None
    noise_in: tuple[tuple[int, int], ...] = ()

    @property
    def by_hand(self) -> bool:
        """Return whether the reference is a hand-written loop over microbatches, with other numbers than the plain
        step."""
        return self.reference == BY_HAND


@dataclass(frozen=True)
class Save:
    """A single save.

    Attributes:
        step: Step of the saved state.
        seconds: Time for which the loop was blocked.
        bytes: Size of the arrays.
    """

    step: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of a loop.

    Attributes:
        folder: Folder of the checkpoints.
        every: Interval, as written by the user.
        saves: Newest saves, at most 200.
        count: Number of all saves.
        seconds: Time of all saves together.
        resumed: Step at which the loop resumed; None for a loop from the start.
        copy: Bytes on the fullest device in addition to the step while a save is written: a copy of the state that the
            step would have donated. 0 if the step donates nothing, None before the first save.
    """

    folder: str
    every: str
    saves: tuple[Save, ...] = ()
    count: int = 0
    seconds: float = 0.0
    resumed: int | None = None
    copy: int | None = None
