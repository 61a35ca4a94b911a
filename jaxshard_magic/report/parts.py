"""The parts of a report: the mesh, the leaves, memory, collectives, times, advice and the check."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod

BY_HAND = "a loop over microbatches written by hand, on one device"  # what a check may compare with

Spec = tuple[str | tuple[str, ...] | None, ...]
Cut = tuple[tuple[str, ...], ...]  # the mesh axes of every dimension, major first


def cut_of(spec: Iterable[str | Iterable[str] | None], rank: int) -> Cut:
    """The mesh axes that a spec, or a PartitionSpec, cuts each of `rank` dimensions over.

    >>> cut_of((None, ("data", "model")), 3)
    ((), ('data', 'model'), ())
    """
    dims = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return (*dims, *[()] * (rank - len(dims)))[:rank]


def mesh_text(axes: Mapping[str, int]) -> str:
    """`data=4 model=2`: mesh axes with their sizes."""
    return " ".join(f"{axis}={size}" for axis, size in axes.items())


def finite(number: float | None) -> float | None:
    """`number`, None where it is infinite or not a number."""
    return number if number is not None and isfinite(number) else None


@dataclass(frozen=True)
class MeshInfo:
    """The mesh of a run. `devices` holds one id per device in the mesh's order (row-major over `axes`).

    In the same order, each empty where there is but one: `hosts` has the host of each device, `islands` the part of the
    mesh beyond which only the network goes: hosts of GPUs and of CPUs, slices of TPUs.
    """

    axes: dict[str, int]
    platform: str
    device_kind: str
    source: str  # attached | simulated | topology
    devices: tuple[int, ...]
    processes: int
    hosts: tuple[int, ...] = ()
    islands: tuple[int, ...] = ()

    @property
    def numbers(self) -> Sequence[int]:
        """A number for each device in the mesh's order: `devices`, where those are known."""
        return self.devices or range(prod(self.axes.values()))

    def place(self, index: int) -> dict[str, int]:
        """Where the device at `index` of `devices` stands along each axis.

        >>> MeshInfo({"data": 2, "model": 4}, "", "", "", (), 1).place(6)
        {'data': 1, 'model': 2}
        """
        at = {}
        for axis, size in reversed(self.axes.items()):
            index, at[axis] = divmod(index, size)
        return dict(reversed(at.items()))


