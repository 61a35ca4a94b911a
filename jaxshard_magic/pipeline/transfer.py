"""Arrays handed from the devices of one rank to those of another, again and again, with little work a call."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

try:  # what jax.device_put ends in, at a tenth of its price; jax has no public form
    from jax._src.lib import xla_client as _runtime  # pyright: ignore[reportPrivateImportUsage]

    _copied = _runtime.batched_copy_array_to_devices_with_sharding
    _assembled = _runtime.batched_device_put
    _ALWAYS, _DeviceList = _runtime.ArrayCopySemantics.ALWAYS_COPY, _runtime.DeviceList
except (ImportError, AttributeError):
    _runtime = None

Way = Callable[[jax.Array], jax.Array]
_SMALL = 2**16  # bytes that are copied in less time than the runtime takes to wake the thread that copies


class Route:
    """Moves lists of arrays to `targets`, one sharding each, without waiting until they are computed.

    The first call goes by `jax.device_put` and works out how later ones go. Arrays with the types and shardings of the
    first are moved as they lie, all in one call of the runtime; those that are to be cut otherwise over as many devices
    are cut before they leave, all by one program. The rest goes by `jax.device_put`, which may wait for the values:
    numpy's arrays, another shape, another number of devices to be cut over, random keys.

    An array that is at its target is returned as it is. One whose target is the same devices under another name shares
    its memory; any other result shares none with what was given, which may be deleted or donated at once. Several
    threads may call, but the program that cuts runs on the devices that the arrays come from: where there is one, the
    thread that runs programs there must be the one that calls.

    `of_programs`: what is given are outputs of compiled programs, which lie as XLA lays arrays out by default. On
    simulated devices, small ones that are computed already are then copied by the thread that calls: the runtime's own
    copy is made by another thread, and takes the next program off the thread that runs it, since it is not there yet.

    >>> one, other = jax.devices()[:2]
    >>> route = Route([jax.sharding.SingleDeviceSharding(other)])
    >>> [moved] = route([jax.device_put(1.0, one)])
    >>> moved.devices() == {other}
    True
    """

    def __init__(self, targets: Sequence[Sharding], *, of_programs: bool = False):
        self._targets, self._of_programs = list(targets), of_programs
        self._plan: _Plan | None = None

    def __call__(self, arrays: Sequence[Any]) -> list[jax.Array]:
        """`arrays` at the targets, in the same order. Raises ValueError where there are more or fewer than targets."""
        plan = self._plan
        if plan is not None and plan.fits(arrays):
            return plan(arrays)
        moved = [_put(x, target) for x, target in zip(arrays, self._targets, strict=True)]
        if all(isinstance(x, jax.Array) for x in arrays):
            self._plan = _planned(arrays, moved, self._of_programs)
        return moved


@dataclass(frozen=True)
class _Plan:
    """How arrays of the types, shardings and commitments `seen` go: those of `cut_first` by one program, then each one
    of `others` in its way, all the rest copied by the runtime, given their lists of devices, targets and semantics.
    `here`: of arrays that are all plain, small and on one device each how the caller copies them, once computed."""

    seen: list[tuple[Sharding, Any, bool]]
    cut_first: list[int]
    program: Callable[[list[jax.Array]], list[jax.Array]]
    others: dict[int, Way]
    copies: tuple[list, list[Sharding], list]
    here: "list[_Here]"

    def fits(self, arrays: Sequence[Any]) -> bool:
        """Whether these are like those that were seen, by identity: a program's outputs have the same objects for type
        and sharding every time. None may be deleted: copying one can end the process."""
        if len(arrays) != len(self.seen):
            return False
        for x, (sharding, aval, committed) in zip(arrays, self.seen, strict=True):
            if (
                getattr(x, "aval", None) is not aval
                or x.sharding is not sharding
                or x.committed is not committed
                or x.is_deleted()
            ):
                return False
        return True

    def __call__(self, arrays: Sequence[Any]) -> list[jax.Array]:
        others = self.others
        if self.here:
            for x in arrays:
                if not x.is_ready():
                    break
            else:
                return list(map(_copied_here, arrays, self.here))
        if self.cut_first:
            arrays = list(arrays)
            for i, x in zip(self.cut_first, self.program([arrays[i] for i in self.cut_first]), strict=True):
                arrays[i] = x
        plain = arrays if not others else [x for i, x in enumerate(arrays) if i not in others]
        copied = _copied(plain, *self.copies) if plain else []
        if not others:
            return copied
        rest = iter(copied)
        return [others[i](x) if i in others else next(rest) for i, x in enumerate(arrays)]


class _Here(NamedTuple):
    """Arrays of this shape and type, so many bytes in one place, are copied to one device."""

    shape: tuple[int, ...]
    dtype: Any
    memory: type[ctypes.Array]
    aval: Any
    target: Sharding
    devices: list[Any]


def _here(x: jax.Array, y: jax.Array) -> _Here:
    """How `x` is copied to where `y` lies."""
    memory, target = ctypes.c_char * x.nbytes, y.sharding
    return _Here(x.shape, x.dtype, memory, y.aval, target, list(target.device_set))


def _copied_here(x: jax.Array, here: _Here) -> jax.Array:
    shape, dtype, memory, aval, target, devices = here
    x.block_until_ready()  # raises what its program did: jax 0.10 calls an array of a failed program ready, too
    buffer: Any = memory.from_address(x.unsafe_buffer_pointer())
    values = np.ndarray(shape, dtype, buffer).copy()
    return _assembled(aval, target, [values], devices, True, False)


def _small(x: jax.Array) -> bool:
    """Whether the caller copies the array sooner than the runtime does; types of less than a byte lie packed there."""
    (device, *more), dtype = x.sharding.device_set, x.dtype
    whole = dtype.kind in "biufc" or dtype == jnp.bfloat16
    return device.platform == "cpu" and not more and whole and 0 < x.nbytes <= _SMALL


def _put(x: Any, target: Sharding) -> jax.Array:
    """By `jax.device_put`, which shares the memory of devices in common and of numpy's arrays, `may_alias` or not."""
    if isinstance(x, np.ndarray):
        x = x.copy()
    elif isinstance(x, jax.Array) and not x.sharding.is_equivalent_to(target, x.ndim):
        x = x.copy() if x.sharding.device_set & target.device_set else x
    return jax.device_put(x, target)


