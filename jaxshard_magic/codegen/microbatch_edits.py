"""Write `--microbatches`, `--reduce` and `--reduce-dtype` into the user's text.

The gradient call of the step becomes a function of one part of the batch.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from .cells import Cells, SourceSpan, span_of
from .edits import Edit, OptionEdits, indented, is_gradient
from .gradient_sums import find_sums, gather_tables
from .latest_call import last_call
from .mean_check import batch_names, convolves, gradient_calls, is_mean, nnx_arguments

if TYPE_CHECKING:
    from ..step import ShardedStep

MICROBATCH_FUNCTION, PER_DEVICE_FUNCTION, GATHER_FUNCTION = (
    "in_microbatches",
    "in_shards",
    "gathered",
)  # names in `step_functions`
PART, SHARD = "microbatch", "shard"  # names in the program of the function of one microbatch, or of one shard
_CONVOLVES = "XLA does not divide the gradients of convolutions by device, so that no device has its own to add up."
_OPTIONS = {"microbatches", "reduce", "reduce_dtype"}


@dataclass(frozen=True)
class _Region:
    """Statements of a function, up to the assignment of its gradient call, to become one function of the batch.

    Attributes:
        file: Name of the cell's file.
        first: First statement.
        last: Assignment of the gradient call, the last statement.
        batch: Names of the parameters with examples, as far as the statements read them.
        read: Names read by the statements.
    """

    file: str
    first: ast.stmt
    last: ast.Assign
    batch: tuple[str, ...]
    read: frozenset[str]


def microbatch_edits(step: "ShardedStep", cells: Cells) -> OptionEdits:
    """Return edits that take the step's gradient over microbatches and sum it over devices, by the step's options.

    Args:
        step: A step with a recorded call.
        cells: The user's text.

    Returns:
        Edits for the options `microbatches`, `reduce` and `reduce_dtype`. Empty where the text, or the result of the
        gradient call, has no suitable form: the program then omits the options.
    """
    options, names = _OPTIONS & {*step.request.gradients.given}, batch_names(step)
    regions = list(_regions(cells, names))
    n, calls = gradient_calls(step) if options and len(regions) == 1 else (1, ())
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
    """Add the sums over devices to `plain`, the edits for microbatches alone.

    Return `plain` where the options change nothing or have no form in the text.
    """
    step, region = taken.step, taken.region
    sums = find_sums(step, taken.cells, span_of(region.last.value, region.file))
    changes = {"reduce": sums.after_loop, "reduce_dtype": sums.rounded}
    without_effect = {option for option, sums in changes.items() if not sums} & options
    plain = replace(plain, options=plain.options | without_effect)
    # XLA does not divide the gradients of convolutions by device, so no device has a gradient of its own to add up.
    if options != plain.options and convolved:
        return replace(plain, notes=(_CONVOLVES,))
    ahead = {}
    if step.request.gradients.reduce == "once-gathered" and "reduce" not in plain.options:
        ahead = gather_tables(step, region.read)
    if options == plain.options or ahead is None:
        return plain
    edits = taken.edits(taken.in_shards(sums.argument_text()), ahead)
    axes = last_call(step)[0].plan.batch_axes
    return OptionEdits(edits, frozenset(options), per_device_axes=axes, fallback=plain)


@dataclass(frozen=True)
class _Taken:
    """Editor of a region, to be turned into a function of the batch.

    Attributes:
        step: The step.
        cells: The user's text.
        region: The statements.
        mean_argument: Further argument text, `, mean=False` where the gradient call returns sums over examples, else
            empty.
    """

    step: "ShardedStep"
    cells: Cells
    region: _Region
    mean_argument: str

    @property
    def args(self) -> str:
        """Names of the batch's arguments, separated by commas."""
        return ", ".join(self.region.batch)

    @property
    def part(self) -> str:
        """Name of the function of one microbatch or shard in the program."""
        return self.cells.program_name(PART if self.step.request.gradients.microbatches > 1 else SHARD)

    def in_microbatches(self, gradients: str | None = None) -> str:
        """Return a call over microbatches of the region's function, or of the expression `gradients`."""
        called = gradients or self.part
        return (
            f"{self.cells.program_name(MICROBATCH_FUNCTION)}({called}, "
            f"{self.step.request.gradients.microbatches}, {self.args}{self.mean_argument})"
        )

    def in_shards(self, how: str) -> str:
        """Return a call of the function on every device for its own examples.

        Args:
            how: Text of further arguments, each after a comma.
        """
        inside, name = self.step.request.gradients, self.cells.program_name(PER_DEVICE_FUNCTION)
        each = inside.reduce == "each" and inside.microbatches > 1
        parts = 1 if each else inside.microbatches
        call = f"{name}({self.part}, {parts}, {self.args}{self.mean_argument}{how})"
        return self.in_microbatches(f"lambda {self.args}: {call}") if each else call

    def edits(self, call: str, ahead: Mapping[str, str] = MappingProxyType({})) -> tuple[Edit, ...]:
        """Turn the region into a function and put `call` in its place.

        Args:
            call: Text of the call.
            ahead: Arguments gathered before the call, by name, each with the text of its table of specs.
        """
        region = self.region
        value, indent = region.last.value, " " * region.first.col_offset
        end = value.end_lineno or value.lineno, value.end_col_offset or value.col_offset
        nnx_names = [name for name in nnx_arguments(self.step) if name in region.read]
        keyword_values = {name: name for name in nnx_names}
        keyword_values |= {
            name: f"{self.cells.program_name(GATHER_FUNCTION)}({name}, {lie})" for name, lie in ahead.items()
        }
        parameters = ", ".join([*region.batch, *(f"{name}={assigned}" for name, assigned in keyword_values.items())])
        # NNX refuses changes in a loop's body to objects from outside, so the body works on clones.
        copies = [f"{indent}    {name} = nnx.clone({name})\n" for name in nnx_names]
        # `lineno` of a decorated function is the line of `def`, below the decorators.
        first = min([region.first.lineno, *(d.lineno for d in getattr(region.first, "decorator_list", ()))])
        # The text `loss, grads = ` alone: an assignment of 0 without its last character.
        targets = ast.unparse(ast.Assign(region.last.targets, ast.Constant(0), lineno=0))[:-1]
        # Indentation of a line that begins inside of a string literal would change the string.
        inner = {n for part in ast.walk(self.cells.trees[region.file]) for n in _inside_text(part)}
        assigned = SourceSpan(region.file, region.last.lineno, region.last.col_offset, value.lineno, value.col_offset)
        header = "".join([f"{indent}def {self.part}({parameters}):\n", *copies])
        return (
            *indented(region.file, (n for n in range(first, end[0] + 1) if n not in inner)),
            Edit(assigned, "return ", replaces=True),
            Edit(SourceSpan(region.file, first, 0, *end), header, f"\n\n{indent}{targets}{call}"),
        )


