"""Statements of cells run: names bound and read, values changed."""

import ast
import copy
import re
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .names import bound_names, in_scope

# Magics with Python below their line.
_PYTHON_MAGICS = frozenset({"%%shard", "%%time", "%%timeit", "%%capture", "%%prun"})
_TIME = re.compile(r"^([ \t]*)%time[ \t]+", re.MULTILINE)
_MAGIC = re.compile(r"(?:\s*\n)?(%%\S*).*\n?")
_IMPORTS = (ast.Import, ast.ImportFrom)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor)
_CERTAIN = (ast.Assign, ast.AnnAssign, ast.ImportFrom, ast.With, ast.AsyncWith, *_LOOPS, *_SCOPES)


@dataclass(frozen=True)
class ExecutedCell:
    """Cell run in the notebook.

    Attributes:
        title: Name for readers.
        text: Python code as transformed by IPython.
        file: File name known to Python; None if unknown.
        shift: Number of lines that Python's count is ahead of the text's.
        failed: Line in Python's count at which the cell raised; None without an error.
    """

    title: str
    text: str
    file: str | None = None
    shift: int = 0
    failed: int | None = None

    @cached_property
    def statements(self) -> list["Statement"]:
        """Statements run to their end."""
        return [Statement(self, node) for node in self._tree if self.ran(node)]

    @cached_property
    def _tree(self) -> list[ast.stmt]:
        """Statements of the cell; none for text that is not Python, which did not run either."""
        try:
            # Finds errors that `ast.parse` lets pass, such as a parameter named twice or a late `global`.
            symtable.symtable(self.text, self.title, "exec")
            return ast.parse(self.text).body
        except (SyntaxError, ValueError):
            return []

    @cached_property
    def with_interrupted(self) -> "ExecutedCell":
        """Same cell with the failing statement counted as run."""
        if self.failed is None:
            return self
        ends = (node.end_lineno or node.lineno for node in self._tree)
        after = (end + self.shift for end in ends if end + self.shift >= self.failed)
        return replace(self, failed=1 + min(after, default=self.failed))

    def ran(self, node: ast.stmt) -> bool:
        """Return whether a statement ran to its end."""
        return self.failed is None or (node.end_lineno or node.lineno) + self.shift < self.failed

    @cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")


class CallNames:
    """Names behind calls.

    Args:
        nodes: Nodes to search.

    Attributes:
        called: First names of callees, `trainer` of `trainer.setup()`.
        handed: First names of arguments.
    """

    def __init__(self, nodes: Iterable[ast.AST]):
        calls = [n for n in nodes if isinstance(n, ast.Call)]
        self.called = _roots(n.func for n in calls)
        self.handed = _roots(x for n in calls for x in (*n.args, *(k.value for k in n.keywords)))


