"""From when to when every value of a scheduled program is needed, through its loops, calls and branches.

The rules are XLA's own (`HloDataflowAnalysis`, `HloLiveRange`): a value lives from the instruction that makes it to
the last one that reads it or passes it on.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .assignment import Definition
from .hlo import BRANCHES, Computation, Instruction, Module, called

_SAME = frozenset({"bitcast", "opt-barrier", "optimization-barrier", "add-dependency", "domain"})
_MOST_ELEMENTS = 1 << 20  # of a tuple: an index beyond comes from damaged bytes
_NUMBER = re.compile(r"\d+")

Range = tuple[int, int]  # the first and the last position


class Result(NamedTuple):
    """The value that an instruction returns, by id, and those of its elements where it is a tuple."""

    value: int | None = None
    elements: tuple["Result", ...] = ()


_NOTHING = Result()


@dataclass(frozen=True)
class Liveness:
    """`order` is the program as it runs, a loop's condition and body once, before the loop itself.

    `ranges` are the first and the last position in `order` at which a value, by id, is live. `roots` are the results
    of the computations, by name, and `bodies` the loops' bodies, by the names of their conditions and their own.
    """

    order: tuple[tuple[Computation, Instruction], ...]
    ranges: dict[int, Range]
    roots: dict[str, Result]
    bodies: dict[str, str]


def liveness(module: Module, definitions: Mapping[int, Definition]) -> Liveness:
    """Follow the values that XLA says are made, `definitions` by value id, through a scheduled program.

    What no definition is given for is passed on: the elements of tuples, a loop's constants, the operand of a bitcast.
    """
    walk = _Walk(module, definitions)
    walk.enter(module.entry, ())
    ranges = {value: (start, walk.ends.get(value, start)) for value, start in walk.starts.items()}
    return Liveness(tuple(walk.order), ranges, walk.roots, walk.bodies)


def values(result: Result) -> Iterator[int]:
    """The ids of a result and of its elements."""
    if result.value is not None:
        yield result.value
    for element in result.elements:
        yield from values(element)


class _Walk:
    """The state of one walk through a program in the order in which it runs."""

    def __init__(self, module: Module, definitions: Mapping[int, Definition]):
        self.module = module
        self.made: dict[str, dict[str, list[tuple[tuple[int, ...], int]]]] = {}
        for value, (computation, instruction, index) in definitions.items():
            inside = self.made.setdefault(computation, {})
            inside.setdefault(instruction, []).append((index, value))
        self.order: list[tuple[Computation, Instruction]] = []
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.roots: dict[str, Result] = {}
        self.bodies: dict[str, str] = {}
        self.parameters: dict[str, int] = {}  # where a computation has them, by its name

    def enter(self, computation: Computation, arguments: Sequence[Result]) -> Result:
        """Walk through a computation, once, and return its result."""
        if computation.name in self.roots:
            return self.roots[computation.name]
        made_here = self.made.get(computation.name, {})
        results: dict[str, Result] = {}
        root = _NOTHING
        for name, i in computation.instructions.items():
            operands = [results.get(operand, _NOTHING) for operand in i.operands]
            result = self.passed_on(i, operands, arguments)
            made = made_here.get(name)
            if made:
                result = _with(result, made)
                for _, value in made:
                    self.starts[value] = len(self.order)
            results[name] = result
            self.step(computation, i, operands, result)
            root = result if i.root else root
        self.extend(root, len(self.order))
        self.roots[computation.name] = root
        return root

    def step(self, computation: Computation, i: Instruction, operands: list[Result], result: Result) -> None:
        """One instruction runs: what it returns and what it reads is live."""
        now, opcode = len(self.order), i.opcode
        self.order.append((computation, i))
        if opcode == "parameter":
            self.parameters[computation.name] = now
        self.extend(result, now)
        if opcode == "tuple":
            return
        if opcode in ("while", "call"):
            # Inside, the state of the loop takes the operand's place, or what reads the parameter speaks for itself.
            now = min(self.parameters.get(name, now) for name in called(i, "body", "to_apply"))
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

    def extend(self, result: Result, until: int) -> None:
        """A result and its elements are live until then, or longer."""
        value, elements = result
        if value is not None and self.ends.get(value, -1) < until:
            self.ends[value] = until
        for element in elements:
            self.extend(element, until)

    def passed_on(self, i: Instruction, operands: list[Result], arguments: Sequence[Result]) -> Result:
        """What the result of an instruction holds of values that others made; walks through what it calls."""
        match i.opcode:
            case "fusion":  # most of a program
                return _NOTHING
            case "parameter":
                number = _NUMBER.match(i.rest)
                position = int(number[0]) if number else 0
                return arguments[position] if position < len(arguments) else _NOTHING
            case "tuple":
                return Result(None, tuple(operands))
            case "get-tuple-element":
                return _element(operands[0], int(i.attribute("index") or 0))
            case "while":
                condition, body = called(i, "condition", "body")
                self.bodies |= {condition: body, body: body}
                for name in (condition, body):
                    self.enter(self.named(name), operands)
                return operands[0]
            case "call" | "async-start":
                roots = [self.enter(self.named(name), operands) for name in called(i, "to_apply", "calls")]
                return roots[0] if i.opcode == "call" else _NOTHING
            case "conditional":
                names = called(i, *BRANCHES)
                branches = zip(names, operands[1:], strict=True)
                roots = [self.enter(self.named(name), (operand,)) for name, operand in branches]
                return roots[0]
            case opcode if opcode in _SAME:
                return operands[0]
            case opcode if opcode.endswith("-done"):
                whole = operands[0]
                return _element(whole, 0 if opcode == "copy-done" else 1) if whole.elements else whole
        return _NOTHING


def _with(passed: Result, made: Sequence[tuple[tuple[int, ...], int]]) -> Result:
    """A result with the values that its instruction makes, by their places in it."""
    if len(made) == 1 and not made[0][0]:
        return Result(made[0][1], passed.elements)
    value = passed.value
    inside: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for index, identity in made:
        if index:
            inside.setdefault(index[0], []).append((index[1:], identity))
        else:
            value = identity
    if not inside:
        return Result(value, passed.elements)
    elements = list(passed.elements)
    last = max(inside)
    if last >= _MOST_ELEMENTS:
        raise ValueError(f"element {last} of a tuple; they have at most {_MOST_ELEMENTS}")
    elements += [_NOTHING] * (last + 1 - len(elements))
    for position, deeper in inside.items():
        elements[position] = _with(elements[position], deeper)
    return Result(value, tuple(elements))


def _element(whole: Result, index: int) -> Result:
    return whole.elements[index] if index < len(whole.elements) else _NOTHING
