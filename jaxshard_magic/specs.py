"""PartitionSpec text <-> `PartitionSpec`, what fits an array, and rules that give specs to leaves by path."""

import ast
import math
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .errors import ShardError, did_you_mean, none_of, one_of, regular

Rule = tuple[str, PartitionSpec]


@dataclass(frozen=True)
class Placement:
    """Where a user wants an array: the mesh axes of each of its dimensions, and the option that says so."""

    spec: list[tuple[str, ...]]
    source: str


_COMPARED = 200  # characters of an expression that are looked for in paths
_NAMES = ("P", "PartitionSpec")
_EXAMPLE = "P('data', None)"
# The last `=` before a call of P: the regular expression of a rule may hold `=` itself.
_ASSIGNMENT = re.compile(r"(?P<name>.*)=(?P<spec>\s*(?:[\w.]*\.)?(?:P|PartitionSpec)\s*\(.*)", re.DOTALL)


def parse_spec(text: str) -> PartitionSpec:
    """Read a PartitionSpec as it is written in Python; nothing is evaluated.

    Raises `ShardError` for text that is no PartitionSpec.

    >>> parse_spec("P(None, ('data', 'model'))") == PartitionSpec(None, ("data", "model"))
    True
    >>> parse_spec("'data', None") == PartitionSpec("data", None)
    True
    """
    given = " ".join(text.split())
    try:
        return PartitionSpec(*_entries(given))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ShardError(f"'{given}' is no PartitionSpec: write it as {_EXAMPLE}") from None


def _entries(given: str) -> "list[str | tuple[str, ...] | None]":
    node = ast.parse(given, mode="eval").body
    match node:
        case ast.Call(func=func, args=args, keywords=[]) if _last_name(func) in _NAMES:
            entries = args
        case ast.Call(func=func):
            hint = did_you_mean(_last_name(func), _NAMES)
            raise ShardError(f"'{given}' is no PartitionSpec.{hint} Write it as {_EXAMPLE}")
        case ast.Tuple(elts=elements):
            entries = elements
        case _:
            entries = [node]
    return [_entry(e, given) for e in entries]


def parse_assignment(text: str) -> tuple[str, PartitionSpec]:
    """`NAME=SPEC` or `REGEX=SPEC` -> what stands left of the spec, and the spec. Raises `ShardError`.

    >>> parse_assignment("(?P<n>a=b)=P('data')")[0]
    '(?P<n>a=b)'
    """
    text = " ".join(text.split())
    name, equals, spec = text.rpartition("=")
    if found := _ASSIGNMENT.fullmatch(text):
        name, spec = found["name"], found["spec"]
    if not (equals and name.strip()):
        raise ShardError(f"'{text}' gives no name a spec: write batch={_EXAMPLE}")
    return name.strip(), parse_spec(spec)


def parse_rule(text: str) -> Rule:
    """`REGEX=SPEC` as a rule. Raises `ShardError`, also for a text that is no regular expression."""
    pattern, spec = parse_assignment(text)
    find(pattern)
    return pattern, spec


def format_spec(spec: Iterable[str | Iterable[str] | None]) -> str:
    """A spec as one writes it: `P('data', None)`, `P(None, ('data', 'model'))`."""
    return f"P({', '.join(_format_entry(e) for e in spec)})"


def validate_spec(
    spec: PartitionSpec,
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    what: str,
    padded: Container[str] = (),
) -> None:
    """Raise `ShardError` where `spec` cannot shard an array of `shape` over `mesh`; `what` names the array,
    `padded` the axes over which a dimension may be uneven, since rows are added to it.

    An axis that the mesh has not, an axis twice, more entries than dimensions, a size that does not divide.
    """
    text = format_spec(spec)
    if PartitionSpec.UNCONSTRAINED in spec:
        raise ShardError(f"{what}: {text} leaves a dimension open; write an axis or None for it")
    used: set[str] = set()
    for axis in (a for entry in spec for a in _axes(entry)):
        if axis not in mesh.axis_names:
            raise ShardError(
                none_of(
                    f"{what}: {text} names axis '{axis}'",
                    axis,
                    mesh.axis_names,
                    f"the mesh's axes are {one_of(mesh.axis_names)}",
                )
            )
        if axis in used:
            raise ShardError(
                f"{what}: {text} uses axis '{axis}' twice; an axis can divide one dimension. "
                f"Write {format_spec(_without_repeats(spec))}"
            )
        used.add(axis)
    if len(spec) > len(shape):
        raise ShardError(
            f"{what}: {text} has {_count(len(spec), 'entry', 'entries')}, the array has "
            f"{_count(len(shape), 'dimension', 'dimensions')}{_shape(shape)}. "
            f"Write {format_spec(tuple(spec)[: len(shape)])}"
        )
    for d, (size, entry) in enumerate(zip(shape, spec, strict=False)):
        axes = _axes(entry)
        parts = math.prod(mesh.shape[a] for a in axes)
        if size % parts and not any(axis in padded for axis in axes):
            named = " × ".join(f"{a}={mesh.shape[a]}" for a in axes)
            unsharded = tuple(None if i == d else e for i, e in enumerate(spec))
            raise ShardError(
                f"{what}: dimension {d} of {tuple(shape)} has size {size}, which {named} does not divide. "
                f"Make it {_nearest_multiples(size, parts)}, or write {format_spec(unsharded)}"
            )


