"""Fourier transforms on CPU devices, each of what a device has: XLA for the CPU can't transform what lies in memory in
another order than by rows, and lays out what is gathered as it likes. What says how an array lies in memory is not
divided; in a `shard_map` it need not be."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from ...program.ir import Equation
from ...program.xla_faults import bind_mended
from ..layout import Layout, partition_spec
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class Transforms(Region):
    """The Fourier transforms of a step, whose own dimensions are whole."""

    layout: Layout

    def emit(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        layout = self.layout
        operand, made = (layout.within(e, v) for v in (e.ins[0], e.outs[0]) if v is not None)
        own = len(operand) - len(e.params["fft_lengths"])
        transformed = jax.shard_map(
            lambda x: bind_mended(e, [x], lambda _d: False, cpu=True)[0],
            mesh=layout.mesh,
            in_specs=partition_spec(operand),
            # Along the examples a real transform makes a dimension of another size, which the batch doesn't divide: its
            # result may lie otherwise than its operand.
            out_specs=partition_spec(operand[:own]),
            check_vma=False,
        )
        out = transformed(*hold.before(e, values))
        return hold.after(e, [out if made == operand else layout.pin(out, made)])


def transforms(context: Context) -> Transforms:
    """The Fourier transforms on CPU devices."""
    layout = context.layout
    found = {e.index for e in layout.program.equations if e.name == "fft" and e.ins[0] is not None}
    return Transforms(found if layout.simulated else (), layout)
