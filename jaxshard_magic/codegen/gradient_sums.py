"""Write `--reduce` and `--reduce-dtype` into the user's text: sums of each device's gradients over devices.

The results of the gradient call are named in a trace. The plan of the trace gives the spec of each sum, the sums
delayed to the end of a loop, and the sums rounded before the addition over devices.
"""

import ast
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.sharding import PartitionSpec

from ..program.ir import Equation, Value
from ..program.roles import PARAMS
from ..strategies.layout import from_partition_spec, partition_spec, without_axes
from ..strategies.regions.deferred_reductions import DeferredReductions
from ..strategies.regions.reduction_dtypes import TypedReductions, reduction_dtype
from ..strategies.sharded_lowering import ShardedLowering
from .cells import Cells, SourceSpan
from .constraints import Constraint, spec_text
from .edits import Edit, edited_trees
from .latest_call import last_call, plan_with_code
from .spec_tables import spec_table

if TYPE_CHECKING:
    from ..step import ShardedStep

_GIVEN = "jaxshard_sums"  # name of the function called with the gradient call's results
_MARK = "jaxshard:sum."


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


def find_sums(step: "ShardedStep", cells: Cells, call: SourceSpan) -> GradientSums:
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


def gather_tables(step: "ShardedStep", names: Collection[str]) -> dict[str, str] | None:
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
