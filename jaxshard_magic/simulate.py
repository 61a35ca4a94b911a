"""Simulated CPU devices, and more of them in a live kernel without loss of the user's arrays.

A restarted CPU backend has new devices. Arrays on the old devices remain readable, but sharded or committed ones can't
be combined with arrays on new devices, and other arrays are copied in full at every use. Therefore all arrays reachable
from the user's namespaces are replaced: dicts, lists, objects (NNX, Equinox, dataclasses) and closures are changed in
place, tuples are rebuilt.
"""

import functools
import gc
import math
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax._src import xla_bridge
from jax.extend.backend import clear_backends
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .errors import ShardError, parse_count
from .introspect import is_a
from .temporary import run_uninterrupted

MAX_DEVICES = 512  # start in 0.3 s; 4096 take seconds and 14,000 threads
_THREADS = 32  # with fewer, programs can starve each other, and XLA aborts the process after 40 s

Namespaces = Iterable[MutableMapping[str, Any]]


@dataclass(frozen=True)
class Machine:
    """Default platform of JAX, and the CPU devices beside it.

    Attributes:
        platform: Default platform; None until a backend has started.
        devices: Number of its devices, on all processes.
        cpu: Number of CPU devices; None until a backend has started, 0 if JAX has no CPU backend.
        processes: Number of processes.
    """

    platform: str | None
    devices: int
    cpu: int | None
    processes: int = 1


def machine() -> Machine:
    """Return the machine in its present state, without starting a backend."""
    if not xla_bridge.backends_are_initialized():
        return Machine(None, 0, None)
    return Machine(jax.default_backend(), jax.device_count(), len(_cpus()), jax.process_count())


def config_value(name: str) -> Any:
    """Return the value of an option of `jax.config`."""
    return getattr(jax.config, name)


def cpu_devices() -> list[Any]:
    """Return the CPU devices of all processes. Raises ShardError if JAX is configured without a CPU backend."""
    if not (devices := _cpus()):
        allowed = os.environ.get("JAX_PLATFORMS") or config_value("jax_platforms")
        raise ShardError(
            f"no CPU devices to simulate: JAX is limited to the platforms '{allowed}'. "
            f"Restart the kernel with JAX_PLATFORMS={allowed},cpu",
            fix=f"JAX_PLATFORMS={allowed},cpu",
        )
    return devices


def set_default_count(count: int) -> None:
    """Set the number of devices for the start of the CPU backend, unless the user has set a number."""
    told = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not told and config_value("jax_num_cpu_devices") < 0:
        _configure(count)


def start(count: int) -> None:
    """Set the number of CPU devices. A running backend is cleared, so all its arrays must have been copied before."""
    if xla_bridge.backends_are_initialized():
        clear_backends()
    _configure(count)


def restart(count: int, namespaces: Namespaces, make_mesh: Callable[[], Mesh]) -> tuple[Mesh, tuple[str, ...]]:
    """Restart the CPU backend with another number of devices and move the arrays in the user's namespaces.

    An array keeps its PartitionSpec if the new mesh has the axes and they divide the array, or else the device to which
    it was committed. All arrays are read before anything is changed: an error there leaves everything as it was.

    Args:
        count: Number of devices.
        namespaces: Dicts to search for arrays.
        make_mesh: Called after the restart; makes the new mesh.

    Returns:
        The mesh, and notes for the user.
    """
    spaces = list(namespaces)
    parked = _park(spaces)
    outside = _sharded_elsewhere(parked)
    notes = [f"{name}: still on the old devices; make it again" for name in _meshes_and_shardings(spaces)]

    default_device = config_value("jax_default_device")

    def moved() -> tuple[Mesh, dict[int, jax.Array]]:
        """Restart and replace the arrays."""
        start(count)
        mesh = make_mesh()
        if isinstance(default_device, jax.Device):
            jax.config.update("jax_default_device", jax.devices()[default_device.id])
        placed = {id(p.array): p.placed(mesh) for p in parked}
        _each_array(spaces, lambda x: placed.get(id(x), x))
        return mesh, placed

    mesh, placed = run_uninterrupted(moved)  # an interrupt halfway would leave arrays on the old devices
    if not jax.sharding.get_mesh().empty:
        jax.set_mesh(mesh)
        notes.append("jax.set_mesh: now this mesh")
    if parked:
        notes.insert(0, _moved(parked, placed))
    parked.clear()
    # Old arrays in reference cycles would be counted as still in use.
    gc.collect()
    if left := sum(x() is not None for x in outside):
        notes.append(
            f"{left} sharded {_arrays(left)} outside the namespace stayed on the old devices, readable; "
            "move one with jax.device_put(x, sharding)"
        )
    return mesh, tuple(notes)


