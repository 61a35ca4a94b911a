"""A small, exact reader of HLO text: what `compiled.as_text()` prints.

Computations and instructions keep their text and are taken apart when asked: most of a program are fused
computations that nothing asks of, and tens of megabytes are read in seconds.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$", re.MULTILINE)
_INSTRUCTION = re.compile(
    r"^[ \t]+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$",
    re.MULTILINE,
)
BRANCHES = ("branch_computations", "true_computation", "false_computation")  # attributes of a conditional
_CALLED = re.compile(r"%?([\w.\-]+)")
_FUSED = re.compile(r" fusion\(.*?, calls=%?([\w.\-]+)")
_CALLING = (
    " while(",
    " conditional(",
    " call(",
    " custom-call(",
    "-start(",
)  # opcodes that run others, but for fusions
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
        """Size without layout padding; types narrower than a byte are packed, tokens have none.

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


class Instruction(_Line):
    """`result` is the text of an instruction's type, `rest` starts with its operands, behind the bracket.

    A tuple, since thousands are made, each in a third of the time that a frozen dataclass takes.
    """

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result, tuples flattened."""
        return shapes(self.result)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, in order; none for a parameter or a constant."""
        if self.opcode in ("constant", "parameter"):
            return ()
        if plain := _NAMES.match(self.rest):
            return tuple(plain[1].replace("%", "").split(", "))
        return tuple(_OPERAND.findall(_COMMENT.sub("", self.rest[: self._end()])))

    @cached_property
    def attributes(self) -> str:
        """The text after the operands, metadata and backend configuration included."""
        return self.rest[self._end() + 1 :]

    def attribute(self, key: str) -> str | None:
        """The text of one attribute's value, or None.

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
        """Where the bracket around the operands closes."""
        first = self.rest.find(")")
        plain = self.rest.find("(", 0, first) < 0 and self.rest.find('"', 0, first) < 0
        return first if plain and first >= 0 else _balanced(self.rest, 0, ends_at_comma=False)


class Call(NamedTuple):
    """A computation that one instruction runs `times`; `known` is False where HLO does not tell."""

    computation: str
    times: int
    known: bool = True


class _Block(NamedTuple):
    name: str
    text: str


class Computation(_Block):
    """`text` is what stands between its brackets. A tuple, as `Instruction` is."""

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """By name, in the order of the text; behind `%x`, a get-tuple-element for each that the text names `%x#1`."""
        parts: dict[str, set[str]] = {}
        if "#" in self.text:
            for name, index in _PART.findall(self.text):
                parts.setdefault(name, set()).add(index)
        lines: dict[str, Instruction] = {}
        for root, name, result, opcode, rest in _INSTRUCTION.findall(self.text):
            lines[name] = line = Instruction(name, opcode, result, rest, bool(root))
            if parts:
                for index in sorted(parts.get(name, ())):
                    lines.update(_parts_of(line, index))
        return lines

    @property
    def root(self) -> Instruction | None:
        return next((i for i in self.instructions.values() if i.root), None)


class Runs(NamedTuple):
    """How often a computation runs per run of the program; at least `times` where `known` is False."""

    times: int
    known: bool


@dataclass(frozen=True)
class Module:
    """A program. `header` is the text before the first computation: module attributes and source tables."""

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

    def named(self, name: str | None) -> Computation | None:
        """The computation of this name, `%` before it or not; None without a name, and where there is none."""
        return self.computations.get(name.lstrip("%")) if name else None


@lru_cache(4096)
def shapes(result: str) -> tuple[Shape, ...]:
    """The arrays of a type, tuples flattened.

    >>> shapes("(s32[], f32[4,8]{1,0})")
    (Shape(dtype='s32', dims=()), Shape(dtype='f32', dims=(4, 8)))
    """
    return tuple(Shape(dtype, _dims(dims)) for dtype, dims in _SHAPE.findall(result))


def read(text: str) -> Module:
    """Read HLO text. Raises ValueError where it holds no entry computation."""
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
    """The lines that computations begin with. They end in a bracket, which few others do: the rest is not looked at."""
    at = text.find("{\n")
    while at >= 0:
        head = _COMPUTATION.match(text, text.rfind("\n", 0, at) + 1)
        if head:
            yield head
        at = text.find("{\n", at + 1)


class Counted:
    """How often a computation runs, by its name, loop trips multiplied in, nested loops too; 0 times where it does not.

    Each branch of a conditional counts as run once; what a reduction applies to its elements is left out. Of an
    unrolled program nothing but the entry is asked for: who calls whom is read where another computation is.
    """

    def __init__(self, module: Module):
        self._module = module
        self._known = {module.entry.name: Runs(1, True)}

    def __getitem__(self, name: str) -> Runs:
        if name not in self._known:
            times, known = 0, True
            for caller, call in self._callers.get(name, ()):
                site = self[caller]
                times += site.times * call.times
                known = known and (not site.times or (site.known and call.known))
            self._known[name] = Runs(times, known)
        return self._known[name]

    @cached_property
    def _callers(self) -> dict[str, list[tuple[str, Call]]]:
        callers: dict[str, list[tuple[str, Call]]] = {}
        for computation in self._module.computations.values():
            for call in _calls_of(self._module, computation):
                callers.setdefault(call.computation, []).append((computation.name, call))
        return callers


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often the body of a `while` in `computation` runs; None where the program decides while it runs.

    XLA's own figure where it is printed; otherwise (TPU) a counter compared with a constant is worked out.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition, body = (module.named(loop.attribute(key)) for key in ("condition", "body"))
    test = _test(condition) if condition else None
    init = _source(computation, loop.operands[0])
    if not body or not test or not init or init.opcode != "tuple":
        return None
    index, stop = test
    start, step = _constant(_source(computation, init.operands[index])), _step(body, index)
    return None if start is None or step is None else max(0, -(-(stop - start) // step))


def _test(condition: Computation) -> tuple[int, int] | None:
    """Which element of its state a loop compares, and the constant that it stays below."""
    root = condition.root
    if root is None or root.opcode != "compare" or root.attribute("direction") != "LT":
        return None
    counter, stop = (_source(condition, operand) for operand in root.operands)
    index, limit = _element(condition, counter), _constant(stop)
    return None if index is None or limit is None else (index, limit)


def _step(body: Computation, index: int) -> int | None:
    """What a loop's body adds to element `index` of its state; None unless a positive constant."""
    root = body.root
    update = _source(body, root.operands[index]) if root and root.opcode == "tuple" else None
    if update is None or update.opcode != "add":
        return None
    a, b = (_source(body, operand) for operand in update.operands)
    step = (
        _constant(b) if _element(body, a) == index else _constant(a) if _element(body, b) == index else None
    )
    return step if step and step > 0 else None


