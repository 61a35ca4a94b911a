"""Collectives with the lines that cause them, in the words of a Report."""

import re
from collections.abc import Callable, Iterable, Sequence

from ..places import place
from ..program.labels import job_of
from ..report import Leaf
from .collectives import Cause, Move
from .hlo import Module
from .origin import Origin, Origins, op_name
from .sources import SourceText

_CALLBACK = re.compile(r'custom_call_target="[^"]*callback')
_BRANCH = re.compile(
    r"/branch_\d+_fun/"
)  # of `jax.lax.cond`; XLA's own conditionals choose the device that calls
_HOST = "callback", "is_host_transfer"


def traced(module: Module, moves: Iterable[Move], origins: Origins) -> tuple[tuple[Move, Origin], ...]:
    """Each of `moves` with where it comes from."""
    return tuple(
        (
            move,
            origins.of(module.computations[move.computation], move.instruction, move.operand, move.position),
        )
        for move in moves
    )


def caused(
    module: Module, moves: Iterable[tuple[Move, Origin]], leaves: Sequence[Leaf], text: SourceText
) -> tuple[tuple[Move, Cause], ...]:
    """Each of `moves` with the line that caused it and what it moves, in the words of a report.

    `leaves` are the step's inputs that its `Origins` count; files keep the names that Python knows them by.
    """

    def cause(move: Move, origin: Origin) -> Cause:
        job = job_of(op_name(move.instruction))
        what = (
            _what(module, move, origin, leaves) if job is None else f"{job}: {_array(module, move, origin)}"
        )
        if origin.frame is None:
            return Cause(phase=origin.phase, what=what, job=job)
        frame, deeper = origin.frame, origin.deeper
        at = None if deeper is None else f"{deeper.file}:{deeper.line}"
        return Cause(origin.phase, frame.file, frame.line, text.line(frame), at, what, job)

    return tuple((move, cause(move, origin)) for move, origin in moves)


def host_calls(
    module: Module, origins: Origins, own: Callable[[Origin], Origin] = lambda origin: origin
) -> tuple[str | None, ...]:
    """Where the step calls Python in each run: the place as a reader knows it, None where it is not known; one for
    each call. What a branch calls, such as a check that raises, is left out.

    CPU and GPU call it as a function; TPU sends each argument to the host, and those of one call have one name.
    `own`: the step's own place of one that the text tells.
    """
    lines: list[str | None] = []
    sent: set[tuple[str, str | None]] = set()
    for computation in module.computations.values():
        if not any(word in computation.text for word in _HOST):
            continue
        for i in computation.instructions.values():
            called = i.opcode == "custom-call" and _CALLBACK.search(i.rest) is not None
            if not called and not (i.opcode == "send" and "is_host_transfer=true" in i.rest):
                continue
            if _BRANCH.search(op_name(i)):
                continue
            frame = own(origins.of_instruction(i)).frame
            line = None if frame is None else place(frame.file, frame.line)
            if called or (op_name(i), line) not in sent:
                lines.append(line)
            sent.add((op_name(i), line))
    return tuple(lines)


def _what(module: Module, move: Move, origin: Origin, leaves: Sequence[Leaf]) -> str:
    if origin.leaf is not None and origin.leaf < len(leaves):
        path = leaves[origin.leaf].path
        return f"gradient of {path}" if origin.gradient else path
    return _array(module, move, origin)


def _array(module: Module, move: Move, origin: Origin) -> str:
    """`activation f32[8,64]`: what moves, where it is no leaf."""
    operand = module.computations[move.computation].instructions[move.operand]
    shape = next((f"{s.dtype}[{','.join(map(str, s.dims))}]" for s in operand.shapes), "")
    if operand.shapes and not operand.shapes[0].dims:
        return f"a number, {shape}"
    name = {"forward": "activation ", "backward": "gradient of an activation "}.get(origin.phase or "", "")
    return name + shape
