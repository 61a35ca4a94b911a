"""Backward walk from a value to its sources, with labels for its dimensions."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..flow import Flow
from ..ir import Equation, Program, Value
from ..primitives import bind, scan_counts
from ..primitives.factors import Factors
from ..primitives.primitive import Kind
from ..source_lines import user_line
from ..splat_constants import SplatConstants


@dataclass(frozen=True)
class SplitLabel:
    """Label of one of the dimensions into which a labelled dimension is split.

    Attributes:
        label: Label of the dimension before the split.
        sizes: Sizes of all dimensions after the split.
        index: Index of this dimension among these.
    """

    label: "Label"
    sizes: tuple[int, ...]
    index: int


@dataclass(frozen=True)
class MergedLabel:
    """Label of a dimension merged from several.

    Attributes:
        labels: Labels of the merged dimensions.
        sizes: Their sizes.
    """

    labels: tuple["Label | None", ...]
    sizes: tuple[int, ...]


Label = int | SplitLabel | MergedLabel
Labels = tuple[Label | None, ...]  # one per dimension; None for a dimension of size 1 or without a label
_INLINED_CALLS = ("jit", "pjit", "closed_call", "core_call")  # calls whose results are those of their bodies
_MAX_EVALUATED_SIZE = 1 << 26  # elements; 256 MiB in float32


class BackwardWalk:
    """Backward walk through a program.

    Args:
        program: The program.
        constant_inputs: Inputs that are constants, with their arrays.
        differentiated_inputs: Inputs with respect to which the program is differentiated.
    """

    def __init__(
        self,
        program: Program,
        constant_inputs: Mapping[Value, Any] | None = None,
        differentiated_inputs: Collection[Value] = (),
    ):
        self.program, self._differentiated_inputs = program, differentiated_inputs
        self._aliases: dict[Value, Value] = {}
        self._constant_inputs = dict(constant_inputs or {})
        self._splats = SplatConstants(program, constant_inputs)
        self._constant_cache: dict[Value, np.ndarray | None] = {}
        for e in program.equations:
            # A while loop divides its operands between condition and body, and a custom derivative rule replaces the
            # gradients of its body: neither is entered.
            if not e.primitive.custom_derivative and not e.is_while:
                self._record_aliases(e)

    def _record_aliases(self, e: Equation) -> None:
        """Record aliases: body inputs with the same value in all runs, and results of calls that run in place."""
        for body in e.bodies:
            # Only the constants of a scan: its carries and elements differ from trip to trip.
            unchanging = scan_counts(e.params)[0] if e.is_scan else len(body.inputs)
            # A body takes the last operands of its equation; in a `cond` the branch index comes first.
            operands = e.jaxpr_eqn.invars[len(e.operands) - len(body.inputs) :]
            for (outside, inside, _), var in zip(body.inputs[:unchanging], operands, strict=False):
                if outside is None:
                    self._constant_cache[inside] = literal_array(var)
                else:
                    self._aliases[inside] = outside
            if e.name in _INLINED_CALLS:
                self._aliases |= {b: a for a, b, _ in body.outputs if a is not None and b is not None}

    def resolve(self, v: Value) -> Value:
        """Return the value of which `v` is an alias; `v` itself for none."""
        while v in self._aliases:
            v = self._aliases[v]
        return v

    def producer(self, v: Value) -> Equation | None:
        """Return the equation that makes `v`; None for an input and for results of loops, branches, checkpoints and
        custom derivative rules."""
        e = self.program.producer.get(self.resolve(v))
        return None if e is None or e.bodies else e

    def operand_labels(self, e: Equation, labels: Labels, *, allow_split: bool = False) -> Labels | None:
        """Return the labels of the operand of an equation that only rearranges, repeats or casts numbers.

        None for any other equation, and for `stop_gradient`.

        Args:
            e: Equation.
            labels: Labels of its result.
            allow_split: Whether dimensions may be split and merged.
        """
        if not e.operands or e.operands[0] is None:
            return None
        if e.primitive.kind is Kind.ELEMENTWISE and e.primitive.alias:
            # `stop_gradient` keeps the numbers but cuts the gradient, which a fused attention would not.
            return None if e.name == "stop_gradient" else labels
        factors = e.factors
        if factors is None or not (allow_split or all(len(group) <= 1 for pair in factors.groups for group in pair)):
            return None
        return _labels_through(factors, labels)

    def skip_layout(self, v: Value, labels: Labels, *, allow_split: bool = False) -> tuple[Value, Labels]:
        """Go back over equations that only rearrange or cast the numbers of `v`, without any repetition.

        Args:
            v: Value.
            labels: Labels of its dimensions.
            allow_split: Whether dimensions may be split and merged.

        Returns:
            The source and the labels of its dimensions.
        """
        shapes = self.program.shapes
        while (e := self.producer(v)) is not None and (
            source_labels := self.operand_labels(e, labels, allow_split=allow_split)
        ) is not None:
            (source,) = e.operands
            # A different element count means a broadcast, which repeats numbers.
            if source is None or _element_count(shapes[source]) != _element_count(shapes[e.results[0]]):
                break
            v, labels = source, source_labels
        return self.resolve(v), labels

    def scalar(self, e: Equation, operand_index: int) -> float | None:
        """Return the number that an operand has at all positions; None for an operand with several numbers or no
        constant.

        Args:
            e: Equation.
            operand_index: Index of the operand.
        """
        v, array = e.operands[operand_index], self._splats.operand_scalar(e, operand_index)
        if array is None and v is not None:
            source = self._broadcast_source(v)
            array = self.constant(source) if _element_count(self.program.shapes[source]) == 1 else None
        return None if array is None else float(array.reshape(()))

    def _broadcast_source(self, v: Value) -> Value:
        """Return the value of which `v` is a broadcast, a cast or another arrangement."""
        forms = (Kind.SHAPE, Kind.ELEMENTWISE)
        while (e := self.producer(v)) is not None and e.primitive.alias and e.primitive.kind in forms:
            if e.operands[0] is None:
                break
            v = e.operands[0]
        return self.resolve(v)

    def constant(self, v: Value) -> np.ndarray | None:
        """Return the array of a value that depends on no input; None for any other value and for very large arrays."""
        v = self.resolve(v)
        if v not in self._constant_cache:
            self._constant_cache[v] = self._evaluate(v)
        return self._constant_cache[v]

    def _evaluate(self, v: Value) -> np.ndarray | None:
        if _element_count(self.program.shapes[v]) > _MAX_EVALUATED_SIZE:
            return None
        if v in self._constant_inputs:
            return np.asarray(self._constant_inputs[v])
        e = self.producer(v)
        if e is None or e.primitive.uses_key or e.jaxpr_eqn.effects:
            return None
        operands: list[Any] = []
        for k, w in enumerate(e.operands):
            array = literal_array(e.jaxpr_eqn.invars[k]) if w is None else self.constant(w)
            if array is None:
                return None
            operands.append(array)
        # Recognition can run while JAX traces, where `bind` would return tracers instead of numbers.
        with jax.ensure_compile_time_eval(), e.jaxpr_eqn.ctx.manager:
            outs = bind(e.jaxpr_eqn, operands)
        return np.asarray(outs[e.results.index(v)])

    @cached_property
    def values_with_gradient(self) -> Collection[Value]:
        """Values that carry gradients to the differentiated inputs."""

        avals = self.program.avals

        def is_smooth(v: Value) -> bool:
            return jnp.issubdtype(avals[v].dtype, jnp.inexact)

        def carries_gradient(made: Value, _of: Value, e: Equation | None) -> bool:
            return is_smooth(made) and (e is None or e.name != "stop_gradient")

        return Flow(self.program).descendants(filter(is_smooth, self._differentiated_inputs), carries_gradient)

    def source_line(self, e: Equation | None) -> str | None:
        """Return the user's source line of an equation, or of the call whose body contains it; None where unknown."""
        while e is not None and (line := user_line(e.jaxpr_eqn)) is None:
            e = e.parent
        return None if e is None else line


