"""Names read and written by compiled Python code, from its bytecode.

`co_names` mixes globals with attributes: a step that reads `state.loss` would seem to read a notebook's `loss`.
Instructions tell them apart, and give an attribute's base name: `self.config.rate` is `("self", "config", "rate")`.
"""

import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

Chain = tuple[str, ...]  # a name and the attributes read from it

_NOTHING: tuple[str, Chain] = ("", ())
_IMPORTED = "imported"
# Instructions that may come between the load of an object and that of its attribute.
_BETWEEN = {"CACHE", "NOP", "PUSH_NULL", "EXTENDED_ARG", "PRECALL", "RESUME", "COPY", "DUP_TOP"}
_BY_TEXT = {"getattr", "setattr", "hasattr", "vars", "attrgetter", "__dict__"}  # take the names of attributes as text


@dataclass
class CodeReads:
    """Names that code reads and writes, including the functions and classes defined in it.

    Attributes:
        globals: Chains that begin with a global or builtin name.
        free: Chains that begin with a variable of an enclosing function.
        parameters: Chains that begin with a parameter.
        attributes: Attributes of unnamed objects, such as a call's result or an element.
        written: Chains that are assigned to.
        written_attributes: Attributes of unnamed objects that are assigned to.
        imported: Module and attribute, "" for none, by name bound by an import inside of the code.
        lines: Line of the first read or write, by global name, variable and attribute.
        loops: Whether some of the code may run more than once in a call.
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
    """Return the names that `code` reads and writes. Cost: about 20 us for each 100 instructions, once."""
    found, last = CodeReads(), _NOTHING
    line = code.co_firstlineno
    for at in dis.get_instructions(code):
        line = (at.positions.lineno if at.positions else None) or line
        found.loops |= at.opname.startswith(("FOR_ITER", "JUMP_BACKWARD"))
        if at.opname in _BETWEEN:
            continue
        last = _read(at, last, found, line)
    free, local = set(code.co_freevars), {*_parameters(code), *found.imported}
    # LOAD_FAST loads local variables as well as parameters.
    found.parameters, others = _split(found.parameters, local)
    of_cells, not_free = _split(found.free, free)
    found.free = of_cells
    # LOAD_DEREF also loads parameters that an inner function reads as well.
    kept, more = _split(not_free, local)
    found.parameters |= kept
    found.attributes.update(name for chain in others | more for name in chain[1:])
    for inner in (each for each in code.co_consts if isinstance(each, types.CodeType)):
        _take(found, reads_of(inner), local, free)
    # `getattr` and the like take names as text: any string constant may then be an attribute.
    if _BY_TEXT & {name for chain in found.globals for name in chain} | _BY_TEXT & found.attributes:
        found.attributes.update(text for text in code.co_consts if isinstance(text, str) and text.isidentifier())
    return found


def _read(at: dis.Instruction, last: tuple[str, Chain], found: CodeReads, line: int) -> tuple[str, Chain]:
    """Record one instruction. Return kind and chain of the name or attribute that it leaves on the stack."""
    op, name = at.opname, at.argval
    # LOAD_FAST_LOAD_FAST and STORE_FAST_LOAD_FAST have two names.
    if "FAST" in op and isinstance(name, tuple):
        if op.startswith("LOAD"):
            found.parameters.add(name[:1])
        name = name[-1]
    # The names of instructions differ between Python 3.11 and 3.14, but they begin alike.
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
    """Return the field of `CodeReads` for names loaded by an instruction; empty for other instructions."""
    if op in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
        return "globals"
    if op in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
        return "free"
    return "parameters" if "LOAD_FAST" in op else ""


def _named(found: CodeReads, kind: str, chain: Chain) -> tuple[str, Chain]:
    getattr(found, kind).add(chain)
    return kind, chain


def _take(found: CodeReads, inner: CodeReads, local: set[str], free: set[str]) -> None:
    """Add the reads of an inner function: its free variables are parameters, free variables or locals of the outer
    one."""
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
    flags = bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # CO_VARARGS and CO_VARKEYWORDS: *args, **kwargs
    yield from code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + flags]
