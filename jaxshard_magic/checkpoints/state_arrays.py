"""Flatten a user's state to arrays by name, and rebuild it.

A state is a pytree of any kind, with NNX objects, typed PRNG keys and Python numbers inside.
"""

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

from ..device_arrays import put, to_numpy
from ..errors import ShardError, list_names, unknown_name
from ..program.flatten_call import nnx_objects
from .checkpoint_info import SavedLeaf
from .state_match import first_words, paths_by_prefix

_NUMBERS = (bool, int, float, complex)
_COUNTS = ("step", "count", "gradient_step")  # names in Flax's training states and optimizers, and in optax


@dataclass(frozen=True)
class StateArrays:
    """Flattened state.

    Attributes:
        paths: Key path of each leaf.
        leaves: Arrays, shapes (`jax.ShapeDtypeStruct`) and numbers; NNX objects are represented by their arrays.
        unflatten: Function from new leaves to a state of the same types; NNX objects are changed in place.
        is_generator: For each leaf, whether it belongs to a random number generator (a key, or NNX's count of keys) and
            is therefore no weight.
    """

    paths: tuple[KeyPath, ...]
    leaves: tuple[Any, ...]
    unflatten: Callable[[list[Any]], Any]
    is_generator: tuple[bool, ...]

    @property
    def names(self) -> list[str]:
        """Name of each leaf, such as `params.Dense_0.kernel`; "state" for a state that is one array."""
        return [keystr(path, simple=True, separator=".") or "state" for path in self.paths]

    @property
    def saved_leaves(self) -> tuple[SavedLeaf, ...]:
        """Name, shape and dtype of each leaf, as recorded in a checkpoint."""
        return tuple(
            SavedLeaf(n, tuple(np.shape(x)), str(dtype_of(x))) for n, x in zip(self.names, self.leaves, strict=True)
        )

    def arrays(self) -> dict[str, Any]:
        """Return the arrays to save by name, typed keys as their key data."""
        return {
            n: jax.random.key_data(x) if is_key(x) else x if isinstance(x, jax.Array) else np.asarray(x)
            for n, x in zip(self.names, self.leaves, strict=True)
        }

    def restore_targets(self, shardings: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape, dtype and sharding to restore by name; typed keys as their key data.

        Args:
            shardings: Sharding of each name.
        """
        found = {}
        for name, x in zip(self.names, self.leaves, strict=True):
            shape, dtype = np.shape(x), dtype_of(x)
            if is_key(x):
                bits = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
                shape, dtype = bits.shape, bits.dtype
            found[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=shardings[name])
        return found

    @property
    def step_count(self) -> int | None:
        """Number of steps behind the state, by the largest count of its optimizers and training states; None without a
        count."""
        rows = zip(self.names, self.leaves, self.is_generator, strict=True)
        counts = [x for name, x, random in rows if not random and _is_step_count(name, x)]
        return max((int(to_numpy(x)) for x in counts), default=None)

    def leaves_under(self, part: str) -> dict[str, Any]:
        """Return the leaves of a part of the state by their path below the part. Raises ShardError if there is no such
        part."""
        found = {name[len(part) + 1 :]: x for name, x in self.by_name.items() if name.startswith(f"{part}.")}
        if not found:
            parts = [*paths_by_prefix(self.names)]
            raise ShardError(
                unknown_name(f"the state has no {part}", part, parts, f"it has {list_names(first_words(parts[1:]))}")
            )
        return found

    def with_part(self, part: str, arrays: Mapping[str, Any]) -> Any:
        """Return the state with new leaves in one part.

        Args:
            part: Name of the part.
            arrays: New leaves by their path below the part; other leaves stay.
        """
        new = {f"{part}.{name}": x for name, x in arrays.items()}
        return self.unflatten([new.get(name, x) for name, x in self.by_name.items()])

    @property
    def by_name(self) -> dict[str, Any]:
        """Leaves by name."""
        return dict(zip(self.names, self.leaves, strict=True))

    def current_value(self, name: str) -> Any:
        """Return the present value of a leaf, a typed key as key data, as `rebuild` takes it. Raises ShardError for a
        shape."""
        x = self.by_name[name]
        if isinstance(x, jax.ShapeDtypeStruct):
            raise ShardError(f"{name} is a key of random numbers, which files of weights have not: give its array")
        return jax.random.key_data(x) if is_key(x) else x

    def rebuild(self, arrays: Mapping[str, jax.Array]) -> Any:
        """Return the state rebuilt from arrays that were read for `restore_targets`, by name."""
        return self.unflatten([_as_type_of(x, arrays[n]) for n, x in zip(self.names, self.leaves, strict=True)])


def flatten_state(state: Any) -> StateArrays:
    """Flatten a state.

    Raises:
        ShardError: The state has no arrays, two leaves of one name, or an NNX array outside of a Variable.
    """
    # Only where flax.nnx has been imported can there be NNX objects; other users don't pay for the import.
    nnx = nnx_objects() if "flax.nnx" in sys.modules else None
    is_node = nnx.is_node if nnx is not None else lambda _: False
    leaves_with_paths, structure = tree_flatten_with_path(state, is_leaf=is_node)
    arrays = [i for i, (_, x) in enumerate(leaves_with_paths) if not is_node(x) and _is_array(x)]
    roots = [i for i, (_, x) in enumerate(leaves_with_paths) if is_node(x)]
    paths, leaves, nodes = ([leaves_with_paths[i][0] for i in arrays], [leaves_with_paths[i][1] for i in arrays], None)
    random: list[bool] = []
    if nnx is not None and roots:
        nodes = nnx.open_nodes([leaves_with_paths[i][1] for i in roots], [leaves_with_paths[i][0] for i in roots])
        for holder, path in zip(nodes.holders, nodes.paths, strict=True):
            if nnx.raw_value(holder) is holder:
                name = keystr(path, simple=True, separator=".")
                raise ShardError(
                    f"{name} is an array outside of a Variable, which can't be written back: wrap it in one"
                )
        paths += [path for path, _, _ in nnx.describe_leaves(nodes, [False] * len(roots))]
        leaves += nodes.leaves()
        random = nnx.random_state_flags(nodes)

    def close(new: list[Any]) -> Any:
        whole = [x for _, x in leaves_with_paths]
        # The rest of `new` are the leaves of NNX objects.
        for i, x in zip(arrays, new, strict=False):
            whole[i] = x
        if nodes is not None and nnx is not None:
            nnx.set_values(nodes, new[len(arrays) :])
        return structure.unflatten(whole)

    own = [*map(is_key, leaves[: len(arrays)]), *random]
    flat = StateArrays(tuple(paths), tuple(leaves), close, tuple(own))
    if not leaves:
        raise ShardError("the state has no arrays in it: give what the step gives back, such as step.save(DIR, state)")
    if len(set(flat.names)) < len(leaves):
        [(twice, _)] = Counter(flat.names).most_common(1)
        raise ShardError(f"two leaves of the state are named {twice}: rename one of their keys")
    return flat


def is_key(x: Any) -> bool:
    """Return whether a value is an array of typed PRNG keys, or the shape of one."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def dtype_of(x: Any) -> Any:
    """Return the dtype that JAX gives a value; with 64-bit types off, the 32-bit one."""
    if is_key(x):
        return x.dtype
    return jax.dtypes.canonicalize_dtype(x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype)


@cache
def prng_impl_of(dtype: str) -> str:
    """Return the PRNG implementation of a key dtype's name, such as `key<fry>`.

    Raises ShardError for an implementation that JAX does not have.
    """
    # The name of a key dtype has only a short tag of the implementation.
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        if str(jax.eval_shape(lambda name=impl: jax.random.key(0, impl=name)).dtype) == dtype:
            return impl
    raise ShardError(f"keys of {dtype} are of an implementation of random numbers that can't be restored by name")


def _is_step_count(name: str, x: Any) -> bool:
    """Return whether a leaf is a count of steps, an integer such as `state.step` or `opt_state.0.count`."""
    is_one = name.rpartition(".")[2] in _COUNTS and not isinstance(x, (bool, jax.ShapeDtypeStruct))
    return is_one and np.shape(x) == () and jnp.issubdtype(dtype_of(x), jnp.integer)


def _is_array(x: Any) -> bool:
    """Return whether a leaf is a number, a shape, or an array of anything but Python objects."""
    kinds = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, *_NUMBERS)
    return isinstance(x, kinds) and getattr(x, "dtype", np.dtype(float)) != np.dtype(object)


def _as_type_of(x: Any, found: jax.Array) -> Any:
    """Return an array that was read as the type of the leaf `x`: number, numpy array, typed keys or weakly typed."""
    if isinstance(x, _NUMBERS) and not isinstance(x, np.generic):
        return type(x)(to_numpy(found).item())
    if isinstance(x, np.ndarray):
        return np.array(to_numpy(found))
    if is_key(x):
        return jax.random.wrap_key_data(found, impl=prng_impl_of(str(x.dtype)))
    if getattr(x, "weak_type", False) and not found.shape:
        # JAX makes weakly typed arrays from Python numbers only.
        [weak] = put([to_numpy(found).item()], found.sharding)
        return weak
    return found
