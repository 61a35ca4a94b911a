"""Loops of a cell that call the step: count their passes and feed them batches, without changing the code's behavior.

A loop's iterable passes through a callable, which returns a counting or a prefetching iterator, or the iterable
unchanged. Known lengths and the passes so far predict the number of steps.
"""

import ast
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ...temporary import ChangeGroup, Replaced, attribute
from .injected_calls import InjectedCalls, PassThrough
from .names import called_names, is_user_code, plain_function, reachable_names
from .scopes import StepLocation

# Exceptions of a `__len__` without an answer. A loop never calls `__len__`, so the cell itself would not raise them.
_NO_LENGTH = (TypeError, NotImplementedError, AttributeError, ValueError, OverflowError, LookupError, RuntimeError)
_ITERATORS = ("builtins", "itertools")  # iterators of these modules have a length hint that takes no items
# These iterators have no length; the lengths of these arguments bound them.
_BOUNDED_BY = {"enumerate": slice(1), "tqdm": slice(1), "zip": slice(None), "map": slice(1, None)}
_AROUND = ("enumerate", "tqdm")  # these iterate over their first argument
Feeds = Callable[[Any], Any]


@dataclass(frozen=True)
class _CellLoop:
    """Loop in a cell's code.

    Attributes:
        filename: File of the cell.
        first: First line.
        last: Last line.
    """

    filename: str
    first: int
    last: int

    def runs(self, lines: Iterable[tuple[str, int]]) -> bool:
        """Return whether one of a stack's `(file, line)` pairs is inside the loop."""
        return any(name == self.filename and self.first <= line <= self.last for name, line in lines)


class LoopRun:
    """Iterator over one run of a loop that counts passes.

    Args:
        loop: Loop in the code.
        iterable: Iterated values.
        passes: Number of passes; None if unknown.
        calls: Returns the number of calls of the step so far.
    """

    def __init__(self, loop: _CellLoop, iterable: Iterable[Any], passes: int | None, calls: Callable[[], int]):
        self.loop, self.passes, self.begun = loop, passes, 0
        self._items, self._calls = iter(iterable), calls
        self.first = self.last = calls()  # calls of the step before the first and the current pass

    def __iter__(self) -> "LoopRun":
        return self

    def __next__(self) -> Any:
        self.begun, self.last = self.begun + 1, self._calls()
        return next(self._items)

    def expected_calls(self, inside: "LoopRun | None", calls_inside: float | None) -> float | None:
        """Return the expected number of calls in all passes; None if unknown.

        A pass is expected to make the mean number of calls of the passes that ended; during the first pass, the calls
        before the inner loop and the expected calls of the inner loop.

        Args:
            inside: Run of the next inner loop; None without any.
            calls_inside: Expected calls of the inner loop.
        """
        ended, calls = self.begun - 1, self.last - self.first
        if ended < 1:
            in_pass = None if inside is None or calls_inside is None else inside.first - self.first + calls_inside
        elif inside is None and (not calls or calls % ended):
            in_pass = None  # the step is called under a condition
        else:
            in_pass = calls / ended
        return None if in_pass is None or self.passes is None else in_pass * self.passes


class LoopLengths:
    """Running loops, outermost first, while the calls of a step are counted.

    Attributes:
        endless: Loops of an unknown number of passes, as `while`.
    """

    def __init__(self) -> None:
        self.endless: set[_CellLoop] = set()
        self._calls: Callable[[], int] | None = None
        self._runs: list[LoopRun] = []
        self._unknown = False

    def counting(self, calls: Callable[[], int]) -> ChangeGroup:
        """Return a context in which entered loops are tracked.

        Args:
            calls: Returns the number of calls of the step so far.
        """
        return ChangeGroup(Replaced(attribute(self, "_runs"), []), Replaced(attribute(self, "_calls"), calls))

    def enter_loop(self, loop: _CellLoop, iterable: Any, passes: int | None, frame: types.FrameType | None) -> Any:
        """Return a counting iterator to use in place of a loop's iterable; the iterable itself while nothing is
        counted.

        Args:
            loop: Loop in the code.
            iterable: Iterated values.
            passes: Number of passes; None if unknown.
            frame: Frame that begins the loop.
        """
        if self._calls is None:
            return iterable
        lines = _lines(frame)
        # A loop left by `break` or an error reports no end: a loop still runs if a frame of the stack is inside it.
        running = takewhile(lambda run: run.loop is not loop and run.loop.runs(lines), self._runs)
        self._unknown = any(each.runs(lines) for each in self.endless)
        self._runs = [*running, LoopRun(loop, iterable, passes, self._calls)]
        return self._runs[-1]

    def expected_total(self) -> int | None:
        """Return the expected number of calls at the end of the outermost loop; None if unknown."""
        inside, calls = None, None
        for run in reversed(self._runs):
            inside, calls = run, run.expected_calls(inside, calls)
        return None if inside is None or calls is None or self._unknown else inside.first + round(calls)


