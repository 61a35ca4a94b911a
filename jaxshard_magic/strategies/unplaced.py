"""A step whose layout the compiler finds, as it is traced but for what XLA gets wrong."""

from typing import Any

from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..program.emit import Emitter
from ..program.ir import Equation
from ..program.xla_faults import bind_mended, whole_dimensions, windows_of
from .layout import Layout
from .undivided import several_axes


class Unplaced(Emitter):
    """Re-emits a program without constraints. Any dimension may be divided: those that XLA would be wrong for are held
    whole, whatever becomes of the others."""

    def __init__(self, layout: Layout, labels: Any = None):
        super().__init__(layout.program, labels)
        self._mesh, self._cpu, self._several = layout.mesh, layout.simulated, several_axes(layout)

    def result(self, e: Equation, values: list) -> list:
        found = whole_dimensions(e, cpu=self._cpu)
        slots = {k: set(dims) for k, dims in ({} if found is None else found[1]).items()}
        for dims in windows_of(e) if self._several else ():
            for k, d in enumerate(dims):
                slots.setdefault(k, set()).add(d)
        values = [self._whole(x, slots.get(k, ())) for k, x in enumerate(values)]
        outs = bind_mended(e, values, lambda _d: True, cpu=self._cpu)
        return [self._whole(x, slots.get(k, ())) for k, x in enumerate(outs, len(values))]

    def _whole(self, x: Any, dims: Any) -> Any:
        if not dims:
            return x
        spec = [None if d in dims else PartitionSpec.UNCONSTRAINED for d in range(x.ndim)]
        return lax.with_sharding_constraint(x, NamedSharding(self._mesh, PartitionSpec(*spec)))
