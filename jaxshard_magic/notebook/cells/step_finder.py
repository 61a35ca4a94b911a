"""Find the train step among the functions of a cell: by the functions that the cell calls, and the training loops among
them."""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...code_reads import reads_of
from ...errors import ShardError, did_you_mean, list_names, no_results_error
from .names import bound_names, code_names, mentioned_names, nodes_outside_definitions, parameters
from .scopes import (
    DEFAULT,
    GRADIENT,
    WRAPPERS,
    ClassValue,
    FunctionValue,
    NameScope,
    NotebookScope,
    SourceScope,
    StepLocation,
)

_UPDATE = {"update", "apply_updates", "apply_gradients"}
# These trace their function arguments, or call them on parts of trees and arrays: neither is a call of a step.
_TRACING = WRAPPERS | {"scan", "fori_loop", "while_loop", "cond", "switch", "map", "tree_map", "shard_map"}
_TRACING |= {"eval_shape", "make_jaxpr", "custom_vjp", "custom_jvp", "transform"}
_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


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
        self._names, self._doing = SourceScope(tree, held, ()), _CodeBehavior()
        held.cell, held.libraries = self._names, libraries
        self._runs, self._later = _CalledFunctions(), _CalledFunctions()
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

    def _highest_scoring(self, run: "_CalledFunctions", functions: Sequence[FunctionValue]) -> list[FunctionValue]:
        """Return the functions with the highest score; among equals, those that call no other."""
        functions = [f for f in functions if f.name == DEFAULT] or functions
        functions = [f for f in functions if f.place is not None or f.around] or functions
        functions = [f for f in functions if f.jitted or not any(_is_inside(f, other) for other in functions)]
        scores = {f: self._score(run, f) for f in functions}
        top = [f for f in functions if scores[f] == max(scores.values())]
        inner = [f for f in top if not self._doing.reached(f) & ({*top} - {f})]
        return inner or top

    def _score(self, run: "_CalledFunctions", function: FunctionValue) -> int:
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


class _CalledFunctions:
    """Functions called when code runs, as far as known, in the order of their first calls.

    Jitted functions are recorded but not entered. A function passed as an argument counts as called, unless the callee
    traces or wraps functions.

    Attributes:
        called: Functions called.
        replacing: Functions called as `state = f(state, batch)`.
    """

    def __init__(self) -> None:
        self.called: list[FunctionValue] = []
        self.replacing: set[FunctionValue] = set()
        self._entered: set[FunctionValue] = set()

    def run(self, names: NameScope, code: Sequence[ast.AST]) -> None:
        self.replacing.update(_replacing(names, code))
        for function in _calls(names, code):
            self.call(function)

    def call(self, function: FunctionValue) -> None:
        if function not in self.called:
            self.called.append(function)
        self.enter(function)

    def enter(self, function: FunctionValue) -> None:
        """Record the calls made by the body of a function."""
        if function in self._entered or function.jitted:
            return
        self._entered.add(function)
        for names, code in function.parts:
            self.run(names, code)
        for inner in function.wrapped:
            self.enter(inner)
        for inner in _without_text(function)[1]:
            self.call(inner)


