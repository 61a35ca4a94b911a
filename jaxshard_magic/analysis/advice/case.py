"""What a rule of advice looks at, and the words that several of them need."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...config.from_line import changed_by, is_line
from ...config.options import GradientOptions
from ...config.request import Request
from ...errors import ShardError
from ...plan import Share
from ...program.trace import is_closed_over
from ...report import Collective, Experts, Leaf, Measured, Memory, MeshInfo, Spec
from ...report.held import extents
from ...targets import Target
from ..collectives import Move
from ..roofline import Roofline
from .loop import Loop


class OnceALoop(NamedTuple):
    """What a step would do if each loop gathered its weights, and reduced its gradients, once and not at every trip:
    the bytes that a device sends in a step now, those that it would send `then`, and what it would hold `more` at
    once, all by the plan."""

    sent: int
    then: int
    more: int


@dataclass(frozen=True)
class Case:
    """All that is known of a sharded step.

    `jobs` are the mesh axes of each part of the strategy, `idle_axes` those that the plan uses for nothing, `given` the
    paths of leaves whose spec the user chose, `kept` the state whose old value stays while the new one is made.
    `moves` are the compiled step's collectives one by one, `collectives` the report's, with the seconds of `roof` where
    a chip is known. `shares` is what one device multiplies; `examples` the batch, `examples_before` that of the step's
    earlier run; `callbacks` the lines, or None, of calls to Python from inside the step. `target` is what the step was
    compiled for where that is not attached, `larger` the slices of it that are offered and have more devices; `tried`
    the bytes that a device needs, as compiled, with a fix that was tried. `largest_weight`: bytes of the largest weight
    that an operation reads, None where that is not known. `measured`: where the time of recorded steps went. `loop` is
    what called it. `experts`: those that are divided.

    `asked` is the request as it stands, `inside` what of it its gradients are taken by, None where it takes none.
    `refuses(line)`: why the step can't be had as a line says, or would train on another loss; None where it can.
    `made_of`: the devices as they stand before a mesh's axes. `once_a_loop()`: what would be sent and held if loops
    gathered weights and reduced gradients once; None where none does at every trip.
    """

    leaves: Sequence[Leaf]
    mesh: MeshInfo
    strategy: str
    jobs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    idle_axes: Sequence[str] = ()
    given: Collection[str] = ()
    kept: Sequence[Leaf] = ()
    moves: Sequence[Move] = ()
    collectives: Sequence[Collective] = ()
    memory: Memory | None = None
    roof: Roofline | None = None
    shares: Sequence[Share] = ()
    examples: int | None = None
    examples_before: int | None = None
    callbacks: Sequence[str | None] = ()
    target: Target | None = None
    larger: Sequence[tuple[int, ...]] = ()
    tried: Mapping[str, int] = field(default_factory=dict)
    asked: Request | None = None
    inside: GradientOptions | None = None
    refuses: Callable[[str], str | None] = lambda _: None
    made_of: str = ""
    once_a_loop: Callable[[], OnceALoop | None] = lambda: None
    largest_weight: int | None = None
    measured: Measured | None = None
    loop: Loop = field(default_factory=Loop)
    experts: Sequence[Experts] = ()

    @property
    def batch(self) -> list[Leaf]:
        """The arguments that hold examples."""
        return [x for x in self.leaves if x.role == "batch" and not is_closed_over(x.path)]

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that the examples lie along, in the mesh's order."""
        cut = {a for leaf in self.leaves if leaf.role == "batch" for a in axes_of(leaf.spec)}
        return tuple(a for a in self.mesh.axes if a in cut - self.stage_axes)

    def line(self, fix: str | None) -> str | None:
        """Return `fix`; None where it is a line that the strategy or the mesh can't have, or has already."""
        if fix is None or self.asked is None or not is_line(fix) or fix.startswith("%mesh "):
            return fix
        try:
            changed = changed_by(fix, self.asked)
        except ShardError:
            return None
        return None if changed == self.asked else fix

    def on_mesh(self, axes: Mapping[str, int], strategy: str | None = None) -> str | None:
        """Return `--mesh data=8`, or the `%%shard` line of another `strategy` with it, of the devices that there are;
        None where the axes can't be had: of a slice all devices are taken."""
        if self.target is not None and math.prod(axes.values()) != self.target.count:
            return None
        of = f"cpu:{math.prod(axes.values())}" if self.made_of == "cpu" else self.made_of
        text = " ".join(filter(None, (of, mesh_text(axes))))
        option = f'--mesh "{text}"' if " " in text else f"--mesh {text}"
        return self.line(option if strategy is None else f"%%shard {strategy} {option}")

    @property
    def timed_level(self) -> str:
        """The level of advice that rests on a measured time: simulated devices share cores, with other work as well, so
        that what a clock says of them is no warning."""
        return "info" if self.mesh.source == "simulated" else "warning"

    @property
    def stage_axes(self) -> set[str]:
        """The axes along which a device has other leaves than the next one: those of a pipeline's stages."""
        return {*self.jobs.get("pp", ()), *(a for leaf in self.leaves for a in leaf.within)}


def axes_of(spec: Spec) -> set[str]:
    return {a for entry in spec for a in entry_axes(entry)}


def entry_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def devices_along(axes: Mapping[str, int], chosen: Collection[str]) -> int:
    """Devices along the `chosen` axes together."""
    return math.prod(axes[a] for a in chosen)


def all_divide(leaves: Sequence[Leaf], axes: Mapping[str, int]) -> bool:
    """Does every leaf divide as it does now on a mesh of these `axes`?"""
    return all(
        n % devices_along(along, entry_axes(e)) == 0
        for x in leaves
        for along in [extents(x, axes)]
        for n, e in zip(x.shape, x.spec, strict=True)
        if e is not None
    )


def mesh_text(axes: Mapping[str, int]) -> str:
    return " ".join(f"{a}={n}" for a, n in axes.items())
