"""`Layout`: what the strategies fill in, dimension class by dimension class, and read specs from."""

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
from ..program.dimensions import Dimensions, Storage
from ..program.expert_loops import ExpertLoop
from ..program.flow import Flow
from ..program.ir import Equation, Program, Value
from ..program.roles import Roles
from ..program.sizes import nbytes
from ..specs import Placement
from .sorting import Sorting, find_sorting
from .tables import with_tables

Axes = tuple[str, ...]
Spec = list[Axes]  # the mesh axes of every dimension


@dataclass(frozen=True)
class Experts:
    """Experts divided over the mesh axes `axes`, by the dimension classes that count them.

    `numbers`: how many of them there are. `places`: classes of those that experts have for the tokens of a group;
    `shared`: for the tokens of all examples.
    `stored`: the storage classes of parameters that are divided so. `equations`: those, by index, that work expert by
    expert; `made`: the activations that these make. `loops`: the scans that step over experts, by index, of which each
    device does the trips of its own; `inside`: the equations in them.
    """

    axes: Axes
    classes: frozenset[int]
    numbers: frozenset[int]
    places: frozenset[int] = frozenset()
    shared: frozenset[int] = frozenset()
    stored: frozenset[int] = frozenset()
    equations: frozenset[int] = frozenset()
    made: frozenset[Value] = frozenset()
    loops: Mapping[int, ExpertLoop] = field(default_factory=dict)
    inside: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Exchanges:
    """Where activations lie by other dimensions than elsewhere, and where that changes.

    `lies`: how values lie that are not as positions are divided. `reads`: how an equation, by index, reads a value that
    lies otherwise. `makes`: how a value is made that lies otherwise.
    """

    lies: Mapping[Value, Spec] = field(default_factory=dict)
    reads: Mapping[tuple[int, Value], Spec] = field(default_factory=dict)
    makes: Mapping[Value, Spec] = field(default_factory=dict)


