"""Loops over experts: each trip works with one expert, on all tokens, and adds what it makes to what the others made.

Such a loop is a scan whose trips need nothing of each other: what it carries either goes through unchanged or is only
added to. It steps over parameters, and something is chosen among as many as it has trips, in what it reads or where
what it stacks is used.
"""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass

from .dimensions import Dimensions
from .flow import Flow, by_alias, by_no_product
from .ir import Equation, Program, Scope, Value
from .primitives import scan_counts
from .rankings import rankings
from .roles import PARAMS, Roles


@dataclass(frozen=True)
class ExpertLoop:
    """A scan over experts. `sums`: the positions of the carries that are added to; others go through unchanged.
    `stacks`: what it steps over or stacks, which has the experts as its first dimension."""

    equation: Equation
    sums: frozenset[int]
    stacks: tuple[Value, ...]

    @property
    def scope(self) -> Scope:
        return self.equation.doors[0].scope


def find_expert_loops(dims: Dimensions, flow: Flow, roles: Roles) -> list[ExpertLoop]:
    """The loops over experts of a program, forward and backward."""
    program = dims.program
    params = {program.inputs[i] for i, role in enumerate(roles.of) if role == PARAMS}
    loops = [loop for e in program.equations if e.is_scan and (loop := _apart(e)) is not None]
    if not loops:
        return []
    met = {length: _met(program, flow, length) for length in {e.equation.params["length"] for e in loops}}
    found: list[ExpertLoop] = []
    stacked = set[Value]()
    for loop in loops:
        e = loop.equation
        n, k = scan_counts(e.params)
        xs = {v for v in e.ins[n + k :] if v is not None}
        weights = any(params & flow.back([v], by_alias).keys() for v in xs)
        choice = met[e.params["length"]]
        counted = {dims.of(v)[0] for v in loop.stacks}
        chosen = not choice.isdisjoint(e.ins) or any(counted.intersection(dims.of(v)) for v in choice)
        if (weights and chosen) or xs & stacked:
            found.append(loop)
            stacked.update(e.outs[k:])
    return found


def find_handed_on(dims: Dimensions, flow: Flow, roles: Roles) -> Equation | None:
    """A loop over experts that hands on from one to the next what is no sum of what they make."""
    program = dims.program
    params = {program.inputs[i] for i, role in enumerate(roles.of) if role == PARAMS}
    for e in program.equations:
        if e.is_scan and _apart(e) is None:
            xs = e.ins[sum(scan_counts(e.params)) :]
            weights = any(params & flow.back([v], by_alias).keys() for v in xs)
            if weights and not _met(program, flow, e.params["length"]).isdisjoint(e.ins):
                return e
    return None


def _apart(e: Equation) -> ExpertLoop | None:
    """The loop, where its trips need nothing of each other."""
    n, k = scan_counts(e.params)
    scope = e.doors[0].scope
    sums, stacks = set[int](), (*(v for v in e.ins[n + k :] if v is not None), *e.outs[k:])
    for i in range(k):
        given, handed_on = scope.ins[n + i], scope.outs[i]
        if _passes(scope, given, handed_on):
            continue
        if not _adds(scope, given, handed_on):
            return None
        sums.add(i)
    return ExpertLoop(e, frozenset(sums), stacks) if stacks else None


def _passes(scope: Scope, given: Value, handed_on: Value | None) -> bool:
    """Is `handed_on` the value `given`, unchanged by bodies that are run in place?"""
    if given == handed_on:
        return True
    for e in scope.equations:
        for inside, outside, _ in e.doors[0].out if _in_place(e) else ():
            if outside == handed_on and inside is not None:
                ins = [b for a, b, _ in e.doors[0].into if a == given]
                return any(_passes(e.doors[0].scope, b, inside) for b in ins)
    return False


def _adds(scope: Scope, given: Value, handed_on: Value | None) -> bool:
    """Is `handed_on` the value `given` with something added, and nothing else made of it?"""
    readers = Counter(v for e in scope.equations for v in e.ins if v is not None)
    readers.update(v for v in scope.outs if v is not None)
    v, added = given, False
    while v != handed_on:
        e = next((e for e in scope.equations if v in e.ins), None)
        if readers[v] != 1 or e is None:
            return False
        if _in_place(e):
            door = e.doors[0]
            inside = next(b for a, b, _ in door.into if a == v)
            ends = [b for a, b, _ in door.out if a is not None and _adds(door.scope, inside, a)]
            if len(ends) != 1 or ends[0] is None:
                return False
            v = ends[0]
        elif e.primitive.elementwise and e.primitive.adds:
            v = e.outs[0]
        else:
            return False
        added = True
    return added and readers[v] == 1


def _in_place(e: Equation) -> bool:
    """Does `e` run one body, once?"""
    return len(e.doors) == 1 and not e.is_control_flow


def _met(program: Program, flow: Flow, length: int) -> Set[Value]:
    """What is made, without a product, of a choice among so many."""
    choices = (v for r in rankings(program) if r.number == length for v in r.told)
    return flow.forward(choices, by_no_product)
