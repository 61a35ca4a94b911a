"""Binds the sharded step where the plain one was bound, and the plain one back when the cell fails."""

import ast
from collections.abc import Callable
from typing import Any

from ...errors import ShardError, did_you_mean
from .find import Step
from .names import bound
from .rehearsal import Stopped

_HOOK = "<jaxshard_magic: bind the step>"  # no name that Python code could have


_ABSENT = object()


class Binding:
    """The place in `namespace` where `step` is bound. `shard(function)` makes what is put there.

    As a context it puts the plain step back when its body raises. A dry run ends by raising, and ends there.
    """

    def __init__(self, namespace: dict[str, Any], step: Step, shard: Callable[[Any], Any]):
        self.namespace, self.step, self._shard = namespace, step, shard
        self.bound = False
        self.sharded: Any = None
        self._plain: Any = None
        self._owned = True

    def bind(self) -> None:
        """Put the sharded step in the place of what is there; nothing is done when it is there already.

        Raises ShardError when nothing callable is there, or when the object allows no other attribute.
        """
        value = self._current()
        if self.step.root not in self.namespace or (value is self.sharded and self.bound):
            return
        if value is _ABSENT:
            raise self._no_attribute()
        if not callable(value) or isinstance(value, type):
            raise ShardError(f"{self.step.path} is no function but {_described(value)}")
        sharded = self._shard(value)
        *path, name = self.step.path.split(".")
        self._owned = not path or name in getattr(self._reached(path), "__dict__", {})
        self._put(sharded)
        self.bound, self._plain, self.sharded = True, value, sharded

    def undo(self) -> None:
        """Put the plain step back where the sharded one still is."""
        if not self.bound or self._current() is not self.sharded:
            return
        *path, name = self.step.path.split(".")
        if self._owned:
            self._put(self._plain)
        else:
            delattr(self._reached(path), name)

    def settle(self, step: Any) -> None:
        """Put `step` in the place of the stand-in that decided on it."""
        if self.bound and self._current() is self.sharded:
            self._put(step)
        self.sharded = step

    def __enter__(self) -> "Binding":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is not None:
            self.undo()
        return kind is Stopped

    def _current(self) -> Any:
        return self._reached(self.step.path.split("."))

    def _reached(self, path: list[str]) -> Any:
        value = self.namespace.get(path[0], _ABSENT)
        for name in path[1:]:
            value = getattr(value, name, _ABSENT)
        return value

    def _put(self, value: Any) -> None:
        *path, name = self.step.path.split(".")
        if not path:
            self.namespace[name] = value
            return
        owner = self._reached(path)
        try:
            setattr(owner, name, value)
        except (AttributeError, TypeError, ValueError) as refused:
            raise ShardError(
                f"--step {self.step.path}: {type(owner).__name__} does not let {name} be set ({refused}); "
                f"bind it to a name first: train_step = {self.step.path}"
            ) from None

    def _no_attribute(self) -> ShardError:
        path = self.step.path.split(".")
        known = next(at for at in range(len(path)) if self._reached(path[: at + 1]) is _ABSENT)
        owner = self._reached(path[:known])
        near = did_you_mean(path[known], [name for name in dir(owner) if not name.startswith("_")])
        return ShardError(
            f"--step {self.step.path}: {_described(owner)} has no attribute {path[known]!r}.{near}"
        )

    def into(self, tree: ast.Module) -> None:
        """Make the cell call `bind` right after the statement that binds the step last.

        While the cell runs, the namespace must hold `hook()`.
        """
        _insert(tree.body, {self.step.root, self.step.path})

    def hook(self) -> dict[str, Callable[[], None]]:
        return {_HOOK: self.bind}


def _described(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _insert(body: list[ast.stmt], names: set[str]) -> None:
    """Inside compound statements too, for calls that follow there, and after them: a branch may not run."""
    for at in reversed(range(len(body))):
        statement = body[at]
        if bound(statement) & names:
            for block in _blocks(statement):
                _insert(block, names)
            call = ast.Expr(ast.Call(ast.Name(_HOOK, ast.Load()), [], []))
            body.insert(at + 1, ast.fix_missing_locations(ast.copy_location(call, statement)))
            return


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return []
    parts = [statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
    return [getattr(part, name, []) for part in parts for name in ("body", "orelse", "finalbody")]
