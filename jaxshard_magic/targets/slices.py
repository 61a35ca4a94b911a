"""Slices of TPUs and nodes of GPUs on offer, and the syntax of their names."""

import math
import re
from collections.abc import Iterator, Sequence

from ..errors import ShardError, list_names
from ..hardware import Chip, chips
from ..units import limit_text

DIMENSIONS = {"torus2d": 2, "torus3d": 3}
SIZES = re.compile(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}|[1-9][0-9]{0,5}")
SOLD = re.compile(r"([a-z0-9]+)-([1-9][0-9]{0,5})")

Extent = tuple[int, ...]


def usual_sizes(chip: Chip) -> tuple[Extent, ...]:
    """Return the usual sizes in rising order: chips of a slice per dimension, or (1, GPUs) for one node of GPUs.

    >>> from jaxshard_magic.hardware import chip
    >>> usual_sizes(chip("h100"))
    ((1, 1), (1, 2), (1, 4), (1, 8))
    """
    if chip.kind == "gpu":
        return tuple((1, n) for n in _node_sizes(chip))
    return chip.slices


def is_offered(chip: Chip, extent: Extent) -> bool:
    """Return whether a size is on offer.

    GPUs: any number of nodes of a usual size. Three-dimensional slices: the usual ones, and all of whole cubes with
    sides in rising order (https://cloud.google.com/tpu/docs/types-topologies).
    """
    if chip.kind == "gpu":
        return extent[-1] in _node_sizes(chip)
    return extent in usual_sizes(chip) or (
        len(extent) == DIMENSIONS[chip.link.topology] == 3
        and list(extent) == sorted(extent)
        and all(n % chip.link.wrap == 0 for n in extent)
        and math.prod(extent) <= _most(chip)
    )


def larger_sizes(chip: Chip, extent: Extent) -> tuple[Extent, ...]:
    """Return the usual sizes above a size, in rising order; after one node of GPUs, 2, 4, 8 and more nodes.

    >>> from jaxshard_magic.hardware import chip
    >>> larger_sizes(chip("v5e"), (4, 8)), larger_sizes(chip("h100"), (1, 8))[:2]
    (((8, 8), (8, 16), (16, 16)), ((2, 8), (4, 8)))
    """
    sizes = usual_sizes(chip)
    if chip.kind == "gpu":
        sizes += tuple((2**n, chip.node) for n in range(1, 8))
    elif DIMENSIONS[chip.link.topology] == 3:
        cube = (chip.link.wrap,) * 3
        while math.prod(cube) <= _most(chip):
            sizes += (cube,)
            cube = tuple(sorted((2 * cube[0], *cube[1:])))
    return tuple(dict.fromkeys(size for size in sizes if math.prod(size) > math.prod(extent)))


def size_note(chip: Chip, extent: Extent) -> str | None:
    """Return one line about a size that nobody offers, with the nearest sizes on offer; None for a size on offer.

    >>> from jaxshard_magic.hardware import chip
    >>> size_note(chip("v5e"), (3, 5))
    'v5e:3x5 is no slice that is offered; the nearest are v5e:4x4 and v5e:2x4; compiled all the same'
    """
    if is_offered(chip, extent):
        return None
    name = target_name(chip, extent)
    if chip.kind == "gpu":
        sizes = list_names(map(str, _node_sizes(chip)))
        return f"{name} has {extent[-1]} GPUs a node; a node of {chip.name} has {sizes}; compiled all the same"
    return f"{name} is no slice that is offered; {_nearest(chip, math.prod(extent))}; compiled all the same"


