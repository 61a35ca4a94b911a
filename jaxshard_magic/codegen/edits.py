"""Changes to the user's text, made from its end to its beginning so that places stay what they are."""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .cells import Cells, Piece, Place, full_name, place_of
from .pins import Pin

_DIFFERENTIATE = {"jax.grad", "jax.value_and_grad", "flax.nnx.grad", "flax.nnx.value_and_grad"}
_DIFFERENTIATE |= {"equinox.filter_grad", "equinox.filter_value_and_grad"}
_CHECKPOINT = {"flax.nnx": "remat", "equinox": "filter_checkpoint"}  # by whose gradient it is; else jax's own


@dataclass(frozen=True)
class Edit:
    """`before` and `after` are put around what stands at a place, or in the place of it where it is `gone`, on one
    line. Of two at one place the later is outside."""

    place: Place
    before: str
    after: str = ""
    gone: bool = False


@dataclass(frozen=True)
class OptionEdits:
    """Edits that bring `options` of the line into the text; `notes`: what of these they do not bring, in sentences.

    `per_device`: the mesh axes along which the losses are each device's own, so that nothing is held divided over them
    there. `fallback`: what else to try: the user's functions may raise with these edits, or move more.
    """

    edits: tuple[Edit, ...] = ()
    options: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    per_device: tuple[str, ...] = ()
    fallback: "OptionEdits | None" = None

    def __add__(self, other: "OptionEdits") -> "OptionEdits":
        edits, notes = self.edits + other.edits, self.notes + other.notes
        either = self.fallback or other.fallback
        fallback = (self.fallback or self) + (other.fallback or other) if either else None
        axes = self.per_device + other.per_device
        return OptionEdits(edits, self.options | other.options, notes, axes, fallback)


def indented(file: str, lines: Iterable[int]) -> list[Edit]:
    """Four spaces before each of these lines."""
    return [Edit(Place(file, n, 0, n, 0), "    ") for n in lines]


def hold_edits(pins: Iterable[Pin], hold: str, spec: str) -> list[Edit]:
    """`hold(..., P("data"))` around expressions; `spec`: what the program calls PartitionSpec."""
    return [Edit(pin.place, f"{hold}(", f", {spec}{how[1:]})") for pin in pins for how in pin.specs]


def is_gradient(node: ast.AST, imports: Mapping[str, str]) -> bool:
    """Does an expression make the gradient of a function by jax, nnx or equinox?"""
    return isinstance(node, ast.Call) and full_name(node, imports) in _DIFFERENTIATE


def regather_edits(cells: Cells, again: str) -> list[Edit]:
    """`again(...)` around each function that is differentiated."""
    return [Edit(place, f"{again}(", f", {own})" if own else ")") for place, own in _differentiated(cells)]


def checkpoint_edits(cells: Cells, policy: str | None, *, loops: bool = True) -> list[Edit]:
    """`jax.checkpoint(..., policy=...)` around each function that is scanned over; in a cell without any, or without
    `loops`, around each that is differentiated. None is jax's own policy: nothing is kept."""
    scanned = [(place_of(n.args[0], f), None) for f, n in cells.calls({"jax.lax.scan"}) if loops]
    files = {place.file for place, _ in scanned}
    wrapped = [*scanned, *((place, own) for place, own in _differentiated(cells) if place.file not in files)]
    kept = "" if policy is None else f", policy={policy}"
    return [Edit(place, f"{own or 'jax.checkpoint'}(", f"{kept})") for place, own in wrapped]


def _differentiated(cells: Cells) -> Iterator[tuple[Place, str | None]]:
    """Where functions stand that are differentiated, and the checkpoint that goes with a gradient that is not jax's;
    those are left out for whose module the text has no name."""
    for file, node in cells.calls(_DIFFERENTIATE):
        owner = full_name(node, cells.imports).rpartition(".")[0]
        own = _CHECKPOINT.get(owner)
        module = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else cells.module(owner)
        if own is None or module is not None:
            yield place_of(node.args[0], file), own and f"{module}.{own}"


def vmap_edits(cells: Cells, axes: Sequence[str]) -> list[Edit]:
    """`spmd_axis_name=...` in each call of `jax.vmap`: what is held inside is divided along the examples as well. Calls
    that may have one are left alone, and those of positional arguments alone with something between the last and the
    bracket."""
    edits = (
        keyword_edit(node, file, f"spmd_axis_name={tuple(axes)!r}")
        for file, node in cells.calls({"jax.vmap"})
        if len(node.args) <= 5 and not any(k.arg in (None, "spmd_axis_name") for k in node.keywords)
    )
    return [e for e in edits if e is not None]


def keyword_edit(node: ast.Call, file: str, given: str) -> Edit | None:
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


def edited_trees(cells: Cells, edits: Iterable[Edit]) -> dict[str, tuple[ast.Module, ast.Module]]:
    """The tree of each cell that has some of the edits, and that with them in its text."""
    return {
        file: (cells.trees[file], ast.parse("".join(edited(cells.files[file], 1, own))))
        for file, own in by_file(edits).items()
    }


def by_file(edits: Iterable[Edit]) -> dict[str, list[Edit]]:
    files: dict[str, list[Edit]] = {}
    for e in edits:
        files.setdefault(e.place.file, []).append(e)
    return files


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
