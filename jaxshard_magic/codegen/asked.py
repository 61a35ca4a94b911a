"""The options of a step's gradients as edits of the user's text."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .batches import microbatched
from .casts import narrowed
from .cells import Cells
from .edits import Asked
from .remat import recomputed

if TYPE_CHECKING:
    from ..step import ShardedStep

_WAYS: tuple[Callable[["ShardedStep", Cells], Asked], ...] = (narrowed, microbatched, recomputed)


def asked_of(step: "ShardedStep", cells: Cells) -> Iterator[Asked]:
    """What the line asks for, written into the cells: all that has a form in them, then less, nothing at last."""
    asked = [way(step, cells) for way in _WAYS]
    found, told = [a for a in asked if a.done], tuple(said for a in asked if not a.done for said in a.told)
    start, lesser = Asked(told=told), [a.less or a for a in found]
    yield sum(found, start)
    for n in range(len(lesser) - (lesser == found), -1, -1):
        yield sum(lesser[:n], start)
