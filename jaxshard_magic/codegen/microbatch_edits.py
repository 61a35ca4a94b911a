"""Write `--microbatches`, `--reduce` and `--reduce-dtype` into the user's text.

The gradient call of the step becomes a function of one part of the batch. Parts of the batch show whether the call
returns means or sums over examples.

The sums of each device's gradients over devices are found in a trace in which the results of the gradient call are
named. The plan of the trace gives the spec of each sum, the sums delayed to the end of a loop, and the sums rounded
before the addition over devices.
"""

import ast
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.sharding import PartitionSpec

from ..compilation.planned_call import mesh_context
from ..compilation.tracing import capture_gradients
from ..config.options import GradientOptions
from ..errors import ShardError
from ..gradients.accumulate import AccumulatedGradient
from ..program.batching.batch_labels import Concatenated, Constant, PerExample, Summed
from ..program.batching.followed_program import follow_batch
from ..program.explicit_axes import ExplicitAxes
from ..program.flatten_call import shape_structs
from ..program.flow import Flow
from ..program.gradient_calls import gradient_equations
from ..program.ir import Equation, Program, Value
from ..program.per_device import PerDeviceTrace
from ..program.roles import BATCH, PARAMS
from ..program.trace import Traced, path_name
from ..strategies.layout import from_partition_spec, partition_spec, without_axes
from ..strategies.regions.deferred_reductions import DeferredReductions
from ..strategies.regions.reduction_dtypes import TypedReductions, reduction_dtype
from ..strategies.sharded_lowering import ShardedLowering
from .cells import Cells, SourceSpan, span_of
from .constraints import Constraint, spec_text
from .edits import Edit, OptionEdits, edited_trees, indented, is_gradient
from .generated_program import spec_table
from .latest_call import last_call, plan_with_code

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
_GIVEN = "jaxshard_sums"  # name of the function called with the gradient call's results
_MARK = "jaxshard:sum."


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
    options, names = _OPTIONS & {*step.request.gradients.given}, _batch_names(step)
    regions = list(_regions(cells, names))
    n, calls = _gradient_calls(step) if options and len(regions) == 1 else (1, ())
    mean = _is_mean(step, n, calls)
    if mean is None:
        return OptionEdits()
    (region,) = regions
    taken = _Taken(step, cells, region, "" if mean else ", mean=False")
    loops = frozenset(options & {"microbatches"})
    plain = OptionEdits(taken.edits(taken.in_microbatches()), loops) if loops else OptionEdits()
    if loops == options:
        return plain
    return _in_shards(taken, options, plain, _convolves(calls))


def _in_shards(taken: "_Taken", options: set[str], plain: OptionEdits, convolved: bool) -> OptionEdits:
    """Add the sums over devices to `plain`, the edits for microbatches alone.

    Return `plain` where the options change nothing or have no form in the text.
    """
    step, region = taken.step, taken.region
    sums = _find_sums(step, taken.cells, span_of(region.last.value, region.file))
    changes = {"reduce": sums.after_loop, "reduce_dtype": sums.rounded}
    without_effect = {option for option, sums in changes.items() if not sums} & options
    plain = replace(plain, options=plain.options | without_effect)
    # XLA does not divide the gradients of convolutions by device, so no device has a gradient of its own to add up.
    if options != plain.options and convolved:
        return replace(plain, notes=(_CONVOLVES,))
    ahead = {}
    if step.request.gradients.reduce == "once-gathered" and "reduce" not in plain.options:
        ahead = _gather_tables(step, region.read)
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
        nnx_names = [name for name in _nnx_arguments(self.step) if name in region.read]
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


def _is_mean(step: "ShardedStep", n: int, calls: Sequence[AccumulatedGradient]) -> bool | None:
    """Return whether all results of the gradient call are means over examples or have a row per example.

    Args:
        step: The step.
        n: Number of microbatches.
        calls: Gradient calls of the step over `n` microbatches.

    Returns:
        True for means, False for sums. None for neither, for several calls, and for a loss that depends on random
        draws.
    """
    if len(calls) != 1 or not _is_exact(calls[0]) or _draws(calls[0].small, bool(_nnx_arguments(step))):
        return None
    scales = {how.scale for how in calls[0].outputs.combinations.values() if isinstance(how, Summed)}
    # Means of microbatches are combined with a factor of 1/n, sums with 1.
    mean = {Fraction(1, n): True, Fraction(1): False}.get(scales.pop()) if len(scales) == 1 else None
    return mean if mean is not None and _reads_rows(step, n) else None


def _convolves(calls: Sequence[AccumulatedGradient]) -> bool:
    """Return whether losses have convolutions."""
    return any((c := e.contraction) is not None and c.windowed for call in calls for e in call.small.equations)


def _nnx_arguments(step: "ShardedStep") -> list[str]:
    """Return the step's arguments that are NNX objects."""
    _, call = last_call(step)
    return [] if call.nodes is None else [path_name(path[:1]) for path in call.nodes.root_paths]


