"""Placement by the user: specs of arguments, rules by path, and the model's own Flax metadata."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..config.request import Request
from ..config.strategies import job_of
from ..errors import ShardError, list_names, unknown_name
from ..program.roles import OPTIMIZER
from ..program.trace import Traced, is_closed_over, path_name
from ..specs import RequestedSpec, check_rules, format_spec, match_rules, validate_spec
from .layout import Axes, Layout, Spec, from_partition_spec, partition_spec


def find_placements(
    traced: Traced, request: Request, own_placements: Sequence[Any] = (), uneven_axes: Container[str] = ()
) -> dict[int, RequestedSpec]:
    """Return the user's placement of each input; a spec of an argument beats a rule, a rule beats
    the layout that an array has and the model's metadata.

    Args:
        traced: The step.
        request: Source of the specs and rules.
        own_placements: Flax partitioning, or the array's own sharding, or None, of each of the last inputs; used by
            `spmd` only.
        uneven_axes: Mesh axes over which a dimension may be uneven, since rows are padded later.

    Returns:
        Placements by input index; inputs without one are absent.

    Raises:
        ShardError: A name or rule matches nothing, or a spec does not fit its array.
    """
    mesh, rules = request.mesh, request.rules
    names = [path_name(p) for p in traced.in_paths]
    placed: dict[int, RequestedSpec] = {}
    # In order of precedence, the weakest first: a later entry replaces an earlier one.
    for i, noted in enumerate(own_placements if request.compiler_decides else (), len(names) - len(own_placements)):
        if isinstance(noted, NamedSharding):
            spec, source = _own_spec(noted, mesh), "as the array lies"
        else:
            spec, source = None if noted is None else _mesh_spec(noted, mesh), "the model's own metadata"
        if spec is not None:
            placed[i] = RequestedSpec(_validated_spec(traced, i, spec, mesh, names[i], uneven_axes), source)
    for i, name in enumerate(names):
        rule = match_rules(rules, name)
        if rule is not None:
            pattern, spec = rule
            placed[i] = RequestedSpec(
                _validated_spec(traced, i, spec, mesh, names[i], uneven_axes), f"rule {pattern}={format_spec(spec)}"
            )
    check_rules(rules, names)
    for name, spec in request.specs.items():
        for i in _inputs_for_spec(name, names, traced, spec):
            placed[i] = RequestedSpec(
                _validated_spec(traced, i, spec, mesh, names[i], uneven_axes), f"given {name}={format_spec(spec)}"
            )
    return placed


def placed_dims(axes: Axes, placed: Mapping[int, RequestedSpec], data: frozenset[int]) -> dict[int, tuple[int, ...]]:
    """Return the dimensions of each input in `data` that the user placed on any of `axes`; other inputs are absent."""
    dims = {i: tuple(d for d, over in enumerate(placed[i].spec) if set(over) & set(axes)) for i in data & placed.keys()}
    return {i: named for i, named in dims.items() if named}


def apply_placements(layout: Layout, placed: Mapping[int, RequestedSpec]) -> None:
    """Fix the stored specs of the inputs placed by the user.

    Dimensions placed on tensor axes stay sharded in compute as well. Optimizer moments and gradients follow their
    parameter; a placed moment affects nothing else.
    """
    for i, placement in placed.items():
        value = layout.program.inputs[i]
        if i not in layout.roles.storage_order:
            continue
        if layout.roles.by_input[i] == OPTIMIZER:
            # Moments share the storage classes of their parameter, which a placed moment must not move.
            layout.state_placements[value] = placement
            layout.reasons[i].append(placement.source)
            continue
        for d, (c, axes) in enumerate(zip(layout.storage.classes_of(value), placement.spec, strict=True)):
            layout.storage_class_axes[c] = axes
            layout.placement_sources[c] = placement.source
            tensor = tuple(a for a in axes if a in layout.mesh.axis_names and job_of(a) == "tensor")
            if tensor and d < len(placement.spec):
                layout.tensor_class_axes[layout.dims.classes_of(value)[d]] = tensor
        layout.reasons[i].append(placement.source)


def _validated_spec(
    traced: Traced, i: int, spec: PartitionSpec, mesh: Mesh, name: str, uneven_axes: Container[str]
) -> Spec:
    """Validate a spec for input `i` and return it with an entry for each dimension."""
    shape = traced.closed.in_avals[i].shape
    validate_spec(spec, shape, mesh, name, uneven_axes)
    return from_partition_spec(spec) + [()] * (len(shape) - len(spec))


def _mesh_spec(metadata_spec: Any, mesh: Mesh) -> PartitionSpec:
    """Return a metadata spec without logical names, which are no axes of this mesh."""
    return partition_spec(
        [tuple(a for a in axes if a in mesh.axis_names) for axes in from_partition_spec(metadata_spec)]
    )


def _own_spec(sharding: NamedSharding, mesh: Mesh) -> PartitionSpec | None:
    """Return the spec of an array that lies over a mesh of the same axes and sizes; None for all others."""
    fits = dict(sharding.mesh.shape) == dict(mesh.shape) and any(entry is not None for entry in sharding.spec)
    return PartitionSpec(*sharding.spec) if fits else None


def inputs_under(name: str, names: Sequence[str]) -> list[int]:
    """Return the inputs named `name` or below `name`.

    Raises:
        ShardError: There is none.
    """
    found = [i for i, n in enumerate(names) if n == name or n.startswith(f"{name}.")]
    if not found:
        arguments = list(dict.fromkeys(n.split(".")[0] for n in names if not is_closed_over(n)))
        they_are = f"the step's arguments are {list_names(arguments)}"
        raise ShardError(unknown_name(f"--spec names '{name}'", name, arguments, they_are))
    return found


def _inputs_for_spec(name: str, names: Sequence[str], traced: Traced, spec: PartitionSpec) -> list[int]:
    """Return the inputs of `inputs_under` with at least as many dimensions as `spec`.

    All are returned where none has that many, or where the name is that of one input.
    """
    found = inputs_under(name, names)
    whole = found == [names.index(name)] if name in names else False
    fitting = [i for i in found if len(traced.closed.in_avals[i].shape) >= len(spec)]
    # Inputs with too few dimensions are left to `validate_spec`, which raises, where the name can mean no others.
    return found if whole or not fitting else fitting
