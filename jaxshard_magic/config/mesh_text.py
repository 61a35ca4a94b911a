"""Parse mesh text: `cpu:8 data=4 model=2` -> devices and axes."""

import ast
import re
from collections.abc import Iterable
from typing import NamedTuple

from .. import simulate
from ..errors import ShardError, nearest, unknown_name
from ..hardware import chip_of, chips
from ..hosts.spec import KINDS, UNENCRYPTED, HostsSpec
from ..targets import Target, slices
from .strategies import AXIS_JOBS, job_of

Axes = tuple[tuple[str, int], ...]

_MOST_AXES, _MOST = 32, 10**9  # most axes of a mesh, and most devices along an axis
_LISTED = '[[4,2],["data","model"]]'
FORMS = f"data=4 model=2, or {_LISTED}, or cpu:8 data=4 model=2, or v5e:4x4 data=4 model=4"


class MadeOf(NamedTuple):
    """Devices of a mesh, in fields of `MeshSpec`.

    Attributes:
        source: "attached", "simulated", "topology" or "hosts".
        platform: Platform; None if the text names none.
        count: Number of devices; None if the text names none.
        target: Hardware that is not attached; None for others.
        hosts: Hosts; None for others.
    """

    source: str = "attached"
    platform: str | None = None
    count: int | None = None
    target: Target | None = None
    hosts: HostsSpec | None = None


def device_part(given: str) -> tuple[MadeOf, str]:
    """Split mesh text into devices and axes: `cpu:8 data=4` -> devices, and "data=4".

    Raises:
        ShardError: Unknown hardware, or a number of simulated devices out of range.
    """
    first, _, rest = given.partition(" ")
    if (sold := slices.parse_vendor_name(first.rstrip(","))) is not None:
        return _slice(Target(*sold)), rest
    over = re.match(rf"({'|'.join(KINDS)}):(\S*)\s*", given)
    if over is not None:
        words = given[over.end() :].split(" ")
        rest = " ".join(word for word in words if word != UNENCRYPTED)
        return MadeOf("hosts", hosts=HostsSpec.parse(over[1], over[2], UNENCRYPTED in words)), rest
    head = re.match(r"([^\W\d][\w-]*):([^\s,]*)[\s,]*", given)
    if head is None or (job_of(head[1]) and chip_of(head[1]) is None):
        # `data:4` is an axis written with a colon, and no platform.
        return MadeOf(), given
    platform, extent, rest = head[1].lower(), head[2].lower(), given[head.end() :]
    if platform == "cpu":
        if not re.fullmatch(r"[0-9]{1,9}", extent) or not 1 <= int(extent) <= simulate.MAX_DEVICES:
            raise ShardError(f"'cpu:{head[2]}': write how many devices to simulate, 1 to {simulate.MAX_DEVICES}: cpu:8")
        return MadeOf("simulated", "cpu", int(extent)), rest
    chip = chip_of(platform)
    if chip is None:
        said = f"'{head[0].strip()}' names no known hardware"
        raise ShardError(unknown_name(said, platform, ("cpu", *chips()), "%mesh --list has all, with their sizes"))
    return _slice(Target(chip, slices.parse_extent(chip, extent))), rest


def _slice(target: Target) -> MadeOf:
    return MadeOf("topology", target.chip.key, target.count, target)


def written_axes(rest: str, given: str) -> Axes:
    """Return the axes of `data=4 model=2`; `given` is the whole mesh text, for messages."""
    words = re.sub(r"\s*=\s*", "=", rest).replace(",", " ").split()
    if not words:
        raise ShardError(f"'{given}' is no mesh: write {FORMS}")
    return tuple(_written_axis(*pair) for pair in zip(words, [*words[1:], ""], strict=True))


def _written_axis(word: str, behind: str) -> tuple[str, int]:
    """Return the axis named by `word`.

    Args:
        word: Word of the mesh text.
        behind: Next word, which may be a missing size, for the suggestion.
    """
    name, equals, size = word.partition("=")
    if equals and name.isidentifier():
        if not re.fullmatch(r"[+-]?[0-9]{1,9}", size):
            raise ShardError(f"axis '{name}' has the size '{size}'; a size is a whole number, as in {name}=4, or -1")
        return name, int(size)
    apart = f"{word}={behind}" if re.fullmatch(r"[0-9]{1,9}", behind) else word[:100]
    near = nearest(word, [name for job in AXIS_JOBS.values() for name in job.axis_names])
    sized = re.fullmatch(r"([^\W\d]\w*?)[^\w]*(\d{1,9})", apart)
    meant = f"{sized[1]}={sized[2]}" if sized else near and f"{near}=-1"
    help = f". Did you mean '{meant}'? %mesh --help has the forms" if meant else f": write {FORMS}"
    raise ShardError(f"'{word}' is no mesh axis{help}")


def listed_axes(text: str) -> Axes:
    """Return the axes of `[[4,2],["fsdp","tp"]]`: (("fsdp", 4), ("tp", 2))."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value = None
    match value:
        case [(list() | tuple()) as sizes, (list() | tuple()) as names]:
            pass
        case _:
            raise ShardError(f"'{text}' is no mesh: write sizes, then names: {_LISTED}")
    if len(sizes) != len(names):
        raise ShardError(f"'{text}' has {len(sizes)} sizes and {len(names)} names; an axis has both")
    for size in sizes:
        # A bool is an int, but not a size.
        if type(size) is not int:
            raise ShardError(f"'{text}': the size {size!r} is no whole number, as 4 is, or -1")
    for name in names:
        if not (isinstance(name, str) and name.isidentifier()):
            raise ShardError(f"'{text}': {name!r} is no axis name, as \"data\" is")
    return tuple(zip(names, sizes, strict=True))


def check_axes(axes: Axes) -> None:
    """Raise ShardError for axes that no mesh can have."""
    if not 1 <= len(axes) <= _MOST_AXES or any(abs(n) > _MOST for _, n in axes):
        raise ShardError(f"a mesh has 1 to {_MOST_AXES} axes, of {_MOST:,} devices at most: write {FORMS}")
    names = [a for a, _ in axes]
    for name, size in axes:
        if names.count(name) > 1:
            raise ShardError(f"mesh {axes_text(axes)} has the axis '{name}' twice: give each its own name")
        if size == 0 or size < -1:
            raise ShardError(f"axis '{name}' has the size {size}; use 1 or more, or -1 for what is left")
    if len(left := [a for a, n in axes if n == -1]) > 1:
        raise ShardError(f"mesh {axes_text(axes)}: only one axis can be -1, not {' and '.join(left)}. Give one a size")


def axes_text(axes: Iterable[tuple[str, int]]) -> str:
    """Return axes as text: `data=4 model=2`."""
    return " ".join(f"{a}={n}" for a, n in axes)


def product(axes: Axes) -> str:
    return " × ".join(str(n) for _, n in axes)