def part_at(place: Mapping[str, int], axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Which of the parts of a dimension that is cut over `axes` lies at a place of the mesh, the last axis fastest.

    >>> part_at({"data": 1, "model": 2}, ("model", "data"), {"data": 2, "model": 4})
    5
    """
    part = 0
    for axis in axes:
        part = part * sizes[axis] + place[axis]
    return part


@dataclass(frozen=True)
class Leaf:
    """One array of the step. `bytes_per_device` is what one device stores, 0 where it lies on the host; `wanted`
    names mesh axes that the strategy wanted to shard this leaf over and could not, `lost` the bytes per device that
    cost.

    `within`: along these axes it lies only on the devices from the first index on, before the second; empty for a leaf
    that lies on the whole mesh. {"pipe": (2, 3)} is on stage 2 of a pipeline; with "pipe" in its spec, {"pipe": (1, 3)}
    is a stack of layers of which stages 1 and 2 have a half each.
    """

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
    within: dict[str, tuple[int, int]] = field(default_factory=dict)


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

    `bytes` is of all of them, `shape` and `dtype` (as HLO writes it) of one. `what` names the operation that made them,
    or the leaf that they are; `line` of `file`, one of the report's `sources`. `reads` is the weight that the operation
    multiplies with, `toward` the leaf whose gradient it is a step on the way to, both by path. `kept`: made in the
    forward pass and still there in the backward pass. `trips`: those of the loop that writes them slice by slice.
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
    source: str  # "measured", "compiled" (XLA's own accounts); where a compiler refused: "compiled for v5p", "refused";
    # where it failed: "planned"
    buffers: tuple[Buffer, ...] | None = None
    others: tuple[int, ...] | None = None
    live: Live | None = None


@dataclass(frozen=True)
class Collective:
    """One kind of collective over one set of axes, merged from all of the program's that are alike.

    `bytes` is the size on one device of the gathered (or unreduced) array of one such collective;
    `wire_bytes` what one device sends per step on a ring, all `count` of them together, `seconds` the time that this
    is predicted to take; in a pipeline `count` is of all stages together, and `wire_bytes` the mean over them. `axes`
    is None where the replica groups match no set of mesh axes, nor parts of one axis whose devices are `apart` places
    along it from each to the next. `phase` is forward,
    backward or update. `line` of `file`, one of the report's `sources`, is the user's line that caused it, `source` its
    text, `at` the user's code that this line called, `model.py:31`, where that is deeper. `what` names what moves,
    `job` what that is for: "dispatch" of rows to their experts, "combine", back from them; of attention as a ring the
    "turn" of keys and values, "zig-zag" where positions are dealt out and put back.
    `exact` is False where the program decides while it runs how often: then `count` is at least so. `network_bytes`:
    what one of the mesh's islands sends to others per step, where it has several, all `count` of them together.
    `exposed`: seconds that the device is predicted to wait for them, which nothing that it computes hides, by the order
    that the compiler gave the program; None where that order is not known, as on CPU.
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

    @property
    def waited(self) -> float | None:
        """Seconds that the device waits for them, where that is known; else those that they take."""
        return self.seconds if self.exposed is None else self.exposed


@dataclass(frozen=True)
class Source:
    """The user's code that a report's lines are of: a cell whole, of a file the parts that matter.

    `text[i]` is line `numbers[i]`. `home` says that the step is defined here; `note` why there is no text.
    """

    name: str  # "cell [7]", "model.py"
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
class Wait:
    """Seconds of a step that a device is predicted to wait for the collectives of one kind over one set of axes."""

    kind: str
    axes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Timing:
    """`calls` are those of the last loop over the step: a cell's in a notebook, all of a script. `others` of them were
    of other shapes, and ran another program. `step_s` is what a step takes, the median over `timed` calls.

    `how` that was measured: "step to step" is from the end of one step to the end of the next, over calls that were not
    waited for; "start to end" is of calls that were, each alone; "copies" of calls beside the loop, which `--repeat`
    asks for. `apart_s`: seconds from call to call in a loop that does so much else between that those are no step's.
    `data_share`: the share of the loop's time that the devices had nothing to do for want of a batch, where `feed`
    gives them.

    `flops` are those of the step's matrix products and convolutions on all devices together, `recomputed` those among
    them that remat does a second time, `device_flops` what one device does. The rest is predicted for the chip `on`:
    the seconds that one device computes (`compute_s`), reads and writes its memory (`memory_s`) and communicates
    (`communication_s`, over `links` of so many bytes a second by axis; `ways` says how it goes along each), each at the
    chip's published rates.
    `predicted_step_s` is the best guess: products, each bound by compute at the efficiency that its shape allows or by
    memory, and `exposed_s`, the seconds of communication that the device waits for. `waiting_s` of it are the products
    and the update that the memory bounds; `bound` is what takes longest: compute, memory or communication.
    `predicted_low_s`: products at the peak, all overlapped that can be; `predicted_high_s`: nothing overlapped,
    products as far from the peak as they were seen. `overlap` says what tells `exposed_s`: "scheduled", the order of
    the compiled program; "by rule", what compilers usually do. `waits`: the same seconds by kind and axes.
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
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True)
class Alternative:
    """The step compiled with other options of its line, `change`: "without --remat full", "--reduce once"; the step as
    it ran has none.

    Of one device: bytes at its peak, FLOPs of its products with those done again, bytes sent in a step. None where it
    is not known: `why` then says what the compile gave instead.
    """

    change: str
    peak: int | None = None
    flops: int | None = None
    sent: int | None = None
    why: str | None = None


@dataclass(frozen=True)
class Ended:
    """How the cell ended that trained, where that was before its end.

    `calls` of the step were made, `of` so many where that was to be known, and the newest to finish gave `loss`.
    `error` is what the cell raised, `KeyError: 'wte'`, None where the user stopped it; `line` of `file`, named as
    sources are, is where it was.
    """

    calls: int
    of: int | None = None
    loss: float | None = None
    error: str | None = None
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Advice:
    """One thing that is off, or could be better: its cause, what would change it, and the text to paste for that.

    `saves`: the share of the predicted step's time, or of what the fullest device holds, that the change takes off, 0
    to 1; None where that is not known.
    """

    code: str
    level: str  # info | warning | error
    message: str
    fix: str | None = None
    saves: float | None = None


@dataclass(frozen=True)
class Check:
    """The sharded step against the plain one on the same inputs.

    `noise` names leaves that differ by no more than the plain step's own rounding noise does, `noise_in` of each in how
    many of how many numbers (empty where that was not counted); `failed` those that differ by more, each by as much of
    its largest number as `failed_by` says, None where one is not a number.
    `compiler`: where some failed, whether `jax.jit` alone, its arguments divided in the same way, gets all of these
    wrong as well, so that the compiler is at fault; None where that was not found out.
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
        """Whether the step was compared with a loop over microbatches, whose numbers are not the plain step's."""
        return self.reference == BY_HAND
