"""Text for types, mesh parts and devices; numbers and units are re-exported from `units`."""

import re
from collections.abc import Iterable, Sequence

# `import x as x` marks a re-export for type checkers and linters.
from jaxshard_magic.errors import printable as printable
from jaxshard_magic.report import Leaf
from jaxshard_magic.report.parts import dim_axes
from jaxshard_magic.units import BYTE_UNITS as BYTE_UNITS
from jaxshard_magic.units import MINUS as MINUS
from jaxshard_magic.units import SECOND_UNITS as SECOND_UNITS
from jaxshard_magic.units import SPACE as SPACE
from jaxshard_magic.units import UNKNOWN as UNKNOWN
from jaxshard_magic.units import byte_parts as byte_parts
from jaxshard_magic.units import byte_text as byte_text
from jaxshard_magic.units import count_text as count_text
from jaxshard_magic.units import difference_text as difference_text
from jaxshard_magic.units import flops_text as flops_text
from jaxshard_magic.units import limit_parts as limit_parts
from jaxshard_magic.units import limit_text as limit_text
from jaxshard_magic.units import more_text as more_text
from jaxshard_magic.units import number_text as number_text
from jaxshard_magic.units import percent_text as percent_text
from jaxshard_magic.units import range_text as range_text
from jaxshard_magic.units import rate_text as rate_text
from jaxshard_magic.units import round_to_sum as round_to_sum
from jaxshard_magic.units import rounded as rounded
from jaxshard_magic.units import seconds_text as seconds_text
from jaxshard_magic.units import share_text as share_text
from jaxshard_magic.units import significant as significant
from jaxshard_magic.units import time_text as time_text
from jaxshard_magic.units import trimmed as trimmed
from jaxshard_magic.units import usage_text as usage_text

_DTYPE = re.compile(r"(float|uint|int|complex)([1-9]\d*)(.*)")
_DTYPE_LETTER = {"float": "f", "uint": "u", "int": "i", "complex": "c"}


def dtype_text(name: str) -> str:
    """Return the short dtype name used by JAX: `f32`, `bf16`, `i32`, `u8`; key dtypes stay as `key<fry>`."""
    if name.startswith("bfloat"):
        return "bf" + name.removeprefix("bfloat")
    match = _DTYPE.fullmatch(name)
    return _DTYPE_LETTER[match[1]] + match[2] + match[3] if match else name


def type_parts(leaf: Leaf) -> tuple[tuple[str, str | None], ...]:
    """Return the type of a leaf as (text, mesh axis or None) pairs, for views that mark axes."""
    parts: list[tuple[str, str | None]] = [(dtype_text(leaf.dtype) + "[", None)]
    for i, (size, axes) in enumerate(zip(leaf.shape, dim_axes(leaf.spec, len(leaf.shape)), strict=True)):
        parts.append((("," if i else "") + str(size), None))
        for j, axis in enumerate(axes):
            parts.append(("," if j else "@(" if len(axes) > 1 else "@", None))
            parts.append((axis, axis))
        if len(axes) > 1:
            parts.append((")", None))
    parts.append(("]", None))
    return tuple(parts)


def type_text(leaf: Leaf) -> str:
    """Return dtype, shape and the mesh axes of each dimension: `f32[50257,768@data]`, `f32[8@(data,model)]`."""
    return "".join(text for text, _ in type_parts(leaf))


def submesh_parts(leaves: Sequence[Leaf]) -> tuple[tuple[str, str | None], ...]:
    """Return the part of the mesh that stores the leaves, as (text, mesh axis or None) pairs.

    Leaves of one stage give `on pipe=2`, leaves of a stage each `on one of pipe=0-3`. Empty for leaves on the whole
    mesh.
    """
    if not leaves or not leaves[0].within:
        return ()
    parts: list[tuple[str, str | None]] = [("on ", None)]
    for i, axis in enumerate(leaves[0].within):
        spans = {leaf.within[axis] for leaf in leaves}
        first, end = next(iter(spans))
        one_of = "" if len(spans) == 1 else f"{'one' if end - first == 1 else end - first} of "
        indices = index_text({n for span in spans for n in range(*span)})
        parts += [((", " if i else "") + one_of, None), (axis, axis), (f"={indices}", None)]
    return tuple((text, axis) for text, axis in parts if text)


def submesh_text(leaves: Sequence[Leaf]) -> str:
    """Return the part of the mesh that stores the leaves, `on pipe=2`; empty for leaves on the whole mesh."""
    return "".join(text for text, _ in submesh_parts(leaves))


def index_text(indices: Iterable[int]) -> str:
    """Return indices as ranges, `0-3,8`; beyond three ranges only the first and the last."""
    pieces = [str(a) if a == b else f"{a}-{b}" for a, b in runs(indices)]
    return ",".join(pieces) if len(pieces) <= 3 else f"{pieces[0]},\u2026,{pieces[-1]}"


def runs(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Return first and last of each run of consecutive ids, ascending: `[0, 1, 2, 5]` -> `[(0, 2), (5, 5)]`."""
    spans: list[tuple[int, int]] = []
    for i in sorted(ids):
        if spans and i == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], i)
        else:
            spans.append((i, i))
    return spans


def device_text(ids: Sequence[int]) -> str:
    """Return device ids in words: `device 0`, `devices 1 to 7`, `62 devices` for more than three ranges."""
    if len(ids) == 1:
        return f"device\u00a0{ids[0]}"
    pieces = [f"{a}" if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs(ids)]
    return f"{count_text(len(ids))} devices" if len(pieces) > 3 else "devices " + ", ".join(pieces)


def printable_lines(code: str) -> str:
    """Return code with several lines; each line passes through `printable`."""
    return "\n".join(map(printable, code.splitlines()))
