"""Identification of a step's loss among its outputs: the value of its gradient calls, else an output named loss."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
from jax.tree_util import DictKey, KeyPath

from .flow import Flow, follow_aliases
from .ir import Equation, Value
from .trace import Traced

MAX_VECTOR_SIZE = 2**16  # elements; the last element of a longer array is hardly meant as the loss


def find_loss(traced: Traced, flow: Flow, state: Collection[int]) -> int | None:
    """Return the output that is the loss, or whose last element is; None where there is none.

    A scalar comes first, else a vector (an epoch in one scan). The value of a gradient call comes first: as it is,
    scaled, or in a mean or a sum of several. Among several outputs an output named loss wins, then a total. Where no
    output comes from such a value: an output named loss; else an output whose name contains the word and that is no
    part of the differentiated value; else the only number, where it may be a loss; else a number made of the value.

    Args:
        traced: The step.
        flow: Dataflow of its program.
        state: Outputs that are the next value of an input.
    """
    avals, input_paths = traced.closed.out_avals, set(traced.in_paths)
    names = [_name(path) for path in traced.out_paths]
    floats = [o for o, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.floating)]
    scalars = [o for o in floats if not avals[o].shape]
    vectors = [o for o in floats if 0 < len(avals[o].shape) <= 2 and 0 < avals[o].size <= MAX_VECTOR_SIZE]
    relations = _LossRelations(flow)
    for outputs in (scalars, vectors):
        value_by_output = {o: v for o in outputs if (v := flow.program.outputs[o]) is not None}
        values = {o: v for o, v in value_by_output.items() if o not in state and traced.out_paths[o] not in input_paths}
        related = [o for o, v in values.items() if relations.is_related(v)]
        # The loss may be among the outputs matched as state: a state may store the loss, or have its shape.
        related = related or [o for o, v in value_by_output.items() if v in relations.scaled_values]
        if related:
            return min(related, key=lambda o: (*_rank(names[o]), value_by_output[o] not in relations.aliases, o))
        if (named := next((o for o in values if names[o] == "loss"), None)) is not None:
            return named
        named_losses = [o for o, v in values.items() if "loss" in names[o] and v not in relations.ancestors]
        if named_losses:
            return min(named_losses, key=lambda o: (*_rank(names[o]), o))
        if len(values) == 1 and not names[next(iter(values))] and relations.may_be_loss(*values.values()):
            return next(iter(values))
        derived = next((o for o, v in values.items() if v in relations.descendants and not names[o]), None)
        if derived is not None:
            return derived
    return None


@dataclass(frozen=True)
class _LossRelations:
    """Relations of a step's values to the scalars differentiated by its gradient calls.

    Attributes:
        flow: Dataflow of the step.
    """

    flow: Flow

    @cached_property
    def aliases(self) -> set[Value]:
        """The differentiated scalars in any form."""
        return self.flow.descendants(self.flow.loss_values, follow_aliases)

    @cached_property
    def scaled_values(self) -> set[Value]:
        """The differentiated scalars times or over another number, such as a loss scale."""
        return self.flow.descendants(self.flow.loss_values, _follow_scalings)

    @cached_property
    def linear_values(self) -> set[Value]:
        """Values linear in the differentiated scalars: scaled, a mean over microbatches or devices, a sum."""
        return self.flow.descendants(self.flow.loss_values, _follow_linear)

    @cached_property
    def unscaled_values(self) -> set[Value]:
        """Values that depend on weights and become a differentiated scalar by a scale alone (a loss scale)."""
        return self.flow.ancestors(self.flow.loss_values, _follow_scalings).keys() & self._weight_descendants

    @cached_property
    def descendants(self) -> set[Value]:
        """All values made from the differentiated scalars."""
        return self.flow.descendants(self.flow.loss_values)

    @cached_property
    def ancestors(self) -> Collection[Value]:
        """All values from which the differentiated scalars are made."""
        return self.flow.ancestors(self.flow.loss_values).keys()

    @cached_property
    def _weight_descendants(self) -> set[Value]:
        """Values made from the arguments of gradient calls, through numbers with derivatives."""
        inputs = self.flow.program.inputs
        marked = [v for e in self.flow.differentiation_marks for v in e.operands]
        start = {inputs[i] for i in self.flow.input_ancestors(marked, follow_aliases)}
        start |= {v for e in self.flow.differentiation_marks for v in e.results}
        avals = self.flow.program.avals
        return self.flow.descendants(start, lambda v, *_: jnp.issubdtype(avals[v].dtype, jnp.inexact))

    @cached_property
    def _gradient_descendants(self) -> set[Value]:
        """Values made from gradients."""
        return self.flow.descendants(self.flow.gradients)

    def is_related(self, value: Value) -> bool:
        """Return whether `value` is linear in a differentiated scalar, or becomes such a scalar by a scale."""
        return value in self.linear_values or value in self.unscaled_values

    def may_be_loss(self, value: Value) -> bool:
        """Return whether a number may be a loss, by its origin; any number may in a step that takes no gradient."""
        alone = not self.flow.gradients and not self.flow.loss_values
        return (
            alone
            or value in self.descendants
            or (value in self._weight_descendants and value not in self._gradient_descendants)
        )


def _follow_linear(v: Value, w: Value, e: Equation | None) -> bool:
    """Return whether an edge leads to a value linear in the value read. An edge filter."""
    if e is None or follow_aliases(v, w, e) or _is_scaling_of(w, e):
        return True
    does = e.primitive
    summed = does.is_elementwise or does.is_combinable
    return does.collective_output is not None or (
        summed and does.linear_operands is not None and w in e.operands[does.linear_operands]
    )


def _follow_scalings(v: Value, w: Value, e: Equation | None) -> bool:
    """Return whether an edge leads to the value read times or over another number. An edge filter."""
    return follow_aliases(v, w, e) or (e is not None and _is_scaling_of(w, e))


def _is_scaling_of(w: Value, e: Equation) -> bool:
    """Return whether an equation multiplies or divides `w` by another value."""
    does = e.primitive
    if does.bilinear:
        return e.operands.count(w) == 1  # w * w is no scaling
    return does.is_elementwise and does.linear_operands is not None and [*e.operands[does.linear_operands]] == [w]


def _rank(name: str) -> tuple[bool, bool]:
    """Return the sort key of an output's name: names equal to loss first, then names with the word total."""
    return name != "loss", "total" not in name


def _name(path: KeyPath) -> str:
    """Return the innermost name in an output's path, in lower case; empty for the result of a function."""
    keys = [key.key if isinstance(key, DictKey) else getattr(key, "name", None) for key in path[1:]]
    return next((key.lower() for key in reversed(keys) if isinstance(key, str)), "")