def _lines(frame: types.FrameType | None) -> list[tuple[str, int]]:
    lines = []
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno or 0))
        frame = frame.f_back
    return lines


def _known_length(iterable: Any) -> int | None:
    """Return the number of items of an iterable, if known without taking any; else None."""
    counts_itself = type(iterable).__module__ in _ITERATORS
    try:
        known = operator.length_hint(iterable, -1) if counts_itself else len(iterable)
    except _NO_LENGTH:
        return None
    return known if known >= 0 else None


class _StepCalls:
    """Calls in a cell that lead to the step, through functions of the cell and the notebook, too.

    Args:
        tree: Tree of the cell.
        step: Location of the step.
        namespace: Variables of the notebook.
    """

    def __init__(self, tree: ast.Module, step: StepLocation, namespace: Mapping[str, Any]):
        owner, _, name = step.path.rpartition(".")
        self._steps = {step.path, f"self.{name}"} if owner else {step.path}
        if step.method or (step.inside and owner):  # called on an object of any name
            self._steps |= {text for text in called_names(tree) if _last(text) == name}
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self._bodies = {node.name: node.body for node in functions if node.name != name}
        self._inside: set[str] = set()  # names of functions and methods of the cell that call the step
        self._elsewhere = {
            text
            for text in dict.fromkeys(called_names(tree))
            if (function := _of_notebook(text, namespace)) and name in reachable_names(function)
        } - self._steps
        # To a fixpoint: a function calls the step if it calls a function that does.
        while more := {f for f in self._bodies.keys() - self._inside if self.has_call_in(*self._bodies[f])}:
            self._inside |= more

    def has_call_in(self, *nodes: ast.AST) -> bool:
        """Return whether a call in `nodes`, if run, leads to the step."""
        return any(
            text in self._steps or text in self._elsewhere or _last(text) in self._inside
            for node in nodes
            for text in called_names(node)
        )


def _last(text: str) -> str:
    return text.rpartition(".")[2]


def _of_notebook(text: str, namespace: Mapping[str, Any]) -> types.FunctionType | None:
    """Return the user's function or method that a call of `text` runs at present; None for other callables."""
    root, *names = text.split(".")
    value = namespace.get(root)
    for name in names:
        value = getattr(type(value), name, None)
    function = plain_function(value) if callable(value) else None
    return function if function is not None and is_user_code(function) else None


class _LengthProbe(PassThrough):
    """Injected call around an argument that bounds a loop; records its length.

    Args:
        read: Returns the bound from the argument: the length of an iterable, or the number itself.
    """

    def __init__(self, read: Callable[[Any], int | None]):
        self.length: int | None = None
        self._read = read

    def __call__(self, value: Any) -> Any:
        self.length = self._read(value)
        return value


class _TrackedIterable(PassThrough):
    """Injected call around a loop's iterable.

    Args:
        lengths: Receives the loop.
        loop: Loop in the code.

    Attributes:
        parts: Probes of the arguments; the loop ends with the shortest.
    """

    def __init__(self, lengths: LoopLengths, loop: _CellLoop):
        self._lengths, self._loop = lengths, loop
        self.parts: list[_LengthProbe] = []

    def __call__(self, value: Any) -> Any:
        known = [*(part.length for part in self.parts), _known_length(value)]
        passes = min((n for n in known if n is not None), default=None)
        return self._lengths.enter_loop(self._loop, value, passes, sys._getframe(1))


def track_loops(
    tree: ast.Module,
    filename: str,
    step: StepLocation,
    namespace: Mapping[str, Any],
    lengths: LoopLengths,
    constants: InjectedCalls,
) -> None:
    """Insert calls into a cell's tree that report loops around calls of the step.

    Args:
        tree: Tree of the cell; changed in place.
        filename: File of the cell.
        step: Location of the step.
        namespace: Variables of the notebook.
        lengths: Receives the loops.
        constants: Receives the inserted callables.
    """
    follower = _Follower(filename, _StepCalls(tree, step, namespace), lengths, constants)
    for node in ast.walk(tree):
        follower.follow(node)


