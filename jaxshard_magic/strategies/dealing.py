"""Which of a step's values have their positions as a causal ring deals them out, so that these move once and not at
every attention.

What is made of dealt positions by equations that treat all places alike is dealt, too (`program/permuted.py`). From an
attention on that is so up to sums over positions, which are the same in any order, and to the step's outputs, which are
put back. Before it, it is so from where positions are dealt out: the earlier the fewer the bytes, at best the tokens
themselves. A step in which something between two attentions needs positions in their order is left as it is.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..plan import Sent
from ..program.ir import Equation, Value
from ..program.permuted import Place, follow, in_order, together
from ..program.unionfind import UnionFind
from .deals import has_parts, sent
from .layout import Layout
from .rings import dealt_by_itself, in_dealt_order, ring, rings, there


@dataclass(frozen=True, eq=False)
class Dealing:
    """`attentions`: the rings, by index, that find their positions dealt out and leave them so. `places`: where values
    have positions. `deals`, `puts_back`: the operands, by equation and place, that were made in order and are read
    dealt out, and the other way round; the latter are gradients and the like, whole on every device. `outputs`: those
    of the step, by number, that are put back. `by_parts`: the values that go from device to device."""

    attentions: frozenset[int] = frozenset()
    places: Mapping[Value, Place] = field(default_factory=dict)
    deals: Mapping[int, frozenset[int]] = field(default_factory=dict)
    puts_back: Mapping[int, frozenset[int]] = field(default_factory=dict)
    outputs: frozenset[int] = frozenset()
    by_parts: frozenset[Value] = frozenset()

    def sent(self, layout: Layout) -> Iterator[tuple[int | None, Sent]]:
        """What it sends, by the equation that reads it; None for what leaves the step."""
        seen = set[tuple[int | None, Value]]()
        for i in sorted(self.deals):
            e = layout.program.equations[i]
            for k in sorted(self.deals[i]):
                v, body = e.ins[k], e.outer and e.outer.index
                if v is not None and (body, v) not in seen:
                    seen.add((body, v))
                    moves = sent(layout, v, self.places[v], e.trips, by_parts=v in self.by_parts)
                    yield from ((i, move) for move in moves)
        for v in (layout.program.outputs[o] for o in sorted(self.outputs)):
            if v is not None:
                moves = sent(layout, v, self.places[v], 1, by_parts=v in self.by_parts)
                yield from ((None, move) for move in moves)


def find_dealing(layout: Layout, kept: Collection[Value] = ()) -> Dealing:
    """How a step's positions are dealt out once for all its rings, where that can be and sends less than each does by
    itself. `kept`: values that are no arrays of their shape, and so stay as they are."""
    found = rings(layout)
    brought = there(layout, found)
    before = sum(size * e.trips for e in found for size in dealt_by_itself(layout, e, brought))
    able = [e for e in found if in_dealt_order(ring(layout, e)) is not None]
    if not before or not able:
        return Dealing()
    dealing = _Forms(layout, able, _places(layout, able), kept).dealing()
    dealing = replace(dealing, by_parts=frozenset(_by_parts(layout, dealing, able)))
    after = sum(move.bytes * move.count for _, move in dealing.sent(layout))
    return dealing if dealing.attentions and after < before else Dealing()


def _by_parts(layout: Layout, dealing: Dealing, members: Collection[Equation]) -> Iterator[Value]:
    """Values that go from device to device. XLA for the CPU takes that for a ring's turn, if it can run beside it:
    there only what all rings wait for goes so."""
    program, readers = layout.program, defaultdict[Value | None, list[Equation]](list)
    for i, ks in dealing.deals.items():
        for k in ks:
            readers[program.equations[i].ins[k]].append(program.equations[i])
    for v in {*readers, *(program.outputs[o] for o in dealing.outputs)}:
        if v is None or not has_parts(layout, v, dealing.places[v]):
            continue
        if layout.simulated:
            after = layout.flow.forward([v])
            if any(map(_in_a_loop, readers[v])) or any(e.ins[0] not in after for e in members):
                continue
        yield v


def _in_a_loop(e: Equation) -> bool:
    return e.outer is not None and (e.outer.is_control_flow or _in_a_loop(e.outer))


def _places(layout: Layout, rings: Collection[Equation]) -> dict[Value, Place]:
    """Where values have the positions of the rings, as far as anything leads there from their operands."""
    program, members = layout.program, {e.index for e in rings}
    touching: dict[Value, list[tuple[Equation, int]]] = defaultdict(list)
    doors: dict[Value, list[tuple[Value, int]]] = defaultdict(list)
    for e in program.equations:
        for k, v in enumerate((*e.ins, *e.outs)):
            if v is not None and not e.doors and not in_order(e, k):
                touching[v].append((e, k))
        for a, b, lead in _pairs(e):
            doors[a].append((b, -lead))
            doors[b].append((a, lead))
    places: dict[Value, Place] = {}
    todo: list[Value] = []

    def put(v: Value | None, place: Place) -> None:
        if v is not None and v not in places and place.dim >= 0:
            places[v] = place
            todo.append(v)

    for e in rings:
        assert e.ins[0] is not None
        shape = program.shapes[e.ins[0]]
        put(e.ins[0], Place(len(shape) - 2, shape[-2]))
    for v in todo:
        for e, slot in touching[v]:
            if e.name.startswith("attention") and e.index not in members:
                continue
            if (found := follow(e, slot, places[v])) is not None:
                values = (*e.ins, *e.outs)
                for k, place in found.items():
                    put(values[k], place)
        for w, shift in doors[v]:
            put(w, replace(places[v], dim=places[v].dim + shift))
    return places


def _pairs(e: Equation) -> Iterator[tuple[Value, Value, int]]:
    """What is one value on both sides of a door, or in two trips: outer, inner, and whether a loop steps over it."""
    yield from _entering(e)
    yield from _tied(e)


def _entering(e: Equation) -> Iterator[tuple[Value, Value, int]]:
    """The pairs of `_pairs` of what goes into a body."""
    for door in e.doors:
        yield from ((a, b, lead) for a, b, lead in door.into if a is not None)


def _tied(e: Equation) -> Iterator[tuple[Value, Value, int]]:
    """The pairs of `_pairs` between which nothing can be put in another order."""
    for door in e.doors:
        yield from ((y, x, lead) for x, y, lead in door.out if x is not None)
        yield from ((a, b, 0) for a, b in (*door.loop, *door.skip) if a is not None and b is not None)


class _Refused(Exception):
    """A value is needed in another order than it can have."""


class _Forms:
    """Which values are dealt out: `dealt`, and which are in order: `ordered`, by what they have to have in common."""

    def __init__(
        self,
        layout: Layout,
        rings: Collection[Equation],
        places: dict[Value, Place],
        kept: Collection[Value],
    ):
        self.layout, self.program, self.places = layout, layout.program, places
        self.rings = frozenset(e.index for e in rings)
        self.late = layout.flow.forward(v for e in rings for v in e.outs)
        self.equations = [e for e in self.program.equations if not e.doors and self._touches(e)]
        self.bodies = [e for e in self.program.equations if e.doors]
        self.alike = {e.index for e in self.equations if self._alike(e)}
        self.form: dict[int, bool] = {}  # of equations that treat all places alike: read and made dealt out?
        self.sets = UnionFind(len(self.program.avals))
        self.ordered, self.dealt = set[int](), set[int]()
        state = [self.program.inputs[i] for i in layout.roles.stored]
        self.stored = {c for v in state for c in layout.storage.of(v)}
        self.kept = {v for v in kept if v in places}

    def dealing(self) -> Dealing:
        if not self.rings <= self.alike:
            return Dealing()
        try:
            return self._dealing()
        except _Refused:
            return Dealing()

    def _dealing(self) -> Dealing:
        self._tie()
        for e in self.equations:
            if e.index in self.alike and not self.late.isdisjoint((*e.ins, *e.outs)):
                self.form[e.index] = not self._of_state(e)
        self._needed_in_order()
        self._needed_dealt()
        self._handed_in()
        return self._checked()

    # What is to be treated how.

    def _touches(self, e: Equation) -> bool:
        return any(v in self.places for v in (*e.ins, *e.outs))

    def _alike(self, e: Equation) -> bool:
        """Does an equation treat the places of its operands and results alike, if these are what is dealt out?"""
        found = {
            k: self.places[v]
            for k, v in enumerate((*e.ins, *e.outs))
            if v in self.places and not in_order(e, k)
        }
        if e.name.startswith("attention") and e.index not in self.rings:
            return False
        return bool(found) and together(e, found)

    def _of_state(self, e: Equation) -> bool:
        """Does an equation work on parameters, their gradients or moments?"""
        storage, touched = self.layout.storage, [v for v in (*e.ins, *e.outs) if v in self.places]
        return not storage.batchy_equation(e) and any(
            storage.of(v)[self.places[v].dim] in self.stored for v in touched
        )

    def _same(self, a: Value, b: Value, lead: int) -> bool:
        """Do both sides of a door have the same places, or neither any?"""
        outer, inner = self.places.get(a), self.places.get(b)
        if outer is None or inner is None:
            return outer is inner
        return replace(inner, dim=inner.dim + lead) == outer

    def _tie(self) -> None:
        """Of one form are: what loops hand on, what bodies give, what several bodies get of one operand."""
        self.entries: dict[Value, list[Value]] = defaultdict(list)
        for e in self.bodies:
            for a, b, lead in _tied(e):
                if self._same(a, b, lead):
                    self.sets.union(a, b)
            entered: dict[Value, Value] = {}
            for a, b, lead in _entering(e):
                if self._same(a, b, lead):
                    self.sets.union(b, entered.setdefault(a, b))
                    self.entries[b].append(a)
        self.members: dict[int, list[Value]] = defaultdict(list)
        for v in self.places:
            self.members[self.sets.find(v)].append(v)

    def _needed_in_order(self) -> None:
        """What comes in order, and what is made for those who need it so."""
        made = {v for e in self.equations for v in e.outs} | {
            v for e in self.bodies for door in e.doors for v in (*e.outs, *door.scope.ins)
        }
        for v in self.places:
            if v not in made:
                self._order(v)  # an input of the step, or a constant
        for e in self.equations:
            if e.index not in self.alike:
                self._order(*e.outs, *(v for v in e.ins if v not in self.late))
            else:
                self._order(*(v for k, v in enumerate(e.ins) if in_order(e, k)))
                if self.form.get(e.index) is False:
                    self._order(*e.outs)
        for e in self.bodies:
            for a, b, lead in _pairs(e):
                if not self._same(a, b, lead):
                    self._order(b, *(v for v in (a,) if v not in self.late))
        early = (v for v in self.program.outputs if v not in self.late)
        self._order(*early, *self.kept)
        resting = (v for v in self.places if v not in self.late and not self.layout.batchy(v))
        self._order(*(v for v in resting if any(self.layout.at_rest(v))))

    def _order(self, *values: Value | None) -> None:
        """Values are made in order, and so is what these are made of, as far as no ring is behind it."""
        todo = [v for v in values if v in self.places]
        for v in todo:
            if (root := self.sets.find(v)) in self.ordered:
                continue
            self.ordered.add(root)
            for w in self.members[root]:
                e = self.program.maker.get(w)
                if e is not None and not e.doors and e.index in self.alike:
                    if self.form.setdefault(e.index, False):
                        raise _Refused
                    todo += [x for x in e.ins if x in self.places and x not in self.late]
                todo += [a for a in self.entries.get(w, ()) if a not in self.late]

    def _needed_dealt(self) -> None:
        """What is made of a ring's results, and what meets it there, from as early on as can be."""
        todo: list[Value | None] = []
        for e in self.equations:
            if self.form.get(e.index):
                todo += [*e.outs, *(v for k, v in enumerate(e.ins) if not in_order(e, k))]
        for v in todo:
            if v not in self.places or (root := self.sets.find(v)) in self.dealt:
                continue
            if root in self.ordered:
                continue
            self.dealt.add(root)
            for w in self.members[root]:
                e = self.program.maker.get(w)
                if e is not None and not e.doors and self.form.setdefault(e.index, True):
                    todo += e.ins
                todo += self.entries.get(w, ())
        for e in self.equations:  # what nobody asked for, such as a sum of weights
            if e.index in self.alike and e.index not in self.form:
                self.form[e.index] = any(map(self._is_dealt, e.ins)) and not any(map(self._in_order, e.outs))
                if self.form[e.index]:
                    self.dealt |= {self.sets.find(v) for v in e.outs if v in self.places}

    def _handed_in(self) -> None:
        """What a body does not change comes into it as it is."""
        for e in self.bodies:
            for a, b, lead in _entering(e):
                root = self.sets.find(b)
                if self._same(a, b, lead) and self._is_dealt(a) and root not in self.ordered:
                    self.dealt.add(root)

    def _is_dealt(self, v: Value | None) -> bool:
        return v in self.places and self.sets.find(v) in self.dealt

    def _in_order(self, v: Value | None) -> bool:
        return v in self.places and self.sets.find(v) in self.ordered

    # All of it, checked.

    def _checked(self) -> Dealing:
        """What is to be moved between the forms. Nothing here trusts how they were chosen."""
        deals: dict[int, set[int]] = defaultdict(set)
        back: dict[int, set[int]] = defaultdict(set)
        if self.ordered & self.dealt or any(map(self._is_dealt, self.kept)):
            raise _Refused
        for e in (*self.equations, *self.bodies):
            for k, form in self._reads(e).items():
                v = e.ins[k]
                if form and not self._is_dealt(v):
                    deals[e.index].add(k)
                elif not form and self._is_dealt(v):
                    if self.layout.batchy(v):
                        raise _Refused
                    back[e.index].add(k)
            made = self.form.get(e.index, False)
            if not e.doors and any(v in self.places and self._is_dealt(v) != made for v in e.outs):
                raise _Refused
        return Dealing(
            self.rings,
            self.places,
            {i: frozenset(ks) for i, ks in deals.items()},
            {i: frozenset(ks) for i, ks in back.items()},
            frozenset(o for o, v in enumerate(self.program.outputs) if self._is_dealt(v)),
        )

    def _reads(self, e: Equation) -> dict[int, bool]:
        """In which form an equation reads the operands that have places."""
        if not e.doors:
            form = e.index in self.alike and self.form[e.index]
            return {k: form and not in_order(e, k) for k, v in enumerate(e.ins) if v in self.places}
        for a, b, lead in _tied(e):
            if not self._same(a, b, lead) and (self._is_dealt(a) or self._is_dealt(b)):
                raise _Refused
        forms: dict[Value, bool] = {}
        for a, b, lead in _entering(e):
            if a not in self.places and b not in self.places:
                continue
            form = self._is_dealt(b)
            if (form and not self._same(a, b, lead)) or forms.setdefault(a, form) != form:
                raise _Refused
        return {k: forms[v] for k, v in enumerate(e.ins) if v in self.places and v in forms}