def _batch_names(step: "ShardedStep") -> set[str]:
    """Return the step's arguments whose arrays are all examples."""
    roles: dict[str, set[str]] = defaultdict(set)
    for leaf in last_call(step)[0].plan.leaves:
        roles[leaf.path.partition(".")[0]].add(leaf.role)
    return {name for name, own in roles.items() if own == {BATCH}}


def _gradient_calls(step: "ShardedStep") -> tuple[int, Sequence[AccumulatedGradient]]:
    """Return the number of microbatches and the step's gradient calls over them.

    A step without microbatches is planned with the smallest possible number, a divisor of the examples per shard. The
    calls are empty where no number is possible, and where planning fails.
    """
    (entry, call), n = last_call(step), step.request.gradients.microbatches
    rewritten, plan = entry.rewritten, entry.plan
    if n == 1:
        each = (plan.examples or 0) // plan.batch_shards
        n = next((k for k in range(2, each + 1) if each % k == 0), 1)
        request = replace(step.request, gradients=GradientOptions(microbatches=n))
        try:
            rewritten = step.programs.planned_for(call, request).rewritten
        except ShardError:
            return n, ()
    return n, tuple(rewritten.calls.values()) if rewritten is not None else ()


def _is_exact(call: AccumulatedGradient) -> bool:
    """Return whether the results of a call follow from the microbatches exactly, with examples along the first
    dimension."""
    outputs, small = call.outputs, call.small
    joined = [how for how in outputs.combinations.values() if isinstance(how, Concatenated)]
    return (
        outputs.exact
        and not (outputs.averaged or outputs.carried or call.followed.full_batch_values)
        and {*outputs.combinations} <= {*small.outputs}
        and all(how.dim == 0 and how.scale == 1 for how in joined)
        and set(call.batch.values()) <= {0}
    )


def _draws(loss: Program, objects: bool) -> bool:
    """Return whether a loss depends on random draws. With NNX objects each draw counts, as it changes the object."""
    flow = Flow(loss)
    met = flow.ancestors(loss.outputs)
    return any(objects or any(v in met for v in e.results) for e in flow.random_equations)


