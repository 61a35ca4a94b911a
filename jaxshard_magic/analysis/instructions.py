"""What each operation of a trace is of: its line, its phase, and whether it computes, moves data or runs others."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..program.flops import REMATTED
from .collectives import Cause, Move
from .hlo import BRANCHES, Computation, Counted, Instruction, Module, called
from .origin import Origin, Origins, op_name

_NO_IDENTIFIER = re.compile(r"\W")
_CALLBACK = re.compile(r'custom_call_target="[^"]*callback')
_RUNS = {
    "while": ("body", "condition"),
    "conditional": BRANCHES,
    "call": ("to_apply", "calls"),
    "call-start": ("to_apply", "calls"),
    "async-start": ("calls",),
}
_MOVES = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
    r"|send|recv)(-start|-done|$)"
)
_NAMES = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
)  # of values: nothing runs
RECOMPUTED = "recomputed"
_MOST = 64  # instructions of a fusion that are asked for their line

COMPUTES, MOVES, CALLS_HOST, RUNS = "computes", "moves", "calls the host", "runs others"


@dataclass(frozen=True)
class Told:
    """What one instruction is of. `file` is as Python knows it; `moves` is the kind and the axes of a collective;
    `ends`: of an instruction that waits for the end of another, that one's name."""

    does: str
    file: str | None = None
    line: int | None = None
    phase: str | None = None
    moves: tuple[str, tuple[str, ...] | None] | None = None
    ends: str | None = None


class Instructions:
    """The instructions of a program by their names, each read when it is first asked for. `own`: the program's own
    place of one that the text tells."""

    def __init__(
        self,
        module: Module,
        origins: Origins,
        moves: Sequence[tuple[Move, Cause]],
        own: Callable[[Origin], Origin] = lambda origin: origin,
    ):
        self._module, self._origins, self._own = module, origins, own
        self._where = _running(module)
        self._moves = {(move.computation, move.instruction.name): (move, cause) for move, cause in moves}
        self._known: dict[str, Told | None] = {}

    def __getitem__(self, name: str) -> Told | None:
        """None for a name that the program has none of."""
        if name not in self._known:
            own = self.name_of(name)
            self._known[name] = None if own is None else self._told(*self._where[own])
        return self._known[name]

    def name_of(self, operation: str) -> str | None:
        """Return the name of the instruction that an operation of a trace is; None where the program has none such."""
        return operation if operation in self._where else self._of_kernels.get(operation)

    def custom_calls(self, after: str, before: str) -> list[str]:
        """Return the custom calls that run between two instructions.

        Those are what stands between them; where the second one stands first (a loop's next trip), or in another body,
        the end of the first one's body and the beginning of the second one's.
        """
        (first, _), (last, _) = self._where[after], self._where[before]
        here, there = list(first.instructions), list(last.instructions)
        low, high = here.index(after) + 1, there.index(before)
        between = here[low:high] if first is last and low <= high else [*here[low:], *there[:high]]
        return [name for name in between if self._where[name][1].opcode == "custom-call"]

    @cached_property
    def _of_kernels(self) -> Mapping[str, str]:
        """The instruction of each GPU kernel that XLA made: LLVM allows no "." in the name of a function.

        Instructions of equal code may share one kernel, which is named after the first of them.
        """
        return {_NO_IDENTIFIER.sub("_", name): name for name in self._where}

    def once(self, name: str) -> bool:
        """Whether an instruction runs once, and no more, when its program does."""
        return name in self._module.entry.instructions

    def _told(self, computation: Computation, i: Instruction) -> Told:
        move = self._moves.get((computation.name, i.name))
        if move is not None:
            told, cause = move
            phase = RECOMPUTED if REMATTED in op_name(i) else cause.phase
            return Told(MOVES, cause.file, cause.line, phase, (told.kind, told.axes))
        kind = _MOVES.match(i.opcode)
        ends = i.operands[0] if i.opcode.endswith("-done") and i.operands else None
        begun = self[ends] if ends is not None else None
        if begun is not None:
            return Told(begun.does, begun.file, begun.line, begun.phase, begun.moves, ends)
        origin, phase = self._origin(computation, i)
        calls = i.opcode == "custom-call" and _CALLBACK.search(i.rest) is not None
        if calls or (kind is not None and "is_host_transfer=true" in i.rest):
            does = CALLS_HOST
        elif kind is not None:
            does = MOVES
        else:
            does = RUNS if i.opcode in _RUNS else COMPUTES
        frame = origin.frame
        moves = (kind[1], None) if kind is not None and does == MOVES else None
        return Told(does, frame and frame.file, frame and frame.line, phase, moves)

    def _origin(self, computation: Computation, i: Instruction) -> tuple[Origin, str | None]:
        """Where an instruction is from: as it says, else as what is in it says, else what it is made for or of."""
        origin, name = self._origins.of_instruction(i), op_name(i)
        if origin.frame is None:
            for inner in self._inside(i):
                told = self._origins.of_instruction(inner)
                if told.frame is not None:
                    origin, name = told, op_name(inner)
                    break
        if origin.frame is None:
            origin = self._origins.of_value(computation, i)
        if origin.frame is None:
            origin = self._origins.of_source(computation, i)
        origin = self._own(origin)
        return origin, RECOMPUTED if REMATTED in name else origin.phase

    def _inside(self, i: Instruction) -> Sequence[Instruction]:
        """What a fusion, or a computation that is run, does; its result first."""
        bodies = [self._module.named(name) for name in called(i, "calls", "to_apply", "body")]
        return [x for body in bodies if body for x in list(body.instructions.values())[: -_MOST - 1 : -1]]


def operations(module: Module) -> int:
    """How many operations a device runs in one call of a program, as far as its text tells: a loop that ends when a
    value says so counts as one round."""
    times = Counted(module)
    sites = _running(module).values()
    return sum(times[computation.name].times for computation, i in sites if i.opcode not in _NAMES)


def _running(module: Module) -> Mapping[str, tuple[Computation, Instruction]]:
    """The instructions that run by themselves, by name: not those inside fusions."""
    found: dict[str, tuple[Computation, Instruction]] = {}
    seen, waiting = {module.entry.name}, [module.entry]
    while waiting:
        computation = waiting.pop()
        for name, i in computation.instructions.items():
            found.setdefault(name, (computation, i))
            for other in called(i, *_RUNS[i.opcode]) if i.opcode in _RUNS else ():
                body = module.named(other)
                if body is not None and other not in seen:
                    seen.add(other)
                    waiting.append(body)
    return found
