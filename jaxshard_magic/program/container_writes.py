"""Lists and dicts among a step's arguments that the step changes in place: found in the trace, repeated at each call.

A trace works on copies made from the arguments' pytrees. `state["w"] = state["w"] - rate * grads` changes a copy. The
new value becomes an output of the program, and each call writes the output into the caller's own dict.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer
from jax.tree_util import DictKey, GetAttrKey, KeyPath, SequenceKey

from ..errors import ShardError
from ..introspect import is_a
from .trace import path_name


@dataclass(frozen=True)
class WrittenValue:
    """Value that the step puts into a container: an existing element, or a pytree built from outputs and constants.

    Attributes:
        tree: PyTreeDef of a new value; None for an existing element.
        leaves: Leaves of a new value: `("out", o)` for output `o`, or `("held", value)` for a Python value.
        old_key: Key of the existing element in the container before the call.
    """

    tree: Any = None
    leaves: tuple[tuple[str, Any], ...] = ()
    old_key: Any = None

    def build(self, container: Any, outs: Sequence[Any]) -> Any:
        """Return the value for one call.

        Args:
            container: The caller's container, before changes.
            outs: Outputs of the call.
        """
        if self.tree is None:
            return container[self.old_key]
        return self.tree.unflatten([outs[x] if kind == "out" else x for kind, x in self.leaves])


@dataclass(frozen=True)
class ContainerWrite:
    """Changes of the step to one container.

    Attributes:
        path: Keys that lead to the container in (args, kwargs).
        values: New values by key for a dict; all elements after the step for a list.
        removed: Keys that a dict loses.
    """

    path: tuple[Any, ...]
    values: tuple[tuple[Any, WrittenValue], ...]
    removed: tuple[Any, ...] = ()


def apply_writes(writes: Sequence[ContainerWrite], arguments: Any, outs: Sequence[Any]) -> None:
    """Change the caller's containers as the step changed its copies.

    Args:
        writes: Changes found in the trace.
        arguments: (args, kwargs) of the call.
        outs: Outputs of the call.
    """
    changes = []
    for each in writes:
        container = arguments
        for key in each.path:
            container = container[key]
        changes.append((container, each, [(k, v.build(container, outs)) for k, v in each.values]))
    # All values are built before the first write: they may read elements that a write replaces.
    for container, each, values in changes:
        if is_a(container, list):
            container[:] = [value for _, value in values]
            continue
        for key in each.removed:
            del container[key]
        container.update(values)


class ContainerSnapshot:
    """State of the containers among a step's arguments before the step runs. The arguments are copies made for a trace.

    Args:
        args: Positional arguments of the step.
        kwargs: Keyword arguments of the step.
        is_node: Predicate for NNX objects, whose changes are handled elsewhere.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], is_node: Callable[[Any], bool]):
        self._tree, self._is_node = (tuple(args), dict(kwargs)), is_node
        self._leaves = self._flat()
        self._containers = [(place, x, list(_items(x))) for place, x in _find_containers(self._tree, _ContainerPath())]

    def find_writes(
        self, step: str, named: Callable[[KeyPath], KeyPath], outs: list[Any], out_paths: list[KeyPath]
    ) -> tuple[ContainerWrite, ...]:
        """Return the changes since the snapshot; new arrays are appended to the step's outputs.

        Args:
            step: Name of the step, for messages.
            named: Function from a path in (args, kwargs) to the path of an input.
            outs: Outputs of the step; extended.
            out_paths: Paths of the outputs; extended by the paths of the inputs that new arrays replace.

        Raises:
            ShardError: An object that is no list, dict or NNX object has changed.
        """
        writes = []
        for place, container, before in self._containers:
            old, after = dict(before), list(_items(container))
            if len(old) == len(after) and all(k in old and old[k] is x for k, x in after):
                continue
            values = []
            for key, x in after:
                if key in old and old[key] is x:
                    # A list is rewritten as a whole, so its unchanged elements are listed as well.
                    values += [(key, WrittenValue(old_key=key))] if is_a(container, list) else []
                    continue
                leaves = []
                for inner, leaf in jax.tree_util.tree_flatten_with_path(x)[0]:
                    if is_a(leaf, Tracer):
                        leaves.append(("out", len(outs)))
                        outs.append(leaf)
                        out_paths.append(named((*place.keys, _jax_key(container, key), *inner)))
                    else:
                        leaves.append(("held", leaf))
                values.append((key, WrittenValue(jax.tree.structure(x), tuple(leaves))))
            removed = () if is_a(container, list) else tuple(old.keys() - dict(after).keys())
            writes.append(ContainerWrite(place.steps, tuple(values), removed))
        # A write changes leaves too, so other changes can be told only where nothing was written.
        if not writes:
            self._refuse_others(step, named)
        return tuple(writes)

    def _refuse_others(self, step: str, named: Callable[[KeyPath], KeyPath]) -> None:
        """Raise ShardError where a leaf of an object of another kind has changed."""
        now = self._flat()
        if len(now) == len(self._leaves) and all(x is y for (_, x), (_, y) in zip(now, self._leaves, strict=True)):
            return
        if any(x is not y for (_, x), (_, y) in zip(now, self._flat(), strict=False)):
            return  # the class creates new leaves at each flattening, so identity says nothing
        old_ids = {id(x) for _, x in self._leaves}
        path = next((path for path, x in now if id(x) not in old_ids), None)
        what = "an argument" if path is None else path_name(named(path))
        raise ShardError(
            f"{step} changes {what} in place, of an object that is no list, dict or NNX object: return the new one, "
            "as in state = dataclasses.replace(state, ...)"
        )

    def _flat(self) -> list[tuple[KeyPath, Any]]:
        """Return the leaves with their paths; NNX objects count as leaves."""
        return jax.tree_util.tree_flatten_with_path(self._tree, is_leaf=self._is_node)[0]


