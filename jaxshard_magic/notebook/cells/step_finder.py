"""Find the train step among the functions of a cell."""

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import ShardError, did_you_mean, list_names, no_results_error
from .call_analysis import CalledFunctions, CodeBehavior
from .names import bound_names
from .resolved_values import DEFAULT, FunctionValue, StepLocation
from .scopes import NotebookScope, SourceScope


def find_step(tree: ast.Module, namespace: Mapping[str, Any], name: str | None = None) -> StepLocation:
    """Return the location of the cell's train step.

    Without a name, candidates are the functions called by the cell, then the functions defined for later. `train_step`
    wins, else the function most like a step: it takes gradients, updates, is jitted, replaces its argument. A function
    with the training loop is a step only if named.

    Args:
        tree: Tree of the cell.
        namespace: Variables of the notebook.
        name: Name of the step; None to search.

    Raises:
        ShardError: There is no step, the step can't be bound, or two functions are equally likely.
    """
    cell = _StepFinder(tree, namespace)
    if name is not None:
        return cell.named(name)
    try:
        return cell.best()
    except ShardError as nothing:
        if not cell.is_empty:
            raise
        try:
            # A cell without functions of the user may train through a method of a library's object.
            return _StepFinder(tree, namespace, libraries=True).best()
        except ShardError:
            raise nothing from None