def _cpus() -> list[Any]:
    """Return the CPU devices, or none."""
    try:
        return jax.devices("cpu")
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return []


def _configure(count: int) -> None:
    """Set the number of devices and enough threads for them."""
    # XLA for the CPU takes its number of threads from NPROC.
    given = parse_count(os.environ.get("NPROC", "")) or 0
    os.environ["NPROC"] = str(max(_THREADS, count, given))
    jax.config.update("jax_num_cpu_devices", count)


def _arrays(n: int) -> str:
    return "array" if n == 1 else "arrays"


def _moved(parked: "list[_HostCopy]", placed: Mapping[int, jax.Array]) -> str:
    """Describe the arrays that were moved."""
    sharded = [p for p in parked if p.committed and not isinstance(p.array.sharding, SingleDeviceSharding)]
    lost = sum(not isinstance(placed[id(p.array)].sharding, NamedSharding) for p in sharded)
    text = f"moved {len(parked)} {_arrays(len(parked))} to the new devices"
    if lost:
        text += f", {lost} of them unsharded: this mesh lacks their axes, or its sizes don't divide them"
    return text


# Moving one array

_WIDE = ("float64", "int64", "uint64", "complex128")


@dataclass(frozen=True)
class _HostCopy:
    """Array with a copy of its values on the host, made before its backend is cleared.

    Attributes:
        array: Array on the old backend.
        values: Values; key data of typed keys.
        committed: Whether the array is committed to devices.
    """

    array: jax.Array
    values: np.ndarray
    committed: bool

    @classmethod
    def of(cls, x: jax.Array) -> "_HostCopy":
        """Copy an array to the host. Raises ShardError if it can't be read."""
        bits = jax.random.key_data(x) if _is_key(x) else x
        try:
            return cls(x, np.asarray(bits), bits.committed)
        except jax.errors.JaxRuntimeError as error:  # the program that computes it failed
            reason = str(error).partition("\n")[0]
            raise ShardError(
                f"an array, {x.aval.str_short()}, cannot be read, so nothing was moved ({reason}). "
                "Delete it or make it again"
            ) from error

    def placed(self, mesh: Mesh) -> jax.Array:
        """Return the array on the new backend."""
        old = self.array
        sharding = new_sharding(old.sharding, old.shape, mesh) if self.committed else None
        with jax.enable_x64(self.values.dtype.name in _WIDE):  # without x64, 64-bit values become 32-bit ones
            if _is_key(old):
                new = jax.random.wrap_key_data(jax.device_put(self.values), impl=jax.random.key_impl(old))
            elif old.weak_type:  # NumPy has no weak types, so the array itself is copied
                everywhere = NamedSharding(mesh, PartitionSpec())
                return jax.device_put(old, sharding or everywhere) if self.committed else jnp.copy(old)
            else:
                new = self.values
            return jax.device_put(new) if sharding is None else jax.device_put(new, sharding)


def new_sharding(old: Sharding, shape: tuple[int, ...], mesh: Mesh) -> Sharding | None:
    """Return the sharding on the new backend in place of `old`; None for an uncommitted array on the default device.

    Args:
        old: Sharding on the old backend.
        shape: Shape of the array.
        mesh: New mesh.
    """
    if isinstance(old, SingleDeviceSharding):
        device = jax.devices()[next(iter(old.device_set)).id]
        return SingleDeviceSharding(device, memory_kind=old.memory_kind)
    if not isinstance(old, NamedSharding):
        return None
    for size, entry in zip(shape, old.spec, strict=False):
        axes = (entry,) if isinstance(entry, str) else entry or ()
        if any(a not in mesh.shape for a in axes) or size % math.prod(mesh.shape[a] for a in axes):
            return None
    return NamedSharding(mesh, old.spec, memory_kind=old.memory_kind)


def _is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _park(spaces: Iterable[Any]) -> list[_HostCopy]:
    """Copy all arrays in the namespaces to the host, except deleted ones."""
    found: dict[int, jax.Array] = {}
    _each_array(spaces, lambda x: found.setdefault(id(x), x))
    return [_HostCopy.of(x) for x in found.values() if not x.is_deleted()]


def _sharded_elsewhere(parked: list[_HostCopy]) -> list[weakref.ref]:
    """Return weak references to the live arrays on several devices outside of the namespaces."""
    known = {id(p.array) for p in parked}
    return [weakref.ref(x) for x in jax.live_arrays() if len(x.devices()) > 1 and id(x) not in known]