def _element(computation: Computation, value: Instruction | None) -> int | None:
    """Which element of the computation's parameter a value is, or None."""
    if value is None or value.opcode != "get-tuple-element":
        return None
    whole = computation.instructions.get(value.operands[0])
    return int(value.attribute("index") or 0) if whole and whole.opcode == "parameter" else None


def _calls_of(module: Module, computation: Computation) -> Iterator[Call]:
    text = computation.text
    if " fusion(" in text:
        yield from (Call(name, 1) for name in _FUSED.findall(text))
    if not any(opcode in text for opcode in _CALLING):
        return
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        if opcode == "while":
            trips = trip_count(module, computation, instruction)
            times, known = (1, False) if trips is None else (trips, True)
            yield from (Call(name, times, known) for name in called(instruction, "body"))
            yield from (Call(name, times + 1, known) for name in called(instruction, "condition"))
        elif opcode == "conditional":
            yield from (Call(name, 1) for name in called(instruction, *BRANCHES))
        elif opcode in ("call", "call-start"):  # TPU starts collectives of its SparseCores so
            yield from (Call(name, 1) for name in called(instruction, "to_apply", "calls"))
        elif opcode == "custom-call" or opcode.endswith("-start"):
            yield from (Call(name, 1) for name in called(instruction, "calls", "called_computations"))


def called(instruction: Instruction, *keys: str) -> list[str]:
    """The computations that attributes of an instruction name, in the order of `keys`."""
    return [name for key in keys for name in _CALLED.findall(instruction.attribute(key) or "")]


def _source(computation: Computation, name: str) -> Instruction | None:
    """The instruction that makes the value `name`, behind copies and casts."""
    source = computation.instructions.get(name)
    while source and source.opcode in ("copy", "bitcast", "convert"):
        source = computation.instructions.get(source.operands[0])
    return source


def _parts_of(whole: Instruction, index: str) -> Iterator[tuple[str, Instruction]]:
    """What takes element 1, then its element 0, out of a tuple, for the index `1#0`; nothing that it has not."""
    for k in map(int, index.split("#")):
        types = elements(whole.result)
        if k >= len(types):
            return
        name = f"{whole.name}#{k}"
        whole = Instruction(name, "get-tuple-element", types[k], f"%{whole.name}), index={k}", False)
        yield name, whole


def elements(result: str) -> list[str]:
    """The types in a tuple's type; none of another's.

    >>> elements("(s32[], (f32[4,8]{1,0}, pred[]), /*index=2*/token[])")
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
    """Where the value at `start` ends: at a comma or a bracket outside of its own brackets and strings."""
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
