"""What Python runs of a cell: the functions that it calls, and those of them that train in a loop."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...code_reads import reads_of
from .assigned import parameters
from .names import code_names, mentioned, own_code
from .scopes import GRADIENT, WRAPPERS, Names, Text
from .values import Class, Function

_UPDATE = {"update", "apply_updates", "apply_gradients"}
# What traces the functions that it is given, or calls them for parts of trees and arrays.
_TRACING = WRAPPERS | {"scan", "fori_loop", "while_loop", "cond", "switch", "map", "tree_map", "shard_map"}
_TRACING |= {"eval_shape", "make_jaxpr", "custom_vjp", "custom_jvp", "transform"}
_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Running:
    """Code that runs, and the functions that Python calls then, as far as can be told, in the order that they are met.

    Jitted functions are called and not looked into. What another function is given counts as called by it, but for what
    traces or wraps it. `replacing` are those called as `state = f(state, batch)`.
    """

    def __init__(self) -> None:
        self.called: list[Function] = []
        self.replacing: set[Function] = set()
        self._entered: set[Function] = set()

    def run(self, names: Names, code: Sequence[ast.AST]) -> None:
        self.replacing.update(_replacing(names, code))
        for function in _calls(names, code):
            self.call(function)

    def call(self, function: Function) -> None:
        if function not in self.called:
            self.called.append(function)
        self.enter(function)

    def enter(self, function: Function) -> None:
        """Run what the function runs."""
        if function in self._entered or function.jitted:
            return
        self._entered.add(function)
        for names, code in function.parts:
            self.run(names, code)
        for inner in function.of:
            self.enter(inner)
        for inner in _without_text(function)[1]:
            self.call(inner)


class Doing:
    """What functions do, in all the code that a call comes to, traced or not."""

    def __init__(self) -> None:
        self._mentions: dict[Function, tuple[set[str], list[Function]]] = {}
        self._training: dict[Function, bool] = {}

    def differentiates(self, function: Function) -> bool:
        return bool(self._names([function]) & GRADIENT)

    def updates(self, function: Function) -> bool:
        return bool(self._names([function]) & _UPDATE)

    def trains(self, function: Function) -> bool:
        """Is it a training loop, or does it call one: does Python loop over gradients and updates? A step may, before
        or after its own."""
        if function not in self._training:
            self._training[function] = False  # while it is told, of functions that call each other
            self._training[function] = self._is_loop(function)
        return self._training[function]

    def _is_loop(self, function: Function) -> bool:
        if function.jitted or self._steps_itself(function):
            return False
        if not function.parts and function.known is not None and reads_of(function.known[1].__code__).loops:
            done = self._names([function])
            return bool(done & GRADIENT and done & _UPDATE)
        calls = [*function.of, *_without_text(function)[1]]
        for names, code in function.parts:
            if any(self._is_training(names, node) for node in own_code(*code) if isinstance(node, _LOOPS)):
                return True
            calls += _calls(names, code)
        return any(map(self.trains, calls))

    def _steps_itself(self, function: Function) -> bool:
        """Does it take a gradient and update with it outside its loops, and not by calling a step?"""
        done: set[str] = set()
        for names, code in function.parts:
            mentions, functions = _mentions(names, _straight(code))
            each = [self._names([inner]) for inner in functions]
            done = done.union(mentions, *(n for n in each if not (n & GRADIENT and n & _UPDATE)))
        return bool(done & GRADIENT and done & (_UPDATE | {"map", "tree_map"}))

    def _is_training(self, names: Names, loop: ast.AST) -> bool:
        names_in, functions = _mentions(names, _all_of(_looped(loop)))
        done = names_in | self._names(functions)
        return bool(done & GRADIENT and done & _UPDATE) or self._feeds_back(names, loop)

    def _feeds_back(self, names: Names, loop: ast.AST) -> bool:
        """Does it pass to what takes gradients, or updates, a name that it gives a new value?"""
        code = _looped(loop)
        stored = {ast.unparse(target) for node in own_code(*code) for target in _targets(node)}
        for node in own_code(*code):
            if isinstance(node, ast.Call) and stored & {ast.unparse(argument) for argument in node.args}:
                mentions, functions = _mentions(names, ast.walk(node.func))
                if (mentions | self._names(functions)) & (GRADIENT | _UPDATE):
                    return True
        return False

    def reached(self, *functions: Function) -> set[Function]:
        """They themselves, and the user's functions that their code mentions."""
        todo, seen = [*functions], set()
        while todo:
            function = todo.pop()
            if function not in seen:
                seen.add(function)
                todo += self._mentioned(function)[1]
        return seen

    def _names(self, functions: Iterable[Function]) -> set[str]:
        """The names that their code mentions, but for those of the user's functions."""
        return set().union(*(self._mentioned(each)[0] for each in self.reached(*functions)))

    def _mentioned(self, function: Function) -> tuple[set[str], list[Function]]:
        if function in self._mentions:
            return self._mentions[function]
        names, inner = _without_text(function)
        for seen, code in function.parts:
            more, functions = _mentions(seen, _all_of(code))
            names, inner = names | more, [*inner, *functions]
        self._mentions[function] = names, [*inner, *function.of]
        return self._mentions[function]


