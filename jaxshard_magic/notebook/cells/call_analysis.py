"""Functions called by a cell, and training loops among them."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...code_reads import reads_of
from .assignments import parameters
from .names import code_names, mentioned_names, nodes_outside_definitions
from .resolved_values import ClassValue, FunctionValue
from .scopes import GRADIENT, WRAPPERS, NameScope, SourceScope

_UPDATE = {"update", "apply_updates", "apply_gradients"}
# These trace their function arguments, or call them on parts of trees and arrays: neither is a call of a step.
_TRACING = WRAPPERS | {"scan", "fori_loop", "while_loop", "cond", "switch", "map", "tree_map", "shard_map"}
_TRACING |= {"eval_shape", "make_jaxpr", "custom_vjp", "custom_jvp", "transform"}
_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class CalledFunctions:
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


class CodeBehavior:
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
