"""Attribute collectives and host callbacks to source lines, in the words of a report."""

import re
from collections.abc import Callable, Iterable, Sequence

from ..program.op_labels import parse_job
from ..report import Leaf
from .collectives import Cause, HloCollective
from .hlo import Module
from .origin import HloOrigins, Origin, calling_line, describe_origin, op_name
from .sources import SourceText

_CALLBACK = re.compile(r'custom_call_target="[^"]*callback')
# Branches of `jax.lax.cond`. Conditionals added by XLA, to choose the device that calls, have no such name.
_BRANCH = re.compile(r"/branch_\d+_fun/")
_HOST = "callback", "is_host_transfer"


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
