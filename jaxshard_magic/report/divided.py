"""What a step divides besides arrays: experts, with the rows that each gets, and positions, with their rings."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """One layer's experts in a step. `tokens` choose `best` experts each. `places`: the rows that an expert has room
    for, `groups` of tokens together, each of which has as many; None where it takes any number.

    Counted on the first batch of a cell, None where nothing was: `chosen` has the tokens that chose each expert, `kept`
    those that found a place, None without places, and `most` those of the busiest expert in the busiest group, for whom
    there would have to be places so that none is dropped. `file` and `line`: where the layer chooses.
    """

    tokens: int
    best: int
    places: int | None = None
    groups: int = 1
    chosen: tuple[int, ...] | None = None
    kept: tuple[int, ...] | None = None
    most: int | None = None
    file: str | None = None
    line: int | None = None

    @property
    def dropped(self) -> int | None:
        """Choices that no expert had a place for; None where that is not known, or there is no bound."""
        return None if self.chosen is None or self.kept is None else sum(self.chosen) - sum(self.kept)

    @property
    def empty(self) -> float | None:
        """The share of the places that hold no token, whose products are of zeros; None where that is not known."""
        if self.kept is None or not self.places:
            return None
        return 1 - sum(self.kept) / (self.places * len(self.kept))


@dataclass(frozen=True)
class Experts:
    """`number` experts divided over the mesh axes `axes`, as many to each place along them, in order. `work` is what an
    expert multiplies: all its "places", the rows that are "sorted" to it, or "all" tokens. `layers`: those that choose
    among them, in the step's order."""

    number: int
    axes: tuple[str, ...]
    work: str
    layers: tuple[Load, ...] = ()


@dataclass(frozen=True)
class Ring:
    """Attention as a ring, as often as `count` in a step. Keys and values of each device's own positions go to the next
    device along the axes `turns` - 1 times forward, `bytes` of them at each, and as often in the backward pass; there
    `gradients` bytes of their gradients follow, the last time home; None without a backward pass.

    `zigzag`: of 2n parts of the positions, device d has the parts d and 2n-1-d while it runs. `file` and `line`: of
    the attention.
    """

    turns: int
    count: int
    bytes: int
    gradients: int | None = None
    zigzag: bool = False
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Positions:
    """`number` positions of each example divided over the mesh axes `axes`, as many to each place along them, in order.
    `attention`: how it gets at those of other devices: "gather", "heads", "ring". `rings`: those that are such."""

    number: int
    axes: tuple[str, ...]
    attention: str
    rings: tuple[Ring, ...] = ()


Part = tuple[int, int]  # from the first position on, before the second


def parts_of(positions: Positions, devices: int, ring: Ring | None = None) -> list[tuple[Part, ...]]:
    """The positions of each place along the axes, of which there are `devices`; with a ring, while that runs.

    >>> parts_of(Positions(16, ("seq",), "ring"), 2, Ring(2, 1, 64, zigzag=True))
    [((0, 4), (12, 16)), ((4, 8), (8, 12))]
    """
    if ring is None or not ring.zigzag:
        size = positions.number // devices
        return [((d * size, (d + 1) * size),) for d in range(devices)]
    size, last = positions.number // (2 * devices), 2 * devices - 1
    return [tuple((p * size, (p + 1) * size) for p in (d, last - d)) for d in range(devices)]
