"""Least fixpoints over a program: one fact for each value, carried through loops, branches and calls.

An analysis states its facts and what an equation without bodies does to them (`Domain`); `solve` goes through the
bodies, the same for all analyses. Cost: one pass over the program, and one more over a loop's body for each trip that
still brings something new.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .ir import Equation, Program, Scope, Value

if TYPE_CHECKING:
    from .flow import Flow

Fact = TypeVar("Fact")


class Domain(ABC, Generic[Fact]):
    """A lattice of facts, and how they pass through equations.

    Facts are compared by `==`. The lattice has finite height and `transfer` is monotone (larger facts in, larger facts
    out): so loops end. `bottom` is the fact of a value that nothing has reached yet: `join(bottom, x) == x`. `solve`
    sets `facts`, those so far by the number of the value, for transfers that look further back than their operands: a
    domain that reads them serves one program.
    """

    bottom: Fact
    facts: Sequence[Fact]

    @abstractmethod
    def join(self, first: Fact, second: Fact) -> Fact:
        """Return the least fact that covers both: of what a branch or a trip of a loop may give."""

    @abstractmethod
    def constant(self, number: Any) -> Fact:
        """Return the fact of a literal, or of an array that a body closes over."""

    @abstractmethod
    def transfer(self, eqn: Equation, operands: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of the results of an equation without bodies."""

    def enter(self, eqn: Equation, operand: Fact, lead: int) -> Fact:
        """Return the fact inside a body of `eqn` of an operand; `lead` is 1 where a scan steps over it."""
        return operand

    def leave(self, eqn: Equation, result: Fact, lead: int) -> Fact:
        """Return the fact outside of a body's result; `lead` is 1 where a scan stacks it."""
        return result

    def control(self, eqn: Equation, result: Fact, decider: Fact) -> Fact:
        """Return the fact of a result of a `cond` or a `while`, given that of what decides on branch or trips."""
        return result


def solve(program: Program, domain: Domain[Fact], inputs: Sequence[Fact]) -> list[Fact]:
    """Return the least facts of all values of `program`, by the number of the value.

    Args:
        program: the program, every body of it opened.
        domain: the lattice and its transfers.
        inputs: the facts of the program's inputs, in their order.
    """
    solver = _Solver(domain, [domain.bottom] * len(program.avals))
    domain.facts = solver.facts
    for value, fact in zip(program.inputs, inputs, strict=True):
        solver.join_into(value, fact)
    solver.run(program.top)
    return solver.facts


def origin(flow: "Flow", facts: Sequence[Fact], value: Value) -> Equation | None:
    """Return the equation at which `value` got its fact, where none of the operands had it; None for an input.

    For messages: it stands in the way of what the fact denies.
    """
    seen = {value}
    while True:
        same = [(source, eqn) for source, eqn in flow.before[value] if facts[source] == facts[value]]
        fresh = next((source for source, _ in same if source not in seen), None)
        if fresh is None:
            return flow.program.maker.get(value)
        seen.add(fresh)
        value = fresh


class _Solver(Generic[Fact]):
    """The facts so far, and passes over bodies that raise them."""

    def __init__(self, domain: Domain[Fact], facts: list[Fact]):
        self._domain, self.facts = domain, facts

    def join_into(self, value: Value, fact: Fact) -> bool:
        """Join a fact to that of a value; return whether this brings something new."""
        joined = self._domain.join(self.facts[value], fact)
        news = joined != self.facts[value]
        self.facts[value] = joined
        return news

    def run(self, scope: Scope) -> None:
        """Pass over a body once; over loops inside of it until they bring nothing new."""
        for value, constant in zip(scope.const_values, scope.consts, strict=True):
            self.join_into(value, self._domain.constant(constant))
        for eqn in scope.equations:
            operands = self._of(eqn.ins, eqn.eqn.invars)
            if eqn.doors:
                self._run_bodies(eqn, operands)
            else:
                for value, fact in zip(eqn.outs, self._domain.transfer(eqn, operands), strict=True):
                    self.join_into(value, fact)

    def _of(self, values: Sequence[Value | None], variables: Sequence[Any]) -> list[Fact]:
        """Return the facts of operands or results, of which literals are no values."""
        pairs = zip(values, variables, strict=True)
        return [self._domain.constant(x.val) if value is None else self.facts[value] for value, x in pairs]

    def _results(self, scope: Scope) -> list[Fact]:
        return self._of(scope.outs, scope.jaxpr.outvars)

    def _run_bodies(self, eqn: Equation, operands: Sequence[Fact]) -> None:
        """Pass facts into the bodies of an equation, around its loops, and out of them."""
        entering = {
            inside: self._domain.enter(eqn, operands[position], lead)
            for body in eqn.doors
            for (_, inside, lead), position in zip(body.into, body.operands, strict=True)
        }
        for inside, fact in entering.items():
            self.join_into(inside, fact)
        news = True
        while news:
            for body in eqn.doors:
                self.run(body.scope)
            # A loop's body is its first; branches and calls have nothing that goes round.
            results = self._results(eqn.doors[0].scope)
            carries = [
                (first, fact)
                for body in eqn.doors
                for (_, first), fact in zip(body.loop, results, strict=False)
            ]
            raised = [self.join_into(first, fact) for first, fact in carries]
            news = any(raised)
        for body in eqn.doors:
            for (_, outside, lead), fact in zip(body.out, self._results(body.scope), strict=False):
                self.join_into(outside, self._domain.leave(eqn, fact, lead))
            for (_, first), (_, result) in zip(body.loop, body.skip, strict=False):
                self.join_into(result, entering[first])
        if eqn.is_cond or eqn.is_while:
            # The second body of a `while` is its condition.
            decider = operands[0] if eqn.is_cond else self._results(eqn.doors[1].scope)[0]
            for value in eqn.outs:
                self.facts[value] = self._domain.control(eqn, self.facts[value], decider)
