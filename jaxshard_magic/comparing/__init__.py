"""One step under several strategies, meshes and options: what to try, and trying it side by side."""

from .candidates import (
    PLACED,
    VARIED,
    Candidate,
    Refused,
    Requests,
    candidates,
    line_of,
    said_of,
    varied,
)
from .meshes import meshes_of
from .search import BUDGET, Searching
from .space import AMONG, OF_EXPERTS, Hardware, chip_for, hardware_for, space
from .trials import REPEAT, How, Trying

__all__ = [
    "AMONG",
    "BUDGET",
    "OF_EXPERTS",
    "PLACED",
    "REPEAT",
    "VARIED",
    "Candidate",
    "Hardware",
    "How",
    "Refused",
    "Requests",
    "Searching",
    "Trying",
    "candidates",
    "chip_for",
    "hardware_for",
    "line_of",
    "meshes_of",
    "said_of",
    "space",
    "varied",
]
