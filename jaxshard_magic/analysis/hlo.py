"""Small, exact parser of HLO text, the output of `compiled.as_text()`.

Computations and instructions store their text and are parsed on access. Most of a program are fused computations never
looked at, so tens of megabytes are read in seconds.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^[ \t]+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$", re.MULTILINE)
BRANCHES = ("branch_computations", "true_computation", "false_computation")  # attributes of a conditional
_CALLED = re.compile(r"%?([\w.\-]+)")
_FUSED = re.compile(r" fusion\(.*?, calls=%?([\w.\-]+)")
# Opcodes that run other computations. Fusions are found by `_FUSED`.
_CALLING = (
    " while(",
    " conditional(",
    " call(",
    " custom-call(",
    "-start(",
)
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_NAMES = re.compile(r"(%[\w.\-]+(?:, %[\w.\-]+)*)\)")
_OPERAND = re.compile(r"%?([A-Za-z_][\w.\-]*(?:#\d+)*)\s*(?:,|$)")
_PART = re.compile(r"%?([A-Za-z_][\w.\-]*)#(\d+(?:#\d+)*)")
_NESTING = re.compile(r'"(?:\\.|[^"\\])*"|[\[({]|[\])}]|,')
_PLAIN = re.compile(r'[^"\[\](){},]*(?=,|$)')
_COMMENT = re.compile(r"/\*.*?\*/")
_INTEGER = re.compile(r"-?\d+\)")


@dataclass(frozen=True)
class Shape:
    """An array type of HLO: `f32[4,8]` is `Shape("f32", (4, 8))`."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in bytes without layout padding; types narrower than a byte are packed, tokens have size 0.

        >>> Shape("s4", (5,)).bytes
        3
        """
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        width = int(bits[1]) if bits else 8 if self.dtype == "pred" else 0
        return -(-width * math.prod(self.dims) // 8)


class _Line(NamedTuple):
    name: str
    opcode: str
    result: str
    rest: str
    root: bool


# A tuple: thousands are made, each in a third of the time of a frozen dataclass.
class Instruction(_Line):
    """HLO instruction.

    Attributes:
        name: Name without `%`.
        opcode: HLO opcode.
        result: Text of the result type.
        rest: Text after the opening bracket: operands, then attributes.
        root: True for the root of a computation.
    """

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Arrays of the result, tuples flattened."""
        return shapes(self.result)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, in order; empty for a parameter or a constant."""
        if self.opcode in ("constant", "parameter"):
            return ()
        # Fast path for the usual form, names with `%` alone.
        if plain := _NAMES.match(self.rest):
            return tuple(plain[1].replace("%", "").split(", "))
        return tuple(_OPERAND.findall(_COMMENT.sub("", self.rest[: self._end()])))

    @cached_property
    def attributes(self) -> str:
        """Text after the operands, including metadata and backend configuration."""
        return self.rest[self._end() + 1 :]

    def attribute(self, key: str) -> str | None:
        """Return the text of one attribute's value; None if missing.

        >>> Instruction("y", "fusion", "f32[4]", "%x), kind=kLoop, calls=%f", False).attribute("calls")
        '%f'
        """
        start = self.rest.find(f", {key}=")
        if start < 0:
            return None
        start += len(key) + 3
        plain = _PLAIN.match(self.rest, start)
        return plain[0] if plain else self.rest[start : _balanced(self.rest, start)]

    def _end(self) -> int:
        """Return the position of the bracket closing the operands."""
        first = self.rest.find(")")
        # Fast path: no bracket or string before the first closing bracket.
        plain = self.rest.find("(", 0, first) < 0 and self.rest.find('"', 0, first) < 0
        return first if plain and first >= 0 else _balanced(self.rest, 0, ends_at_comma=False)


class CalledComputation(NamedTuple):
    """Call of a computation by one instruction.

    Attributes:
        computation: Name of the computation.
        times: Number of runs for each run of the instruction.
        known: False if HLO does not tell `times`.
    """

    computation: str
    times: int
    known: bool = True


class _Block(NamedTuple):
    name: str
    text: str


# A tuple for the same reason as `Instruction`.
class Computation(_Block):
    """Computation of a program: a name and the text between the brackets."""

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """Instructions by name, in the order of the text.

        `%x#1` in the text names an element of `%x`; a get-tuple-element instruction is added after `%x` for each.
        """
        parts: dict[str, set[str]] = {}
        if "#" in self.text:
            for name, index in _PART.findall(self.text):
                parts.setdefault(name, set()).add(index)
        lines: dict[str, Instruction] = {}
        for root, name, result, opcode, rest in _INSTRUCTION.findall(self.text):
            lines[name] = line = Instruction(name, opcode, result, rest, bool(root))
            if parts:
                for index in sorted(parts.get(name, ())):
                    lines.update(_indexed_elements(line, index))
        return lines

    @property
    def root(self) -> Instruction | None:
        return next((i for i in self.instructions.values() if i.root), None)


class RunCount(NamedTuple):
    """Number of runs of a computation for each run of the program; a lower bound if not `known`."""

    times: int
    known: bool


@dataclass(frozen=True)
class Module:
    """HLO program.

    Attributes:
        header: Text before the first computation: module attributes and source tables.
        computations: Computations by name.
        entry: Entry computation.
    """

    header: str
    computations: dict[str, Computation]
    entry: Computation

    @property
    def name(self) -> str:
        return self.header.removeprefix("HloModule ").partition(",")[0].split()[0]

    @cached_property
    def replicas(self) -> int:
        return self._count("replica_count")

    @cached_property
    def partitions(self) -> int:
        return self._count("num_partitions")

    def _count(self, name: str) -> int:
        count = re.search(rf"\b{name}=(\d+)", self.header)
        return int(count[1]) if count else 1

    def find_computation(self, name: str | None) -> Computation | None:
        """Return the computation with a name, with or without a leading `%`; None without a name, or if missing."""
        return self.computations.get(name.lstrip("%")) if name else None


@lru_cache(4096)
def shapes(result: str) -> tuple[Shape, ...]:
    """Return the arrays of a type, tuples flattened.

    >>> shapes("(s32[], f32[4,8]{1,0})")
    (Shape(dtype='s32', dims=()), Shape(dtype='f32', dims=(4, 8)))
    """
    return tuple(Shape(dtype, _dims(dims)) for dtype, dims in _SHAPE.findall(result))


def parse_module(text: str) -> Module:
    """Parse HLO text.

    Raises:
        ValueError: The text has no entry computation.
    """
    heads = list(_heads(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    computations: dict[str, Computation] = {}
    entry = None
    for head, end in zip(heads, ends, strict=True):
        computation = Computation(head[2], text[head.end() : end])
        computations[computation.name] = computation
        entry = computation if head[1] else entry
    if entry is None:
        raise ValueError("HLO text without an ENTRY computation")
    return Module(text[: heads[0].start()], computations, entry)


def _heads(text: str) -> Iterator[re.Match[str]]:
    """Yield the first line of each computation."""
    # Few other lines end in an opening bracket, so the regular expression runs on few lines of a large text.
    at = text.find("{\n")
    while at >= 0:
        head = _COMPUTATION.match(text, text.rfind("\n", 0, at) + 1)
        if head:
            yield head
        at = text.find("{\n", at + 1)


class RunCounts:
    """Number of runs of each computation by name, nested loop trips multiplied in; 0 for a computation never called.

    Each branch of a conditional counts as run once. Computations applied to elements by a reduction are left out.

    Args:
        module: Parsed program.
    """

    def __init__(self, module: Module):
        self._module = module
        # The call graph is built on the first query for another computation: an unrolled program needs none.
        self._known = {module.entry.name: RunCount(1, True)}

    def __getitem__(self, name: str) -> RunCount:
        if name not in self._known:
            times, known = 0, True
            for caller, call in self._callers.get(name, ()):
                site = self[caller]
                times += site.times * call.times
                # A caller that never runs does not make the count uncertain.
                known = known and (not site.times or (site.known and call.known))
            self._known[name] = RunCount(times, known)
        return self._known[name]

    @cached_property
    def _callers(self) -> dict[str, list[tuple[str, CalledComputation]]]:
        callers: dict[str, list[tuple[str, CalledComputation]]] = {}
        for computation in self._module.computations.values():
            for call in _calls_of(self._module, computation):
                callers.setdefault(call.computation, []).append((computation.name, call))
        return callers


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Return the number of trips of a `while` loop; None if the program decides at run time.

    Args:
        module: Parsed program.
        computation: Computation with the loop.
        loop: `while` instruction.
    """
    # XLA prints its own figure, except on TPU. There a counter compared with a constant is evaluated.
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition, body = (module.find_computation(loop.attribute(key)) for key in ("condition", "body"))
    test = _loop_limit(condition) if condition else None
    init = _source(computation, loop.operands[0])
    if not body or not test or not init or init.opcode != "tuple":
        return None
    index, stop = test
    start, step = _constant(_source(computation, init.operands[index])), _loop_increment(body, index)
    return None if start is None or step is None else max(0, -(-(stop - start) // step))


def _loop_limit(condition: Computation) -> tuple[int, int] | None:
    """Return the index of the compared element of a loop's state and the exclusive upper limit; None for another
    condition."""
    root = condition.root
    if root is None or root.opcode != "compare" or root.attribute("direction") != "LT":
        return None
    counter, stop = (_source(condition, operand) for operand in root.operands)
    index, limit = _state_index(condition, counter), _constant(stop)
    return None if index is None or limit is None else (index, limit)


def _loop_increment(body: Computation, index: int) -> int | None:
    """Return the increment of element `index` of a loop's state; None unless a positive constant."""
    root = body.root
    update = _source(body, root.operands[index]) if root and root.opcode == "tuple" else None
    if update is None or update.opcode != "add":
        return None
    a, b = (_source(body, operand) for operand in update.operands)
    step = _constant(b) if _state_index(body, a) == index else _constant(a) if _state_index(body, b) == index else None
    return step if step and step > 0 else None


def _state_index(computation: Computation, value: Instruction | None) -> int | None:
    """Return the index of a value in the computation's parameter tuple; None for another value."""
    if value is None or value.opcode != "get-tuple-element":
        return None
    whole = computation.instructions.get(value.operands[0])
    return int(value.attribute("index") or 0) if whole and whole.opcode == "parameter" else None


def _calls_of(module: Module, computation: Computation) -> Iterator[CalledComputation]:
    text = computation.text
    if " fusion(" in text:
        # Fusions are most of a program: their computations are found without parsing instructions.
        yield from (CalledComputation(name, 1) for name in _FUSED.findall(text))
    if not any(opcode in text for opcode in _CALLING):
        return
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        if opcode == "while":
            trips = trip_count(module, computation, instruction)
            times, known = (1, False) if trips is None else (trips, True)
            yield from (CalledComputation(name, times, known) for name in called_computations(instruction, "body"))
            # The condition is evaluated once more than the body.
            yield from (
                CalledComputation(name, times + 1, known) for name in called_computations(instruction, "condition")
            )
        elif opcode == "conditional":
            yield from (CalledComputation(name, 1) for name in called_computations(instruction, *BRANCHES))
        elif opcode in ("call", "call-start"):  # TPU starts collectives on its SparseCores by `call-start`
            yield from (CalledComputation(name, 1) for name in called_computations(instruction, "to_apply", "calls"))
        elif opcode == "custom-call" or opcode.endswith("-start"):
            yield from (
                CalledComputation(name, 1) for name in called_computations(instruction, "calls", "called_computations")
            )


def called_computations(instruction: Instruction, *keys: str) -> list[str]:
    """Return the computations named by attributes of an instruction, in the order of `keys`."""
    return [name for key in keys for name in _CALLED.findall(instruction.attribute(key) or "")]


def _source(computation: Computation, name: str) -> Instruction | None:
    """Return the instruction producing a value, before copies and casts."""
    source = computation.instructions.get(name)
    while source and source.opcode in ("copy", "bitcast", "convert"):
        source = computation.instructions.get(source.operands[0])
    return source


def _indexed_elements(whole: Instruction, index: str) -> Iterator[tuple[str, Instruction]]:
    """Yield get-tuple-element instructions for an index such as `1#0`: element 1, then its element 0.

    Stops at a missing element.
    """
    for k in map(int, index.split("#")):
        types = tuple_types(whole.result)
        if k >= len(types):
            return
        name = f"{whole.name}#{k}"
        whole = Instruction(name, "get-tuple-element", types[k], f"%{whole.name}), index={k}", False)
        yield name, whole


def tuple_types(result: str) -> list[str]:
    """Return the element types of a tuple type; empty for another type.

    >>> tuple_types("(s32[], (f32[4,8]{1,0}, pred[]), /*index=2*/token[])")
    ['s32[]', '(f32[4,8]{1,0}, pred[])', 'token[]']
    """
    text, at, types = _COMMENT.sub("", result).strip(), 1, []
    while text.startswith("(") and text[at : at + 1] not in (")", ""):
        end = _balanced(text, at)
        types.append(text[at:end].strip())
        at = end + (text[end : end + 1] == ",")
    return types


def _constant(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant" or not _INTEGER.match(instruction.rest):
        return None
    return int(instruction.rest.partition(")")[0])


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(d) for d in text.replace("<=", "").split(",") if d)


def _balanced(text: str, start: int, ends_at_comma: bool = True) -> int:
    """Return the end of the value at `start`: a comma or closing bracket outside of its own brackets and strings."""
    depth = 0
    for token in _NESTING.finditer(text, start):
        mark = token[0]
        if mark in "[({":
            depth += 1
        elif mark in "])}":
            depth -= 1
        if depth < 0 or (mark == "," and depth == 0 and ends_at_comma):
            return token.start()
    return len(text)
