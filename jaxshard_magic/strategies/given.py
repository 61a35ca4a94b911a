"""What the user says about placement: specs of arguments, rules by path, the model's own Flax metadata."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from ..errors import ShardError, did_you_mean, one_of
from ..mesh import job_of
from ..program.trace import Traced, path_name
from ..specs import check_rules, format_spec, match_rules, validate_spec
from .layout import Axes, Layout, Spec


@dataclass(frozen=True)
class Given:
    """The mesh axes of every dimension of one input, and who said so."""

    spec: Spec
    source: str


def given_specs(
    traced: Traced,
    mesh: Mesh,
    specs: Mapping[str, PartitionSpec],
    rules: Sequence[tuple[str, PartitionSpec]],
    metadata: Sequence[Any] | None,
) -> dict[int, Given]:
    """`{input: Given}`; a spec of an argument beats a rule, a rule beats metadata.

    Raises `ShardError` for a name or rule that matches nothing, and for a spec that does not fit its array.
    """
    names = [path_name(p) for p in traced.in_paths]
    found: dict[int, Given] = {}
    for i, noted in enumerate(metadata or ()):
        if noted is not None:
            spec = _known_axes(noted, mesh)
            found[i] = Given(_of(traced, i, spec, mesh, names[i]), "the model's own metadata")
    for i, name in enumerate(names):
        rule = match_rules(rules, name)
        if rule is not None:
            pattern, spec = rule
            found[i] = Given(_of(traced, i, spec, mesh, names[i]), f"rule {pattern}={format_spec(spec)}")
    check_rules(rules, names)
    for name, spec in specs.items():
        for i in _under(name, names, traced, spec):
            found[i] = Given(_of(traced, i, spec, mesh, names[i]), f"given {name}={format_spec(spec)}")
    return found


def given_batch(
    given: Mapping[int, Given], data: frozenset[int], batch_axes: Axes
) -> dict[int, tuple[int, ...]]:
    """The batch dimensions that the user named: those of data given to a batch axis."""
    named = {}
    for i in data & given.keys():
        dims = tuple(d for d, axes in enumerate(given[i].spec) if set(axes) & set(batch_axes))
        if dims:
            named[i] = dims
    return named


def apply_given(layout: Layout, given: Mapping[int, Given]) -> None:
    """Fix the storage of what was given, and divide what it names over tensor axes inside the step as well."""
    for i, g in given.items():
        value = layout.program.inputs[i]
        if i not in layout.roles.stored:
            continue
        for d, (c, axes) in enumerate(zip(layout.storage.of(value), g.spec, strict=True)):
            layout.stored[c] = axes
            layout.fixed[c] = g.source
            tensor = tuple(a for a in axes if a in layout.mesh.axis_names and job_of(a) == "tensor")
            if tensor and d < len(g.spec):
                layout.tensor[layout.dims.of(value)[d]] = tensor
        layout.why[i].append(g.source)


def _of(traced: Traced, i: int, spec: PartitionSpec, mesh: Mesh, name: str) -> Spec:
    shape = traced.closed.in_avals[i].shape
    validate_spec(spec, shape, mesh, name)
    entries = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec]
    return entries + [()] * (len(shape) - len(entries))


def _known_axes(noted: Any, mesh: Mesh) -> PartitionSpec:
    """Metadata may use logical names; those that are no axis of this mesh say nothing here."""

    def known(entry):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        here = tuple(a for a in axes if a in mesh.axis_names)
        return here[0] if len(here) == 1 else here or None

    return PartitionSpec(*(known(entry) for entry in noted))


def _under(name: str, names: Sequence[str], traced: Traced, spec: PartitionSpec) -> list[int]:
    found = [i for i, n in enumerate(names) if n == name or n.startswith(name + ".")]
    if not found:
        arguments = list(dict.fromkeys(n.split(".")[0] for n in names))
        raise ShardError(
            f"--spec names '{name}'; the step's arguments are {one_of(arguments)}.{did_you_mean(name, arguments)}"
        )
    whole = found == [names.index(name)] if name in names else False
    fitting = [i for i in found if len(traced.closed.in_avals[i].shape) >= len(spec)]
    return found if whole or not fitting else fitting
