"""`--reduce` and `--reduce-dtype` in the user's text: what each device has of its own examples, added up over devices.

Where sums lie, which of them wait for the end of a loop and which are rounded before devices add them up, is read off
the plan of the step with what its gradient call gives named.
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
from ..strategies.hold import Hold
from ..strategies.layout import partition_spec, spec_of, without
from ..strategies.regions.sum_types import TypedSums, sum_type
from ..strategies.regions.unreduced import Unreduced
from .cells import Cells, Place
from .edits import Edit, edited_trees
from .last import last_call, planned_with
from .pins import Pin, spec_text
from .tables import table

if TYPE_CHECKING:
    from ..step import ShardedStep

_GIVEN = "jaxshard_sums"  # what the gradient call's results are given to
_MARK = "jaxshard:sum."


@dataclass(frozen=True)
class Sums:
    """What a gradient call gives, by its paths. `places`: where sums lie once devices have added them up; `late`: those
    that the plan adds up after a loop; `rounded`: those that are added up in `dtype`, and not in their own."""

    places: Mapping[str, PartitionSpec] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    rounded: frozenset[str] = frozenset()
    dtype: Any = None

    def text(self) -> str:
        """The arguments that say so, each after a comma."""
        lie = table(self.places)
        said = [f"lie={_dict(lie)}"] if lie else []
        if self.rounded:
            said += [f"rounded={list(_patterns(self.rounded, self.places))!r}", f"dtype={str(self.dtype)!r}"]
        return "".join(f", {s}" for s in said)


def sums_of(step: "ShardedStep", cells: Cells, call: Place) -> Sums:
    """How the plan adds up what the gradient call at a place gives."""
    named = edited_trees(cells, [Edit(call, f"{_GIVEN}(", ")")])
    run = planned_with(step, named, {_GIVEN: _named}).plan.run
    return _sums(run, step.request.gradients.sum_dtype) if isinstance(run, Hold) else Sums()


def _named(results: Any) -> Any:
    """What a gradient call gives, each float by its path."""

    def one(path: Any, x: Any) -> Any:
        floats = isinstance(x, Tracer) and jnp.issubdtype(x.dtype, jnp.floating)
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        return checkpoint_name(x, _MARK + name) if floats else x

    return jax.tree_util.tree_map_with_path(one, results)


def _sums(run: Hold, dtype: Any) -> Sums:
    layout, program, flow = run.layout, run.program, run.layout.flow
    typed = {program.equations[i].outs[0] for i in run.region(TypedSums).members}
    late = {program.equations[i].outs[k]: s for (i, k), s in run.region(Unreduced).loop_sums.items()}

    def within(v: Value, w: Value, _e: Equation | None) -> bool:
        return v not in late and not layout.batchy(w)

    def rounds(v: Value) -> bool:
        own = program.avals[v].dtype
        return v in typed or (v in late and sum_type(dtype, own, gradient=late[v].gradient) != own)

    places, waiting, rounded = {}, set(), set()
    for e, path in _names(program.equations):
        v = e.outs[0]
        met = flow.back([v], within)
        waiting |= {path} if late.keys() & met.keys() else set()
        rounded |= {path} if any(map(rounds, met)) else set()
        spec = layout.at_rest(v)
        places[path] = partition_spec(spec if path in waiting else without(spec, layout.batch_axes))
    return Sums(places, frozenset(waiting), frozenset(rounded), dtype)


def _names(equations: Iterable[Equation]) -> Iterable[tuple[Equation, str]]:
    names = ((e, e.params["name"]) for e in equations if e.primitive.names_value)
    return ((e, name.removeprefix(_MARK)) for e, name in names if name.startswith(_MARK))


def _patterns(chosen: Collection[str], paths: Collection[str]) -> Iterable[str]:
    """Patterns for some of all paths: one for all below the same first name, where they are."""
    below = {_root(p) for p in chosen}
    if all(p in chosen and "." in p for p in paths if _root(p) in below):
        return [f"{first}.*" for first in sorted(below)]
    return table({p: PartitionSpec("chosen" if p in chosen else None) for p in paths})


def gathered_before(step: "ShardedStep", names: Collection[str]) -> dict[str, str] | None:
    """The arguments that have weights divided over the examples' mesh axes, with a table of where their arrays lie
    without these; None where one is not among `names`."""
    plan, tables = last_call(step)[0].plan, {}
    batch_axes = {*plan.batch_axes}
    weights = (leaf for leaf in plan.leaves if leaf.role == PARAMS)
    divided = [leaf for leaf in weights if batch_axes & {a for axes in spec_of(leaf.spec) for a in axes}]
    for name in dict.fromkeys(_root(leaf.path) for leaf in divided):
        own = (leaf for leaf in plan.leaves if _root(leaf.path) == name)
        specs = {leaf.path.partition(".")[2]: without(spec_of(leaf.spec), batch_axes) for leaf in own}
        tables[name] = _dict(table({path: partition_spec(spec) for path, spec in specs.items()}))
    return tables if tables.keys() <= {*names} else None


def _root(path: str) -> str:
    return path.partition(".")[0]


def _dict(specs: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{path!r}: {spec}' for path, spec in specs.items())}}}"


def undivided(pins: Iterable[Pin], axes: Collection[str]) -> list[Pin]:
    """The pins of arrays that are one device's along some mesh axes, which divide nothing of them."""

    def one(text: str) -> str:
        entries = ast.literal_eval(f"[{text[2:-1]}]")
        return spec_text(without(spec_of(entries), axes))

    return [replace(pin, specs=tuple(map(one, pin.specs))) for pin in pins]