class _CodeBehavior:
    """Analysis of all code reachable from a function, traced or not."""

    def __init__(self) -> None:
        self._mentions: dict[FunctionValue, tuple[set[str], list[FunctionValue]]] = {}
        self._training: dict[FunctionValue, bool] = {}

    def differentiates(self, function: FunctionValue) -> bool:
        return bool(self._names([function]) & GRADIENT)

    def updates(self, function: FunctionValue) -> bool:
        return bool(self._names([function]) & _UPDATE)

    def trains(self, function: FunctionValue) -> bool:
        """Return whether a function is or calls a training loop: a Python loop around gradients and updates.

        A step may loop as well, before or after its own gradient and update.
        """
        if function not in self._training:
            self._training[function] = False  # until known: functions may call each other
            self._training[function] = self._is_loop(function)
        return self._training[function]

    def _is_loop(self, function: FunctionValue) -> bool:
        """Return whether a function loops over gradients and updates, or calls a function that does."""
        if function.jitted or self._steps_itself(function):
            return False
        if not function.parts and function.compiled is not None and reads_of(function.compiled[1].__code__).loops:
            # Without source the loop's body can't be told from the rest, so the whole bytecode counts.
            done = self._names([function])
            return bool(done & GRADIENT and done & _UPDATE)
        calls = [*function.wrapped, *_without_text(function)[1]]
        for names, code in function.parts:
            if any(
                self._is_training(names, node) for node in nodes_outside_definitions(*code) if isinstance(node, _LOOPS)
            ):
                return True
            calls += _calls(names, code)
        return any(map(self.trains, calls))

    def _steps_itself(self, function: FunctionValue) -> bool:
        """Return whether a function takes a gradient and updates with it outside of loops, without calling a step."""
        done: set[str] = set()
        for names, code in function.parts:
            mentions, functions = _mentions(names, _nodes_outside_loops(code))
            each = [self._names([inner]) for inner in functions]
            done = done.union(mentions, *(n for n in each if not (n & GRADIENT and n & _UPDATE)))
        return bool(done & GRADIENT and done & (_UPDATE | {"map", "tree_map"}))

    def _is_training(self, names: NameScope, loop: ast.AST) -> bool:
        """Return whether the body of a loop takes gradients and updates, or feeds a result back."""
        names_in, functions = _mentions(names, _all_of(_looped(loop)))
        done = names_in | self._names(functions)
        return bool(done & GRADIENT and done & _UPDATE) or self._feeds_back(names, loop)

    def _feeds_back(self, names: NameScope, loop: ast.AST) -> bool:
        """Return whether a gradient or update function in a loop receives a name rebound in the loop."""
        code = _looped(loop)
        stored = {ast.unparse(target) for node in nodes_outside_definitions(*code) for target in _targets(node)}
        for node in nodes_outside_definitions(*code):
            if isinstance(node, ast.Call) and stored & {ast.unparse(argument) for argument in node.args}:
                mentions, functions = _mentions(names, ast.walk(node.func))
                if (mentions | self._names(functions)) & (GRADIENT | _UPDATE):
                    return True
        return False

    def reached(self, *functions: FunctionValue) -> set[FunctionValue]:
        """Return `functions` and the user's functions reachable through mentions in code."""
        todo, seen = [*functions], set()
        while todo:
            function = todo.pop()
            if function not in seen:
                seen.add(function)
                todo += self._mentioned(function)[1]
        return seen

    def _names(self, functions: Iterable[FunctionValue]) -> set[str]:
        """Return the names mentioned in reachable code, without names of the user's functions."""
        return set().union(*(self._mentioned(each)[0] for each in self.reached(*functions)))

    def _mentioned(self, function: FunctionValue) -> tuple[set[str], list[FunctionValue]]:
        """Return the names and the user's functions mentioned in a function's own code."""
        if function in self._mentions:
            return self._mentions[function]
        names, inner = _without_text(function)
        for seen, code in function.parts:
            more, functions = _mentions(seen, _all_of(code))
            names, inner = names | more, [*inner, *functions]
        self._mentions[function] = names, [*inner, *function.wrapped]
        return self._mentions[function]


def _without_text(function: FunctionValue) -> tuple[set[str], list[FunctionValue]]:
    """Return the names and the user's functions mentioned by a function without known source, from bytecode."""
    if function.parts or function.compiled is None:
        return set(), []
    names, plain, of = function.compiled
    reads = reads_of(plain.__code__)
    seen = {chain[0]: names.lookup(chain[0]) for chain in sorted(reads.globals | reads.free)}
    own = plain.__code__.co_varnames[: of is not None]  # the first local variable of a method is `self`
    for _, attribute in sorted(chain for chain in reads.parameters if chain[:1] == own and len(chain) == 2):
        seen[attribute] = None if of is None else of.attribute(attribute)
    functions = {name: value for name, value in seen.items() if isinstance(value, FunctionValue)}
    return code_names(plain.__code__) - functions.keys(), [*functions.values()]


