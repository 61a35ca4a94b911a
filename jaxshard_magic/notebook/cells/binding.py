"""Bind the sharded step in place of the plain one, and restore the plain step if sharding is not possible."""

import ast
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import ShardError, did_you_mean
from ...introspect import own_attributes
from ...temporary import TemporaryChange
from .injected_calls import InjectedCalls, PassThrough
from .names import bound_names, called_names, in_scope
from .scopes import StepLocation
from .stand_ins import CellStopped, StandIn

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_UNSEEN = {"run_line_magic", "run_cell_magic", "exec", "eval", "reload", "update", "setattr"}
_ABSENT, _UNPLACED = object(), object()


class _Bind(PassThrough):
    """Injected call: takes a value bound by the cell and returns the value to bind instead."""

    def __init__(self, bind: Callable[[Any], Any]):
        # Weak: this object is a constant of a code object, into which the garbage collector does not look. A strong
        # reference would never be freed.
        self._bind = weakref.WeakMethod(bind)

    def __call__(self, value: Any) -> Any:
        bind = self._bind()
        return value if bind is None else bind(value)


class Binding(TemporaryChange):
    """Context manager: binds the sharded step in a namespace or inside functions of the cell.

    On exit the plain step is restored if the step can't be sharded, if the user interrupts before the first run, and
    after a dry run, whose `CellStopped` stops here. After an error of the cell's own code the sharded step stays bound:
    plain execution leaves the cell's step bound, too.

    Args:
        namespace: Variables of the notebook.
        step: Location of the step.
        shard: Makes the object to bind from the plain function.
    """

    def __init__(self, namespace: dict[str, Any], step: StepLocation, shard: Callable[[Any], Any]):
        self.namespace, self._names = namespace, namespace if step.home is None else step.home
        self.step, self._shard = step, shard
        self._later: Callable[[Any], Any] | None = None
        self._made: list[Any] = []
        self._placed: Any = _UNPLACED  # object bound under the step's name by this class
        self._plain: Any = None
        self._owned, self._runs = True, False
        self._error: type[BaseException] | None = None  # exception that ended the body
        self.stays = False  # whether the sharded step stays bound after the end

    @property
    def bound(self) -> bool:
        """True once a step was bound."""
        return bool(self._made)

    @property
    def sharded(self) -> Any:
        """Last sharded step with calls, else the last sharded step; None without any."""
        return next((each for each in reversed(self._made) if each.calls), self._made[-1] if self._made else None)

    def take_outer_trace(self) -> Any:
        """Return and forget the function that JAX was tracing when the sharded step was called; None without any."""
        traced = [x for x in (*self._made, self._placed) if getattr(x, "traced_within", None) is not None]
        within = traced[0].traced_within if traced else None
        for each in traced:
            each.traced_within = None
        return within

    def bind(self, _: Any = None) -> None:
        """Bind the sharded step in place of the current value; do nothing if bound already.

        Raises:
            ShardError: The current value is not callable, or the object refuses the attribute.
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
        # Recorded before it is bound: an interrupt in between must not hide it from `undo`.
        self._placed = self._keep(sharded)
        self._put(sharded)

    def bind_inside(self, value: Any) -> Any:
        """Return the sharded step for a function bound inside another function; return sharded steps and uncallable
        values unchanged."""
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
        """Remember a sharded step and return it."""
        # A jit of the sharded step is bound in its place, too.
        sharded.rejit = _Bind(self.bind_inside)
        # `sharded` may return the last step with calls; steps before it would only hold memory.
        self._made = [*[each for each in self._made if each.calls][-1:], sharded]
        return sharded

    def undo(self) -> None:
        """Restore the plain step if the sharded step is still bound."""
        if self.step.inside or not self._is_there():
            return
        *path, name = self.step.path.split(".")
        if self._owned:
            self._put(self._plain)
        else:
            delattr(self._reached(path), name)

    def settle(self, step: Any) -> None:
        """Bind `step` in place of the stand-in that chose it."""
        if not self.step.inside and self._is_there():
            self._put(step)
            self._placed = step
        self._made = [step]
        step.rejit = _Bind(self.bind_inside)

    def apply(self) -> None:
        # `end_abandoned` reverts without `__exit__`, after an interrupt: the error is set beforehand.
        self._runs, self._error = True, KeyboardInterrupt

    def revert(self) -> None:
        if not self._runs:
            return
        kind = self._error
        self.stays = kind is None or (kind is not CellStopped and (self._ran or self._outlives(kind)))
        if not self.stays:
            self.undo()
        self._runs = False

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> bool:
        self._error = kind
        super().__exit__(kind, *error)
        return kind is CellStopped

    def _outlives(self, error: type[BaseException]) -> bool:
        """Return whether a step without a run stays bound after an error."""
        refused = issubclass(error, (ShardError, KeyboardInterrupt, CellStopped))
        return not (refused or isinstance(self.sharded, StandIn))

    @property
    def _ran(self) -> bool:
        return any(each.calls for each in self._made)

    def shard_later_calls(self, later: Callable[[Any], Any]) -> None:
        """Shard steps bound by functions of the cell after the end of the cell, as long as this object lives.

        Without this call, such functions, and jits of the step, bind the plain step.

        Args:
            later: Makes the object to bind from the plain function.
        """
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
            # As a plain attribute of the class the step would become a method, with the object as its first argument.
            # The class argument of a classmethod is bound already.
            value = staticmethod(value)
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
        return ShardError(f"--step {self.step.path}: {_described(owner)} has no attribute {path[known]!r}.{near}")

    def inject(self, tree: ast.Module, constants: InjectedCalls) -> None:
        """Insert code into the cell that binds the sharded step right after the last statement binding the step.

        At the top of the cell, code is also inserted after statements that may bind the step unseen, as `%run` and
        `exec` do.

        Args:
            tree: Tree of the cell; changed in place.
            constants: Receives the inserted callables.
        """
        step = self.step
        if step.in_cell:
            for body in _bodies(tree.body, step.inside):
                _insert(body, {step.root, step.path}, self._rebound if step.inside else self._bound, constants)
        if not step.inside:
            last = max(
                (at for at, each in enumerate(tree.body) if bound_names(each) & {step.root, step.path}), default=-1
            )
            # From the end, so that insertions don't shift the statements still to visit.
            for at in range(len(tree.body) - 1, last, -1):
                if _may_bind(tree.body[at]):
                    after = ast.copy_location(self._bound(tree.body[at], constants), tree.body[at])
                    tree.body.insert(at + 1, ast.fix_missing_locations(after))

    def _bound(self, after: ast.stmt, constants: InjectedCalls) -> ast.stmt:
        return ast.Expr(constants.call(_Bind(self.bind), ast.copy_location(ast.Constant(None), after)))

    def _rebound(self, after: ast.stmt, constants: InjectedCalls) -> ast.stmt:
        """Return `step = sharded(step)`, inside a `try` if `after` has branches."""
        value = ast.copy_location(ast.parse(self.step.path, mode="eval").body, after)
        target: Any = ast.parse(f"{self.step.path} = 0").body[0]
        target.value = constants.call(_Bind(self.bind_inside), value)
        if not any(_blocks(after)):
            return target
        # After branches the step may be unbound: none of the branches need have bound a step.
        absent = ast.Tuple([ast.Name(name, ast.Load()) for name in ("NameError", "AttributeError")], ast.Load())
        handler = ast.ExceptHandler(absent, None, [ast.Pass()])
        return ast.Try([ast.Expr(value)], [handler], [target], [])


def _bodies(body: list[ast.stmt], inside: tuple[str, ...]) -> Iterator[list[ast.stmt]]:
    """Yield the statements of the functions and classes named by `inside`, outermost first."""
    if not inside:
        yield body
        return
    for part in [part for statement in body for part in in_scope(statement)]:
        if isinstance(part, _DEFINITIONS) and part.name == inside[0]:
            yield from _bodies(part.body, inside[1:])


def _may_bind(statement: ast.stmt) -> bool:
    """Return whether a statement runs hidden code: a line magic, `exec`, a module loaded again."""
    return any(call.rpartition(".")[2] in _UNSEEN for call in called_names(statement))


def _described(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _insert(
    body: list[ast.stmt], names: set[str], made: Callable[[ast.stmt, InjectedCalls], ast.stmt], constants: InjectedCalls
) -> None:
    """Insert a statement after the last statement that binds one of `names`, in every block that does."""
    for at in reversed(range(len(body))):
        statement = body[at]
        if bound_names(statement) & names:
            # Inside compound statements for calls that follow in the block, and after them: a branch may not run.
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
