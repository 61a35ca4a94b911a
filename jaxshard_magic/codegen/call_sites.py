"""Calls in the user's text, found from the frames of a traced step, and the kinds of their arguments."""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import numpy as np

from ..gradients.call_names import Frame
from ..introspect import static_attribute
from ..program.flatten_call import nnx_objects
from .cells import Cells
from .expression_marks import MARK_FUNCTION
from .swap import swap_code

ARRAYS, OTHERS, METHOD, OBJECTS = "arrays", "others", "method", "objects"


@dataclass(frozen=True, eq=False)
class CallSite:
    """A call in the user's text."""

    file: str
    node: ast.Call


class CallSites:
    """The calls in the user's statements.

    Args:
        cells: The user's text.
    """

    def __init__(self, cells: Cells):
        self._cells = cells
        self._standing = {
            (file, *place): site
            for file, tree in cells.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and node.lineno in cells.statement_lines[file]
            for site in [CallSite(file, node)]
            for place in _places(node)
        }
        # By id of the code object. The reference to it keeps Python from using the id again.
        self._known: dict[tuple[int, int], tuple[Any, CallSite | None]] = {}

    def all_in_frames(self, frames: Sequence[Frame]) -> set[CallSite]:
        """Return all calls in progress in a stack of frames."""
        return {site for frame in frames if (site := self._at(frame)) is not None}

    def innermost(self, frames: Sequence[Frame]) -> CallSite | None:
        """Return the call in progress in the innermost frame of the cells.

        None where no frame is in the cells, or where the frame is at another expression.
        """
        inside = (frame for frame in reversed(frames) if frame[0].co_filename in self._cells.trees)
        frame = next(inside, None)
        return None if frame is None else self._at(frame)

    @contextmanager
    def record_kinds(self, sites: Sequence[CallSite]) -> Iterator[dict[CallSite, set[str]]]:
        """Record the kind of each call while the step is traced inside of the context.

        Args:
            sites: Calls to record.

        Yields:
            For each call the set of its kinds. ARRAYS: a function of arrays alone. OTHERS: other arguments as well, or
                another callable. METHOD: an NNX object or a method of one. OBJECTS: a function of arrays and NNX
                objects. Empty text: none.
        """
        kinds: dict[CallSite, set[str]] = {site: set() for site in sites}

        def seen(k: int, f: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                kinds[sites[k]].add(_kind(f, args, kwargs))
                return f(*args, **kwargs)

            return run

        files = {site.file for site in sites}
        both = {file: (self._cells.trees[file], self._marked(file, sites)) for file in files}
        with swap_code(both, {MARK_FUNCTION: seen}):
            yield kinds

    def _marked(self, file: str, sites: Sequence[CallSite]) -> ast.Module:
        """Return the tree of a file with the callee of each site replaced by a recorder."""
        tree = ast.parse("".join(self._cells.source_lines[file]))
        ending = {_end(site.node): k for k, site in enumerate(sites) if site.file == file}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _end(node) in ending:
                call = ast.Call(ast.Name(MARK_FUNCTION, ast.Load()), [ast.Constant(ending[_end(node)]), node.func], [])
                node.func = ast.copy_location(call, node.func)
        return tree

    def _at(self, frame: Frame) -> CallSite | None:
        code, at = frame
        key = id(code), at
        if key not in self._known:
            # `at` counts bytes; CPython has one position per code unit of two bytes.
            place = next(islice(code.co_positions(), at // 2, None))
            self._known[key] = code, self._standing.get((code.co_filename, *place))
        return self._known[key][1]


def _places(node: ast.Call) -> Iterator[tuple[int | None, ...]]:
    """Yield the positions that Python may report for a call: line, last line, column and last column."""
    f, (end, column) = node.func, _end(node)
    yield node.lineno, end, node.col_offset, column
    # Python reports a method call from the method's name on if that is on another line than the object.
    if isinstance(f, ast.Attribute):
        yield f.end_lineno, end, (f.end_col_offset or 0) - len(f.attr.encode()), column


def _end(node: ast.Call) -> tuple[int | None, int | None]:
    return node.end_lineno, node.end_col_offset


def _kind(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the kind of a call from its callee and arguments; empty for none."""
    linen = sys.modules.get("flax.linen")
    owner = static_attribute(f, "__self__", f)
    if linen is not None and isinstance(owner, linen.Module) and owner.scope is not None:
        return ""  # a bound Linen module changes variables that `jax.checkpoint` does not see
    is_node = nnx_objects().is_node if "flax.nnx" in sys.modules else lambda _: False
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_node)
    objects = [x for x in leaves if is_node(x)]
    others = [x for x in leaves if not isinstance(x, (jax.Array, np.ndarray)) and not is_node(x)]
    if is_node(owner):
        return "" if objects else METHOD
    if objects:
        return "" if others or kwargs else OBJECTS
    plain = inspect.isfunction(f) or (inspect.isfunction(inspect.unwrap(f)) and jax.tree_util.all_leaves([f]))
    return ARRAYS if plain and not others else OTHERS
