"""What a program's values are made of, and what is made of them: the one place that follows values.

`Flow` follows them one by one, through bodies and loops. `made_of`, `needed` and `origins` look at one body and take
each of its equations as a whole, as somebody does who runs some of them and not others.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from functools import cached_property

from .ir import Equation, Program, Scope, Value
from .orders import Orders
from .trace import DIFFERENTIATED, GRADIENT, VALUE

Hop = tuple[Value, Equation | None]
Through = Callable[[Value, Value, Equation | None], bool]
"""(a value, the one that it was made from, by which equation; None: through the door of a body) -> go on?"""


class Flow:
    """`before[v]`: what `v` was made from, each with the equation that did it, None at the door of a body.

    `differentiated`: the equations that mark what gradient calls differentiate; `gradients`: what they give back,
    `values`: the scalars that they differentiate. `random`: equations that use a key.
    """

    def __init__(self, program: Program):
        self.program = program
        self.before: list[list[Hop]] = [[] for _ in program.avals]
        self.differentiated: list[Equation] = []
        self.gradients: set[Value] = set()
        self.values: set[Value] = set()
        self.random: list[Equation] = []
        for e in program.equations:
            for door in e.doors:
                pairs = [(a, b) for a, b, _ in (*door.into, *door.out)]
                self._doors([*pairs, *door.loop, *door.skip])
            if not e.doors:
                self._plain(e)

    def _doors(self, pairs: Iterable[tuple[Value | None, Value | None]]) -> None:
        for a, b in pairs:
            if a is not None and b is not None:
                self.before[b].append((a, None))

    def _plain(self, e: Equation) -> None:
        sources = [(a, e) for a in e.ins if a is not None]
        for out in e.outs:
            self.before[out].extend(sources)
        if e.primitive.names_value and e.params["name"] == DIFFERENTIATED:
            self.differentiated.append(e)
        if e.primitive.names_value and e.params["name"] == GRADIENT:
            self.gradients.update(e.outs)
        if e.primitive.names_value and e.params["name"] == VALUE:
            self.values.update(e.outs)
        if e.primitive.keyed:
            self.random.append(e)

    @cached_property
    def orders(self) -> Orders:
        """Which rows were sorted, and what became of them."""
        return Orders(self.program)

    @cached_property
    def after(self) -> list[list[Hop]]:
        """`after[v]`: what is made from `v`, as `before` has it the other way round."""
        hops: list[list[Hop]] = [[] for _ in self.before]
        for v, sources in enumerate(self.before):
            for w, e in sources:
                hops[w].append((v, e))
        return hops

    @cached_property
    def used(self) -> Set[Value]:
        """The values that are made for something: for an output, a branch, a trip or a side effect."""
        return self.back(results(self.program)).keys()

    def back(
        self, start: Iterable[Value | None], through: Through | None = None, limit: int | None = None
    ) -> dict[Value, int]:
        """The values that those of `start` are made of, they among them, each with how many equations were passed.

        Args:
            start: where to begin.
            through: whether to go on from a value to one that it was made from; None: always.
            limit: stop when so many values were met: time grows with them.
        """
        seen = {v: 0 for v in start if v is not None}
        todo = list(seen)
        for v in todo:
            for w, e in self.before[v]:
                if w not in seen and (through is None or through(v, w, e)):
                    seen[w] = seen[v] + (e is not None)
                    todo.append(w)
            if limit is not None and len(seen) > limit:
                break
        return seen

    def inputs_behind(self, start: Iterable[Value | None], through: Through | None = None) -> set[int]:
        """The inputs, by position, that the values of `start` are made of; `through` as of `back`."""
        met = self.back(start, through)
        return {i for i, v in enumerate(self.program.inputs) if v in met}

    def forward(self, start: Iterable[Value | None], through: Through | None = None) -> set[Value]:
        """The values that are made of those of `start`, they among them.

        Args:
            start: where to begin.
            through: as of `back`: (the value made, the one that it is made from, by which equation); None: always.
        """
        return closure(
            (v for v in start if v is not None),
            lambda v: (w for w, e in self.after[v] if through is None or through(w, v, e)),
        )


def closure(
    start: Iterable[Value], after: Callable[[Value], Iterable[Value]], among: Set[Value] | None = None
) -> set[Value]:
    """`start`, what comes `after` those (`among` certain values), and so on: for ways between values that are not all
    of a program's."""
    seen = set(start)
    todo = list(seen)
    for v in todo:
        new = {w for w in after(v) if w not in seen and (among is None or w in among)}
        seen |= new
        todo += new
    return seen


def by_alias(_v: Value, _w: Value, e: Equation | None) -> bool:
    """Only what is the same array in another form."""
    return e is None or e.primitive.alias


def by_no_product(_v: Value, _w: Value, e: Equation | None) -> bool:
    """Whatever is made of it, but by a product."""
    return e is None or not e.primitive.product


def results(program: Program) -> list[Value | None]:
    """What a step is run for: its outputs, what decides on branches and trips, and operands of side effects."""
    values = list(program.outputs)
    for e in program.equations:
        if e.is_cond:
            values.append(e.ins[0])
        elif e.is_while:
            values += e.doors[1].scope.outs
        elif e.eqn.effects and not e.doors:
            values += e.ins
    return values


def made_of(scope: Scope, start: Collection[Value]) -> set[Value]:
    """`start` and all values of a body that equations make which read one of them."""
    values = set(start)
    for e in scope.equations:
        if any(v in values for v in e.ins):
            values.update(e.outs)
    return values


def needed(scope: Scope, wanted: Collection[Value], known: Collection[Value]) -> set[int]:
    """The equations of a body that the values `wanted` depend on, not looking behind those `known`."""
    todo, indices = set(wanted), set()
    for e in reversed(scope.equations):
        inside = {v for door in e.doors for inner in door.scope.equations for v in inner.outs}
        if todo.isdisjoint(e.outs) and todo.isdisjoint(inside):
            continue
        indices.add(e.index)
        todo.update(v for v in e.ins if v is not None and v not in known)
    return indices


def origins(scope: Scope, roots: Collection[Value]) -> Mapping[Value, frozenset[Value]]:
    """Which of `roots` each value of a body is made of, not looking behind them; what is made of none is left out."""
    found = {v: frozenset([v]) for v in roots}
    for e in scope.equations:
        behind = origins_of(e, found)
        if behind:
            found |= {v: behind for v in e.outs if v not in roots}
    return found


def origins_of(e: Equation, origins: Mapping[Value, frozenset[Value]]) -> frozenset[Value]:
    """The origins of what an equation reads, together."""
    nothing = frozenset[Value]()
    return nothing.union(*(origins.get(v, nothing) for v in e.ins if v is not None))
