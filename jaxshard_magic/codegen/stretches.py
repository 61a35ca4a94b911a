"""Statements of the user's that follow one another, made a function of their own."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ..gradients.named import Frame
from .cells import Cells, Place
from .edits import Edit, indented


@dataclass(frozen=True)
class Stretch:
    """Those of `function` that begin on the lines from `first` to `last` of a file; `body`: all that they stand
    among."""

    file: str
    first: int
    last: int
    body: tuple[ast.stmt, ...]
    function: ast.FunctionDef

    def edits(self, name: str, decorator: str) -> list[Edit]:
        """A decorated function `name` of the statements, called in their place. None for statements that are more than
        assignments to names and a `return` at last, and where one has a line together with others or a text over
        several lines."""
        inside = [s for s in self.body if self.first <= s.lineno <= self.last]
        last = inside[-1]
        end = last.end_lineno or last.lineno, last.end_col_offset or last.col_offset
        others = [s for s in self.body if s not in inside]
        alone = all(s.end_lineno != self.first and s.lineno != end[0] for s in others)
        plain = all(_targets(s) is not None for s in inside[:-1])
        returns = isinstance(last, ast.Return)
        nodes = {n for s in inside for n in ast.walk(s)}
        if not (alone and plain and (returns or _targets(last) is not None)) or any(
            map(_is_bound_here, nodes)
        ):
            return []
        bound = list(dict.fromkeys(name for s in inside for name in _targets(s) or ()))
        given, known = list[str](), set[str]()
        for s in inside:
            reads = {n.id for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            reads |= {*(_targets(s) or ())} if isinstance(s, ast.AugAssign) else set()
            given += [n for n in bound if n in reads - known and n not in given]
            known |= {*(_targets(s) or ())}
        elsewhere = {n.id for n in ast.walk(self.function) if isinstance(n, ast.Name) and n not in nodes}
        results = ", ".join(n for n in bound if n in elsewhere)
        indent, call = " " * last.col_offset, f"{name}({', '.join(given)})"
        before = f"{indent}@{decorator}\n{indent}def {call}:\n"
        after = f"\n\n{indent}return {call}"
        if not returns:
            after = f"\n{indent}    return {results}\n\n{indent}{results} = {call}"
        if not (returns or results):
            return []
        rows = indented(self.file, range(self.first, end[0] + 1))
        return [*rows, Edit(Place(self.file, self.first, 0, *end), before, after)]


def stretch(chains: Sequence[Sequence[Frame]], cells: Cells) -> Stretch | None:
    """From the first to the last statement that led to what these frames led to, of the innermost function in the cells
    that they all pass; None where there is none, or where they stand in different loops or branches of it."""
    depth = 0
    for level in zip(*chains, strict=False):
        depth += len({id(code) for code, _ in level}) == 1
        if len({(id(code), at) for code, at in level}) > 1:
            break
    passed = [k for k in range(depth) if chains[0][k][0].co_filename in cells.trees]
    if not passed:
        return None
    code = chains[0][passed[-1]][0]
    file, lines = code.co_filename, {_line(chain[passed[-1]]) for chain in chains}
    if not lines <= cells.lines[file]:
        return None
    for body, function in _bodies(cells.trees[file]):
        found = {n: [s for s in body if s.lineno <= n <= (s.end_lineno or 0)] for n in lines}
        if function.name == code.co_name and all(found.values()):
            firsts = [s.lineno for around in found.values() for s in around]
            return Stretch(file, min(firsts), max(firsts), body, function)
    return None


def _line(frame: Frame) -> int:
    code, at = frame
    return next(islice(code.co_positions(), at // 2, None))[0] or 0


def _bodies(
    tree: ast.AST, function: ast.FunctionDef | None = None
) -> Iterator[tuple[tuple[ast.stmt, ...], ast.FunctionDef]]:
    """The lists of statements in functions, those within others before these."""
    owner = tree if isinstance(tree, ast.FunctionDef) else function
    for node in ast.iter_child_nodes(tree):
        yield from _bodies(node, owner)
    if owner is not None:
        for field in ("body", "orelse", "finalbody"):
            body = getattr(tree, field, None)
            if isinstance(body, list):
                yield tuple(body), owner


def _targets(s: ast.stmt) -> list[str] | None:
    """The names that an assignment gives values; None for other statements."""
    if isinstance(s, (ast.AugAssign, ast.AnnAssign)):
        targets = [s.target] if s.value is not None else []
    else:
        targets = s.targets if isinstance(s, ast.Assign) else []
    flat = [n for t in targets for n in (t.elts if isinstance(t, ast.Tuple) else [t])]
    names = [n.id for n in flat if isinstance(n, ast.Name)]
    return names if names and len(names) == len(flat) else None


def _is_bound_here(node: ast.AST) -> bool:
    """Does a node mean something else in another function, or a text another text with more space before its lines?"""
    text = isinstance(node, (ast.JoinedStr, ast.Constant)) and node.lineno != node.end_lineno
    method = isinstance(node, ast.Name) and node.id in ("super", "locals")
    return text or method or isinstance(node, (ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await))