def parse_extent(chip: Chip, text: str) -> Extent:
    """Parse a size: chips of a slice per dimension, or (nodes, GPUs per node).

    A single number counts chips or GPUs; for a TPU it stands for the slice on offer with so many chips. A
    three-dimensional slice may omit a last 1.

    Args:
        chip: Kind of chip.
        text: Text after the colon, such as "4x4".

    Raises:
        ShardError: The text is no size of this chip.

    >>> from jaxshard_magic.hardware import chip
    >>> parse_extent(chip("v5e"), "16"), parse_extent(chip("a100"), "2x8"), parse_extent(chip("h100"), "8")
    ((4, 4), (2, 8), (1, 8))
    """
    given = text.strip().lower()
    if not SIZES.fullmatch(given):
        raise ShardError(f"'{chip.key}:{text}': {_form(chip)}")
    sizes = tuple(map(int, given.split("x")))
    if chip.kind == "gpu":
        return _nodes(chip, sizes)
    if len(sizes) == 1:
        return _of_count(chip, sizes[0], f"{chip.key}:{given}")
    dims = DIMENSIONS[chip.link.topology]
    full = (*sizes, 1, 1)
    if any(n > 1 for n in full[dims:]):
        raise ShardError(f"'{chip.key}:{text}' has {len(sizes)} dimensions: {_form(chip)}")
    return full[:dims]


def parse_vendor_name(text: str) -> tuple[Chip, Extent] | None:
    """Return the chip and slice of a vendor's name; None for any other text.

    The number counts cores for v2, v3, v4, v5p and tpu7x, two per chip, and chips for v5e and v6e.

    Raises:
        ShardError: No slice has this number.

    >>> chip, extent = parse_vendor_name("v5p-128")
    >>> chip.key, extent
    ('v5p', (4, 4, 4))
    """
    word = SOLD.fullmatch(text.strip().lower())
    chip = word and next((c for c in chips().values() if c.kind == "tpu" and word[1] in (c.key, c.marketed)), None)
    if not word or not chip:
        return None
    count, rest = divmod(int(word[2]), chip.cores)
    if rest:
        raise ShardError(f"'{word[0]}': the number counts cores, and a chip of {chip.name} has {chip.cores}")
    return chip, _of_count(chip, count, word[0])


def list_chips() -> str:
    """Return all chips as text: memory of a device, usual sizes, and the extra that installs the compiler."""
    tpus = [c for c in chips().values() if c.kind == "tpu"]
    gpus = [c for c in chips().values() if c.kind == "gpu"]
    slices = [(c.key, *_memory(c), f"{c.per_chip} a chip", _slices(c)) for c in tpus]
    nodes = [(c.key, *_memory(c), _nodes_of(c)) for c in gpus]
    return "\n".join(
        [
            "TPUs, compiled for with the extra tpu; %shard doctor has the line that installs it. A number alone",
            "counts chips: v5e:16 is v5e:4x4. Names as they are sold work too: v5litepod-16, and v5p-128, whose",
            "128 cores are 64 chips.",
            *_columns([("TPU", "memory", "usable", "devices", "slices, in chips"), *slices]),
            "",
            "GPUs, compiled for with the extra cuda-aot; %shard doctor has the line that installs it.",
            *_columns([("GPU", "memory", "usable", "GPUs of a node, or nodes x GPUs"), *nodes]),
        ]
    )


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line a row; amounts of memory are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{x:{'>' if i in (1, 2) else '<'}{n}}" for i, (x, n) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _memory(chip: Chip) -> tuple[str, str]:
    """Return the memory of one device as text: in total, and available to a program."""
    return limit_text(chip.hbm), "" if chip.usable is None else limit_text(chip.usable)


def _slices(chip: Chip) -> str:
    """Return the sizes of slices as text; whole cubes are summed up instead of listed."""
    if DIMENSIONS[chip.link.topology] == 2:
        return " ".join(map(_text, usual_sizes(chip)))
    cube = (chip.link.wrap,) * 3
    listed = " ".join(_text(e) for e in usual_sizes(chip) if math.prod(e) < math.prod(cube))
    return f"{listed}, whole {_text(cube)} cubes to {_most(chip):,}"


def _nodes_of(chip: Chip) -> str:
    """Return the sizes of nodes as text."""
    if chip.compiler is None:
        return f"not compiled for; --on {chip.key} predicts its time"
    return f"{' '.join(map(str, _node_sizes(chip)))}, as {chip.key}:{chip.node} or {chip.key}:4x{chip.node}"


