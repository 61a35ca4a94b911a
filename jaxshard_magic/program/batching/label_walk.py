"""Lockstep walk over two traces of one function that labels every value, through bodies, branches and loops.

Labels of the values of a `jax.custom_vjp` function say nothing about its gradient: its rule may normalise the gradients
of all rows by their norm, although the function itself works row by row. The backward pass is therefore traced, and its
results need the labels of a gradient.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..ir import Body, Equation, Program, SubJaxpr, Value
from ..lookup_indices import is_negative_index_wrap
from ..primitives import bind, scan_counts, shape_of
from ..primitives.primitive import Kind
from ..sort_analysis import SortAnalysis
from ..sort_states import SortedAlong
from . import sorted_labels
from .batch_labels import (
    CONSTANT,
    Constant,
    ExampleSum,
    Label,
    PerExample,
    RowIndex,
    SizeDependent,
    SortedIndex,
    UnknownLabel,
    fits_shapes,
    growing_dim,
    literal_label,
    size_label,
)
from .batch_rules import not_provable
from .rule_site import NotProvable, RuleSite, conversion_factor, have_same_form, is_zero

GRADIENT_CALL = "jaxshard_gradient"  # primitive of a gradient that is not taken yet: nothing is known of its results
_MAX_TRIPS = 3  # trips after which a label that still changes becomes unknown; nested loops multiply them


@dataclass(eq=False)
class LabelWalk:
    """One pass over two traces of a function.

    Attributes:
        small: The trace at the smaller batch.
        large: The trace at the larger batch.
        ratio: Large batch size divided by small batch size.
        full_batch_candidates: Values of the small program that may be replaced by the whole batch's.
        sort_analyses: Sort analysis of the small and of the large program.
        value_labels: Label of each value.
        unknown_origins: Indices of the equations at which a value became unknown.
        operand_scales: Factors for operands, by equation index and operand position.
        draw_dims: Dimension in which a random draw is sliced to rows, by equation index.
        full_batch_values: Values replaced by the whole batch's: small value to large value.
        zero_values: Values known to be zero.
        in_fixed_body: True inside a body that runs unchanged, so that no operand can be scaled.
    """

    small: Program
    large: Program
    ratio: Fraction
    full_batch_candidates: frozenset[Value]
    sort_analyses: tuple[SortAnalysis, SortAnalysis]
    value_labels: list[Label] = field(init=False)
    unknown_origins: set[int] = field(default_factory=set)
    operand_scales: dict[int, dict[int, Fraction]] = field(default_factory=dict)
    draw_dims: dict[int, int] = field(default_factory=dict)
    full_batch_values: dict[Value, Value] = field(default_factory=dict)
    zero_values: set[Value] = field(default_factory=set)
    in_fixed_body: bool = False
    _gradient_mixing: dict[Any, bool] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.value_labels = [UnknownLabel()] * len(self.small.avals)

    def output_labels(self, input_labels: Sequence[Label]) -> list[Label]:
        """Return the labels of the program's outputs.

        Args:
            input_labels: Label of each input.
        """
        outs = self.label_body(self.small.top, self.large.top, input_labels)
        return [self._final_label(v, x) for v, x in zip(self.small.outputs, outs, strict=True)]

    def final_labels(self) -> tuple[Label, ...]:
        """Return the final label of every value."""
        return tuple(self._final_label(v, x) for v, x in enumerate(self.value_labels))

    def _final_label(self, v: Value | None, label: Label) -> Label:
        """Return the label of `v` as seen outside of the walk: row indices and sorted rows become unknown."""
        hidden = isinstance(label, (RowIndex, SortedIndex)) or (
            isinstance(label, PerExample) and isinstance(self.sort_analyses[0].states.get(v), SortedAlong)  # pyright: ignore[reportArgumentType]
        )
        return UnknownLabel(self.small.producer[v].index) if hidden and v in self.small.producer else label

    def label_body(self, small: SubJaxpr, large: SubJaxpr, input_labels: Sequence[Label]) -> list[Label]:
        """Label all values of a body and return the labels of its outputs.

        Args:
            small: The body in the small program.
            large: The same body in the large program.
            input_labels: Label of each input.
        """
        for v, label in zip(small.inputs, input_labels, strict=True):
            self.value_labels[v] = label
        for v, a, b in zip(small.const_values, small.consts, large.consts, strict=True):
            self.value_labels[v] = constant_label(a, b, self.ratio)
        for e, f in zip(small.equations, large.equations, strict=True):
            self.label_equation(e, f)
        outs = zip(small.outputs, small.jaxpr.outvars, large.jaxpr.outvars, strict=True)
        return [literal_label(a.val, b.val) if v is None else self.value_labels[v] for v, a, b in outs]

    def label_equation(self, e: Equation, f: Equation) -> None:
        """Label the results of an equation; a label refuted by the shapes becomes unknown.

        Args:
            e: The equation in the small program.
            f: The same equation in the large program.
        """
        operands = zip(e.operands, e.jaxpr_eqn.invars, f.jaxpr_eqn.invars, strict=True)
        labels = [literal_label(a.val, b.val) if v is None else self.value_labels[v] for v, a, b in operands]  # pyright: ignore[reportAttributeAccessIssue]
        site = RuleSite(e, f, labels, self.ratio, self.in_fixed_body, self.zero_values)
        # Equations in a loop body are labelled once a trip, so notes of an earlier trip are dropped.
        self.unknown_origins.discard(e.index)
        self.draw_dims.pop(e.index, None)
        try:
            results = self.result_labels(site)
        except NotProvable:
            results = [UnknownLabel(e.index)] * len(e.results)
        for v, label, a, b in zip(e.results, results, e.jaxpr_eqn.outvars, f.jaxpr_eqn.outvars, strict=True):
            label = label if fits_shapes(label, shape_of(a), shape_of(b), self.ratio) else UnknownLabel(e.index)
            if v in self.full_batch_candidates and isinstance(label, (ExampleSum, UnknownLabel)):
                self.full_batch_values[v], label = v, CONSTANT
            self.value_labels[v] = label
            if label == UnknownLabel(e.index):
                self.unknown_origins.add(e.index)
        self.operand_scales[e.index] = site.operand_scales
        if site.draw_dim is not None:
            self.draw_dims[e.index] = site.draw_dim
        self._mark_zeros(e.results, [e.primitive.alias and site.is_zero_operand(0)] * len(e.results))

    def _mark_zeros(self, values: Sequence[Value], are_zero: Sequence[bool]) -> None:
        """Note for each value whether it is known to be zero."""
        for v, added in zip(values, are_zero, strict=True):
            (self.zero_values.add if added else self.zero_values.discard)(v)

    def result_labels(self, site: RuleSite) -> list[Label]:
        """Return the labels of the results of one equation."""
        e, labels = site.eqn, site.labels
        if e.bodies:
            return self.label_bodies(site)
        if e.name == GRADIENT_CALL:
            return [UnknownLabel()] * len(e.results)
        if e.primitive.kind is Kind.PASS_THROUGH:
            return labels
        if (
            self.sort_analyses[0].involves_order(e)
            and (uniform := sorted_labels.uniform_labels(site, *self.sort_analyses)) is not None
        ):
            return uniform
        if (
            # `jnp` indexing wraps negative indices with a select, but row indices are never negative.
            e.name == "select_n"
            and not self.sort_analyses[0].involves_order(e)
            and is_negative_index_wrap(self.small, e)
            and isinstance(labels[1], RowIndex)
        ):
            return [labels[1]]
        unknown = next((x for x in labels if isinstance(x, UnknownLabel)), None)
        if unknown is not None:
            return [unknown if unknown.cause is not None else UnknownLabel()] * len(e.results)
        if all(x == CONSTANT for x in labels) and _have_same_result_shapes(e, site.large_eqn):
            if not site.has_same_params():
                raise NotProvable
            return [CONSTANT] * len(e.results)
        if self.sort_analyses[0].involves_order(e):
            return sorted_labels.sorted_result_labels(site, *self.sort_analyses)
        result = (e.primitive.batch_rule or not_provable)(site)
        return result if isinstance(result, list) else [result] * len(e.results)

    def label_bodies(self, site: RuleSite) -> list[Label]:
        """Return the labels of the results of an equation with bodies."""
        e, bodies = site.eqn, list(zip(site.eqn.bodies, site.large_eqn.bodies, strict=True))
        if e.is_scan:
            return self._scan(site, *bodies[0])
        if e.is_while:
            return self._while(site, bodies)
        if e.is_cond:
            return self._cond(site, bodies)
        ins, outer_fixed = site.labels, self.in_fixed_body
        # A custom derivative rule runs unchanged: its operands are made exact outside, and no operand inside can be
        # scaled. The rules of `jax.custom_jvp` are linear; only those of `jax.custom_vjp` are traced and followed.
        if e.primitive.custom_derivative:
            ins = [
                site.make_exact(i) if isinstance(x, (PerExample, SizeDependent)) else x
                for i, x in enumerate(site.labels)
            ]
            self.in_fixed_body = True
        self._mark_zeros(bodies[0][0].sub_jaxpr.inputs, [site.is_zero_operand(i) for i in range(len(ins))])
        try:
            outs = self.label_body(bodies[0][0].sub_jaxpr, bodies[0][1].sub_jaxpr, ins)
        finally:
            self.in_fixed_body = outer_fixed
        if not outer_fixed and _has_custom_vjp(e) and self._mixes_gradients(site, ins, outs):
            raise NotProvable
        return outs

    def _mixes_gradients(self, site: RuleSite, ins: Sequence[Label], outs: Sequence[Label]) -> bool:
        """Return whether a custom gradient rule mixes the rows of a batch, so that microbatches get other gradients.

        A rule that can't be followed counts as not mixing: a loop over as many chunks as there are rows, or an order
        that was sorted outside of the rule.
        """
        # Loop bodies are labelled several times, and tracing a gradient is slow.
        key = site.eqn.index, (*ins, *outs)
        if key not in self._gradient_mixing:
            self._gradient_mixing[key] = self._trace_gradient_mixing(site, ins, outs)
        return self._gradient_mixing[key]

    def _trace_gradient_mixing(self, site: RuleSite, ins: Sequence[Label], outs: Sequence[Label]) -> bool:
        """Trace a custom gradient rule at both sizes and compare the labels of its results with the expected gradient
        labels."""
        if any(isinstance(x, (RowIndex, SortedIndex)) for x in ins) or self.sort_analyses[0].involves_order(site.eqn):
            return False  # a trace of the rule alone doesn't show how its operands are sorted
        if any(isinstance(x, UnknownLabel) for x in (*ins, *outs)):
            return False  # the function's own labels are unknown, and name the equation
        small, large = _trace_vjp(site.eqn), _trace_vjp(site.large_eqn)
        if not have_same_form(small, large):
            return False
        walk = LabelWalk(
            small, large, self.ratio, frozenset(), (SortAnalysis(small), SortAnalysis(large)), in_fixed_body=True
        )
        cotangent_labels = [_gradient_label(outs[o]) for o in _differentiable_positions(site.eqn.jaxpr_eqn.outvars)]
        gradient_labels = walk.output_labels([*ins, *cotangent_labels])
        if any(
            small.equations[i].bodies or small.equations[i].primitive.batch_rule is None for i in walk.unknown_origins
        ):
            return False
        gradients = zip(
            _differentiable_positions(site.eqn.jaxpr_eqn.invars),
            gradient_labels,
            small.outputs,
            small.closed.jaxpr.outvars,
            strict=True,
        )
        return any(
            label != _gradient_label(ins[i])
            and not (label == CONSTANT and (is_zero(var) if v is None else v in walk.zero_values))
            for i, label, v, var in gradients
        )

    def _scan(self, site: RuleSite, body: Body, large_body: Body) -> list[Label]:
        """Label a scan. Both programs must make the same number of trips."""
        n, k = scan_counts(site.params)
        if site.params["length"] != site.large_eqn.params["length"]:
            raise NotProvable
        constant_labels, xs = (site.labels[:n], [_element_label(x, site.eqn.index) for x in site.labels[n + k :]])

        def trip(carry: list[Label]) -> tuple[list[Label], list[Label]]:
            outs = self.label_body(body.sub_jaxpr, large_body.sub_jaxpr, [*constant_labels, *carry, *xs])
            return outs[:k], outs[k:]

        carry, ys = self._carry_fixpoint(site, n, body.sub_jaxpr.inputs[n : n + k], trip)
        return [*carry, *map(_stacked_label, ys)]

    def _while(self, site: RuleSite, bodies: list[tuple[Body, Body]]) -> list[Label]:
        """Label a while loop. Its condition must be constant, or stop each row on its own."""
        (body, large_body), (test, large_test) = bodies
        test_constants, body_constants = site.params["cond_nconsts"], site.params["body_nconsts"]
        start = test_constants + body_constants

        def trip(carry: list[Label]) -> tuple[list[Label], list[Label]]:
            again = self.label_body(test.sub_jaxpr, large_test.sub_jaxpr, [*site.labels[:test_constants], *carry])
            return self.label_body(
                body.sub_jaxpr, large_body.sub_jaxpr, [*site.labels[test_constants:start], *carry]
            ), again

        carry, (condition,) = self._carry_fixpoint(site, start, body.sub_jaxpr.inputs[start - test_constants :], trip)
        if condition != CONSTANT and not _stops_per_row(condition, carry):
            raise NotProvable
        return carry

    def _carry_fixpoint(
        self,
        site: RuleSite,
        start: int,
        body_values: Sequence[Value],
        trip: Callable[[list[Label]], tuple[list[Label], list[Label]]],
    ) -> tuple[list[Label], list[Label]]:
        """Return the labels of a loop's carries, and the labels of the other results of a trip: the least fixpoint.

        Args:
            site: The loop.
            start: Position of the first carry among the loop's operands.
            body_values: The carries' values in the body.
            trip: Label one trip: carries to (new carries, other results).
        """
        positions = range(start, start + len(body_values))
        carry = [site.labels[i] for i in positions]
        zero = [site.is_zero_operand(i) for i in positions]
        self._mark_zeros(body_values, zero)
        for trips in itertools.count(1):
            outs, other_results = trip(carry)
            # The factors of the start depend on the labels after a trip, which may still change.
            site.operand_scales.clear()
            joined = [self._join_carry(site, i, out) for i, out in zip(positions, outs, strict=True)]
            for i, (old, new) in enumerate(zip(carry, joined, strict=True)):
                if isinstance(old, UnknownLabel):
                    joined[i] = old  # keep the first cause, or a loop in a loop would never settle
                elif old != new and trips > _MAX_TRIPS:
                    joined[i] = UnknownLabel(site.eqn.index)
            # Zeros at the start hold in the first trip only, so the labels are confirmed by a trip without them.
            if joined == carry and not any(zero):
                break
            zero = [False] * len(body_values)
            self._mark_zeros(body_values, zero)
            carry = joined
        return carry, other_results

    def _join_carry(self, site: RuleSite, i: int, out: Label) -> Label:
        """Return the label of a carry from its label at the loop's start and after a trip, scaling the start where
        needed.

        Args:
            site: The loop.
            i: Position of the carry among the loop's operands.
            out: Label after a trip.
        """
        entry = site.labels[i]
        if entry == out or isinstance(entry, UnknownLabel) or isinstance(out, UnknownLabel):
            return entry if isinstance(entry, UnknownLabel) else out
        try:
            if not site.is_zero_operand(i):
                site.scale_operand(i, conversion_factor(entry, out, self.ratio))
        except NotProvable:
            return UnknownLabel(site.eqn.index)
        return out

    def _cond(self, site: RuleSite, bodies: list[tuple[Body, Body]]) -> list[Label]:
        """Label a branch: constant index, and equal labels in all branches except for zeros."""
        if isinstance(site.labels[0], UnknownLabel):
            return [site.labels[0]] * len(site.eqn.results)
        if site.make_exact(0) != CONSTANT:
            raise NotProvable
        branches = [self.label_body(a.sub_jaxpr, b.sub_jaxpr, site.labels[1:]) for a, b in bodies]
        outs = []
        for i, labels in enumerate(zip(*branches, strict=True)):
            unknown = next((x for x in labels if isinstance(x, UnknownLabel)), None)
            distinct = {
                x for x, (body, _) in zip(labels, bodies, strict=True) if not self._is_zero_output(body.sub_jaxpr, i)
            }
            if unknown is None and len(distinct) > 1:
                unknown = UnknownLabel(site.eqn.index)
            outs.append(unknown or (distinct or {labels[0]}).pop())
        return outs

    def _is_zero_output(self, sub_jaxpr: SubJaxpr, i: int) -> bool:
        """Return whether output `i` of a body is known to be zero."""
        v, var = sub_jaxpr.outputs[i], sub_jaxpr.jaxpr.outvars[i]
        return is_zero(var) if v is None else v in self.zero_values


def _have_same_result_shapes(e: Equation, f: Equation) -> bool:
    """Return whether the results of both equations have the same shapes."""
    return all(shape_of(a) == shape_of(b) for a, b in zip(e.jaxpr_eqn.outvars, f.jaxpr_eqn.outvars, strict=True))


def _element_label(label: Label, loop: int) -> Label:
    """Return the label of one element of a scanned operand, in one trip of the loop `loop`."""
    if not isinstance(label, (PerExample, RowIndex, SortedIndex)):
        return label
    if label.dim == 0 or not isinstance(label, PerExample):
        return UnknownLabel(loop)
    return PerExample(label.dim - 1, label.scale)


def _stacked_label(label: Label) -> Label:
    """Return the label of a scan's stacked result, from its label in one trip."""
    match label:
        case PerExample(dim, scale):
            return PerExample(dim + 1, scale)
        case RowIndex(dim, at):
            return RowIndex(dim + 1, at)
        case SortedIndex():
            return UnknownLabel()
    return label


