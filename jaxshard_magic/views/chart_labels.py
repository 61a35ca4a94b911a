"""Labels of chart points: shorten a list of names, and test boxes for overlap."""

from collections.abc import Iterable
from typing import NamedTuple


class Box(NamedTuple):
    """Rectangle in px from the top left of a chart.

    Attributes:
        x: Left edge.
        y: Top edge.
        width: Width.
        height: Height.
    """

    x: float
    y: float
    width: float
    height: float

    def overlaps(self, other: "Box") -> bool:
        """Return whether two boxes share an area."""
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )


def join_names(names: Iterable[str], most: int) -> str:
    """Join names with commas, and cut the list to a number of characters: `gpipe, 1f1b +2`.

    Args:
        names: Names, the most important first.
        most: Maximal length. The first name is kept even if it is longer.

    Returns:
        The names that fit, and `+n` for `n` omitted names.
    """
    names = list(names)
    text = ""
    for shown in range(len(names), 0, -1):
        rest = f" +{len(names) - shown}" if shown < len(names) else ""
        text = ", ".join(names[:shown]) + rest
        if len(text) <= most:
            return text
    return text
