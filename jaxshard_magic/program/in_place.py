"""Lists and dicts among a step's arguments that the step changes in place: found in a trace, done again at each call.

A trace works on copies, made of the arguments' pytrees. `state["w"] = state["w"] - rate * grads` changes the copy; the
new value becomes an output of the program, and each call puts it into the caller's own dict.
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
class Value:
    """A value that the step puts into a container: the same as under the key `same` before, or a pytree of `leaves`,
    each ("out", o), the o-th output, or ("held", value)."""

    tree: Any = None  # a PyTreeDef
    leaves: tuple[tuple[str, Any], ...] = ()
    same: Any = None

    def build(self, container: Any, outs: Sequence[Any]) -> Any:
        """Return it, of the caller's own container and a call's outputs."""
        if self.tree is None:
            return container[self.same]
        return self.tree.unflatten([outs[x] if kind == "out" else x for kind, x in self.leaves])


@dataclass(frozen=True)
class Written:
    """What the step does to one container.

    Attributes:
        path: where it lies in (args, kwargs).
        values: by key what a dict gets; of a list all that it has afterwards.
        removed: keys that a dict loses.
    """

    path: tuple[Any, ...]
    values: tuple[tuple[Any, Value], ...]
    removed: tuple[Any, ...] = ()


def write(written: Sequence[Written], arguments: Any, outs: Sequence[Any]) -> None:
    """Change the caller's containers as the step did its copies."""
    changes = []
    for each in written:
        container = arguments
        for key in each.path:
            container = container[key]
        changes.append((container, each, [(k, v.build(container, outs)) for k, v in each.values]))
    for container, each, values in changes:
        if is_a(container, list):
            container[:] = [value for _, value in values]
            continue
        for key in each.removed:
            del container[key]
        container.update(values)


class Before:
    """The containers among a step's arguments, which are copies made for a trace, as they are before it runs.

    Args:
        args, kwargs: what the step is called with.
        is_node: whether an object is of NNX, which is looked after elsewhere.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], is_node: Callable[[Any], bool]):
        self._tree, self._is_node = (tuple(args), dict(kwargs)), is_node
        self._leaves = self._flat()
        self._found = [(place, x, list(_items(x))) for place, x in _containers(self._tree, _Place())]

    def written(
        self, step: str, named: Callable[[KeyPath], KeyPath], outs: list[Any], out_paths: list[KeyPath]
    ) -> tuple[Written, ...]:
        """Return what has changed since. New arrays are appended to the step's outputs, under the paths of the inputs
        whose places they take. `named` gives the path of an input by its path in (args, kwargs).

        Raises ShardError where an object of another kind has changed.
        """
        found = []
        for place, container, before in self._found:
            old, after = dict(before), list(_items(container))
            if len(old) == len(after) and all(k in old and old[k] is x for k, x in after):
                continue
            values = []
            for key, x in after:
                if key in old and old[key] is x:
                    values += [(key, Value(same=key))] if is_a(container, list) else []
                    continue
                leaves = []
                for inner, leaf in jax.tree_util.tree_flatten_with_path(x)[0]:
                    if is_a(leaf, Tracer):
                        leaves.append(("out", len(outs)))
                        outs.append(leaf)
                        out_paths.append(named((*place.keys, _key(container, key), *inner)))
                    else:
                        leaves.append(("held", leaf))
                values.append((key, Value(jax.tree.structure(x), tuple(leaves))))
            gone = () if is_a(container, list) else tuple(old.keys() - dict(after).keys())
            found.append(Written(place.steps, tuple(values), gone))
        if not found:
            self._refuse_others(step, named)
        return tuple(found)

    def _refuse_others(self, step: str, named: Callable[[KeyPath], KeyPath]) -> None:
        now = self._flat()
        if len(now) == len(self._leaves) and all(
            x is y for (_, x), (_, y) in zip(now, self._leaves, strict=True)
        ):
            return
        if any(x is not y for (_, x), (_, y) in zip(now, self._flat(), strict=False)):
            return  # a class that makes its leaves anew each time that it is asked
        held = {id(x) for _, x in self._leaves}
        path = next((path for path, x in now if id(x) not in held), None)
        what = "an argument" if path is None else path_name(named(path))
        raise ShardError(
            f"{step} changes {what} in place, of an object that is no list, dict or NNX object: return the new one, "
            "as in state = dataclasses.replace(state, ...)"
        )

    def _flat(self) -> list[tuple[KeyPath, Any]]:
        return jax.tree_util.tree_flatten_with_path(self._tree, is_leaf=self._is_node)[0]


def refuse_shared(step: str, written: Sequence[Written], arguments: Any) -> None:
    """Raise ShardError where the caller gives a container that the step changes in two places: the trace has two
    copies of it."""
    given = Counter(id(container) for _, container in _containers(arguments, _Place()))
    for each in written:
        container = arguments
        for key in each.path:
            container = container[key]
        if given[id(container)] > 1:
            raise ShardError(
                f"{step} changes a {type(container).__name__} in place that it is given twice: pass it once, or return "
                "the new one"
            )


@dataclass(frozen=True)
class _Place:
    """Where a container lies in (args, kwargs): by the keys that lead to it, and by JAX's."""

    steps: tuple[Any, ...] = ()
    keys: KeyPath = ()

    def inside(self, container: Any, key: Any) -> "_Place":
        return _Place((*self.steps, key), (*self.keys, _key(container, key)))


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(container.items() if is_a(container, dict) else enumerate(container))


def _containers(value: Any, place: _Place) -> Iterator[tuple[_Place, Any]]:
    if is_a(value, (tuple, list, dict)):
        if len(place.steps) > 1 and not is_a(value, tuple):
            yield place, value
        for key, inner in _items(value):
            yield from _containers(inner, place.inside(value, key))


def _key(container: Any, key: Any) -> Any:
    if is_a(container, dict):
        return DictKey(key)
    fields = getattr(container, "_fields", None)  # of a named tuple
    return GetAttrKey(fields[key]) if fields else SequenceKey(key)