def _mentions(names: NameScope, nodes: Iterable[ast.AST]) -> tuple[set[str], list[FunctionValue]]:
    """Return the names and attributes read in `nodes`, and the user's functions among them apart."""
    found, functions = set(), []
    for node in nodes:
        if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load):
            continue
        value = names.resolve(node)
        if isinstance(value, FunctionValue):
            functions.append(value)
        else:
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found, functions


def _all_of(code: Iterable[ast.AST]) -> Iterator[ast.AST]:
    return (part for node in code for part in ast.walk(node))


def _nodes_outside_loops(code: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes that run once with the code: nothing in loops or definitions."""
    for node in code:
        yield node
        if not isinstance(node, (*_LOOPS, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _nodes_outside_loops(ast.iter_child_nodes(node))


def _calls(names: NameScope, code: Iterable[ast.AST]) -> Iterator[FunctionValue]:
    """Yield the functions called when the code runs."""
    for node in nodes_outside_definitions(*code):
        if not isinstance(node, ast.Call):
            continue
        callee = names.resolve(node.func)
        if isinstance(callee, ClassValue):
            callee = callee.attribute("__init__")
        if isinstance(callee, FunctionValue):
            _hand_over(names, node, callee)
            yield callee
        elif isinstance(node.func, ast.Call):
            yield from _called_as_made(names, node.func)
        # `jax.jit(f)` or `lax.scan(f, ...)` in Python does not call `f` as a step; other callees may call their
        # arguments.
        if isinstance(callee, FunctionValue) or not mentioned_names(node.func) & _TRACING:
            for given in (*node.args, *(keyword.value for keyword in node.keywords)):
                value = names.resolve(given)
                if isinstance(value, FunctionValue):
                    yield value
                elif isinstance(given, ast.Call):  # a function made in place
                    yield from (f for f in names.functions_from(given)[0] if f.place is not None)


def _hand_over(names: NameScope, call: ast.Call, function: FunctionValue) -> None:
    """Pass the values of a call's arguments to the scope of the called function."""
    takes = parameters(function.node)[int(function.method) :]
    for within in [names for names, _ in function.parts[:1] if isinstance(names, SourceScope)]:
        given = [*zip(takes, call.args, strict=False), *((k.arg, k.value) for k in call.keywords if k.arg in takes)]
        for parameter, value in given:
            within.give(parameter, names.resolve(value))


def _called_as_made(names: NameScope, made: ast.Call) -> Iterator[FunctionValue]:
    """Yield the functions called where they are made: `make_step(cfg)(state, batch)`, `jax.jit(step)(state, batch)`."""
    functions, jitted = names.functions_from(made)
    # Only the functions of a factory can be bound.
    if isinstance(names.resolve(made.func), FunctionValue):
        yield from functions
    elif jitted:
        yield FunctionValue(ast.unparse(made), None, [(names, [made])], functions, jitted=True)


def _replacing(names: NameScope, code: Iterable[ast.AST]) -> Iterator[FunctionValue]:
    """Yield functions whose results replace one of their arguments."""
    for node in nodes_outside_definitions(*code):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call = node.value
            given = mentioned_names(*call.args, *(keyword.value for keyword in call.keywords))
            function = names.resolve(call.func)
            if isinstance(function, FunctionValue) and (given & mentioned_names(*node.targets)) - {"self"}:
                yield function


def _looped(loop: Any) -> Sequence[ast.AST]:
    """Return the nodes run in each pass of a loop."""
    if isinstance(loop, (ast.For, ast.AsyncFor)):
        return loop.body
    if isinstance(loop, ast.While):
        return [loop.test, *loop.body]
    return [loop.key, loop.value] if isinstance(loop, ast.DictComp) else [loop.elt]


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the names and attributes assigned by a statement."""
    for target in node.targets if isinstance(node, ast.Assign) else ():
        yield from target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
