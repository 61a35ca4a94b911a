"""All the numbers that calls left behind, returned or changed in place, and how those of two runs differ."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import tree_flatten_with_path

from .registry import Call, Step, leaf_name

# Adam's first step turns the sign of a gradient near zero into a whole step: of few elements, not of a leaf.
FEW, LARGEST = 2e-3, 2e-2


def numbers(call: Call, result: Any) -> dict[str, np.ndarray]:
    """The numbers of the result and of the NNX objects among the arguments: `result.0.w`, `model.linear.kernel`.

    Keys come as their uint32 data and bfloat16 as float32; functions and other leaves are left out.
    """
    trees = {"result": result}
    trees |= {name: x for name, x in call.arguments().items() if _changes_in_place(x)}
    leaves = [(leaf_name(path), x) for path, x in tree_flatten_with_path(trees)[0] if _is_number(x)]
    by_name = {name: _as_numpy(x) for name, x in leaves}
    assert len(by_name) == len(leaves) > 0, "names must differ"
    return by_name


def numbers_of_calls(step: Step, call: Call, fn: Callable[..., Any], calls: int = 3) -> Iterator[dict[str, np.ndarray]]:
    """The numbers after each of so many calls of `fn`, which stands in the place of the call's own function; each call
    takes the state that the one before it brought."""
    for _ in range(calls):
        result = fn(*call.args, **call.kwargs)
        yield numbers(call, result)
        call = step.advance(call, result)


@dataclass(frozen=True)
class Difference:
    """How far a leaf is off: its largest difference relative to its largest number, and the share of its elements that
    differ by more than rounding explains."""

    name: str
    largest: float
    share: float

    @property
    def rounding(self) -> bool:
        return self.share <= FEW and self.largest <= LARGEST


def differences(step: Step, got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> Iterator[Difference]:
    """Leaf by leaf, but for those that only rounding moves. Another shape, or what is no number, is infinitely far
    off."""
    for name, b in want.items():
        a, inside = got[name], name.removeprefix("result.")
        if any(inside.startswith(n) or f".{n}" in name for n in step.noise):
            continue
        if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
            yield Difference(name, float("inf"), 1.0)
            continue
        a, b = (np.where(np.isfinite(b), x, 0).astype(complex) for x in (a, b))
        off = np.abs(a - b) / max(float(np.max(np.abs(b), initial=0)), 1e-6)
        share = float(np.mean(off > step.tolerance)) if off.size else 0.0
        yield Difference(name, float(np.max(off, initial=0)), share)


def _changes_in_place(tree: Any) -> bool:
    def whole(x: Any) -> bool:
        return isinstance(x, nnx.Pytree | nnx.Variable | nnx.State)

    return any(whole(x) and not isinstance(x, nnx.State) for x in jax.tree.leaves(tree, is_leaf=whole))


def _is_number(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def _as_numpy(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype == jnp.bfloat16 else x
