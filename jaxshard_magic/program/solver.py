"""Least fixpoints over a program: a fact for each value, carried through loops, branches and calls.

An analysis states its facts and their transfer through an equation without bodies (`Domain`); `solve` handles bodies,
the same for all analyses. Cost: a pass over the program, and a further pass over a loop's body for each trip that still
changes a fact.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .ir import Equation, Program, SubJaxpr, Value

if TYPE_CHECKING:
    from .flow import Flow

Fact = TypeVar("Fact")


class Domain(ABC, Generic[Fact]):
    """Lattice of facts, and their transfer through equations.

    Facts are compared by `==`. The lattice has finite height and `transfer` is monotone (larger facts in, larger facts
    out), hence loops terminate. A domain that reads `facts` serves a single program.

    Attributes:
        bottom: Fact of an unreached value: `join(bottom, x) == x`.
        facts: Facts so far, by value number, for transfers that look further back than their operands; set by `solve`.
    """

    bottom: Fact
    facts: Sequence[Fact]

    @abstractmethod
    def join(self, first: Fact, second: Fact) -> Fact:
        """Return the least fact that covers both, for a value computed by either branch or trip."""

    @abstractmethod
    def constant(self, number: Any) -> Fact:
        """Return the fact of a literal, or of an array closed over by a body."""

    @abstractmethod
    def transfer(self, eqn: Equation, operands: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of the results of an equation without bodies.

        Args:
            eqn: Equation.
            operands: Facts of the operands.
        """

    def enter(self, eqn: Equation, operand: Fact, lead: int) -> Fact:
        """Return the fact of an operand inside of a body.

        Args:
            eqn: Equation with the body.
            operand: Fact outside.
            lead: 1 for an operand that a scan steps over (the body sees no leading dimension), else 0.
        """
        return operand

    def leave(self, eqn: Equation, result: Fact, lead: int) -> Fact:
        """Return the fact of a body's result outside.

        Args:
            eqn: Equation with the body.
            result: Fact inside.
            lead: 1 for a result that a scan stacks, else 0.
        """
        return result

    def control(self, eqn: Equation, result: Fact, decider: Fact) -> Fact:
        """Return the fact of a result of a `cond` or a `while`.

        Args:
            eqn: Equation.
            result: Fact of the result so far.
            decider: Fact of the branch index or of the loop condition.
        """
        return result


def solve(program: Program, domain: Domain[Fact], inputs: Sequence[Fact]) -> list[Fact]:
    """Return the least facts of all values of `program`, by value number.

    Args:
        program: Program, with all bodies opened.
        domain: Lattice and transfers.
        inputs: Facts of the program's inputs, in order.
    """
    solver = _Solver(domain, [domain.bottom] * len(program.avals))
    domain.facts = solver.facts
    for value, fact in zip(program.inputs, inputs, strict=True):
        solver.join_into(value, fact)
    solver.run(program.top)
    return solver.facts


def fact_origin(flow: "Flow", facts: Sequence[Fact], value: Value) -> Equation | None:
    """Return the equation at which `value` got its fact: no operand of the equation had the fact. None for an input.

    For messages: the equation is the reason why the program lacks the property.

    Args:
        flow: Data flow of the program.
        facts: Facts of all values, as from `solve`.
        value: Value.
    """
    seen = {value}
    while True:
        same_fact = [(source, eqn) for source, eqn in flow.predecessors[value] if facts[source] == facts[value]]
        unseen = next((source for source, _ in same_fact if source not in seen), None)
        if unseen is None:
            return flow.program.producer.get(value)
        seen.add(unseen)
        value = unseen


class _Solver(Generic[Fact]):
    """Facts so far, and passes over bodies that raise them."""

    def __init__(self, domain: Domain[Fact], facts: list[Fact]):
        self._domain, self.facts = domain, facts

    def join_into(self, value: Value, fact: Fact) -> bool:
        """Join a fact to that of a value; return whether the value's fact changed."""
        joined = self._domain.join(self.facts[value], fact)
        changed = joined != self.facts[value]
        self.facts[value] = joined
        return changed

    def run(self, scope: SubJaxpr) -> None:
        """Pass over a body once, and over loops inside of it until nothing changes."""
        for value, constant in zip(scope.const_values, scope.consts, strict=True):
            self.join_into(value, self._domain.constant(constant))
        for eqn in scope.equations:
            operands = self._facts_of(eqn.operands, eqn.jaxpr_eqn.invars)
            if eqn.bodies:
                self._run_bodies(eqn, operands)
            else:
                for value, fact in zip(eqn.results, self._domain.transfer(eqn, operands), strict=True):
                    self.join_into(value, fact)

    def _facts_of(self, values: Sequence[Value | None], variables: Sequence[Any]) -> list[Fact]:
        """Return the facts of operands or results; literals have no value."""
        pairs = zip(values, variables, strict=True)
        return [self._domain.constant(x.val) if value is None else self.facts[value] for value, x in pairs]

    def _result_facts(self, scope: SubJaxpr) -> list[Fact]:
        """Return the facts of a body's results."""
        return self._facts_of(scope.outputs, scope.jaxpr.outvars)

    def _run_bodies(self, eqn: Equation, operands: Sequence[Fact]) -> None:
        """Carry facts into the bodies of an equation, around loops, and out."""
        entering = {
            inside: self._domain.enter(eqn, operands[position], lead)
            for body in eqn.bodies
            for (_, inside, lead), position in zip(body.inputs, body.operand_positions, strict=True)
        }
        for inside, fact in entering.items():
            self.join_into(inside, fact)
        changed = True
        while changed:
            for body in eqn.bodies:
                self.run(body.sub_jaxpr)
            # The first body of a loop computes the carries; branches and calls have none.
            results = self._result_facts(eqn.bodies[0].sub_jaxpr)
            carries = [
                (first, fact) for body in eqn.bodies for (_, first), fact in zip(body.carries, results, strict=False)
            ]
            # A list, as `any` of a generator would stop at the first change and skip the other carries.
            raised = [self.join_into(first, fact) for first, fact in carries]
            changed = any(raised)
        for body in eqn.bodies:
            # The condition of a `while` has a result, but no outputs.
            for (_, outer, lead), fact in zip(body.outputs, self._result_facts(body.sub_jaxpr), strict=False):
                self.join_into(outer, self._domain.leave(eqn, fact, lead))
            # A loop may run zero times; its results are then the initial carries.
            for (_, first), (_, result) in zip(body.carries, body.zero_trip, strict=False):
                self.join_into(result, entering[first])
        if eqn.is_cond or eqn.is_while:
            # The second body of a `while` is its condition.
            decider = operands[0] if eqn.is_cond else self._result_facts(eqn.bodies[1].sub_jaxpr)[0]
            for value in eqn.results:
                self.facts[value] = self._domain.control(eqn, self.facts[value], decider)
