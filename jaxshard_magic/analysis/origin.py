"""Find the origin of a collective: the user's source line, the phase of the step, and the moved array.

`with_origins`, `with_causes` and `host_calls` say it in the words of a report, for collectives and host callbacks.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from ..code_locations import location_text
from ..program.op_labels import BODY_CONSTRAINT, GRADIENT, UPDATE, WEIGHT, parse_job, parse_label
from ..report import Leaf
from .collectives import Cause, HloCollective
from .dataflow import Dataflow
from .hlo import Computation, Instruction, Module
from .sources import Frame, Frames, SourceText

_OP_NAME = re.compile(r'op_name="([^"\\]*(?:\\.[^"\\]*)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_REDUCING = ("all-reduce", "reduce-scatter")
_MOST = 32  # instructions searched for a source line

_CALLBACK = re.compile(r'custom_call_target="[^"]*callback')
# Branches of `jax.lax.cond`. Conditionals added by XLA, to choose the device that calls, have no such name.
_BRANCH = re.compile(r"/branch_\d+_fun/")
_HOST = "callback", "is_host_transfer"


@dataclass(frozen=True)
class Origin:
    """Origin of a value.

    Attributes:
        frame: Innermost frame in the user's code; None if unknown.
        call: Frame in the step's own cell or file leading to `frame`; None if `frame` is in the same file.
        phase: "forward", "backward" or "update"; None if unknown.
        leaf: Position of the moved input, or of the input with the moved gradient; None for other arrays.
        gradient: True for the gradient of an input.
    """

    frame: Frame | None = None
    call: Frame | None = None
    phase: str | None = None
    leaf: int | None = None
    gradient: bool = False


class HloOrigins:
    """Origins of the collectives of a module.

    Args:
        module: Parsed program.
        home: Files of the step; the file of the current cell comes first.
        inputs: Position among the step's leaves, for each parameter of the program.
    """

    def __init__(self, module: Module, home: Sequence[str], inputs: Sequence[int] = ()):
        self.module, self.home, self.inputs = module, tuple(dict.fromkeys(home)), tuple(inputs)
        self.frames = Frames(module.header)
        self._flow = Dataflow(module)
        self._parts: dict[tuple[str, str], dict[int, Instruction]] = {}  # elements of combined collectives, by index

    def of_collective(
        self, computation: Computation, collective: Instruction, operand: str, position: int | None
    ) -> Origin:
        """Return the origin of one array of a collective.

        Args:
            computation: Computation with the collective.
            collective: Instruction of the collective.
            operand: Name of the array.
            position: Position of the array among the operands; None for one part of a concatenated operand.
        """
        own = [] if position is None else self._own(computation, collective, position)
        label = self._label(computation, operand, own)
        frames, phase = self._frames_and_phase(self._witnesses(computation, collective, operand, own))
        # XLA adds instructions without metadata: what they were made from may have some.
        if not frames:
            frames, source = self._frames_and_phase(i for _, i in self._flow.sources(computation, operand))
            phase = phase or source
        place = self.locate(frames)
        leaf = label[1] if label else self._parameter(computation, operand)
        return Origin(place.frame, place.call, phase, leaf, bool(label and label[0] == GRADIENT))

    def _frames_and_phase(self, witnesses: Iterable[Instruction]) -> tuple[tuple[Frame, ...], str | None]:
        """Return the first stack and the first phase found in the metadata of `witnesses`."""
        known: dict[bool, tuple[Frame, ...]] = {}
        phases: dict[bool, str] = {}
        for i in islice(witnesses, _MOST):
            # A sharding constraint at the start or end of a loop body says less than the operations inside: used as a
            # last resort.
            name = op_name(i)
            pinned = BODY_CONSTRAINT in name
            if pinned not in known and (frames := self._frames_of(i)):
                known[pinned] = frames
            if pinned not in phases and (phase := phase_of(name)):
                phases[pinned] = phase
            if False in known and False in phases:
                break
        return known.get(False, known.get(True, ())), phases.get(False, phases.get(True))

    def of_instruction(self, instruction: Instruction) -> Origin:
        """Return the line and phase in an instruction's own metadata."""
        place = self.locate(self._frames_of(instruction))
        return Origin(place.frame, place.call, phase_of(op_name(instruction)))

    def of_value(self, computation: Computation, instruction: Instruction) -> Origin:
        """Return the line and phase of a value's defining instruction, else of the nearest consumer."""
        own = self.of_instruction(instruction)
        if own.frame is not None:
            return own
        near = (i for _, i in islice(self._flow.consumers(computation, instruction.name), _MOST))
        user = next((o for i in near if (o := self.of_instruction(i)).frame), own)
        return replace(user, phase=own.phase or user.phase)

    def of_source(self, computation: Computation, instruction: Instruction) -> Origin:
        """Return the line and phase of the nearest source of a value with a line in its metadata."""
        made = (i for _, i in islice(self._flow.sources(computation, instruction.name), _MOST))
        return next((o for i in made if (o := self.of_instruction(i)).frame), Origin())

    def naming_instruction(
        self, computation: Computation, instruction: Instruction, index: Sequence[int]
    ) -> Instruction:
        """Return the instruction naming one element of a result.

        Args:
            computation: Computation with the instruction.
            instruction: Instruction with the result.
            index: Tuple index of the element.
        """
        # A collective of several arrays has the names of all. The get-tuple-element instruction has the name of one.
        own = self._own(computation, instruction, index[-1]) if index else []
        return next((i for i in own if op_name(i)), instruction)

    def inputs_of(self, computation: Computation, instruction: Instruction) -> list[int]:
        """Return the positions of the step's inputs read by an instruction, unchanged or gathered."""
        found = []
        for operand in instruction.operands:
            label = self._label(computation, operand, ())
            leaf = label[1] if label and label[0] == WEIGHT else self._parameter(computation, operand)
            if leaf is not None and leaf not in found:
                found.append(leaf)
        return found

    def locate(self, frames: Sequence[Frame]) -> Origin:
        """Return the innermost of `frames`, and the calling frame in the step's own files."""
        return locate_frames(frames, self.home)

    def _label(self, computation: Computation, operand: str, own: Sequence[Instruction]) -> tuple[str, int] | None:
        """Return the label of a weight or gradient, in the array's own name or in a producer's name."""
        made = (i for _, i in self._flow.producers(computation, operand))
        return next((label for i in chain(own, made) if (label := parse_label(op_name(i)))), None)

    def _witnesses(
        self, computation: Computation, collective: Instruction, operand: str, own: Sequence[Instruction]
    ) -> Iterator[Instruction]:
        """Yield the instructions to search for metadata, most reliable first."""
        made = (i for _, i in self._flow.producers(computation, operand))
        used = (i for last in own[-1:] for _, i in self._flow.consumers(computation, last.name))
        # An array is reduced because of its producer, and gathered because of its consumers.
        first, second = (made, used) if collective.opcode.startswith(_REDUCING) else (used, made)
        yield from chain(own, first, second, [collective])

    def _own(self, computation: Computation, collective: Instruction, position: int) -> list[Instruction]:
        """Return the collective, or the get-tuple-element instruction for one array of a combined collective."""
        if len(collective.operands) == 1 or collective.opcode.startswith("all-to-all"):
            return [collective]
        # A combined collective has the name of its first array only.
        key = computation.name, collective.name
        if key not in self._parts:
            self._parts[key] = self._flow.elements(computation, collective.name)
        part = self._parts[key].get(position)
        return [] if part is None else [part]

    def _parameter(self, computation: Computation, operand: str) -> int | None:
        """Return the position of the step's input moved unchanged as `operand`; None for another array."""
        for where, i in self._flow.producers(computation, operand):
            if i.opcode == "parameter" and where is self.module.entry:
                number = int(i.rest.partition(")")[0])
                return self.inputs[number] if number < len(self.inputs) else None
        return None

    def _frames_of(self, instruction: Instruction) -> tuple[Frame, ...]:
        frame = _FRAME.search(instruction.rest, max(0, instruction.rest.rfind("metadata={")))
        return self.frames[int(frame[1])] if frame else ()