def functions_in(text: str, namespace: Mapping[str, Any]) -> list[str]:
    """Return the names of functions defined in a cell, nested ones included; nothing for text that is not Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    places = (function.place for function in SourceScope(tree, NotebookScope(namespace), ()).functions())
    return list(dict.fromkeys(place.path.rpartition(".")[2] for place in places if place is not None))


class _StepFinder:
    """Search for the step of a cell about to run.

    Args:
        tree: Tree of the cell.
        namespace: Variables of the notebook.
        libraries: Whether methods inherited from a library count as functions of the user.
    """

    def __init__(self, tree: ast.Module, namespace: Mapping[str, Any], *, libraries: bool = False):
        self._namespace, self._bound = namespace, bound_names(tree)
        held = NotebookScope(namespace)
        self._names, self._doing = SourceScope(tree, held, ()), CodeBehavior()
        held.cell, held.libraries = self._names, libraries
        self._runs, self._later = CalledFunctions(), CalledFunctions()
        self._runs.run(self._names, tree.body)
        for function in self._names.functions(depth=1):
            self._later.call(function)

    @property
    def is_empty(self) -> bool:
        """True if the cell calls and defines no function of the user."""
        return not (self._runs.called or self._later.called)

    def best(self) -> StepLocation:
        """Return the step of a cell whose line names none."""
        # Functions that the cell calls come before functions defined for later cells.
        runs = [(run, self._likely(run.called)) for run in (self._runs, self._later)]
        for run, likely in runs:
            if top := self._highest_scoring(run, [f for f in likely if self._sure(f)]):
                return self._place(top)
        if loops := [f for f in (*self._runs.called, *self._later.called) if self._doing.trains(f)]:
            raise _holds_loop(loops[-1])
        for run, likely in runs:
            if top := self._highest_scoring(run, [f for f in likely if not f.kind and (f.own or self._score(run, f))]):
                return self._place(top)
        raise ShardError("this cell defines and calls no function that may be the train step; name it: --step NAME")

    def named(self, path: str) -> StepLocation:
        """Return the step with a given name, alone or qualified by the enclosing functions and classes."""
        every = {f.place: f for f in self._names.functions() if f.place and path in _names_of(f.place)}
        at_top = [f for place, f in every.items() if place == StepLocation(path, True)]
        found = at_top or [*every.values()]
        if len(found) > 1:
            fulls = [place.full for place in every]
            raise ShardError(f"--step {path}: this cell has {list_names(fulls)}; say which: --step {fulls[0]}")
        if found:
            return self._place(found)
        ran = [f for f in self._runs.called if f.place is not None and path in _names_of(f.place)]
        if ran and path.partition(".")[0] not in self._bound:
            return self._place(ran[:1])
        root, dot, _ = path.partition(".")
        here = root in self._bound or path in self._bound
        if not here and root not in self._namespace:
            what = "object" if dot else "function"
            known = [name for f in self._names.functions() for name in _names_of(f.place)]
            near = did_you_mean(root, (*known, *self._bound, *self._namespace))
            raise ShardError(f"--step {path}: no {what} {root!r} in this cell or the notebook.{near}")
        return StepLocation(path, here)

    def _likely(self, functions: Iterable[FunctionValue]) -> list[FunctionValue]:
        """Return the functions that may be a step: no factory, no function without arguments, no training loop."""
        return [
            f
            for f in functions
            if not (f.makes or f.name.startswith("__") or (f.nullary and not f.jitted))
            if f.name == DEFAULT or not self._doing.trains(f)
        ]

    def _sure(self, function: FunctionValue) -> bool:
        """Return whether a function takes gradients, or calls a function with the default name of a step."""
        named = any(each.name == DEFAULT for each in self._doing.reached(function))
        return named or self._doing.differentiates(function)

    def _highest_scoring(self, run: CalledFunctions, functions: Sequence[FunctionValue]) -> list[FunctionValue]:
        """Return the functions with the highest score; among equals, those that call no other."""
        functions = [f for f in functions if f.name == DEFAULT] or functions
        functions = [f for f in functions if f.place is not None or f.around] or functions
        functions = [f for f in functions if f.jitted or not any(_is_inside(f, other) for other in functions)]
        scores = {f: self._score(run, f) for f in functions}
        top = [f for f in functions if scores[f] == max(scores.values())]
        inner = [f for f in top if not self._doing.reached(f) & ({*top} - {f})]
        return inner or top

    def _score(self, run: CalledFunctions, function: FunctionValue) -> int:
        doing = self._doing
        # A gradient counts more than all other signs together.
        return 8 * doing.differentiates(function) + 2 * (
            doing.updates(function) + function.jitted + (function in run.replacing)
        )

    def _place(self, found: Sequence[FunctionValue]) -> StepLocation:
        """Return the location of the single function found."""
        if len(found) > 1:
            names = [f.name if f.place is None else f.place.full for f in found]
            raise ShardError(
                f"this cell has {len(found)} functions that may be the train step: {list_names(names)}; "
                f"say which: --step {names[0]}"
            )
        (function,) = found
        if function.kind:
            raise no_results_error(function.name, function.kind)
        if function.place is not None:
            return function.place
        # A jit of a function that can be bound is bound in its place, wherever it is made.
        inner = [f for f in self._wrapped_by(function) if f.place is not None and self._doing.differentiates(f)]
        if function.around and len({f.place for f in inner}) == 1:
            return self._place(inner[:1])
        raise _out_of_reach(function)

    def _wrapped_by(self, function: FunctionValue) -> list[FunctionValue]:
        """Return the functions wrapped by a function, directly or through others."""
        found, todo = list[FunctionValue](), [*function.wrapped]
        while todo:
            each = todo.pop()
            if each not in found:
                found.append(each)
                todo += each.wrapped
        return found


def _names_of(place: StepLocation | None) -> set[str]:
    """Return the names accepted for a step on the line."""
    return set() if place is None else {place.full, place.name, place.path, place.path.rpartition(".")[2]}


def _is_inside(function: FunctionValue, other: FunctionValue) -> bool:
    """Return whether a function is defined inside the other."""
    if function.place is None or other.place is None:
        return bool(function.around) and function.around.rpartition(".")[2] == other.name
    around = (*other.place.inside, other.name)
    return function.place.inside[: len(around)] == around


def _holds_loop(function: FunctionValue) -> ShardError:
    name = function.name
    return ShardError(
        f"{name} holds the loop over steps, and a step is what each pass of it runs: put that into a function of its "
        f"own, def {DEFAULT}(state, batch), and call it in {name}",
        fix=f"def {DEFAULT}(state, batch)",
    )


def _out_of_reach(function: FunctionValue) -> ShardError:
    around = function.around
    if around.endswith("()"):
        kind = around.removesuffix("()")
        return ShardError(
            f"{function.name} belongs to a {kind} that has no name here: bind it to one, as in trainer = {kind}(...)"
        )
    if not around:
        made = " ".join(function.name.split())
        return ShardError(f"the cell calls {made} without a name for it; bind it to one: {DEFAULT} = {made}")
    return ShardError(
        f"{function.name} is bound inside {around}, which this cell does not define: write %%shard above the cell that "
        f"does, or copy {around} into one; it may be called there or below"
    )
