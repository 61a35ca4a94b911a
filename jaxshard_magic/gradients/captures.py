"""A step captured at the shapes that the rewriting of its gradients needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config.options import GradientOptions
from ..errors import ShardError
from ..program.batching.batch import Batch
from ..program.facts import Facts
from ..program.mapped import Mapped
from ..program.trace import Traced, path_name
from .accumulate import Cut


@dataclass(frozen=True)
class Shapes:
    """Shapes of the step's flat arguments, with `examples` in the place of the batch's `of`; `option` asks for them."""

    avals: Sequence[Any]
    option: str
    examples: int
    of: int


@dataclass(frozen=True)
class Needs:
    """What a step has to be captured at beside its own shapes.

    Args:
        padded: with rows that make the batch divide; None where it does.
        part: one microbatch, of the padded batch where there is one; None without microbatches.
        cut: how the batch is taken in microbatches.
        twice: one microbatch and the whole batch with two examples for each, where a microbatch has one; empty where
            it has more.
        batch: that of the padded step, or of the step.
        added: by argument, flat, the dimension that rows are added to and how many.
    """

    padded: Shapes | None
    part: Shapes | None
    cut: Cut | None
    batch: Batch
    added: Mapping[int, tuple[int, int]]
    twice: tuple[Shapes, ...] = ()


@dataclass(frozen=True)
class Captures:
    """A step with each gradient call as one equation, at its own shapes (`whole`) and at those of `needs`.

    `mapped`: how it is spread where it is written for one device. `twice`: captures it at the shapes of `needs.twice`,
    which takes as long as tracing it two times; None where there are none.
    """

    whole: Traced
    needs: Needs
    padded: Traced | None = None
    part: Traced | None = None
    mapped: Mapped | None = None
    twice: Callable[[], tuple[Traced, Traced]] | None = None


def needs(
    captured: Traced,
    facts: Facts,
    options: GradientOptions,
    shards: int,
    *,
    per_device: bool = False,
    pipeline: bool = False,
) -> Needs:
    """The shapes at which `captured` has to be captured again.

    Args:
        facts: of the step as it is.
        shards: in how many parts devices have the batch.
        per_device: whether the step is what one device does, to whose batch no rows are added.
        pipeline: whether a pipeline takes the microbatches, which has no use for rows that are added.

    Raises `ShardError` for a batch that can't be taken so.
    """
    padded, added, parts = None, {}, options.microbatches
    batch = larger = facts.batch
    if options.pad and batch.size is not None and batch.size % (shards * parts):
        more = -batch.size % (shards * parts)
        added = _added(captured, batch, more)
        larger = replace(batch, size=batch.size + more)
        avals = _resized(captured, {i: (dim, size + n) for i, (dim, size, n) in added.items()})
        padded = Shapes(avals, "--pad", batch.size + more, batch.size)
    cut, part, twice, n = None, None, (), len(captured.consts)
    if parts > 1:
        each = " of each device" if per_device else ""
        cut = _cut(captured, facts, larger, parts, shards, each, pads=not (per_device or pipeline))
        whole = captured.closed.in_avals[n:] if padded is None else padded.avals
        sizes = {i: (d, whole[i - n].shape[d] // parts) for i, (d,) in larger.dims.items()}
        option = f"--microbatches {parts}"
        part = Shapes(_resized(captured, sizes), option, cut.each, cut.examples)
        if cut.each == 1:
            double = ({i: (d, 2 * size * k) for i, (d, size) in sizes.items()} for k in (1, parts))
            twice = tuple(
                Shapes(_resized(captured, each), option, 2 * k, cut.examples)
                for each, k in zip(double, (1, parts), strict=True)
            )
    rows = {i - n: (dim, more) for i, (dim, _, more) in added.items()}
    return Needs(padded, part, cut, larger, rows, twice)


def _added(captured: Traced, batch: Batch, more: int) -> dict[int, tuple[int, int, int]]:
    """Of each input that holds examples: their dimension, its size, and how many rows are added for `more` examples."""
    assert batch.size is not None
    added = {}
    for i, dims in batch.dims.items():
        if len(dims) != 1 or i < len(captured.consts):
            raise ShardError(
                f"--pad: {path_name(captured.in_paths[i])} holds the examples where no rows can be added to it"
                f"{', closed over by the step: pass it as an argument' if i < len(captured.consts) else ''}"
            )
        size = captured.closed.in_avals[i].shape[dims[0]]
        added[i] = dims[0], size, more * (size // batch.size)
    return added


def _resized(captured: Traced, sizes: Mapping[int, tuple[int, int]]) -> list[Any]:
    """The avals of the arguments, some with one dimension of another size: (dimension, size) by input."""
    avals = list(captured.closed.in_avals)
    for i, (dim, size) in sizes.items():
        shape = list(avals[i].shape)
        shape[dim] = size
        avals[i] = avals[i].update(shape=tuple(shape))
    return avals[len(captured.consts) :]


def _cut(
    captured: Traced, facts: Facts, batch: Batch, microbatches: int, shards: int, each: str, pads: bool
) -> Cut:
    option = f"--microbatches {microbatches}"
    if (why := why_whole(captured, batch)) is not None:
        fix = _say_where(captured, facts) if batch.joined is None else "leave the option out"
        raise ShardError(f"{why}; {fix}", option=option)
    assert batch.size is not None
    several = next((i for i, dims in batch.dims.items() if len(dims) != 1), None)
    if several is not None:
        raise ShardError(
            f"{path_name(captured.in_paths[several])} has the examples along {len(batch.dims[several])} dimensions; a "
            "microbatch of it can't be cut out",
            option=option,
        )
    held = next((i for i in batch.dims if i < len(captured.consts)), None)
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
    return Cut(batch.size, microbatches, shards)


def why_whole(captured: Traced, batch: Batch) -> str | None:
    """Why the batch can't be taken apart, in whatever number of microbatches; None where it has a size to divide."""
    if batch.joined is not None:
        name = path_name(captured.in_paths[min(batch.dims)]) if batch.dims else "the batch"
        return (
            f"the rows of {name} are made of each other, as the nodes of a graph are by its edges: no microbatch can "
            "be cut out of them"
        )
    return "no batch was found among the step's arguments" if batch.size is None else None


def has_one_example(captured: Traced, facts: Facts) -> bool:
    """Return whether all arrays of data have a first dimension of 1: another one may then be taken for the batch."""
    shapes = (captured.closed.in_avals[i].shape for i in facts.roles.data)
    first = [shape[0] for shape in shapes if shape]
    return bool(first) and {*first} == {1}


def _say_where(captured: Traced, facts: Facts) -> str:
    """How to name the batch: by an argument of data that there is."""
    closed_over = len(captured.consts)
    data = (i for i in sorted(facts.roles.data) if i >= closed_over and captured.closed.in_avals[i].shape)
    named = next((path_name(captured.in_paths[i]).partition(".")[0] for i in data), None)
    if named is None:
        return "pass the examples as an argument"
    return f"say where it is, as in --spec \"{named}=P('data')\""
