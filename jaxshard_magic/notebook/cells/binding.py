"""Binds the sharded step where the plain one was bound, and the plain one back where it can't be sharded."""

import ast
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import ShardError, did_you_mean
from ...introspect import own_attributes
from ...temporary import Temporary
from .constants import Constants, Unchanged
from .names import bound, called, in_scope
from .rehearsal import StandIn, Stopped
from .values import Step

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_UNSEEN = {"run_line_magic", "run_cell_magic", "exec", "eval", "reload", "update", "setattr"}
_ABSENT, _UNPLACED = object(), object()


class _Bind(Unchanged):
    """Called with what the cell has bound, gives what is to be bound instead. Collections of garbage do not look into
    code: it keeps nothing alive."""

    def __init__(self, bind: Callable[[Any], Any]):
        self._bind = weakref.WeakMethod(bind)

    def __call__(self, value: Any) -> Any:
        bind = self._bind()
        return value if bind is None else bind(value)


class Binding(Temporary):
    """The place where `step` is bound, in `namespace` or inside functions of the cell. `shard(function)` makes what is
    put there.

    As a context it puts the plain step back when its body raises because the step can't be sharded, or before it has
    run where the user stops it. After an error of the cell's own it stays: the name is the cell's step, as plain
    execution leaves it. A dry run ends by raising, and ends there.
    """

    def __init__(self, namespace: dict[str, Any], step: Step, shard: Callable[[Any], Any]):
        self.namespace, self._names = namespace, namespace if step.home is None else step.home
        self.step, self._shard = step, shard
        self._later: Callable[[Any], Any] | None = None
        self._made: list[Any] = []
        self._placed: Any = _UNPLACED  # what lies where the step is bound
        self._plain: Any = None
        self._owned, self._runs = True, False
        self._error: type[BaseException] | None = None  # what ended the body
        self.stays = False  # whether what was bound is left in its place at the end

    @property
    def bound(self) -> bool:
        """Was there a step to bind?"""
        return bool(self._made)

    @property
    def sharded(self) -> Any:
        """What was put there: of several the last that was called, else the last; None for none."""
        return next(
            (each for each in reversed(self._made) if each.calls), self._made[-1] if self._made else None
        )

    def take_within(self) -> Any:
        """Where what was put there was called while JAX traced another function, told once; None for nowhere."""
        traced = [x for x in (*self._made, self._placed) if getattr(x, "traced_within", None) is not None]
        within = traced[0].traced_within if traced else None
        for each in traced:
            each.traced_within = None
        return within

    def bind(self, _: Any = None) -> None:
        """Put the sharded step in the place of what is there; nothing is done when it is there already.

        Raises ShardError when nothing callable is there, or when the object allows no other attribute.
        """
        value = self._current()
        if self.step.root not in self._names or value is self._placed or self._is_made(value):
            return
        if value is _ABSENT:
            raise self._no_attribute()
        if not callable(value) or isinstance(value, type):
            raise ShardError(f"{self.step.path} is no function but {_described(value)}")
        sharded = self._shard(value)
        *path, name = self.step.path.split(".")
        own = own_attributes(self._reached(path)) if path else self._names
        self._owned, self._plain = name in own, own.get(name)
        self._placed = self._keep(sharded)  # noted before it is put: an interrupt may come between
        self._put(sharded)

    def bind_inside(self, value: Any) -> Any:
        """The sharded step for a function that one of the cell's binds; what is one, or can't be called, stays."""
        if self._is_made(value) or not callable(value) or isinstance(value, type):
            return value
        if self._runs:
            return self._keep(self._shard(value))
        if self._later is None:
            return value
        later = self._later(value)
        later.rejit = _Bind(self.bind_inside)
        return later

    def _is_made(self, value: Any) -> bool:
        return any(value is each for each in self._made)

    def _keep(self, sharded: Any) -> Any:
        """Of those before, one that was called is worth its memory. A jit of it is bound in its place, too."""
        sharded.rejit = _Bind(self.bind_inside)
        self._made = [*[each for each in self._made if each.calls][-1:], sharded]
        return sharded

    def undo(self) -> None:
        """Put the plain step back where the sharded one still is."""
        if self.step.inside or not self._is_there():
            return
        *path, name = self.step.path.split(".")
        if self._owned:
            self._put(self._plain)
        else:
            delattr(self._reached(path), name)

    def settle(self, step: Any) -> None:
        """Put `step` in the place of the stand-in that decided on it."""
        if not self.step.inside and self._is_there():
            self._put(step)
            self._placed = step
        self._made = [step]
        step.rejit = _Bind(self.bind_inside)

    def begin(self) -> None:
        self._runs, self._error = True, KeyboardInterrupt  # until the body has ended

    def end(self) -> None:
        if not self._runs:
            return
        kind = self._error
        self.stays = kind is None or (kind is not Stopped and (self._ran or self._outlives(kind)))
        if not self.stays:
            self.undo()
        self._runs = False

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> bool:
        self._error = kind
        super().__exit__(kind, *error)
        return kind is Stopped

    def _outlives(self, error: type[BaseException]) -> bool:
        """Whether a step that has not run stays bound after an error."""
        refused = issubclass(error, (ShardError, KeyboardInterrupt, Stopped))
        return not (refused or isinstance(self.sharded, StandIn))

    @property
    def _ran(self) -> bool:
        return any(each.calls for each in self._made)

    def outlive(self, later: Callable[[Any], Any]) -> None:
        """After the cell, as long as this lives, functions of it that are called bind what `later` makes of the step
        inside them, and so do jits of the step; else they bind it as it is."""
        self._later, self._shard, self._made = later, later, []

    def _is_there(self) -> bool:
        return self._current() is self._placed

    def _current(self) -> Any:
        return self._reached(self.step.path.split("."))

    def _reached(self, path: list[str]) -> Any:
        value = self._names.get(path[0], _ABSENT)
        for at, name in enumerate(path[1:], 2):
            try:
                value = getattr(value, name, _ABSENT)
            except Exception as error:
                raise ShardError(
                    f"--step {self.step.path}: {'.'.join(path[:at])} can't be read, which raises "
                    f"{type(error).__name__}: {error}"
                ) from error
        return value

    def _put(self, value: Any) -> None:
        *path, name = self.step.path.split(".")
        if not path:
            self._names[name] = value
            return
        if isinstance(self._plain, (staticmethod, classmethod)) and value is not self._plain:
            value = staticmethod(value)  # its class, if it takes that, is bound already
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

    def into(self, tree: ast.Module, constants: Constants) -> None:
        """Make the cell bind the sharded step right after the statement that binds the step last; and after those at
        the cell's top that may do so unseen, as `%run` and `exec` do."""
        step = self.step
        if step.here:
            for body in _bodies(tree.body, step.inside):
                _insert(
                    body, {step.root, step.path}, self._rebound if step.inside else self._bound, constants
                )
        if not step.inside:
            last = max(
                (at for at, each in enumerate(tree.body) if bound(each) & {step.root, step.path}), default=-1
            )
            for at in range(len(tree.body) - 1, last, -1):
                if _may_bind(tree.body[at]):
                    after = ast.copy_location(self._bound(tree.body[at], constants), tree.body[at])
                    tree.body.insert(at + 1, ast.fix_missing_locations(after))

    def _bound(self, after: ast.stmt, constants: Constants) -> ast.stmt:
        return ast.Expr(constants.call(_Bind(self.bind), ast.copy_location(ast.Constant(None), after)))

    def _rebound(self, after: ast.stmt, constants: Constants) -> ast.stmt:
        """`step = sharded(step)`; after branches, of which none may have bound it, if it is there."""
        value = ast.copy_location(ast.parse(self.step.path, mode="eval").body, after)
        target: Any = ast.parse(f"{self.step.path} = 0").body[0]
        target.value = constants.call(_Bind(self.bind_inside), value)
        if not any(_blocks(after)):
            return target
        absent = ast.Tuple(
            [ast.Name(name, ast.Load()) for name in ("NameError", "AttributeError")], ast.Load()
        )
        handler = ast.ExceptHandler(absent, None, [ast.Pass()])
        return ast.Try([ast.Expr(value)], [handler], [target], [])