def constant_label(small: Any, large: Any, ratio: Fraction) -> Label:
    """Return the label of an array constant of both programs.

    An array with rows along the batch is labelled only if all its rows are equal.

    Args:
        small: The array in the small program.
        large: The array in the large program.
        ratio: Large batch size divided by small batch size.
    """
    if small is large:
        return CONSTANT
    if any(isinstance(x, Tracer) for x in (small, large)):
        return UnknownLabel()
    if jnp.issubdtype(small.dtype, jax.dtypes.extended):
        # NumPy has no array of random keys.
        small, large = map(jax.random.key_data, (small, large))
    a, b = np.asarray(small), np.asarray(large)
    if a.shape == b.shape:
        return CONSTANT if (a == b).all() or np.array_equal(a, b) else UnknownLabel()
    dim = growing_dim(a.shape, b.shape, ratio)
    if dim is None or not a.size:
        return UnknownLabel()
    first_row = np.take(a, [0], dim)
    return PerExample(dim) if (a == first_row).all() and (b == first_row).all() else UnknownLabel()


def _stops_per_row(condition: Label, carry: Sequence[Label]) -> bool:
    """Return whether each row of a loop stops on its own.

    Args:
        condition: Label of the condition. Under `jax.vmap` it has one number for each row; the rows are the first
            dimensions of all carries.
        carry: Labels of the carries.
    """
    return isinstance(condition, PerExample) and all(
        isinstance(x, PerExample) and x.dim == condition.dim for x in carry
    )