@dataclass(eq=False)
class Layout:
    """A step's dimensions and the mesh axes given to them; `platform` is that of the mesh's devices.

    `batch_axes` divide the examples; `tensor` gives mesh axes to logical dimensions that stay divided in use;
    `stored` to dimensions of arrays at rest; `experts`: those that are divided, None without. `sequence`: the logical
    dimensions that are positions, divided over `sequence_axes`; `keys`: those of the program's dimensions, by number,
    that stay whole because another of the same value is divided; `positions`: those of inputs that the user named;
    `exchanges`: where attention has heads divided in their place, and what else needs all of a dimension. `fixed`: who
    placed a dimension at rest; `alone`: optimizer state that the user placed, which its parameter does not follow.
    `read_elsewhere`: values that other programs take as they are, in the middle of this one: those of a stage of a
    pipeline that it hands on, or that its backward pass reads.
    `names`, `why` and `wanted` are kept per input.
    """

    program: Program
    dims: Dimensions
    storage: Storage
    flow: Flow
    roles: Roles
    batch: Batch
    mesh: Mesh | AbstractMesh
    platform: str
    batch_axes: Axes
    tensor: dict[int, Axes] = field(default_factory=dict)
    stored: dict[int, Axes] = field(default_factory=dict)
    sequence: frozenset[int] = frozenset()
    sequence_axes: Axes = ()
    keys: frozenset[int] = frozenset()
    experts: Experts | None = None
    exchanges: Exchanges = field(default_factory=Exchanges)
    read_elsewhere: frozenset[Value] = frozenset()
    names: Sequence[str] = ()
    positions: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    fixed: dict[int, str] = field(default_factory=dict)
    alone: dict[Value, Placement] = field(default_factory=dict)
    why: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    wanted: dict[int, Axes] = field(default_factory=lambda: defaultdict(tuple))
    findings: list[Finding] = field(default_factory=list)

    @property
    def simulated(self) -> bool:
        """Are the devices CPU devices, whose compiler can't do all that others can?"""
        return self.platform == "cpu"

    @cached_property
    def state(self) -> frozenset[Value]:
        """The inputs that the step keeps: parameters and what follows them."""
        return frozenset(self.program.inputs[i] for i in self.roles.stored)

    @cached_property
    def sorting(self) -> Sorting:
        """The rows that each shard of the batch sorts by itself."""
        return with_tables(self, find_sorting(self))

    def count(self, axes: Axes) -> int:
        """Devices along `axes` together."""
        return math.prod(self.mesh.shape[a] for a in axes)

    def at_rest(self, value: Value) -> Spec:
        """A parameter, its moments and its gradient between uses."""
        if value in self.alone:
            return [*self.alone[value].spec]
        return self._unique([self.stored.get(c, ()) for c in self.storage.of(value)])

    def in_use(self, value: Value) -> Spec:
        """A weight where an activation meets it: only what tensor parallelism divides, and experts. Of two dimensions
        that may be divided, such as those of a square weight, the one that is divided at rest."""
        spec = self.tensor_axes(value)
        if len(may := [d for d, axes in enumerate(spec) if axes]) > 1:
            rest = self.at_rest(value)
            kept = next((d for d in may if not {*spec[d]}.isdisjoint(rest[d])), may[0])
            spec = [axes if d == kept else () for d, axes in enumerate(spec)]
        if self.experts is not None:
            for d, c in enumerate(self.storage.of(value)):
                if c in self.experts.stored:
                    spec[d] = self.experts.axes
        return self._unique(spec)

    def active(self, value: Value) -> Spec:
        """An activation where it is made: examples over the batch axes, tensor parallel dimensions divided, positions
        over what these leave of the sequence axes, the rest whole; what experts make by expert, and in attention as
        `exchanges` say."""
        if value in self.exchanges.lies:
            return [*self.exchanges.lies[value]]
        return self.lying(value, self.experts is not None and value in self.experts.made)

    def between(self, value: Value) -> Spec:
        """A value between the equations that work with it: an activation as it is made, others at rest."""
        return self.active(value) if self.batchy(value) else self.at_rest(value)

    def made_by(self, e: Equation, value: Value) -> list[Spec]:
        """How a value lies that `e` makes, one after the other: as `e` works with it, then where it is wanted."""
        lies, lying = self.between(value), self.at(e, value)
        return [lies] if lying == lies else [lying, lies]

    def lying(self, value: Value, by_expert: bool) -> Spec:
        """An activation, `by_expert`: experts divided, and examples, or the places that experts have for the tokens of
        all of them, over what these leave of the batch axes; else examples over all of them."""
        spec, shape = [], self.program.shapes[value]
        over, rows, given = self.batch_axes, self.batch.classes, dict[int, Axes]()
        if self.experts is not None:
            given = dict.fromkeys(self.experts.classes, self.experts.axes if by_expert else ())
            if by_expert:
                over = tuple(a for a in over if a not in self.experts.axes)
                rows = self.experts.shared or rows  # any token may have any of the places
        tensor = self.tensor_axes(value)
        divided = {a for axes in tensor for a in axes}
        left = tuple(a for a in self.sequence_axes if a not in divided)
        for d, (c, n) in enumerate(zip(self.dims.of(value), self.program.nodes(value), strict=True)):
            if c in given:
                spec.append(self._dividing(given[c], shape[d]))
            elif c in self.sequence:
                spec.append(() if n in self.keys else self._dividing(left, shape[d]))
            else:
                spec.append(self._dividing(over, shape[d]) if c in rows else tensor[d])
        return self._unique(spec)

    def gathered_over(self, weight: Value) -> Axes:
        """The mesh axes over which a weight at rest is gathered for use."""
        inside = {a for axes in self.tensor.values() for a in axes}
        inside |= set() if self.experts is None else {*self.experts.axes}
        return tuple(a for axes in self.at_rest(weight) for a in axes if a not in inside)

    def tensor_axes(self, value: Value) -> Spec:
        shape = self.program.shapes[value]
        found = [self.tensor.get(c, ()) for c in self.dims.of(value)]
        return [a if a and shape[d] % self.count(a) == 0 else () for d, a in enumerate(found)]

    def adding(self, value: Value) -> Axes:
        """The batch axes along which devices add up what they make of a weight's gradient: those that do not divide it
        in use, as the expert axes divide experts."""
        inside = {a for axes in self.in_use(value) for a in axes}
        return tuple(a for a in self.batch_axes if a not in inside)

    def used(self, value: Value | None) -> Spec:
        """A value where it is worked with: an activation, or a weight where one meets it."""
        if value is None:
            return []
        return self.active(value) if self.batchy(value) else self.in_use(value)

    def at(self, e: Equation, value: Value | None) -> Spec:
        """An operand or a result of `e` as it is worked with there: by expert, where `e` works so; in attention as
        `exchanges` say."""
        if value is None:
            return []
        here = self.exchanges.reads.get((e.index, value))
        if here is None and value in e.outs:
            here = self.exchanges.makes.get(value)
        if here is not None:
            return [*here]
        if self.experts is None:
            return self.used(value)
        by_expert = e.index in self.experts.equations
        if self.batchy(value):
            return self.lying(value, by_expert)
        return self.in_use(value) if by_expert else without(self.in_use(value), self.experts.axes)

    def within(self, e: Equation, value: Value) -> Spec:
        """An operand or a result of `e` as it lies there: beside the examples a weight is as it rests, unless
        `exchanges` say otherwise."""
        made = value in e.outs and value in self.exchanges.makes
        if (
            made
            or (e.index, value) in self.exchanges.reads
            or self.batchy(value)
            or self.storage.batchy_equation(e)
        ):
            return self.at(e, value)
        return self.at_rest(value)

    def divided_in(self, e: Equation) -> Callable[[int], bool]:
        """Return whether a dimension, by number, is divided in an operand or a result of `e`, as that works with it."""
        specs = [self.within(e, v) for v in (*e.ins, *e.outs) if v is not None]
        return lambda d: any(spec[d:] and spec[d] for spec in specs)

    def bytes_of(self, value: Value, spec: Spec) -> int:
        """What one device holds of a value that lies so."""
        return nbytes(self.program.avals[value]) // math.prod(map(self.count, spec))

    def moving(self, value: Value, spec: Spec) -> int:
        """The same on its way to other devices: XLA for the CPU sends bfloat16 as float32."""
        widened = self.simulated and self.program.avals[value].dtype == jnp.bfloat16
        return self.bytes_of(value, spec) * (2 if widened else 1)

    def pin(self, x: Any, spec: Spec) -> Any:
        """`x`, held where `spec` says by a constraint in the program."""
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, partition_spec(spec)))

    def fixed_by(self, value: Value) -> str | None:
        """Who gave the placement of `value`, or of a parameter that it follows."""
        if value in self.alone:
            return self.alone[value].source
        return next((self.fixed[c] for c in self.storage.of(value) if c in self.fixed), None)

    def batchy(self, value: Value | None) -> bool:
        return self.storage.batchy(value)

    def _dividing(self, axes: Axes, size: int) -> Axes:
        """The most leading ones of `axes` that `size` divides over."""
        while axes and size % self.count(axes):
            axes = axes[:-1]
        return axes

    @staticmethod
    def _unique(spec: Spec) -> Spec:
        """No mesh axis twice: the first dimension that has it keeps it."""
        seen: set[str] = set()
        out = []
        for axes in spec:
            out.append(axes if seen.isdisjoint(axes) else tuple(a for a in axes if a not in seen))
            seen.update(axes)
        return out


def spec_of(entries: Iterable[Any]) -> Spec:
    """The mesh axes of every dimension that a PartitionSpec has an entry for."""
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]


def without(spec: Iterable[Axes], axes: Collection[str]) -> Spec:
    """A spec in which these axes divide nothing."""
    return [tuple(a for a in has if a not in axes) for has in spec]


def partition_spec(spec: Sequence[Axes]) -> PartitionSpec:
    """As jax takes it: `("data",)` as "data", `()` as None."""
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in spec))
