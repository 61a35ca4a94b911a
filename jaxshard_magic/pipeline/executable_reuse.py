"""Load a compiled program for other devices of the same kind, in a thousandth of the compile time."""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Lowered

# Private API: jax.experimental.serialize_executable loads a program only for the devices that it was compiled for.
try:
    from jax._src.compiler import get_compile_options
    from jax._src.lib import xla_client as _runtime  # pyright: ignore[reportPrivateImportUsage]
except ImportError:
    get_compile_options: Any = None
    _runtime: Any = None


def program_identity(lowered: Lowered) -> Hashable:
    """Return a key that is equal for programs that differ in their devices only.

    Programs with host callbacks or closed-over arrays get a unique key.
    """
    try:
        inner: Any = lowered._lowering
        given = inner.compile_args
        # Private to jax: after a change of these names, no two programs compare equal and each is compiled.
        if inner.const_args or given["host_callbacks"] or given["keepalive"] or given["ordered_effects"]:
            return object()
        return tuple(sorted(given["kept_var_idx"])), lowered.in_tree, lowered.out_tree, lowered.as_text()
    except (AttributeError, KeyError):
        return object()


def reuse_executable(lowered: Lowered, compiled: Compiled, mesh: Mesh) -> Compiled:
    """Return `lowered` as an executable, loaded from an equal program on another mesh instead of compiled.

    Falls back to compiling where programs can't be loaded for other devices. Loading works for simulated (CPU) devices
    only, and not with jax's compilation cache on disk.

    Args:
        lowered: The program, with all arrays on `mesh`.
        compiled: The same program, compiled for another mesh.
        mesh: The devices to load for.
    """
    config: Any = jax.config
    devices = list(mesh.devices.flat)
    # XLA writes a CPU program to the cache on disk without its functions: an executable from there can't be loaded for
    # other devices.
    has_disk_cache = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir is not None
    if get_compile_options is not None and devices[0].platform == "cpu" and not has_disk_cache:
        numbers = np.array([[d.id for d in devices]])  # (replicas, partitions): one replica over all devices
        try:
            inner: Any = lowered._lowering
            executable: Any = compiled._executable
            unloaded, device_list = executable._unloaded_executable, _runtime.DeviceList(tuple(devices))
            serialized, options = (unloaded.xla_executable.serialize(), get_compile_options(1, len(devices), numbers))
            inner._executable = replace(
                unloaded,
                xla_executable=devices[0].client.deserialize_executable(serialized, device_list, options),
                device_list=device_list,
                input_shardings=[
                    NamedSharding(mesh, s.spec, memory_kind=s.memory_kind) for s in unloaded.input_shardings
                ],
                output_shardings=[
                    NamedSharding(mesh, s.spec, memory_kind=s.memory_kind) for s in unloaded.output_shardings
                ],
            ).load()
        except (AttributeError, TypeError, jax.errors.JaxRuntimeError):
            pass  # the private API has changed: compile
    return lowered.compile()