def _meshes_and_shardings(spaces: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the user's names for meshes and shardings."""
    return [
        name
        for space in spaces
        for name, value in space.items()
        if is_a(value, (Mesh, Sharding)) and not name.startswith("_")
    ]


# Search for arrays

# A child, its setter `put(place, new)`, and the place.
Slot = tuple[Any, Callable[[Any, Any], None], Any]

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, slice, range, np.ndarray})
_DEPTH = 100  # levels of nesting; deeper arrays are not moved, and count as outside the namespace
# Objects of these packages are not searched: they contain no arrays of the user, or none that can be found.
_CLOSED = (sys.stdlib_module_names - {"types", "collections", "dataclasses"}) | {
    *("IPython", "ipykernel", "ipywidgets", "jax", "jaxlib", "matplotlib", "numpy", "pandas", "plotly"),
    *("tensorflow", "torch", "traitlets"),
}


def _each_array(spaces: Iterable[Any], new: Callable[[jax.Array], jax.Array]) -> None:
    """Replace every reachable array `x` by `new(x)`; an array under two names remains a single one."""
    seen: dict[int, tuple[Any, Any]] = {}
    for space in spaces:
        _replace_arrays(space, new, seen, 0)


def _replace_arrays(value: Any, new: Callable, seen: dict[int, tuple[Any, Any]], depth: int) -> Any:
    """Return `value`, changed in place, or its replacement. `seen` has old and new objects by the id of the old one."""
    kind = type(value)
    if kind in _ATOMS or (kind is tuple and _plain(value)) or issubclass(kind, type | types.ModuleType):
        return value
    if is_a(value, jax.Array):
        return value if isinstance(value, jax.core.Tracer) else new(value)
    if id(value) in seen:
        return seen[id(value)][1]
    if depth > _DEPTH:
        return value
    # The entry references the old object: a new object could get the id of a collected one.
    seen[id(value)] = value, value
    if issubclass(kind, tuple):
        items = [_replace_arrays(v, new, seen, depth + 1) for v in value]
        if any(a is not b for a, b in zip(items, value, strict=True)):
            # For named tuples as well, whose own constructor takes the fields one by one.
            seen[id(value)] = value, tuple.__new__(kind, items)
        return seen[id(value)][1]
    for child, put, place in _slots(value):
        if (fresh := _replace_arrays(child, new, seen, depth + 1)) is not child:
            put(place, fresh)
    return value


def _plain(values: Iterable[Any]) -> bool:
    """Return whether no value can contain an array."""
    return _ATOMS.issuperset(map(type, values))


def _slots(value: Any) -> Iterator[Slot]:
    """Yield the children of a container, function or object, each with its setter."""
    if is_a(value, dict):
        if not _plain(value.values()):
            put = functools.partial(dict.__setitem__, value)
            yield from ((v, put, k) for k, v in list(value.items()))
    elif is_a(value, (list, deque)):
        if not _plain(value):
            yield from ((v, value.__setitem__, i) for i, v in enumerate(value))
    elif is_a(value, functools.partial):
        yield from _bound(value)
    elif is_a(value, types.MethodType):
        yield value.__self__, _stays, None
        yield value.__func__, _stays, None
    elif is_a(value, types.FunctionType):
        yield from _cells(value)
        yield vars(value), _stays, None
        yield value.__defaults__, functools.partial(setattr, value), "__defaults__"
        yield value.__kwdefaults__, _stays, None
    elif (package := str(type(value).__module__).partition(".")[0]) in ("jax", "jaxlib"):
        yield getattr(value, "__wrapped__", None), _stays, None  # the function under a jit
    elif package not in _CLOSED:
        yield from _attributes(value)


def _stays(place: Any, new: Any) -> None:
    """Setter for children that are changed in place and never replaced."""


def _bound(value: functools.partial) -> Iterator[Slot]:
    """Yield the slots of a `functools.partial`."""
    state = [value.func, value.args, value.keywords, vars(value)]

    def put(index: int, new: Any) -> None:
        state[index] = new
        # The attributes of a partial are read-only.
        value.__setstate__(tuple(state))  # type: ignore[attr-defined]

    yield from ((part, put, i) for i, part in enumerate(tuple(state)))


def _cells(function: types.FunctionType) -> Iterator[Slot]:
    """Yield the slots of a function's closure."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not filled yet
            yield cell.cell_contents, functools.partial(setattr, cell), "cell_contents"


def _attributes(value: Any) -> Iterator[Slot]:
    """Yield the attributes of an object, bypassing its `__getattr__` and `__setattr__`, so that frozen ones are set as
    well."""
    with suppress(AttributeError):
        yield object.__getattribute__(value, "__dict__"), _stays, None
    for base in type(value).__mro__:
        for slot in vars(base).values() if "__slots__" in vars(base) else ():
            if isinstance(slot, types.MemberDescriptorType):
                with suppress(AttributeError):  # not set
                    yield slot.__get__(value), slot.__set__, value
