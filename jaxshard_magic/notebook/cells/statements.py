"""Cells that ran, statement by statement: what each binds, reads and changes."""

import ast
import copy
import re
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .names import bound, in_scope

_PYTHON_MAGICS = frozenset({"%%shard", "%%time", "%%timeit", "%%capture", "%%prun"})
_TIME = re.compile(r"^([ \t]*)%time[ \t]+", re.MULTILINE)
_MAGIC = re.compile(r"(?:\s*\n)?(%%\S*).*\n?")
_IMPORTS = (ast.Import, ast.ImportFrom)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor)
_CERTAIN = (ast.Assign, ast.AnnAssign, ast.ImportFrom, ast.With, ast.AsyncWith, *_LOOPS, *_SCOPES)


@dataclass(frozen=True)
class Unit:
    """One cell that ran. `text`: Python, as IPython makes it of the cell; `file`: what Python calls it, None where it
    is not known; `title`: as a reader knows it; `shift`: by how many lines Python's numbers are ahead of the text's;
    `failed`: at which of Python's lines it raised."""

    title: str
    text: str
    file: str | None = None
    shift: int = 0
    failed: int | None = None

    @cached_property
    def statements(self) -> list["Statement"]:
        try:
            body = ast.parse(self.text).body
            symtable.symtable(self.text, self.title, "exec")
        except (SyntaxError, ValueError):  # it did not run either
            return []
        return [Statement(self, node) for node in body if self.ran(node)]

    def ran(self, node: ast.stmt) -> bool:
        """Did a statement run to its end?"""
        return self.failed is None or (node.end_lineno or node.lineno) + self.shift < self.failed

    @cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")


class Calls:
    """The names behind what is `called` among these nodes, `trainer` of `trainer.setup()`; and those `handed` to it."""

    def __init__(self, nodes: Iterable[ast.AST]):
        calls = [n for n in nodes if isinstance(n, ast.Call)]
        self.called = _roots(n.func for n in calls)
        self.handed = _roots(x for n in calls for x in (*n.args, *(k.value for k in n.keywords)))


