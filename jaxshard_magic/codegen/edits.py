"""Changes to the user's text, made from its end to its beginning so that places stay what they are."""

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .marks import Place, place_of
from .pieces import Piece
from .pins import Pin

_DIFFERENTIATE = {"jax.grad", "jax.value_and_grad", "flax.nnx.grad", "flax.nnx.value_and_grad"}
_DIFFERENTIATE |= {"equinox.filter_grad", "equinox.filter_value_and_grad"}
_CHECKPOINT = {"flax.nnx": "remat", "equinox": "filter_checkpoint"}  # by whose gradient it is; else jax's own
_USUAL = {"jax": "jax", "lax": "jax.lax", "nnx": "flax.nnx", "eqx": "equinox"}
_USUAL |= {"flax": "flax", "equinox": "equinox"}


@dataclass(frozen=True)
class Edit:
    """`before` and `after` are put around what stands at a place, or in the place of it where it is `gone`, on one
    line. Of two at one place the later is outside."""

    place: Place
    before: str
    after: str = ""
    gone: bool = False


@dataclass(frozen=True)
class Asked:
    """Edits, and the options of the line that they bring; `told`: what of these they do not bring, in sentences.
    `alone`: the mesh axes along which the losses are each device's own, so that nothing is held divided over them
    there. `less`: what else to try: the user's functions may raise with these edits, or move more."""

    edits: tuple[Edit, ...] = ()
    done: frozenset[str] = frozenset()
    told: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    less: "Asked | None" = None

    def __add__(self, other: "Asked") -> "Asked":
        edits, told = self.edits + other.edits, self.told + other.told
        less = (self.less or self) + (other.less or other) if self.less or other.less else None
        return Asked(edits, self.done | other.done, told, self.alone + other.alone, less)


def held(pins: Iterable[Pin], hold: str, spec: str) -> list[Edit]:
    """`hold(..., P("data"))` around expressions; `spec`: what the program calls PartitionSpec."""
    return [Edit(pin.place, f"{hold}(", f", {spec}{how[1:]})") for pin in pins for how in pin.specs]


def imported(*trees: ast.Module) -> dict[str, str]:
    """What the names stand for that texts import, as `{"jnp": "jax.numpy", "grad": "jax.grad"}`."""
    found: dict[str, str] = {}
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname}
            found |= {root: root for a in node.names if not a.asname for root in [a.name.partition(".")[0]]}
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def is_gradient(node: ast.AST, names: Mapping[str, str]) -> bool:
    """Does an expression make the gradient of a function by jax, nnx or equinox? `names`: what is `imported`."""
    return isinstance(node, ast.Call) and called(node, names) in _DIFFERENTIATE


def checkpointed(
    tree: ast.Module, file: str, lines: set[int], again: str, names: Mapping[str, str] | None = None
) -> list[Edit]:
    """`again(...)` around each function that is differentiated on these lines. `names`: what is `imported`, None for
    what this text does itself."""
    return [
        Edit(place, f"{again}(", f", {own})" if own else ")")
        for place, own in _differentiated(tree, file, lines, names)
    ]


def rematted(
    tree: ast.Module,
    file: str,
    lines: set[int],
    policy: str | None,
    names: Mapping[str, str] | None = None,
    *,
    loops: bool = True,
) -> list[Edit]:
    """`jax.checkpoint(..., policy=...)` around each function that is scanned over on these lines; where none is, or
    without `loops`, around each that is differentiated. None is jax's own policy: nothing is kept. `names` as for
    `checkpointed`."""
    scans = _calls(tree, lines, {"jax.lax.scan"} if loops else (), names or imported(tree))
    scanned = [(place_of(node.args[0], file), None) for node in scans]
    kept = "" if policy is None else f", policy={policy}"
    found = scanned or list(_differentiated(tree, file, lines, names))
    return [Edit(place, f"{own or 'jax.checkpoint'}(", f"{kept})") for place, own in found]


