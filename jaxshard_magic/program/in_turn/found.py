"""The experts that a program goes through one by one: which groups of chains count, and in which order they run."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from ..flow import Flow, by_alias, by_no_product
from ..ir import Equation, Program, Scope, Value
from ..lines import users_line
from ..primitives import shows
from ..primitives.primitive import Kind
from ..rankings import rankings
from .alike import Alike
from .chains import NEXT, Chains, Chosen, End, Family, Group, Joined, Sum, Together
from .counted import Counted, find_counted
from .parts import Parts


@dataclass(frozen=True, eq=False)
class One:
    """What one expert has of a family, taken by itself."""

    value: Value
    family: Family
    expert: int


_TAKES = ("slice", "dynamic_slice", "gather", "split", "unstack")
Unit = Equation | Together | Family | End | One


@dataclass(frozen=True)
class Found:
    """`orders`: how a body runs with the chains of its experts side by side, by its scope. `apart`: a line for each
    group that can't be put so; `unsure`: those of groups of which it isn't known that something chooses among them.
    `counted`: loops that take experts by the number of the trip, by their equations' index. `together`: the lines of
    all that runs side by side.
    """

    orders: Mapping[Scope, list[Unit]]
    apart: tuple[str, ...]
    unsure: tuple[str, ...]
    counted: Mapping[int, Counted] = field(default_factory=dict)
    together: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.together)


def may_be_in_turn(program: Program) -> bool:
    """Whether matrices are taken one by one of some array, of as many as something is chosen among."""
    numbers, taken = _numbers(program), Counter[tuple[int, ...]]()
    for e in program.equations if numbers else ():
        source = e.ins[0] if e.name in _TAKES else None
        if source is None or len(shape := program.shapes[source]) < 3 or numbers.keys().isdisjoint(shape):
            continue
        taken[shape] += max(len(e.outs), e.trips)
        if taken[shape] >= min(numbers.keys() & {*shape}):
            return True
    return False


def find_in_turn(program: Program, weights: Iterable[Value]) -> Found:
    """The experts of a program whose matrices are parts of `weights`; cost: linear in the equations."""
    met = _Met(program)
    if not met.numbers:
        return Found({}, (), ())
    parts, alike, orders, apart = (
        Parts(program),
        Alike(),
        dict[Scope, list[Unit]](),
        list[tuple[bool, str]](),
    )
    own, together = met.flow.forward(weights, by_alias), list[str]()
    kept = {e.index for rule in program.equations if rule.primitive.custom for e in (rule, *rule.inside())}
    closed = {door.scope for e in program.equations if e.index in kept for door in e.doors}
    for scope in program.scopes():
        taken = {} if scope in closed else parts.of(scope)
        if own.isdisjoint(part.source for part in taken.values()):
            continue
        chains = Chains(program, scope, taken, own, alike)
        groups = chains.found(met.numbers, met.chosen)
        whole = [g for g in groups if g.apart is None]
        order = None
        while whole and order is None:
            order, late = _Order(program, scope, chains, whole).order()
            for group in late:
                group.apart = NEXT
            whole = [g for g in whole if g.apart is None]
        if whole and order is not None:
            orders[scope] = order
            together += [_line(group.first) for group in whole]
        apart += [(not group.sure, _why(group)) for group in groups if group.apart]
    lines = tuple(why for _, why in sorted(apart, key=lambda found: found[0]))
    sure = sum(not unsure for unsure, _ in apart)
    counted = find_counted(program, own, met.numbers, parts)
    counted = {i: loop for i, loop in counted.items() if i not in kept}
    together += [_line(program.equations[i]) for i in counted]
    return Found(orders, lines[:sure], lines[sure:], counted, tuple(together))


def _line(e: Equation) -> str:
    return users_line(e.eqn) or "in a library"


def _why(group: Group) -> str:
    where = f"the {group.number} experts that a Python loop goes through ({_line(group.first)})"
    return f"{where} can't be put side by side: {group.apart}"


def _numbers(program: Program) -> Mapping[int, list[Value]]:
    """Among how many something is chosen, with the results of all such choices."""
    found = defaultdict[int, list[Value]](list)
    for r in rankings(program):
        found[r.number].extend(r.equation.outs)
    return {n: values for n, values in found.items() if n > 1}


def made_by(end: End) -> Equation:
    """The equation whose result it is."""
    return end.root if isinstance(end, Sum) else end.last if isinstance(end, Chosen) else end.equation


class _Met:
    """What is made of choices, without a product, by the number that is chosen among."""

    def __init__(self, program: Program):
        self._program, self.flow = program, Flow(program)
        self._starts, self._values = _numbers(program), dict[int, Set[Value]]()

    @property
    def numbers(self) -> Set[int]:
        return self._starts.keys()

    def _of(self, number: int) -> Set[Value]:
        if number not in self._values:
            start = self._starts[number]
            self._values[number] = self.flow.forward(start, by_no_product)
        return self._values[number]

    def chosen(self, group: Group) -> bool:
        """Is what the experts of a group make told apart, or weighed, by a choice among as many?"""
        values = self._of(group.number)
        for family in group.families.values():
            part = family.part
            if part and not family.weights and part.source in values:
                return True
        for together in group.together.values():
            for e in together.equations[:1]:
                numbers = any(f is not None and f.reads and f.values[0] is None for f in together.operands)
                if numbers and any(v in values for v in e.ins if v is not None):
                    return True
        joined = [end.equation.outs[0] for end in group.ends if isinstance(end, Joined)]
        readers = ((v, e) for v in self.flow.forward(joined, by_no_product) for _, e in self.flow.after[v])
        return any(self._weighs(e, v, group.number, values) for v, e in readers if e is not None)

    def _weighs(self, e: Equation, v: Value, number: int, values: Set[Value]) -> bool:
        """Does `e` read `v` with what was made of a choice among so many?"""
        looks_up, shapes = e.primitive.kind is Kind.LOOKUP, self._program.shapes
        if not (e.primitive.product or looks_up or e.name == "mul"):
            return False
        others = [w for w in e.ins if w is not None and w != v]
        return any(w in values and (looks_up or number in shapes[w]) for w in others)


class _Order:
    """A body's units, each after those that it reads of, and in the order of the step where that leaves a choice."""

    def __init__(self, program: Program, scope: Scope, chains: Chains, groups: list[Group]):
        self._scope, self._canonical, self._groups = scope, chains.canonical, groups
        self._maker: dict[Value, Unit] = {v: e for e in scope.equations for v in e.outs}
        self._of = dict[Family, Unit]()  # what makes a family
        self._group = dict[Unit, Group]()
        ones = dict[Value, One]()
        for group in groups:
            for together in {id(t): t for t in group.together.values()}.values():
                self._group[together] = group
                for family in together.outs:
                    self._of[family] = together
                    ones |= {v: One(v, family, i) for i, v in enumerate(family.values) if v is not None}
            for family in group.families.values():
                self._of.setdefault(family, family)
                self._group[family] = group
        self._maker |= ones
        for group in groups:
            for end in group.ends:
                self._maker[made_by(end).outs[0]] = end
                self._group[end] = group
        for one in ones.values():
            self._group[one] = next(g for g in groups if one.family in g.families.values())

    def order(self) -> tuple[list[Unit] | None, list[Group]]:
        """The units that the body needs; None, and the groups that are in their own way, where there is no order."""
        seen, done, found = set[Unit](), set[Unit](), list[Unit]()
        roots = [v for v in self._scope.outs if v is not None]
        effects = [e for e in self._scope.equations if shows(e.eqn)]
        for root in [*effects, *(u for v in roots for u in self._made(v))]:
            todo = [(root, iter(self._reads(root)))] if root not in seen else []
            seen.add(root)
            while todo:
                unit, rest = todo[-1]
                following = next((u for u in rest if u not in done), None)
                if following is None:
                    done.add(unit)
                    found.append(unit)
                    todo.pop()
                elif following in seen:
                    path = [u for u, _ in todo]
                    late = {self._group[u] for u in path[path.index(following) :] if u in self._group}
                    return None, list(late)
                else:
                    seen.add(following)
                    todo.append((following, iter(self._reads(following))))
        return found, []

    def _made(self, v: Value | None) -> list[Unit]:
        maker = None if v is None else self._maker.get(v) or self._maker.get(self._canonical(v))
        return [] if maker is None else [maker]

    def _reads(self, unit: Unit) -> list[Unit]:
        """What is to run before."""
        if isinstance(unit, One):
            return [self._of[unit.family]]
        if isinstance(unit, Joined):
            return [self._of[unit.family]]
        if isinstance(unit, Chosen):
            e, k = unit.other
            return [self._of[unit.family], self._of[unit.mask], *self._made(e.ins[k])]
        if isinstance(unit, Sum):
            others = [u for e, k in unit.others for u in self._made(e.ins[k])]
            return [*others, *(self._of[f] for f in unit.families)]
        if isinstance(unit, Together):
            first = unit.equations[0]
            columns = zip(unit.operands, first.ins, strict=True)
            return [u for f, v in columns for u in ([self._of[f]] if f is not None else self._made(v))]
        if isinstance(unit, Family):
            if unit.part is not None:
                return self._made(unit.part.source)
            return [u for e, k in unit.reads for u in self._made(e.ins[k])]
        return [u for v in unit.ins for u in self._made(v)]
