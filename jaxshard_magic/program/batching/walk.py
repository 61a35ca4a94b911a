"""The walk over two traces of one function: what each value's label is, through bodies, branches and loops."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..indices import made_positive
from ..ir import Door, Equation, Program, Scope, Value
from ..order_states import Sorted
from ..orders import Orders
from ..primitives import scan_counts, shape_of
from ..primitives.primitive import Kind
from . import ordered
from .examples import CONSTANT, Label, Ordered, Places, Rows, Size, Sum, Unknown, fits, literal, varying
from .pulled_back import gradient_of, has_own_gradient, moving, pulled_back
from .rules import lost
from .site import Lost, Site, factor, is_zero, same_form

OPAQUE = "jaxshard_gradient"  # a gradient call that is not yet taken: nothing is known of what it gives
_TRIPS = 3  # through a loop, after which what still changes is unknown: loops in loops multiply them


@dataclass(eq=False)
class Walk:
    """One pass over two traces of a function.

    `full`: values that may be taken for the whole batch; `norms`: those that were. `begins`: equations at which
    something became unknown. `scales[equation][position]`: what operands are
    multiplied by; `draws`: dimensions in which draws are cut to rows. `zeros`: values known to be zero; `rigid`: inside
    a body that runs as it is. `orders`: of both programs.
    """

    small: Program
    large: Program
    ratio: Fraction
    full: frozenset[Value]
    orders: tuple[Orders, Orders]
    of: list[Label] = field(init=False)
    begins: set[int] = field(default_factory=set)
    scales: dict[int, dict[int, Fraction]] = field(default_factory=dict)
    draws: dict[int, int] = field(default_factory=dict)
    norms: dict[Value, Value] = field(default_factory=dict)
    zeros: set[Value] = field(default_factory=set)
    rigid: bool = False
    _mixing: dict[Any, bool] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.of = [Unknown()] * len(self.small.avals)

    def outputs(self, ins: Sequence[Label]) -> list[Label]:
        """The labels of the outputs for inputs with the labels `ins`."""
        outs = self.scope(self.small.top, self.large.top, ins)
        return [self._ended(v, x) for v, x in zip(self.small.outputs, outs, strict=True)]

    def labels(self) -> tuple[Label, ...]:
        """The label of every value."""
        return tuple(self._ended(v, x) for v, x in enumerate(self.of))

    def _ended(self, v: Value | None, label: Label) -> Label:
        """The label outside of the walk, where row numbers and sorted rows are nobody's."""
        hidden = isinstance(label, (Places, Ordered)) or (
            isinstance(label, Rows) and isinstance(self.orders[0].of.get(v), Sorted)  # pyright: ignore[reportArgumentType]
        )
        return Unknown(self.small.maker[v].index) if hidden and v in self.small.maker else label

    def scope(self, small: Scope, large: Scope, ins: Sequence[Label]) -> list[Label]:
        """The labels of what a body gives for operands with the labels `ins`."""
        for v, label in zip(small.ins, ins, strict=True):
            self.of[v] = label
        for v, a, b in zip(small.const_values, small.consts, large.consts, strict=True):
            self.of[v] = held(a, b, self.ratio)
        for e, f in zip(small.equations, large.equations, strict=True):
            self.equation(e, f)
        outs = zip(small.outs, small.jaxpr.outvars, large.jaxpr.outvars, strict=True)
        return [literal(a.val, b.val) if v is None else self.of[v] for v, a, b in outs]

    def equation(self, e: Equation, f: Equation) -> None:
        operands = zip(e.ins, e.eqn.invars, f.eqn.invars, strict=True)
        labels = [literal(a.val, b.val) if v is None else self.of[v] for v, a, b in operands]  # pyright: ignore[reportAttributeAccessIssue]
        site = Site(e, f, labels, self.ratio, self.rigid, self.zeros)
        self.begins.discard(e.index)
        self.draws.pop(e.index, None)
        try:
            results = self.results(site)
        except Lost:
            results = [Unknown(e.index)] * len(e.outs)
        for v, label, a, b in zip(e.outs, results, e.eqn.outvars, f.eqn.outvars, strict=True):
            label = label if fits(label, shape_of(a), shape_of(b), self.ratio) else Unknown(e.index)
            if v in self.full and isinstance(label, (Sum, Unknown)):
                self.norms[v], label = v, CONSTANT
            self.of[v] = label
            if label == Unknown(e.index):
                self.begins.add(e.index)
        self.scales[e.index] = site.scales
        if site.draw is not None:
            self.draws[e.index] = site.draw
        self._mark(e.outs, [e.primitive.alias and site.zero(0)] * len(e.outs))

    def _mark(self, values: Sequence[Value], zero: Sequence[bool]) -> None:
        for v, added in zip(values, zero, strict=True):
            (self.zeros.add if added else self.zeros.discard)(v)

    def results(self, site: Site) -> list[Label]:
        """The labels of the results of one equation."""
        e, labels = site.e, site.labels
        if e.doors:
            return self.through(site)
        if e.name == OPAQUE:
            return [Unknown()] * len(e.outs)
        if e.primitive.kind is Kind.EACH:
            return labels
        if self.orders[0].takes_part(e) and (same := ordered.known(site, *self.orders)) is not None:
            return same
        if (
            e.name == "select_n"
            and not self.orders[0].takes_part(e)
            and made_positive(self.small, e)
            and isinstance(labels[1], Places)
        ):
            return [labels[1]]
        unknown = next((x for x in labels if isinstance(x, Unknown)), None)
        if unknown is not None:
            return [unknown if unknown.cause is not None else Unknown()] * len(e.outs)
        if all(x == CONSTANT for x in labels) and _alike(e, site.f):
            if not site.same_params():
                raise Lost
            return [CONSTANT] * len(e.outs)
        if self.orders[0].takes_part(e):
            return ordered.follow(site, *self.orders)
        found = (e.primitive.follow or lost)(site)
        return found if isinstance(found, list) else [found] * len(e.outs)

    def through(self, site: Site) -> list[Label]:
        """The labels of the results of an equation that runs bodies."""
        e, doors = site.e, list(zip(site.e.doors, site.f.doors, strict=True))
        if e.is_scan:
            return self._scan(site, *doors[0])
        if e.is_while:
            return self._while(site, doors)
        if e.is_cond:
            return self._cond(site, doors)
        ins, rigid = site.labels, self.rigid
        if e.primitive.custom:
            ins = [site.exact(i) if isinstance(x, (Rows, Size)) else x for i, x in enumerate(site.labels)]
            self.rigid = True
        self._mark(doors[0][0].scope.ins, [site.zero(i) for i in range(len(ins))])
        try:
            outs = self.scope(doors[0][0].scope, doors[0][1].scope, ins)
        finally:
            self.rigid = rigid
        if not rigid and has_own_gradient(e) and self._mixes_gradients(site, ins, outs):
            raise Lost
        return outs

    def _mixes_gradients(self, site: Site, ins: Sequence[Label], outs: Sequence[Label]) -> bool:
        """Return whether the rule for the gradient of an equation gives microbatches other than parts of what it gives
        the whole batch. False where it cannot be followed."""
        key = site.e.index, (*ins, *outs)
        if key not in self._mixing:
            self._mixing[key] = self._gives_other_than_parts(site, ins, outs)
        return self._mixing[key]

    def _gives_other_than_parts(self, site: Site, ins: Sequence[Label], outs: Sequence[Label]) -> bool:
        if any(isinstance(x, (Places, Ordered)) for x in ins) or self.orders[0].takes_part(site.e):
            return False  # the rule alone does not show in which order these are
        if any(isinstance(x, Unknown) for x in (*ins, *outs)):
            return False  # the function itself is not followed, and tells where
        small, large = pulled_back(site.e), pulled_back(site.f)
        if not same_form(small, large):
            return False
        walk = Walk(small, large, self.ratio, frozenset(), (Orders(small), Orders(large)), rigid=True)
        given = [gradient_of(outs[o]) for o in moving(site.e.eqn.outvars)]
        found = walk.outputs([*ins, *given])
        if any(small.equations[i].doors or small.equations[i].primitive.follow is None for i in walk.begins):
            return False
        each = zip(moving(site.e.eqn.invars), found, small.outputs, small.closed.jaxpr.outvars, strict=True)
        return any(
            got != gradient_of(ins[i])
            and not (got == CONSTANT and (is_zero(var) if v is None else v in walk.zeros))
            for i, got, v, var in each
        )

    def _scan(self, site: Site, door: Door, other: Door) -> list[Label]:
        n, k = scan_counts(site.params)
        if site.params["length"] != site.f.params["length"]:
            raise Lost
        fixed, xs = site.labels[:n], [_inside(x, site.e.index) for x in site.labels[n + k :]]

        def trip(carry: list[Label]) -> tuple[list[Label], list[Label]]:
            outs = self.scope(door.scope, other.scope, [*fixed, *carry, *xs])
            return outs[:k], outs[k:]

        carry, ys = self._carried(site, n, door.scope.ins[n : n + k], trip)
        return [*carry, *map(_outside, ys)]

    def _while(self, site: Site, doors: list[tuple[Door, Door]]) -> list[Label]:
        (body, other), (test, tested) = doors
        of_test, fixed = site.params["cond_nconsts"], site.params["body_nconsts"]
        start = of_test + fixed

        def trip(carry: list[Label]) -> tuple[list[Label], list[Label]]:
            again = self.scope(test.scope, tested.scope, [*site.labels[:of_test], *carry])
            return self.scope(body.scope, other.scope, [*site.labels[of_test:start], *carry]), again

        carry, (again,) = self._carried(site, start, body.scope.ins[start - of_test :], trip)
        if again != CONSTANT and not _row_by_row(again, carry):
            raise Lost
        return carry

    def _carried(
        self,
        site: Site,
        start: int,
        inner: Sequence[Value],
        trip: Callable[[list[Label]], tuple[list[Label], list[Label]]],
    ) -> tuple[list[Label], list[Label]]:
        """The labels that carried values keep from trip to trip, and what else a trip gives: the least fixpoint, from
        the labels of the loop's operands from `start` on; `inner`: the values in the body."""
        positions = range(start, start + len(inner))
        carry = [site.labels[i] for i in positions]
        zero = [site.zero(i) for i in positions]
        self._mark(inner, zero)  # in the first trip they are
        for trips in itertools.count(1):
            outs, rest = trip(carry)
            site.scales.clear()
            ended = [self._met(site, i, out) for i, out in zip(positions, outs, strict=True)]
            for i, (old, new) in enumerate(zip(carry, ended, strict=True)):
                if isinstance(old, Unknown):
                    ended[i] = old  # whatever made it unknown now: else a loop in a loop never ends
                elif old != new and trips > _TRIPS:
                    ended[i] = Unknown(site.e.index)
            if ended == carry and not any(zero):
                break
            zero = [False] * len(inner)
            self._mark(inner, zero)
            carry = ended
        return carry, rest

    def _met(self, site: Site, i: int, out: Label) -> Label:
        """The label of a carried value that enters as operand `i` and comes out of a trip as `out`."""
        entry = site.labels[i]
        if entry == out or isinstance(entry, Unknown) or isinstance(out, Unknown):
            return entry if isinstance(entry, Unknown) else out
        try:
            if not site.zero(i):
                site.scale(i, factor(entry, out, self.ratio))
        except Lost:
            return Unknown(site.e.index)
        return out

    def _cond(self, site: Site, doors: list[tuple[Door, Door]]) -> list[Label]:
        if isinstance(site.labels[0], Unknown):
            return [site.labels[0]] * len(site.e.outs)
        if site.exact(0) != CONSTANT:
            raise Lost
        branches = [self.scope(a.scope, b.scope, site.labels[1:]) for a, b in doors]
        outs = []
        for i, labels in enumerate(zip(*branches, strict=True)):
            unknown = next((x for x in labels if isinstance(x, Unknown)), None)
            distinct = {
                x for x, (door, _) in zip(labels, doors, strict=True) if not self._zero_out(door.scope, i)
            }
            outs.append(
                unknown or (distinct or {labels[0]}).pop() if len(distinct) < 2 else Unknown(site.e.index)
            )
        return outs

    def _zero_out(self, scope: Scope, i: int) -> bool:
        v, var = scope.outs[i], scope.jaxpr.outvars[i]
        return is_zero(var) if v is None else v in self.zeros


