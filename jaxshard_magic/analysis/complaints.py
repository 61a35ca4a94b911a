"""What XLA complained of while it compiled, as findings: its log's messages read, counted and put plainly."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..plan import Finding
from ..units import byte_text, seconds_text
from . import cuts
from .hlo import Shape

OTHER = "compiler"  # the code of a message of no known kind
LEVELS = {"slow-folding": "info", "slow-compile": "info"}  # they cost the step itself nothing

_MOVE = re.compile(r"from sharding (\{.+?\}) to (\{.+?\}) (?:efficiently|without)")
_RESULT = re.compile(r"%?[\w.\-]+ = ([a-z]\w*)\[([\d,]*)\]")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TOOK = re.compile(r"The operation took (?=\d)(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?")
_MODULE = re.compile(r"\[Compiling module ([^\]]+)\]")
_LIMITS = re.compile(r"below \S+ \((\d+) bytes\).*reduced to \S+ \((\d+) bytes\)")


@dataclass(frozen=True)
class Complaint:
    """One thing that XLA complained of, `count` times; `text` says it, without the full stop.

    `shape` is the array that it is about, of one that is cut all of it, rounded up to equal shards. `op_name` and
    `stack_frame_id` are those of the compiled program's metadata. `seconds` are what it took, all times together.
    """

    code: str
    text: str
    shape: Shape | None = None
    op_name: str | None = None
    stack_frame_id: int | None = None
    count: int = 1
    seconds: float | None = None
    fix: str | None = None


def complaints(messages: Iterable[str], mesh: Mapping[str, int] | None = None) -> tuple[Complaint, ...]:
    """Read the messages of a compiler's log, alike ones merged, in the order in which each first came.

    `mesh` are the axes, by which parts of an array are named. What is not understood keeps its own first sentence.

    >>> complaints(["[SPMD] Involuntary full rematerialization. And more"] * 2)[0].text
    'XLA says: Involuntary full rematerialization'
    """
    merged: dict[Complaint, Complaint] = {}
    for message in messages:
        one = _read(message, mesh or {})
        kind = replace(one, seconds=None)
        if before := merged.get(kind):
            # What is slow is told of when it gets slow, and again, with its seconds, when it is done.
            known = [s for s in (before.seconds, one.seconds) if s is not None]
            count = before.count + (one.seconds is None)
            one = replace(before, count=count, seconds=sum(known) if known else None)
        merged[kind] = one
    return tuple(merged.values())


def findings(
    complaints: Sequence[Complaint], line_of: Callable[[Complaint], str | None] = lambda _: None
) -> tuple[Finding, ...]:
    """What to tell the user of `complaints`, the same of one line once; `line_of` says `line 12` where it is known."""
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


def _read(message: str, mesh: Mapping[str, int]) -> Complaint:
    shape, name, frame = _RESULT.search(message), _OP_NAME.search(message), _FRAME.search(message)
    one = Complaint(
        OTHER,
        f"XLA says: {_first_sentence(message)}",
        Shape(shape[1], tuple(int(n) for n in shape[2].split(",") if n)) if shape else None,
        name[1].replace("\\'", "'").replace('\\"', '"') if name else None,
        int(frame[1]) if frame else None,
        seconds=_seconds(message),
    )
    if "nvoluntary full rematerialization" in message:
        return _full_remat(replace(one, code="full-remat"), message, mesh)
    if "Can't reduce memory use" in message:
        return _over_memory(replace(one, code="over-memory"), message)
    if "Constant folding" in message:
        return _slow_folding(replace(one, code="slow-folding"))
    if "low compile?" in message:
        return _slow_compile(replace(one, code="slow-compile"), message)
    return one


def _full_remat(one: Complaint, message: str, mesh: Mapping[str, int]) -> Complaint:
    """The partitioner names the shard of one device: all parts together are what every device gathers."""
    move = _MOVE.search(message)
    if not move or not one.shape:
        return one
    dims = one.shape.dims
    before, after = (cuts.read(text, len(dims), mesh) for text in move.groups())
    if before is None or after is None:
        return replace(one, shape=None)
    whole = Shape(one.shape.dtype, tuple(n * parts for n, parts in zip(dims, before.parts, strict=True)))
    text = (
        f"XLA cannot move {_named(whole)} from {before} to {after} in parts: "
        f"every device gathers the whole array, {byte_text(whole.bytes)}"
    )
    fix = None
    if way := cuts.between(before, after):
        text += "; with a constraint in between it goes in parts"
        fix = f"x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, {cuts.spec_text(way)}))"
    return replace(one, text=text, shape=whole, fix=fix)


def _over_memory(one: Complaint, message: str) -> Complaint:
    limits = _LIMITS.search(message)
    if not limits:
        return one
    wanted, reached = (byte_text(int(n)) for n in limits.groups())
    text = (
        f"XLA computes values twice to save memory and still needs {reached} on a device, "
        f"where it wants to stay below {wanted}"
    )
    return replace(one, text=text)


def _slow_folding(one: Complaint) -> Complaint:
    what = f"{_named(one.shape)}, {byte_text(one.shape.bytes)}," if one.shape else "a value"
    text = (
        f"XLA computes {what} while it compiles, because no input of the step goes into it; made outside the step and "
        "passed in, it is computed once"
    )
    return replace(one, text=text)


def _slow_compile(one: Complaint, message: str) -> Complaint:
    module = _MODULE.search(message)
    return replace(one, text=f"XLA finds {module[1] if module else 'this program'} very slow to compile")


def _named(shape: Shape) -> str:
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}]"


def _seconds(message: str) -> float | None:
    """Of `The operation took 2m32.4s`; None where a message does not say."""
    took = _TOOK.search(message)
    if not took:
        return None
    return sum(float(n or 0) * unit for n, unit in zip(took.groups(), (3600, 60, 1), strict=True))


def _first_sentence(message: str) -> str:
    line = next((line.strip() for line in message.splitlines() if line.strip(" *")), "nothing")
    return re.split(r"\. ", re.sub(r"^\[\w+\] ", "", line))[0].rstrip(".:")
