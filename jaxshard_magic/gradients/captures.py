"""Shapes at which a step has to be captured to rewrite its gradient calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config.options import GradientOptions
from ..errors import ShardError
from ..program.batching.batch import Batch
from ..program.facts import Facts
from ..program.per_device import DeviceMapping
from ..program.trace import Traced, path_name
from .accumulate import MicrobatchSplit


@dataclass(frozen=True)
class CaptureShapes:
    """Shapes for one capture of a step.

    Attributes:
        avals: Avals of the step's flat arguments.
        option: Option that asks for this capture.
        examples: Number of examples in `avals`.
        batch_size: Number of examples in the batch that they replace.
    """

    avals: Sequence[Any]
    option: str
    examples: int
    batch_size: int


@dataclass(frozen=True)
class NeededCaptures:
    """Captures of a step needed in addition to the capture at its own shapes.

    Attributes:
        padded: Shapes with rows added so that the batch divides; None where it does already.
        part: Shapes of one microbatch, of the padded batch if there is one; None without microbatches.
        cut: Division of the batch into microbatches.
        batch: Batch of the padded step, or of the step.
        added: Dimension that rows are added to and their number, by flat argument.
        at_two: Shapes of a microbatch and of the whole batch with two examples in place of each, for microbatches of
            one example; empty for larger ones.
    """

    padded: CaptureShapes | None
    part: CaptureShapes | None
    cut: MicrobatchSplit | None
    batch: Batch
    added: Mapping[int, tuple[int, int]]
    at_two: tuple[CaptureShapes, ...] = ()


@dataclass(frozen=True)
class Captures:
    """Captures of a step, with each gradient call as an equation.

    Attributes:
        whole: The step at its own shapes.
        needs: Shapes of the other captures.
        padded: The step with rows added to its batch.
        part: The step at one microbatch.
        mapped: Mapping onto devices of a step written for one device (`jax.pmap`, named axes); None for other steps.
        trace_at_two: Captures the step at the shapes of `needs.at_two`; costs as much as tracing it twice. None where
            there are none.
    """

    whole: Traced
    needs: NeededCaptures
    padded: Traced | None = None
    part: Traced | None = None
    mapped: DeviceMapping | None = None
    trace_at_two: Callable[[], tuple[Traced, Traced]] | None = None


def needed_captures(
    captured: Traced,
    facts: Facts,
    options: GradientOptions,
    shards: int,
    *,
    per_device: bool = False,
    pipeline: bool = False,
) -> NeededCaptures:
    """Return the shapes at which `captured` has to be captured again.

    Args:
        captured: The step with each gradient call as an equation.
        facts: Facts of the step as it is.
        options: Options of the gradients.
        shards: Number of shards of the batch over devices.
        per_device: Whether the step is written for one device; no rows are added to its batch.
        pipeline: Whether a pipeline runs the microbatches; a pipeline has no use for added rows.

    Raises:
        ShardError: The batch can't be divided or padded as asked.
    """
    padded, added, parts = None, {}, options.microbatches
    batch = larger = facts.batch
    if options.pad and batch.size is not None and batch.size % (shards * parts):
        more = -batch.size % (shards * parts)
        added = _added(captured, batch, more)
        larger = replace(batch, size=batch.size + more)
        avals = _resized(captured, {i: (dim, size + n) for i, (dim, size, n) in added.items()})
        padded = CaptureShapes(avals, "--pad", batch.size + more, batch.size)
    cut, part, twice, n = None, None, (), len(captured.consts)
    if parts > 1:
        each = " of each device" if per_device else ""
        cut = _cut(captured, facts, larger, parts, shards, each, pads=not (per_device or pipeline))
        whole = captured.closed.in_avals[n:] if padded is None else padded.avals
        sizes = {i: (d, whole[i - n].shape[d] // parts) for i, (d,) in larger.input_dims.items()}
        option = f"--microbatches {parts}"
        part = CaptureShapes(_resized(captured, sizes), option, cut.microbatch_size, cut.examples)
        # JAX traces dimensions of size 1 into other operations (0.10 to 0.12): one example doesn't show the batch
        # dimension.
        if cut.microbatch_size == 1:
            double = ({i: (d, 2 * size * k) for i, (d, size) in sizes.items()} for k in (1, parts))
            twice = tuple(
                CaptureShapes(_resized(captured, each), option, 2 * k, cut.examples)
                for each, k in zip(double, (1, parts), strict=True)
            )
    rows = {i - n: (dim, more) for i, (dim, _, more) in added.items()}
    return NeededCaptures(padded, part, cut, larger, rows, twice)


def _added(captured: Traced, batch: Batch, more: int) -> dict[int, tuple[int, int, int]]:
    """Return dimension, size and number of added rows for `more` examples, by input that holds examples."""
    assert batch.size is not None
    added = {}
    for i, dims in batch.input_dims.items():
        if len(dims) != 1 or i < len(captured.consts):
            raise ShardError(
                f"--pad: {path_name(captured.in_paths[i])} holds the examples where no rows can be added to it"
                f"{', closed over by the step: pass it as an argument' if i < len(captured.consts) else ''}"
            )
        size = captured.closed.in_avals[i].shape[dims[0]]
        # An array may have several rows for each example.
        added[i] = dims[0], size, more * (size // batch.size)
    return added


def _resized(captured: Traced, sizes: Mapping[int, tuple[int, int]]) -> list[Any]:
    """Return the avals of the arguments with some dimensions resized: `(dimension, size)` by input."""
    avals = list(captured.closed.in_avals)
    for i, (dim, size) in sizes.items():
        shape = list(avals[i].shape)
        shape[dim] = size
        avals[i] = avals[i].update(shape=tuple(shape))
    return avals[len(captured.consts) :]


def _cut(
    captured: Traced, facts: Facts, batch: Batch, microbatches: int, shards: int, each: str, pads: bool
) -> MicrobatchSplit:
    option = f"--microbatches {microbatches}"
    if (why := indivisible_reason(captured, batch)) is not None:
        fix = _say_where(captured, facts) if batch.joining_equation is None else "leave the option out"
        raise ShardError(f"{why}; {fix}", option=option)
    assert batch.size is not None
    several = next((i for i, dims in batch.input_dims.items() if len(dims) != 1), None)
    if several is not None:
        raise ShardError(
            f"{path_name(captured.in_paths[several])} has the examples along "
            f"{len(batch.input_dims[several])} dimensions; a "
            "microbatch of it can't be cut out",
            option=option,
        )
    held = next((i for i in batch.input_dims if i < len(captured.consts)), None)
    if held is not None:
        raise ShardError(
            f"{path_name(captured.in_paths[held])} holds the examples and is closed over by the step; pass it as an "
            "argument",
            option=option,
        )
    if batch.size % (microbatches * shards):
        per = shards if shards > 1 else 1
        fits = [n for n in range(1, batch.size // per + 1) if batch.size % (n * per) == 0]
        near = sorted(fits, key=lambda n: (abs(n - microbatches), n))[:1]
        ways = [f"--microbatches {n} does" for n in near] + ["--pad adds rows"] * pads
        over = f" on {shards} shards" if shards > 1 else ""
        raise ShardError(
            f"{batch.size} examples{each} do not divide into {microbatches} microbatches{over}; {', '.join(ways)}",
            option=option,
        )
    return MicrobatchSplit(batch.size, microbatches, shards)


def indivisible_reason(captured: Traced, batch: Batch) -> str | None:
    """Return the reason why the batch can't be divided into any number of microbatches; None where it can."""
    if batch.joining_equation is not None:
        name = path_name(captured.in_paths[min(batch.input_dims)]) if batch.input_dims else "the batch"
        return (
            f"the rows of {name} are made of each other, as the nodes of a graph are by its edges: no microbatch can "
            "be cut out of them"
        )
    return "no batch was found among the step's arguments" if batch.size is None else None


def has_one_example(captured: Traced, facts: Facts) -> bool:
    """Return whether all data arrays have a first dimension of 1, so that another dimension may be taken for the
    batch."""
    shapes = (captured.closed.in_avals[i].shape for i in facts.roles.data)
    first = [shape[0] for shape in shapes if shape]
    return bool(first) and {*first} == {1}


def _say_where(captured: Traced, facts: Facts) -> str:
    """Return advice on naming the batch, with one of the step's data arguments."""
    closed_over = len(captured.consts)
    data = (i for i in sorted(facts.roles.data) if i >= closed_over and captured.closed.in_avals[i].shape)
    named = next((path_name(captured.in_paths[i]).partition(".")[0] for i in data), None)
    if named is None:
        return "pass the examples as an argument"
    return f"say where it is, as in --spec \"{named}=P('data')\""
