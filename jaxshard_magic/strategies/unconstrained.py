"""Emission of a step with a layout found by the compiler, corrected only for faults of XLA."""

from typing import Any

from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..program.emit import Emitter
from ..program.ir import Equation
from ..program.xla_faults import bind_with_workaround, convolution_windows, find_replicated_dims
from .layout import Layout
from .unsharded_dims import has_several_axes


class UnconstrainedEmitter(Emitter):
    """Emitter without sharding constraints.

    Any dimension may be sharded, except those for which XLA would be wrong: these are constrained to be whole, and all
    others of the array are left unconstrained.

    Args:
        layout: The layout.
        labels: Name scope of equations, by index.
    """

    def __init__(self, layout: Layout, labels: Any = None):
        super().__init__(layout.program, labels)
        self._mesh, self._cpu, self._has_several_axes = layout.mesh, layout.is_cpu, has_several_axes(layout)

    def result(self, e: Equation, values: list) -> list:
        requirement = find_replicated_dims(e, cpu=self._cpu)
        slots = {k: set(dims) for k, dims in ({} if requirement is None else requirement[1]).items()}
        # On a mesh with one axis XLA does not have this fault (`DIVIDED_CONVOLUTION`).
        for dims in convolution_windows(e) if self._has_several_axes else ():
            for k, d in enumerate(dims):
                slots.setdefault(k, set()).add(d)
        values = [self._unshard(x, slots.get(k, ())) for k, x in enumerate(values)]
        outs = bind_with_workaround(e, values, lambda _d: True, cpu=self._cpu)
        return [self._unshard(x, slots.get(k, ())) for k, x in enumerate(outs, len(values))]

    def _unshard(self, x: Any, dims: Any) -> Any:
        if not dims:
            return x
        spec = [None if d in dims else PartitionSpec.UNCONSTRAINED for d in range(x.ndim)]
        return lax.with_sharding_constraint(x, NamedSharding(self._mesh, PartitionSpec(*spec)))
