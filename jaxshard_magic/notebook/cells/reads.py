"""The names that a cell reads of those which the notebook had before it."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from IPython.core.inputtransformer2 import TransformerManager

from .statements import Statement, Unit, below_magic, untimed

_WORD = re.compile(r"[^\W\d]\w*")
_READ_TEXT = {"exec", "eval", "get_ipython"}  # the last is what IPython makes of a magic
_OPAQUE = {"exec", "eval", "globals", "locals", "vars", "get_ipython"}  # may bind any name


@dataclass(frozen=True)
class Reads:
    """The names that code may read before it binds them itself, and those of them that it has to find.

    `possible` includes what branches and bodies of functions read, and words on the lines of magics; `certain` only
    what is evaluated whatever happens.
    """

    certain: frozenset[str]
    possible: frozenset[str]


def reads_of(cell: str) -> Reads:
    """Return what a cell reads, with magics or without; nothing for what is no Python.

    >>> found = reads_of("y = x\\nif y:\\n    z = w\\ndef f(x): return y, v")
    >>> sorted(found.certain), sorted(found.possible)
    (['x'], ['v', 'w', 'x'])
    """
    body = below_magic(cell)
    found = read_by(statements_of(cell))
    of_lines = _WORD.findall(cell.removesuffix(body)) if body else ()
    return Reads(found.certain, found.possible.union(of_lines))


def statements_of(cell: str) -> list[Statement]:
    """The statements of a cell, with magics or without."""
    return Unit("", TransformerManager().transform_cell(untimed(below_magic(cell)))).statements


def read_by(statements: Iterable[Statement]) -> Reads:
    """Return what statements read that run in this order, functions' bodies from where the first of them is used."""
    certain, possible = set[str](), set[str]()
    given, bound = set[str](), set[str]()  # bound for sure, and perhaps
    functions, waiting = set[str](), set[str]()  # defined here, and read in their bodies
    in_use = opaque = False
    for s in statements:
        reads, later = s.reads, s.reads_later
        if not opaque:
            certain |= {*_evaluated(s.node)} & reads - bound
        possible |= reads - given
        in_use = in_use or not functions.isdisjoint(reads)
        if s.defines:
            functions |= s.binds
            waiting |= later
        else:
            possible |= later - given
        if in_use:
            possible |= waiting - given
            waiting = set()
        if not _READ_TEXT.isdisjoint(reads | later):
            possible.update(_words(s.node))
        opaque = opaque or "*" in s.binds or not _OPAQUE.isdisjoint(reads | later)
        given |= s.gives | s.imports.keys() if s.is_import else s.gives
        bound |= s.binds | s.binds_later
    return Reads(frozenset(certain), frozenset(possible | waiting - given))


def _words(node: ast.stmt) -> Iterator[str]:
    """The words of the texts in a statement: of what a magic or `eval` is given."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield from _WORD.findall(part.value)


def _evaluated(node: ast.AST) -> Iterator[str]:
    """The names that are read whatever happens where a statement or an expression runs."""
    match node:
        case ast.Name(id=name):
            if isinstance(node.ctx, ast.Load):
                yield name
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from _all_evaluated(node.decorator_list, node.args.defaults, node.args.kw_defaults)
        case ast.Lambda(args=args):
            yield from _all_evaluated(args.defaults, args.kw_defaults)
        case ast.ClassDef():
            yield from _all_evaluated(node.decorator_list, node.bases, [each.value for each in node.keywords])
        case ast.If(test=first) | ast.While(test=first) | ast.IfExp(test=first) | ast.Assert(test=first):
            yield from _evaluated(first)
        case ast.For(iter=first) | ast.AsyncFor(iter=first) | ast.Match(subject=first):
            yield from _evaluated(first)
        case ast.With(items=[first, *_]) | ast.AsyncWith(items=[first, *_]):
            yield from _evaluated(first.context_expr)
        case ast.BoolOp(values=[first, *_]):
            yield from _evaluated(first)
        case ast.Compare(left=left, comparators=[first, *_]):
            yield from _all_evaluated([left, first])
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            yield from _evaluated(node.generators[0].iter)
        case ast.Try() | ast.TryStar() | ast.Delete():
            return
        case ast.AugAssign(target=ast.Name(id=name), value=value):
            yield name
            yield from _evaluated(value)
        case ast.AnnAssign(target=target, value=value):
            yield from _all_evaluated([target, value])
        case _:
            yield from _all_evaluated(ast.iter_child_nodes(node))


def _all_evaluated(*groups: Iterable[ast.AST | None]) -> Iterator[str]:
    for group in groups:
        for node in group:
            if node is not None:
                yield from _evaluated(node)
