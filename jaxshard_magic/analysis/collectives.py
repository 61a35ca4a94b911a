"""List the collectives of a compiled step by kind, mesh axes, count and bytes."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from ..plan import RING_FACTORS, wire_bytes
from ..report import Collective
from .hlo import Computation, Instruction, Module, RunCounts, parse_module

_OPCODE = re.compile(rf" (?:{'|'.join(RING_FACTORS)})(?:-start)?\(")
_MESH_AXIS = re.compile(r"'?([^',=\[]+)'?=(\d+)")
_AXIS_REF = re.compile(r"'?([^',:{}]+)'?(?::\((\d+)\)(\d+))?")

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class HloCollective:
    """Collective in the text of a program, one object for each array if XLA combined several.

    Attributes:
        kind: Opcode without "-start".
        axes: Mesh axes spanned by the device groups; None if the groups match no set of mesh axes and no part of an
            axis.
        group_size: Number of devices in a group.
        count: Number of runs in a step; a lower bound if not `exact`.
        bytes: Bytes on one device of the gathered or unreduced array.
        exact: False inside a loop of a length unknown to XLA.
        instruction: Instruction in the program.
        computation: Name of the computation with the instruction.
        operand: Name of the moved operand.
        position: Position of the operand; None for one part of a concatenated operand.
        stride: Distance along the axis between neighbours of a group; above 1 where a group skips devices of the axis.
        network: Bytes sent by one island of the mesh to others in each run; None if unknown, or with a single island.
    """

    kind: str
    axes: tuple[str, ...] | None
    group_size: int
    count: int
    bytes: int
    exact: bool
    instruction: Instruction
    computation: str
    operand: str
    position: int | None = 0
    stride: int = 1
    network: int | None = None


class Cause(NamedTuple):
    """Reason for a collective. Fields equal the fields of `report.Collective` with the same names."""

    phase: str | None = None
    file: str | None = None
    line: int | None = None
    source: str | None = None
    called: str | None = None
    what: str | None = None
    job: str | None = None


def collectives(hlo_text: str, mesh_axes: Mapping[str, int]) -> tuple[Collective, ...]:
    """Return the merged collectives of a compiled step, largest senders first.

    Args:
        hlo_text: Output of `compiled.as_text()`.
        mesh_axes: Axis sizes by name, in the order of the mesh. HLO numbers devices by position in the mesh, so device
            ids are not needed.
    """
    return merge((move, Cause()) for move in module_collectives(parse_module(hlo_text), mesh_axes))


def module_collectives(
    module: Module, mesh_axes: Mapping[str, int], islands: tuple[int, ...] = ()
) -> tuple[HloCollective, ...]:
    """Return all collectives that run, in the order of the text, except those among one device.

    Args:
        module: Parsed program.
        mesh_axes: Axis sizes by name, in the order of the mesh.
        islands: Island (host, node or slice) of each device of the mesh, as in `MeshInfo`; empty with a single island.
    """
    counted = RunCounts(module)
    every = []
    for name, computation in module.computations.items():
        for instruction, kind in _collectives_of(computation):
            times = counted[name]
            if not times.times:
                break
            groups = _groups_of(module, instruction, kind)
            axes, size, apart = _axes_of(groups, mesh_axes)
            if size < 2:
                continue
            for k, nbytes in enumerate(_sizes(computation, instruction, kind, size)):
                move = HloCollective(
                    *(kind, axes, size, times.times, nbytes, times.known),
                    *(instruction, name, instruction.operands[k], k, apart),
                    bytes_leaving_island(kind, groups, size, nbytes, islands),
                )
                every += _split_concatenated(module, computation, move) or [move]
    return tuple(every)


class CollectiveLike(Protocol):
    """Collective of a compiled program or of a plan; attributes as in the collectives of a program."""

    @property
    def kind(self) -> str: ...

    @property
    def axes(self) -> tuple[str, ...] | None: ...

    @property
    def group_size(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def exact(self) -> bool: ...

    @property
    def stride(self) -> int: ...

    @property
    def network(self) -> int | None: ...


def merge(
    caused: Iterable[tuple[CollectiveLike, Cause]],
    takes: Sequence[float] | None = None,
    waits: Sequence[float] | None = None,
) -> tuple[Collective, ...]:
    """Merge collectives that differ only in the moved array, and add up their counts.

    Args:
        caused: Collectives, each with the reason.
        takes: Seconds on the links in a step, for each collective; None if unknown.
        waits: Seconds a device waits in a step, for each collective; None if unknown.

    Returns:
        Rows of a report, largest senders first.
    """
    counts = Counter[Collective]()
    link_seconds, wait_seconds = defaultdict[Collective, float](float), defaultdict[Collective, float](float)
    moved: dict[Collective, set[str]] = {}
    for k, (move, cause) in enumerate(caused):
        key = Collective(
            *(move.kind, move.axes, move.group_size, 0, move.bytes, 0),
            exact=move.exact,
            apart=move.stride,
            network_bytes=move.network,
            **cause._replace(what=None)._asdict(),
        )
        counts[key] += move.count
        link_seconds[key] += 0.0 if takes is None else takes[k]
        wait_seconds[key] += 0.0 if waits is None else waits[k]
        moved.setdefault(key, set()).update({cause.what} if cause.what else ())
    merged = [
        replace(
            alike,
            count=n,
            wire_bytes=wire_bytes(alike.kind, alike.group_size, n * alike.bytes),
            network_bytes=None if alike.network_bytes is None else n * alike.network_bytes,
            what=_listed(sorted(moved[alike])),
            seconds=None if takes is None else link_seconds[alike],
            exposed=None if waits is None else wait_seconds[alike],
        )
        for alike, n in counts.items()
    ]
    return tuple(sorted(merged, key=lambda c: (-c.wire_bytes, c.kind, c.axes or (), c.bytes, c.line or 0)))


def _listed(names: Sequence[str]) -> str | None:
    """Return the first name and the number of others: `gradient of block0.q and 5 more`."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return names[0] + more if names else None


