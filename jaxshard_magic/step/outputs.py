"""The inputs and outputs of a step's program as a checkpoint names them, and arrays that stand in for its outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checkpoints.objects import impl_of
from ..placing import own_copy, put
from ..program.trace import path_name
from .journal import SMALL, Kind, Small

if TYPE_CHECKING:
    from .entry import Entry

CARRIED = "carried."  # names of what a program keeps from call to call itself
BEFORE = "before."  # names of state that went into the last call, and may be what the loop goes on with
OWN = (BEFORE, CARRIED, "return")  # what a checkpoint has beside the state that goes into a call


@dataclass(frozen=True)
class Outputs:
    """What the flat outputs of a program are.

    Args:
        state: output -> the flat input whose next value it is.
        names: flat input -> its name, of those that are state.
        small: what a journal keeps of each call.
        large: output -> its name, of those that are neither.
    """

    state: Mapping[int, int]
    names: Mapping[int, str]
    small: Kind
    large: Mapping[int, str]


def outputs_of(entry: "Entry") -> Outputs:
    """What the outputs of a program are. State is what the plan takes for the next value of an argument, and what is
    written into one."""
    n, traced = len(entry.consts), entry.traced
    avals = given(entry)
    at = {path: i for i, path in enumerate(traced.in_paths)}
    written = {o: at.get(path, -1) for o, path in enumerate(traced.out_paths[: len(avals)])}
    same = {o: i for o, i in written.items() if i >= n and traced.closed.in_avals[i].shape == avals[o].shape}
    state = {o: i - n for o, i in {**same, **entry.plan.state_pairs}.items() if i >= n}
    names = {i: path_name(traced.in_paths[n + i]) for i in state.values()}
    small, large = [], {}
    for o, aval in enumerate(avals):
        if o in state:
            continue
        plain = isinstance(aval.dtype, np.dtype)
        if plain and aval.size * aval.dtype.itemsize <= SMALL:
            small.append(Small(o, tuple(aval.shape), aval.dtype.name))
        else:
            large[o] = path_name(traced.out_paths[o])
    return Outputs(state, names, tuple(small), large)


def given(entry: "Entry") -> Sequence[Any]:
    """The shapes of the flat outputs that a call gives: without those that the program keeps for its next call."""
    avals = entry.traced.closed.out_avals
    return avals[: len(avals) - (0 if entry.rewritten is None else entry.rewritten.carried)]


def flat_outs(entry: "Entry", outs: Any) -> Sequence[Any]:
    """The flat outputs of a call."""
    return jax.tree.leaves(outs) if entry.whole else outs


def as_given(entry: "Entry", flat: Sequence[Any]) -> Any:
    """Flat outputs as a call of the program gives them."""
    return entry.result.tree.unflatten(flat) if entry.whole else list(flat)


def stand_in(entry: "Entry", o: int, i: int, x: Any) -> Any:
    """The flat input `i`, placed, as the flat output `o`: of its type, where outputs lie, and never an array of the
    user's that the step might take over later."""
    aval, sharding = entry.traced.closed.out_avals[o], entry.out_shardings[o]
    alike = (
        isinstance(x, jax.Array)
        and x.dtype == aval.dtype
        and getattr(x, "weak_type", False) == getattr(aval, "weak_type", False)
        and x.sharding.is_equivalent_to(sharding, x.ndim)
    )
    if alike:
        return own_copy(x, sharding) if entry.donated and i not in entry.donated else x
    return placed_as(entry, o, x)


def as_input(entry: "Entry", i: int, x: Any, like: Any) -> Any:
    """An array as the flat input `i`, where the call gave `like`: a number where that is one."""
    if isinstance(like, (bool, int, float, complex)):
        return type(like)(np.asarray(x).item())
    return put([x], entry.shardings[i])[0]


def placed_as(entry: "Entry", o: int, x: Any) -> jax.Array:
    """`x` as the flat output `o`: an array of its type where it lies."""
    aval, sharding = entry.traced.closed.out_avals[o], entry.out_shardings[o]
    if not isinstance(aval.dtype, np.dtype):  # typed keys
        return put([x], sharding)[0]
    if getattr(aval, "weak_type", False) and not aval.shape:
        return jax.jit(lambda value: value, out_shardings=sharding)(np.asarray(x).item())
    if not isinstance(x, jax.Array):
        x = np.asarray(x, aval.dtype)
    elif x.dtype != aval.dtype or x.weak_type:
        x = jnp.asarray(x, aval.dtype)
    return put([x], sharding)[0]


def nothing(entry: "Entry", o: int) -> jax.Array:
    """Zeros in the place of an output that nobody kept."""
    aval = entry.traced.closed.out_avals[o]
    if not isinstance(aval.dtype, np.dtype):
        keys = jnp.broadcast_to(jax.random.key(0, impl=impl_of(str(aval.dtype))), aval.shape)
        return put([keys], entry.out_shardings[o])[0]
    return placed_as(entry, o, np.zeros(aval.shape, aval.dtype))
