"""A compiled step turned into facts: where its arrays lie, what fills memory, what moves between devices."""

from .advice import advise
from .collectives import collectives, merge, moves, totals
from .leaves import leaf, leaves
from .memory import device_limit, memory
from .mesh_info import mesh_info

__all__ = [
    "advise",
    "collectives",
    "device_limit",
    "leaf",
    "leaves",
    "memory",
    "merge",
    "mesh_info",
    "moves",
    "totals",
]
