"""Advice on layouts: leaves that could not be sharded, replicated leaves, and unused mesh axes."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...program.trace import is_closed_over
from ...report import Advice, Leaf, MeshInfo
from ...report.device_leaves import devices_per_axis, replicated_bytes, stored_bytes
from ...units import byte_text
from .case import Case, all_divide, axes_of, devices_along, entry_axes

LARGE = 2**14  # elements; strategies replicate smaller leaves on purpose
SHARE = 0.01  # share of the bytes stored on a device; less is no warning
GROUPS = 5  # groups of similar leaves with advice of their own; the other leaves are counted
PADDING = 1.05  # padded size over size of a dimension; above it another mesh is the better fix


def unsharded_leaves(case: Case) -> Iterator[Advice]:
    """Advise on leaves sharded over fewer axes than the strategy requested, with similar leaves grouped."""
    leaves, mesh = case.leaves, case.mesh
    groups = _alike([leaf for leaf in leaves if leaf.wanted])
    groups.sort(key=lambda group: -replicated_bytes(group))
    stored = stored_bytes(leaves)
    for group in groups[:GROUPS]:
        first, more = group[0], replicated_bytes(group)
        parts, axes = math.prod(mesh.axes[a] for a in first.wanted), "+".join(first.wanted)
        sizes = " x ".join(map(str, first.shape))
        also = f"With {len(group) - 1} more like it" if len(group) > 1 else "So"
        upto = "" if sum(leaf.lost for leaf in group) == more else "up to "
        near = _padded(first, mesh)
        cause = f"no dimension of {sizes} is left that divides by {parts}" if near is None else near.describe()
        message = (
            f"{first.path} is not cut over {axes}: {cause}. "
            f"{also} every device{_mesh_part_text(group)} keeps {upto}{byte_text(more)} more than planned."
        )
        level = "warning" if more >= SHARE * stored else "info"
        yield Advice("not-cut", level, message, _fix(case, group), _part(case, more))
    rest = [leaf for group in groups[GROUPS:] for leaf in group]
    if rest:
        where = "the fullest device" if any(leaf.within for leaf in rest) else "every device"
        more = byte_text(replicated_bytes(rest))
        yield Advice("not-cut", "info", f"{len(rest)} more leaves are not cut as planned, {more} more on {where}.")


def _mesh_part_text(group: Sequence[Leaf]) -> str:
    """Return the part of the mesh with the leaves, ` of pipe=2` or ` of pipe=0-3`; leaves differ in their stage
    alone."""
    told = []
    for axis in group[0].within:
        first, end = (pick(leaf.within[axis][i] for leaf in group) for i, pick in ((0, min), (1, max)))
        told.append(f"{axis}={first}" + f"-{end - 1}" * (end - first > 1))
    return f" of {' '.join(told)}" if told else ""


def _fix(case: Case, group: list[Leaf]) -> str | None:
    """Return the cheapest change that shards the group: another dimension, or another mesh."""
    first = group[0]
    for axes in (first.wanted, *((a,) for a in first.wanted)):
        if rule := case.usable_fix(_rule(group, case.leaves, case.mesh, axes)):
            return rule
    near = _padded(first, case.mesh)
    # Where a few more rows would make the dimension divide, padding is better than another mesh.
    return None if near is not None and near.growth <= PADDING else _other_mesh(case, first)


def _rule(group: list[Leaf], leaves: Sequence[Leaf], mesh: MeshInfo, axes: tuple[str, ...]) -> str | None:
    """Return a rule that shards the group over `axes` as well; None where no dimension divides."""
    first = group[0]
    free = [a for a in axes if a not in axes_of(first.spec)]
    fitting = [
        d
        for d, size in enumerate(first.shape)
        # In most steps the first of three or more dimensions counts the layers of a scan: sharding it would send every
        # layer at every trip.
        if (d or len(first.shape) < 3)
        and size % devices_along(devices_per_axis(first, mesh.axes), (*entry_axes(first.spec[d]), *free)) == 0
    ]
    if not fitting or not free:
        return None
    d = max(fitting, key=lambda d: (first.spec[d] is None, first.shape[d]))
    entries = [entry_axes(entry) for entry in first.spec]
    entries[d] = (*entries[d], *free)
    spec = ",".join(repr(e[0]) if len(e) == 1 else repr(e or None).replace(" ", "") for e in entries)
    return f'--rule "{_pattern(group, leaves)}=P({spec})"'


def _pattern(group: list[Leaf], leaves: Sequence[Leaf]) -> str:
    """Return a regular expression for exactly the leaves of `group`, on the end of their paths where possible."""
    paths = [leaf.path for leaf in group]
    keys = paths[0].split(".")
    for n in range(1, len(keys) + 1):
        end = _escaped(".".join(keys[-n:])) + "$"
        for pattern in (end, f"(^|[.]){end}"):
            if [leaf.path for leaf in leaves if re.search(pattern, leaf.path)] == paths:
                return pattern
    return "|".join(f"^{_escaped(p)}$" for p in paths)


def _escaped(path: str) -> str:
    """Return a path as a regular expression with dots for special characters."""
    # A backslash would have to survive the notebook's quoting.
    return re.sub(r"[^\w.\-]", ".", path)


class _Padded(NamedTuple):
    """Dimension that does not divide, and the padded size.

    Attributes:
        growth: Padded size over size.
        size: Size of the dimension.
        parts: Number of shards.
        padded: Next size divisible by `parts`.
    """

    growth: float
    size: int
    parts: int
    padded: int

    def describe(self) -> str:
        return f"{self.size} does not divide by {self.parts}; {self.padded} would"


def _padded(leaf: Leaf, mesh: MeshInfo) -> _Padded | None:
    """Return the dimension that needs least growth to divide; None where all divide."""
    options = []
    for size, entry in zip(leaf.shape, leaf.spec, strict=True):
        parts = devices_along(devices_per_axis(leaf, mesh.axes), (*entry_axes(entry), *leaf.wanted))
        padded = -(-size // parts) * parts
        if size and padded > size:
            options.append(_Padded(padded / size, size, parts, padded))
    return min(options, default=None)


def _other_mesh(case: Case, leaf: Leaf) -> str | None:
    """Return the option for a mesh of equal size with fewer devices along the axis that does not divide."""
    axis, leaves, mesh = leaf.wanted[-1], case.leaves, case.mesh
    others = [a for a in mesh.axes if a != axis and not any(a in x.within for x in leaves)]
    for size in range(mesh.axes[axis] - 1, 1, -1):
        if mesh.axes[axis] % size:
            continue
        for other in others:
            axes = {**mesh.axes, axis: size}
            axes[other] *= mesh.axes[axis] // size
            cuts = any(
                n % devices_along(devices_per_axis(leaf, axes), (*entry_axes(e), *leaf.wanted)) == 0
                for n, e in zip(leaf.shape, leaf.spec, strict=True)
            )
            if cuts and all_divide(leaves, axes) and (option := case.on_mesh(axes)):
                return option
    return None


def idle(case: Case) -> Iterator[Advice]:
    """Advise on mesh axes along which all devices do the same work."""
    if not case.idle_axes:
        return
    same = devices_along(case.mesh.axes, case.idle_axes)
    message = f"Nothing uses {' and '.join(case.idle_axes)}: {same} devices at a time do the same work."
    yield Advice("idle-axis", "warning", message, _busy(case))


def _busy(case: Case) -> str | None:
    """Return a fix for idle axes: examples sharded over them where they divide, else a mesh without idle axes."""
    axis, axes = case.idle_axes[0], {a: n for a, n in case.mesh.axes.items() if a not in case.idle_axes}
    # Tensor parallelism shards features of the batch, not examples.
    features = case.jobs.get("tp", ())
    over = [a for leaf in case.batch for a in case.mesh.axes if a in axes_of(leaf.spec) and a not in features]
    if over:
        wider = axes | {over[0]: axes[over[0]] * devices_along(case.mesh.axes, case.idle_axes)}
        return case.on_mesh(wider if all_divide(case.leaves, wider) else axes)
    divides = [leaf for leaf in case.batch if leaf.shape and leaf.shape[0] % case.mesh.axes[axis] == 0]
    if divides and case.strategy == "spmd":
        return case.usable_fix(f"--spec \"{divides[0].path.split('.')[0]}=P('{axis}')\"")
    # These strategies have axes for the examples already.
    if divides and not {"dp", "fsdp", "pmap"} & case.jobs.keys():
        return case.usable_fix(f"%%shard {case.strategy}+dp@{axis}")
    return case.on_mesh(axes) if axes else None


def replicated_leaves(case: Case) -> Iterator[Advice]:
    """Advise on large replicated leaves, where others of their role are sharded and the user chose no spec.

    Division over the stages of a pipeline does not count as sharding.
    """
    leaves, mesh, given, stages = case.leaves, case.mesh, case.user_spec_paths, case.stage_axes
    used = {leaf.role: Counter[frozenset[str]]() for leaf in leaves}
    for leaf in leaves:
        if axes := axes_of(leaf.spec) - stages:
            used[leaf.role][frozenset(axes)] += 1
    stored = stored_bytes(leaves)
    silent = [
        leaf
        for leaf in leaves
        if used[leaf.role] and not axes_of(leaf.spec) - stages
        if not leaf.wanted and leaf.path not in given
        if math.prod(leaf.shape) >= LARGE and leaf.bytes >= SHARE * stored
    ]
    groups = sorted(_alike(silent), key=lambda group: -sum(leaf.bytes for leaf in group))
    for group in groups[:GROUPS]:
        axes = used[group[0].role].most_common(1)[0][0]
        fix = case.usable_fix(_rule(group, leaves, mesh, tuple(a for a in mesh.axes if a in axes)))
        size = byte_text(stored_bytes(group))
        takes = f"With {len(group) - 1} more like it, it takes" if len(group) > 1 else "It takes"
        where = f"every device{_mesh_part_text(group)}"
        message = f"{group[0].path} lies whole on {where}: {group[0].why}. {takes} {size} there."
        if is_closed_over(group[0].path):
            message += " The step closes over it: as an argument it can be cut."
            fix = None
        yield Advice("whole", "info", message, fix, _part(case, stored_bytes(group)))


def _part(case: Case, n: int) -> float | None:
    """Return `n` bytes as a share of the fullest device's peak."""
    peaks = [device.peak for device in (case.memory.per_device if case.memory else ()) if device.peak]
    return n / max(peaks) if peaks else None


def _alike(leaves: Sequence[Leaf]) -> list[list[Leaf]]:
    """Return leaves grouped by shape, spec and requested axes, over all stages: a parameter with its moments, repeated
    layers."""
    groups: dict[tuple, list[Leaf]] = {}
    for leaf in leaves:
        # Only the length of a range counts: equal layers may be on different stages.
        parts = tuple((axis, end - first) for axis, (first, end) in leaf.within.items())
        key = leaf.shape, leaf.spec, parts, leaf.wanted, leaf.role == "batch", is_closed_over(leaf.path)
        groups.setdefault(key, []).append(leaf)
    return list(groups.values())
