"""The slices of TPUs and the nodes of GPUs that are offered, and how they are written."""

import math
import re
from collections.abc import Iterator, Sequence

from ..errors import ShardError, one_of
from ..hardware import Chip, chips
from ..units import limit_text

DIMENSIONS = {"torus2d": 2, "torus3d": 3}
SIZES = re.compile(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}|[1-9][0-9]{0,5}")
SOLD = re.compile(r"([a-z0-9]+)-([1-9][0-9]{0,5})")

Extent = tuple[int, ...]


def usual(chip: Chip) -> tuple[Extent, ...]:
    """The usual sizes in rising order: chips of a slice per dimension; of GPUs (1, GPUs of the one node).

    >>> from jaxshard_magic.hardware import chip
    >>> usual(chip("h100"))
    ((1, 1), (1, 2), (1, 4), (1, 8))
    """
    if chip.kind == "gpu":
        return tuple((1, n) for n in _node_sizes(chip))
    return chip.slices


def offered(chip: Chip, extent: Extent) -> bool:
    """Is there such a slice? GPUs: nodes of a usual size, as many as one likes. Three-dimensional slices: those of
    `usual` and all of whole cubes, sides in rising order (https://cloud.google.com/tpu/docs/types-topologies)."""
    if chip.kind == "gpu":
        return extent[-1] in _node_sizes(chip)
    return extent in usual(chip) or (
        len(extent) == DIMENSIONS[chip.link.topology] == 3
        and list(extent) == sorted(extent)
        and all(n % chip.link.wrap == 0 for n in extent)
        and math.prod(extent) <= _most(chip)
    )


def larger(chip: Chip, extent: Extent) -> tuple[Extent, ...]:
    """The usual sizes above a size, in rising order; after one node of GPUs, 2, 4, 8 and more of them.

    >>> from jaxshard_magic.hardware import chip
    >>> larger(chip("v5e"), (4, 8)), larger(chip("h100"), (1, 8))[:2]
    (((8, 8), (8, 16), (16, 16)), ((2, 8), (4, 8)))
    """
    sizes = usual(chip)
    if chip.kind == "gpu":
        sizes += tuple((2**n, chip.node) for n in range(1, 8))
    elif DIMENSIONS[chip.link.topology] == 3:
        cube = (chip.link.wrap,) * 3
        while math.prod(cube) <= _most(chip):
            sizes += (cube,)
            cube = tuple(sorted((2 * cube[0], *cube[1:])))
    return tuple(dict.fromkeys(size for size in sizes if math.prod(size) > math.prod(extent)))


def note(chip: Chip, extent: Extent) -> str | None:
    """One line for a size that nobody offers, with the nearest that are; None for a real one.

    >>> from jaxshard_magic.hardware import chip
    >>> note(chip("v5e"), (3, 5))
    'v5e:3x5 is no slice that is offered; the nearest are v5e:4x4 and v5e:2x4; compiled all the same'
    """
    if offered(chip, extent):
        return None
    name = written(chip, extent)
    if chip.kind == "gpu":
        sizes = one_of(map(str, _node_sizes(chip)))
        return (
            f"{name} has {extent[-1]} GPUs a node; a node of {chip.name} has {sizes}; compiled all the same"
        )
    return f"{name} is no slice that is offered; {_nearest(chip, math.prod(extent))}; compiled all the same"


def extent_of(chip: Chip, text: str) -> Extent:
    """The size that stands behind the colon: chips of a slice per dimension, or (nodes, GPUs a node).

    A number alone counts chips, or GPUs: of a TPU it gets the slice of so many chips that is offered. A
    three-dimensional slice may leave a last 1 out. Raises `ShardError` for anything else.

    >>> from jaxshard_magic.hardware import chip
    >>> extent_of(chip("v5e"), "16"), extent_of(chip("a100"), "2x8"), extent_of(chip("h100"), "8")
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


def named(text: str) -> tuple[Chip, Extent] | None:
    """The chip and the slice that the vendor's own name means; None for what is no such name.

    The number counts cores for v2, v3, v4, v5p and tpu7x, two to a chip, and chips for v5e and v6e. Raises
    `ShardError` for a number that no slice has.

    >>> chip, extent = named("v5p-128")
    >>> chip.key, extent
    ('v5p', (4, 4, 4))
    """
    word = SOLD.fullmatch(text.strip().lower())
    chip = word and next(
        (c for c in chips().values() if c.kind == "tpu" and word[1] in (c.key, c.marketed)), None
    )
    if not word or not chip:
        return None
    count, rest = divmod(int(word[2]), chip.cores)
    if rest:
        raise ShardError(f"'{word[0]}': the number counts cores, and a chip of {chip.name} has {chip.cores}")
    return chip, _of_count(chip, count, word[0])


def listing() -> str:
    """All chips as text: memory of a device, usual sizes, and which extra has the compiler for them."""
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
    """One line a row; amounts of memory end where their column does."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{x:{'>' if i in (1, 2) else '<'}{n}}" for i, (x, n) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _memory(chip: Chip) -> tuple[str, str]:
    """Of one device: all, and what a program gets."""
    return limit_text(chip.hbm), "" if chip.usable is None else limit_text(chip.usable)


