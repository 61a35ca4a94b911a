"""One step under several strategies, meshes and options: what to try, and trying it side by side."""

from .candidates import PLACED, USUAL, VARIED, Candidate, Refused, Requests, candidates, line_of, varied
from .meshes import EVERY, meshes_of, reshaped
from .search import BUDGET, Searching
from .space import AMONG, SAVING, STAND_IN, Hardware, hardware_for, space
from .trials import REPEAT, How, Trying

__all__ = [
    "AMONG",
    "BUDGET",
    "EVERY",
    "PLACED",
    "REPEAT",
    "SAVING",
    "STAND_IN",
    "USUAL",
    "VARIED",
    "Candidate",
    "Hardware",
    "How",
    "Refused",
    "Requests",
    "Searching",
    "Trying",
    "candidates",
    "hardware_for",
    "line_of",
    "meshes_of",
    "reshaped",
    "space",
    "varied",
]
