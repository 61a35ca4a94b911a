"""Read the required memory from the error of a compiler that found no room for a program."""

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


def parse_required_bytes(message: str) -> int | None:
    """Return the bytes needed on one device, from the error message of a TPU compiler; None for a message without
    sizes.

    The result is as rounded as the message.

    >>> parse_required_bytes("Ran out of memory in memory space hbm. Used 17.5G of 15.75G hbm. Exceeded by 1.75G.")
    18790481920
    """
    for form in _FORMS:
        if sizes := form.search(message):
            number, unit = sizes.groups()
            return int(float(number) * _UNITS[unit])
    return None


def with_needed(memory: Memory, needed: int, stand_in: str | None) -> Memory:
    """Return the memory of a refused program with the peak requested by the program's own compiler.

    Args:
        memory: Memory of each device, from the compiler of `stand_in`.
        needed: Bytes needed on a device.
        stand_in: Chip with a successful compile; None without one.
    """
    source = f"compiled for {stand_in}" if stand_in else "refused"
    return replace(with_temporaries(memory, lambda arrays: max(needed - arrays, 0)), source=source)