def _inside_text(node: ast.AST) -> range:
    """Return the lines that begin inside of a string literal."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))):
        return range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    return range(0)


def _regions(cells: Cells, names: set[str]) -> Iterator[_Region]:
    """Find the gradient regions of all functions in the user's statements."""
    for file, tree in cells.trees.items():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.lineno in cells.statement_lines[file]:
                region = _region(function, file, names, cells.imports)
                if region is not None:
                    yield region


def _region(function: ast.FunctionDef, file: str, names: set[str], imports: Mapping[str, str]) -> _Region | None:
    """Return the statements from the first with a part of the batch for the gradient call up to the call.

    None where the statements are not contiguous, where later statements read names bound by them, where the gradient
    does not depend on the batch, or where the call begins on another line than the assignment.
    """
    body, batch = function.body, [a.arg for a in function.args.args if a.arg in names]
    at = _gradient_call(body, imports)
    if at is None or not batch:
        return None
    s = body[at]
    assert isinstance(s, ast.Assign)
    statement_indices, needed = [at], _names_read(s)
    tainted = set(batch)
    depends = []
    for earlier in body[:at]:
        depends.append(bool(_names_read(earlier) & tainted))
        tainted |= _names_bound(earlier) if depends[-1] else set()
    for k in reversed(range(at)):
        # Statements that do not depend on the batch stay outside, and run once for all microbatches.
        if depends[k] and _names_bound(body[k]) & needed:
            statement_indices.append(k)
            needed |= _names_read(body[k])
    after = set().union(*map(_names_read, body[at + 1 :]))
    inside = set().union(*(_names_bound(body[k]) for k in statement_indices[1:]))
    contiguous = sorted(statement_indices) == list(range(min(statement_indices), at + 1))
    if not contiguous or inside & after or not needed & set(batch) or s.value.lineno != s.lineno:
        return None
    return _Region(file, body[min(statement_indices)], s, tuple(n for n in batch if n in needed), frozenset(needed))


def _gradient_call(body: Sequence[ast.stmt], imports: Mapping[str, str]) -> int | None:
    """Return the index of the assignment of gradients.

    It is `loss, grads = jax.value_and_grad(f)(params)`, also written as two statements.
    """
    makers: set[str] = set()
    for at, s in enumerate(body):
        if isinstance(s, ast.Assign) and isinstance(s.value, ast.Call):
            called = s.value.func
            if is_gradient(called, imports) or (isinstance(called, ast.Name) and called.id in makers):
                return at
            makers |= _names_bound(s) if is_gradient(s.value, imports) else set()
    return None


def _names_read(node: ast.AST) -> set[str]:
    """Return the names that `node` reads."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _names_bound(node: ast.AST) -> set[str]:
    """Return the names that `node` binds."""
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
