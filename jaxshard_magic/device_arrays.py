"""Transfers of arrays to devices and back; no other module transfers a step's arrays.

A mesh may have devices of several processes ("hosts"). Each host runs the same program on values of its own.
`jax.device_put` would compare each array over all hosts, one after the other, refuses typed PRNG keys, and can't read
an array of another host. For shardings over several processes each host therefore fills its own devices, and arrays
that span hosts are gathered before reading: all hosts call these functions together, with the same arrays in the same
order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

DeviceOrSharding = Any  # a jax.Device or a Sharding
Span = tuple[tuple[int, int], ...]  # (start, stop) of a shard in each dimension
_AT_ONCE = 64 << 20  # bytes of an array that hosts gather at a time


def put(xs: Iterable[Any], to: DeviceOrSharding | Sequence[DeviceOrSharding]) -> list[jax.Array]:
    """Place arrays on devices.

    On one process this is one `jax.device_put` of all arrays. On several, each host places its shards of its own
    values, at some 0.2 ms an array. The caller must know that all hosts have the same values.

    Args:
        xs: NumPy or JAX arrays.
        to: A device or sharding for all arrays, or one for each.

    >>> [x] = put([np.ones(4)], jax.devices()[0])
    >>> x.shape
    (4,)
    """
    xs = list(xs)
    places = list(to) if isinstance(to, Sequence) else [to] * len(xs)
    if jax.process_count() == 1:
        return jax.device_put(xs, places)
    placed: list[Any] = list(xs)
    moved = [i for i, x in enumerate(xs) if _spans_hosts(x) and _spans(places[i])]
    # From several hosts to several: one compiled program moves all arrays.
    if moved:
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
    """Return a copy of `x` that shares no buffer with it.

    Args:
        x: The array.
        to: Sharding of the copy.
    """
    # `jax.device_put` reuses the buffer of a shard that stays on its device.
    return jnp.copy(put([x], to)[0])


def to_numpy(x: Any) -> np.ndarray:
    """Return the values of an array on this host; typed PRNG keys as numbers.

    An array that spans hosts is gathered first; cost: the full size in memory on each host.
    """
    if is_prng_key(x):
        x = jax.random.key_data(x)
    # Gathered by a compiled program, as `multihost_utils.process_allgather` can't be interrupted.
    if _spans_hosts(x):
        [x] = _identity((NamedSharding(x.sharding.mesh, PartitionSpec()),))(x)
    return np.asarray(x)


def read_shards(shape: Sequence[int], to: Sharding, read: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
    """Return an array built from its shards.

    Args:
        shape: Shape of the array.
        to: Sharding of the array.
        read: Returns the values at an index. Called once for each shard of this host. A shard is on its devices before
            the next is read.
    """
    places: dict[tuple[Any, ...], list[Any]] = {}
    where = to.addressable_devices_indices_map(tuple(shape))
    for device, index in where.items():
        places.setdefault(_bounds(index, shape), []).append(device)
    made: dict[Any, jax.Array] = {}
    for bounds, devices in places.items():
        # One shard in host memory at a time: the next is read only after `block_until_ready`.
        part = read(tuple(slice(*each) for each in bounds))
        made |= zip(devices, jax.block_until_ready(jax.device_put([part] * len(devices), devices)), strict=True)
    return jax.make_array_from_single_device_arrays(tuple(shape), to, [made[device] for device in where])


def iterate_parts(x: Any) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """Yield the values of an array piece by piece, each with its index.

    Shards come once each. An array that spans hosts comes some rows at a time, gathered: all hosts iterate together.
    """
    if not isinstance(x, jax.Array):
        yield (slice(None),) * np.ndim(x), np.asarray(x)
    elif _spans_hosts(x) and x.ndim:
        rows = max(1, _AT_ONCE * max(1, len(x)) // max(1, x.nbytes))
        for start in range(0, len(x), rows):
            yield ((slice(start, start + rows), *(slice(None),) * (x.ndim - 1)), to_numpy(x[start : start + rows]))
    else:
        seen = set()
        for shard in x.addressable_shards:
            bounds = _bounds(shard.index, x.shape)
            if bounds not in seen:
                yield tuple(slice(*each) for each in bounds), np.asarray(shard.data)
            seen.add(bounds)


def _bounds(index: Any, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))


def is_prng_key(x: Any) -> bool:
    """Return whether `x` is an array of typed PRNG keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def count_hosts(mesh: Mesh) -> int:
    """Return the number of processes with devices of `mesh`."""
    return len({device.process_index for device in mesh.devices.flat})


def device_number(device: Any) -> int:
    """Return the number of a device: JAX's id.

    CPU devices of several processes are numbered consecutively, as accelerators are.
    """
    if device.platform != "cpu" or jax.process_count() == 1:
        return device.id
    # JAX starts the ids of CPU devices anew in each process, at a round number.
    return device.client.devices().index(device)


def local_placement(place: DeviceOrSharding) -> DeviceOrSharding:
    """Return `place`, or, for a device of another host, the first device of this one."""
    if isinstance(place, jax.Device) and place.process_index != jax.process_index():
        return jax.local_devices(backend=place.platform)[0]
    return place