def locate_frames(frames: Sequence[Frame], homes: Sequence[str]) -> Origin:
    """Return the innermost frame, and the innermost frame in the step's own files if that is another file.

    Args:
        frames: Stack frames, outermost first.
        homes: Files of the step; the first file with a frame is used.
    """
    if not frames:
        return Origin()
    own = next((inner for home in homes if (inner := [f for f in frames if f.file == home])), [])
    return Origin(frames[-1], own[-1] if own and own[-1].file != frames[-1].file else None)


def describe_origin(origin: Origin) -> str | None:
    """Return an origin as text: `model.py, line 31, called at cell [7], line 12`; None without a line."""
    if origin.frame is None:
        return None
    line = location_text(origin.frame.file, origin.frame.line)
    return line if origin.call is None else f"{line}, called at {location_text(origin.call.file, origin.call.line)}"


def calling_line(origin: Origin) -> str | None:
    """Return the calling line of an origin as `/home/me/train.py:12`; None without one.

    Reports store this form until files are renamed for the reader.
    """
    return None if origin.call is None else f"{origin.call.file}:{origin.call.line}"


def op_name(instruction: Instruction) -> str:
    """Return JAX's name of an operation, including name scopes; empty without one."""
    match = _OP_NAME.search(instruction.rest, max(0, instruction.rest.rfind("metadata={")))
    name = match[1] if match else ""
    return name.replace("\\'", "'").replace('\\"', '"') if "\\" in name else name


