"""What caused a collective: the user's line, the phase of the step, and the array that moves."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from ..places import place
from ..program.labels import GRADIENT, PIN, UPDATE, WEIGHT, label_of
from .dataflow import Dataflow
from .frames import Frame, Frames
from .hlo import Computation, Instruction, Module

_OP_NAME = re.compile(r'op_name="([^"\\]*(?:\\.[^"\\]*)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_REDUCING = ("all-reduce", "reduce-scatter")
_MOST = 32  # instructions that are asked for their line


@dataclass(frozen=True)
class Origin:
    """`frame` is the innermost line of the user's own; `call` the line of the step's own cell or file that led to it,
    where it stands elsewhere.

    `leaf` is the position of the input that moves, or whose gradient does (`gradient`).
    """

    frame: Frame | None = None
    call: Frame | None = None
    phase: str | None = None
    leaf: int | None = None
    gradient: bool = False


class Origins:
    """The origins of a module's collectives.

    `home`: the step's own files, the cell's before that of the step. `inputs[k]` is the position among the step's
    leaves of the program's k-th parameter.
    """

    def __init__(self, module: Module, home: Sequence[str], inputs: Sequence[int] = ()):
        self.module, self.home, self.inputs = module, tuple(dict.fromkeys(home)), tuple(inputs)
        self.frames = Frames(module.header)
        self._flow = Dataflow(module)
        self._parts: dict[
            tuple[str, str], dict[int, Instruction]
        ] = {}  # the elements of combined collectives

    def of(
        self, computation: Computation, collective: Instruction, operand: str, position: int | None
    ) -> Origin:
        """The origin of one array of a collective: `operand`, its `position`-th, or one of those that are strung
        together in its only operand."""
        own = [] if position is None else self._own(computation, collective, position)
        label = self._label(computation, operand, own)
        frames, phase = self._told(self._witnesses(computation, collective, operand, own))
        if not frames:
            frames, source = self._told(i for _, i in self._flow.sources(computation, operand))
            phase = phase or source
        place = self.place(frames)
        leaf = label[1] if label else self._parameter(computation, operand)
        return Origin(place.frame, place.call, phase, leaf, bool(label and label[0] == GRADIENT))

    def _told(self, witnesses: Iterable[Instruction]) -> tuple[tuple[Frame, ...], str | None]:
        """The first calls and the first phase that witnesses tell. What only holds an array at the door of a loop says
        less than what works on it inside, and is believed last."""
        known: dict[bool, tuple[Frame, ...]] = {}
        phases: dict[bool, str] = {}
        for i in islice(witnesses, _MOST):
            name = op_name(i)
            pinned = PIN in name
            if pinned not in known and (frames := self._frames_of(i)):
                known[pinned] = frames
            if pinned not in phases and (phase := phase_of(name)):
                phases[pinned] = phase
            if False in known and False in phases:
                break
        return known.get(False, known.get(True, ())), phases.get(False, phases.get(True))

    def of_instruction(self, instruction: Instruction) -> Origin:
        """The line and phase in an instruction's own metadata."""
        place = self.place(self._frames_of(instruction))
        return Origin(place.frame, place.call, phase_of(op_name(instruction)))

    def of_value(self, computation: Computation, instruction: Instruction) -> Origin:
        """The line and phase of what makes a value, or of what it is made for."""
        own = self.of_instruction(instruction)
        if own.frame is not None:
            return own
        near = (i for _, i in islice(self._flow.consumers(computation, instruction.name), _MOST))
        user = next((o for i in near if (o := self.of_instruction(i)).frame), own)
        return replace(user, phase=own.phase or user.phase)

    def of_source(self, computation: Computation, instruction: Instruction) -> Origin:
        """The line and phase of the nearest instruction that a value is made of and that tells them."""
        made = (i for _, i in islice(self._flow.sources(computation, instruction.name), _MOST))
        return next((o for i in made if (o := self.of_instruction(i)).frame), Origin())

    def part(self, computation: Computation, instruction: Instruction, index: Sequence[int]) -> Instruction:
        """The instruction that names an element of a result: of a collective of several arrays what takes the element
        out, as the collective has the names of all."""
        own = self._own(computation, instruction, index[-1]) if index else []
        return next((i for i in own if op_name(i)), instruction)

    def inputs_of(self, computation: Computation, instruction: Instruction) -> list[int]:
        """The step's inputs, by position, that are operands of an instruction, as they came or gathered."""
        found = []
        for operand in instruction.operands:
            label = self._label(computation, operand, ())
            leaf = label[1] if label and label[0] == WEIGHT else self._parameter(computation, operand)
            if leaf is not None and leaf not in found:
                found.append(leaf)
        return found

    def place(self, frames: Sequence[Frame]) -> Origin:
        """The innermost of `frames`, and the one at home that led to it."""
        return place_of(frames, self.home)

    def _label(
        self, computation: Computation, operand: str, own: Sequence[Instruction]
    ) -> tuple[str, int] | None:
        """Which weight or gradient an array is, by its own name or that of what made it."""
        made = (i for _, i in self._flow.producers(computation, operand))
        return next((label for i in chain(own, made) if (label := label_of(op_name(i)))), None)

    def _witnesses(
        self, computation: Computation, collective: Instruction, operand: str, own: Sequence[Instruction]
    ) -> Iterator[Instruction]:
        """The instructions to ask, best first: an array is reduced for what made it, gathered for whoever uses it."""
        made = (i for _, i in self._flow.producers(computation, operand))
        used = (i for last in own[-1:] for _, i in self._flow.consumers(computation, last.name))
        first, second = (made, used) if collective.opcode.startswith(_REDUCING) else (used, made)
        yield from chain(own, first, second, [collective])

    def _own(self, computation: Computation, collective: Instruction, position: int) -> list[Instruction]:
        """The collective; of a combined one, which has the name of its first part, the element taken out of it."""
        if len(collective.operands) == 1 or collective.opcode.startswith("all-to-all"):
            return [collective]
        key = computation.name, collective.name
        if key not in self._parts:
            self._parts[key] = self._flow.elements(computation, collective.name)
        part = self._parts[key].get(position)
        return [] if part is None else [part]

    def _parameter(self, computation: Computation, operand: str) -> int | None:
        """The step's input that an array is, where it is moved as it came."""
        for where, i in self._flow.producers(computation, operand):
            if i.opcode == "parameter" and where is self.module.entry:
                number = int(i.rest.partition(")")[0])
                return self.inputs[number] if number < len(self.inputs) else None
        return None

    def _frames_of(self, instruction: Instruction) -> tuple[Frame, ...]:
        frame = _FRAME.search(instruction.rest, max(0, instruction.rest.rfind("metadata={")))
        return self.frames[int(frame[1])] if frame else ()


