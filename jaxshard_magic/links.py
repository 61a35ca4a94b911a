"""Links and networks along each axis of a mesh, with bandwidth and latency."""

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
# NCCL assumes for a ring, `hwLat` and `baseLat` of https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc.
HOP = {"torus2d": 8e-6 / 3, "torus3d": 8e-6 / 3, "switch": 3.4e-6, "cube": 3.4e-6, "pcie": 5.7e-6}
NETWORK_HOP = {"tpu": 0.0, "gpu": 9.6e-6}  # seconds; none is published between slices
START = {"tpu": 0.0, "gpu": 8.4e-6}  # seconds to start a collective


@dataclass(frozen=True)
class AxisLink:
    """Connection along a mesh axis.

    Attributes:
        name: Name of the link or network.
        bandwidth: Bytes/s that one device sends; None if no figure is known.
        description: Connection and assumptions, as text.
        latency: Seconds of a collective along the axis, however little is sent: all hops from end to end, one after the
            other.
        hop: Seconds of one hop.
        hops: Number of hops.
        sub_rings: Connections of rings over a part of the axis, by number of devices and their distance along the axis.
    """

    name: str
    bandwidth: float | None
    description: str
    latency: float = 0.0
    hop: float = 0.0
    hops: int = 0
    sub_rings: Mapping[tuple[int, int], "AxisLink"] = field(default_factory=dict, compare=False, repr=False)

    @property
    def full_description(self) -> str:
        """Text with the number of hops: `ICI ring, both directions, 90 GB/s; 2 hops from end to end`."""
        return (
            f"{self.description}; {self.hops} hop{'s' * (self.hops != 1)} from end to end"
            if self.hops
            else self.description
        )

    def sub_ring(self, devices: int, apart: int) -> "AxisLink":
        """Return the connection of a ring over a part of the axis; of the full axis if the two numbers are no part.

        Args:
            devices: Devices in the ring.
            apart: Distance between neighbours along the axis.
        """
        return self.sub_rings.get((devices, apart), self)


def axis_links(chip: Chip, axes: Mapping[str, int], topology: Sequence[int] | None = None) -> dict[str, AxisLink]:
    r"""Return the connection that a ring collective uses along each axis of a mesh with devices in order, last axis
    fastest.

    GPUs: an axis inside one node has the full bandwidth of a device into the switch. An axis across nodes has the
    network's bandwidth times the members of a group in each node, as each has an adapter of its own, up to the link's
    bandwidth (https://jax-ml.github.io/scaling-book/gpus/, "Cross-node collectives").

    TPUs: an axis takes whole dimensions of the torus, as `jax.make_mesh` assigns them. Each adds one link's bandwidth,
    or two directions' if the dimension wraps around: for v2, v5e and v6e at 16 chips, for v3 at 32, for v4 and later in
    slices of whole 4x4x4 cubes (https://jax-ml.github.io/scaling-book/tpus/). An axis on part of a dimension has one
    link, shared by the rings across it. The devices of one chip share its links. Slices are connected by the
    data-centre network.

    All figures are peaks, as if no other axis sent anything at the same time.

    Args:
        chip: Kind of chip.
        axes: Size of each axis, in the mesh's order.
        topology: Shape of a TPU slice in chips. None: as few equal slices as have room for the mesh, each of the most
            even shape on offer.

    Raises:
        ShardError: The chip can't have this topology.

    >>> from jaxshard_magic.hardware import chip
    >>> axis_links(chip("h100"), {"data": 2, "model": 8})["model"].description.replace("\u202f", " ")
    'NVLink 4 inside a node of 8, 450 GB/s'
    """
    return dict(_wires(chip, tuple(axes.items()), tuple(topology or ())))


@lru_cache(1024)
def _wires(chip: Chip, sized: tuple[tuple[str, int], ...], topology: tuple[int, ...]) -> dict[str, AxisLink]:
    """Return the result of `axis_links`."""
    # Cached: a search asks for each stage of each of its candidates.
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


