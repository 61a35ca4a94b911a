"""Map cuBLAS and cuDNN kernels to the instructions that launched them, by the order of the compiled program.

XLA runs library kernels inside CUDA graphs, where an event has the name of the kernel and of no instruction (jax
0.11.2, H100). XLA's own kernels do have instruction names, and instructions run in the order of the text. Library
kernels between two known instructions therefore belong to the custom calls between the same two.
"""

import re
from collections.abc import Sequence

from .instructions import Instructions
from .xplane import RecordedOp

# XLA launches these itself as well, so that their order identifies no call.
_FILLS = re.compile(r"mem(set|cpy)", re.IGNORECASE)


def with_library_calls(ops: Sequence[RecordedOp], instructions: Instructions) -> list[RecordedOp]:
    """Return the operations, with unknown kernels renamed after their custom calls where the order identifies them.

    Args:
        ops: Operations of one program in one run on one track.
        instructions: Instructions of the program.
    """
    ordered = sorted(ops, key=lambda op: op.start)
    names = [instructions.name_of(op.name) for op in ordered]
    seen = {name for name in names if name is not None}
    named = list(ordered)
    before = 0  # position of the last operation with a known instruction
    for at, name in enumerate(names):
        if name is None:
            continue
        first, unknown = (names[before], [k for k in range(before + 1, at) if not _FILLS.match(ordered[k].name)])
        if unknown and first is not None:
            # A call that appears under its own name launched no unnamed kernel.
            calls = [call for call in instructions.custom_calls(first, name) if call not in seen]
            # One call may launch several kernels, such as the sum of a split-K product: surplus kernels count with the
            # last call.
            for i, k in enumerate(unknown if calls else ()):
                named[k] = ordered[k]._replace(name=calls[min(i, len(calls) - 1)])
        before = at
    return named