def _collectives_of(computation: Computation) -> Iterator[tuple[Instruction, str]]:
    # Most computations have no collective, and searching their text is faster than parsing it.
    if not _OPCODE.search(computation.text):
        return
    for instruction in computation.instructions.values():
        kind = instruction.opcode.removesuffix("-start")
        if kind not in RING_FACTORS or instruction.attribute("calls") or _is_continuation(computation, instruction):
            continue
        # TPU runs an all-reduce and the slice after it as one reduce-scatter, in a fusion of this name.
        scattered = kind == "all-reduce" and computation.name.startswith("all-reduce-scatter")
        yield instruction, "reduce-scatter" if scattered else kind


def _is_continuation(computation: Computation, instruction: Instruction) -> bool:
    """Return whether an instruction repeats a collective counted elsewhere."""
    # TPU repeats a collective in each of the fusions that start, step and finish it: only the first counts.
    if 'chain_id="' not in instruction.rest:
        return False
    starts = (i.attributes for i in computation.instructions.values() if i.opcode == "custom-call")
    return not any('custom_call_target="AsyncCollectiveStart"' in attributes for attributes in starts)


def _sizes(computation: Computation, instruction: Instruction, kind: str, group_size: int) -> list[int]:
    """Return the bytes of every array moved by a collective."""
    operands = [computation.instructions[name].shapes for name in instruction.operands]
    sizes = [sum(shape.bytes for shape in shapes) for shapes in operands]
    if kind == "all-gather":
        return [group_size * size for size in sizes]
    if kind == "all-to-all":  # the operands are the pieces of one array
        return [sum(sizes)]
    if kind == "ragged-all-to-all":  # the first operand is sent; the others are the output and the offsets
        return sizes[:1]
    return sizes


def _split_concatenated(module: Module, computation: Computation, move: HloCollective) -> list[HloCollective]:
    """Return the parts of a reduction over concatenated arrays; empty for any other collective."""
    made = computation.instructions.get(move.operand)
    if move.kind not in ("all-reduce", "reduce-scatter") or made is None:
        return []
    # GPU's compiler concatenates gradients before one all-reduce, in an instruction of its own or at the end of a
    # fusion.
    names = list(made.operands)
    if made.opcode == "fusion":
        body = module.find_computation(made.attribute("calls"))
        root = body.root if body else None
        inside = [body.instructions.get(name) for name in root.operands] if body and root else []
        if root is None or root.opcode != "concatenate" or any(i is None or i.opcode != "parameter" for i in inside):
            return []
        names = [made.operands[int(i.rest.partition(")")[0])] for i in inside if i is not None]
    elif made.opcode != "concatenate":
        return []
    sizes = [sum(shape.bytes for shape in computation.instructions[name].shapes) for name in names]
    if len(names) < 2 or sum(sizes) != move.bytes:
        return []
    return [replace(move, bytes=size, operand=name, position=None) for name, size in zip(names, sizes, strict=True)]