def involves(label: Label | None, name: int) -> bool:
    """Return whether a label is `name`, or a split or merge that involves it."""
    if isinstance(label, SplitLabel):
        return involves(label.label, name)
    if isinstance(label, MergedLabel):
        return any(involves(x, name) for x in label.labels)
    return label == name


def rename_label(label: Label | None, names: Mapping[int, int]) -> Label | None:
    """Return a label with other names; None for a label without a new name."""
    if isinstance(label, SplitLabel):
        parent = rename_label(label.label, names)
        return None if parent is None else SplitLabel(parent, label.sizes, label.index)
    if isinstance(label, MergedLabel):
        return MergedLabel(tuple(rename_label(x, names) for x in label.labels), label.sizes)
    return None if label is None else names.get(label)


def _labels_through(factors: Factors, labels: Labels) -> Labels | None:
    """Return the labels of an operand from those of the result; None where several dimensions become several."""
    operand_labels: list[Label | None] = [None] * len(factors.operand_shape)
    for old, new in factors.groups:
        names = tuple(labels[d] for d in new)
        if len(new) == 1:
            group_labels = (
                names if len(old) == 1 else _split_label(names[0], tuple(factors.operand_shape[d] for d in old))
            )
        elif len(old) == 1:
            group_labels = [_merge_labels(names, tuple(factors.result_shape[d] for d in new))] if new else [None]
        elif new:
            return None
        else:
            group_labels = [None] * len(old)
        for d, x in zip(old, group_labels, strict=True):
            operand_labels[d] = x
    return tuple(operand_labels)


def _split_label(label: Label | None, sizes: tuple[int, ...]) -> Sequence[Label | None]:
    if isinstance(label, MergedLabel) and label.sizes == sizes:
        return label.labels
    return [None if label is None else SplitLabel(label, sizes, k) for k in range(len(sizes))]


def _merge_labels(labels: tuple[Label | None, ...], sizes: tuple[int, ...]) -> Label | None:
    first = labels[0]
    if isinstance(first, SplitLabel) and labels == tuple(SplitLabel(first.label, sizes, k) for k in range(len(sizes))):
        return first.label
    return None if all(x is None for x in labels) else MergedLabel(labels, sizes)


def literal_array(literal: Any) -> np.ndarray:
    """Return the array of a literal operand."""
    return np.asarray(literal.val)


def _element_count(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))