def _spans(place: DeviceOrSharding) -> bool:
    return isinstance(place, Sharding) and not place.is_fully_addressable


def _spans_hosts(x: Any) -> bool:
    """Return whether an array spans hosts, so that none has all of its values."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated


def _local(x: Any) -> Any:
    """Return an array with all values on this host."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    if is_prng_key(x):
        return jax.random.wrap_key_data(jnp.asarray(to_numpy(x)), impl=jax.random.key_impl(x))
    return to_numpy(x)


@cache
def _identity(places: tuple[Sharding, ...]) -> Any:
    return jax.jit(lambda *xs: xs, out_shardings=places)


def _from_here(x: Any, to: Sharding) -> jax.Array:
    """Return an array over several hosts; each host fills its shards from its own `x`."""
    if is_prng_key(x):
        # NumPy has no typed keys: the bits are placed instead.
        bits = jax.random.key_data(x)
        return jax.random.wrap_key_data(_from_here(bits, to), impl=jax.random.key_impl(x))
    kind = jax.typeof(x)
    # `make_array_from_callback` would lose the weak type. A Python number passed to `jax.jit` has it.
    if kind.weak_type:
        return _identity((to,))(np.asarray(x).item() if kind.shape == () else x)[0]
    values = np.asarray(x, kind.dtype)
    return jax.make_array_from_callback(values.shape, to, lambda part: values[part])


def local_shards(shape: Sequence[int], to: Sharding) -> dict[Span, list[Any]]:
    """Return this host's shards of an array: index bounds, and the devices with the shard.

    Args:
        shape: Shape of the array.
        to: Sharding of the array.
    """
    found: dict[Span, list[Any]] = {}
    for device, part in to.addressable_devices_indices_map(tuple(shape)).items():
        cuts = () if part is None else part
        span = tuple(cut.indices(n)[:2] for cut, n in zip(cuts, shape, strict=True))
        found.setdefault(span, []).append(device)
    return found


def put_shard(values: np.ndarray, devices: Sequence[Any], to: Sharding) -> list[jax.Array]:
    """Place one shard on each of its devices.

    Footgun: a device that shares the host's memory takes over values aligned to 64 bytes. Leave them unchanged
    afterwards.

    Args:
        values: Values of the shard.
        devices: Devices with this shard.
        to: Sharding of the whole array, for its memory kind.
    """
    places = [SingleDeviceSharding(device, memory_kind=to.memory_kind) for device in devices]
    return jax.device_put([values] * len(places), places)


def from_local_shards(shape: Sequence[int], dtype: Any, to: Sharding, parts: Sequence[jax.Array]) -> jax.Array:
    """Return an array from this host's shards, as `put_shard` placed them.

    Args:
        shape: Shape of the array.
        dtype: Dtype of the array.
        to: Sharding of the array.
        parts: Shards on this host's devices.
    """
    return jax.make_array_from_single_device_arrays(tuple(shape), to, list(parts), dtype=dtype)


def _processes(to: Sharding) -> list[int]:
    return sorted({device.process_index for device in to.device_set})


def is_local(x: Any) -> bool:
    """Return whether `x` is local to this host, and no array over several hosts."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def is_host_aligned(to: Sharding, shape: Sequence[int], dim: int) -> bool:
    """Return whether each device's rows belong to the device's host.

    Args:
        to: Sharding of the array.
        shape: Shape of the array.
        dim: Dimension of the rows. Hosts have equal shares of it, in order of their processes.
    """
    places = _processes(to)
    share = shape[dim] // len(places)

    def inside(device: Any, part: Any) -> bool:
        start, stop, _ = part[dim].indices(shape[dim])
        first = places.index(device.process_index) * share
        return first <= start and stop <= first + share

    return all(inside(device, part) for device, part in to.devices_indices_map(tuple(shape)).items())


def from_host_rows(x: Any, to: NamedSharding, dim: int) -> jax.Array:
    """Return an array over several hosts, with the rows of each host after those of the hosts before it.

    Args:
        x: Rows of this host.
        to: Sharding of the array.
        dim: Dimension of the rows.

    Raises:
        ValueError: Hosts have rows of different shapes.
    """
    rows = np.asarray(x, jax.typeof(x).dtype)
    places = _processes(to)
    shape = tuple(n * len(places) if d == dim else n for d, n in enumerate(rows.shape))
    if is_host_aligned(to, shape, dim):
        mine = places.index(jax.process_index()) * rows.shape[dim]

        def cut(part: Any) -> np.ndarray:
            start, stop, _ = part[dim].indices(shape[dim])
            return rows[(*part[:dim], slice(start - mine, stop - mine), *part[dim + 1 :])]

        return jax.make_array_from_callback(shape, to, cut)
    # Some device needs rows of another host: gather them all. This call can't be interrupted.
    together = multihost_utils.process_allgather(np.moveaxis(rows, dim, 0), tiled=True)
    return _from_here(np.moveaxis(together, 0, dim), to)
