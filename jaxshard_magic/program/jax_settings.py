"""JAX settings that a compiled step must honour: nan checks, transfer guards, disabled jit."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.config import (  # read at each call of a step, and ten times faster than through `jax.config`
    debug_infs,
    debug_nans,
    disable_jit,
    transfer_guard_device_to_device,
    transfer_guard_device_to_host,
    transfer_guard_host_to_device,
)

from ..device_arrays import put
from ..errors import ShardError
from ..temporary import ChangeGroup
from .flatten_call import FlatCall
from .thread_state import override_setting

_GUARDED = ("disallow", "disallow_explicit")
_UNGUARDED = (None, "allow")
_GUARDS = (transfer_guard_host_to_device, transfer_guard_device_to_device, transfer_guard_device_to_host)


def are_default() -> bool:
    """Return whether this thread has default settings, the device-to-host guard aside; read at each call of a step."""
    return not (
        debug_nans.value
        or debug_infs.value
        or disable_jit.value
        or transfer_guard_host_to_device.value not in _UNGUARDED
        or transfer_guard_device_to_device.value not in _UNGUARDED
    )


def is_donation_disabled() -> bool:
    """Return whether JAX donates nothing, to be able to rerun a step that produces a nan."""
    return debug_nans.value


def check_jit_enabled(name: str) -> None:
    """Raise `ShardError` under `jax_disable_jit`: JAX calls no compiled program then."""
    if disable_jit.value:
        raise ShardError(
            f"jax_disable_jit is set, under which JAX compiles nothing, and {name} sharded is a compiled program: "
            f"jax.config.update('jax_disable_jit', False), or call the plain step, {name}.__wrapped__"
        )


def allow_transfers() -> AbstractContextManager[Any]:
    """Return a context that allows transfers, for work done for a step and not by the user."""
    return nullcontext() if are_default() else ChangeGroup(*(override_setting(guard, "allow") for guard in _GUARDS))


def suspend_checks() -> AbstractContextManager[Any]:
    """Return a context that allows transfers and turns nan and inf checks off."""
    if are_default():
        return nullcontext()
    # A part of a step may produce nans that the full step never shows.
    unchecked = [override_setting(check, False) for check in (debug_nans, debug_infs)]
    return ChangeGroup(*(override_setting(guard, "allow") for guard in _GUARDS), *unchecked)


def check_host_inputs(leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Raise `ShardError` for a host input under a `jax_transfer_guard` that forbids host inputs to jitted functions.

    Args:
        leaves: Flat inputs.
        paths: Names of the inputs.
    """
    level = transfer_guard_host_to_device.value
    host_input = next((p for x, p in zip(leaves, paths, strict=True) if not isinstance(x, jax.Array)), None)
    if level in _GUARDED and host_input is not None:
        raise ShardError(
            f"jax_transfer_guard is {level!r}, and {host_input} is on the host: put it on a device first, "
            f"{host_input.partition('.')[0]} = jax.device_put({host_input.partition('.')[0]})"
        )


def invalid_kind(outs: Any) -> str | None:
    """Return "nan" or "inf" for results with forbidden values, else None."""
    floats = [x for x in jax.tree.leaves(outs) if jnp.issubdtype(x.dtype, jnp.inexact)]
    # A process can read only the shards on its own devices.
    shards = [np.asarray(shard.data) for x in floats for shard in x.addressable_shards]
    if debug_nans.value and any(np.isnan(part).any() for part in shards):
        return "nan"
    return "inf" if debug_infs.value and any(np.isinf(part).any() for part in shards) else None


def locate_invalid(call: FlatCall | None, leaves: Sequence[Any], kind: str) -> FloatingPointError:
    """Return the error for a step whose results contain `kind`.

    As JAX does, the plain step runs operation by operation on the same flat inputs, if they still exist, to name the
    operation at fault. A step under `jax.pmap` does not run so.

    Args:
        call: Call of the step; None if unknown.
        leaves: Flat inputs.
        kind: "nan" or "inf".
    """
    name = "the step" if call is None else call.step.name
    try:
        if call is not None and call.step.pmap is None:
            call.flat_function(*put(leaves, jax.local_devices()[0]))
    except FloatingPointError as error:
        return error
    except (RuntimeError, NameError):  # inputs were donated, or the step has axis names of per-device code
        pass
    return FloatingPointError(
        f"invalid value ({kind}) in the results of {name}, and jax_debug_{kind}s is set; the plain step, "
        f"{name}.__wrapped__, tells the operation on the same arguments"
    )
