"""Arrays put on devices and read back: nothing else does so with a step's arrays.

A mesh may lie on the devices of several processes ("hosts"), each of which runs the same program on values that it has
itself. `jax.device_put` would then compare each array over all of them, one after the other, refuses typed keys, and
reads no array of another host's. So where a sharding goes over several processes, each gives its own devices their
parts, and a value that lies on several of them is gathered before it is read: all hosts come here together, with the
same arrays in the same order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

Place = Any  # a jax.Device or a Sharding
Span = tuple[tuple[int, int], ...]  # where a part of an array begins and ends, in each dimension
_AT_ONCE = 64 << 20  # bytes that hosts gather


def put(xs: Iterable[Any], to: Place | Sequence[Place]) -> list[jax.Array]:
    """Arrays, numpy's and JAX's, on their devices: each of `xs` on its own of `to`, or all on the one that is given.

    On one process this is one `jax.device_put` of all. On several each host places its parts of what it holds, some
    0.2 ms an array; that all hold the same is for their caller to know.

    >>> [x] = put([np.ones(4)], jax.devices()[0])
    >>> x.shape
    (4,)
    """
    xs = list(xs)
    places = list(to) if isinstance(to, Sequence) else [to] * len(xs)
    if jax.process_count() == 1:
        return jax.device_put(xs, places)
    placed: list[Any] = list(xs)
    moved = [i for i, x in enumerate(xs) if _far(x) and _spans(places[i])]
    if moved:  # from several hosts to several: by one program
        program = _identity(tuple(places[i] for i in moved))
        for i, x in zip(moved, program(*(xs[i] for i in moved)), strict=True):
            placed[i] = x
    for i in set(range(len(xs))) - set(moved):
        if _spans(places[i]):
            placed[i] = _from_here(xs[i], places[i])
        else:
            placed[i] = jax.device_put(_local(xs[i]), places[i])
    return placed


def own_copy(x: Any, to: Sharding) -> jax.Array:
    """A copy that shares no buffer with `x`; `put` alone would, where a shard stays on its device."""
    return jnp.copy(put([x], to)[0])


def whole(x: Any) -> np.ndarray:
    """The values of any array, those of a typed key as numbers, on this host. One that lies on several hosts is
    gathered first, which takes its whole size on each."""
    if is_key(x):
        x = jax.random.key_data(x)
    if _far(x):  # what multihost_utils reads can't be interrupted
        [x] = _identity((NamedSharding(x.sharding.mesh, PartitionSpec()),))(x)
    return np.asarray(x)


def from_parts(
    shape: Sequence[int], to: Sharding, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """An array made of the parts that `read` gives of an index; each part of this host's devices is asked for once, and
    is on its devices before the next."""
    places: dict[tuple[Any, ...], list[Any]] = {}
    where = to.addressable_devices_indices_map(tuple(shape))
    for device, index in where.items():
        places.setdefault(_bounds(index, shape), []).append(device)
    made: dict[Any, jax.Array] = {}
    for bounds, devices in places.items():
        part = read(tuple(slice(*each) for each in bounds))
        made |= zip(
            devices, jax.block_until_ready(jax.device_put([part] * len(devices), devices)), strict=True
        )
    return jax.make_array_from_single_device_arrays(tuple(shape), to, [made[device] for device in where])


def parts(x: Any) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """The values of an array a part at a time, each with its place: shard by shard, each once; of an array that lies on
    several hosts some rows at a time, which each gathers: all come here together."""
    if not isinstance(x, jax.Array):
        yield (slice(None),) * np.ndim(x), np.asarray(x)
    elif _far(x) and x.ndim:
        rows = max(1, _AT_ONCE * max(1, len(x)) // max(1, x.nbytes))
        for start in range(0, len(x), rows):
            yield (slice(start, start + rows), *(slice(None),) * (x.ndim - 1)), whole(x[start : start + rows])
    else:
        seen = set()
        for shard in x.addressable_shards:
            bounds = _bounds(shard.index, x.shape)
            if bounds not in seen:
                yield tuple(slice(*each) for each in bounds), np.asarray(shard.data)
            seen.add(bounds)


def _bounds(index: Any, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))


def is_key(x: Any) -> bool:
    """Whether `x` is an array of typed PRNG keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def hosts_of(mesh: Mesh) -> int:
    """How many processes have devices of `mesh`."""
    return len({device.process_index for device in mesh.devices.flat})


