"""Equal chains of equations of one body, that differ only by the expert they are of, found and put side by side.

A chain begins where a Python loop takes one expert's matrix out of a weight, `w[e]`, and goes on as long as the
equations of all experts do the same with what they made and what all of them read. What else differs between them (a
column of the gates, the number that a mask compares with) is looked for backwards. It ends where the results are added
up, chosen from by masks, or put side by side by the step itself.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

import jax.numpy as jnp
import numpy as np

from ..flow import closure, made_of
from ..ir import Equation, Program, Scope, Value
from ..lines import users_line
from ..primitives import is_literal
from .alike import Alike
from .parts import Part

Read = tuple[Equation, int]  # an equation, and which of its operands
_FAR = 100  # equations that are looked at behind one another


@dataclass(eq=False)
class Family:
    """A value for each expert. `weights`: whether it is made of one of their weights. `part`: the first, where they are
    parts of one array; `reads`: where they are read from, if they are numbers or no equations alike make them."""

    values: tuple[Value | None, ...]
    weights: bool
    part: Part | None = None
    reads: tuple[Read, ...] = ()


@dataclass(eq=False)
class Together:
    """An equation of each expert, that do the same. `operands`: what differs between them, None for what does not;
    `outs`: what they make."""

    equations: tuple[Equation, ...]
    operands: list[Family | None]
    outs: list[Family]


@dataclass(eq=False)
class Sum:
    """`families` added up, with `others`, into what the equation `root` made; `equations`: all of the additions."""

    families: list[Family]
    others: list[Read]
    equations: set[Equation]
    root: Equation


@dataclass(eq=False)
class Joined:
    """`family` side by side, as the equation has it."""

    family: Family
    equation: Equation


@dataclass(eq=False)
class Chosen:
    """Of `family`, number by number, what the last expert has whose `mask` is `where`, and else what is read as
    `other`. `last`: the last of the selections that made it."""

    family: Family
    mask: Family
    where: bool
    other: Read
    last: Equation


End = Sum | Joined | Chosen


@dataclass(eq=False)
class Group:
    """The chains of all experts from certain weights on, in one body. `apart`: why they can't be put side by side, ""
    where another group says it. `sure`: whether what they make is known to be chosen among. `same`: values that are
    equal, though each expert has one of its own."""

    number: int
    weight: Value
    first: Equation
    families: dict[tuple, Family] = field(default_factory=dict)
    together: dict[int, Together] = field(default_factory=dict)  # by the index of each of their equations
    ends: list[End] = field(default_factory=list)
    apart: str | None = None
    sure: bool = False
    same: set[tuple[Value | None, ...]] = field(default_factory=set)


NEXT = "each reads what the one before it made"


class _Apart(Exception):
    """Why chains can't be put side by side."""


