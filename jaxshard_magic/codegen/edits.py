"""Edits of the user's text, by span."""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .cells import Cells, SourceSpan, UserStatement, full_name, span_of
from .constraints import Constraint

_DIFFERENTIATE = {"jax.grad", "jax.value_and_grad", "flax.nnx.grad", "flax.nnx.value_and_grad"}
_DIFFERENTIATE |= {"equinox.filter_grad", "equinox.filter_value_and_grad"}
_CHECKPOINT = {"flax.nnx": "remat", "equinox": "filter_checkpoint"}  # by library; else `jax.checkpoint`


@dataclass(frozen=True)
class Edit:
    """Insertion of text around a span, or replacement of the span. Of two edits with equal spans the later is the
    outer.

    Attributes:
        span: The span.
        before: Text before the span, or in its place.
        after: Text after the span.
        replaces: Whether `before` replaces the span. Such a span is on one line.
    """

    span: SourceSpan
    before: str
    after: str = ""
    replaces: bool = False


@dataclass(frozen=True)
class OptionEdits:
    """Edits for options of the `%%shard` line.

    Attributes:
        edits: The edits.
        options: Options implemented by the edits.
        notes: Sentences on omitted parts of the options.
        per_device_axes: Mesh axes along which each device has a loss of its own, free of constraints over these axes.
        fallback: Edits to try where the user's functions raise under these edits, or where these edits move more bytes.
    """

    edits: tuple[Edit, ...] = ()
    options: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    per_device_axes: tuple[str, ...] = ()
    fallback: "OptionEdits | None" = None

    def __add__(self, other: "OptionEdits") -> "OptionEdits":
        edits, notes = self.edits + other.edits, self.notes + other.notes
        either = self.fallback or other.fallback
        fallback = (self.fallback or self) + (other.fallback or other) if either else None
        axes = self.per_device_axes + other.per_device_axes
        return OptionEdits(edits, self.options | other.options, notes, axes, fallback)


def indented(file: str, lines: Iterable[int]) -> list[Edit]:
    """Return edits that indent some lines by four spaces."""
    return [Edit(SourceSpan(file, n, 0, n, 0), "    ") for n in lines]


def constraint_edits(constraints: Iterable[Constraint], hold: str, spec: str) -> list[Edit]:
    """Return edits that write `hold(..., P("data"))` around expressions.

    Args:
        constraints: Constraints to write.
        hold: Name of the constraint function in the program.
        spec: Name of `PartitionSpec` in the program.
    """
    return [Edit(pin.span, f"{hold}(", f", {spec}{how[1:]})") for pin in constraints for how in pin.specs]


def is_gradient(node: ast.AST, imports: Mapping[str, str]) -> bool:
    """Return whether an expression transforms a function into its gradient by jax, flax.nnx or equinox."""
    return isinstance(node, ast.Call) and full_name(node, imports) in _DIFFERENTIATE


def regather_edits(cells: Cells, again: str) -> list[Edit]:
    """Return edits that write `again(...)` around each differentiated function.

    Args:
        cells: The user's text.
        again: Name of the function in the program.
    """
    return [Edit(place, f"{again}(", f", {own})" if own else ")") for place, own in _differentiated(cells)]


def checkpoint_edits(cells: Cells, policy: str | None, *, loops: bool = True) -> list[Edit]:
    """Return edits that write `jax.checkpoint(..., policy=...)` around the body of each scan.

    Cells without a scan have it around each differentiated function.

    Args:
        cells: The user's text.
        policy: Expression of the policy. None for JAX's own: save nothing.
        loops: Whether scans are wrapped. False wraps differentiated functions alone.
    """
    scanned = [(span_of(n.args[0], f), None) for f, n in cells.find_calls({"jax.lax.scan"}) if loops]
    files = {place.file for place, _ in scanned}
    wrapped = [*scanned, *((place, own) for place, own in _differentiated(cells) if place.file not in files)]
    kept = "" if policy is None else f", policy={policy}"
    return [Edit(place, f"{own or 'jax.checkpoint'}(", f"{kept})") for place, own in wrapped]


def _differentiated(cells: Cells) -> Iterator[tuple[SourceSpan, str | None]]:
    """Yield the span of each differentiated function and the checkpoint function of the gradient's library.

    The second is None for `jax.checkpoint`. Functions are omitted where the text has no name for that library's module.
    """
    for file, node in cells.find_calls(_DIFFERENTIATE):
        owner = full_name(node, cells.imports).rpartition(".")[0]
        own = _CHECKPOINT.get(owner)
        module = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else cells.module(owner)
        if own is None or module is not None:
            yield span_of(node.args[0], file), own and f"{module}.{own}"


