"""Calls in the user's text, by what they led to in a traced step, and what they are given."""

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

from ..gradients.named import Frame
from ..introspect import static_attribute
from ..program.peel import nnx_calls
from .cells import Cells
from .marks import SEEN
from .swap import swapped

ARRAYS, OTHERS, METHOD, OBJECTS = "arrays", "others", "method", "objects"


@dataclass(frozen=True, eq=False)
class Site:
    """A call in the user's text."""

    file: str
    node: ast.Call


class Sites:
    """The calls that stand in the pieces of some cells."""

    def __init__(self, cells: Cells):
        self._cells = cells
        self._standing = {
            (file, *place): site
            for file, tree in cells.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and node.lineno in cells.lines[file]
            for site in [Site(file, node)]
            for place in _places(node)
        }
        self._known: dict[tuple[int, int], tuple[Any, Site | None]] = {}  # with what the ids are of

    def through(self, frames: Sequence[Frame]) -> set[Site]:
        """All that frames of the interpreter stand at."""
        return {site for frame in frames if (site := self._at(frame)) is not None}

    def innermost(self, frames: Sequence[Frame]) -> Site | None:
        """That of the innermost frame in the cells; None where no frame is, or it stands at another expression."""
        inside = (frame for frame in reversed(frames) if frame[0].co_filename in self._cells.trees)
        frame = next(inside, None)
        return None if frame is None else self._at(frame)

    @contextmanager
    def given(self, sites: Sequence[Site]) -> Iterator[dict[Site, set[str]]]:
        """What each of the sites calls while the step is traced in here. ARRAYS: a function, with nothing but arrays.
        OTHERS: with what is no array as well, or something else that is called. METHOD: an NNX object, or a method of
        one; OBJECTS: a function of arrays and NNX objects. No kind is an empty text."""
        kinds: dict[Site, set[str]] = {site: set() for site in sites}

        def seen(k: int, f: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                kinds[sites[k]].add(_kind(f, args, kwargs))
                return f(*args, **kwargs)

            return run

        files = {site.file for site in sites}
        both = {file: (self._cells.trees[file], self._marked(file, sites)) for file in files}
        with swapped(both, {SEEN: seen}):
            yield kinds

    def _marked(self, file: str, sites: Sequence[Site]) -> ast.Module:
        tree = ast.parse("".join(self._cells.files[file]))
        ending = {_end(site.node): k for k, site in enumerate(sites) if site.file == file}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _end(node) in ending:
                call = ast.Call(ast.Name(SEEN, ast.Load()), [ast.Constant(ending[_end(node)]), node.func], [])
                node.func = ast.copy_location(call, node.func)
        return tree

    def _at(self, frame: Frame) -> Site | None:
        code, at = frame
        key = id(code), at
        if key not in self._known:
            place = next(islice(code.co_positions(), at // 2, None))
            self._known[key] = code, self._standing.get((code.co_filename, *place))
        return self._known[key][1]


def _places(node: ast.Call) -> Iterator[tuple[int | None, ...]]:
    """Where Python says that a call stands, as line, last line, column and last column: a method's that has its name
    on another line than its object begins with that."""
    f, (end, column) = node.func, _end(node)
    yield node.lineno, end, node.col_offset, column
    if isinstance(f, ast.Attribute):
        yield f.end_lineno, end, (f.end_col_offset or 0) - len(f.attr.encode()), column


def _end(node: ast.Call) -> tuple[int | None, int | None]:
    return node.end_lineno, node.end_col_offset


def _kind(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    linen = sys.modules.get("flax.linen")
    owner = static_attribute(f, "__self__", f)
    if linen is not None and isinstance(owner, linen.Module) and owner.scope is not None:
        return ""  # inside of a module's own call jax has no say over its variables
    is_node = nnx_calls().is_node if "flax.nnx" in sys.modules else lambda _: False
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_node)
    objects = [x for x in leaves if is_node(x)]
    others = [x for x in leaves if not isinstance(x, (jax.Array, np.ndarray)) and not is_node(x)]
    if is_node(owner):
        return "" if objects else METHOD
    if objects:
        return "" if others or kwargs else OBJECTS
    plain = inspect.isfunction(f) or (inspect.isfunction(inspect.unwrap(f)) and jax.tree_util.all_leaves([f]))
    return ARRAYS if plain and not others else OTHERS
