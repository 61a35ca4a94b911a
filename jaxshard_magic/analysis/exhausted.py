"""What a compiler says that has no room for a program: how much it takes, and how much there is."""

import re
from dataclasses import replace

from ..report import Memory
from .memory import with_temporaries

_SIZE = r"([\d.]+)([KMGT]?)"
_FORMS = (
    re.compile(rf"required for HLO temporaries \({_SIZE}\) exceeds available HBM"),
    re.compile(rf"Used {_SIZE} of [\d.]+[KMGT]? hbm"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def exhausted(message: str) -> int | None:
    """The bytes that a program needs on one device, as rounded as a TPU's compiler writes them in its error; None for
    one that tells no sizes.

    >>> exhausted("Ran out of memory in memory space hbm. Used 17.5G of 15.75G hbm. Exceeded hbm capacity by 1.75G.")
    18790481920
    """
    for form in _FORMS:
        if sizes := form.search(message):
            number, unit = sizes.groups()
            return int(float(number) * _UNITS[unit])
    return None


def with_needed(memory: Memory, needed: int, stand_in: str | None) -> Memory:
    """The memory of a program that was refused: the peak is what its own compiler asks for, the rest what the compiler
    of `stand_in` says."""
    source = f"compiled for {stand_in}" if stand_in else "refused"
    return replace(with_temporaries(memory, lambda arrays: max(needed - arrays, 0)), source=source)