def _alike(e: Equation, f: Equation) -> bool:
    """Have both results of the same shapes?"""
    return all(shape_of(a) == shape_of(b) for a, b in zip(e.eqn.outvars, f.eqn.outvars, strict=True))


def _inside(label: Label, loop: int) -> Label:
    """The label in one trip of a loop of what the loop steps over."""
    if not isinstance(label, (Rows, Places, Ordered)):
        return label
    if label.dim == 0 or not isinstance(label, Rows):
        return Unknown(loop)
    return Rows(label.dim - 1, label.scale)


def _outside(label: Label) -> Label:
    """The label of a loop's stacked results."""
    match label:
        case Rows(dim, scale):
            return Rows(dim + 1, scale)
        case Places(dim, at):
            return Places(dim + 1, at)
        case Ordered():
            return Unknown()
    return label


def held(small: Any, large: Any, ratio: Fraction) -> Label:
    """The label of an array that the programs hold; along a batch, only one that is the same for all examples."""
    if small is large:
        return CONSTANT
    if any(isinstance(x, Tracer) for x in (small, large)):
        return Unknown()
    if jnp.issubdtype(small.dtype, jax.dtypes.extended):
        small, large = map(jax.random.key_data, (small, large))
    a, b = np.asarray(small), np.asarray(large)
    if a.shape == b.shape:
        return CONSTANT if (a == b).all() or np.array_equal(a, b) else Unknown()
    dim = varying(a.shape, b.shape, ratio)
    if dim is None or not a.size:
        return Unknown()
    one = np.take(a, [0], dim)
    return Rows(dim) if (a == one).all() and (b == one).all() else Unknown()


def _row_by_row(again: Label, carry: Sequence[Label]) -> bool:
    """Does each row of a loop stop for itself, whatever the others do? `again`: the condition, under `jax.vmap` one for
    each row, which are the first dimensions of all that is carried."""
    return isinstance(again, Rows) and all(isinstance(x, Rows) and x.dim == again.dim for x in carry)
