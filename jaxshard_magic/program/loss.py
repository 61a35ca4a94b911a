"""Which output of a step is its loss: what its gradient calls differentiate, else what the user calls so."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
from jax.tree_util import DictKey, KeyPath

from .flow import Flow, by_alias
from .ir import Equation, Value
from .trace import Traced

MOST = 2**16  # elements; of a longer array nobody means the last one


def find_loss(traced: Traced, flow: Flow, state: Collection[int]) -> int | None:
    """Return the output that is the loss, or whose last element is: a scalar, else a vector (an epoch in one scan).

    The value of a gradient call comes first, as it is, scaled, or in a mean or a sum of several; of these what is named
    loss, then a total. Where none is an output, an output that is named loss, else whose name has the word and that is
    not a part of what is differentiated; else the only number, where it may be a loss; else what is made of the value.

    Args:
        traced: the step.
        flow: of its program.
        state: the outputs that are the next value of an input.
    """
    avals, written = traced.closed.out_avals, set(traced.in_paths)
    names = [_name(path) for path in traced.out_paths]
    floats = [o for o, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.floating)]
    scalars = [o for o in floats if not avals[o].shape]
    vectors = [o for o in floats if 0 < len(avals[o].shape) <= 2 and 0 < avals[o].size <= MOST]
    known = _Losses(flow)
    for outputs in (scalars, vectors):
        every = {o: v for o in outputs if (v := flow.program.outputs[o]) is not None}
        values = {o: v for o, v in every.items() if o not in state and traced.out_paths[o] not in written}
        found = [o for o, v in values.items() if known.related(v)]
        found = found or [
            o for o, v in every.items() if v in known.times
        ]  # the state may keep it, or look like it
        if found:
            return min(found, key=lambda o: (*_rank(names[o]), every[o] not in known.same, o))
        if (named := next((o for o in values if names[o] == "loss"), None)) is not None:
            return named
        whole = [o for o, v in values.items() if "loss" in names[o] and v not in known.parts]
        if whole:
            return min(whole, key=lambda o: (*_rank(names[o]), o))
        if len(values) == 1 and not names[next(iter(values))] and known.may_be(*values.values()):
            return next(iter(values))
        made = next((o for o, v in values.items() if v in known.made and not names[o]), None)
        if made is not None:
            return made
    return None


@dataclass(frozen=True)
class _Losses:
    """What the values of a step have to do with those that its gradient calls differentiate."""

    flow: Flow

    @cached_property
    def same(self) -> set[Value]:
        """These values in any form."""
        return self.flow.forward(self.flow.values, by_alias)

    @cached_property
    def times(self) -> set[Value]:
        """These values times or over another number, such as a loss scale."""
        return self.flow.forward(self.flow.values, _by_scale)

    @cached_property
    def sums(self) -> set[Value]:
        """What is linear in them: scaled, a mean over microbatches or devices, the sum of several losses."""
        return self.flow.forward(self.flow.values, _linear)

    @cached_property
    def scaled(self) -> set[Value]:
        """What they are made of by a scale alone, as under a loss scale, and that depends on what is differentiated."""
        return self.flow.back(self.flow.values, _by_scale).keys() & self._of_weights

    @cached_property
    def made(self) -> set[Value]:
        """All that is made of them."""
        return self.flow.forward(self.flow.values)

    @cached_property
    def parts(self) -> Collection[Value]:
        """All that they are made of."""
        return self.flow.back(self.flow.values).keys()

    @cached_property
    def _of_weights(self) -> set[Value]:
        """What is made of what gradient calls differentiate, through numbers that have derivatives."""
        inputs = self.flow.program.inputs
        marked = [v for e in self.flow.differentiated for v in e.ins]
        start = {inputs[i] for i in self.flow.inputs_behind(marked, by_alias)}
        start |= {v for e in self.flow.differentiated for v in e.outs}
        avals = self.flow.program.avals
        return self.flow.forward(start, lambda v, *_: jnp.issubdtype(avals[v].dtype, jnp.inexact))

    @cached_property
    def _late(self) -> set[Value]:
        """What is made of gradients."""
        return self.flow.forward(self.flow.gradients)

    def related(self, value: Value) -> bool:
        return value in self.sums or value in self.scaled

    def may_be(self, value: Value) -> bool:
        """Whether a number may be a loss by what it is made of: any may in a step that takes no gradient."""
        alone = not self.flow.gradients and not self.flow.values
        return alone or value in self.made or (value in self._of_weights and value not in self._late)


def _linear(v: Value, w: Value, e: Equation | None) -> bool:
    """Whether a value is linear in one that it is made from."""
    if e is None or by_alias(v, w, e) or _scales(w, e):
        return True
    does = e.primitive
    summed = does.elementwise or does.reduces
    return does.across is not None or (summed and does.linear is not None and w in e.ins[does.linear])


def _by_scale(v: Value, w: Value, e: Equation | None) -> bool:
    """Whether a value is one that it is made from, times or over another number."""
    return by_alias(v, w, e) or (e is not None and _scales(w, e))


def _scales(w: Value, e: Equation) -> bool:
    """Whether an equation multiplies or divides a value by another."""
    does = e.primitive
    if does.in_each:
        return e.ins.count(w) == 1
    return does.elementwise and does.linear is not None and [*e.ins[does.linear]] == [w]


def _rank(name: str) -> tuple[bool, bool]:
    """The sooner the better: what is called loss, then a total."""
    return name != "loss", "total" not in name


def _name(path: KeyPath) -> str:
    """The innermost name in an output's path, in lower case; the result of a function has none."""
    keys = [key.key if isinstance(key, DictKey) else getattr(key, "name", None) for key in path[1:]]
    return next((key.lower() for key in reversed(keys) if isinstance(key, str)), "")
