"""Compute the live range of every value in a scheduled program, through loops, calls and branches.

The rules are XLA's own (`HloDataflowAnalysis`, `HloLiveRange`): a value lives from its defining instruction to the last
instruction that reads it or passes it on.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .buffer_assignment import ValueDefinition
from .hlo import BRANCHES, Computation, Instruction, Module, called_computations

_SAME = frozenset({"bitcast", "opt-barrier", "optimization-barrier", "add-dependency", "domain"})
_MOST_ELEMENTS = 1 << 20  # elements of a tuple; a larger index comes from damaged bytes
_NUMBER = re.compile(r"\d+")

Range = tuple[int, int]  # first and last position


class ResultValues(NamedTuple):
    """Values in the result of an instruction.

    Attributes:
        value: Id of the value; None for an undefined value.
        elements: Results of the elements of a tuple.
    """

    value: int | None = None
    elements: tuple["ResultValues", ...] = ()


_NOTHING = ResultValues()


@dataclass(frozen=True)
class Liveness:
    """Live ranges of a program.

    Attributes:
        order: Instructions in execution order; condition and body of a loop once, before the loop itself.
        ranges: First and last live position in `order`, by value id.
        roots: Result of each computation, by name.
        bodies: Body of a loop, by the names of the condition and of the body.
    """

    order: tuple[tuple[Computation, Instruction], ...]
    ranges: dict[int, Range]
    roots: dict[str, ResultValues]
    bodies: dict[str, str]


def liveness(module: Module, definitions: Mapping[int, ValueDefinition]) -> Liveness:
    """Follow values through a scheduled program and return their live ranges.

    An instruction without a definition passes values on: elements of tuples, constants of a loop, the operand of a
    bitcast.

    Args:
        module: Parsed program.
        definitions: Defining instruction, by value id.

    Raises:
        ValueError: The program calls a missing computation, or a tuple index is too large.
    """
    walk = _Walk(module, definitions)
    walk.enter(module.entry, ())
    ranges = {value: (start, walk.ends.get(value, start)) for value, start in walk.starts.items()}
    return Liveness(tuple(walk.order), ranges, walk.roots, walk.bodies)


def values(result: ResultValues) -> Iterator[int]:
    """Yield the value ids of a result and of its elements."""
    if result.value is not None:
        yield result.value
    for element in result.elements:
        yield from values(element)


class _Walk:
    """State of one walk through a program in execution order."""

    def __init__(self, module: Module, definitions: Mapping[int, ValueDefinition]):
        self.module = module
        self.made: dict[str, dict[str, list[tuple[tuple[int, ...], int]]]] = {}
        for value, (computation, instruction, index) in definitions.items():
            inside = self.made.setdefault(computation, {})
            inside.setdefault(instruction, []).append((index, value))
        self.order: list[tuple[Computation, Instruction]] = []
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.roots: dict[str, ResultValues] = {}
        self.bodies: dict[str, str] = {}
        self.parameters: dict[str, int] = {}  # position of the last parameter, by computation

    def enter(self, computation: Computation, arguments: Sequence[ResultValues]) -> ResultValues:
        """Walk through a computation once and return its result."""
        if computation.name in self.roots:
            return self.roots[computation.name]
        made_here = self.made.get(computation.name, {})
        results: dict[str, ResultValues] = {}
        root = _NOTHING
        for name, i in computation.instructions.items():
            operands = [results.get(operand, _NOTHING) for operand in i.operands]
            result = self.forwarded_values(i, operands, arguments)
            made = made_here.get(name)
            if made:
                result = _with_definitions(result, made)
                for _, value in made:
                    self.starts[value] = len(self.order)
            results[name] = result
            self.step(computation, i, operands, result)
            root = result if i.root else root
        self.extend(root, len(self.order))
        self.roots[computation.name] = root
        return root

    def step(
        self, computation: Computation, i: Instruction, operands: list[ResultValues], result: ResultValues
    ) -> None:
        """Run one instruction: its result and its operands are live at this position."""
        now, opcode = len(self.order), i.opcode
        self.order.append((computation, i))
        if opcode == "parameter":
            self.parameters[computation.name] = now
        self.extend(result, now)
        # The operands are elements of the result, extended above.
        if opcode == "tuple":
            return
        if opcode in ("while", "call"):
            # Operands live until the parameters of the body: from there on the state of the loop, or the readers of the
            # parameter, keep them alive.
            now = min(self.parameters.get(name, now) for name in called_computations(i, "body", "to_apply"))
        # These read the tuple itself, not its elements.
        ends, whole = self.ends, opcode not in ("get-tuple-element", "copy")
        for operand in operands:
            value, elements = operand
            if elements and whole:
                self.extend(operand, now)
            elif value is not None and ends.get(value, -1) < now:
                ends[value] = now

    def named(self, name: str) -> Computation:
        if name not in self.module.computations:
            raise ValueError(f"the program calls computation {name!r}, which it does not have")
        return self.module.computations[name]

    def extend(self, result: ResultValues, until: int) -> None:
        """Extend the live ranges of a result and its elements to at least `until`."""
        value, elements = result
        if value is not None and self.ends.get(value, -1) < until:
            self.ends[value] = until
        for element in elements:
            self.extend(element, until)

    def forwarded_values(
        self, i: Instruction, operands: list[ResultValues], arguments: Sequence[ResultValues]
    ) -> ResultValues:
        """Return the values of other instructions in an instruction's result; walk through called computations."""
        match i.opcode:
            case "fusion":  # the most frequent opcode, so tested first
                return _NOTHING
            case "parameter":
                number = _NUMBER.match(i.rest)
                position = int(number[0]) if number else 0
                return arguments[position] if position < len(arguments) else _NOTHING
            case "tuple":
                return ResultValues(None, tuple(operands))
            case "get-tuple-element":
                return _element(operands[0], int(i.attribute("index") or 0))
            case "while":
                condition, body = called_computations(i, "condition", "body")
                self.bodies |= {condition: body, body: body}
                for name in (condition, body):
                    self.enter(self.named(name), operands)
                return operands[0]
            case "call" | "async-start":
                roots = [self.enter(self.named(name), operands) for name in called_computations(i, "to_apply", "calls")]
                return roots[0] if i.opcode == "call" else _NOTHING
            case "conditional":
                names = called_computations(i, *BRANCHES)
                branches = zip(names, operands[1:], strict=True)
                roots = [self.enter(self.named(name), (operand,)) for name, operand in branches]
                return roots[0]
            case opcode if opcode in _SAME:
                return operands[0]
            case opcode if opcode.endswith("-done"):
                whole = operands[0]
                # `copy-start` returns (result, operand, context), other starts (operand, result).
                return _element(whole, 0 if opcode == "copy-done" else 1) if whole.elements else whole
        return _NOTHING


def _with_definitions(passed: ResultValues, made: Sequence[tuple[tuple[int, ...], int]]) -> ResultValues:
    """Return a result with the values defined by its instruction inserted at their tuple indices."""
    if len(made) == 1 and not made[0][0]:
        return ResultValues(made[0][1], passed.elements)
    value = passed.value
    inside: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for index, identity in made:
        if index:
            inside.setdefault(index[0], []).append((index[1:], identity))
        else:
            value = identity
    if not inside:
        return ResultValues(value, passed.elements)
    elements = list(passed.elements)
    last = max(inside)
    if last >= _MOST_ELEMENTS:
        raise ValueError(f"element {last} of a tuple; they have at most {_MOST_ELEMENTS}")
    elements += [_NOTHING] * (last + 1 - len(elements))
    for position, deeper in inside.items():
        elements[position] = _with_definitions(elements[position], deeper)
    return ResultValues(value, tuple(elements))


def _element(whole: ResultValues, index: int) -> ResultValues:
    return whole.elements[index] if index < len(whole.elements) else _NOTHING
