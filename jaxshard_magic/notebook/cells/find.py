"""Which function of a cell is the train step."""

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import ShardError, did_you_mean, no_step, one_of
from .names import bound
from .running import Doing, Running
from .scopes import Held, Text
from .values import DEFAULT, Function, Step


def find_step(tree: ast.Module, namespace: Mapping[str, Any], name: str | None = None) -> Step:
    """The train step of the cell: `name`, else of the functions that Python calls when it runs, or that it defines for
    later, `train_step`, or the one that most looks like a step (it takes gradients, updates, is jitted, replaces its
    argument). What holds the loop over steps is none, but where `name` says so.

    Raises ShardError when there is none, or none that can be bound, and when two look alike.
    """
    cell = _Cell(tree, namespace)
    if name is not None:
        return cell.named(name)
    try:
        return cell.best()
    except ShardError as nothing:
        if not cell.is_empty:
            raise
        try:
            return _Cell(tree, namespace, libraries=True).best()
        except ShardError:
            raise nothing from None


def functions_in(text: str, namespace: Mapping[str, Any]) -> list[str]:
    """The names of the functions that a cell defines, at its top or inside others; none of text that is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    places = (function.place for function in Text(tree, Held(namespace), ()).functions())
    return list(dict.fromkeys(place.path.rpartition(".")[2] for place in places if place is not None))


class _Cell:
    """A cell that is about to run in a notebook."""

    def __init__(self, tree: ast.Module, namespace: Mapping[str, Any], *, libraries: bool = False):
        self._namespace, self._bound = namespace, bound(tree)
        held = Held(namespace)
        self._names, self._doing = Text(tree, held, ()), Doing()
        held.cell, held.libraries = self._names, libraries
        self._runs, self._later = Running(), Running()
        self._runs.run(self._names, tree.body)
        for function in self._names.functions(depth=1):
            self._later.call(function)

    @property
    def is_empty(self) -> bool:
        """Whether it calls and defines no function of the user's."""
        return not (self._runs.called or self._later.called)

    def best(self) -> Step:
        """The step of a line that doesn't name it."""
        runs = [(run, self._likely(run.called)) for run in (self._runs, self._later)]
        for run, likely in runs:
            if top := self._top(run, [f for f in likely if self._sure(f)]):
                return self._place(top)
        if loops := [f for f in (*self._runs.called, *self._later.called) if self._doing.trains(f)]:
            raise _holds_loop(loops[-1])
        for run, likely in runs:
            if top := self._top(run, [f for f in likely if not f.kind and (f.own or self._score(run, f))]):
                return self._place(top)
        raise ShardError(
            "this cell defines and calls no function that may be the train step; name it: --step NAME"
        )

    def named(self, path: str) -> Step:
        """The step that the line names, by its own name or with those of what is around it."""
        every = {f.place: f for f in self._names.functions() if f.place and path in _names_of(f.place)}
        at_top = [f for place, f in every.items() if place == Step(path, True)]
        found = at_top or [*every.values()]
        if len(found) > 1:
            fulls = [place.full for place in every]
            raise ShardError(f"--step {path}: this cell has {one_of(fulls)}; say which: --step {fulls[0]}")
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
        return Step(path, here)

    def _likely(self, functions: Iterable[Function]) -> list[Function]:
        """Those that may be a step: no factories, nothing that takes nothing, no loops over steps."""
        return [
            f
            for f in functions
            if not (f.makes or f.name.startswith("__") or (f.nullary and not f.jitted))
            if f.name == DEFAULT or not self._doing.trains(f)
        ]

    def _sure(self, function: Function) -> bool:
        """Does it take gradients, or call what is known to be a step by its name?"""
        named = any(each.name == DEFAULT for each in self._doing.reached(function))
        return named or self._doing.differentiates(function)

    def _top(self, run: Running, functions: Sequence[Function]) -> list[Function]:
        """Those that score highest; of those, the ones that call no other of them."""
        functions = [f for f in functions if f.name == DEFAULT] or functions
        functions = [f for f in functions if f.place is not None or f.around] or functions
        functions = [f for f in functions if f.jitted or not any(_is_inside(f, other) for other in functions)]
        scores = {f: self._score(run, f) for f in functions}
        top = [f for f in functions if scores[f] == max(scores.values())]
        inner = [f for f in top if not self._doing.reached(f) & ({*top} - {f})]
        return inner or top

    def _score(self, run: Running, function: Function) -> int:
        doing = self._doing
        return 8 * doing.differentiates(function) + 2 * (
            doing.updates(function) + function.jitted + (function in run.replacing)
        )

    def _place(self, found: Sequence[Function]) -> Step:
        """Where the one that was found is bound."""
        if len(found) > 1:
            names = [f.name if f.place is None else f.place.full for f in found]
            raise ShardError(
                f"this cell has {len(found)} functions that may be the train step: {one_of(names)}; "
                f"say which: --step {names[0]}"
            )
        (function,) = found
        if function.kind:
            raise no_step(function.name, function.kind)
        if function.place is not None:
            return function.place
        # A jit of a function that can be bound is bound in its place, wherever it is made.
        inner = [
            f for f in self._wrapped_by(function) if f.place is not None and self._doing.differentiates(f)
        ]
        if function.around and len({f.place for f in inner}) == 1:
            return self._place(inner[:1])
        raise _out_of_reach(function)

    def _wrapped_by(self, function: Function) -> list[Function]:
        """The functions that one is made of, and what those are made of."""
        found, todo = list[Function](), [*function.of]
        while todo:
            each = todo.pop()
            if each not in found:
                found.append(each)
                todo += each.of
        return found


def _names_of(place: Step | None) -> set[str]:
    """What a line may call it by."""
    return set() if place is None else {place.full, place.name, place.path, place.path.rpartition(".")[2]}


def _is_inside(function: Function, other: Function) -> bool:
    """Is it one of the other's own functions?"""
    if function.place is None or other.place is None:
        return bool(function.around) and function.around.rpartition(".")[2] == other.name
    around = (*other.place.inside, other.name)
    return function.place.inside[: len(around)] == around


def _holds_loop(function: Function) -> ShardError:
    name = function.name
    return ShardError(
        f"{name} holds the loop over steps, and a step is what each pass of it runs: put that into a function of its "
        f"own, def {DEFAULT}(state, batch), and call it in {name}",
        fix=f"def {DEFAULT}(state, batch)",
    )


def _out_of_reach(function: Function) -> ShardError:
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
