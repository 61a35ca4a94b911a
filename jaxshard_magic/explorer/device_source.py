"""Source of an explored mesh's devices: the attached devices, simulated devices, or a slice that is not attached."""

from dataclasses import dataclass
from math import prod

import jax
from jax.sharding import Mesh

from ..config.mesh import MeshSpec, arranged
from ..errors import ShardError
from ..report.parts import mesh_text
from ..simulate import machine
from ..targets import Target, mesh_prefix
from ..targets import devices as devices_of
from .shard_sizes import MeshAxes


@dataclass(frozen=True)
class DeviceSource:
    """Source of the devices of a mesh.

    Attributes:
        made_of: Empty for the devices of this machine, `cpu` for simulated devices beside an accelerator, else the name
            of a slice, `v5e:4x4`.
    """

    made_of: str = ""

    @classmethod
    def of_spec(cls, spec: MeshSpec) -> "DeviceSource":
        """Return the source of a parsed mesh text."""
        return cls(spec.target.name if spec.target else "cpu" if spec.source == "simulated" else "")

    @classmethod
    def of_mesh(cls, mesh: Mesh) -> "DeviceSource":
        """Return the source of a mesh."""
        return cls(mesh_prefix(mesh))

    @property
    def target(self) -> Target | None:
        """Hardware target of a slice; None for other sources."""
        return MeshSpec.parse(f"{self.made_of} data=-1").target if self.made_of not in ("", "cpu") else None

    @property
    def count(self) -> int | None:
        """Number of devices; None before a backend runs, and on a lone CPU, which simulates any number."""
        if (target := self.target) is not None:
            return target.count
        found = machine()
        count = found.cpu if self.made_of else found.devices if found.platform else None
        return None if count in (0, 1) and found.platform == "cpu" else count

    def text(self, axes: MeshAxes) -> str:
        """Return the text of a mesh: `data=4 model=2`, `v5e:4x4 data=16`, `cpu:8 data=8`."""
        sizes = mesh_text(axes)
        if not self.made_of:
            return sizes
        return f"{f'cpu:{prod(axes.values())}' if self.made_of == 'cpu' else self.made_of} {sizes}"

    def mesh(self, axes: MeshAxes, *, exactly: bool = False) -> Mesh:
        """Return a mesh of the first of these devices. No device is added.

        Args:
            axes: Mesh axes with their sizes.
            exactly: Require all devices of a slice.

        Raises:
            ShardError: The number of devices does not suffice.
        """
        target, n = self.target, prod(axes.values())
        pool = devices_of(target) if target is not None else jax.devices(self.made_of or None)
        if n > len(pool) or (exactly and target is not None and n < len(pool)):
            raise self._too_few(axes, n, len(pool))
        return arranged(tuple(axes.items()), pool[:n])[0]

    def ids(self, axes: MeshAxes, own: Mesh | None = None) -> tuple[int, ...]:
        """Return the device ids of a mesh, in the order of the mesh.

        Args:
            axes: Mesh axes with sizes.
            own: Mesh to read the ids from, if of equal axes and source.

        Returns:
            The ids; numbers from 0 where no such devices exist.
        """
        if own is None or self != DeviceSource.of_mesh(own) or list(own.shape.items()) != list(axes.items()):
            try:
                own = None if self.count is None else self.mesh(axes)
            except ShardError:
                own = None
        return tuple(range(prod(axes.values()))) if own is None else tuple(d.id for d in own.devices.flat)

    def _too_few(self, axes: MeshAxes, n: int, there: int) -> ShardError:
        """Return the error for a mesh with more or fewer devices than there are."""
        sizes = mesh_text(axes)
        said = f"mesh {sizes} takes {n} device{'s' * (n > 1)}, and "
        if self.target is not None:
            return ShardError(f"{said}{self.made_of} has {there}")
        on_cpu = jax.default_backend() == "cpu"
        line = f"%mesh {sizes}" if on_cpu else f"%mesh cpu:{n} {sizes}"
        there_are = f"there {'is 1' if there == 1 else f'are {there}'}"
        return ShardError(f"{said}{there_are}; {line} simulates them", fix=line)
