"""Fourier transforms on CPU devices, each on the device's own shard.

XLA for the CPU transforms only arrays in row-major order in memory, yet lays out gathered arrays in any order. A
constraint on the memory layout can't be partitioned; in a `shard_map` nothing is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from ...program.ir import Equation
from ...program.xla_faults import bind_with_workaround
from ..layout import Layout, partition_spec
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class FourierTransforms(Region):
    """Fourier transforms whose own dimensions are whole."""

    layout: Layout

    def emit(self, e: Equation, values: list, default: Callable[[list], list], lowering: Emission) -> list:
        layout = self.layout
        operand, out_spec = (layout.spec_in(e, v) for v in (e.operands[0], e.results[0]) if v is not None)
        own = len(operand) - len(e.params["fft_lengths"])
        transformed = jax.shard_map(
            lambda x: bind_with_workaround(e, [x], lambda _d: False, cpu=True)[0],
            mesh=layout.mesh,
            in_specs=partition_spec(operand),
            out_specs=partition_spec(operand[:own]),
            check_vma=False,
        )
        # A real transform changes the size of a dimension, which the axes of the operand may then not divide: the
        # result's spec may be another one.
        out = transformed(*lowering.before(e, values))
        return lowering.after(e, [out if out_spec == operand else layout.constrain(out, out_spec)])


def find_fourier_transforms(context: Context) -> FourierTransforms:
    """Find the Fourier transforms; none on other devices than CPUs."""
    layout = context.layout
    members = {e.index for e in layout.program.equations if e.name == "fft" and e.operands[0] is not None}
    return FourierTransforms(members if layout.is_cpu else (), layout)