def collective_latency(kind: str, wires: Sequence[AxisLink]) -> float:
    """Return the seconds of a collective along several axes, however little is sent.

    An all-reduce passes each axis twice, a permutation or a broadcast takes one hop, any other collective passes each
    axis once (https://jax-ml.github.io/scaling-book/sharding/).

    Args:
        kind: HLO name of the collective.
        wires: Connections along the axes.
    """
    if kind in ("collective-permute", "collective-broadcast"):
        return max((w.hop for w in wires), default=0.0)
    return (2 if kind == "all-reduce" else 1) * sum(w.latency for w in wires)


def _island(most: int, axes: Mapping[str, int]) -> int:
    """Return the number of devices per node or slice: the most that divide the mesh evenly and split each group
    evenly."""
    count = math.prod(axes.values())
    sizes = (n for n in range(min(most, count), 0, -1) if count % n == 0)
    return next(n for n in sizes if math.prod(_inside(axes, n).values()) == n)


def _inside(axes: Mapping[str, int], island: int) -> dict[str, int]:
    """Return, for each axis, how many members of a group are in the same node or slice; 1 if groups don't align with
    nodes."""
    inside, stride = dict.fromkeys(axes, 1), 1
    for name, size in reversed(list(axes.items())):
        extent = size * stride
        if island % extent == 0:
            inside[name] = size
        elif island % stride == 0 and extent % island == 0:
            inside[name] = island // stride
        stride = extent
    return inside


def _node_wire(chip: Chip, size: int) -> AxisLink:
    """Return the connection of an axis inside a node of GPUs, without latency."""
    link = chip.link
    if size == 1:
        return AxisLink(link.name, None, "one device: nothing is sent")
    if link.topology == "cube" and size < chip.node:
        why = f"{link.name}, at least one of a GPU's {link.links} links joins neighbours"
        return _wire(link.name, link.bandwidth, why)
    place = "through the host" if link.topology == "pcie" else f"inside a node of {chip.node}"
    return _wire(link.name, link.bandwidth and link.bandwidth * link.links, f"{link.name} {place}")


def _with_latency(chip: Chip, wire: AxisLink, hops: int, islands: int = 1) -> AxisLink:
    """Return a connection with its latency.

    Args:
        hops: Hops between devices of one node or slice.
        islands: Nodes or slices in a ring.
    """
    hop, across = HOP[chip.link.topology], NETWORK_HOP[chip.kind]
    start = START[chip.kind] if hops or islands > 1 else 0.0
    latency = start + hops * hop + (islands - 1) * across
    return replace(wire, latency=latency, hop=start + (hop if hops else across), hops=hops + islands - 1)


def _across(chip: Chip, link: AxisLink, members: int, size: int) -> AxisLink:
    """Return the connection of an axis of `size` devices across nodes or slices, with `members` of a group in each."""
    islands = math.ceil(size / members)
    return _with_latency(chip, _network_wire(chip, link, members), islands * (members - 1), islands)


def _network_wire(chip: Chip, link: AxisLink, members: int) -> AxisLink:
    """Return the connection of an axis across nodes or slices without latency, with `members` of a group in each."""
    island = "slice" if chip.kind == "tpu" else "node"
    if chip.network is None:
        return AxisLink("network", None, f"between {island}s; no network is published for {chip.name}")
    bandwidth = chip.network.bandwidth * members
    if link.bandwidth is not None and link.bandwidth < bandwidth:
        return AxisLink(
            link.name, link.bandwidth, f"{link.description}; {chip.network.name} between {island}s keeps up"
        )
    together = f", {members} devices of a group in each" if members > 1 else ""
    return _wire(chip.network.name, bandwidth, f"{chip.network.name} between {island}s{together}")


def _torus_wires(chip: Chip, sizes: Mapping[str, int], shape: Sequence[int]) -> dict[str, AxisLink]:
    """Return the connection of each axis inside a slice, with the rings over parts of it.

    Args:
        sizes: Size of each axis inside the slice.
        shape: Shape of the slice in chips.
    """
    whole = _of_axes(chip, sizes, [*shape, chip.per_chip])
    return {name: replace(wire, sub_rings=_in_two(chip, sizes, name, shape)) for name, wire in whole.items()}


