"""Experts and sequence positions sharded over devices, with the load of experts and the rings of attention."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertLoad:
    """Load of the experts of a layer in a step.

    The counts are from the first batch of a cell; None if nothing was counted.

    Attributes:
        tokens: Number of tokens.
        best: Experts chosen per token.
        places: Capacity of an expert in rows, over all groups of tokens; None without a limit.
        groups: Number of token groups, each with its own capacity.
        chosen: For each expert, the number of tokens that chose it.
        kept: For each expert, the number of tokens within capacity; None without a limit.
        most: Tokens of the busiest expert in the busiest group: the capacity needed to drop none.
        file: File of the line at which the layer chooses experts.
        line: Number of the line.
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
        """Choices beyond capacity; None if unknown or without a limit."""
        return None if self.chosen is None or self.kept is None else sum(self.chosen) - sum(self.kept)

    @property
    def empty(self) -> float | None:
        """Share of capacity without a token, where products multiply zeros; None if unknown."""
        if self.kept is None or not self.places:
            return None
        return 1 - sum(self.kept) / (self.places * len(self.kept))


@dataclass(frozen=True)
class Experts:
    """Experts sharded over mesh axes, equally many on each shard, in order.

    Attributes:
        number: Number of experts.
        axes: Mesh axes.
        work: Rows multiplied by an expert: its full capacity ("places"), the rows "sorted" to the expert, or "all"
            tokens.
        layers: Layers that choose among these experts, in the order of the step.
    """

    number: int
    axes: tuple[str, ...]
    work: str
    layers: tuple[ExpertLoad, ...] = ()


@dataclass(frozen=True)
class Ring:
    """Ring attention in a step.

    Each device sends the keys and values of its own positions to the next device along the axes, `turns` - 1 times in
    the forward pass and as often in the backward pass. In the backward pass the gradients of keys and values follow,
    and the last transfer returns them to their device.

    Attributes:
        turns: Number of steps of the ring, the first on the device's own keys and values.
        count: Number of such attentions in a step.
        bytes: Bytes of keys and values per transfer.
        gradients: Bytes of gradients per transfer; None without a backward pass.
        zigzag: Of 2n parts of the positions, device d has parts d and 2n - 1 - d during attention.
        file: File of the attention's line.
        line: Number of the line.
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
    """Positions of each example sharded over mesh axes, equally many on each shard, in order.

    Attributes:
        number: Number of positions.
        axes: Mesh axes.
        attention: Access of attention to positions of other devices: "gather", "heads" or "ring".
        rings: The attentions that run as a ring.
    """

    number: int
    axes: tuple[str, ...]
    attention: str
    rings: tuple[Ring, ...] = ()


PositionRange = tuple[int, int]  # first position, and the first one after the range


def position_ranges(positions: Positions, devices: int, ring: Ring | None = None) -> list[tuple[PositionRange, ...]]:
    """Return the position ranges of each shard, or of each shard during a ring attention.

    Args:
        positions: The divided positions.
        devices: Number of shards.
        ring: The ring attention, if any.

    Returns:
        For each shard, half-open ranges (first, end).

    >>> position_ranges(Positions(16, ("seq",), "ring"), 2, Ring(2, 1, 64, zigzag=True))
    [((0, 4), (12, 16)), ((4, 8), (8, 12))]
    """
    if ring is None or not ring.zigzag:
        size = positions.number // devices
        return [((d * size, (d + 1) * size),) for d in range(devices)]
    # In causal attention early positions have less work: each device gets an early and a late part.
    size, last = positions.number // (2 * devices), 2 * devices - 1
    return [tuple((p * size, (p + 1) * size) for p in (d, last - d)) for d in range(devices)]
