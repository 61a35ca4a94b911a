"""`Layout`: mesh axes for each dimension class of a step, filled in by the strategies and read as specs.

A dimension class is a set of dimensions that must be the same logical dimension (`program/dimensions`). Storage classes
are the same for arrays between uses: a parameter, its moments and its gradient share theirs.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ..plan import Finding
from ..program.batching.batch import Batch
from ..program.dimensions import Dimensions, StorageClasses
from ..program.experts import ExpertLoop
from ..program.flow import Flow
from ..program.ir import Equation, Program, Value
from ..program.roles import InputRoles
from ..program.sizes import nbytes
from ..specs import RequestedSpec, format_spec
from .expert_resident_rows import with_expert_biases
from .shard_local_sorts import ShardLocalSorts, find_shard_local_sorts

Axes = tuple[str, ...]
Spec = list[Axes]  # mesh axes by dimension


@dataclass(frozen=True)
class ShardedExperts:
    """Experts sharded over mesh axes.

    Attributes:
        axes: Mesh axes that shard the experts.
        classes: Dimension classes that count experts.
        counts: Numbers of experts.
        capacity_classes: Classes of the expert capacity for the tokens of one group.
        shared_capacity_classes: Classes of the expert capacity for the tokens of all examples.
        weight_classes: Storage classes of parameters sharded by expert.
        equations: Equations that work expert by expert, by index.
        activations: Activations made by `equations`.
        loops: Scans that step over experts, by equation index; each device runs the trips of its own experts.
        loop_equations: Equations inside `loops`, by index.
    """

    axes: Axes
    classes: frozenset[int]
    counts: frozenset[int]
    capacity_classes: frozenset[int] = frozenset()
    shared_capacity_classes: frozenset[int] = frozenset()
    weight_classes: frozenset[int] = frozenset()
    equations: frozenset[int] = frozenset()
    activations: frozenset[Value] = frozenset()
    loops: Mapping[int, ExpertLoop] = field(default_factory=dict)
    loop_equations: frozenset[int] = frozenset()


@dataclass(frozen=True)
class SpecOverrides:
    """Activations with another spec than their dimension classes give, and the equations at which the spec changes.

    Attributes:
        values: Spec of each such value.
        operands: Spec under which an equation, by index, reads a value stored under another.
        results: Spec under which a value is made, before it is resharded to its own.
    """

    values: Mapping[Value, Spec] = field(default_factory=dict)
    operands: Mapping[tuple[int, Value], Spec] = field(default_factory=dict)
    results: Mapping[Value, Spec] = field(default_factory=dict)


@dataclass(eq=False)
class Layout:
    """Dimension classes of a step and the mesh axes that shard them.

    Attributes:
        program: The traced step.
        dims: Dimension classes of all values.
        storage: Storage classes of parameters, optimizer state and gradients.
        flow: Data flow between values.
        roles: Role of each input: parameters, optimizer state, batch, keys.
        batch: Batch dimensions.
        mesh: The mesh; may be abstract.
        platform: Platform of the mesh's devices, as jax names it.
        batch_axes: Mesh axes that shard the examples.
        tensor_class_axes: Mesh axes of dimension classes that stay sharded in use.
        storage_class_axes: Mesh axes of storage classes.
        position_classes: Dimension classes of positions.
        position_axes: Mesh axes that shard the positions.
        whole_position_dims: Dimension numbers of the program that stay whole because another dimension of the same
            value is sharded.
        experts: The sharded experts, None without.
        spec_overrides: Exceptions from the specs of dimension classes: attention with sharded heads, operands read
            whole.
        external_reads: Values that other programs read from the middle of this one, as they are: values that a pipeline
            stage sends on, or that its backward pass reads.
        input_names: Path of each input.
        user_position_dims: Position dimensions named by the user, by input.
        placement_sources: Source of the user's placement of a storage class.
        state_placements: Optimizer state placed by the user, without effect on the parameter.
        reasons: Reasons for the spec, by input.
        unsharded_axes: Axes over which a strategy could not shard an input.
        findings: Findings for the report.
    """

    program: Program
    dims: Dimensions
    storage: StorageClasses
    flow: Flow
    roles: InputRoles
    batch: Batch
    mesh: Mesh | AbstractMesh
    platform: str
    batch_axes: Axes
    tensor_class_axes: dict[int, Axes] = field(default_factory=dict)
    storage_class_axes: dict[int, Axes] = field(default_factory=dict)
    position_classes: frozenset[int] = frozenset()
    position_axes: Axes = ()
    whole_position_dims: frozenset[int] = frozenset()
    experts: ShardedExperts | None = None
    spec_overrides: SpecOverrides = field(default_factory=SpecOverrides)
    external_reads: frozenset[Value] = frozenset()
    input_names: Sequence[str] = ()
    user_position_dims: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    placement_sources: dict[int, str] = field(default_factory=dict)
    state_placements: dict[Value, RequestedSpec] = field(default_factory=dict)
    reasons: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    unsharded_axes: dict[int, Axes] = field(default_factory=lambda: defaultdict(tuple))
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_cpu(self) -> bool:
        """True for CPU devices; their compiler lacks abilities of the others."""
        return self.platform == "cpu"

    @cached_property
    def state(self) -> frozenset[Value]:
        """Inputs carried from step to step: parameters and the optimizer state."""
        return frozenset(self.program.inputs[i] for i in self.roles.storage_order)

    @cached_property
    def shard_local_sorts(self) -> ShardLocalSorts:
        """Rows that each shard of the batch sorts by itself."""
        return with_expert_biases(self, find_shard_local_sorts(self))

    def device_count(self, axes: Axes) -> int:
        """Return the number of devices along `axes` together."""
        return math.prod(self.mesh.shape[a] for a in axes)

    def stored_spec(self, value: Value) -> Spec:
        """Return the spec under which a parameter, its moments and its gradient are stored between uses."""
        if value in self.state_placements:
            return [*self.state_placements[value].spec]
        return self._without_repeated_axes([self.storage_class_axes.get(c, ()) for c in self.storage.classes_of(value)])

    def compute_spec(self, value: Value) -> Spec:
        """Return the spec of a weight where an activation meets it: only tensor parallel dimensions and experts are
        sharded.

        Where two dimensions of a weight could be (a square weight), the dimension sharded in storage is.
        """
        spec = self.tensor_axes(value)
        if len(sharded_dims := [d for d, axes in enumerate(spec) if axes]) > 1:
            # In a square weight both dimensions are candidates: the one sharded in storage needs no reshard.
            rest = self.stored_spec(value)
            retained = next((d for d in sharded_dims if not {*spec[d]}.isdisjoint(rest[d])), sharded_dims[0])
            spec = [axes if d == retained else () for d, axes in enumerate(spec)]
        if self.experts is not None:
            for d, c in enumerate(self.storage.classes_of(value)):
                if c in self.experts.weight_classes:
                    spec[d] = self.experts.axes
        return self._without_repeated_axes(spec)

    def activation_spec(self, value: Value) -> Spec:
        """Return the spec of an activation where it is made.

        Examples are sharded over the batch axes, tensor parallel dimensions over theirs, positions over the sequence
        axes left by these. Activations of experts are sharded by expert, and values in `spec_overrides` as given there.
        """
        if value in self.spec_overrides.values:
            return [*self.spec_overrides.values[value]]
        return self.operand_spec(value, self.experts is not None and value in self.experts.activations)

    def spec_between_uses(self, value: Value) -> Spec:
        """Return the spec of a value between equations: an activation as it is made, any other value as stored."""
        return self.activation_spec(value) if self.is_activation(value) else self.stored_spec(value)

    def result_specs(self, e: Equation, value: Value) -> list[Spec]:
        """Return the specs of a result in order: as `e` computes it, then between equations."""
        kept_spec, computed_spec = self.spec_between_uses(value), self.compute_spec_in(e, value)
        return [kept_spec] if computed_spec == kept_spec else [computed_spec, kept_spec]

    def operand_spec(self, value: Value, by_expert: bool) -> Spec:
        """Return the spec of an activation.

        Args:
            value: The activation.
            by_expert: Shard experts, and shard examples (or the experts' capacity for the tokens of all examples) over
                the remaining batch axes. Otherwise shard examples over all batch axes.
        """
        spec, shape = [], self.program.shapes[value]
        example_axes, example_classes, expert_axes = self.batch_axes, self.batch.classes, dict[int, Axes]()
        if self.experts is not None:
            expert_axes = dict.fromkeys(self.experts.classes, self.experts.axes if by_expert else ())
            if by_expert:
                example_axes = tuple(a for a in example_axes if a not in self.experts.axes)
                # Any token may take any slot of a capacity shared by all examples: slots are sharded instead.
                example_classes = self.experts.shared_capacity_classes or example_classes
        tensor = self.tensor_axes(value)
        divided = {a for axes in tensor for a in axes}
        remaining_position_axes = tuple(a for a in self.position_axes if a not in divided)
        for d, (c, n) in enumerate(zip(self.dims.classes_of(value), self.program.dim_numbers(value), strict=True)):
            if c in expert_axes:
                spec.append(self._divisible_prefix(expert_axes[c], shape[d]))
            elif c in self.position_classes:
                spec.append(
                    () if n in self.whole_position_dims else self._divisible_prefix(remaining_position_axes, shape[d])
                )
            else:
                spec.append(self._divisible_prefix(example_axes, shape[d]) if c in example_classes else tensor[d])
        return self._without_repeated_axes(spec)

    def gather_axes(self, weight: Value) -> Axes:
        """Return the mesh axes over which a stored weight is gathered for use."""
        axes_in_use = {a for axes in self.tensor_class_axes.values() for a in axes}
        axes_in_use |= set() if self.experts is None else {*self.experts.axes}
        return tuple(a for axes in self.stored_spec(weight) for a in axes if a not in axes_in_use)

    def tensor_axes(self, value: Value) -> Spec:
        """Return the tensor parallel axes of each dimension, where the size divides."""
        shape = self.program.shapes[value]
        found = [self.tensor_class_axes.get(c, ()) for c in self.dims.classes_of(value)]
        return [a if a and shape[d] % self.device_count(a) == 0 else () for d, a in enumerate(found)]

    def gradient_sum_axes(self, value: Value) -> Axes:
        """Return the batch axes along which devices sum their parts of a weight's gradient.

        Axes that shard the weight in use, as expert axes do, are not among them.
        """
        axes_in_use = {a for axes in self.compute_spec(value) for a in axes}
        return tuple(a for a in self.batch_axes if a not in axes_in_use)

    def spec_in_use(self, value: Value | None) -> Spec:
        """Return the spec of a value in use: an activation, or a weight where an activation meets it."""
        if value is None:
            return []
        return self.activation_spec(value) if self.is_activation(value) else self.compute_spec(value)

    def compute_spec_in(self, e: Equation, value: Value | None) -> Spec:
        """Return the spec under which `e` reads or writes `value`, with expert and attention-head overrides applied.

        Args:
            e: An equation that works on activations.
            value: An operand or result of `e`.
        """
        if value is None:
            return []
        override = self.spec_overrides.operands.get((e.index, value))
        if override is None and value in e.results:
            override = self.spec_overrides.results.get(value)
        if override is not None:
            return [*override]
        if self.experts is None:
            return self.spec_in_use(value)
        by_expert = e.index in self.experts.equations
        if self.is_activation(value):
            return self.operand_spec(value, by_expert)
        # Outside of the expert region an equation reads the weights of all experts.
        return self.compute_spec(value) if by_expert else without_axes(self.compute_spec(value), self.experts.axes)

    def spec_in(self, e: Equation, value: Value) -> Spec:
        """Return the spec of an operand or result of any equation `e`.

        As `compute_spec_in`, but weights in equations without activations have their stored spec, unless overridden.
        """
        is_overridden_result = value in e.results and value in self.spec_overrides.results
        if (
            is_overridden_result
            or (e.index, value) in self.spec_overrides.operands
            or self.is_activation(value)
            or self.storage.touches_batch(e)
        ):
            return self.compute_spec_in(e, value)
        return self.stored_spec(value)

    def sharded_dim_predicate(self, e: Equation) -> Callable[[int], bool]:
        """Return a predicate: whether dimension d is sharded in some operand or result of `e`."""
        specs = [self.spec_in(e, v) for v in (*e.operands, *e.results) if v is not None]
        return lambda d: any(spec[d:] and spec[d] for spec in specs)

    def shard_bytes(self, value: Value, spec: Spec) -> int:
        """Return the bytes of one device's shard of a value."""
        return nbytes(self.program.avals[value]) // math.prod(map(self.device_count, spec))

    def transfer_bytes(self, value: Value, spec: Spec) -> int:
        """Return the bytes of one device's shard as sent to other devices."""
        # XLA for the CPU sends bfloat16 as float32, in twice the bytes.
        widened = self.is_cpu and self.program.avals[value].dtype == jnp.bfloat16
        return self.shard_bytes(value, spec) * (2 if widened else 1)

    def constrain(self, x: Any, spec: Spec) -> Any:
        """Return `x` with a sharding constraint."""
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, partition_spec(spec)))

    def placement_source(self, value: Value) -> str | None:
        """Return the source of the user's placement of `value`, or of a parameter it follows; None without a
        placement."""
        if value in self.state_placements:
            return self.state_placements[value].source
        return next(
            (self.placement_sources[c] for c in self.storage.classes_of(value) if c in self.placement_sources), None
        )

    def is_activation(self, value: Value | None) -> bool:
        return self.storage.has_batch(value)

    def _divisible_prefix(self, axes: Axes, size: int) -> Axes:
        """Return the longest prefix of `axes` over which `size` divides."""
        # JAX refuses a constraint over axes that do not divide the dimension.
        while axes and size % self.device_count(axes):
            axes = axes[:-1]
        return axes

    @staticmethod
    def _without_repeated_axes(spec: Spec) -> Spec:
        """Return the spec with each mesh axis only at its first dimension."""
        # A PartitionSpec may name each mesh axis only once.
        seen: set[str] = set()
        out = []
        for axes in spec:
            out.append(axes if seen.isdisjoint(axes) else tuple(a for a in axes if a not in seen))
            seen.update(axes)
        return out


def from_partition_spec(entries: Iterable[Any]) -> Spec:
    """Return the mesh axes of every dimension with an entry in a PartitionSpec."""
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]


def without_axes(spec: Iterable[Axes], axes: Collection[str]) -> Spec:
    """Return a spec without these axes."""
    return [tuple(a for a in has if a not in axes) for has in spec]


def partition_spec(spec: Sequence[Axes]) -> PartitionSpec:
    """Return a spec as jax takes it: `("data",)` becomes "data", `()` becomes None."""
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in spec))


def dim_spec_text(dim: int, axes: Sequence[str]) -> str:
    """Return the spec that shards dimension `dim` alone, as written in a `%%shard` line: `P(None, 'data')`."""
    return format_spec(partition_spec([*[()] * dim, tuple(axes)]))
