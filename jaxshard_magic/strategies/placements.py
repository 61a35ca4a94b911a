"""What the user says about placement: specs of arguments, rules by path, the model's own Flax metadata."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from ..config.request import Request
from ..config.strategies import job_of
from ..errors import ShardError, none_of, one_of
from ..program.roles import OPTIMIZER
from ..program.trace import Traced, is_closed_over, path_name
from ..specs import Placement, check_rules, format_spec, match_rules, validate_spec
from .layout import Axes, Layout, Spec, partition_spec, spec_of


def placements(
    traced: Traced, request: Request, metadata: Sequence[Any] = (), padded: Container[str] = ()
) -> dict[int, Placement]:
    """Where the user wants inputs; a spec of an argument beats a rule, a rule beats metadata.

    Args:
        traced: the step.
        request: has the specs and the rules.
        metadata: the Flax partitioning, or None, of each of the last inputs, which only `spmd` follows.
        padded: the mesh axes over which a dimension may be uneven, since rows will be added to it.

    Raises `ShardError` for a name or rule that matches nothing, and for a spec that does not fit its array.
    """
    mesh, rules = request.mesh, request.rules
    names = [path_name(p) for p in traced.in_paths]
    placed: dict[int, Placement] = {}
    for i, noted in enumerate(metadata, len(names) - len(metadata)):
        if noted is not None and request.compiler_decides:
            spec = _known_axes(noted, mesh)
            placed[i] = Placement(_of(traced, i, spec, mesh, names[i], padded), "the model's own metadata")
    for i, name in enumerate(names):
        rule = match_rules(rules, name)
        if rule is not None:
            pattern, spec = rule
            placed[i] = Placement(
                _of(traced, i, spec, mesh, names[i], padded), f"rule {pattern}={format_spec(spec)}"
            )
    check_rules(rules, names)
    for name, spec in request.specs.items():
        for i in _fitting(name, names, traced, spec):
            placed[i] = Placement(
                _of(traced, i, spec, mesh, names[i], padded), f"given {name}={format_spec(spec)}"
            )
    return placed


def dims_over(
    axes: Axes, placed: Mapping[int, Placement], data: frozenset[int]
) -> dict[int, tuple[int, ...]]:
    """Of each input in `data` the dimensions that the user wants over any of these mesh axes."""
    dims = {
        i: tuple(d for d, over in enumerate(placed[i].spec) if set(over) & set(axes))
        for i in data & placed.keys()
    }
    return {i: named for i, named in dims.items() if named}


def apply_placements(layout: Layout, placed: Mapping[int, Placement]) -> None:
    """Fix the storage of what the user placed, and divide what lies over tensor axes inside the step as well.

    Moments and gradients follow their parameter; a moment that is placed is placed alone.
    """
    for i, g in placed.items():
        value = layout.program.inputs[i]
        if i not in layout.roles.stored:
            continue
        if layout.roles.of[i] == OPTIMIZER:
            layout.alone[value] = g
            layout.why[i].append(g.source)
            continue
        for d, (c, axes) in enumerate(zip(layout.storage.of(value), g.spec, strict=True)):
            layout.stored[c] = axes
            layout.fixed[c] = g.source
            tensor = tuple(a for a in axes if a in layout.mesh.axis_names and job_of(a) == "tensor")
            if tensor and d < len(g.spec):
                layout.tensor[layout.dims.of(value)[d]] = tensor
        layout.why[i].append(g.source)


def _of(traced: Traced, i: int, spec: PartitionSpec, mesh: Mesh, name: str, padded: Container[str]) -> Spec:
    shape = traced.closed.in_avals[i].shape
    validate_spec(spec, shape, mesh, name, padded)
    return spec_of(spec) + [()] * (len(shape) - len(spec))


def _known_axes(noted: Any, mesh: Mesh) -> PartitionSpec:
    """Metadata may use logical names; those that are no axis of this mesh say nothing here."""
    return partition_spec([tuple(a for a in axes if a in mesh.axis_names) for axes in spec_of(noted)])


def under(name: str, names: Sequence[str]) -> list[int]:
    """The inputs, by their `names`, that a spec of `name` is for: that one, and all below.

    Raises ShardError where there is none.
    """
    found = [i for i, n in enumerate(names) if n == name or n.startswith(f"{name}.")]
    if not found:
        arguments = list(dict.fromkeys(n.split(".")[0] for n in names if not is_closed_over(n)))
        they_are = f"the step's arguments are {one_of(arguments)}"
        raise ShardError(none_of(f"--spec names '{name}'", name, arguments, they_are))
    return found


def _fitting(name: str, names: Sequence[str], traced: Traced, spec: PartitionSpec) -> list[int]:
    """Those of `under` that have all dimensions of `spec`; all, where none has or the name is one input's."""
    found = under(name, names)
    whole = found == [names.index(name)] if name in names else False
    fitting = [i for i in found if len(traced.closed.in_avals[i].shape) >= len(spec)]
    return found if whole or not fitting else fitting
