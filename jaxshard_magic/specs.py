"""Parse, format and validate PartitionSpecs, and match rules that give specs to leaves by path."""

import ast
import math
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .errors import ShardError, compile_pattern, did_you_mean, list_names, unknown_name

Rule = tuple[str, PartitionSpec]


@dataclass(frozen=True)
class RequestedSpec:
    """Sharding that a user asks for.

    Attributes:
        spec: Mesh axes of each dimension.
        source: Option that asks for it.
    """

    spec: list[tuple[str, ...]]
    source: str


_MAX_COMPARED = 200  # characters of a rule compared with paths: `SequenceMatcher` takes quadratic time
_SPEC_NAMES = ("P", "PartitionSpec")
_EXAMPLE = "P('data', None)"
# The last `=` before a call of P: the regular expression of a rule may itself contain `=`.
_ASSIGNMENT = re.compile(r"(?P<name>.*)=(?P<spec>\s*(?:[\w.]*\.)?(?:P|PartitionSpec)\s*\(.*)", re.DOTALL)


def parse_spec(text: str) -> PartitionSpec:
    """Parse a PartitionSpec from its Python text; nothing is evaluated.

    Raises:
        ShardError: The text is no PartitionSpec.

    >>> parse_spec("P(None, ('data', 'model'))") == PartitionSpec(None, ("data", "model"))
    True
    >>> parse_spec("'data', None") == PartitionSpec("data", None)
    True
    """
    one_line = " ".join(text.split())
    try:
        return PartitionSpec(*_parse_entries(one_line))
    # `ast.parse` raises MemoryError or RecursionError for deeply nested text.
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ShardError(f"'{one_line}' is no PartitionSpec: write it as {_EXAMPLE}") from None


def _parse_entries(text: str) -> "list[str | tuple[str, ...] | None]":
    """Parse the entries of a spec."""
    node = ast.parse(text, mode="eval").body
    match node:
        case ast.Call(func=func, args=args, keywords=[]) if _last_name(func) in _SPEC_NAMES:
            entries = args
        case ast.Call(func=func):
            hint = did_you_mean(_last_name(func), _SPEC_NAMES)
            raise ShardError(f"'{text}' is no PartitionSpec.{hint} Write it as {_EXAMPLE}")
        case ast.Tuple(elts=elements):
            entries = elements
        case _:
            entries = [node]
    return [_parse_entry(e, text) for e in entries]


def parse_assignment(text: str) -> tuple[str, PartitionSpec]:
    """Split `NAME=SPEC` or `REGEX=SPEC` into the text left of the spec, and the spec.

    Raises:
        ShardError: No name, or no PartitionSpec.

    >>> parse_assignment("(?P<n>a=b)=P('data')")[0]
    '(?P<n>a=b)'
    """
    text = " ".join(text.split())
    name, equals, spec = text.rpartition("=")
    if assignment := _ASSIGNMENT.fullmatch(text):
        name, spec = assignment["name"], assignment["spec"]
    if not (equals and name.strip()):
        raise ShardError(f"'{text}' gives no name a spec: write batch={_EXAMPLE}")
    return name.strip(), parse_spec(spec)


def parse_rule(text: str) -> Rule:
    """Parse `REGEX=SPEC` as a rule.

    Raises:
        ShardError: The text is no rule, or its left part no regular expression.
    """
    pattern, spec = parse_assignment(text)
    compile_rule(pattern)
    return pattern, spec


def format_spec(spec: Iterable[str | Iterable[str] | None]) -> str:
    """Return a spec as text: `P('data', None)`, `P(None, ('data', 'model'))`."""
    return f"P({', '.join(_format_entry(e) for e in spec)})"


def validate_spec(
    spec: PartitionSpec,
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    array_name: str,
    padded_axes: Container[str] = (),
) -> None:
    """Raise `ShardError` if `spec` cannot shard an array of `shape` over `mesh`.

    Reasons: an axis that the mesh does not have, an axis used twice, more entries than dimensions, an uneven division,
    an unconstrained dimension.

    Args:
        spec: PartitionSpec.
        shape: Shape of the array.
        mesh: Mesh.
        array_name: Name of the array, for the message.
        padded_axes: Axes over which a dimension may be uneven, since padding rows are added to it.
    """
    text = format_spec(spec)
    if PartitionSpec.UNCONSTRAINED in spec:
        raise ShardError(f"{array_name}: {text} leaves a dimension open; write an axis or None for it")
    used_axes: set[str] = set()
    for axis in (a for entry in spec for a in _entry_axes(entry)):
        if axis not in mesh.axis_names:
            raise ShardError(
                unknown_name(
                    f"{array_name}: {text} names axis '{axis}'",
                    axis,
                    mesh.axis_names,
                    f"the mesh's axes are {list_names(mesh.axis_names)}",
                )
            )
        if axis in used_axes:
            raise ShardError(
                f"{array_name}: {text} uses axis '{axis}' twice; an axis can divide one dimension. "
                f"Write {format_spec(_without_repeats(spec))}"
            )
        used_axes.add(axis)
    if len(spec) > len(shape):
        raise ShardError(
            f"{array_name}: {text} has {_counted(len(spec), 'entry', 'entries')}, the array has "
            f"{_counted(len(shape), 'dimension', 'dimensions')}{_shape_text(shape)}. "
            f"Write {format_spec(tuple(spec)[: len(shape)])}"
        )
    for d, (size, entry) in enumerate(zip(shape, spec, strict=False)):
        axes = _entry_axes(entry)
        parts = math.prod(mesh.shape[a] for a in axes)
        if size % parts and not any(axis in padded_axes for axis in axes):
            axis_sizes = " × ".join(f"{a}={mesh.shape[a]}" for a in axes)
            unsharded = tuple(None if i == d else e for i, e in enumerate(spec))
            raise ShardError(
                f"{array_name}: dimension {d} of {tuple(shape)} has size {size}, which {axis_sizes} does not divide. "
                f"Make it {_nearest_multiples(size, parts)}, or write {format_spec(unsharded)}"
            )


