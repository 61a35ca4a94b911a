"""What carries each axis of a mesh of chips: links inside a node or slice, the network between them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations

from .errors import ShardError
from .hardware import Chip, Link
from .units import rate_text

TORUS = {"torus2d": 2, "torus3d": 3}
# Seconds from one device to the next, whatever the size. TPU: 8 us measured over 3 hops of a v5e
# (https://jax-ml.github.io/scaling-book/sharding/, "A note on ICI latency", whose rule of thumb is 1 us). GPU: what
# NCCL reckons with for a ring, `hwLat` and `baseLat` of https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc.
HOP = {"torus2d": 8e-6 / 3, "torus3d": 8e-6 / 3, "switch": 3.4e-6, "cube": 3.4e-6, "pcie": 5.7e-6}
NETWORK_HOP = {"tpu": 0.0, "gpu": 9.6e-6}  # none is published between slices
START = {"tpu": 0.0, "gpu": 8.4e-6}  # of each collective


@dataclass(frozen=True)
class Wire:
    """What carries a mesh axis: `bandwidth` is the bytes/s that one device sends, None where no figure is known;
    `why` says what was assumed. `latency`: seconds that a collective takes along it however little it sends, the hops
    from end to end one after the other, of which there are `hops`; `hop`: of one of them. `parts`: the wires of rings
    over a part of the axis, by their devices and how many places along it these are apart."""

    name: str
    bandwidth: float | None
    why: str
    latency: float = 0.0
    hop: float = 0.0
    hops: int = 0
    parts: Mapping[tuple[int, int], "Wire"] = field(default_factory=dict, compare=False, repr=False)

    @property
    def way(self) -> str:
        """How a collective goes along it: `ICI ring, both directions, 90 GB/s; 2 hops from end to end`."""
        return (
            f"{self.why}; {self.hops} hop{'s' * (self.hops != 1)} from end to end" if self.hops else self.why
        )

    def part(self, devices: int, apart: int) -> "Wire":
        """The wire of a ring over so many of its devices, so far apart along the axis; of the whole where that is no
        part of it."""
        return self.parts.get((devices, apart), self)


def axis_bandwidths(
    chip: Chip, axes: Mapping[str, int], topology: Sequence[int] | None = None
) -> dict[str, Wire]:
    """What carries a ring collective along each axis of a mesh whose devices lie in order, last axis fastest.

    axes: axis -> size. topology: the shape of a TPU slice in chips; without it, the mesh gets as few equal
    slices as hold it, each of the most even shape, as they are offered. Raises `ShardError` for a topology
    that the chip cannot have.

    GPUs: an axis inside one node has the full bandwidth of a device into its switch. One that leaves the node
    has the network's bandwidth, times the members that each node holds, for each has its own adapter, up to the
    link's (https://jax-ml.github.io/scaling-book/gpus/, "Cross-node collectives").

    TPUs: an axis takes whole dimensions of the torus, as `jax.make_mesh` gives it. Each adds one link's
    bandwidth, and that of both directions where the dimension wraps around: for v2, v5e and v6e one of 16
    chips, for v3 one of 32, for v4 and later slices of whole 4x4x4 cubes
    (https://jax-ml.github.io/scaling-book/tpus/). An axis on part of a dimension has one link, shared by the
    rings that cross it. The devices of one chip share its links. Between slices goes the data-centre network.

    Every figure is a peak, and as if no other axis sent anything at the time.

    >>> from jaxshard_magic.hardware import chip
    >>> axis_bandwidths(chip("h100"), {"data": 2, "model": 8})["model"].why.replace("\\u202f", " ")
    'NVLink 4 inside a node of 8, 450 GB/s'
    """
    return dict(_wires(chip, tuple(axes.items()), tuple(topology or ())))


@lru_cache(1024)
def _wires(chip: Chip, sized: tuple[tuple[str, int], ...], topology: tuple[int, ...]) -> dict[str, Wire]:
    """The same, found once: a search asks for each stage of each of its candidates."""
    axes = dict(sized)
    shape = _given_shape(chip, axes, topology) if topology else None
    island = math.prod(shape) * chip.per_chip if shape else _island(chip.node, axes)
    inside = _inside(axes, island)
    if chip.link.topology in TORUS:
        links = _torus_wires(chip, inside, shape or _even_shape(chip, math.ceil(island / chip.per_chip)))
    else:
        nodes = {name: (_node_wire(chip, size), size) for name, size in inside.items()}
        links = {name: _with_latency(chip, wire, size - 1) for name, (wire, size) in nodes.items()}
    return {
        name: links[name] if inside[name] == size else _across(chip, links[name], inside[name], size)
        for name, size in axes.items()
    }


def latency(kind: str, wires: Sequence[Wire]) -> float:
    """Seconds that a collective takes along axes with these wires however little it sends: an all-reduce goes along
    twice, a permutation by one hop, all else once (https://jax-ml.github.io/scaling-book/sharding/)."""
    if kind in ("collective-permute", "collective-broadcast"):
        return max((w.hop for w in wires), default=0.0)
    return (2 if kind == "all-reduce" else 1) * sum(w.latency for w in wires)


def _island(most: int, axes: Mapping[str, int]) -> int:
    """How many devices each node or slice holds: as many as divide the mesh evenly and cut no group askew."""
    count = math.prod(axes.values())
    sizes = (n for n in range(min(most, count), 0, -1) if count % n == 0)
    return next(n for n in sizes if math.prod(_inside(axes, n).values()) == n)


def _inside(axes: Mapping[str, int], island: int) -> dict[str, int]:
    """How many members of one group of each axis are together on an island; 1 where the two don't align."""
    inside, stride = dict.fromkeys(axes, 1), 1
    for name, size in reversed(list(axes.items())):
        extent = size * stride
        if island % extent == 0:
            inside[name] = size
        elif island % stride == 0 and extent % island == 0:
            inside[name] = island // stride
        stride = extent
    return inside


def _node_wire(chip: Chip, size: int) -> Wire:
    link = chip.link
    if size == 1:
        return Wire(link.name, None, "one device: nothing is sent")
    if link.topology == "cube" and size < chip.node:
        why = f"{link.name}, at least one of a GPU's {link.links} links joins neighbours"
        return _wire(link.name, link.bandwidth, why)
    place = "through the host" if link.topology == "pcie" else f"inside a node of {chip.node}"
    return _wire(link.name, link.bandwidth and link.bandwidth * link.links, f"{link.name} {place}")


def _with_latency(chip: Chip, wire: Wire, hops: int, islands: int = 1) -> Wire:
    """`hops` between devices of one island, and `islands` that a ring goes through."""
    hop, across = HOP[chip.link.topology], NETWORK_HOP[chip.kind]
    start = START[chip.kind] if hops or islands > 1 else 0.0
    latency = start + hops * hop + (islands - 1) * across
    return replace(wire, latency=latency, hop=start + (hop if hops else across), hops=hops + islands - 1)


def _across(chip: Chip, link: Wire, members: int, size: int) -> Wire:
    """The wire of an axis of `size` devices that leaves its island, where `members` of a group are together."""
    islands = math.ceil(size / members)
    return _with_latency(chip, _network_wire(chip, link, members), islands * (members - 1), islands)


def _network_wire(chip: Chip, link: Wire, members: int) -> Wire:
    """The wire of an axis that leaves its node or slice, `members` of each group being together in one."""
    island = "slice" if chip.kind == "tpu" else "node"
    if chip.network is None:
        return Wire("network", None, f"between {island}s; no network is published for {chip.name}")
    bandwidth = chip.network.bandwidth * members
    if link.bandwidth is not None and link.bandwidth < bandwidth:
        return Wire(link.name, link.bandwidth, f"{link.why}; {chip.network.name} between {island}s keeps up")
    together = f", {members} devices of a group in each" if members > 1 else ""
    return _wire(chip.network.name, bandwidth, f"{chip.network.name} between {island}s{together}")


def _torus_wires(chip: Chip, sizes: Mapping[str, int], shape: Sequence[int]) -> dict[str, Wire]:
    """The wire of each axis inside a slice of this shape, in chips."""
    whole = _of_axes(chip, sizes, [*shape, chip.per_chip])
    return {name: replace(wire, parts=_in_two(chip, sizes, name, shape)) for name, wire in whole.items()}


def _of_axes(chip: Chip, sizes: Mapping[str, int], dims: Sequence[int]) -> dict[str, Wire]:
    pieces = _whole_dimensions(chip, sizes, dims) or _parts(sizes, dims)
    return {
        name: _with_latency(
            chip, _torus_wire(chip, sizes[name], pieces[name], dims), _hops(chip, pieces[name], dims)
        )
        for name in sizes
    }


def _hops(chip: Chip, piece: Mapping[int, tuple[int, int]], dims: Sequence[int]) -> int:
    """The links from a device to the farthest of its group: half of a dimension that closes into a ring, all of a line
    but the last; dimensions one after the other, and one more inside a chip."""
    shape = dims[:-1]
    torus = {d: covered for d, (covered, _) in piece.items() if d < len(shape)}
    ring = {d: covered == shape[d] and _wraps(chip.link, shape, d) for d, covered in torus.items()}
    apart = {d: piece[d][1] for d in torus}
    along = (n // 2 if ring[d] else (n - 1) * apart[d] for d, n in torus.items())
    return sum(along) + (1 if len(shape) in piece else 0)


def _in_two(
    chip: Chip, sizes: Mapping[str, int], axis: str, shape: Sequence[int]
) -> dict[tuple[int, int], Wire]:
    """The wires of the parts of an axis, for each way to make one of far devices and one of near ones of it."""
    found: dict[tuple[int, int], Wire] = {}
    for near in range(2, sizes[axis] // 2 + 1):
        if sizes[axis] % near == 0:
            far, two = sizes[axis] // near, {}
            for name, size in sizes.items():
                two |= {f"{name}/far": far, f"{name}/near": near} if name == axis else {name: size}
            wires = _of_axes(chip, two, [*shape, chip.per_chip])
            found[near, 1] = wires[f"{axis}/near"]
            found[far, near] = wires[f"{axis}/far"]
    return found


def _torus_wire(chip: Chip, size: int, piece: Mapping[int, tuple[int, int]], dims: Sequence[int]) -> Wire:
    """`piece`: dimension -> (how much of it the axis covers, how many chips apart)."""
    link, on_chip, shape = chip.link, len(dims) - 1, dims[:-1]
    slice_ = f"slice {'x'.join(map(str, shape))}"
    if size == 1:
        return Wire(link.name, None, "one device: nothing is sent")
    torus = {d: cut for d, cut in piece.items() if d != on_chip}
    if not torus and on_chip in piece:
        return _wire(link.name, link.inside, f"the {chip.per_chip} devices of one chip")
    share = (chip.per_chip if on_chip in piece else 1) / chip.per_chip
    shared = "" if share == 1 else f", {chip.per_chip} devices share a chip's links"
    one_way = None if link.bandwidth is None else link.bandwidth * share
    whole = [d for d, (covered, _) in torus.items() if covered == shape[d]]
    if not whole:
        apart = min((stride for _, stride in torus.values()), default=1)
        crossing = f" shared by {apart} rings" if apart > 1 else ""
        why = f"{link.name}, part of a dimension of {slice_}, one direction{crossing}{shared}"
        return _wire(link.name, one_way and one_way / apart, why)
    directions = sum(1 + _wraps(link, shape, d) for d in whole)
    over = "" if len(whole) == 1 else f" over {len(whole)} dimensions"
    if directions == 2 * len(whole):
        way = f"{link.name} ring{over}, both directions"
    elif directions == len(whole):
        way = f"{link.name} line{over}, one direction: {slice_} does not wrap around there"
    else:
        way = f"{link.name}{over}, of which {directions - len(whole)} of {slice_} wraps around"
    return _wire(link.name, one_way and one_way * directions, f"{way}{shared}")


def _wraps(link: Link, shape: Sequence[int], dimension: int) -> bool:
    if link.topology == "torus2d":
        return shape[dimension] == link.wrap
    return all(n % link.wrap == 0 for n in shape)


def _whole_dimensions(
    chip: Chip, sizes: Mapping[str, int], dims: Sequence[int]
) -> dict[str, dict[int, tuple[int, int]]] | None:
    """Whole dimensions for every axis, chosen as `jax.make_mesh` does: last axis first, as many as make up its
    size, the fast link inside a chip before others. None where that leaves an axis without."""
    free = [d for d, n in enumerate(dims) if n > 1]
    chosen: dict[str, dict[int, tuple[int, int]]] = {name: {} for name in sizes}
    for name in reversed(list(sizes)):
        if sizes[name] == 1:
            continue
        fits = [
            some
            for k in range(len(free), 0, -1)
            for some in combinations(free, k)
            if math.prod(dims[d] for d in some) == sizes[name]
        ]
        if not fits:
            return None
        most = [some for some in fits if len(some) == len(fits[0])]
        fast = [some for some in most if chip.link.inside and len(dims) - 1 in some]
        taken = (fast or most)[0]
        chosen[name] = {d: (dims[d], 1) for d in taken}
        free = [d for d in free if d not in taken]
    return chosen


def _parts(sizes: Mapping[str, int], dims: Sequence[int]) -> dict[str, dict[int, tuple[int, int]]]:
    """The dimensions cut into prime factors and dealt out in order, fastest first."""
    cuts = []
    for d in reversed(range(len(dims))):
        stride = 1
        for prime in _primes(dims[d]):
            cuts.append((d, prime, stride))
            stride *= prime
    dealt: dict[str, dict[int, tuple[int, int]]] = {}
    for name in reversed(list(sizes)):
        left, mine = sizes[name], {}
        for cut in list(cuts):
            d, prime, stride = cut
            if left % prime == 0:
                cuts.remove(cut)
                left //= prime
                covered, first = mine.get(d, (1, stride))
                mine[d] = (covered * prime, first)
        dealt[name] = mine
    return dealt


def _primes(n: int) -> list[int]:
    """Prime factors in rising order.

    >>> _primes(12)
    [2, 2, 3]
    """
    factor = next((p for p in range(2, math.isqrt(n) + 1) if n % p == 0), n)
    return [factor, *_primes(n // factor)] if n > 1 else []


def _even_shape(chip: Chip, count: int) -> tuple[int, ...]:
    """The most even shape of a slice of so many chips; of whole cubes where there can be."""
    dims, cube = TORUS[chip.link.topology], chip.link.wrap**3
    if dims == 3 and count % cube == 0:
        return tuple(n * chip.link.wrap for n in _even(count // cube, 3))
    return _even(count, dims)


def _even(count: int, dims: int) -> tuple[int, ...]:
    """`count` as a product of so many factors with the least sum, in rising order.

    >>> _even(32, 3)
    (2, 4, 4)
    """
    if dims == 1:
        return (count,)
    firsts = [n for n in range(1, math.isqrt(count) + 1) if count % n == 0]
    return min(((n, *_even(count // n, dims - 1)) for n in firsts), key=lambda shape: (sum(shape), shape))


def _given_shape(chip: Chip, axes: Mapping[str, int], topology: Sequence[int]) -> tuple[int, ...]:
    text, dims = "x".join(map(str, topology)), TORUS.get(chip.link.topology)
    if dims is None:
        raise ShardError(f"topology {text}: {chip.name} has no slices. Leave the topology out")
    if len(topology) > dims or any(n < 1 for n in topology):
        example = "x".join(["4"] * dims)
        raise ShardError(f"topology {text}: a slice of {chip.name} has {dims} dimensions, as {example}")
    devices, count = math.prod(topology) * chip.per_chip, math.prod(axes.values())
    if count % devices:
        raise ShardError(
            f"mesh of {count} devices on {chip.name} {text}, which has {devices}: give a mesh of {devices}, or of "
            "several such slices"
        )
    return (*topology, *(1,) * (dims - len(topology)))


def _wire(name: str, bandwidth: float | None, why: str) -> Wire:
    rate = "no bandwidth is published" if bandwidth is None else rate_text(bandwidth)
    return Wire(name, bandwidth, f"{why}, {rate}")