def number_of(device: Any) -> int:
    """What a device goes by: jax's id. The CPU devices of several processes, whose ids begin anew at a round number for
    each process, are counted through, as accelerators are."""
    if device.platform != "cpu" or jax.process_count() == 1:
        return device.id
    return device.client.devices().index(device)


def near(place: Place) -> Place:
    """`place`, a device or a Sharding, or for a device of another host the first of this one's."""
    if isinstance(place, jax.Device) and place.process_index != jax.process_index():
        return jax.local_devices(backend=place.platform)[0]
    return place


def _spans(place: Place) -> bool:
    return isinstance(place, Sharding) and not place.is_fully_addressable


def _far(x: Any) -> bool:
    """Does an array lie on several hosts, so that none has all of its values?"""
    return isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated


def _local(x: Any) -> Any:
    """The array where this host reaches all of it."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    if is_key(x):
        return jax.random.wrap_key_data(jnp.asarray(whole(x)), impl=jax.random.key_impl(x))
    return whole(x)


@cache
def _identity(places: tuple[Sharding, ...]) -> Any:
    return jax.jit(lambda *xs: xs, out_shardings=places)


def _from_here(x: Any, to: Sharding) -> jax.Array:
    """An array of several hosts, of which each gives its devices their parts of the `x` that it holds."""
    if is_key(x):
        bits = jax.random.key_data(x)
        return jax.random.wrap_key_data(_from_here(bits, to), impl=jax.random.key_impl(x))
    kind = jax.typeof(x)
    if kind.weak_type:
        return _identity((to,))(np.asarray(x).item() if kind.shape == () else x)[0]
    values = np.asarray(x, kind.dtype)
    return jax.make_array_from_callback(values.shape, to, lambda part: values[part])


def parts_here(shape: Sequence[int], to: Sharding) -> dict[Span, list[Any]]:
    """The parts that an array of this shape has on this host's devices, and which of these have each."""
    found: dict[Span, list[Any]] = {}
    for device, part in to.addressable_devices_indices_map(tuple(shape)).items():
        cuts = () if part is None else part
        span = tuple(cut.indices(n)[:2] for cut, n in zip(cuts, shape, strict=True))
        found.setdefault(span, []).append(device)
    return found


def put_part(values: np.ndarray, devices: Sequence[Any], to: Sharding) -> list[jax.Array]:
    """One part of an array that will lie as `to` says, on each of the devices that have it. A device whose memory is
    the host's takes over values that begin at a multiple of 64 bytes: leave them alone then."""
    places = [SingleDeviceSharding(device, memory_kind=to.memory_kind) for device in devices]
    return jax.device_put([values] * len(places), places)


def from_placed(shape: Sequence[int], dtype: Any, to: Sharding, parts: Sequence[jax.Array]) -> jax.Array:
    """The array of its parts on this host's devices, as `put_part` gave them."""
    return jax.make_array_from_single_device_arrays(tuple(shape), to, list(parts), dtype=dtype)


def _processes(to: Sharding) -> list[int]:
    return sorted({device.process_index for device in to.device_set})


def is_part(x: Any) -> bool:
    """Is it this host's own, and no array that hosts have together?"""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def cuts_by_host(to: Sharding, shape: Sequence[int], dim: int) -> bool:
    """Whether each device has rows of its own host alone, where hosts have equal shares of `dim`, in order."""
    places = _processes(to)
    share = shape[dim] // len(places)

    def inside(device: Any, part: Any) -> bool:
        start, stop, _ = part[dim].indices(shape[dim])
        first = places.index(device.process_index) * share
        return first <= start and stop <= first + share

    return all(inside(device, part) for device, part in to.devices_indices_map(tuple(shape)).items())


def from_rows(x: Any, to: NamedSharding, dim: int) -> jax.Array:
    """The array that hosts have together, the rows of each along `dim` behind those of the hosts before it.

    Raises ValueError where hosts have rows of different shapes.
    """
    rows = np.asarray(x, jax.typeof(x).dtype)
    places = _processes(to)
    shape = tuple(n * len(places) if d == dim else n for d, n in enumerate(rows.shape))
    if cuts_by_host(to, shape, dim):
        mine = places.index(jax.process_index()) * rows.shape[dim]

        def cut(part: Any) -> np.ndarray:
            start, stop, _ = part[dim].indices(shape[dim])
            return rows[(*part[:dim], slice(start - mine, stop - mine), *part[dim + 1 :])]

        return jax.make_array_from_callback(shape, to, cut)
    together = multihost_utils.process_allgather(np.moveaxis(rows, dim, 0), tiled=True)
    return _from_here(np.moveaxis(together, 0, dim), to)
