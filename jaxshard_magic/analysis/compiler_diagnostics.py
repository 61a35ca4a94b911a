"""Turn messages in XLA's compile log into findings for the user, merged and in plain words."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..plan import Finding
from ..units import byte_text, seconds_text
from . import hlo_shardings
from .hlo import Shape

OTHER = "compiler"  # code of a message of unknown kind
LEVELS = {"slow-folding": "info", "slow-compile": "info"}  # a slow compile does not slow down the step

_MOVE = re.compile(r"from sharding (\{.+?\}) to (\{.+?\}) (?:efficiently|without)")
_RESULT = re.compile(r"%?[\w.\-]+ = ([a-z]\w*)\[([\d,]*)\]")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TOOK = re.compile(r"The operation took (?=\d)(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?")
_MODULE = re.compile(r"\[Compiling module ([^\]]+)\]")
_LIMITS = re.compile(r"below \S+ \((\d+) bytes\).*reduced to \S+ \((\d+) bytes\)")


@dataclass(frozen=True)
class Diagnostic:
    """Warning of XLA, logged one or more times.

    Attributes:
        code: Kind of message.
        text: Sentence for the user, without the full stop.
        shape: Array in question; for a sharded array the full shape, rounded up to equal shards.
        op_name: Operation in the metadata of the compiled program.
        stack_frame_id: Stack frame in the metadata of the compiled program.
        count: Number of times; two messages on the start and the end of one slow operation count once.
        seconds: Time taken, over all messages; None if not logged.
        fix: Line of code against the problem; None without one.
    """

    code: str
    text: str
    shape: Shape | None = None
    op_name: str | None = None
    stack_frame_id: int | None = None
    count: int = 1
    seconds: float | None = None
    fix: str | None = None


def parse_messages(messages: Iterable[str], mesh: Mapping[str, int] | None = None) -> tuple[Diagnostic, ...]:
    """Parse the messages of a compiler's log; equal messages are merged, in the order of first appearance.

    Args:
        messages: Messages of the log.
        mesh: Axis sizes by name, for naming the parts of an array.

    Returns:
        A message of unknown kind keeps the first sentence of the log.

    >>> parse_messages(["[SPMD] Involuntary full rematerialization. And more"] * 2)[0].text
    'XLA says: Involuntary full rematerialization'
    """
    merged: dict[Diagnostic, Diagnostic] = {}
    for message in messages:
        diagnostic = _parse_message(message, mesh or {})
        key = replace(diagnostic, seconds=None)
        if before := merged.get(key):
            # XLA logs a slow operation when it gets slow, and again with the seconds at the end: one event, two
            # messages.
            known = [s for s in (before.seconds, diagnostic.seconds) if s is not None]
            count = before.count + (diagnostic.seconds is None)
            diagnostic = replace(before, count=count, seconds=sum(known) if known else None)
        merged[key] = diagnostic
    return tuple(merged.values())


def findings(
    complaints: Sequence[Diagnostic], line_of: Callable[[Diagnostic], str | None] = lambda _: None
) -> tuple[Finding, ...]:
    """Return the findings for the user, one for equal messages on one line.

    Args:
        complaints: Parsed messages.
        line_of: Returns the source line as `line 12`, or None if unknown.
    """
    counts: dict[Finding, int] = {}
    for one in complaints:
        line = line_of(one)
        took = f": this took {seconds_text(one.seconds)}" if one.seconds is not None else ""
        message = f"{f'At {line} ' if line else ''}{one.text}{took}"
        finding = Finding(one.code, LEVELS.get(one.code, "warning"), message, one.fix)
        counts[finding] = counts.get(finding, 0) + one.count
    return tuple(
        replace(finding, message=f"{finding.message}{f' ({n} times)' if n > 1 else ''}.")
        for finding, n in counts.items()
    )


def _parse_message(message: str, mesh: Mapping[str, int]) -> Diagnostic:
    shape, name, frame = _RESULT.search(message), _OP_NAME.search(message), _FRAME.search(message)
    one = Diagnostic(
        OTHER,
        f"XLA says: {_first_sentence(message)}",
        Shape(shape[1], tuple(int(n) for n in shape[2].split(",") if n)) if shape else None,
        name[1].replace("\\'", "'").replace('\\"', '"') if name else None,
        int(frame[1]) if frame else None,
        seconds=_seconds(message),
    )
    # Without the first letter, which XLA writes in lower or upper case.
    if "nvoluntary full rematerialization" in message:
        return _full_remat(replace(one, code="full-remat"), message, mesh)
    if "Can't reduce memory use" in message:
        return _over_memory(replace(one, code="over-memory"), message)
    if "Constant folding" in message:
        return _slow_folding(replace(one, code="slow-folding"))
    if "low compile?" in message:
        return _slow_compile(replace(one, code="slow-compile"), message)
    return one


def _full_remat(one: Diagnostic, message: str, mesh: Mapping[str, int]) -> Diagnostic:
    """Explain an involuntary full rematerialization, with an intermediate constraint as a fix."""
    move = _MOVE.search(message)
    if not move or not one.shape:
        return one
    dims = one.shape.dims
    before, after = (hlo_shardings.parse_sharding(text, len(dims), mesh) for text in move.groups())
    if before is None or after is None:
        return replace(one, shape=None)
    # The partitioner logs the shape of one shard, but every device gathers the full array.
    full_shape = Shape(one.shape.dtype, tuple(n * parts for n, parts in zip(dims, before.parts, strict=True)))
    text = (
        f"XLA cannot move {_named(full_shape)} from {before} to {after} in parts: "
        f"every device gathers the whole array, {byte_text(full_shape.bytes)}"
    )
    fix = None
    if intermediate := hlo_shardings.intermediate_axes(before, after):
        text += "; with a constraint in between it goes in parts"
        fix = f"x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, {hlo_shardings.spec_text(intermediate)}))"
    return replace(one, text=text, shape=full_shape, fix=fix)


def _over_memory(one: Diagnostic, message: str) -> Diagnostic:
    limits = _LIMITS.search(message)
    if not limits:
        return one
    wanted, reached = (byte_text(int(n)) for n in limits.groups())
    text = (
        f"XLA computes values twice to save memory and still needs {reached} on a device, "
        f"where it wants to stay below {wanted}"
    )
    return replace(one, text=text)


def _slow_folding(one: Diagnostic) -> Diagnostic:
    what = f"{_named(one.shape)}, {byte_text(one.shape.bytes)}," if one.shape else "a value"
    text = (
        f"XLA computes {what} while it compiles, because no input of the step goes into it; made outside the step and "
        "passed in, it is computed once"
    )
    return replace(one, text=text)


def _slow_compile(one: Diagnostic, message: str) -> Diagnostic:
    module = _MODULE.search(message)
    return replace(one, text=f"XLA finds {module[1] if module else 'this program'} very slow to compile")


def _named(shape: Shape) -> str:
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}]"


def _seconds(message: str) -> float | None:
    """Return the seconds in `The operation took 2m32.4s`; None in other messages."""
    took = _TOOK.search(message)
    if not took:
        return None
    return sum(float(n or 0) * unit for n, unit in zip(took.groups(), (3600, 60, 1), strict=True))


def _first_sentence(message: str) -> str:
    line = next((line.strip() for line in message.splitlines() if line.strip(" *")), "nothing")
    return re.split(r"\. ", re.sub(r"^\[\w+\] ", "", line))[0].rstrip(".:")