def operation_of(name: str) -> str:
    """Return the last operation in a name; empty for several operations, and for a name not given by JAX.

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
    """Return the phase in an operation's name: forward, backward or update; None outside of the step.

    >>> phase_of("jit(step)/transpose(jvp())/dot_general")
    'backward'
    """
    # JAX adds "transpose" to the names of a backward pass. The update carries a label added by this package.
    if not name.startswith("jit("):
        return None
    return "backward" if "transpose(" in name else "update" if UPDATE in name else "forward"


def with_origins(
    module: Module, moves: Iterable[HloCollective], origins: HloOrigins
) -> tuple[tuple[HloCollective, Origin], ...]:
    """Return each collective with its origin.

    Args:
        module: Parsed program.
        moves: Collectives of the program.
        origins: Origins of the values of the program.
    """
    return tuple(
        (
            move,
            origins.of_collective(module.computations[move.computation], move.instruction, move.operand, move.position),
        )
        for move in moves
    )


def with_causes(
    module: Module, moves: Iterable[tuple[HloCollective, Origin]], leaves: Sequence[Leaf], text: SourceText
) -> tuple[tuple[HloCollective, Cause], ...]:
    """Return each collective with the causing source line and a description of the moved array.

    Args:
        module: Parsed program.
        moves: Collectives with their origins.
        leaves: Inputs of the step, in the order of the positions used by the origins.
        text: Source text of the files.

    Returns:
        Files carry the names used by Python, not yet those shown to a reader.
    """

    def cause(move: HloCollective, origin: Origin) -> Cause:
        job = parse_job(op_name(move.instruction))
        what = (
            _describe_moved(module, move, origin, leaves) if job is None else f"{job}: {_array(module, move, origin)}"
        )
        if origin.frame is None:
            return Cause(phase=origin.phase, what=what, job=job)
        frame = origin.frame
        return Cause(origin.phase, frame.file, frame.line, text.line(frame), calling_line(origin), what, job)

    return tuple((move, cause(move, origin)) for move, origin in moves)


def host_calls(
    module: Module, origins: HloOrigins, relocate: Callable[[Origin], Origin] = lambda origin: origin
) -> tuple[str | None, ...]:
    """Return the source line of each call from the compiled step into Python, one item per call in the program.

    Calls inside a `lax.cond` branch, such as checks that raise, are left out.

    Args:
        module: Parsed program.
        origins: Origins of the values of the program.
        relocate: Maps an origin read from the text to an origin in the step.

    Returns:
        Lines in words; None for a call without a known line.
    """
    lines: list[str | None] = []
    sent: set[tuple[str, str | None]] = set()
    for computation in module.computations.values():
        # Searching the text is faster than parsing the instructions of thousands of computations.
        if not any(word in computation.text for word in _HOST):
            continue
        for i in computation.instructions.values():
            called = i.opcode == "custom-call" and _CALLBACK.search(i.rest) is not None
            if not called and not (i.opcode == "send" and "is_host_transfer=true" in i.rest):
                continue
            # A call in a branch may never run: checks that raise have this form.
            if _BRANCH.search(op_name(i)):
                continue
            line = describe_origin(relocate(origins.of_instruction(i)))
            # CPU and GPU call Python as one function. TPU sends each argument to the host, and all sends of a call
            # share a name.
            if called or (op_name(i), line) not in sent:
                lines.append(line)
            sent.add((op_name(i), line))
    return tuple(lines)


def _describe_moved(module: Module, move: HloCollective, origin: Origin, leaves: Sequence[Leaf]) -> str:
    """Return a description of the moved array: the path of an input, the gradient of an input, or another array."""
    if origin.leaf is not None and origin.leaf < len(leaves):
        path = leaves[origin.leaf].path
        return f"gradient of {path}" if origin.gradient else path
    return _array(module, move, origin)


def _array(module: Module, move: HloCollective, origin: Origin) -> str:
    """Return a description of an array other than an input or a gradient of one: `activation f32[8,64]`."""
    operand = module.computations[move.computation].instructions[move.operand]
    shape = next((f"{s.dtype}[{','.join(map(str, s.dims))}]" for s in operand.shapes), "")
    if operand.shapes and not operand.shapes[0].dims:
        return f"a number, {shape}"
    name = {"forward": "activation ", "backward": "gradient of an activation "}.get(origin.phase or "", "")
    return name + shape