def find(pattern: str) -> Callable[[str], Any]:
    """What tells whether a rule's regular expression is found in a leaf's path. Raises `ShardError` for text that is
    none."""
    found = regular(pattern)
    if isinstance(found, str):
        raise ShardError(
            f"rule '{pattern}' is no regular expression: {found}. Escape what is meant literally: "
            f"{re.escape(pattern)}"
        )
    return found.search


def match_rules(rules: Iterable[Rule], path: str) -> Rule | None:
    """The first rule whose regular expression is found in `path` (`re.search`), or None.

    Raises `ShardError` for a text that is no regular expression.

    >>> match_rules([("bias$", PartitionSpec()), ("kernel$", PartitionSpec("data"))], "params.Dense_0.kernel")
    ('kernel$', P('data',))
    """
    return next(((pattern, spec) for pattern, spec in rules if find(pattern)(path)), None)


def check_rules(rules: Iterable[Rule], paths: Sequence[str]) -> None:
    """Raise `ShardError` for a rule that matches none of the leaf `paths`; it names the nearest one."""
    for pattern, spec in rules:
        if not any(map(find(pattern), paths)):
            near = max(paths, key=lambda path: _likeness(pattern, path), default=None)
            hint = f"; the nearest is {near}. Use a part of its path" if near else ": the step has no arrays"
            raise ShardError(f"rule {pattern}={format_spec(spec)} matches no leaf{hint}")


def _likeness(pattern: str, path: str) -> float:
    """The share of the pattern's letters that the path has in the same order; of equals, the shorter path."""
    letters = re.sub(r"\\.|[^\w.]", "", pattern[:_COMPARED]).strip(".")
    blocks = SequenceMatcher(None, letters, path, autojunk=False).get_matching_blocks()
    return sum(b.size**2 for b in blocks) - len(path) / 1000


def _entry(node: ast.expr, given: str) -> str | tuple[str, ...] | None:
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str(axis)) if axis:
            return axis
        case ast.Tuple(elts=elements) | ast.List(elts=elements) if all(map(_is_name, elements)):
            return tuple(ast.literal_eval(e) for e in elements)
        case ast.Name(id=axis):
            raise ShardError(f"'{given}': axis names are quoted, '{axis}' as in P('{axis}')")
    raise ShardError(
        f"'{given}': {ast.unparse(node)} is no entry of a PartitionSpec; one is 'axis', ('axis', 'axis') "
        f"or None, as in {_EXAMPLE}"
    )


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(node.value)


def _last_name(func: ast.expr) -> str:
    """`jax.sharding.PartitionSpec` -> `PartitionSpec`."""
    return ast.unparse(func).rpartition(".")[2]


def _format_entry(entry: Any) -> str:
    if entry is PartitionSpec.UNCONSTRAINED:
        return "P.UNCONSTRAINED"
    return repr(entry) if entry is None or isinstance(entry, str) else repr(tuple(entry))


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _without_repeats(spec: Iterable) -> list:
    seen: set[str] = set()
    kept = []
    for entry in spec:
        axes = tuple(dict.fromkeys(a for a in _axes(entry) if a not in seen))
        seen.update(axes)
        kept.append(axes if len(axes) > 1 else next(iter(axes), None))
    return kept


def _nearest_multiples(size: int, parts: int) -> str:
    below = size // parts * parts
    return f"{below} or {below + parts}" if below else str(parts)


def _count(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


def _shape(shape: Sequence[int]) -> str:
    return f" {tuple(shape)}" if shape else ""