def _differentiated(
    tree: ast.Module, file: str, lines: set[int], names: Mapping[str, str] | None
) -> Iterator[tuple[Place, str | None]]:
    """Where functions stand that are differentiated, and the checkpoint that goes with a gradient that is not jax's;
    those are left out for whose module the text has no name."""
    names = names or imported(tree)
    for node in _calls(tree, lines, _DIFFERENTIATE, names):
        owner = called(node, names).rpartition(".")[0]
        own = _CHECKPOINT.get(owner)
        module = _module(node.func, owner, names) if own else ""
        if module is not None:
            yield place_of(node.args[0], file), own and f"{module}.{own}"


def _module(called: ast.expr, owner: str, names: Mapping[str, str]) -> str | None:
    """What the text calls the module that a function is of."""
    if isinstance(called, ast.Attribute):
        return ast.unparse(called.value)
    return next((name for name, full in names.items() if full == owner), None)


def _calls(
    tree: ast.Module, lines: set[int], functions: Collection[str], names: Mapping[str, str]
) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and node.args
            and node.lineno in lines
            and called(node, names) in functions
        ):
            yield node


def called(node: ast.Call, names: Mapping[str, str]) -> str:
    """The function's full name, as `jax.lax.scan`; empty for what is neither imported nor a module's usual name."""
    root, dot, rest = ast.unparse(node.func).partition(".")
    full = names.get(root) or _USUAL.get(root)
    return full + dot + rest if full else ""


def mapped(
    tree: ast.Module,
    file: str,
    lines: set[int],
    axes: Sequence[str],
    names: Mapping[str, str] | None = None,
) -> list[Edit]:
    """`spmd_axis_name=...` in each call of `jax.vmap` on these lines: what is held inside is divided along the examples
    as well. Calls that may have one are left alone, and those of positional arguments alone with something between the
    last and the bracket. `names` as for `checkpointed`."""
    given = f"spmd_axis_name={tuple(axes)!r}"
    found = []
    for node in _calls(tree, lines, {"jax.vmap"}, names or imported(tree)):
        if len(node.args) <= 5 and not any(k.arg in (None, "spmd_axis_name") for k in node.keywords):
            e = given_by_name(node, file, given)
            found += [] if e is None else [e]
    return found


def given_by_name(node: ast.Call, file: str, given: str) -> Edit | None:
    """An argument by its name in a call; None where its positional arguments alone leave no place for it."""
    if node.keywords:
        k = node.keywords[0]
        return Edit(Place(file, k.lineno, k.col_offset, k.lineno, k.col_offset), f"{given}, ")
    if not node.args or any(isinstance(a, ast.Starred) for a in node.args):
        return None
    last = place_of(node.args[-1], file)
    if (last.end_line, last.end_column + 1) != (node.end_lineno, node.end_col_offset):
        return None
    end = last.end_line, last.end_column
    return Edit(Place(file, *end, *end), "", f", {given}")


def edited(lines: list[str], first: int, edits: Iterable[Edit]) -> list[str]:
    """Lines of a file from line `first` on, with the edits in them."""
    points: list[tuple[int, int, int, tuple[int, ...], int, str]] = []
    for order, e in enumerate(edits):
        p = e.place
        size = p.end_line - p.line, p.end_column - p.column, order
        gone = p.end_column - p.column if e.gone else 0
        # Of two that begin at one place the larger comes first, and ends last, before what begins there.
        points.append((p.line, p.column, 1, tuple(-n for n in size), gone, e.before))
        points.append((p.end_line, p.end_column, 0, size, 0, e.after))
    data = [line.encode() for line in lines]
    for line, column, _, _, gone, text in sorted(points, reverse=True):
        if 0 <= line - first < len(data):
            there = data[line - first]
            data[line - first] = there[:column] + text.encode() + there[column + gone :]
    return [line.decode() for line in data]


def of_piece(piece: Piece, edits: Mapping[str, list[Edit]]) -> str:
    """The text of a piece with those edits of its file that stand in it, and not in another statement on its lines."""
    lines = piece.text.split("\n")
    begin, end = (piece.line, piece.before), (piece.lines[-1], len(lines[-1].encode()))
    inside = [
        e
        for e in edits.get(piece.file, ())
        for p in [e.place]
        if begin <= (p.line, p.column) and (p.end_line, p.end_column) <= end
    ]
    return "\n".join(edited(lines, piece.line, inside)).encode()[piece.before :].decode()