class Chains:
    """Finds the groups of one body of a program."""

    def __init__(
        self, program: Program, scope: Scope, parts: Mapping[Value, Part], weights: Set[Value], alike: Alike
    ):
        self._program, self._scope, self._parts, self._alike = program, scope, parts, alike
        self._weights = weights
        first = dict[Part, Value]()
        self._canonical = {v: first.setdefault(part, v) for v, part in parts.items()}
        self._of_part = first
        self._made = {v: e for e in scope.equations for v in e.outs}
        self._readers = defaultdict[Value, list[Read]](list)
        for e in scope.equations:
            for k, v in enumerate(e.ins):
                if v is not None:
                    self._readers[self.canonical(v)].append((e, k))
        self._given = {self.canonical(v) for v in scope.outs if v is not None}
        self._grouped = set[Value | None]()

    def canonical(self, v: Value) -> Value:
        """The first value of the body that is the same part of the same array."""
        return self._canonical.get(v, v)

    def found(self, numbers: Set[int], chosen: Callable[[Group], bool]) -> list[Group]:
        """The groups of one of so many experts each that `chosen` holds for, and those that can't be put so."""
        groups = []
        for source, dim, size in {(p.source, p.dim, p.size): None for p in self._of_part}:
            if source not in self._weights or len(shape := self._program.shapes[source]) < 3:
                continue
            number = shape[dim] // size
            if number < 2 or number not in numbers:
                continue
            parts = [Part(source, dim, e * size, size) for e in range(number)]
            if number * size != shape[dim] or not all(part in self._of_part for part in parts):
                continue
            values = tuple(self._of_part[part] for part in parts)
            if not any(v in self._grouped for v in values):
                group = self._group(number, values)
                group.sure = chosen(group)
                if group.sure or group.apart is not None:
                    groups.append(group)
                    families = group.families.values()
                    self._grouped.update(v for f in families if f.weights and f.part for v in f.values)
        for one in [group for group in groups if group.apart is not None]:
            self._join(one, groups)
        return groups

    def _join(self, one: Group, groups: list[Group]) -> None:
        """Where experts of a group stay apart, so do those of groups that go on with what each of them made."""
        first = next(iter(one.families.values()))
        behind = made_of(self._scope, [v for v in first.values[1:2] if v is not None])
        for group in groups:
            for family in group.families.values() if group.apart is None else ():
                if family.reads and family.values[1] in behind and family.values[0] not in behind:
                    group.apart = ""

    def _group(self, number: int, values: tuple[Value, ...]) -> Group:
        part = self._parts[values[0]]
        group = Group(number, part.source, self._made[values[0]])
        todo = [self._family(group, values, weights=True, part=part)]
        try:
            for family in todo:  # which grows
                before = len(group.families)
                try:
                    self._forward(group, family)
                except _Apart as why:
                    raise (_Apart(NEXT) if self._in_turn(family) else why) from None
                todo += [f for f in [*group.families.values()][before:] if f.weights and f not in todo]
        except _Apart as why:
            group.apart = str(why)
        return group

    def _family(
        self, group: Group, values: tuple[Value | None, ...], *, weights: bool, part: Part | None = None
    ) -> Family:
        group.families[values] = family = Family(values, weights, part)
        return family

    def _forward(self, group: Group, family: Family) -> None:
        """Group all that reads what the experts have."""
        readers = [self._readers[v] for v in family.values if v is not None]
        n = min(map(len, readers))
        for k in range(n):
            column = [r[k] for r in readers]
            equations = tuple(e for e, _ in column)
            if self._joins(group, family, equations):
                continue
            if self._selects(group, family, equations):
                continue
            if equations[0].name in ("add", "add_any") and self._sums(group, family, equations):
                continue
            if len({i for _, i in column}) > 1:
                raise _Apart(self._differ(equations))
            if (known := group.together.get(equations[0].index)) is not None and known.equations == equations:
                continue
            if (why := self._unify(group, equations, 0)) is not None:
                raise _Apart(why)
        if (more := next((r[n] for r in readers if len(r) > n), None)) is not None:
            raise _Apart(f"what one of them makes is read by {_told(more[0])}, and that of others is not")

    def _joins(self, group: Group, family: Family, equations: tuple[Equation, ...]) -> bool:
        e = equations[0]
        if e.name not in ("concatenate", "stack") or any(other is not e for other in equations):
            return False
        if tuple(v if v is None else self.canonical(v) for v in e.ins) != family.values:
            return False
        if not any(isinstance(end, Joined) and end.equation is e for end in group.ends):
            group.ends.append(Joined(family, e))
        return True

    def _sums(self, group: Group, family: Family, equations: tuple[Equation, ...]) -> bool:
        """Whether `equations`, which add what each expert has, make one sum of it all; noted if so."""
        paths = [self._path(e) for e in equations]
        indices = [{e.index for e in path} for path in paths]
        firsts = [e.index for e in equations]
        apart = all(f not in other for i, f in enumerate(firsts) for j, other in enumerate(indices) if i != j)
        if apart and len(set(firsts)) == len(firsts):
            return False  # each adds something of its own
        common = set[int].intersection(*indices)
        root = next((e for e in paths[0] if e.index in common), None)
        if root is None:
            raise _Apart(self._differ(equations))
        nodes = {e for path in paths for e in path[: path.index(root) + 1]}
        known = next((end for end in group.ends if isinstance(end, Sum) and end.equations & nodes), None)
        if known is None:
            known = Sum([], [(e, k) for e in nodes for k in range(len(e.ins))], nodes, root)
            inner = {e.outs[0] for e in nodes if e is not root}
            known.others = sorted(
                ((e, k) for e, k in known.others if e.ins[k] not in inner), key=lambda r: (r[0].index, r[1])
            )
            group.ends.append(known)
        elif family in known.families:
            return True
        elif not nodes <= known.equations:
            raise _Apart(f"{_told(root)} adds up several things that they make in another order")
        own = [(e, k) for e, k in known.others if self._value(e, k) in family.values]
        if sorted(self._value(*r) or 0 for r in own) != sorted(v or 0 for v in family.values):
            raise _Apart(self._differ(equations))
        known.others = [r for r in known.others if r not in own]
        known.families.append(family)
        return True

    def _selects(self, group: Group, family: Family, equations: tuple[Equation, ...]) -> bool:
        """Whether `equations` select, each, what an expert has or what the one before gave; noted if so."""
        first = equations[0]
        if first.name == "select_n" and len(first.ins) == 3:
            no, yes = 1, 2
        elif first.name in ("jit", "pjit") and first.params["name"] == "_where" and len(first.ins) == 3:
            no, yes = 2, 1
        else:
            return False
        pairs = [*pairwise(equations)]
        before = next((k for k in (no, yes) if all(b.ins[k] == a.outs[0] for a, b in pairs)), None)
        own = yes if before == no else no
        if before is None or tuple(self._value(e, own) for e in equations) != family.values:
            return False
        shapes, out = self._program.shapes, first.outs[0]
        alone = all(len(self._readers[a.outs[0]]) == 1 and a.outs[0] not in self._given for a, _ in pairs)
        if not alone or not all(self._alike.equations(first.eqn, e.eqn) for e in equations):
            raise _Apart(self._differ(equations))
        mask = self._resolve(group, [(e, 0) for e in equations], 0)
        avals = self._program.avals
        types = avals[out].dtype, avals[first.ins[0]].dtype if first.ins[0] is not None else None
        known = jnp.issubdtype(types[0], jnp.inexact) and types[1] == jnp.bool_
        if mask is None or not known or any(v is None or shapes[v] != shapes[out] for v in family.values):
            raise _Apart(f"{_told(first)} takes them one by one")
        group.ends.append(Chosen(family, mask, before == no, (first, before), equations[-1]))
        return True

    def _in_turn(self, family: Family) -> bool:
        """Is what the second expert has made of what the first one has?"""
        first, second = family.values[:2]
        if first is None or second is None or first not in self._made:
            return False
        from_here = self._made[first].index

        def behind(v: Value) -> Iterator[Value]:
            e = self._made.get(v)
            return (w for w in (e.ins if e and e.index > from_here else ()) if w is not None)

        return first in closure([second], behind)

    def _path(self, e: Equation) -> list[Equation]:
        """The additions that `e` is the first of, each of which only the next one reads."""
        path = [e]
        while True:
            out = path[-1].outs[0]
            readers = self._readers[out]
            if len(readers) != 1 or out in self._given or readers[0][0].name not in ("add", "add_any"):
                return path
            path.append(readers[0][0])

    def _value(self, e: Equation, k: int) -> Value | None:
        v = e.ins[k]
        return None if v is None else self.canonical(v)

    def _unify(self, group: Group, equations: tuple[Equation, ...], depth: int) -> str | None:
        """Put equations side by side; why that can't be."""
        first = equations[0]
        if len(set(equations)) < len(equations) or any(e.index in group.together for e in equations):
            return self._differ(equations)
        if not all(self._alike.equations(first.eqn, e.eqn) for e in equations[1:]):
            return self._differ(equations)
        together = Together(equations, [], [])
        group.together |= dict.fromkeys((e.index for e in equations), together)
        for k in range(len(first.ins)):
            together.operands.append(self._resolve(group, [(e, k) for e in equations], depth))
        weights = any(family is not None and family.weights for family in together.operands)
        for outs in zip(*(e.outs for e in equations), strict=True):
            together.outs.append(self._family(group, outs, weights=weights))
        return None

    def _resolve(self, group: Group, column: list[Read], depth: int) -> Family | None:
        """What one operand of each is: None where all have the same."""
        values = tuple(self._value(e, k) for e, k in column)
        if None in values:
            if any(values):
                return self._read(group, column, values)
            numbers = [np.asarray(_literal(r)) for r in column]
            if all(np.array_equal(numbers[0], x, equal_nan=x.dtype.kind == "f") for x in numbers):
                return None
            return self._read(group, column, values)
        if len(set(values)) == 1 or values in group.same:
            return None
        if values in group.families:
            return group.families[values]
        part = self._part(values)
        if part is not None:
            n = self._program.shapes[part.source][part.dim]
            whole = part.start == 0 and len(values) * part.size == n
            return self._family(group, values, weights=whole and part.source in self._weights, part=part)
        if depth < _FAR and all(v in self._made for v in values):
            made = tuple(self._made[v] for v in values if v is not None)
            places = {e.outs.index(v) for e, v in zip(made, values, strict=True) if v is not None}
            if len(places) == 1 and self._unify(group, made, depth + 1) is None:
                together = group.together[made[0].index]
                if any(together.operands):
                    return group.families[values]
                for e in made:  # all make the same of the same
                    del group.together[e.index]
                for family in together.outs:
                    del group.families[family.values]
                group.same.add(values)
                return None
        return self._read(group, column, values)

    def _read(self, group: Group, column: list[Read], values: tuple[Value | None, ...]) -> Family:
        """Numbers, or what no equations alike make."""
        key = values if None not in values else tuple((e.index, k) for e, k in column)
        group.families[key] = family = Family(values, False, reads=tuple(column))
        return family

    def _part(self, values: Sequence[Value | None]) -> Part | None:
        """The first of the parts of one array, one after the other, that the values are."""
        first = self._parts.get(values[0]) if values[0] is not None else None
        if first is None:
            return None
        wanted = [
            Part(first.source, first.dim, first.start + e * first.size, first.size)
            for e in range(len(values))
        ]
        return first if [v is not None and self._parts.get(v) for v in values] == wanted else None

    def _differ(self, equations: Sequence[Equation]) -> str:
        """Which of the experts' equations is not as the first one's."""
        first = equations[0]
        i = next(
            (i for i, e in enumerate(equations) if not self._alike.equations(first.eqn, e.eqn)),
            None,
        )
        if i is None:
            return f"{_told(first)} takes them one by one"
        if i == 0:
            return f"{_told(first)} has an effect of its own"
        return f"expert {i} has {_told(equations[i])} where expert 0 has {_told(first)}"


def _literal(read: Read) -> object:
    var = read[0].eqn.invars[read[1]]
    return var.val if is_literal(var) else None


def _told(e: Equation) -> str:
    line = users_line(e.eqn)
    return f"`{e.params.get('name', e.name)}`" + (f" ({line})" if line else "")