@dataclass(frozen=True, eq=False)
class Statement:
    """A statement at the top of a cell."""

    unit: Unit
    node: ast.stmt

    @cached_property
    def first(self) -> int:
        """Its first line in the cell's text, with its decorators and the comments right above it."""
        first = min([self.node.lineno, *(d.lineno for d in getattr(self.node, "decorator_list", ()))])
        ends = [s.node.end_lineno or 0 for s in self.unit.statements]
        above = max((end for end in ends if end < first), default=0)
        while first - 1 > above and not self.before and self.unit.lines[first - 2].startswith("#"):
            first -= 1
        return first

    @property
    def text(self) -> str:
        """Its lines, with the comments above and beside it; another statement on the last of them is left out."""
        lines = self.unit.lines[self.first - 1 : self.node.end_lineno]
        last = lines[-1].encode()
        if not last[self.node.end_col_offset or 0 :].strip().startswith(b"#"):
            lines[-1] = last[: self.node.end_col_offset].decode()
        return "\n".join(lines)

    @property
    def before(self) -> int:
        """How many bytes of its first line are another statement's."""
        return self.node.col_offset

    @cached_property
    def binds(self) -> set[str]:
        """The names at the top of the notebook that it gives a value, or may give one."""
        return set() if _only_annotates(self.node) else _names(bound(self.node)) | _put(in_scope(self.node))

    @cached_property
    def binds_later(self) -> set[str]:
        """Those that its functions give a value when they are called: `global w`, `globals()["w"] = 1`."""
        return {*_declared(_table(self.node))} | _put(ast.walk(self.node))

    @cached_property
    def gives(self) -> set[str]:
        """Those that it gives a value whatever happens."""
        return _given(self.node)

    @cached_property
    def reads(self) -> set[str]:
        """The names that it reads when it runs, before it gives them a value itself."""
        return _reads([self.node])

    @cached_property
    def reads_later(self) -> set[str]:
        """The names that its functions read in their bodies, when they are called."""
        return {name for name, later in _globals(_table(self.node)) if later}

    @property
    def is_import(self) -> bool:
        return isinstance(self.node, _IMPORTS)

    @cached_property
    def imports(self) -> dict[str, str]:
        """What the names that it imports stand for, as `{"sin": "jax.numpy.sin"}`."""
        node, found = self.node, {}
        for n in in_scope(node):
            if isinstance(n, ast.Import):
                found |= {
                    a.asname or root_of(a.name): a.name if a.asname else root_of(a.name) for a in n.names
                }
            elif isinstance(n, ast.ImportFrom):
                found |= {a.asname or a.name: f"{n.module}.{a.name}" for a in n.names}
        return found

    @property
    def is_magic(self) -> bool:
        return "get_ipython" in self.reads | self.reads_later

    @cached_property
    def ran(self) -> list[str]:
        """What it calls when it runs, as `np.random.rand`."""
        return self._paths(n.func for n in in_scope(self.node) if isinstance(n, ast.Call))

    @cached_property
    def called(self) -> set[str]:
        """The last names of what it calls, or a function in it."""
        calls = (n.func for n in ast.walk(self.node) if isinstance(n, ast.Call))
        return {
            f.attr if isinstance(f, ast.Attribute) else f.id
            for f in calls
            if isinstance(f, (ast.Attribute, ast.Name))
        }

    @cached_property
    def calls_now(self) -> Calls:
        """What it calls when it runs, in comprehensions too."""
        return Calls(()) if self.defines else Calls(_running(self.node))

    @cached_property
    def calls_later(self) -> Calls:
        """What it calls when it runs, or a function in it does."""
        return Calls(ast.walk(self.node))

    @property
    def defines(self) -> bool:
        """Is it a function or a class?"""
        return isinstance(self.node, _SCOPES)

    def calls(self, path: str) -> bool:
        """Does it call the function of this name when it runs?"""
        return path in self._callees

    @cached_property
    def _callees(self) -> set[str]:
        return {ast.unparse(n.func) for n in in_scope(self.node) if isinstance(n, ast.Call)}

    def mentions_a_call(self, path: str) -> bool:
        """Does it call the function of this name, or one of its own functions when that runs?"""
        return any(isinstance(n, ast.Call) and ast.unparse(n.func) == path for n in ast.walk(self.node))

    @cached_property
    def sets(self) -> list[str]:
        """What it sets or deletes an attribute or element of, as `cfg.layers` for `cfg.layers[0] = 1`."""
        parts = (n for n in in_scope(self.node) if isinstance(n, (ast.Attribute, ast.Subscript)))
        return self._paths(n for n in parts if isinstance(n.ctx, (ast.Store, ast.Del)))

    @cached_property
    def does(self) -> list[str]:
        """The functions and methods that it calls for what they do: `cfg.layers.append` for
        `cfg.layers[0].append(1)`."""
        return self._paths(call.func for call in self._calls_alone())

    @cached_property
    def hands(self) -> list[tuple[str, set[str]]]:
        """The functions that it calls by name for what they do, each with the names in its arguments."""
        return [
            (
                call.func.id,
                {*self._paths(n for n in ast.walk(call) if isinstance(n, ast.Name))} - {call.func.id},
            )
            for call in self._calls_alone()
            if isinstance(call.func, ast.Name)
        ]

    def _calls_alone(self) -> Iterator[ast.Call]:
        for n in in_scope(self.node):
            if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call):
                yield n.value

    def _paths(self, nodes: Iterable[ast.expr]) -> list[str]:
        """Each as names and dots. What a loop goes over stands for its variable, a part of it."""
        over = {
            n.target.id: path
            for n in in_scope(self.node)
            if isinstance(n, _LOOPS) and isinstance(n.target, ast.Name) and (path := _path(n.iter))
        }
        found = []
        for path in filter(None, map(_path, nodes)):
            root, dot, rest = path.partition(".")
            found.append(over.get(root, root) + dot + rest)
        return found


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and what runs with it: not the bodies of functions."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*_SCOPES, ast.Lambda)):
            yield from _running(child)


