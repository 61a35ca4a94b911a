"""Consecutive statements of the user's, turned into a function."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ..gradients.call_names import Frame
from .cells import Cells, SourceSpan
from .edits import Edit, indented


@dataclass(frozen=True)
class StatementRange:
    """Consecutive statements of one function.

    Attributes:
        file: Name of the file.
        first: First line of the first statement.
        last: First line of the last statement.
        body: The list of statements around them.
        function: The function.
    """

    file: str
    first: int
    last: int
    body: tuple[ast.stmt, ...]
    function: ast.FunctionDef

    def edits(self, name: str, decorator: str) -> list[Edit]:
        """Turn the statements into a decorated function, called in their place.

        Returns:
            The edits. Empty for statements other than assignments to names and a final `return`, for a statement that
            shares a line with others, and for a string literal over several lines.
        """
        inside = [s for s in self.body if self.first <= s.lineno <= self.last]
        last = inside[-1]
        end = last.end_lineno or last.lineno, last.end_col_offset or last.col_offset
        others = [s for s in self.body if s not in inside]
        alone = all(s.end_lineno != self.first and s.lineno != end[0] for s in others)
        plain = all(_targets(s) is not None for s in inside[:-1])
        returns = isinstance(last, ast.Return)
        nodes = {n for s in inside for n in ast.walk(s)}
        if not (alone and plain and (returns or _targets(last) is not None)) or any(map(_is_bound_here, nodes)):
            return []
        bound = list(dict.fromkeys(name for s in inside for name in _targets(s) or ()))
        given, known = list[str](), set[str]()
        for s in inside:
            reads = {n.id for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            reads |= {*(_targets(s) or ())} if isinstance(s, ast.AugAssign) else set()
            # Assigned names are local to the new function, so their earlier values are passed in.
            given += [n for n in bound if n in reads - known and n not in given]
            known |= {*(_targets(s) or ())}
        # Names used nowhere else stay local to the new function.
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
        return [*rows, Edit(SourceSpan(self.file, self.first, 0, *end), before, after)]


def common_range(chains: Sequence[Sequence[Frame]], cells: Cells) -> StatementRange | None:
    """Return the statements from the first to the last that led to some equations.

    Args:
        chains: Stack of frames of each equation, outermost first.
        cells: The user's text.

    Returns:
        Statements of the innermost function of the cells in all stacks. None where no function is in all of them, or
        where the statements are in different loops or branches.
    """
    depth = 0
    for level in zip(*chains, strict=False):
        # Below the first frame at different positions, equal code belongs to different calls.
        depth += len({id(code) for code, _ in level}) == 1
        if len({(id(code), at) for code, at in level}) > 1:
            break
    passed = [k for k in range(depth) if chains[0][k][0].co_filename in cells.trees]
    if not passed:
        return None
    code = chains[0][passed[-1]][0]
    file, lines = code.co_filename, {_line(chain[passed[-1]]) for chain in chains}
    if not lines <= cells.statement_lines[file]:
        return None
    # Inner lists come first, so the innermost list around all lines is taken.
    for body, function in _bodies(cells.trees[file]):
        found = {n: [s for s in body if s.lineno <= n <= (s.end_lineno or 0)] for n in lines}
        if function.name == code.co_name and all(found.values()):
            firsts = [s.lineno for around in found.values() for s in around]
            return StatementRange(file, min(firsts), max(firsts), body, function)
    return None


def _line(frame: Frame) -> int:
    code, at = frame
    # `at` counts bytes; CPython has one position per code unit of two bytes.
    return next(islice(code.co_positions(), at // 2, None))[0] or 0


def _bodies(
    tree: ast.AST, function: ast.FunctionDef | None = None
) -> Iterator[tuple[tuple[ast.stmt, ...], ast.FunctionDef]]:
    """Yield the lists of statements in functions, inner lists first."""
    owner = tree if isinstance(tree, ast.FunctionDef) else function
    for node in ast.iter_child_nodes(tree):
        yield from _bodies(node, owner)
    if owner is not None:
        for field in ("body", "orelse", "finalbody"):
            body = getattr(tree, field, None)
            if isinstance(body, list):
                yield tuple(body), owner


def _targets(s: ast.stmt) -> list[str] | None:
    """Return the names that an assignment binds; None for other statements."""
    if isinstance(s, (ast.AugAssign, ast.AnnAssign)):
        targets = [s.target] if s.value is not None else []
    else:
        targets = s.targets if isinstance(s, ast.Assign) else []
    flat = [n for t in targets for n in (t.elts if isinstance(t, ast.Tuple) else [t])]
    names = [n.id for n in flat if isinstance(n, ast.Name)]
    return names if names and len(names) == len(flat) else None


def _is_bound_here(node: ast.AST) -> bool:
    """Return whether a node would mean something else in another function or with more indentation."""
    text = isinstance(node, (ast.JoinedStr, ast.Constant)) and node.lineno != node.end_lineno
    method = isinstance(node, ast.Name) and node.id in ("super", "locals")
    return text or method or isinstance(node, (ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await))
