"""A user's state as arrays by name, and back: trees of any kind, with NNX objects, typed PRNG keys and Python numbers
in them."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath, keystr, tree_flatten_with_path

from ..errors import ShardError, none_of, one_of
from ..placing import put, whole
from ..program.peel import nnx_calls
from .parts import top, under
from .saved import SavedLeaf

_NUMBERS = (bool, int, float, complex)
_COUNTS = ("step", "count", "gradient_step")  # of Flax's training states and optimizers, and of optax


@dataclass(frozen=True)
class Opened:
    """A state, opened. `paths` and `leaves` are its arrays, shapes and numbers, those of NNX objects in their place;
    `close` makes the state of new ones: a tree of the same types, objects of NNX changed in place. `own`: which leaves
    are generators of random numbers, keys and NNX's counts of them, which are no weights."""

    paths: tuple[KeyPath, ...]
    leaves: tuple[Any, ...]
    close: Callable[[list[Any]], Any]
    own: tuple[bool, ...]

    @property
    def names(self) -> list[str]:
        """`params.Dense_0.kernel`, one a leaf."""
        return [keystr(path, simple=True, separator=".") or "state" for path in self.paths]

    @property
    def told(self) -> tuple[SavedLeaf, ...]:
        """The leaves as a checkpoint tells them."""
        return tuple(
            SavedLeaf(n, tuple(np.shape(x)), str(kind(x)))
            for n, x in zip(self.names, self.leaves, strict=True)
        )

    def arrays(self) -> dict[str, Any]:
        """What is saved: arrays by name, of typed keys their numbers."""
        return {
            n: jax.random.key_data(x) if is_key(x) else x if isinstance(x, jax.Array) else np.asarray(x)
            for n, x in zip(self.names, self.leaves, strict=True)
        }

    def targets(self, shardings: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """What is restored, where `shardings` have each name."""
        found = {}
        for name, x in zip(self.names, self.leaves, strict=True):
            shape, dtype = np.shape(x), kind(x)
            if is_key(x):
                bits = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
                shape, dtype = bits.shape, bits.dtype
            found[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=shardings[name])
        return found

    @property
    def steps(self) -> int | None:
        """How many steps the state says that it has behind it, by the counts of optimizers and training states in it;
        None where it counts none."""
        rows = zip(self.names, self.leaves, self.own, strict=True)
        counts = [x for name, x, random in rows if not random and _counts(name, x)]
        return max((int(whole(x)) for x in counts), default=None)

    def under(self, part: str) -> dict[str, Any]:
        """The leaves of a part of the state by what follows its name. Raises ShardError where there is none of it."""
        found = {name[len(part) + 1 :]: x for name, x in self.by_name.items() if name.startswith(f"{part}.")}
        if not found:
            parts = [*under(self.names)]
            raise ShardError(
                none_of(f"the state has no {part}", part, parts, f"it has {one_of(top(parts[1:]))}")
            )
        return found

    def replaced(self, part: str, arrays: Mapping[str, Any]) -> Any:
        """The state with other leaves in a part, by the names of `under`."""
        new = {f"{part}.{name}": x for name, x in arrays.items()}
        return self.close([new.get(name, x) for name, x in self.by_name.items()])

    @property
    def by_name(self) -> dict[str, Any]:
        """The leaves by their names."""
        return dict(zip(self.names, self.leaves, strict=True))

    def kept(self, name: str) -> Any:
        """What is in the state under a name, as `restored` takes it. Raises ShardError for a shape."""
        x = self.by_name[name]
        if isinstance(x, jax.ShapeDtypeStruct):
            raise ShardError(
                f"{name} is a key of random numbers, which files of weights have not: give its array"
            )
        return jax.random.key_data(x) if is_key(x) else x

    def restored(self, arrays: Mapping[str, jax.Array]) -> Any:
        """The state of the arrays that were read for `targets`."""
        return self.close([_like(x, arrays[n]) for n, x in zip(self.names, self.leaves, strict=True)])


def opened(state: Any) -> Opened:
    """A state as its arrays. Raises ShardError for a state without any, and for two leaves of one name."""
    nnx = nnx_calls() if "flax.nnx" in sys.modules else None
    is_node = nnx.is_node if nnx is not None else lambda _: False
    found, structure = tree_flatten_with_path(state, is_leaf=is_node)
    arrays = [i for i, (_, x) in enumerate(found) if not is_node(x) and _is_array(x)]
    roots = [i for i, (_, x) in enumerate(found) if is_node(x)]
    paths, leaves, nodes = [found[i][0] for i in arrays], [found[i][1] for i in arrays], None
    random: list[bool] = []
    if nnx is not None and roots:
        nodes = nnx.open_nodes([found[i][1] for i in roots], [found[i][0] for i in roots])
        for holder, path in zip(nodes.holders, nodes.paths, strict=True):
            if nnx.value_of(holder) is holder:
                name = keystr(path, simple=True, separator=".")
                raise ShardError(
                    f"{name} is an array outside of a Variable, which can't be written back: wrap it in one"
                )
        paths += [path for path, _, _ in nnx.described(nodes, [False] * len(roots))]
        leaves += nodes.leaves()
        random = nnx.random(nodes)

    def close(new: list[Any]) -> Any:
        whole = [x for _, x in found]
        for i, x in zip(arrays, new, strict=False):
            whole[i] = x
        if nodes is not None and nnx is not None:
            nnx.fill(nodes, new[len(arrays) :])
        return structure.unflatten(whole)

    own = [*map(is_key, leaves[: len(arrays)]), *random]
    made = Opened(tuple(paths), tuple(leaves), close, tuple(own))
    if not leaves:
        raise ShardError(
            "the state has no arrays in it: give what the step gives back, such as step.save(DIR, state)"
        )
    if len(set(made.names)) < len(leaves):
        [(twice, _)] = Counter(made.names).most_common(1)
        raise ShardError(f"two leaves of the state are named {twice}: rename one of their keys")
    return made


def is_key(x: Any) -> bool:
    """Is it an array of typed PRNG keys, or the shape of one?"""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def kind(x: Any) -> Any:
    """The dtype that jax has for it."""
    if is_key(x):
        return x.dtype
    return jax.dtypes.canonicalize_dtype(x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype)


@cache
def impl_of(dtype: str) -> str:
    """The generator whose typed keys have a dtype of this name, `key<fry>`. Raises ShardError for one that jax does not
    have."""
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        if str(jax.eval_shape(lambda name=impl: jax.random.key(0, impl=name)).dtype) == dtype:
            return impl
    raise ShardError(
        f"keys of {dtype} are of an implementation of random numbers that can't be restored by name"
    )


def _counts(name: str, x: Any) -> bool:
    """Whether a leaf is a count of steps: `state.step`, `opt_state.0.count`."""
    is_one = name.rpartition(".")[2] in _COUNTS and not isinstance(x, (bool, jax.ShapeDtypeStruct))
    return is_one and np.shape(x) == () and jnp.issubdtype(kind(x), jnp.integer)


def _is_array(x: Any) -> bool:
    kinds = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, *_NUMBERS)
    return isinstance(x, kinds) and getattr(x, "dtype", np.dtype(float)) != np.dtype(object)


def _like(x: Any, found: jax.Array) -> Any:
    """An array that was read as what stood in its place."""
    if isinstance(x, _NUMBERS) and not isinstance(x, np.generic):
        return type(x)(whole(found).item())
    if isinstance(x, np.ndarray):
        return np.array(whole(found))
    if is_key(x):
        return jax.random.wrap_key_data(found, impl=impl_of(str(x.dtype)))
    if getattr(x, "weak_type", False) and not found.shape:
        [weak] = put([whole(found).item()], found.sharding)
        return weak
    return found
