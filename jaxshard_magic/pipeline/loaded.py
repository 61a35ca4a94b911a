"""A compiled program loaded for other devices of its kind, in a thousandth of the time that compiling it takes."""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Lowered

try:  # jax.experimental.serialize_executable loads a program for its own devices alone
    from jax._src.compiler import get_compile_options
    from jax._src.lib import xla_client as _runtime  # pyright: ignore[reportPrivateImportUsage]
except ImportError:
    get_compile_options: Any = None
    _runtime: Any = None


def likeness(lowered: Lowered) -> Hashable:
    """The same for programs that are one but for the devices that they run on. A program that calls back to Python, or
    reads arrays that it closes over, is like no other."""
    try:
        inner: Any = lowered._lowering
        given = inner.compile_args
        if inner.const_args or given["host_callbacks"] or given["keepalive"] or given["ordered_effects"]:
            return object()
        return tuple(sorted(given["kept_var_idx"])), lowered.in_tree, lowered.out_tree, lowered.as_text()
    except (AttributeError, KeyError):
        return object()


def compiled_like(lowered: Lowered, other: Compiled, mesh: Mesh) -> Compiled:
    """`lowered`, all of whose arrays lie on `mesh`, without compiling it: `other` is the same program on another mesh.

    It is compiled after all where programs can't be loaded for other devices: so far they are for simulated ones alone,
    and not where `other` may come from jax's cache on disk, since XLA writes such a program down without its functions.
    """
    config: Any = jax.config
    devices = list(mesh.devices.flat)
    cached = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir is not None
    if get_compile_options is not None and devices[0].platform == "cpu" and not cached:
        numbers = np.array([[d.id for d in devices]])  # one copy of the program, over all of them
        try:
            inner: Any = lowered._lowering
            known: Any = other._executable
            old, on = known._unloaded_executable, _runtime.DeviceList(tuple(devices))
            written, options = old.xla_executable.serialize(), get_compile_options(1, len(devices), numbers)
            inner._executable = replace(
                old,
                xla_executable=devices[0].client.deserialize_executable(written, on, options),
                device_list=on,
                input_shardings=[
                    NamedSharding(mesh, s.spec, memory_kind=s.memory_kind) for s in old.input_shardings
                ],
                output_shardings=[
                    NamedSharding(mesh, s.spec, memory_kind=s.memory_kind) for s in old.output_shardings
                ],
            ).load()
        except (AttributeError, TypeError, jax.errors.JaxRuntimeError):
            pass  # what it needs is private to jax, and gone or changed
    return lowered.compile()
