"""Where the devices of an explored mesh are from: this machine, its simulated ones, or a slice that isn't attached."""

from dataclasses import dataclass
from math import prod

import jax
from jax.sharding import Mesh

from ..config.mesh import MeshSpec, arranged
from ..errors import ShardError
from ..report.parts import mesh_text
from ..simulate import machine
from ..targets import Target, made_of
from ..targets import devices as devices_of
from .cuts import Axes


@dataclass(frozen=True)
class Place:
    """`made_of`: "" for the devices of this machine, "cpu" for simulated ones beside an accelerator, else the slice,
    "v5e:4x4"."""

    made_of: str = ""

    @classmethod
    def of_spec(cls, spec: MeshSpec) -> "Place":
        return cls(spec.target.name if spec.target else "cpu" if spec.source == "simulated" else "")

    @classmethod
    def of_mesh(cls, mesh: Mesh) -> "Place":
        return cls(made_of(mesh))

    @property
    def target(self) -> Target | None:
        return MeshSpec.parse(f"{self.made_of} data=-1").target if self.made_of not in ("", "cpu") else None

    @property
    def count(self) -> int | None:
        """How many devices there are; None before a backend runs, and on a lone CPU, which simulates any number."""
        if (target := self.target) is not None:
            return target.count
        found = machine()
        count = found.cpu if self.made_of else found.devices if found.platform else None
        return None if count in (0, 1) and found.platform == "cpu" else count

    def text(self, axes: Axes) -> str:
        """The mesh as it is written: `data=4 model=2`, `v5e:4x4 data=16`, `cpu:8 data=8`."""
        sizes = mesh_text(axes)
        if not self.made_of:
            return sizes
        return f"{f'cpu:{prod(axes.values())}' if self.made_of == 'cpu' else self.made_of} {sizes}"

    def mesh(self, axes: Axes, *, exactly: bool = False) -> Mesh:
        """A mesh of the first of these devices; `exactly`: of all, where they are a slice. Raises `ShardError` where
        they do not suffice; no device is added for it."""
        target, n = self.target, prod(axes.values())
        pool = devices_of(target) if target is not None else jax.devices(self.made_of or None)
        if n > len(pool) or (exactly and target is not None and n < len(pool)):
            raise self._too_few(axes, n, len(pool))
        return arranged(tuple(axes.items()), pool[:n])[0]

    def ids(self, axes: Axes, own: Mesh | None = None) -> tuple[int, ...]:
        """What the devices of a mesh are called, in its order: of `own` where it is that mesh. They count from 0 where
        there are no such devices."""
        if own is None or self != Place.of_mesh(own) or list(own.shape.items()) != list(axes.items()):
            try:
                own = None if self.count is None else self.mesh(axes)
            except ShardError:
                own = None
        return tuple(range(prod(axes.values()))) if own is None else tuple(d.id for d in own.devices.flat)

    def _too_few(self, axes: Axes, n: int, there: int) -> ShardError:
        sizes = mesh_text(axes)
        said = f"mesh {sizes} takes {n} device{'s' * (n > 1)}, and "
        if self.target is not None:
            return ShardError(f"{said}{self.made_of} has {there}")
        on_cpu = jax.default_backend() == "cpu"
        line = f"%mesh {sizes}" if on_cpu else f"%mesh cpu:{n} {sizes}"
        there_are = f"there {'is 1' if there == 1 else f'are {there}'}"
        return ShardError(f"{said}{there_are}; {line} simulates them", fix=line)