def refuse_shared(step: str, writes: Sequence[ContainerWrite], arguments: Any) -> None:
    """Raise ShardError where the caller passes a container twice that the step changes.

    Args:
        step: Name of the step, for the message.
        writes: Changes found in the trace.
        arguments: (args, kwargs) of the call.
    """
    # The trace has one copy for each occurrence, and a change to one copy is not seen in the other.
    occurrences = Counter(id(container) for _, container in _find_containers(arguments, _ContainerPath()))
    for each in writes:
        container = arguments
        for key in each.path:
            container = container[key]
        if occurrences[id(container)] > 1:
            raise ShardError(
                f"{step} changes a {type(container).__name__} in place that it is given twice: pass it once, or return "
                "the new one"
            )


@dataclass(frozen=True)
class _ContainerPath:
    """Path of a container in (args, kwargs).

    Attributes:
        steps: Python keys and indices.
        keys: The same as a JAX key path.
    """

    steps: tuple[Any, ...] = ()
    keys: KeyPath = ()

    def child(self, container: Any, key: Any) -> "_ContainerPath":
        return _ContainerPath((*self.steps, key), (*self.keys, _jax_key(container, key)))


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    """Return the keys and elements of a container."""
    return iter(container.items() if is_a(container, dict) else enumerate(container))


def _find_containers(value: Any, path: _ContainerPath) -> Iterator[tuple[_ContainerPath, Any]]:
    """Yield the lists and dicts in `value` with their paths, without `args` and `kwargs` themselves."""
    if is_a(value, (tuple, list, dict)):
        if len(path.steps) > 1 and not is_a(value, tuple):
            yield path, value
        for key, inner in _items(value):
            yield from _find_containers(inner, path.child(value, key))


def _jax_key(container: Any, key: Any) -> Any:
    """Return the JAX key of one element."""
    if is_a(container, dict):
        return DictKey(key)
    fields = getattr(container, "_fields", None)  # JAX names the elements of a namedtuple by field
    return GetAttrKey(fields[key]) if fields else SequenceKey(key)
