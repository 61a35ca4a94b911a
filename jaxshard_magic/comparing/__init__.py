"""One step under several strategies, meshes and options: what to try, and trying it side by side."""

from .candidates import USUAL, VARIED, Candidate, Refused, candidates, line_of, varied
from .meshes import EVERY, meshes_of, reshaped
from .search import BUDGET, Searching
from .space import AMONG, SAVING, STAND_IN, chip_for, space
from .trials import REPEAT, Trying

__all__ = [
    "AMONG",
    "BUDGET",
    "EVERY",
    "REPEAT",
    "SAVING",
    "STAND_IN",
    "USUAL",
    "VARIED",
    "Candidate",
    "Refused",
    "Searching",
    "Trying",
    "candidates",
    "chip_for",
    "line_of",
    "meshes_of",
    "reshaped",
    "space",
    "varied",
]
