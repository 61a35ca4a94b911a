"""Facts for the rules of advice, and helpers shared by several rules."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...config.options import GradientOptions
from ...config.request import Request, apply_line, is_line
from ...errors import ShardError
from ...plan import DeviceWork
from ...program.trace import is_closed_over
from ...report import Collective, Experts, Leaf, Measured, Memory, MeshInfo, Spec
from ...report.device_leaves import devices_per_axis
from ...targets import Target
from ..collectives import HloCollective
from ..roofline import Roofline
from .loop import TrainingLoop


class OncePerLoop(NamedTuple):
    """Effect of gathering weights, and reducing gradients, once per loop rather than at every trip, by the plan.

    Attributes:
        bytes_now: Bytes sent by a device in a step now.
        bytes_then: Bytes sent after the change.
        extra_peak_bytes: Additional peak bytes after the change.
    """

    bytes_now: int
    bytes_then: int
    extra_peak_bytes: int


@dataclass(frozen=True)
class Case:
    """Facts about a sharded step.

    Attributes:
        leaves: Arrays of the step.
        mesh: The mesh.
        strategy: Name of the strategy.
        jobs: Mesh axes of each part of the strategy.
        idle_axes: Mesh axes not used by the plan.
        user_spec_paths: Paths of leaves with a spec chosen by the user.
        undonated_state: State of which the old value remains in memory while the new one is computed.
        hlo_collectives: The collectives of the compiled step, one by one.
        collectives: The collectives of the report, with seconds from `roof` for a known chip.
        memory: Memory of each device.
        roof: Roofline of the step; None without a known chip.
        shares: Products of one device.
        examples: Batch size.
        examples_before: Batch size of the step's earlier run.
        callbacks: Lines of calls to Python from inside the step, None for a call without a line.
        target: Compilation target; None for attached devices.
        larger: Extents of the target's available slices with more devices.
        tried: Bytes needed by a device as compiled with a fix, by fix.
        request: The request.
        gradient_options: The request's options of gradients; None where the step takes no gradients.
        refusal_reason: Returns why a line is impossible or trains on another loss; None for a possible line.
        made_of: Devices as written before the axes of a mesh.
        once_per_loop: Returns the effect of gathering and reducing once per loop; None where no loop does so at every
            trip.
        largest_weight: Bytes of the largest weight read by an operation; None where unknown.
        measured: Time breakdown of recorded steps.
        loop: Facts about the calling loop.
        experts: The sharded experts.
    """

    leaves: Sequence[Leaf]
    mesh: MeshInfo
    strategy: str
    jobs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    idle_axes: Sequence[str] = ()
    user_spec_paths: Collection[str] = ()
    undonated_state: Sequence[Leaf] = ()
    hlo_collectives: Sequence[HloCollective] = ()
    collectives: Sequence[Collective] = ()
    memory: Memory | None = None
    roof: Roofline | None = None
    shares: Sequence[DeviceWork] = ()
    examples: int | None = None
    examples_before: int | None = None
    callbacks: Sequence[str | None] = ()
    target: Target | None = None
    larger: Sequence[tuple[int, ...]] = ()
    tried: Mapping[str, int] = field(default_factory=dict)
    request: Request | None = None
    gradient_options: GradientOptions | None = None
    refusal_reason: Callable[[str], str | None] = lambda _: None
    made_of: str = ""
    once_per_loop: Callable[[], OncePerLoop | None] = lambda: None
    largest_weight: int | None = None
    measured: Measured | None = None
    loop: TrainingLoop = field(default_factory=TrainingLoop)
    experts: Sequence[Experts] = ()

    @property
    def batch(self) -> list[Leaf]:
        """Arguments that contain examples."""
        return [x for x in self.leaves if x.role == "batch" and not is_closed_over(x.path)]

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes over which examples are sharded, in the mesh's order."""
        cut = {a for leaf in self.leaves if leaf.role == "batch" for a in axes_of(leaf.spec)}
        return tuple(a for a in self.mesh.axes if a in cut - self.stage_axes)

    def usable_fix(self, fix: str | None) -> str | None:
        """Return `fix`; None for a line impossible with this strategy or mesh, or already in effect."""
        # Code and `%mesh` lines are no options of a request, so there is nothing to compare.
        if fix is None or self.request is None or not is_line(fix) or fix.startswith("%mesh "):
            return fix
        try:
            changed = apply_line(fix, self.request)
        except ShardError:
            return None
        return None if changed == self.request else fix

    def on_mesh(self, axes: Mapping[str, int], strategy: str | None = None) -> str | None:
        """Return an option `--mesh data=8`, or the `%%shard` line of another `strategy` with that option.

        Args:
            axes: Sizes of the mesh axes.
            strategy: The other strategy; None to keep the current one.

        Returns:
            None where the axes are impossible. On a slice all devices must be used.
        """
        if self.target is not None and math.prod(axes.values()) != self.target.count:
            return None
        of = f"cpu:{math.prod(axes.values())}" if self.made_of == "cpu" else self.made_of
        text = " ".join(filter(None, (of, mesh_text(axes))))
        option = f'--mesh "{text}"' if " " in text else f"--mesh {text}"
        return self.usable_fix(option if strategy is None else f"%%shard {strategy} {option}")

    @property
    def timed_level(self) -> str:
        """Level of advice based on measured times: no warning on simulated devices."""
        # Simulated devices share cores with each other and with other work.
        return "info" if self.mesh.source == "simulated" else "warning"

    @property
    def stage_axes(self) -> set[str]:
        """Axes along which devices store different leaves, such as the stages of a pipeline."""
        return {*self.jobs.get("pp", ()), *(a for leaf in self.leaves for a in leaf.within)}


def axes_of(spec: Spec) -> set[str]:
    return {a for entry in spec for a in entry_axes(entry)}


def entry_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def devices_along(axes: Mapping[str, int], chosen: Collection[str]) -> int:
    """Return the number of devices along the `chosen` axes.

    Args:
        axes: Sizes of the mesh axes.
        chosen: Names of some axes.
    """
    return math.prod(axes[a] for a in chosen)


def all_divide(leaves: Sequence[Leaf], axes: Mapping[str, int]) -> bool:
    """Return whether all leaves divide evenly under their current specs on a mesh of other sizes.

    Args:
        leaves: The leaves.
        axes: Sizes of the mesh axes.
    """
    return all(
        n % devices_along(along, entry_axes(e)) == 0
        for x in leaves
        for along in [devices_per_axis(x, axes)]
        for n, e in zip(x.shape, x.spec, strict=True)
        if e is not None
    )


def mesh_text(axes: Mapping[str, int]) -> str:
    return " ".join(f"{a}={n}" for a, n in axes.items())
