"""`--microbatches`, `--reduce` and `--reduce-dtype` in the user's text: the gradient call of the step as a function of
one part of the batch."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from .cells import Cells, Place, place_of
from .edits import Edit, OptionEdits, indented, is_gradient
from .last import last_call
from .means import batch_names, calls_of, convolves, is_mean, objects
from .shards import gathered_before, sums_of

if TYPE_CHECKING:
    from ..step import ShardedStep

LOOP, EACH, AHEAD = "in_microbatches", "in_shards", "gathered"  # functions of `inside`
PART, SHARD = "microbatch", "shard"  # what the program calls the function of one
_CONVOLVES = (
    "XLA does not divide the gradients of convolutions by device, so that no device has its own to add up."
)
_OPTIONS = {"microbatches", "reduce", "reduce_dtype"}


@dataclass(frozen=True)
class _Region:
    """The statements of a function from `first` to the assignment `last` of its gradient call, which make one
    function of the batch; `read`: the names that they read."""

    file: str
    first: ast.stmt
    last: ast.Assign
    batch: tuple[str, ...]
    read: frozenset[str]


def microbatch_edits(step: "ShardedStep", cells: Cells) -> OptionEdits:
    """The edits that take the step's gradient over microbatches, and have devices add it up as the line asks; none
    where its text, or what it gives, has no such form: then the program leaves the options out."""
    options, names = _OPTIONS & {*step.request.gradients.given}, batch_names(step)
    regions = list(_regions(cells, names))
    n, calls = calls_of(step) if options and len(regions) == 1 else (1, ())
    mean = is_mean(step, n, calls)
    if mean is None:
        return OptionEdits()
    (region,) = regions
    taken = _Taken(step, cells, region, "" if mean else ", mean=False")
    loops = frozenset(options & {"microbatches"})
    plain = OptionEdits(taken.edits(taken.in_microbatches()), loops) if loops else OptionEdits()
    if loops == options:
        return plain
    return _in_shards(taken, options, plain, convolves(calls))


def _in_shards(taken: "_Taken", options: set[str], plain: OptionEdits, convolved: bool) -> OptionEdits:
    """`plain`: the region without options of how devices add up what it gives."""
    step, region = taken.step, taken.region
    sums = sums_of(step, taken.cells, place_of(region.last.value, region.file))
    changes = {"reduce": sums.late, "reduce_dtype": sums.rounded}
    without_effect = {option for option, sums in changes.items() if not sums} & options
    plain = replace(plain, options=plain.options | without_effect)
    if options != plain.options and convolved:
        return replace(plain, notes=(_CONVOLVES,))
    ahead = {}
    if step.request.gradients.reduce == "once-gathered" and "reduce" not in plain.options:
        ahead = gathered_before(step, region.read)
    if options == plain.options or ahead is None:
        return plain
    edits = taken.edits(taken.in_shards(sums.text()), ahead)
    axes = last_call(step)[0].plan.batch_axes
    return OptionEdits(edits, frozenset(options), per_device=axes, fallback=plain)


@dataclass(frozen=True)
class _Taken:
    """A region as a function of the batch; `said`: the argument that says whether it gives means."""

    step: "ShardedStep"
    cells: Cells
    region: _Region
    said: str

    @property
    def args(self) -> str:
        return ", ".join(self.region.batch)

    @property
    def part(self) -> str:
        return self.cells.name(PART if self.step.request.gradients.microbatches > 1 else SHARD)

    def in_microbatches(self, gradients: str | None = None) -> str:
        """A call of the function, or of other `gradients`, over microbatches."""
        called = gradients or self.part
        return f"{self.cells.name(LOOP)}({called}, {self.step.request.gradients.microbatches}, {self.args}{self.said})"

    def in_shards(self, how: str) -> str:
        """A call of the function by every device for its own examples; `how`: the further arguments."""
        inside, name = self.step.request.gradients, self.cells.name(EACH)
        each = inside.reduce == "each" and inside.microbatches > 1
        parts = 1 if each else inside.microbatches
        call = f"{name}({self.part}, {parts}, {self.args}{self.said}{how})"
        return self.in_microbatches(f"lambda {self.args}: {call}") if each else call

    def edits(self, call: str, ahead: Mapping[str, str] = MappingProxyType({})) -> tuple[Edit, ...]:
        """The region as that function, and `call` in its place; `ahead`: arguments that are gathered before, with where
        their arrays lie then."""
        region = self.region
        value, indent = region.last.value, " " * region.first.col_offset
        end = value.end_lineno or value.lineno, value.end_col_offset or value.col_offset
        copied = [name for name in objects(self.step) if name in region.read]
        kept = {name: name for name in copied}
        kept |= {name: f"{self.cells.name(AHEAD)}({name}, {lie})" for name, lie in ahead.items()}
        given = ", ".join([*region.batch, *(f"{name}={assigned}" for name, assigned in kept.items())])
        copies = [f"{indent}    {name} = nnx.clone({name})\n" for name in copied]
        first = min([region.first.lineno, *(d.lineno for d in getattr(region.first, "decorator_list", ()))])
        targets = ast.unparse(ast.Assign(region.last.targets, ast.Constant(0), lineno=0))[:-1]
        inner = {n for part in ast.walk(self.cells.trees[region.file]) for n in _inside_text(part)}
        assigned = Place(
            region.file, region.last.lineno, region.last.col_offset, value.lineno, value.col_offset
        )
        begun = "".join([f"{indent}def {self.part}({given}):\n", *copies])
        return (
            *indented(region.file, (n for n in range(first, end[0] + 1) if n not in inner)),
            Edit(assigned, "return ", gone=True),
            Edit(Place(region.file, first, 0, *end), begun, f"\n\n{indent}{targets}{call}"),
        )


def _inside_text(node: ast.AST) -> range:
    """The lines that begin inside of a text in quotes."""
    if isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    ):
        return range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    return range(0)


def _regions(cells: Cells, names: set[str]) -> Iterator[_Region]:
    for file, tree in cells.trees.items():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.lineno in cells.lines[file]:
                region = _region(function, file, names, cells.imports)
                if region is not None:
                    yield region


def _region(
    function: ast.FunctionDef, file: str, names: set[str], imports: Mapping[str, str]
) -> _Region | None:
    """From the first statement that the gradient call needs of the batch to the call."""
    body, batch = function.body, [a.arg for a in function.args.args if a.arg in names]
    at = _gradient_call(body, imports)
    if at is None or not batch:
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
    return _Region(file, body[min(moved)], s, tuple(n for n in batch if n in needed), frozenset(needed))


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
