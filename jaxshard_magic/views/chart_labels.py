"""Names beside the points of a chart: how many fit, and boxes that must not meet."""

from collections.abc import Iterable
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle in px from a chart's top left."""

    x: float
    y: float
    width: float
    height: float

    def meets(self, other: "Box") -> bool:
        """Whether the two share an area."""
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )


def named(names: Iterable[str], most: int) -> str:
    """`gpipe, 1f1b`, or as many as there is room for in `most` letters: `gpipe, 1f1b +2`."""
    names = list(names)
    text = ""
    for shown in range(len(names), 0, -1):
        rest = f" +{len(names) - shown}" if shown < len(names) else ""
        text = ", ".join(names[:shown]) + rest
        if len(text) <= most:
            return text
    return text
