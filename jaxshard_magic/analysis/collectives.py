"""What moves between devices: the collectives of a compiled step, by kind, mesh axes, count and bytes."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from ..report import Collective
from .hlo import Computation, Counted, Instruction, Module, read

# What one device sends on a ring of n, as a multiple of the array: a * (n - 1) / n + b.
_RING = {
    "all-gather": (1, 0),
    "all-reduce": (2, 0),
    "reduce-scatter": (1, 0),
    "all-to-all": (1, 0),
    "ragged-all-to-all": (1, 0),
    "collective-permute": (0, 1),
    "collective-broadcast": (0, 1),
}
_OPCODE = re.compile(rf" (?:{'|'.join(_RING)})(?:-start)?\(")
_MESH_AXIS = re.compile(r"'?([^',=\[]+)'?=(\d+)")
_AXIS_REF = re.compile(r"'?([^',:{}]+)'?(?::\((\d+)\)(\d+))?")

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Move:
    """One collective of the program's text, one array of it where XLA combined several.

    `count` is how often it runs per step, at least so where `exact` is False (a loop whose length XLA
    does not know). `axes` is None where the groups match no set of mesh axes, nor parts of one whose devices are
    `apart` places along it from each to the next; `bytes` is the size on one device of the gathered or unreduced
    array. `network`: what one island of the mesh sends to others each time, None where that is not known, or where
    there is but one.
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
    apart: int = 1
    network: int | None = None


class Cause(NamedTuple):
    """What a collective is done for: see the fields of `Collective` with these names."""

    phase: str | None = None
    file: str | None = None
    line: int | None = None
    source: str | None = None
    called: str | None = None
    what: str | None = None
    job: str | None = None


def collectives(hlo_text: str, mesh_axes: Mapping[str, int]) -> tuple[Collective, ...]:
    """The collectives of a compiled step, alike ones merged, those that send most first.

    `hlo_text` is `compiled.as_text()`; `mesh_axes` are the mesh's axes and sizes, in its order. HLO numbers
    devices by their place in the mesh, so the mesh's device ids are not needed.
    """
    return merge((move, Cause()) for move in moves(read(hlo_text), mesh_axes))


def moves(module: Module, mesh_axes: Mapping[str, int], islands: tuple[int, ...] = ()) -> tuple[Move, ...]:
    """Every collective that runs, in the order of the program's text. Those among one device are left out. `islands`:
    for each device of the mesh the part in which it lies, where there are several (`MeshInfo`)."""
    counted = Counted(module)
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
                move = Move(
                    *(kind, axes, size, times.times, nbytes, times.known),
                    *(instruction, name, instruction.operands[k], k, apart),
                    sent_out(kind, groups, size, nbytes, islands),
                )
                every += _strung(module, computation, move) or [move]
    return tuple(every)


class Alike(Protocol):
    """Collectives that are alike, of a compiled program or of a plan; the attributes are those of `Move`."""

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
    def apart(self) -> int: ...

    @property
    def network(self) -> int | None: ...


def merge(
    caused: Iterable[tuple[Alike, Cause]],
    takes: Sequence[float] | None = None,
    waits: Sequence[float] | None = None,
) -> tuple[Collective, ...]:
    """Merge moves that are alike in all but what they move by adding their counts. Where that is known, `takes`:
    seconds of a step that each of them is on the links; `waits`: those that a device waits for it."""
    counts = Counter[Collective]()
    took, waited = defaultdict[Collective, float](float), defaultdict[Collective, float](float)
    moved: dict[Collective, set[str]] = {}
    for k, (move, cause) in enumerate(caused):
        alike = Collective(
            *(move.kind, move.axes, move.group_size, 0, move.bytes, 0),
            exact=move.exact,
            apart=move.apart,
            network_bytes=move.network,
            **cause._replace(what=None)._asdict(),
        )
        counts[alike] += move.count
        took[alike] += 0.0 if takes is None else takes[k]
        waited[alike] += 0.0 if waits is None else waits[k]
        moved.setdefault(alike, set()).update({cause.what} if cause.what else ())
    merged = [
        replace(
            alike,
            count=n,
            wire_bytes=wire_bytes(alike.kind, alike.group_size, n * alike.bytes),
            network_bytes=None if alike.network_bytes is None else n * alike.network_bytes,
            what=_listed(sorted(moved[alike])),
            seconds=None if takes is None else took[alike],
            exposed=None if waits is None else waited[alike],
        )
        for alike, n in counts.items()
    ]
    return tuple(sorted(merged, key=lambda c: (-c.wire_bytes, c.kind, c.axes or (), c.bytes, c.line or 0)))