@dataclass(frozen=True, eq=False)
class Statement:
    """Statement at the top of a cell.

    Attributes:
        unit: Cell.
        node: Syntax tree.
    """

    unit: ExecutedCell
    node: ast.stmt

    @cached_property
    def first(self) -> int:
        """First line in the cell's text, counting decorators and comments right above."""
        first = min([self.node.lineno, *(d.lineno for d in getattr(self.node, "decorator_list", ()))])
        ends = [s.node.end_lineno or 0 for s in self.unit.statements]
        above = max((end for end in ends if end < first), default=0)
        while first - 1 > above and not self.before and self.unit.lines[first - 2].startswith("#"):
            first -= 1
        return first

    @property
    def text(self) -> str:
        """Lines of the statement, with comments above and at its end; another statement on the last line is left
        out."""
        lines = self.unit.lines[self.first - 1 : self.node.end_lineno]
        # Python's column offsets count UTF-8 bytes.
        last = lines[-1].encode()
        if not last[self.node.end_col_offset or 0 :].strip().startswith(b"#"):
            lines[-1] = last[: self.node.end_col_offset].decode()
        return "\n".join(lines)

    @property
    def before(self) -> int:
        """Number of bytes of the first line that belong to another statement."""
        return self.node.col_offset

    @cached_property
    def binds(self) -> set[str]:
        """Names of the notebook that the statement binds or may bind."""
        return set() if _only_annotates(self.node) else _names(bound_names(self.node)) | _put(in_scope(self.node))

    @cached_property
    def binds_later(self) -> set[str]:
        """Names of the notebook bound by its functions when called: `global w`, `globals()["w"] = 1`."""
        return {*_declared(_table(self.node))} | _put(ast.walk(self.node))

    @cached_property
    def always_binds(self) -> set[str]:
        """Names bound in any case."""
        return _given(self.node)

    @cached_property
    def reads(self) -> set[str]:
        """Names read when the statement runs, before the statement itself binds them."""
        return _reads([self.node])

    @cached_property
    def reads_later(self) -> set[str]:
        """Names read by bodies of functions, when called."""
        return {name for name, later in _globals(_table(self.node)) if later}

    @property
    def is_import(self) -> bool:
        return isinstance(self.node, _IMPORTS)

    @cached_property
    def imports(self) -> dict[str, str]:
        """Full names of imported names, `{"sin": "jax.numpy.sin"}`."""
        node, found = self.node, {}
        for n in in_scope(node):
            if isinstance(n, ast.Import):
                found |= {a.asname or root_of(a.name): a.name if a.asname else root_of(a.name) for a in n.names}
            elif isinstance(n, ast.ImportFrom):
                found |= {a.asname or a.name: f"{n.module}.{a.name}" for a in n.names}
        return found

    @property
    def is_magic(self) -> bool:
        return "get_ipython" in self.reads | self.reads_later

    @cached_property
    def called_paths(self) -> list[str]:
        """Paths of the functions called when the statement runs, `np.random.rand`."""
        return self._paths(n.func for n in in_scope(self.node) if isinstance(n, ast.Call))

    @cached_property
    def called(self) -> set[str]:
        """Last names of the functions called, also by functions inside."""
        calls = (n.func for n in ast.walk(self.node) if isinstance(n, ast.Call))
        return {
            f.attr if isinstance(f, ast.Attribute) else f.id for f in calls if isinstance(f, (ast.Attribute, ast.Name))
        }

    @cached_property
    def calls_now(self) -> CallNames:
        """Calls made when the statement runs, in comprehensions too."""
        return CallNames(()) if self.defines else CallNames(_running(self.node))

    @cached_property
    def calls_later(self) -> CallNames:
        """Calls made when the statement runs, or by functions inside."""
        return CallNames(ast.walk(self.node))

    @property
    def defines(self) -> bool:
        """True for a function or a class."""
        return isinstance(self.node, _SCOPES)

    def calls(self, path: str) -> bool:
        """Return whether the statement calls the function named `path` when run."""
        return path in self._callees

    @cached_property
    def _callees(self) -> set[str]:
        return {ast.unparse(n.func) for n in in_scope(self.node) if isinstance(n, ast.Call)}

    def mentions_a_call(self, path: str) -> bool:
        """Return whether the statement, or a function inside, calls the function named `path`."""
        return any(isinstance(n, ast.Call) and ast.unparse(n.func) == path for n in ast.walk(self.node))

    @cached_property
    def mutates(self) -> list[str]:
        """Paths with an attribute or element assigned or deleted, `cfg.layers` for `cfg.layers[0] = 1`."""
        parts = (n for n in in_scope(self.node) if isinstance(n, (ast.Attribute, ast.Subscript)))
        return self._paths(n for n in parts if isinstance(n.ctx, (ast.Store, ast.Del)))

    @cached_property
    def effect_calls(self) -> list[str]:
        """Functions and methods called for an effect, `cfg.layers.append` for `cfg.layers[0].append(1)`."""
        return self._paths(call.func for call in self._calls_alone())

    @cached_property
    def effect_arguments(self) -> list[tuple[str, set[str]]]:
        """Functions called by name for an effect, each with the names in the arguments."""
        return [
            (call.func.id, {*self._paths(n for n in ast.walk(call) if isinstance(n, ast.Name))} - {call.func.id})
            for call in self._calls_alone()
            if isinstance(call.func, ast.Name)
        ]

    def _calls_alone(self) -> Iterator[ast.Call]:
        for n in in_scope(self.node):
            if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call):
                yield n.value

    def _paths(self, nodes: Iterable[ast.expr]) -> list[str]:
        """Return the nodes as dotted names."""
        # A loop's variable is a part of the iterable, so changes of the variable change the iterable.
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
    """Yield `node` and the nodes run with it, without the bodies of functions and classes."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*_SCOPES, ast.Lambda)):
            yield from _running(child)


def _put(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names assigned as `globals()["w"] = 1`."""
    parts = (n for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store))
    named = (n.slice.value for n in parts if isinstance(n.slice, ast.Constant) and _is_globals(n.value))
    return {name for name in named if isinstance(name, str)}


