"""The names that compiled Python code reads and writes, told from its bytecode.

`co_names` mixes globals with attributes, so that a step that reads `state.loss` would seem to read a notebook's `loss`.
The instructions tell them apart, and which name an attribute is asked of: `self.config.rate` is `("self", "config",
"rate")`. Read with `dis`, whose instructions differ between Python 3.11 and 3.14: those that load, store and ask for an
attribute are told by the beginning of their names.
"""

import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

Chain = tuple[str, ...]  # a name, and the attributes that follow it

_NOTHING: tuple[str, Chain] = ("", ())
_IMPORTED = "imported"
_BETWEEN = {"CACHE", "NOP", "PUSH_NULL", "EXTENDED_ARG", "PRECALL", "RESUME", "COPY", "DUP_TOP"}
_BY_TEXT = {
    "getattr",
    "setattr",
    "hasattr",
    "vars",
    "attrgetter",
    "__dict__",
}  # take an attribute's name as text


@dataclass
class CodeReads:
    """What code reads and writes, with the functions and classes defined in it.

    Attributes:
        globals: Chains that begin with a global or builtin name.
        free: Chains that begin with a variable of an enclosing function.
        parameters: Chains that begin with a parameter.
        attributes: Attributes of what has no name, such as a call's result or an element.
        written: Chains that a value is given to. `written_attributes`: attributes of what has no name.
        imported: Names that imports inside the code bind, each with a module, and the attribute of it or nothing.
        lines: The line of each global name, variable and attribute that is read or written, the first one.
        loops: Whether any of it may run more than once in a call.
    """

    globals: set[Chain] = field(default_factory=set)
    free: set[Chain] = field(default_factory=set)
    parameters: set[Chain] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    written: set[Chain] = field(default_factory=set)
    written_attributes: set[str] = field(default_factory=set)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    loops: bool = False


@lru_cache(maxsize=1024)
def reads_of(code: types.CodeType) -> CodeReads:
    """Return what `code` reads and writes; about 20 us for each 100 instructions, once."""
    found, last = CodeReads(), _NOTHING
    line = code.co_firstlineno
    for at in dis.get_instructions(code):
        line = (at.positions.lineno if at.positions else None) or line
        found.loops |= at.opname.startswith(("FOR_ITER", "JUMP_BACKWARD"))
        if at.opname in _BETWEEN:
            continue
        last = _read(at, last, found, line)
    free, local = set(code.co_freevars), {*_parameters(code), *found.imported}
    found.parameters, others = _split(found.parameters, local)
    of_cells, not_free = _split(found.free, free)
    found.free = of_cells
    kept, more = _split(not_free, local)  # a parameter that an inner function reads, too
    found.parameters |= kept
    found.attributes.update(name for chain in others | more for name in chain[1:])
    for inner in (each for each in code.co_consts if isinstance(each, types.CodeType)):
        _take(found, reads_of(inner), local, free)
    if _BY_TEXT & {name for chain in found.globals for name in chain} | _BY_TEXT & found.attributes:
        found.attributes.update(
            text for text in code.co_consts if isinstance(text, str) and text.isidentifier()
        )
    return found


def _read(at: dis.Instruction, last: tuple[str, Chain], found: CodeReads, line: int) -> tuple[str, Chain]:
    """Take one instruction; the name or attribute that it leaves on the stack, and what kind of name it begins with."""
    op, name = at.opname, at.argval
    if "FAST" in op and isinstance(name, tuple):  # LOAD_FAST_LOAD_FAST, STORE_FAST_LOAD_FAST: two at once
        if op.startswith("LOAD"):
            found.parameters.add(name[:1])
        name = name[-1]
    if op.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")):
        found.lines.setdefault(name, line)
        kind, chain = last
        if not kind or kind == _IMPORTED:
            found.attributes.add(name)
            return _NOTHING
        return _named(found, kind, (*chain, name))
    if op.startswith(("STORE_ATTR", "DELETE_ATTR")):
        found.lines.setdefault(name, line)
        if last[1]:
            found.written.add((*last[1], name))
        else:
            found.written_attributes.add(name)
        return _NOTHING
    if op == "IMPORT_NAME":
        return _IMPORTED, (name, "")
    if last[0] == _IMPORTED and op == "IMPORT_FROM":
        return _IMPORTED, (last[1][0], name)
    if last[0] == _IMPORTED and op in ("STORE_FAST", "STORE_NAME", "STORE_DEREF"):
        module, of = last[1]
        found.imported[name] = module, of
        return _IMPORTED, (module, "")
    if op.startswith(("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")):
        found.lines.setdefault(name, line)
        found.written.add((name,))
        return _NOTHING
    kind = _loads(op)
    if not kind:
        return _NOTHING
    if kind != "parameters":
        found.lines.setdefault(name, line)
    return _named(found, kind, (name,))


def _loads(op: str) -> str:
    """Return which names an instruction loads one of, the field of `CodeReads`; empty for another instruction."""
    if op in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
        return "globals"
    if op in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
        return "free"
    return "parameters" if "LOAD_FAST" in op else ""


def _named(found: CodeReads, kind: str, chain: Chain) -> tuple[str, Chain]:
    getattr(found, kind).add(chain)
    return kind, chain


def _take(found: CodeReads, inner: CodeReads, local: set[str], free: set[str]) -> None:
    """Add what a function inside reads: its variables of ours are our parameters, our own variables, or locals."""
    found.globals |= inner.globals
    own, rest = _split(inner.free, free)
    found.free |= own
    given, rest = _split(rest, local)
    found.parameters |= given
    unnamed = rest | inner.parameters
    found.attributes |= inner.attributes.union(*(chain[1:] for chain in unnamed))
    found.written |= inner.written
    found.written_attributes |= inner.written_attributes
    for name, line in inner.lines.items():
        found.lines.setdefault(name, line)


def _split(chains: set[Chain], names: set[str]) -> tuple[set[Chain], set[Chain]]:
    """Return the chains that begin with one of the names, and the others."""
    inside = {chain for chain in chains if chain[0] in names}
    return inside, chains - inside


def _parameters(code: types.CodeType) -> Iterator[str]:
    flags = bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args, **kwargs
    yield from code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + flags]