class _Follower:
    """Visitor that inserts tracking into one loop at a time."""

    def __init__(self, filename: str, reach: _StepCalls, lengths: LoopLengths, constants: InjectedCalls):
        self._filename, self._reach, self._lengths, self._constants = filename, reach, lengths, constants

    def follow(self, node: ast.AST) -> None:
        if isinstance(node, (ast.For, ast.While, ast.AsyncFor)):
            body = node.body
        elif isinstance(node, ast.DictComp):
            body = [node.key, node.value]
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            body = [node.elt]
        else:
            return
        if not self._reach.has_call_in(*body):
            return
        if isinstance(node, (ast.While, ast.AsyncFor)):
            self._lengths.endless.add(self._loop(node))
        else:
            for loop in [node] if isinstance(node, ast.For) else node.generators:
                loop.iter = self._iterated(loop.iter, self._loop(node))

    def _loop(self, node: Any) -> _CellLoop:
        return _CellLoop(self._filename, node.lineno, node.end_lineno or node.lineno)

    def _iterated(self, value: ast.expr, loop: _CellLoop) -> ast.expr:
        through = _TrackedIterable(self._lengths, loop)
        self._open(value, through)
        return self._constants.call(through, value)

    def _open(self, value: ast.expr, through: _TrackedIterable) -> None:
        """Insert probes around the arguments of `enumerate`, `zip` and the like, recursively."""
        if not isinstance(value, ast.Call):
            return
        if isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Constant):
            self._open(value.args[0], through)  # call injected by `feed_loops` around the iterable
            return
        name = _callee_name(value)
        # `islice(x, n)` ends with `x` or after `n` items.
        if name == "islice" and len(value.args) == 2:
            bounds, reads = range(2), (_known_length, _bound)
        else:
            bounds, reads = range(len(value.args))[_BOUNDED_BY.get(name, slice(0))], None
        for at in bounds:
            argument = value.args[at]
            if isinstance(argument, ast.Starred):
                continue
            part = _LengthProbe(reads[at] if reads else _known_length)
            through.parts.append(part)
            self._open(argument, through)
            value.args[at] = self._constants.call(part, argument)


def _callee_name(call: ast.Call) -> str:
    """Return the last name of a callee: `zip`, and `islice` of `itertools.islice`; "" without a name."""
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _bound(value: Any) -> int | None:
    """Return the stop of an `islice`; None for other values."""
    return value if isinstance(value, int) and value >= 0 else None


class _FedIterable(PassThrough):
    """Injected call around a loop's iterable; returns a prefetching iterable.

    A range passes unchanged: it holds no batches.

    Args:
        feeds: Makes the prefetching iterable.
    """

    def __init__(self, feeds: Feeds):
        self._feeds = feeds
        self._last: tuple[Any, Any] = None, None

    def __call__(self, value: Any) -> Any:
        if isinstance(value, range):
            return value
        # An iterator passed a second time has to continue with the items already prefetched.
        if value is not self._last[0] or value is None:
            self._last = value, self._feeds(value)
        return self._last[1]


def feed_loops(
    tree: ast.Module, step: StepLocation, namespace: Mapping[str, Any], feeds: Feeds, constants: InjectedCalls
) -> int:
    """Prefetch the iterables of the innermost loops that call the step.

    Args:
        tree: Tree of the cell; changed in place.
        step: Location of the step.
        namespace: Variables of the notebook.
        feeds: Makes a prefetching iterable.
        constants: Receives the inserted callables.

    Returns:
        Number of such loops.
    """
    reach, found = _StepCalls(tree, step, namespace), 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.For) or not reach.has_call_in(*node.body):
            continue
        if not any(reach.has_call_in(*inner.body) for inner in _inside(node)):
            _feed(node, _FedIterable(feeds), constants)
            found += 1
    return found


def _inside(loop: ast.For) -> Iterator[ast.For | ast.While]:
    for statement in loop.body:
        for node in ast.walk(statement):
            if isinstance(node, (ast.For, ast.While)):
                yield node


def _feed(owner: Any, fed: _FedIterable, constants: InjectedCalls) -> None:
    value = owner.iter if isinstance(owner, ast.For) else owner.args[0]
    if isinstance(value, ast.Call) and value.args and not isinstance(value.args[0], ast.Starred):
        name = _callee_name(value)
        if name in _AROUND:
            _feed(value, fed, constants)
            return
    through = constants.call(fed, value)
    if isinstance(owner, ast.For):
        owner.iter = through
    else:
        owner.args[0] = through