def _put(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that are given a value as `globals()["w"] = 1`."""
    parts = (n for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store))
    named = (n.slice.value for n in parts if isinstance(n.slice, ast.Constant) and _is_globals(n.value))
    return {name for name in named if isinstance(name, str)}


def _is_globals(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "globals"


def below_magic(cell: str) -> str:
    """The code of a cell without the magics of its first lines; nothing of a cell in another language."""
    while first := _MAGIC.match(cell):
        cell = cell[first.end() :] if first[1] in _PYTHON_MAGICS else ""
    return cell


def untimed(cell: str) -> str:
    """The cell with what stands behind `%time` as a line of its own: it runs as others do."""
    return _TIME.sub(r"\1", cell)


def root_of(path: str) -> str:
    """`trainer` of `trainer.step`."""
    return path.partition(".")[0]


def _roots(nodes: Iterable[ast.AST]) -> set[str]:
    return {root_of(path) for path in map(_path, nodes) if path}


def _path(node: ast.AST) -> str | None:
    """`model.layers.append` for `model.layers[0].append`; None for what begins with no name."""
    attributes = []
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call, ast.Starred)):
        attributes += [node.attr] if isinstance(node, ast.Attribute) else []
        node = node.func if isinstance(node, ast.Call) else node.value
    return ".".join([node.id, *reversed(attributes)]) if isinstance(node, ast.Name) else None


def _only_annotates(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and node.value is None


def _names(found: Iterable[str]) -> set[str]:
    return {name for name in found if "." not in name}


def _given(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Import):  # `import a.b` adds to what `import a.c` gave
        return {a.asname or a.name for a in node.names if a.asname or "." not in a.name}
    if _only_annotates(node) or not isinstance(node, _CERTAIN):
        return set()
    return _names(bound(_apart(node)[0]))


def _reads(body: Iterable[ast.stmt]) -> set[str]:
    """The names that statements read as they run, before they give them a value."""
    found, given = set(), set()
    for node in body:
        head, blocks = _apart(node)
        table = _table(head)
        own = {name for name, later in _globals(table) if not later} | _replaced(node)
        own -= {n.target.id for n in ast.walk(head) if isinstance(n, ast.NamedExpr)}
        inner = set().union(*map(_reads, blocks))
        if not isinstance(node, ast.ClassDef):  # which has its name after its body
            inner -= {s.get_name() for s in table.get_symbols() if s.is_assigned()}
        found |= (own | inner) - given
        given |= _given(node)
    return found


def _replaced(node: ast.stmt) -> set[str]:
    """The names that a statement takes the value of without naming them as read."""
    targets = node.targets if isinstance(node, ast.Delete) else []
    targets = [node.target] if isinstance(node, ast.AugAssign) else targets
    return {t.id for t in targets if isinstance(t, ast.Name)}


def _apart(node: ast.AST) -> tuple[ast.AST, list[list[ast.stmt]]]:
    """A compound statement without its blocks, and those."""
    head: Any = copy.copy(node)
    blocks = []
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return head, blocks
    if (
        isinstance(node, (ast.With, ast.AsyncWith)) and len(node.items) > 1
    ):  # each may read what the one before gives
        inner = copy.copy(node)
        head.items, head.body, inner.items = node.items[:1], [ast.Pass()], node.items[1:]
        return head, [[inner]]
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(node, name, None):
            blocks.append(block)
            setattr(head, name, [ast.Pass()])
    for name in ("handlers", "cases"):
        if branches := getattr(node, name, None):
            parts = [_apart(branch) for branch in branches]
            setattr(head, name, [part for part, _ in parts])
            blocks += [block for _, inner in parts for block in inner]
    return head, blocks


def _table(node: ast.AST) -> symtable.SymbolTable:
    return symtable.symtable(ast.unparse(_Generators().visit(copy.deepcopy(node))), "<cell>", "exec")


class _Generators(ast.NodeTransformer):
    """Every comprehension as a generator, which has a scope of its own in all versions of Python."""

    def _generator(self, node: ast.ListComp | ast.SetComp | ast.DictComp) -> ast.AST:
        self.generic_visit(node)
        of = ast.Tuple([node.key, node.value], ast.Load()) if isinstance(node, ast.DictComp) else node.elt
        return ast.GeneratorExp(of, node.generators)

    visit_ListComp = visit_SetComp = visit_DictComp = _generator


def _globals(table: symtable.SymbolTable, later: bool = False) -> Iterator[tuple[str, bool]]:
    """The names that a text reads and does not bind in a scope of its own, each with whether a function's body does."""
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (top or symbol.is_global()):
            yield symbol.get_name(), later
    for child in table.get_children():
        body = child.get_type() == "function" and child.get_name() != "genexpr"
        yield from _globals(child, later or body)


def _declared(table: symtable.SymbolTable) -> Iterator[str]:
    """The names that functions declare `global` and give a value."""
    for symbol in table.get_symbols():
        if symbol.is_declared_global() and (symbol.is_assigned() or symbol.is_imported()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _declared(child)