def _listed(names: Sequence[str]) -> str | None:
    """`gradient of block0.q and 5 more`."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return names[0] + more if names else None


def wire_bytes(kind: str, group_size: int, size: int) -> int:
    """What one device of a ring of `group_size` sends for a collective on `size` bytes.

    An all-reduce is a reduce-scatter and an all-gather, each of which sends (n - 1) / n of the array (Thakur,
    Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 4).

    >>> wire_bytes("all-reduce", 4, 1000)
    1500
    """
    a, b = _RING[kind]
    return (2 * a * size * (group_size - 1) + group_size) // (2 * group_size) + b * size


def _collectives_of(computation: Computation) -> Iterator[tuple[Instruction, str]]:
    if not _OPCODE.search(computation.text):
        return
    for instruction in computation.instructions.values():
        kind = instruction.opcode.removesuffix("-start")
        if kind not in _RING or instruction.attribute("calls") or _continues(computation, instruction):
            continue
        # TPU runs an all-reduce and the slice after it as one reduce-scatter, in a fusion of this name.
        scattered = kind == "all-reduce" and computation.name.startswith("all-reduce-scatter")
        yield instruction, "reduce-scatter" if scattered else kind


def _continues(computation: Computation, instruction: Instruction) -> bool:
    """TPU repeats a collective in the fusions that start, step and finish it: only the first counts."""
    if 'chain_id="' not in instruction.rest:
        return False
    starts = (i.attributes for i in computation.instructions.values() if i.opcode == "custom-call")
    return not any('custom_call_target="AsyncCollectiveStart"' in attributes for attributes in starts)


def _sizes(computation: Computation, instruction: Instruction, kind: str, group_size: int) -> list[int]:
    """Bytes of every array that the collective moves."""
    operands = [computation.instructions[name].shapes for name in instruction.operands]
    sizes = [sum(shape.bytes for shape in shapes) for shapes in operands]
    if kind == "all-gather":
        return [group_size * size for size in sizes]
    if kind == "all-to-all":  # its operands are the pieces of one array
        return [sum(sizes)]
    if kind == "ragged-all-to-all":  # the array to send; then the output and the offsets
        return sizes[:1]
    return sizes


def _strung(module: Module, computation: Computation, move: Move) -> list[Move]:
    """The arrays of a reduction that the compiler has concatenated, as GPU's does; none where it has not."""
    made = computation.instructions.get(move.operand)
    if move.kind not in ("all-reduce", "reduce-scatter") or made is None:
        return []
    names = list(made.operands)
    if made.opcode == "fusion":
        body = module.named(made.attribute("calls"))
        root = body.root if body else None
        inside = [body.instructions.get(name) for name in root.operands] if body and root else []
        if (
            root is None
            or root.opcode != "concatenate"
            or any(i is None or i.opcode != "parameter" for i in inside)
        ):
            return []
        names = [made.operands[int(i.rest.partition(")")[0])] for i in inside if i is not None]
    elif made.opcode != "concatenate":
        return []
    sizes = [sum(shape.bytes for shape in computation.instructions[name].shapes) for name in names]
    if len(names) < 2 or sum(sizes) != move.bytes:
        return []
    return [
        replace(move, bytes=size, operand=name, position=None)
        for name, size in zip(names, sizes, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class _Groups:
    """Who talks to whom, by place in the mesh: groups, or of a permutation (source, target) each. One object for each
    text, so that what is found out of it is kept by that and not by thousands of places."""

    permuted: bool
    of: Groups


def _groups_of(module: Module, instruction: Instruction, kind: str) -> _Groups:
    if kind == "collective-permute":
        return _pairs(instruction.attribute("source_target_pairs") or "")
    text = instruction.attribute("replica_groups") or ""
    if text.startswith("mesh") and "{" not in text:
        text += instruction.attribute("device_ids") or ""
    # Without global ids the groups name replicas, each with all its partitions.
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
    """Mesh axes that a collective runs over, None where they can't be told, the size of its groups, and how many places
    along them its devices are apart."""
    sizes, names = tuple(mesh_axes.values()), tuple(mesh_axes)
    index, size, apart = _along(groups, sizes)
    return (None if index is None else tuple(names[i] for i in index)), size, apart


@lru_cache(1024)
def _along(groups: _Groups, mesh: tuple[int, ...]) -> tuple[tuple[int, ...] | None, int, int]:
    return (_permuted if groups.permuted else _grouped)(groups.of, mesh)


def _grouped(groups: Groups, mesh: tuple[int, ...]) -> tuple[tuple[int, ...] | None, int, int]:
    """Positions of the mesh axes that the groups run over, their size, and how many places along the axes their devices
    are apart: 1 where they are all of the axes' devices."""
    size = max(map(len, groups))
    if math.prod(mesh) != sum(map(len, groups)) or {d for g in groups for d in g} != set(
        range(math.prod(mesh))
    ):
        return None, size, 1
    place = np.stack(np.unravel_index(np.array(groups[0]), mesh))
    index = tuple(i for i in range(len(mesh)) if len(set(place[i].tolist())) > 1)
    rest = [i for i in range(len(mesh)) if i not in index]
    along = math.prod(mesh[i] for i in index)
    expected, apart = np.arange(math.prod(mesh)).reshape(mesh).transpose(*rest, *index), 1
    if len(index) == 1 and size < along and along % size == 0:  # parts of one axis
        apart = int(np.diff(np.sort(place[index[0]]))[0])
        if along % (size * apart):
            return None, size, 1
        expected = expected.reshape(-1, size, apart).swapaxes(1, 2)
        along = size
    same = {frozenset(g) for g in groups} == {frozenset(g) for g in expected.reshape(-1, along).tolist()}
    return (index, size, apart) if same else (None, size, 1)


def _permuted(pairs: Groups, mesh: tuple[int, ...]) -> tuple[tuple[int, ...] | None, int, int]:
    """Positions of the mesh axes along which source and target differ, how many devices those hold, and that this is
    all of them."""
    ends = np.array(pairs, dtype=int).reshape(-1, 2)
    if ends.size and ends.max() >= math.prod(mesh):
        return None, len(set(ends.ravel().tolist())), 1
    source, target = (np.stack(np.unravel_index(side, mesh)) for side in ends.T)
    index = tuple(i for i in range(len(mesh)) if (source[i] != target[i]).any())
    return index, math.prod(mesh[i] for i in index), 1


def sent_out(kind: str, groups: _Groups, size: int, nbytes: int, islands: tuple[int, ...]) -> int | None:
    """What one island sends to others for one collective, that which sends most; None where there is but one.

    A ring that goes through each island once takes out of it what a single device sends: once for every group that goes
    beyond it. In an all-to-all of n each of the m members that are together on an island sends every other device its
    n-th part.
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
    """Of the island from which most is sent: the groups, or the pairs, that leave it; and the parts of an array that
    its devices send to others in an all-to-all. None for groups of places that the mesh has not."""
    if any(place >= len(islands) for group in groups.of for place in group):
        return None
    crossing = Counter[int]()
    parts: dict[int, Fraction] = defaultdict(Fraction)
    for group in groups.of:
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
    """The groups of devices in any of HLO's four textual forms; none stands for one group of all.

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
    """`mesh['a'=4,'b'=2] {'a'}`, with `device_ids=(...)` where the devices are not in order, and parts
    of axes as `'a':(2)2`: the factor 2 of axis a that has 2 before it."""
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
    """`[4,2]T(1,0)`: the numbers from 0 in that shape, transposed."""
    text = text.rpartition("<=")[2]
    shape, _, order = text.partition("T")
    numbers = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return numbers.transpose(_ints(order)) if order else numbers


def _lists(text: str) -> list[tuple[int, ...]]:
    return [tuple(_ints(group)) for group in re.findall(r"\{([\d, ]+)\}", text)]


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
