"""Copy a call's arguments, gather state in one place, and copy and pickle a sharded step like a function.

A step that runs on copied arguments changes none of the user's objects.
"""

import copy
import sys
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from ..device_arrays import local_placement, put
from ..errors import ShardError
from ..introspect import is_a, static_attribute
from ..program.flatten_call import nnx_objects
from ..program.references import copy_reference, read_reference, write_reference
from ..program.unwrap import is_jitted

if TYPE_CHECKING:
    from .sharded_step import ShardedStep


def copy_arguments(arguments: Any) -> Any:
    """Return `arguments` in new containers, NNX objects and references. Arrays are shared, as no step donates them."""
    is_object = None
    if nnx := sys.modules.get("flax.nnx"):
        # NNX takes a reference for an object of its own.
        is_object = nnx_objects().is_object
        if any(map(is_object, jax.tree.leaves(arguments, is_leaf=is_object))):
            arguments = nnx.clone(arguments)
    return jax.tree.map(
        lambda leaf: copy_reference(leaf) if isinstance(leaf, jax.Ref) else leaf, arguments, is_leaf=is_object
    )


def gather_state(trees: Sequence[Any], to: Any) -> Any:
    """Return pytrees with every `jax.Array` moved to one place.

    Modules and optimizers of Flax NNX, and references (`jax.Ref`), are changed in place. NNX states and Variables are
    replaced by new ones.

    Args:
        trees: State as returned by the step.
        to: Device or Sharding.

    Returns:
        The tree itself for one tree, a tuple for several.

    Raises:
        ShardError: `trees` is empty.
    """
    if not trees:
        raise ShardError("gather() takes what the step gave back: state = step.gather(state)")
    moved = [_move_arrays(tree, local_placement(to)) for tree in trees]
    return moved[0] if len(moved) == 1 else tuple(moved)


def _move_arrays(tree: Any, to: Any) -> Any:
    """Return a pytree with every `jax.Array` moved to `to`."""
    # Without an import of flax.nnx no state has NNX objects, and the import would be slow.
    is_object = nnx_objects().is_object if "flax.nnx" in sys.modules else None
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_object)
    positions = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
    for i, x in zip(positions, put([leaves[i] for i in positions], to), strict=True):
        leaves[i] = x
    references = [x for x in leaves if isinstance(x, jax.Ref)]
    for each, x in zip(references, put(map(read_reference, references), to), strict=True):
        write_reference(each, x)
    if is_object is not None:
        for x in leaves:
            if is_object(x):
                nnx_objects().move_arrays(x, lambda arrays: put(arrays, to))
    return structure.unflatten(leaves)


def deepcopy_step(step: "ShardedStep", memo: dict[int, Any]) -> "ShardedStep":
    """Return a deep copy of a sharded step as of a function: the step itself.

    The copy of a sharded method is the method of the copied object, sharded in the same way. The same holds for
    partials and callable objects.

    Args:
        step: The sharded step.
        memo: Memo of `copy.deepcopy`.
    """
    plain = step.__wrapped__
    if is_jitted(plain) or is_a(plain, types.FunctionType):
        return step
    clone = type(step)(copy.deepcopy(plain, memo), step.request)
    clone.path, clone.cell = step.path, step.cell
    clone.programs.compile_limit = step.programs.compile_limit
    return clone


def reduce_step(step: "ShardedStep") -> Any:
    """Return the value for pickling a step: its qualified name if the name leads to the step, else the plain step.

    A function of a notebook goes to cloudpickle by value, so the plain step is pickled there, too.
    """
    module = getattr(step, "__module__", None)
    resolved: Any = sys.modules.get(module) if isinstance(module, str) else None
    name: str = static_attribute(step, "__qualname__", "")
    for part in name.split("."):
        resolved = getattr(resolved, part, None)
    # pickle sends a name only if it leads to the same object, as for a function.
    if resolved is step and not (module == "__main__" and _is_pickled_by_value()):
        return name
    # A compiled program can't be pickled.
    return _unpickle_plain, (step.__wrapped__,)


def _unpickle_plain(step: Any) -> Any:
    """Return the plain step, on unpickling."""
    return step


def _is_pickled_by_value() -> bool:
    """Return whether a pickler that sends notebook functions by value is on the stack: cloudpickle or dill."""
    # `__reduce_ex__` is not told which pickler calls it.
    frame = sys._getframe()
    while frame is not None:
        if {"cloudpickle", "dill"} & {*frame.f_globals.get("__name__", "").split(".")}:
            return True
        frame = frame.f_back
    return False
