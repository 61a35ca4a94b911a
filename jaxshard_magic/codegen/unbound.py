"""Names read and never bound by a program, which would end with a NameError."""

import ast
import builtins
import importlib
import symtable
from collections.abc import Iterator

# Python defines these names in each module.
_OF_MODULES = frozenset({"__name__", "__file__", "__doc__", "__builtins__", "__spec__", "__annotations__"})


def unbound_names(text: str) -> set[str]:
    """Return the global names of a program that nothing in it binds, at its top or through `global`.

    Raises SyntaxError for a text that is no program.
    """
    tree = ast.parse(text)
    table = symtable.symtable(text, "<program>", "exec")
    bound = {*dir(builtins), *_OF_MODULES, *_starred(tree)}
    bound |= {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    bound |= {s.get_name() for inner in _inner(table) for s in inner.get_symbols() if _gives_global(s)}
    bound |= set(_through_globals(tree))
    read = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    read |= {s.get_name() for inner in _inner(table) for s in inner.get_symbols() if _reads_global(s)}
    return read - bound


def _inner(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    """Yield the nested symbol tables."""
    for child in table.get_children():
        yield child
        yield from _inner(child)


def _gives_global(symbol: symtable.Symbol) -> bool:
    """Return whether a function binds the symbol through `global`."""
    return symbol.is_declared_global() and (symbol.is_assigned() or symbol.is_imported())


def _reads_global(symbol: symtable.Symbol) -> bool:
    """Return whether a function reads the symbol as a global."""
    return symbol.is_global() and symbol.is_referenced()


def _through_globals(tree: ast.Module) -> Iterator[str]:
    """Yield the names bound as `globals()["w"] = 1`."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="globals")), slice=ast.Constant(value=str(name)), ctx=ast.Store()
            ):
                yield name


def _starred(tree: ast.Module) -> Iterator[str]:
    """Yield the names bound by `from ... import *`. The user's cells have imported these modules before."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and any(a.name == "*" for a in node.names):
            module = importlib.import_module(node.module)
            public = (name for name in vars(module) if not name.startswith("_"))
            yield from getattr(module, "__all__", public)