@dataclass(frozen=True, eq=False)
class _Groups:
    """Communicating devices, by position in the mesh.

    Attributes:
        permuted: True for a permutation.
        members: Groups of devices, or the (source, target) pairs of a permutation.
    """

    # Compared by identity, with one object per text: caches below hash an object, not thousands of device positions.
    permuted: bool
    members: Groups


def _groups_of(module: Module, instruction: Instruction, kind: str) -> _Groups:
    if kind == "collective-permute":
        return _pairs(instruction.attribute("source_target_pairs") or "")
    text = instruction.attribute("replica_groups") or ""
    if text.startswith("mesh") and "{" not in text:
        text += instruction.attribute("device_ids") or ""
    # With a channel but without global device ids, groups name replicas, each with all of its partitions.
    local = "use_global_device_ids=true" not in instruction.rest and "channel_id=" in instruction.rest
    spread = module.partitions if local and kind in ("all-gather", "all-reduce", "reduce-scatter") else 1
    return _all_groups(text, module.replicas * module.partitions, spread)


@lru_cache(1024)
def _pairs(text: str) -> _Groups:
    return _Groups(True, tuple(_lists(text)))


@lru_cache(1024)
def _all_groups(text: str, devices: int, spread: int) -> _Groups:
    groups = replica_groups(text) or (tuple(range(devices // spread)),)
    if spread > 1:
        groups = tuple(tuple(r * spread + p for r in group for p in range(spread)) for group in groups)
    return _Groups(False, groups)


def _axes_of(groups: _Groups, mesh_axes: Mapping[str, int]) -> tuple[tuple[str, ...] | None, int, int]:
    """Return the mesh axes spanned by the groups, the group size, and the stride of a group along the axis.

    Axes are None if unknown.
    """
    sizes, names = tuple(mesh_axes.values()), tuple(mesh_axes)
    index, size, apart = _along(groups, sizes)
    return (None if index is None else tuple(names[i] for i in index)), size, apart


@lru_cache(1024)
def _along(groups: _Groups, mesh: tuple[int, ...]) -> tuple[tuple[int, ...] | None, int, int]:
    return (_axes_of_pairs if groups.permuted else _axes_of_groups)(groups.members, mesh)


def _axes_of_groups(groups: Groups, mesh: tuple[int, ...]) -> tuple[tuple[int, ...] | None, int, int]:
    """Return the positions of the mesh axes spanned by the groups, the group size, and the stride along the axis.

    The stride is 1 for groups of all devices along the axes.
    """
    size = max(map(len, groups))
    if math.prod(mesh) != sum(map(len, groups)) or {d for g in groups for d in g} != set(range(math.prod(mesh))):
        return None, size, 1
    # HLO numbers devices by position in the mesh.
    coordinates = np.stack(np.unravel_index(np.array(groups[0]), mesh))
    index = tuple(i for i in range(len(mesh)) if len(set(coordinates[i].tolist())) > 1)
    other_axes = [i for i in range(len(mesh)) if i not in index]
    along = math.prod(mesh[i] for i in index)
    expected, apart = np.arange(math.prod(mesh)).reshape(mesh).transpose(*other_axes, *index), 1
    if len(index) == 1 and size < along and along % size == 0:  # groups span parts of one axis
        apart = int(np.diff(np.sort(coordinates[index[0]]))[0])
        if along % (size * apart):
            return None, size, 1
        expected = expected.reshape(-1, size, apart).swapaxes(1, 2)
        along = size
    same = {frozenset(g) for g in groups} == {frozenset(g) for g in expected.reshape(-1, along).tolist()}
    return (index, size, apart) if same else (None, size, 1)


def _axes_of_pairs(pairs: Groups, mesh: tuple[int, ...]) -> tuple[tuple[int, ...] | None, int, int]:
    """Return the positions of the mesh axes along which source and target differ, the number of devices on them, and
    stride 1."""
    ends = np.array(pairs, dtype=int).reshape(-1, 2)
    if ends.size and ends.max() >= math.prod(mesh):
        return None, len(set(ends.ravel().tolist())), 1
    source, target = (np.stack(np.unravel_index(side, mesh)) for side in ends.T)
    index = tuple(i for i in range(len(mesh)) if (source[i] != target[i]).any())
    return index, math.prod(mesh[i] for i in index), 1


def bytes_leaving_island(kind: str, groups: _Groups, size: int, nbytes: int, islands: tuple[int, ...]) -> int | None:
    """Return the bytes sent by one island to others in one collective, for the island sending most.

    A ring passing each island once takes as many bytes out of an island as one device sends, for every group that
    leaves the island. In an all-to-all among n devices, with m on an island, each of the m sends an n-th part to every
    device outside.

    Args:
        kind: Opcode without "-start".
        groups: Communicating devices.
        size: Group size.
        nbytes: Bytes of the gathered or unreduced array.
        islands: Island of each device.

    Returns:
        None with a single island, and for groups with a position outside of the mesh.
    """
    leaving = _leaving(groups, islands) if islands else None
    if leaving is None:
        return None
    crossing, share = leaving
    if groups.permuted:
        return crossing * nbytes
    if kind in ("all-to-all", "ragged-all-to-all"):
        return int(share * nbytes)
    return crossing * wire_bytes(kind, size, nbytes)


@lru_cache(1024)
def _leaving(groups: _Groups, islands: tuple[int, ...]) -> tuple[int, Fraction] | None:
    """Return the number of groups (or pairs) leaving an island, and the array parts sent to others in an all-to-all.

    Both are maxima over islands. None if a group has a position outside of the mesh.
    """
    if any(place >= len(islands) for group in groups.members for place in group):
        return None
    crossing = Counter[int]()
    parts: dict[int, Fraction] = defaultdict(Fraction)
    for group in groups.members:
        here = Counter(islands[place] for place in group)
        if len(here) < 2:
            continue
        if groups.permuted:
            crossing[islands[group[0]]] += 1
            continue
        for island, members in here.items():
            crossing[island] += 1
            parts[island] += Fraction(members * (len(group) - members), len(group))
    return max(crossing.values(), default=0), max(parts.values(), default=Fraction(0))


def replica_groups(text: str) -> Groups:
    """Parse device groups in any of the four textual forms of HLO; empty for one group of all devices.

    >>> replica_groups("[2,4]<=[4,2]T(1,0)")
    ((0, 2, 4, 6), (1, 3, 5, 7))
    """
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if text.startswith("["):
        shape, _, source = text.partition("<=")
        return tuple(map(tuple, _iota(source).reshape(_ints(shape)).tolist()))
    return tuple(_lists(text))


def _mesh_groups(text: str) -> Groups:
    """Parse groups of the form `mesh['a'=4,'b'=2] {'a'}`.

    `device_ids=(...)` gives the order of the devices. `'a':(2)2` is a part of axis a: the factor 2 after a factor 2.
    """
    head, _, tail = text.partition("]")
    axes = {name: int(size) for name, size in _MESH_AXIS.findall(head.partition("[")[2])}
    ids_text, _, listed = tail.rpartition("{")
    shape, chosen, names = [], [], list(axes)
    parts = {name: [] for name in names}
    for name, before, size in _AXIS_REF.findall(listed.partition("}")[0]):
        parts[name].append((int(before or 1), int(size or axes[name])))
    for name, total in axes.items():
        done = 1
        for before, size in sorted(parts[name]):
            chosen.append(len(shape) + 1)
            shape += [before // done, size]
            done = before * size
        shape.append(total // done)
    numbers = _iota(ids_text) if "T(" in ids_text else np.array(_ints(ids_text), dtype=int)
    ids = (numbers if numbers.size else np.arange(math.prod(axes.values()))).reshape(shape)
    rest = [i for i in range(len(shape)) if i not in chosen]
    size = math.prod(shape[i] for i in chosen)
    return tuple(map(tuple, ids.transpose(*rest, *chosen).reshape(-1, size).tolist()))


def _iota(text: str) -> np.ndarray:
    """Parse `[4,2]T(1,0)`: the numbers from 0 in the first shape, transposed."""
    text = text.rpartition("<=")[2]
    shape, _, order = text.partition("T")
    numbers = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return numbers.transpose(_ints(order)) if order else numbers


def _lists(text: str) -> list[tuple[int, ...]]:
    return [tuple(_ints(group)) for group in re.findall(r"\{([\d, ]+)\}", text)]


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
