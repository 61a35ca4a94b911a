"""Repeated copies of arrays between devices of two ranks, with little work per call.

Footguns:
- `jax.device_put` to the same devices shares memory, even with `may_alias=False`; with numpy arrays, too.
- An array of a failed program is ready and has an address. Only `block_until_ready` raises.
- On CPU with jax 0.10, a program with an unavailable input runs in a thread of the runtime instead of the caller's,
  about 20 us later.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

# Private API: the runtime functions that jax.device_put calls, at a tenth of its cost.
try:
    from jax._src.lib import xla_client as _runtime  # pyright: ignore[reportPrivateImportUsage]

    _batched_copy = _runtime.batched_copy_array_to_devices_with_sharding
    _batched_put = _runtime.batched_device_put
    _ALWAYS_COPY, _DeviceList = _runtime.ArrayCopySemantics.ALWAYS_COPY, _runtime.DeviceList
except (ImportError, AttributeError):
    _runtime = None

CopyFunction = Callable[[jax.Array], jax.Array]
_SMALL_BYTES = 2**16  # copied in less time than the runtime takes to wake its copying thread


class ArrayTransfer:
    """Copy lists of arrays to target shardings, without waiting for their values.

    The first call uses `jax.device_put` and plans all later ones. Arrays with the types and shardings of the first call
    are copied shard by shard, all in one call of the runtime. Arrays that need another division over the same number of
    devices are resharded by one program before they leave. Anything else uses `jax.device_put`, which may wait for
    values: numpy arrays, other shapes, another number of devices to divide over, random keys.

    An array at its target is returned unchanged. A target with the same devices under another name shares memory. All
    other results share no memory with the input, which may be deleted or donated at once.

    Several threads may call. But a program for resharding runs on the source devices: the call must then come from the
    thread that runs programs there.

    Args:
        targets: One sharding per array.
        from_programs: The arrays are outputs of compiled programs, with XLA's default memory layout. Small ready arrays
            on simulated devices are then copied by the calling thread. The runtime copies in another thread, and the
            unready result would move the next program off its thread.

    >>> one, other = jax.devices()[:2]
    >>> transfer = ArrayTransfer([jax.sharding.SingleDeviceSharding(other)])
    >>> [moved] = transfer([jax.device_put(1.0, one)])
    >>> moved.devices() == {other}
    True
    """

    def __init__(self, targets: Sequence[Sharding], *, from_programs: bool = False):
        self._targets, self._from_programs = list(targets), from_programs
        self._plan: _TransferPlan | None = None

    def __call__(self, arrays: Sequence[Any]) -> list[jax.Array]:
        """Return `arrays` at the targets, in the same order.

        Raises:
            ValueError: The number of arrays differs from the number of targets.
        """
        plan = self._plan
        if plan is not None and plan.fits(arrays):
            return plan(arrays)
        moved = [_device_put_copy(x, target) for x, target in zip(arrays, self._targets, strict=True)]
        if all(isinstance(x, jax.Array) for x in arrays):
            self._plan = _plan_transfer(arrays, moved, self._from_programs)
        return moved


@dataclass(frozen=True)
class _TransferPlan:
    """Planned copies of arrays with known types and shardings.

    Attributes:
        seen: Sharding, abstract value and commitment of each array.
        resharded: Positions of the arrays to reshard before the copy.
        reshard: The program for resharding.
        special_copies: Copy functions of special arrays, by position.
        batched_copy_args: Arguments for the runtime's copy of all other arrays: device lists, targets and copy
            semantics.
        host_copies: Copies by the calling thread, for lists of small arrays on one device each; otherwise empty.
    """

    seen: list[tuple[Sharding, Any, bool]]
    resharded: list[int]
    reshard: Callable[[list[jax.Array]], list[jax.Array]]
    special_copies: dict[int, CopyFunction]
    batched_copy_args: tuple[list, list[Sharding], list]
    host_copies: "list[_HostCopy]"

    def fits(self, arrays: Sequence[Any]) -> bool:
        """Return whether the arrays have the planned types and shardings, compared by identity, and none is deleted."""
        if len(arrays) != len(self.seen):
            return False
        for x, (sharding, aval, committed) in zip(arrays, self.seen, strict=True):
            if (
                # Identity is enough: a program's outputs have the same type and sharding objects every time.
                getattr(x, "aval", None) is not aval
                or x.sharding is not sharding
                or x.committed is not committed
                # Copying a deleted array can end the process.
                or x.is_deleted()
            ):
                return False
        return True

    def __call__(self, arrays: Sequence[Any]) -> list[jax.Array]:
        others = self.special_copies
        # The runtime copies asynchronously, and a program with an unready input runs outside of its rank's thread.
        if self.host_copies:
            for x in arrays:
                if not x.is_ready():
                    break
            else:
                return list(map(_copy_on_host, arrays, self.host_copies))
        if self.resharded:
            arrays = list(arrays)
            for i, x in zip(self.resharded, self.reshard([arrays[i] for i in self.resharded]), strict=True):
                arrays[i] = x
        plain = arrays if not others else [x for i, x in enumerate(arrays) if i not in others]
        copied = _batched_copy(plain, *self.batched_copy_args) if plain else []
        if not others:
            return copied
        rest = iter(copied)
        return [others[i](x) if i in others else next(rest) for i, x in enumerate(arrays)]


class _HostCopy(NamedTuple):
    """Copy of a small array to one device, by the calling thread.

    Attributes:
        shape: Shape.
        dtype: Dtype.
        buffer_type: ctypes buffer type with the size of the array.
        aval: Abstract value of the copy.
        target: Sharding of the copy.
        devices: The device.
    """

    shape: tuple[int, ...]
    dtype: Any
    buffer_type: type[ctypes.Array]
    aval: Any
    target: Sharding
    devices: list[Any]


def _host_copy_of(x: jax.Array, y: jax.Array) -> _HostCopy:
    """Return how to copy arrays like `x` to the sharding of `y`."""
    memory, target = ctypes.c_char * x.nbytes, y.sharding
    return _HostCopy(x.shape, x.dtype, memory, y.aval, target, list(target.device_set))


def _copy_on_host(x: jax.Array, here: _HostCopy) -> jax.Array:
    shape, dtype, memory, aval, target, devices = here
    # Raises the error of a failed program, before its memory is read: in jax 0.10 such an array is ready as well.
    x.block_until_ready()
    buffer: Any = memory.from_address(x.unsafe_buffer_pointer())
    values = np.ndarray(shape, dtype, buffer).copy()
    return _batched_put(aval, target, [values], devices, True, False)


def _is_small_cpu_array(x: jax.Array) -> bool:
    """Return whether the calling thread copies the array faster than the runtime."""
    (device, *more), dtype = x.sharding.device_set, x.dtype
    # Types of less than a byte are packed on the device.
    whole = dtype.kind in "biufc" or dtype == jnp.bfloat16
    return device.platform == "cpu" and not more and whole and 0 < x.nbytes <= _SMALL_BYTES


def _device_put_copy(x: Any, target: Sharding) -> jax.Array:
    """Copy by `jax.device_put`, without shared memory."""
    # `jax.device_put` shares memory with numpy arrays, and with arrays on the same devices.
    if isinstance(x, np.ndarray):
        x = x.copy()
    elif isinstance(x, jax.Array) and not x.sharding.is_equivalent_to(target, x.ndim):
        x = x.copy() if x.sharding.device_set & target.device_set else x
    return jax.device_put(x, target)


def _plan_transfer(arrays: Sequence[jax.Array], moved: Sequence[jax.Array], of_programs: bool) -> _TransferPlan:
    """Plan the copies, given the same arrays at their targets."""
    others: dict[int, CopyFunction] = {}
    cut_first: dict[int, Sharding] = {}
    lists, targets = [], []
    for i, (x, y) in enumerate(zip(arrays, moved, strict=True)):
        way = _copy_method(x, y)
        if isinstance(way, Sharding):
            cut_first[i] = way
            way = _identity if way == y.sharding else None
        if way is None:
            lists.append(_DeviceList(tuple(_device_slices(y)[0])))
            targets.append(y.sharding)
        else:
            others[i] = way
    here = of_programs and len(lists) == len(arrays) and not cut_first and all(map(_is_small_cpu_array, arrays))
    return _TransferPlan(
        [(x.sharding, x.aval, x.committed) for x in arrays],
        list(cut_first),
        jax.jit(lambda xs: xs, out_shardings=list(cut_first.values())),
        others,
        (lists, targets, [_ALWAYS_COPY] * len(lists) if lists else []),
        list(map(_host_copy_of, arrays, moved)) if here else [],
    )


def _copy_method(x: jax.Array, y: jax.Array) -> CopyFunction | Sharding | None:
    """Return how arrays like `x` become arrays like `y`.

    Returns:
        A copy function; None for a shard-by-shard copy by the runtime; a sharding for resharding before such a copy.
    """
    target, aval = y.sharding, y.aval
    if x.committed and x.sharding == target:
        return _identity
    by_jax = partial(_device_put_copy, target=target)
    if _runtime is None or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return by_jax
    if not (x.is_fully_addressable and y.is_fully_addressable):
        return by_jax
    (sources, source_slices), (devices, target_slices) = _device_slices(x), _device_slices(y)
    if source_slices == target_slices and x.committed and x.aval == aval:
        return None
    if set(target_slices) <= set(source_slices):
        shard_indices = [source_slices.index(cut) for cut in target_slices]
        copy = not x.sharding.is_equivalent_to(target, x.ndim)
        return lambda x: _batched_put(aval, target, [x.addressable_data(k) for k in shard_indices], devices, True, copy)
    if len(sources) == len(devices) and isinstance(target, NamedSharding):
        mesh = target.mesh
        grid = np.array(sources, object).reshape(mesh.axis_sizes)
        return NamedSharding(Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types), target.spec)
    return by_jax


def _identity(x: jax.Array) -> jax.Array:
    return x


def _device_slices(x: jax.Array) -> tuple[list[Any], list[tuple[tuple[int, int, int], ...]]]:
    """Return the devices of an array in order, and start, end and step of each dimension on each device."""
    held = x.sharding.devices_indices_map(x.shape)
    return list(held), [
        tuple(part.indices(size) for part, size in zip(index, x.shape, strict=True)) for index in held.values()
    ]