def _without_text(function: Function) -> tuple[set[str], list[Function]]:
    """What a function mentions whose text is not known: names, and the user's functions."""
    if function.parts or function.known is None:
        return set(), []
    names, plain, of = function.known
    reads = reads_of(plain.__code__)
    seen = {chain[0]: names.lookup(chain[0]) for chain in sorted(reads.globals | reads.free)}
    own = plain.__code__.co_varnames[: of is not None]
    for _, attribute in sorted(chain for chain in reads.parameters if chain[:1] == own and len(chain) == 2):
        seen[attribute] = None if of is None else of.attribute(attribute)
    functions = {name: value for name, value in seen.items() if isinstance(value, Function)}
    return code_names(plain.__code__) - functions.keys(), [*functions.values()]


def _mentions(names: Names, nodes: Iterable[ast.AST]) -> tuple[set[str], list[Function]]:
    """The names and attributes among the nodes, and the user's functions that some of them stand for."""
    found, functions = set(), []
    for node in nodes:
        if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load):
            continue
        value = names.value(node)
        if isinstance(value, Function):
            functions.append(value)
        else:
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found, functions


def _all_of(code: Iterable[ast.AST]) -> Iterator[ast.AST]:
    return (part for node in code for part in ast.walk(node))


def _straight(code: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """What runs once when the code does: nothing in loops."""
    for node in code:
        yield node
        if not isinstance(node, (*_LOOPS, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _straight(ast.iter_child_nodes(node))


def _calls(names: Names, code: Iterable[ast.AST]) -> Iterator[Function]:
    """The functions that Python calls when the code runs."""
    for node in own_code(*code):
        if not isinstance(node, ast.Call):
            continue
        of = names.value(node.func)
        if isinstance(of, Class):
            of = of.attribute("__init__")
        if isinstance(of, Function):
            _hand_over(names, node, of)
            yield of
        elif isinstance(node.func, ast.Call):
            yield from _called_as_made(names, node.func)
        if isinstance(of, Function) or not mentioned(node.func) & _TRACING:
            for given in (*node.args, *(keyword.value for keyword in node.keywords)):
                value = names.value(given)
                if isinstance(value, Function):
                    yield value
                elif isinstance(given, ast.Call):  # a function that is made for it
                    yield from (f for f in names.made(given)[0] if f.place is not None)


def _hand_over(names: Names, call: ast.Call, function: Function) -> None:
    """Tell the function's code what it is called with."""
    takes = parameters(function.node)[int(function.method) :]
    for within in [names for names, _ in function.parts[:1] if isinstance(names, Text)]:
        given = [
            *zip(takes, call.args, strict=False),
            *((k.arg, k.value) for k in call.keywords if k.arg in takes),
        ]
        for parameter, value in given:
            within.give(parameter, names.value(value))


def _called_as_made(names: Names, made: ast.Call) -> Iterator[Function]:
    """What is called where it is made, as `make_step(cfg)(state, batch)` or `jax.jit(step)(state, batch)`; only a
    factory's functions can be bound."""
    functions, jitted = names.made(made)
    if isinstance(names.value(made.func), Function):
        yield from functions
    elif jitted:
        yield Function(ast.unparse(made), None, [(names, [made])], functions, jitted=True)


def _replacing(names: Names, code: Iterable[ast.AST]) -> Iterator[Function]:
    for node in own_code(*code):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call = node.value
            given = mentioned(*call.args, *(keyword.value for keyword in call.keywords))
            function = names.value(call.func)
            if isinstance(function, Function) and (given & mentioned(*node.targets)) - {"self"}:
                yield function


def _looped(loop: Any) -> Sequence[ast.AST]:
    """What each pass runs."""
    if isinstance(loop, (ast.For, ast.AsyncFor)):
        return loop.body
    if isinstance(loop, ast.While):
        return [loop.test, *loop.body]
    return [loop.key, loop.value] if isinstance(loop, ast.DictComp) else [loop.elt]


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """The names and attributes that a statement gives a value."""
    for target in node.targets if isinstance(node, ast.Assign) else ():
        yield from target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