def vmap_edits(cells: Cells, axes: Sequence[str]) -> list[Edit]:
    """Return edits that add `spmd_axis_name=...` to calls of `jax.vmap`: constraints inside then also divide the
    examples.

    Left out are calls that may have the argument already, and calls of positional arguments alone with text between the
    last argument and the closing bracket.

    Args:
        cells: The user's text.
        axes: Mesh axes of the batch.
    """
    edits = (
        keyword_edit(node, file, f"spmd_axis_name={tuple(axes)!r}")
        for file, node in cells.find_calls({"jax.vmap"})
        # `spmd_axis_name` is the sixth parameter of `jax.vmap`.
        if len(node.args) <= 5 and not any(k.arg in (None, "spmd_axis_name") for k in node.keywords)
    )
    return [e for e in edits if e is not None]


def keyword_edit(node: ast.Call, file: str, given: str) -> Edit | None:
    """Return an edit that adds a keyword argument to a call.

    Args:
        node: The call.
        file: Name of its file.
        given: Text of the argument, `name=value`.

    Returns:
        The edit. None for a call of positional arguments alone with a starred argument, no argument, or text between
        the last argument and the closing bracket.
    """
    if node.keywords:
        k = node.keywords[0]
        return Edit(SourceSpan(file, k.lineno, k.col_offset, k.lineno, k.col_offset), f"{given}, ")
    if not node.args or any(isinstance(a, ast.Starred) for a in node.args):
        return None
    last = span_of(node.args[-1], file)
    # A span excludes parentheses around its expression: in `f((a))` the keyword would be written inside of them.
    if (last.end_line, last.end_column + 1) != (node.end_lineno, node.end_col_offset):
        return None
    end = last.end_line, last.end_column
    return Edit(SourceSpan(file, *end, *end), "", f", {given}")


def edited_trees(cells: Cells, edits: Iterable[Edit]) -> dict[str, tuple[ast.Module, ast.Module]]:
    """Return the original and the edited syntax tree of each cell that has edits."""
    return {
        file: (cells.trees[file], ast.parse("".join(apply_edits(cells.source_lines[file], 1, own))))
        for file, own in by_file(edits).items()
    }


def by_file(edits: Iterable[Edit]) -> dict[str, list[Edit]]:
    """Group edits by file."""
    files: dict[str, list[Edit]] = {}
    for e in edits:
        files.setdefault(e.span.file, []).append(e)
    return files


def apply_edits(lines: list[str], first: int, edits: Iterable[Edit]) -> list[str]:
    """Apply edits to some lines of a file.

    Args:
        lines: The lines.
        first: Line number of the first line.
        edits: Edits of that file.
    """
    points: list[tuple[int, int, int, tuple[int, ...], int, str]] = []
    for order, e in enumerate(edits):
        p = e.span
        size = p.end_line - p.line, p.end_column - p.column, order
        gone = p.end_column - p.column if e.replaces else 0
        # At one position ends precede starts; of two spans the larger starts before and ends after the smaller.
        points.append((p.line, p.column, 1, tuple(-n for n in size), gone, e.before))
        points.append((p.end_line, p.end_column, 0, size, 0, e.after))
    # `ast` counts columns in bytes of UTF-8.
    data = [line.encode() for line in lines]
    # From the end to the beginning: an insertion leaves the positions of all earlier spans valid.
    for line, column, _, _, gone, text in sorted(points, reverse=True):
        if 0 <= line - first < len(data):
            there = data[line - first]
            data[line - first] = there[:column] + text.encode() + there[column + gone :]
    return [line.decode() for line in data]


def statement_text(piece: UserStatement, edits: Mapping[str, list[Edit]]) -> str:
    """Return the text of a statement with its edits applied.

    Edits of other statements on the same lines are left out.
    """
    lines = piece.text.split("\n")
    begin, end = (piece.line, piece.byte_offset), (piece.lines[-1], len(lines[-1].encode()))
    inside = [
        e
        for e in edits.get(piece.file, ())
        for p in [e.span]
        if begin <= (p.line, p.column) and (p.end_line, p.end_column) <= end
    ]
    return "\n".join(apply_edits(lines, piece.line, inside)).encode()[piece.byte_offset :].decode()
