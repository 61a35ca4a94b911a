"""Give kernels of cuBLAS and cuDNN the instruction that launched them, by the order of the compiled program.

XLA runs them out of CUDA graphs, where an event has the kernel's own name and no instruction's (jax 0.11.2, H100).
XLA's own kernels around them do have one, and a program's instructions run in the order of its text. So the library's
kernels between two known ones are those of the custom calls that stand between them.
"""

import re
from collections.abc import Sequence

from .instructions import Instructions
from .traced import Op

_FILLS = re.compile(r"mem(set|cpy)", re.IGNORECASE)  # also launched by XLA itself, so not told by their order


def with_library_calls(ops: Sequence[Op], instructions: Instructions) -> list[Op]:
    """Rename operations that `instructions` does not know after the custom call that they are of, where that is told.

    A call may launch several kernels, such as one that adds up the parts of a split sum: what is more than the calls
    there are is counted with the last of them.

    Args:
        ops: The operations of one program in one run on one track.
        instructions: Those of the program.
    """
    ordered = sorted(ops, key=lambda op: op.start)
    names = [instructions.name_of(op.name) for op in ordered]
    seen = {name for name in names if name is not None}
    named = list(ordered)
    before = 0  # the position of the last known operation
    for at, name in enumerate(names):
        if name is None:
            continue
        first, unknown = (
            names[before],
            [k for k in range(before + 1, at) if not _FILLS.match(ordered[k].name)],
        )
        if unknown and first is not None:
            calls = [call for call in instructions.custom_calls(first, name) if call not in seen]
            for i, k in enumerate(unknown if calls else ()):
                named[k] = ordered[k]._replace(name=calls[min(i, len(calls) - 1)])
        before = at
    return named
