"""Turn messages in XLA's compile log into findings for the user, merged and in plain words.

A message names shardings as XLA prints them; `parse_sharding` reads them.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ..plan import Finding
from ..units import byte_text, seconds_text
from .hlo import Shape

OTHER = "compiler"  # code of a message of unknown kind
LEVELS = {"slow-folding": "info", "slow-compile": "info"}  # a slow compile does not slow down the step

_MOVE = re.compile(r"from sharding (\{.+?\}) to (\{.+?\}) (?:efficiently|without)")
_RESULT = re.compile(r"%?[\w.\-]+ = ([a-z]\w*)\[([\d,]*)\]")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TOOK = re.compile(r"The operation took (?=\d)(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?")
_MODULE = re.compile(r"\[Compiling module ([^\]]+)\]")
_LIMITS = re.compile(r"below \S+ \((\d+) bytes\).*reduced to \S+ \((\d+) bytes\)")

Axes = tuple[tuple[str, ...], ...]

_TILES = re.compile(r"\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?")
_NAMED = re.compile(r"\{mesh\[(.*?)\], \[(.*?)\]")
_SIZE = re.compile(r"'([^']+)'=(\d+)")
_AXIS = re.compile(r"'([^']+)'(:\(\d+\)(\d+))?")  # an axis 'x', or a part of it: 'x':(1)2 has size 2


@dataclass(frozen=True)
class Diagnostic:
    """Warning of XLA, logged one or more times.

    Attributes:
        code: Kind of message.
        text: Sentence for the user, without the full stop.
        shape: Array in question; for a sharded array the full shape, rounded up to equal shards.
        op_name: Operation in the metadata of the compiled program.
        stack_frame_id: Stack frame in the metadata of the compiled program.
        count: Number of times; two messages on the start and the end of one slow operation count once.
        seconds: Time taken, over all messages; None if not logged.
        fix: Line of code against the problem; None without one.
    """

    code: str
    text: str
    shape: Shape | None = None
    op_name: str | None = None
    stack_frame_id: int | None = None
    count: int = 1
    seconds: float | None = None
    fix: str | None = None


def parse_messages(messages: Iterable[str], mesh: Mapping[str, int] | None = None) -> tuple[Diagnostic, ...]:
    """Parse the messages of a compiler's log; equal messages are merged, in the order of first appearance.

    Args:
        messages: Messages of the log.
        mesh: Axis sizes by name, for naming the parts of an array.

    Returns:
        A message of unknown kind keeps the first sentence of the log.

    >>> parse_messages(["[SPMD] Involuntary full rematerialization. And more"] * 2)[0].text
    'XLA says: Involuntary full rematerialization'
    """
    merged: dict[Diagnostic, Diagnostic] = {}
    for message in messages:
        diagnostic = _parse_message(message, mesh or {})
        key = replace(diagnostic, seconds=None)
        if before := merged.get(key):
            # XLA logs a slow operation when it gets slow, and again with the seconds at the end: one event, two
            # messages.
            known = [s for s in (before.seconds, diagnostic.seconds) if s is not None]
            count = before.count + (diagnostic.seconds is None)
            diagnostic = replace(before, count=count, seconds=sum(known) if known else None)
        merged[key] = diagnostic
    return tuple(merged.values())


def findings(
    complaints: Sequence[Diagnostic], line_of: Callable[[Diagnostic], str | None] = lambda _: None
) -> tuple[Finding, ...]:
    """Return the findings for the user, one for equal messages on one line.

    Args:
        complaints: Parsed messages.
        line_of: Returns the source line as `line 12`, or None if unknown.
    """
    counts: dict[Finding, int] = {}
    for one in complaints:
        line = line_of(one)
        took = f": this took {seconds_text(one.seconds)}" if one.seconds is not None else ""
        message = f"{f'At {line} ' if line else ''}{one.text}{took}"
        finding = Finding(one.code, LEVELS.get(one.code, "warning"), message, one.fix)
        counts[finding] = counts.get(finding, 0) + one.count
    return tuple(
        replace(finding, message=f"{finding.message}{f' ({n} times)' if n > 1 else ''}.")
        for finding, n in counts.items()
    )


def _parse_message(message: str, mesh: Mapping[str, int]) -> Diagnostic:
    shape, name, frame = _RESULT.search(message), _OP_NAME.search(message), _FRAME.search(message)
    one = Diagnostic(
        OTHER,
        f"XLA says: {_first_sentence(message)}",
        Shape(shape[1], tuple(int(n) for n in shape[2].split(",") if n)) if shape else None,
        name[1].replace("\\'", "'").replace('\\"', '"') if name else None,
        int(frame[1]) if frame else None,
        seconds=_seconds(message),
    )
    # Without the first letter, which XLA writes in lower or upper case.
    if "nvoluntary full rematerialization" in message:
        return _full_remat(replace(one, code="full-remat"), message, mesh)
    if "Can't reduce memory use" in message:
        return _over_memory(replace(one, code="over-memory"), message)
    if "Constant folding" in message:
        return _slow_folding(replace(one, code="slow-folding"))
    if "low compile?" in message:
        return _slow_compile(replace(one, code="slow-compile"), message)
    return one


def _full_remat(one: Diagnostic, message: str, mesh: Mapping[str, int]) -> Diagnostic:
    """Explain an involuntary full rematerialization, with an intermediate constraint as a fix."""
    move = _MOVE.search(message)
    if not move or not one.shape:
        return one
    dims = one.shape.dims
    before, after = (parse_sharding(text, len(dims), mesh) for text in move.groups())
    if before is None or after is None:
        return replace(one, shape=None)
    # The partitioner logs the shape of one shard, but every device gathers the full array.
    full_shape = Shape(one.shape.dtype, tuple(n * parts for n, parts in zip(dims, before.parts, strict=True)))
    text = (
        f"XLA cannot move {_named(full_shape)} from {before} to {after} in parts: "
        f"every device gathers the whole array, {byte_text(full_shape.bytes)}"
    )
    fix = None
    if intermediate := intermediate_axes(before, after):
        text += "; with a constraint in between it goes in parts"
        fix = f"x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, {spec_text(intermediate)}))"
    return replace(one, text=text, shape=full_shape, fix=fix)


def _over_memory(one: Diagnostic, message: str) -> Diagnostic:
    limits = _LIMITS.search(message)
    if not limits:
        return one
    wanted, reached = (byte_text(int(n)) for n in limits.groups())
    text = (
        f"XLA computes values twice to save memory and still needs {reached} on a device, "
        f"where it wants to stay below {wanted}"
    )
    return replace(one, text=text)


def _slow_folding(one: Diagnostic) -> Diagnostic:
    what = f"{_named(one.shape)}, {byte_text(one.shape.bytes)}," if one.shape else "a value"
    text = (
        f"XLA computes {what} while it compiles, because no input of the step goes into it; made outside the step and "
        "passed in, it is computed once"
    )
    return replace(one, text=text)


def _slow_compile(one: Diagnostic, message: str) -> Diagnostic:
    module = _MODULE.search(message)
    return replace(one, text=f"XLA finds {module[1] if module else 'this program'} very slow to compile")


def _named(shape: Shape) -> str:
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}]"


def _seconds(message: str) -> float | None:
    """Return the seconds in `The operation took 2m32.4s`; None in other messages."""
    took = _TOOK.search(message)
    if not took:
        return None
    return sum(float(n or 0) * unit for n, unit in zip(took.groups(), (3600, 60, 1), strict=True))


def _first_sentence(message: str) -> str:
    line = next((line.strip() for line in message.splitlines() if line.strip(" *")), "nothing")
    return re.split(r"\. ", re.sub(r"^\[\w+\] ", "", line))[0].rstrip(".:")


@dataclass(frozen=True)
class HloSharding:
    """Sharding of an array.

    Attributes:
        parts: Number of shards along each dimension.
        axes: Mesh axes of each dimension; None if unknown.
    """

    parts: tuple[int, ...]
    axes: Axes | None = None

    def __str__(self) -> str:
        if self.axes is not None:
            return spec_text(self.axes)
        return f"{' x '.join(map(str, self.parts))} parts" if prod(self.parts) > 1 else "one device"


def spec_text(axes: Axes) -> str:
    """Return the source text of a PartitionSpec.

    >>> spec_text((("data", "model"), ()))
    "P(('data', 'model'), None)"
    """
    return f"P({', '.join(repr(e[0]) if len(e) == 1 else repr(e or None) for e in axes)})"


def parse_sharding(text: str, rank: int, mesh: Mapping[str, int]) -> HloSharding | None:
    """Parse a sharding of HLO.

    Tiles have the form `devices=[2,1,4]<=[4,2]T(1,0)`: the devices in order as a 4 x 2 array, transposed, and
    distributed over 2 x 1 x 4 shards. Dimensions of the tiles beyond `rank` hold replicas.

    Args:
        text: Sharding in HLO syntax.
        rank: Number of dimensions of the array.
        mesh: Axis sizes by name.

    Returns:
        None for an unknown form.

    >>> parse_sharding("{devices=[2,1,4]<=[4,2]T(1,0)}", 3, {"x": 4, "y": 2})
    HloSharding(parts=(2, 1, 4), axes=(('y',), (), ('x',)))
    >>> parse_sharding("{mesh['x'=4,'y'=2], [{'x', 'y'}, {}]}", 2, {})
    HloSharding(parts=(8, 1), axes=(('x', 'y'), ()))
    """
    if named := _NAMED.match(text):
        return _parse_named_sharding(named[1], named[2], rank)
    if text.startswith("{replicated"):
        return HloSharding((1,) * rank, ((),) * rank)
    if text.startswith("{maximal"):
        return HloSharding((1,) * rank)
    tiles = _TILES.match(text)
    if not tiles:
        return None
    parts = _numbers(tiles[1])
    if len(parts) < rank:
        return None
    order = _axes_in_device_order(mesh, _numbers(tiles[2]), _numbers(tiles[3])) if tiles[2] else None
    return HloSharding(parts[:rank], _consumed(order, parts[:rank]) if order is not None else None)


def intermediate_axes(before: HloSharding, after: HloSharding) -> Axes | None:
    """Return an intermediate sharding differing from `before` in a single mesh axis, so that both steps exchange
    shards.

    Returns:
        None if a single axis changes already, or if the axes are unknown.
    """
    if before.axes is None or after.axes is None:
        return None
    was, will = _dim_of_axis(before.axes), _dim_of_axis(after.axes)
    # Axes used by the target come first, so that the array gets no larger on the way.
    for axis in sorted({**was, **will}, key=lambda a: a not in will):
        if was.get(axis) != will.get(axis):
            steps = [[a for a in entry if a != axis] for entry in before.axes]
            if axis in will:
                steps[will[axis]].append(axis)
            way = tuple(map(tuple, steps))
            if way not in (before.axes, after.axes):
                return way
    return None


def _dim_of_axis(axes: Axes) -> dict[str, int]:
    return {axis: d for d, entry in enumerate(axes) for axis in entry}


def _parse_named_sharding(mesh: str, dims: str, rank: int) -> HloSharding | None:
    sizes = {name: int(size) for name, size in _SIZE.findall(mesh)}
    entries = [_AXIS.findall(entry) for entry in re.findall(r"\{([^{}]*)\}", dims)]
    if len(entries) != rank or any(name not in sizes for entry in entries for name, *_ in entry):
        return None
    parts = tuple(prod(int(size or sizes[name]) for name, _, size in entry) for entry in entries)
    # A PartitionSpec can't name a part of an axis.
    whole = all(not part for entry in entries for _, part, _ in entry)
    return HloSharding(parts, tuple(tuple(name for name, *_ in entry) for entry in entries) if whole else None)


def _axes_in_device_order(
    mesh: Mapping[str, int], sizes: Sequence[int], order: Sequence[int]
) -> list[tuple[str, int]] | None:
    """Return the mesh axes with their sizes, major to minor in the device order of the tiles; None if no axes match."""
    # Axes of size 1 leave no trace in tiles.
    groups = _grouped(((a, n) for a, n in mesh.items() if n > 1), sizes)
    return None if groups is None else [axis for i in order or range(len(groups)) for axis in groups[i]]


def _consumed(order: Sequence[tuple[str, int]], parts: Sequence[int]) -> Axes | None:
    groups = _grouped(order, parts)
    return None if groups is None else tuple(tuple(a for a, _ in group) for group in groups)


def _grouped(axes: Iterable[tuple[str, int]], sizes: Sequence[int]) -> list[list[tuple[str, int]]] | None:
    """Return the first of `axes` as groups with size products equal to `sizes`; None if impossible."""
    left = iter(axes)
    groups: list[list[tuple[str, int]]] = []
    for size in sizes:
        group: list[tuple[str, int]] = []
        while (parts := prod(n for _, n in group)) < size:
            if (axis := next(left, None)) is None:
                return None
            group.append(axis)
        if parts != size:
            return None
        groups.append(group)
    return groups


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()
