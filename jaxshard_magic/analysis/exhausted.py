"""What a compiler says that has no room for a program: how much it takes, and how much there is."""

import re
from dataclasses import dataclass, replace

from ..report import Memory

_SIZE = r"([\d.]+)([KMGT]?)"
_FORMS = (
    re.compile(rf"required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Exhausted:
    """`needed` of `available` bytes on one device, as rounded as the compiler writes them."""

    needed: int
    available: int


def exhausted(message: str) -> Exhausted | None:
    """Read the error of a TPU's compiler; None for one that tells no sizes.

    >>> exhausted("Ran out of memory in memory space hbm. Used 17.5G of 15.75G hbm. Exceeded hbm capacity by 1.75G.")
    Exhausted(needed=18790481920, available=16911433728)
    """
    for form in _FORMS:
        if found := form.search(message):
            needed, unit, available, of = found.groups()
            return Exhausted(_bytes(needed, unit), _bytes(available, of))
    return None


def with_needed(found: Memory, said: Exhausted, stand_in: str | None) -> Memory:
    """The memory of a program that was refused: the peak is what its own compiler asks for, the rest what the compiler
    of `stand_in` says."""
    rows = []
    for d in found.per_device:
        held = d.params + d.optimizer + d.batch + d.other
        rows.append(replace(d, peak=max(said.needed, held), temporaries=max(said.needed - held, 0)))
    return replace(
        found, per_device=tuple(rows), source=f"compiled for {stand_in}" if stand_in else "refused"
    )


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