def _most(chip: Chip) -> int:
    """Return the number of chips in the largest slice."""
    # `node` counts devices.
    return chip.node // chip.per_chip


def _node_sizes(chip: Chip) -> list[int]:
    return [n for n in (1, 2, 4, 8, 16, 32, 64) if n < chip.node] + [chip.node]


def _nodes(chip: Chip, sizes: Extent) -> Extent:
    """Return (nodes, GPUs per node) for the numbers in a size. Raises ShardError."""
    if len(sizes) == 1 and sizes[0] <= chip.node:
        return (1, *sizes)
    if len(sizes) == 1 and sizes[0] % chip.node == 0:
        return sizes[0] // chip.node, chip.node
    if len(sizes) == 2:
        return sizes
    raise ShardError(f"'{chip.key}:{_text(sizes)}': {_form(chip)}")


def _form(chip: Chip) -> str:
    """Return a sentence about the syntax of a chip's sizes."""
    if chip.kind == "gpu":
        return (
            f"write GPUs of one node, as {chip.key}:{chip.node}, or nodes x GPUs, as {chip.key}:2x{chip.node}; "
            f"a node has {chip.node}"
        )
    example = "x".join(["4"] * DIMENSIONS[chip.link.topology])
    return f"a slice of {chip.key} is written as {chip.key}:{example}, or by its chips, as {chip.key}:64"


def _of_count(chip: Chip, count: int, given: str) -> Extent:
    """Return the slice of so many chips: the usual one, else the most cube-like one of whole cubes. Raises
    ShardError."""
    found = next((e for e in _candidates(chip, count) if math.prod(e) == count), None)
    if found is None:
        raise ShardError(f"{given}: no slice of {_chips(chip, count)} is offered; {_nearest(chip, count)}")
    return found


def _nearest(chip: Chip, count: int) -> str:
    """Describe the slice on offer with as many chips, or the two nearest."""
    # By ratio: half and twice as many chips are equally near.
    near = sorted(_candidates(chip, count), key=lambda e: abs(math.log(math.prod(e) / count)))
    if math.prod(near[0]) == count:
        return f"the nearest is {_told(chip, near[0])}"
    return f"the nearest are {_told(chip, near[0])} and {_told(chip, near[1])}"


def _candidates(chip: Chip, count: int) -> list[Extent]:
    return list(dict.fromkeys([*usual_sizes(chip), *_cubes(chip, count)]))


def _cubes(chip: Chip, count: int) -> Iterator[Extent]:
    """Yield the most cube-like slices of whole cubes with at most, and with at least, so many chips."""
    if DIMENSIONS[chip.link.topology] == 3:
        side = chip.link.wrap
        for cubes in {count // side**3, math.ceil(count / side**3)}:
            if 0 < cubes <= _most(chip) // side**3:
                yield tuple(side * n for n in _even(cubes))


def _even(count: int) -> Extent:
    """Return `count` as three factors with the least sum, in rising order.

    >>> _even(12)
    (2, 2, 3)
    """
    small = [n for n in range(1, count + 1) if count % n == 0]
    found = ((a, b, count // (a * b)) for a in small for b in small if a <= b and count % (a * b) == 0)
    return min((f for f in found if f[1] <= f[2]), key=sum)


def _chips(chip: Chip, count: int) -> str:
    return f"{count} chip{'s' * (count > 1)}{_devices(chip, count)}"


def _devices(chip: Chip, count: int) -> str:
    return f" ({count * chip.per_chip} devices)" if chip.per_chip > 1 else ""


def _told(chip: Chip, extent: Extent) -> str:
    """Return the name of a slice, and the number of devices if chips have more than one."""
    return target_name(chip, extent) + _devices(chip, math.prod(extent))


def target_name(chip: Chip, extent: Extent) -> str:
    """Return a target's name in the syntax of `%mesh`: "v5e:4x4", "h100:8", "a100-80:2x8"."""
    return f"{chip.key}:{_text(extent[1:] if chip.kind == 'gpu' and extent[0] == 1 else extent)}"


def _text(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
