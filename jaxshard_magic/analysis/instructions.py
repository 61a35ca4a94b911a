"""Describe the operations of a profiler trace: source line, phase, and compute, communication or control flow."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..program.flops import REMAT_SCOPE
from .collectives import Cause, HloCollective
from .hlo import BRANCHES, Computation, Instruction, Module, RunCounts, called_computations
from .origin import HloOrigins, Origin, calling_line, op_name

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
# Opcodes that only name values: nothing runs.
_NAMES = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast"})
RECOMPUTED = "recomputed"
_MOST = 64  # instructions of a fusion searched for a source line

COMPUTES, MOVES, CALLS_HOST, RUNS = "computes", "moves", "calls the host", "runs others"


@dataclass(frozen=True)
class InstructionInfo:
    """Description of one instruction.

    Attributes:
        activity: One of the constants `COMPUTES`, `MOVES`, `CALLS_HOST` and `RUNS`.
        file: Source file, by the name used by Python.
        line: Source line.
        phase: Phase of the step.
        collective: Kind and mesh axes of a collective, axes None if unknown; None for other instructions.
        ends: Name of the asynchronous instruction completed by this one; None for other instructions.
        called: Line of the call leading to `line`.
    """

    activity: str
    file: str | None = None
    line: int | None = None
    phase: str | None = None
    collective: tuple[str, tuple[str, ...] | None] | None = None
    ends: str | None = None
    called: str | None = None


class Instructions:
    """Descriptions of a program's instructions by name, computed on access.

    Args:
        module: Parsed program.
        origins: Origins of the values of the program.
        moves: Collectives of the program with their causes.
        relocate: Maps an origin read from the text to an origin in the step.
    """

    def __init__(
        self,
        module: Module,
        origins: HloOrigins,
        moves: Sequence[tuple[HloCollective, Cause]],
        relocate: Callable[[Origin], Origin] = lambda origin: origin,
    ):
        self._module, self._origins, self._own = module, origins, relocate
        self._where = _scheduled_instructions(module)
        self._moves = {(move.computation, move.instruction.name): (move, cause) for move, cause in moves}
        self._known: dict[str, InstructionInfo | None] = {}

    def __getitem__(self, name: str) -> InstructionInfo | None:
        """Return the description of an instruction; None for a name unknown to the program."""
        if name not in self._known:
            own = self.name_of(name)
            self._known[name] = None if own is None else self._describe(*self._where[own])
        return self._known[name]

    def name_of(self, operation: str) -> str | None:
        """Return the instruction name of an operation in a trace; None for an operation unknown to the program."""
        return operation if operation in self._where else self._of_kernels.get(operation)

    def custom_calls(self, after: str, before: str) -> list[str]:
        """Return the custom calls that run between two instructions.

        If `before` precedes `after` (the next trip of a loop), or is in another body, returns the custom calls at
        the end of the body of `after` and at the beginning of the body of `before`.

        Args:
            after: Name of the earlier instruction.
            before: Name of the later instruction.
        """
        (first, _), (last, _) = self._where[after], self._where[before]
        here, there = list(first.instructions), list(last.instructions)
        low, high = here.index(after) + 1, there.index(before)
        between = here[low:high] if first is last and low <= high else [*here[low:], *there[:high]]
        return [name for name in between if self._where[name][1].opcode == "custom-call"]

    @cached_property
    def _of_kernels(self) -> Mapping[str, str]:
        """Instruction name by GPU kernel name."""
        # LLVM allows no "." in function names. Instructions with equal code may share a kernel, named after the first
        # of them.
        return {_NO_IDENTIFIER.sub("_", name): name for name in self._where}

    def runs_once(self, name: str) -> bool:
        """Return whether an instruction runs exactly once per run of the program."""
        return name in self._module.entry.instructions

    def _describe(self, computation: Computation, i: Instruction) -> InstructionInfo:
        move = self._moves.get((computation.name, i.name))
        if move is not None:
            collective, cause = move
            phase = RECOMPUTED if REMAT_SCOPE in op_name(i) else cause.phase
            return InstructionInfo(
                MOVES, cause.file, cause.line, phase, (collective.kind, collective.axes), called=cause.called
            )
        kind = _MOVES.match(i.opcode)
        ends = i.operands[0] if i.opcode.endswith("-done") and i.operands else None
        started = self[ends] if ends is not None else None
        if started is not None:
            return replace(started, ends=ends)
        origin, phase = self._origin(computation, i)
        calls = i.opcode == "custom-call" and _CALLBACK.search(i.rest) is not None
        if calls or (kind is not None and "is_host_transfer=true" in i.rest):
            activity = CALLS_HOST
        elif kind is not None:
            activity = MOVES
        else:
            activity = RUNS if i.opcode in _RUNS else COMPUTES
        frame = origin.frame
        moves = (kind[1], None) if kind is not None and activity == MOVES else None
        return InstructionInfo(
            activity, frame and frame.file, frame and frame.line, phase, moves, called=calling_line(origin)
        )

    def _origin(self, computation: Computation, i: Instruction) -> tuple[Origin, str | None]:
        """Return an instruction's origin and phase: its own, else of its body, else of its consumers or sources."""
        origin, name = self._origins.of_instruction(i), op_name(i)
        if origin.frame is None:
            for inner in self._body_instructions(i):
                told = self._origins.of_instruction(inner)
                if told.frame is not None:
                    origin, name = told, op_name(inner)
                    break
        if origin.frame is None:
            origin = self._origins.of_value(computation, i)
        if origin.frame is None:
            origin = self._origins.of_source(computation, i)
        origin = self._own(origin)
        return origin, RECOMPUTED if REMAT_SCOPE in name else origin.phase

    def _body_instructions(self, i: Instruction) -> Sequence[Instruction]:
        """Return the instructions in the bodies of a fusion or a call, results first."""
        bodies = [self._module.find_computation(name) for name in called_computations(i, "calls", "to_apply", "body")]
        return [x for body in bodies if body for x in list(body.instructions.values())[: -_MOST - 1 : -1]]


def count_operations(module: Module) -> int:
    """Return the number of operations run by a device in one call of a program.

    A loop of unknown length counts as one trip.
    """
    times = RunCounts(module)
    sites = _scheduled_instructions(module).values()
    return sum(times[computation.name].times for computation, i in sites if i.opcode not in _NAMES)


def _scheduled_instructions(module: Module) -> Mapping[str, tuple[Computation, Instruction]]:
    """Return the instructions run on their own, by name, with their computations; without those inside fusions."""
    found: dict[str, tuple[Computation, Instruction]] = {}
    seen, waiting = {module.entry.name}, [module.entry]
    while waiting:
        computation = waiting.pop()
        for name, i in computation.instructions.items():
            found.setdefault(name, (computation, i))
            for other in called_computations(i, *_RUNS[i.opcode]) if i.opcode in _RUNS else ():
                body = module.find_computation(other)
                if body is not None and other not in seen:
                    seen.add(other)
                    waiting.append(body)
    return found