def _is_globals(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "globals"


def below_magic(cell: str) -> str:
    """Return the code of a cell below cell magics; empty for a cell in another language."""
    while first := _MAGIC.match(cell):
        cell = cell[first.end() :] if first[1] in _PYTHON_MAGICS else ""
    return cell


def untimed(cell: str) -> str:
    """Return the cell without `%time` in front of statements, which run as others do."""
    return _TIME.sub(r"\1", cell)


def root_of(path: str) -> str:
    """Return the first name of a path, `trainer` of `trainer.step`."""
    return path.partition(".")[0]


def _roots(nodes: Iterable[ast.AST]) -> set[str]:
    return {root_of(path) for path in map(_path, nodes) if path}


def _path(node: ast.AST) -> str | None:
    """Return a dotted name, `model.layers.append` for `model.layers[0].append`; None if no name begins the node."""
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
    """Return the names that a statement binds in any case."""
    if isinstance(node, ast.Import):  # `import a.b` may add to an `a` that `import a.c` has bound
        return {a.asname or a.name for a in node.names if a.asname or "." not in a.name}
    if _only_annotates(node) or not isinstance(node, _CERTAIN):
        return set()
    return _names(bound_names(_apart(node)[0]))


def _reads(body: Iterable[ast.stmt]) -> set[str]:
    """Return the names read by statements before any of them binds the names."""
    found, bound_before = set(), set()
    for node in body:
        head, blocks = _apart(node)
        table = _table(head)
        own = {name for name, later in _globals(table) if not later} | _replaced(node)
        own -= {n.target.id for n in ast.walk(head) if isinstance(n, ast.NamedExpr)}
        inner = set().union(*map(_reads, blocks))
        if not isinstance(node, ast.ClassDef):  # a class is bound after its body has run
            inner -= {s.get_name() for s in table.get_symbols() if s.is_assigned()}
        found |= (own | inner) - bound_before
        bound_before |= _given(node)
    return found


def _replaced(node: ast.stmt) -> set[str]:
    """Return the names whose value a statement takes without a read: targets of `del` and `+=`."""
    targets = node.targets if isinstance(node, ast.Delete) else []
    targets = [node.target] if isinstance(node, ast.AugAssign) else targets
    return {t.id for t in targets if isinstance(t, ast.Name)}


def _apart(node: ast.AST) -> tuple[ast.AST, list[list[ast.stmt]]]:
    """Return a compound statement without its blocks, and the blocks."""
    head: Any = copy.copy(node)
    blocks = []
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return head, blocks
    # Each item of a `with` may read names bound by the item before.
    if isinstance(node, (ast.With, ast.AsyncWith)) and len(node.items) > 1:
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
    """Transformer of comprehensions into generators."""

    def _generator(self, node: ast.ListComp | ast.SetComp | ast.DictComp) -> ast.AST:
        self.generic_visit(node)
        of = ast.Tuple([node.key, node.value], ast.Load()) if isinstance(node, ast.DictComp) else node.elt
        # A generator has a scope of its own in all versions of Python; since 3.12 (PEP 709) other comprehensions are
        # inlined.
        return ast.GeneratorExp(of, node.generators)

    visit_ListComp = visit_SetComp = visit_DictComp = _generator


def _globals(table: symtable.SymbolTable, later: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the global names read by a text, each with whether a function's body reads the name."""
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (top or symbol.is_global()):
            yield symbol.get_name(), later
    for child in table.get_children():
        # A generator has a scope of its own, and runs with its statement all the same.
        body = child.get_type() == "function" and child.get_name() != "genexpr"
        yield from _globals(child, later or body)


def _declared(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that functions declare `global` and bind."""
    for symbol in table.get_symbols():
        if symbol.is_declared_global() and (symbol.is_assigned() or symbol.is_imported()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _declared(child)
