"""Name the inputs and outputs of a step's program for checkpoints, and make stand-ins for outputs of skipped calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checkpoints.state_arrays import prng_impl_of
from ..compilation.compiled_step import CompiledStep
from ..device_arrays import own_copy, put
from ..program.trace import path_name
from .step_log import MAX_SMALL_BYTES, OutputSchema, SmallOutput

CARRIED_PREFIX = "carried."  # names of values that a program itself carries from call to call
PREVIOUS_PREFIX = "before."  # names of state that went into the last call: the loop may go on from it
# Names in a checkpoint other than those of the state that goes into the next call.
NON_STATE_PREFIXES = (PREVIOUS_PREFIX, CARRIED_PREFIX, "return")


@dataclass(frozen=True)
class OutputRoles:
    """Roles of a program's flat outputs.

    Attributes:
        state_inputs: For an output that is the next value of state, the flat input with the present value.
        state_names: Name of each flat input that is state.
        small: Small outputs, logged for each call.
        large_names: Name of each remaining output.
    """

    state_inputs: Mapping[int, int]
    state_names: Mapping[int, str]
    small: OutputSchema
    large_names: Mapping[int, str]


def output_roles(entry: CompiledStep) -> OutputRoles:
    """Return the roles of a program's outputs.

    State is an output planned as the next value of an argument, or written into an argument.
    """
    n, traced = len(entry.consts), entry.traced
    avals = returned_avals(entry)
    input_positions = {path: i for i, path in enumerate(traced.in_paths)}
    written = {o: input_positions.get(path, -1) for o, path in enumerate(traced.out_paths[: len(avals)])}
    same = {o: i for o, i in written.items() if i >= n and traced.closed.in_avals[i].shape == avals[o].shape}
    state = {o: i - n for o, i in {**same, **entry.plan.state_pairs}.items() if i >= n}
    names = {i: path_name(traced.in_paths[n + i]) for i in state.values()}
    small, large = [], {}
    for o, aval in enumerate(avals):
        if o in state:
            continue
        # Typed PRNG keys have no NumPy dtype, and the log is of NumPy arrays.
        plain = isinstance(aval.dtype, np.dtype)
        if plain and aval.size * aval.dtype.itemsize <= MAX_SMALL_BYTES:
            small.append(SmallOutput(o, tuple(aval.shape), aval.dtype.name))
        else:
            large[o] = path_name(traced.out_paths[o])
    return OutputRoles(state, names, tuple(small), large)


def returned_avals(entry: CompiledStep) -> Sequence[Any]:
    """Return the avals of the flat outputs of a call, without values carried to the next call inside the program."""
    avals = entry.traced.closed.out_avals
    return avals[: len(avals) - (0 if entry.rewritten is None else entry.rewritten.carried)]


def flat_outputs(entry: CompiledStep, outs: Any) -> Sequence[Any]:
    """Return the flat outputs of a call."""
    return jax.tree.leaves(outs) if entry.takes_pytrees else outs


def unflatten_outputs(entry: CompiledStep, flat: Sequence[Any]) -> Any:
    """Return flat outputs in the form returned by the program: the user's own pytree, or a list."""
    return entry.result.treedef.unflatten(flat) if entry.takes_pytrees else list(flat)


def input_as_output(entry: CompiledStep, o: int, i: int, x: Any) -> Any:
    """Return a placed flat input in place of a skipped call's output, with the dtype and sharding of the output.

    Args:
        entry: Compiled program.
        o: Position of the flat output.
        i: Position of the flat input.
        x: The placed input.
    """
    aval, sharding = entry.traced.closed.out_avals[o], entry.out_shardings[o]
    alike = (
        isinstance(x, jax.Array)
        and x.dtype == aval.dtype
        and getattr(x, "weak_type", False) == getattr(aval, "weak_type", False)
        and x.sharding.is_equivalent_to(sharding, x.ndim)
    )
    if alike:
        # A copy: the array is the user's, and a later call may donate it.
        return own_copy(x, sharding) if entry.donated and i not in entry.donated else x
    return to_output(entry, o, x)


def to_input(entry: CompiledStep, i: int, x: Any, like: Any) -> Any:
    """Return `x` as the flat input `i`; a Python number if `like`, the value in the call, is one."""
    if isinstance(like, (bool, int, float, complex)):
        return type(like)(np.asarray(x).item())
    return put([x], entry.shardings[i])[0]


def to_output(entry: CompiledStep, o: int, x: Any) -> jax.Array:
    """Return `x` as the flat output `o`, with the output's dtype and sharding."""
    aval, sharding = entry.traced.closed.out_avals[o], entry.out_shardings[o]
    if not isinstance(aval.dtype, np.dtype):  # typed PRNG keys
        return put([x], sharding)[0]
    if getattr(aval, "weak_type", False) and not aval.shape:
        # JAX makes weakly typed arrays from Python numbers only, by tracing them.
        return jax.jit(lambda value: value, out_shardings=sharding)(np.asarray(x).item())
    if not isinstance(x, jax.Array):
        x = np.asarray(x, aval.dtype)
    elif x.dtype != aval.dtype or x.weak_type:
        x = jnp.asarray(x, aval.dtype)
    return put([x], sharding)[0]


def zero_output(entry: CompiledStep, o: int) -> jax.Array:
    """Return zeros for an output that was not saved."""
    aval = entry.traced.closed.out_avals[o]
    if not isinstance(aval.dtype, np.dtype):
        keys = jnp.broadcast_to(jax.random.key(0, impl=prng_impl_of(str(aval.dtype))), aval.shape)
        return put([keys], entry.out_shardings[o])[0]
    return to_output(entry, o, np.zeros(aval.shape, aval.dtype))
