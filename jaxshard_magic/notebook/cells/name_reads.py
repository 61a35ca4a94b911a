"""Names that a cell reads from the notebook."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from IPython.core.inputtransformer2 import TransformerManager

from .statements import ExecutedCell, Statement, below_magic, untimed

_WORD = re.compile(r"[^\W\d]\w*")
_READ_TEXT = {"exec", "eval", "get_ipython"}  # IPython makes a call of `get_ipython` of each magic
_OPAQUE = {"exec", "eval", "globals", "locals", "vars", "get_ipython"}  # may bind any name


@dataclass(frozen=True)
class NameReads:
    """Names that code may read before binding them.

    Attributes:
        certain: Names evaluated in any case.
        possible: Also names read by branches and function bodies, and words on the lines of magics.
    """

    certain: frozenset[str]
    possible: frozenset[str]


def cell_reads(cell: str) -> NameReads:
    r"""Return the names read by a cell, with or without magics; nothing for text that is not Python.

    >>> found = cell_reads("y = x\nif y:\n    z = w\ndef f(x): return y, v")
    >>> sorted(found.certain), sorted(found.possible)
    (['x'], ['v', 'w', 'x'])
    """
    body = below_magic(cell)
    found = read_by(statements_of(cell))
    of_lines = _WORD.findall(cell.removesuffix(body)) if body else ()
    return NameReads(found.certain, found.possible.union(of_lines))


def statements_of(cell: str) -> list[Statement]:
    """Return the statements of a cell, with or without magics."""
    return ExecutedCell("", TransformerManager().transform_cell(untimed(below_magic(cell)))).statements


def read_by(statements: Iterable[Statement]) -> NameReads:
    """Return the names read by statements in this order; a function body reads from the first use of a function."""
    certain, possible = set[str](), set[str]()
    surely_bound, maybe_bound = set[str](), set[str]()
    functions, pending = set[str](), set[str]()  # functions defined here, and names read in their bodies
    in_use = opaque = False
    for s in statements:
        reads, later = s.reads, s.reads_later
        if not opaque:
            certain |= {*_evaluated(s.node)} & reads - maybe_bound
        possible |= reads - surely_bound
        in_use = in_use or not functions.isdisjoint(reads)
        if s.defines:
            functions |= s.binds
            pending |= later
        else:
            possible |= later - surely_bound
        if in_use:
            possible |= pending - surely_bound
            pending = set()
        if not _READ_TEXT.isdisjoint(reads | later):
            # `exec`, `eval` and magics receive code as text: any word may be a name.
            possible.update(_words(s.node))
        opaque = opaque or "*" in s.binds or not _OPAQUE.isdisjoint(reads | later)
        surely_bound |= s.always_binds | s.imports.keys() if s.is_import else s.always_binds
        maybe_bound |= s.binds | s.binds_later
    return NameReads(frozenset(certain), frozenset(possible | pending - surely_bound))


def _words(node: ast.stmt) -> Iterator[str]:
    """Yield the words of the strings in a statement."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield from _WORD.findall(part.value)


def _evaluated(node: ast.AST) -> Iterator[str]:
    """Yield the names read in any case when a statement or an expression runs."""
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
        # `and`, `or` and chained comparisons may stop after their first operands.
        case ast.BoolOp(values=[first, *_]):
            yield from _evaluated(first)
        case ast.Compare(left=left, comparators=[first, *_]):
            yield from _all_evaluated([left, first])
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            yield from _evaluated(node.generators[0].iter)
        # A NameError inside a `try` may be caught.
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