def _reads_rows(step: "ShardedStep", n: int) -> bool:
    """Return whether the gradient call reads the same rows from an n-th of the batch as from the whole.

    False for a step with a normalization of the whole batch, or with noise drawn for the batch, before the gradient.
    """
    entry, call = last_call(step)
    if isinstance(entry.traced, PerDeviceTrace):
        return True
    batch, avals = _batch_names(step), shape_structs(call.leaves)
    names = [leaf.path.partition(".")[0] for leaf in entry.plan.leaves[len(entry.traced.consts) :]]
    cut = {i: 0 for i, (name, a) in enumerate(zip(names, avals, strict=True)) if name in batch and a.shape}
    part = [a.update(shape=(a.shape[0] // n, *a.shape[1:])) if i in cut else a for i, a in enumerate(avals)]
    try:
        with mesh_context(step.mesh):
            large, small = (
                capture_gradients(call, these, ExplicitAxes(call.explicit_mesh, step.mesh)) for these in (avals, part)
            )
        return _follows_rows(small, large, cut)
    except (ShardError, TypeError, ValueError):  # a step with sizes from elsewhere does not trace on a smaller batch
        return False


def _follows_rows(small: Traced, large: Traced, cut: Mapping[int, int]) -> bool:
    """Return whether all operands of the gradient calls have one row per example or are constant over examples."""
    program, first = Program(small.closed), len(small.consts)
    followed = follow_batch(program, Program(large.closed), {first + i: d for i, d in cut.items()})
    changed = {
        v for i in (*followed.draw_dims, *(i for i, _ in followed.operand_scales)) for v in program.equations[i].results
    }
    calls, flow = gradient_equations(program), Flow(program)
    read = [followed.value_labels[v] for e in calls for v in e.operands if v is not None]
    rows = all(isinstance(label, Constant) or label == PerExample(0) for label in read)
    return rows and not changed & flow.ancestors(v for e in calls for v in e.operands).keys()


@dataclass(frozen=True)
class GradientSums:
    """Sums over devices in the results of a gradient call, by path.

    Attributes:
        specs: Specs of the sums.
        after_loop: Sums added up after a loop by the plan.
        rounded: Sums added up over devices in `dtype` instead of their own dtype.
        dtype: Dtype of the rounded sums.
    """

    specs: Mapping[str, PartitionSpec] = field(default_factory=dict)
    after_loop: frozenset[str] = frozenset()
    rounded: frozenset[str] = frozenset()
    dtype: Any = None

    def argument_text(self) -> str:
        """Return the arguments of `in_shards` as text, each after a comma."""
        lie = spec_table(self.specs)
        said = [f"lie={_dict(lie)}"] if lie else []
        if self.rounded:
            said += [f"rounded={list(_patterns(self.rounded, self.specs))!r}", f"dtype={str(self.dtype)!r}"]
        return "".join(f", {s}" for s in said)


def _find_sums(step: "ShardedStep", cells: Cells, call: SourceSpan) -> GradientSums:
    """Return the plan's sums in the results of a gradient call.

    Args:
        step: A step with a recorded call.
        cells: The user's text.
        call: Span of the gradient call.
    """
    named = edited_trees(cells, [Edit(call, f"{_GIVEN}(", ")")])
    run = plan_with_code(step, named, {_GIVEN: _named}).plan.run
    return _sums(run, step.request.gradients.sum_dtype) if isinstance(run, ShardedLowering) else GradientSums()


def _named(results: Any) -> Any:
    """Name each traced array of floats in the results of the gradient call by its path."""

    def one(path: Any, x: Any) -> Any:
        floats = isinstance(x, Tracer) and jnp.issubdtype(x.dtype, jnp.floating)
        # Paths of NNX variables end in `.value`.
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        return checkpoint_name(x, _MARK + name) if floats else x

    return jax.tree_util.tree_map_with_path(one, results)


def _sums(run: ShardedLowering, dtype: Any) -> GradientSums:
    """Read the sums from the lowering of a trace with named results."""
    layout, program, flow = run.layout, run.program, run.layout.flow
    typed = {program.equations[i].results[0] for i in run.region(TypedReductions).members}
    late = {program.equations[i].results[k]: s for (i, k), s in run.region(DeferredReductions).loop_sums.items()}

    def within(v: Value, w: Value, _e: Equation | None) -> bool:
        return v not in late and not layout.is_activation(w)

    def rounds(v: Value) -> bool:
        own = program.avals[v].dtype
        return v in typed or (v in late and reduction_dtype(dtype, own, gradient=late[v].is_gradient) != own)

    places, waiting, rounded = {}, set(), set()
    for e, path in _names(program.equations):
        v = e.results[0]
        met = flow.ancestors([v], within)
        waiting |= {path} if late.keys() & met.keys() else set()
        rounded |= {path} if any(map(rounds, met)) else set()
        spec = layout.stored_spec(v)
        places[path] = partition_spec(spec if path in waiting else without_axes(spec, layout.batch_axes))
    return GradientSums(places, frozenset(waiting), frozenset(rounded), dtype)


def _names(equations: Iterable[Equation]) -> Iterable[tuple[Equation, str]]:
    """Yield the equations that name results, with the path of each."""
    names = ((e, e.params["name"]) for e in equations if e.primitive.names_value)
    return ((e, name.removeprefix(_MARK)) for e, name in names if name.startswith(_MARK))


def _patterns(chosen: Collection[str], paths: Collection[str]) -> Iterable[str]:
    """Return patterns of the chosen paths and no others, a single pattern for a whole subtree where possible."""
    below = {_root(p) for p in chosen}
    if all(p in chosen and "." in p for p in paths if _root(p) in below):
        return [f"{first}.*" for first in sorted(below)]
    return spec_table({p: PartitionSpec("chosen" if p in chosen else None) for p in paths})


def _gather_tables(step: "ShardedStep", names: Collection[str]) -> dict[str, str] | None:
    """Return the arguments with weights divided over the batch's mesh axes.

    Args:
        step: A step with a recorded call.
        names: Arguments read by the gradient region.

    Returns:
        Text of the table of specs without the batch's axes, by argument. None where an argument is not in `names`.
    """
    plan, tables = last_call(step)[0].plan, {}
    batch_axes = {*plan.batch_axes}
    weights = (leaf for leaf in plan.leaves if leaf.role == PARAMS)
    divided = [leaf for leaf in weights if batch_axes & {a for axes in from_partition_spec(leaf.spec) for a in axes}]
    for name in dict.fromkeys(_root(leaf.path) for leaf in divided):
        own = (leaf for leaf in plan.leaves if _root(leaf.path) == name)
        specs = {leaf.path.partition(".")[2]: without_axes(from_partition_spec(leaf.spec), batch_axes) for leaf in own}
        tables[name] = _dict(spec_table({path: partition_spec(spec) for path, spec in specs.items()}))
    return tables if tables.keys() <= {*names} else None


def _root(path: str) -> str:
    """Return the first name of a path."""
    return path.partition(".")[0]


def _dict(specs: Mapping[str, str]) -> str:
    """Return a table of specs as the text of a dictionary."""
    return f"{{{', '.join(f'{path!r}: {spec}' for path, spec in specs.items())}}}"


def drop_axes(pins: Iterable[Constraint], axes: Collection[str]) -> list[Constraint]:
    """Return constraints without some mesh axes, for arrays of a single device along the axes."""

    def one(text: str) -> str:
        # Without `P(` and `)` the text is a list of literals.
        entries = ast.literal_eval(f"[{text[2:-1]}]")
        return spec_text(without_axes(from_partition_spec(entries), axes))

    return [replace(pin, specs=tuple(map(one, pin.specs))) for pin in pins]