def place_of(frames: Sequence[Frame], homes: Sequence[str]) -> Origin:
    """The innermost of `frames`, and the innermost in the first of the files `homes` that one is in, where that is
    another file."""
    if not frames:
        return Origin()
    own = next((inner for home in homes if (inner := [f for f in frames if f.file == home])), [])
    return Origin(frames[-1], own[-1] if own and own[-1].file != frames[-1].file else None)


def in_words(origin: Origin) -> str | None:
    """`model.py, line 31, called at cell [7], line 12`; None where no line is known."""
    if origin.frame is None:
        return None
    line = place(origin.frame.file, origin.frame.line)
    return line if origin.call is None else f"{line}, called at {place(origin.call.file, origin.call.line)}"


def called_at(origin: Origin) -> str | None:
    """`/home/me/train.py:12`: the line that led to an origin, as a report has it until its files are named."""
    return None if origin.call is None else f"{origin.call.file}:{origin.call.line}"


def op_name(instruction: Instruction) -> str:
    """The name that jax gave the operation, with the scopes it stands in; empty where there is none."""
    match = _OP_NAME.search(instruction.rest, max(0, instruction.rest.rfind("metadata={")))
    name = match[1] if match else ""
    return name.replace("\\'", "'").replace('\\"', '"') if "\\" in name else name


def operation_of(name: str) -> str:
    """The last operation of a name; empty where it is several, or the name is none of jax's.

    >>> operation_of("jit(step)/transpose(jvp(checkpoint/shard.gradient.3))/dot_general")
    'dot_general'
    >>> operation_of("jit(step)/(jvp()/reduce_sum:transpose(jvp())/dot_general)")
    ''
    """
    if not name.startswith("jit("):
        return ""
    depth, start = 0, 0
    for at, sign in enumerate(name):
        depth += (sign == "(") - (sign == ")")
        if sign == "/" and not depth:
            start = at + 1
    last = name[start:]
    return "" if last.endswith(")") else last


def phase_of(name: str) -> str | None:
    """Of an operation's name: forward, backward or update; None for what is no operation of the step.

    jax names the transpose of a differentiated function so; the update has our own label.

    >>> phase_of("jit(step)/transpose(jvp())/dot_general")
    'backward'
    """
    if not name.startswith("jit("):
        return None
    return "backward" if "transpose(" in name else "update" if UPDATE in name else "forward"
