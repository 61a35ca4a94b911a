"""What JAX's settings ask of a compiled step: that its results are numbers, and that nothing moves unasked."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.config import (  # jax.config asks for each of them in Python, ten times as slowly
    debug_infs,
    debug_nans,
    disable_jit,
    transfer_guard_device_to_device,
    transfer_guard_device_to_host,
    transfer_guard_host_to_device,
)

from ..errors import ShardError
from ..placing import put
from ..temporary import Joined
from .peel import Peeled
from .thread_state import replaced

_GUARDED = ("disallow", "disallow_explicit")
_FREE = (None, "allow")
_GUARDS = (transfer_guard_host_to_device, transfer_guard_device_to_device, transfer_guard_device_to_host)


def are_usual() -> bool:
    """Whether this thread asks for nothing of the kind; read at each call of a step."""
    return not (
        debug_nans.value
        or debug_infs.value
        or disable_jit.value
        or transfer_guard_host_to_device.value not in _FREE
        or transfer_guard_device_to_device.value not in _FREE
    )


def reruns() -> bool:
    """Whether JAX donates nothing, to be able to run a step again that gives a nan."""
    return debug_nans.value


def refuse_disabled(name: str) -> None:
    """Raise `ShardError` where `jax_disable_jit` is set: JAX calls no compiled program then."""
    if disable_jit.value:
        raise ShardError(
            f"jax_disable_jit is set, under which JAX compiles nothing, and {name} sharded is a compiled program: "
            f"jax.config.update('jax_disable_jit', False), or call the plain step, {name}.__wrapped__"
        )


def own_moves() -> AbstractContextManager[Any]:
    """A context for what is done for a step and not by the user: arrays may move."""
    return nullcontext() if are_usual() else Joined(*(replaced(guard, "allow") for guard in _GUARDS))


def own_work() -> AbstractContextManager[Any]:
    """As `own_moves`; and JAX looks at no result, which of a part of a step may be what the whole never shows."""
    if are_usual():
        return nullcontext()
    unlooked = [replaced(looks, False) for looks in (debug_nans, debug_infs)]
    return Joined(*(replaced(guard, "allow") for guard in _GUARDS), *unlooked)


def refuse_host_arrays(leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Raise `ShardError` for an input on the host where `jax_transfer_guard` has jitted functions take none."""
    level = transfer_guard_host_to_device.value
    found = next((p for x, p in zip(leaves, paths, strict=True) if not isinstance(x, jax.Array)), None)
    if level in _GUARDED and found is not None:
        raise ShardError(
            f"jax_transfer_guard is {level!r}, and {found} is on the host: put it on a device first, "
            f"{found.partition('.')[0]} = jax.device_put({found.partition('.')[0]})"
        )


def invalid(outs: Any) -> str | None:
    """`nan` or `inf` for results that have what is refused, None for others."""
    floats = [x for x in jax.tree.leaves(outs) if jnp.issubdtype(x.dtype, jnp.inexact)]
    parts = [np.asarray(shard.data) for x in floats for shard in x.addressable_shards]
    if debug_nans.value and any(np.isnan(part).any() for part in parts):
        return "nan"
    return "inf" if debug_infs.value and any(np.isinf(part).any() for part in parts) else None


def located(call: Peeled | None, leaves: Sequence[Any], kind: str) -> FloatingPointError:
    """The error of a step whose results have a `kind`: as JAX does, the plain step is run operation by operation on the
    same flat inputs, where they are left, and the one that makes it is told."""
    name = "the step" if call is None else call.step.name
    try:
        if call is not None and call.step.pmap is None:
            call.fun(*put(leaves, jax.local_devices()[0]))
    except FloatingPointError as found:
        return found
    except (
        RuntimeError,
        NameError,
    ):  # the inputs were taken over, or the step is written for one device of many
        pass
    return FloatingPointError(
        f"invalid value ({kind}) in the results of {name}, and jax_debug_{kind}s is set; the plain step, "
        f"{name}.__wrapped__, tells the operation on the same arguments"
    )