def _planned(arrays: Sequence[jax.Array], moved: Sequence[jax.Array], of_programs: bool) -> _Plan:
    """`moved`: the same arrays at their targets, which tell what types they have there."""
    others: dict[int, Way] = {}
    cut_first: dict[int, Sharding] = {}
    lists, targets = [], []
    for i, (x, y) in enumerate(zip(arrays, moved, strict=True)):
        way = _way(x, y)
        if isinstance(way, Sharding):
            cut_first[i] = way
            way = _as_it_is if way == y.sharding else None
        if way is None:
            lists.append(_DeviceList(tuple(_cuts(y)[0])))
            targets.append(y.sharding)
        else:
            others[i] = way
    here = of_programs and len(lists) == len(arrays) and not cut_first and all(map(_small, arrays))
    return _Plan(
        [(x.sharding, x.aval, x.committed) for x in arrays],
        list(cut_first),
        jax.jit(lambda xs: xs, out_shardings=list(cut_first.values())),
        others,
        (lists, targets, [_ALWAYS] * len(lists) if lists else []),
        list(map(_here, arrays, moved)) if here else [],
    )


def _way(x: jax.Array, y: jax.Array) -> Way | Sharding | None:
    """How arrays like `x` become arrays like `y`; None where the runtime copies them, part by part, and a sharding
    where they are cut like that first."""
    target, aval = y.sharding, y.aval
    if x.committed and x.sharding == target:
        return _as_it_is
    by_jax = partial(_put, target=target)
    if _runtime is None or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return by_jax
    if not (x.is_fully_addressable and y.is_fully_addressable):
        return by_jax
    (sources, given), (devices, wanted) = _cuts(x), _cuts(y)
    if given == wanted and x.committed and x.aval == aval:
        return None
    if set(wanted) <= set(given):
        parts = [given.index(cut) for cut in wanted]
        copy = not x.sharding.is_equivalent_to(target, x.ndim)
        return lambda x: _assembled(aval, target, [x.addressable_data(k) for k in parts], devices, True, copy)
    if len(sources) == len(devices) and isinstance(target, NamedSharding):
        mesh = target.mesh
        grid = np.array(sources, object).reshape(mesh.axis_sizes)
        return NamedSharding(Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types), target.spec)
    return by_jax


def _as_it_is(x: jax.Array) -> jax.Array:
    return x


def _cuts(x: jax.Array) -> tuple[list[Any], list[tuple[tuple[int, int, int], ...]]]:
    """The devices of an array in their order, and what each one holds: start, end and step of every dimension."""
    held = x.sharding.devices_indices_map(x.shape)
    return list(held), [
        tuple(part.indices(size) for part, size in zip(index, x.shape, strict=True))
        for index in held.values()
    ]
