"""`--microbatches` in the user's text: the gradient call of the step as a function of one part of the batch."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from ..gradients.accumulate import Accumulated
from ..program.examples import Joined, Summed
from ..program.flow import Flow
from ..program.roles import BATCH
from ..program.trace import path_name
from .cells import Cells
from .edits import Asked, Edit, is_gradient
from .marks import Place

if TYPE_CHECKING:
    from ..step import ShardedStep

LOOP = "in_microbatches"  # the function of `parts` that takes them
PART = "microbatch"  # what the program calls the function of one


@dataclass(frozen=True)
class _Region:
    """The statements of a function from `first` to the assignment `last` of its gradient call, which make one
    function of the batch; `read`: the names that they read."""

    file: str
    first: ast.stmt
    last: ast.Assign
    batch: tuple[str, ...]
    read: frozenset[str]


def microbatched(step: "ShardedStep", cells: Cells) -> Asked:
    """The edits that take the step's gradient over microbatches; none where its text, or what it gives, has no such
    form: then the program leaves the option out."""
    mean, loop, part = _is_mean(step), cells.name(LOOP), cells.name(PART)
    names = _batch_names(step)
    regions = [
        r for f, tree in cells.trees.items() for r in _regions(tree, f, cells.lines[f], names, cells.imports)
    ]
    if mean is None or len(regions) != 1:
        return Asked()
    (region,) = regions
    value, indent = region.last.value, " " * region.first.col_offset
    end = value.end_lineno or value.lineno, value.end_col_offset or value.col_offset
    args = ", ".join(region.batch)
    copied = [name for name in _objects(step) if name in region.read]
    given = ", ".join([*region.batch, *(f"{name}={name}" for name in copied)])
    copies = [f"{indent}    {name} = nnx.clone({name})\n" for name in copied]
    first = min([region.first.lineno, *(d.lineno for d in getattr(region.first, "decorator_list", ()))])
    targets = ast.unparse(ast.Assign(region.last.targets, ast.Constant(0), lineno=0))[:-1]
    parts = f"{step.inside.microbatches}, {args}" + ("" if mean else ", mean=False")
    inner = {n for part in ast.walk(cells.trees[region.file]) for n in _inside_text(part)}
    made = Place(region.file, region.last.lineno, region.last.col_offset, value.lineno, value.col_offset)
    inside = Place(region.file, first, 0, *end)
    edits = (
        *(Edit(Place(region.file, n, 0, n, 0), "    ") for n in range(first, end[0] + 1) if n not in inner),
        Edit(made, "return ", gone=True),
        Edit(
            inside,
            "".join([f"{indent}def {part}({given}):\n", *copies]),
            f"\n\n{indent}{targets}{loop}({part}, {parts})",
        ),
    )
    return Asked(edits, frozenset({"microbatches"}))


def _inside_text(node: ast.AST) -> range:
    """The lines that begin inside of a text in quotes."""
    if isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    ):
        return range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    return range(0)


def _is_mean(step: "ShardedStep") -> bool | None:
    """Is all that the gradient call gives a mean over examples, or one for each? False: sums. None: neither, or with
    draws that depend on what is drawn before."""
    assert step.entry is not None
    rewriting, n = step.entry.rewriting, step.inside.microbatches
    calls = list(rewriting.calls.values()) if rewriting is not None else []
    if len(calls) != 1 or not _plain(calls[0]):
        return None
    scales = {how.scale for how in calls[0].outputs.how.values() if isinstance(how, Summed)}
    return {Fraction(1, n): True, Fraction(1): False}.get(scales.pop()) if len(scales) == 1 else None


def _plain(call: Accumulated) -> bool:
    outputs, small = call.outputs, call.small
    joined = [how for how in outputs.how.values() if isinstance(how, Joined)]
    return (
        outputs.exact
        and not (outputs.guessed or outputs.carried or call.followed.norms or Flow(small).random)
        and {*outputs.how} <= {*small.outputs}
        and all(how.dim == 0 and how.scale == 1 for how in joined)
        and set(call.batch.values()) <= {0}
    )


def _objects(step: "ShardedStep") -> list[str]:
    """The step's arguments that are NNX objects: a loop's body may only read copies of its own."""
    call = step.entry.call_of if step.entry is not None else None
    return (
        [] if call is None or call.nodes is None else [path_name(path[:1]) for path in call.nodes.root_paths]
    )


def _batch_names(step: "ShardedStep") -> set[str]:
    """The step's arguments that are examples as a whole."""
    assert step.entry is not None
    roles: dict[str, set[str]] = {}
    for leaf in step.entry.plan.leaves:
        roles.setdefault(leaf.path.partition(".")[0], set()).add(leaf.role)
    return {name for name, found in roles.items() if found == {BATCH}}


def _regions(
    tree: ast.Module, file: str, lines: set[int], names: set[str], imports: Mapping[str, str]
) -> Iterator[_Region]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.lineno in lines:
            batch = [a.arg for a in function.args.args if a.arg in names]
            found = _region(function, batch, imports) if batch else None
            if found is not None:
                first, last, used = found
                yield _Region(file, first, last, tuple(n for n in batch if n in used), frozenset(used))


def _region(
    function: ast.FunctionDef, batch: list[str], imports: Mapping[str, str]
) -> tuple[ast.stmt, ast.Assign, set[str]] | None:
    """The first statement that the gradient call needs of the batch, the call, and the names that they read."""
    body = function.body
    at = _gradient_call(body, imports)
    if at is None:
        return None
    s = body[at]
    assert isinstance(s, ast.Assign)
    moved, needed = [at], _read(s)
    tainted = set(batch)
    depends = []
    for earlier in body[:at]:
        depends.append(bool(_read(earlier) & tainted))
        tainted |= _bound(earlier) if depends[-1] else set()
    for k in reversed(range(at)):
        if depends[k] and _bound(body[k]) & needed:
            moved.append(k)
            needed |= _read(body[k])
    after = set().union(*map(_read, body[at + 1 :]))
    inside = set().union(*(_bound(body[k]) for k in moved[1:]))
    whole = sorted(moved) == list(range(min(moved), at + 1))
    if not whole or inside & after or not needed & set(batch) or s.value.lineno != s.lineno:
        return None
    return body[min(moved)], s, needed


def _gradient_call(body: Sequence[ast.stmt], imports: Mapping[str, str]) -> int | None:
    """The place of the assignment of gradients: `loss, grads = jax.value_and_grad(f)(params)`, also in two."""
    makers: set[str] = set()
    for at, s in enumerate(body):
        if isinstance(s, ast.Assign) and isinstance(s.value, ast.Call):
            called = s.value.func
            if is_gradient(called, imports) or (isinstance(called, ast.Name) and called.id in makers):
                return at
            makers |= _bound(s) if is_gradient(s.value, imports) else set()
    return None


def _read(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _bound(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
