"""Which output of a step is its loss: by the name that the user gave it, else by the gradient calls."""

from collections.abc import Callable, Collection

import jax.numpy as jnp
from jax.tree_util import DictKey, KeyPath

from .flow import Flow, Through, by_alias
from .trace import Traced

MOST = 2**16  # elements; of a longer array nobody means the last one


def find_loss(traced: Traced, flow: Flow, state: Collection[int]) -> int | None:
    """The output that is the loss, or whose last element is: a scalar, else a vector (an epoch in one scan).

    `state` are the outputs that are the next value of an input. A scalar without a name that is the only one; else
    the first that is named so, that is the value of a gradient call, or that depends on one.
    """
    avals, written = traced.closed.out_avals, set(traced.in_paths)
    names = [_name(path) for path in traced.out_paths]
    floats = [
        o
        for o, aval in enumerate(avals)
        if jnp.issubdtype(aval.dtype, jnp.floating)
        and o not in state
        and traced.out_paths[o] not in written
        and flow.program.outputs[o] is not None
    ]

    def is_value(o: int, through: Through | None = by_alias) -> bool:
        return not flow.values.isdisjoint(flow.back([flow.program.outputs[o]], through))

    signs: list[Callable[[int], bool]] = [
        lambda o: names[o] == "loss",
        lambda o: "loss" in names[o] and is_value(o),
        lambda o: "loss" in names[o],
        is_value,
        lambda o: is_value(o, None),
    ]
    scalars = [o for o in floats if not avals[o].shape]
    vectors = [o for o in floats if 0 < len(avals[o].shape) <= 2 and 0 < avals[o].size <= MOST]
    if len(scalars) == 1 and not names[scalars[0]]:
        return scalars[0]
    found = (o for outputs in (scalars, vectors) for sign in signs for o in filter(sign, outputs))
    return next(found, None)


def _name(path: KeyPath) -> str:
    """The innermost name in an output's path, in lower case; the result of a function has none."""
    keys = [key.key if isinstance(key, DictKey) else getattr(key, "name", None) for key in path[1:]]
    return next((key.lower() for key in reversed(keys) if isinstance(key, str)), "")