def _bodies(body: list[ast.stmt], inside: tuple[str, ...]) -> Iterator[list[ast.stmt]]:
    """The statements of the functions and classes of these names, each inside the one before."""
    if not inside:
        yield body
        return
    for part in [part for statement in body for part in in_scope(statement)]:
        if isinstance(part, _DEFINITIONS) and part.name == inside[0]:
            yield from _bodies(part.body, inside[1:])


def _may_bind(statement: ast.stmt) -> bool:
    """Return whether a statement runs code that it does not show: a line magic, `exec`, a module loaded again."""
    return any(call.rpartition(".")[2] in _UNSEEN for call in called(statement))


def _described(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _insert(
    body: list[ast.stmt],
    names: set[str],
    made: Callable[[ast.stmt, Constants], ast.stmt],
    constants: Constants,
) -> None:
    """Inside compound statements too, for calls that follow there, and after them: a branch may not run."""
    for at in reversed(range(len(body))):
        statement = body[at]
        if bound(statement) & names:
            for block in _blocks(statement):
                _insert(block, names, made, constants)
            more = ast.copy_location(made(statement, constants), statement)
            body.insert(at + 1, ast.fix_missing_locations(more))
            return


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(statement, _DEFINITIONS):
        return []
    parts = [statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
    return [getattr(part, name, []) for part in parts for name in ("body", "orelse", "finalbody")]
