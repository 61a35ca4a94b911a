"""One step under several strategies, meshes and options: what to try, and trying it side by side."""

from .candidates import USUAL, VARIED, Candidate, Refused, candidates, line_of, varied
from .meshes import EVERY
from .trials import REPEAT, Trying

__all__ = [
    "EVERY",
    "REPEAT",
    "USUAL",
    "VARIED",
    "Candidate",
    "Refused",
    "Trying",
    "candidates",
    "line_of",
    "varied",
]