def _slices(chip: Chip) -> str:
    """Whole cubes are said and not listed."""
    if DIMENSIONS[chip.link.topology] == 2:
        return " ".join(map(_text, usual(chip)))
    cube = (chip.link.wrap,) * 3
    listed = " ".join(_text(e) for e in usual(chip) if math.prod(e) < math.prod(cube))
    return f"{listed}, whole {_text(cube)} cubes to {_most(chip):,}"


def _nodes_of(chip: Chip) -> str:
    if chip.compiler is None:
        return f"not compiled for; --on {chip.key} predicts its time"
    return f"{' '.join(map(str, _node_sizes(chip)))}, as {chip.key}:{chip.node} or {chip.key}:4x{chip.node}"


def _most(chip: Chip) -> int:
    """The chips of the largest slice."""
    return chip.node // chip.per_chip


def _node_sizes(chip: Chip) -> list[int]:
    return [n for n in (1, 2, 4, 8, 16, 32, 64) if n < chip.node] + [chip.node]


def _nodes(chip: Chip, sizes: Extent) -> Extent:
    if len(sizes) == 1 and sizes[0] <= chip.node:
        return (1, *sizes)
    if len(sizes) == 1 and sizes[0] % chip.node == 0:
        return sizes[0] // chip.node, chip.node
    if len(sizes) == 2:
        return sizes
    raise ShardError(f"'{chip.key}:{_text(sizes)}': {_form(chip)}")


def _form(chip: Chip) -> str:
    if chip.kind == "gpu":
        return (
            f"write GPUs of one node, as {chip.key}:{chip.node}, or nodes x GPUs, as {chip.key}:2x{chip.node}; "
            f"a node has {chip.node}"
        )
    example = "x".join(["4"] * DIMENSIONS[chip.link.topology])
    return f"a slice of {chip.key} is written as {chip.key}:{example}, or by its chips, as {chip.key}:64"


def _of_count(chip: Chip, count: int, given: str) -> Extent:
    """The slice of so many chips: the usual one, else the cubes that are most like one."""
    found = next((e for e in _candidates(chip, count) if math.prod(e) == count), None)
    if found is None:
        raise ShardError(f"{given}: no slice of {_chips(chip, count)} is offered; {_nearest(chip, count)}")
    return found


def _nearest(chip: Chip, count: int) -> str:
    """The offered slice of as many chips, or the two next to it."""
    near = sorted(_candidates(chip, count), key=lambda e: abs(math.log(math.prod(e) / count)))
    if math.prod(near[0]) == count:
        return f"the nearest is {_told(chip, near[0])}"
    return f"the nearest are {_told(chip, near[0])} and {_told(chip, near[1])}"


def _candidates(chip: Chip, count: int) -> list[Extent]:
    return list(dict.fromkeys([*usual(chip), *_cubes(chip, count)]))


def _cubes(chip: Chip, count: int) -> Iterator[Extent]:
    """The most even slices of whole cubes with at most, and with at least, so many chips."""
    if DIMENSIONS[chip.link.topology] == 3:
        side = chip.link.wrap
        for cubes in {count // side**3, math.ceil(count / side**3)}:
            if 0 < cubes <= _most(chip) // side**3:
                yield tuple(side * n for n in _even(cubes))


def _even(count: int) -> Extent:
    """`count` as three factors in rising order, those with the least sum.

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
    """A slice by name, and its devices where they are more than its chips."""
    return written(chip, extent) + _devices(chip, math.prod(extent))


def written(chip: Chip, extent: Extent) -> str:
    """As `%mesh` takes it: "v5e:4x4", "h100:8", "a100-80:2x8"."""
    return f"{chip.key}:{_text(extent[1:] if chip.kind == 'gpu' and extent[0] == 1 else extent)}"


def _text(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