def _has_custom_vjp(e: Equation) -> bool:
    """Return whether `e` calls a function with a `jax.custom_vjp` rule."""
    return e.primitive.custom_derivative and "bwd" in e.params


def _differentiable_positions(values: Sequence[Any]) -> list[int]:
    """Return the positions of the floating-point values, which have gradients.

    Args:
        values: Objects with an aval.
    """
    return [i for i, v in enumerate(values) if jnp.issubdtype(v.aval.dtype, jnp.inexact)]


def _trace_vjp(e: Equation) -> Program:
    """Trace the gradient of an equation.

    The program maps (all operands, cotangents of the floating-point results) to cotangents of the floating-point
    operands.
    """
    ins, outs = _differentiable_positions(e.jaxpr_eqn.invars), _differentiable_positions(e.jaxpr_eqn.outvars)
    avals = [v.aval for v in (*e.jaxpr_eqn.invars, *(e.jaxpr_eqn.outvars[o] for o in outs))]

    def run(*arrays: Any) -> Any:
        operands, cotangents = arrays[: len(e.jaxpr_eqn.invars)], arrays[len(e.jaxpr_eqn.invars) :]

        # Other operands are closed over: `jax.vjp` gives integers float0 cotangents.
        def function(*floats: Any) -> list:
            primals = [*operands]
            for i, x in zip(ins, floats, strict=True):
                primals[i] = x
            results = bind(e.jaxpr_eqn, primals)
            return [results[o] for o in outs]

        return jax.vjp(function, *(operands[i] for i in ins))[1]([*cotangents])

    return Program(jax.make_jaxpr(run)(*avals))


def _gradient_label(label: Label) -> Label:
    """Return the label expected of the gradient of a value labelled `label`.

    Microbatches add up the gradients of parameters, so a constant has a sum over examples.
    """
    match label:
        case PerExample(dim, scale):
            # With values `scale` times as large, gradients are `scale` times smaller.
            return PerExample(dim, 1 / scale)
        case ExampleSum(scale):
            return size_label(1 / scale)
        case Constant():
            return ExampleSum()
    return UnknownLabel()