def compile_rule(pattern: str) -> Callable[[str], Any]:
    """Compile a rule's regular expression to a function that searches a leaf's path.

    Raises:
        ShardError: The text is no regular expression.
    """
    compiled = compile_pattern(pattern)
    if isinstance(compiled, str):
        raise ShardError(
            f"rule '{pattern}' is no regular expression: {compiled}. Escape what is meant literally: "
            f"{re.escape(pattern)}"
        )
    return compiled.search


def match_rules(rules: Iterable[Rule], path: str) -> Rule | None:
    """Return the first rule whose regular expression matches anywhere in `path` (`re.search`), or None.

    Raises:
        ShardError: A rule is no regular expression.

    >>> match_rules([("bias$", PartitionSpec()), ("kernel$", PartitionSpec("data"))], "params.Dense_0.kernel")
    ('kernel$', P('data',))
    """
    return next(((pattern, spec) for pattern, spec in rules if compile_rule(pattern)(path)), None)


def check_rules(rules: Iterable[Rule], paths: Sequence[str]) -> None:
    """Raise `ShardError` for a rule that matches no leaf; the message names the most similar path.

    Args:
        rules: Rules.
        paths: Paths of all leaves.
    """
    for pattern, spec in rules:
        if not any(map(compile_rule(pattern), paths)):
            near = max(paths, key=lambda path: _similarity(pattern, path), default=None)
            hint = f"; the nearest is {near}. Use a part of its path" if near else ": the step has no arrays"
            raise ShardError(f"rule {pattern}={format_spec(spec)} matches no leaf{hint}")


def _similarity(pattern: str, path: str) -> float:
    """Return how similar a rule is to a path: squared lengths of common blocks; a shorter path wins ties."""
    letters = re.sub(r"\\.|[^\w.]", "", pattern[:_MAX_COMPARED]).strip(".")
    # The default `autojunk` would ignore frequent letters of paths with more than 200.
    blocks = SequenceMatcher(None, letters, path, autojunk=False).get_matching_blocks()
    return sum(b.size**2 for b in blocks) - len(path) / 1000


def _parse_entry(node: ast.expr, text: str) -> str | tuple[str, ...] | None:
    """Parse an entry of a spec."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str(axis)) if axis:
            return axis
        case ast.Tuple(elts=elements) | ast.List(elts=elements) if all(map(_is_axis_name, elements)):
            return tuple(ast.literal_eval(e) for e in elements)
        case ast.Name(id=axis):
            raise ShardError(f"'{text}': axis names are quoted, '{axis}' as in P('{axis}')")
    raise ShardError(
        f"'{text}': {ast.unparse(node)} is no entry of a PartitionSpec; one is 'axis', ('axis', 'axis') "
        f"or None, as in {_EXAMPLE}"
    )


def _is_axis_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(node.value)


def _last_name(func: ast.expr) -> str:
    """Return the last part of a dotted name: `jax.sharding.PartitionSpec` gives `PartitionSpec`."""
    return ast.unparse(func).rpartition(".")[2]


def _format_entry(entry: Any) -> str:
    if entry is PartitionSpec.UNCONSTRAINED:
        return "P.UNCONSTRAINED"
    return repr(entry) if entry is None or isinstance(entry, str) else repr(tuple(entry))


def _entry_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the axes of an entry."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _without_repeats(spec: Iterable) -> list:
    """Return a spec without axes used before."""
    seen: set[str] = set()
    entries = []
    for entry in spec:
        axes = tuple(dict.fromkeys(a for a in _entry_axes(entry) if a not in seen))
        seen.update(axes)
        entries.append(axes if len(axes) > 1 else next(iter(axes), None))
    return entries


def _nearest_multiples(size: int, parts: int) -> str:
    """Return the multiples of `parts` around `size`, as text."""
    below = size // parts * parts
    return f"{below} or {below + parts}" if below else str(parts)


def _counted(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


def _shape_text(shape: Sequence[int]) -> str:
    return f" {tuple(shape)}" if shape else ""