def _of_axes(chip: Chip, sizes: Mapping[str, int], dims: Sequence[int]) -> dict[str, AxisLink]:
    """Return the connection of each axis on a torus; `dims` are the slice's dimensions and the devices per chip."""
    pieces = _whole_dimensions(chip, sizes, dims) or _parts(sizes, dims)
    return {
        name: _with_latency(chip, _torus_wire(chip, sizes[name], pieces[name], dims), _hops(chip, pieces[name], dims))
        for name in sizes
    }


def _hops(chip: Chip, piece: Mapping[int, tuple[int, int]], dims: Sequence[int]) -> int:
    """Return the links from a device to the farthest of its group.

    Half of a dimension that closes into a ring, all of a line but the last, one dimension after the other, and one more
    inside a chip.
    """
    shape = dims[:-1]
    torus = {d: covered for d, (covered, _) in piece.items() if d < len(shape)}
    ring = {d: covered == shape[d] and _wraps(chip.link, shape, d) for d, covered in torus.items()}
    apart = {d: piece[d][1] for d in torus}
    along = (n // 2 if ring[d] else (n - 1) * apart[d] for d, n in torus.items())
    return sum(along) + (1 if len(shape) in piece else 0)


def _in_two(chip: Chip, sizes: Mapping[str, int], axis: str, shape: Sequence[int]) -> dict[tuple[int, int], AxisLink]:
    """Return the connections of rings over parts of an axis, for each split of the axis into far and near devices."""
    found: dict[tuple[int, int], AxisLink] = {}
    for near in range(2, sizes[axis] // 2 + 1):
        if sizes[axis] % near == 0:
            far, two = sizes[axis] // near, {}
            for name, size in sizes.items():
                two |= {f"{name}/far": far, f"{name}/near": near} if name == axis else {name: size}
            wires = _of_axes(chip, two, [*shape, chip.per_chip])
            found[near, 1] = wires[f"{axis}/near"]
            found[far, near] = wires[f"{axis}/far"]
    return found


def _torus_wire(chip: Chip, size: int, piece: Mapping[int, tuple[int, int]], dims: Sequence[int]) -> AxisLink:
    """Return the connection of one axis on a torus, without latency.

    Args:
        piece: For each dimension of the axis, the chips that the axis covers and the distance between them.
    """
    link, on_chip, shape = chip.link, len(dims) - 1, dims[:-1]
    slice_ = f"slice {'x'.join(map(str, shape))}"
    if size == 1:
        return AxisLink(link.name, None, "one device: nothing is sent")
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
    """Assign whole dimensions to every axis as `jax.make_mesh` does; None if an axis gets none.

    The last axis chooses first: as many dimensions as make up its size, and the fast link inside a chip before others.
    """
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
    """Assign prime factors of the dimensions to the axes in order, fastest first."""
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
    """Return the most even shape of a slice of `count` chips, made of whole cubes if the count allows."""
    dims, cube = TORUS[chip.link.topology], chip.link.wrap**3
    if dims == 3 and count % cube == 0:
        return tuple(n * chip.link.wrap for n in _even(count // cube, 3))
    return _even(count, dims)


def _even(count: int, dims: int) -> tuple[int, ...]:
    """Return `count` as a product of `dims` factors with the least sum, in rising order.

    >>> _even(32, 3)
    (2, 4, 4)
    """
    if dims == 1:
        return (count,)
    firsts = [n for n in range(1, math.isqrt(count) + 1) if count % n == 0]
    return min(((n, *_even(count // n, dims - 1)) for n in firsts), key=lambda shape: (sum(shape), shape))


def _given_shape(chip: Chip, axes: Mapping[str, int], topology: Sequence[int]) -> tuple[int, ...]:
    """Return a slice's shape, checked and filled with 1 to all dimensions. Raises ShardError."""
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


def _wire(name: str, bandwidth: float | None, why: str) -> AxisLink:
    """Return a connection without latency, with the bandwidth in the description."""
    rate = "no bandwidth is published" if bandwidth is None else rate_text(bandwidth)
    return AxisLink(name, bandwidth, f"{why}, {rate}")
