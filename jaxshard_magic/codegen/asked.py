"""The options of a step's gradients as edits of the user's text."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .batches import microbatched
from .cells import Cells
from .edits import Asked
from .remat import recomputed

if TYPE_CHECKING:
    from ..step import ShardedStep

_WAYS: tuple[Callable[["ShardedStep", Cells], Asked], ...] = (microbatched, recomputed)


def asked_of(step: "ShardedStep", cells: Cells) -> Iterator[Asked]:
    """What the line asks for, written into the cells: all that has a form in them, then less, nothing at last."""
    found = [asked for way in _WAYS if (asked := way(step, cells)).done]
    for n in range(len(found), -1, -1):
        yield sum(found[:n], Asked())
