"""What a pipeline's actions would take on a chip: the roofline of each stage's programs, and their collectives."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from ..hardware import Chip
from ..pipeline.executed import Pipeline
from ..pipeline.jobs import Key
from ..report import Leaf
from ..schedule import Costs
from ..schedule.actions import KINDS
from ..targets import Target
from ..wires import Wire
from .collectives import merge
from .efficiency import LINKS
from .roofline import known, roofline, seconds, total
from .staged_memory import piece_bytes
from .staged_moves import Said, sent_by
from .staged_works import flops, runs_of, works_of

START = 36e-6  # seconds of an action that has nothing to do: benchmarks/bench_pipeline.py on 2 cores


@dataclass(frozen=True)
class Guess:
    """How well things go: `own`, which figure of a stage's roofline its products take; `sent`, how many times what its
    collectives take at the links' whole bandwidth, 0 where they overlap; `start`, whether actions wait for the host."""

    own: Literal["ideal", "own", "slow"]
    sent: float
    start: bool


LOW, BEST, HIGH = Guess("ideal", 0.0, False), Guess("own", 1.0, True), Guess("slow", 1 / LINKS, True)


def roofline_costs(
    pipeline: Pipeline, chip: Chip, target: Target | None, said: Mapping[Key, Said], guess: Guess = BEST
) -> Costs | None:
    """Seconds of each stage's actions on `chip`; None where a figure is not known.

    `target`: the slice or the nodes that the mesh is made of. `said`: what the programs' texts say.
    """
    mesh = pipeline.ranks.mesh
    wires = roofline(chip, mesh.shape, None, (), (), target).wires
    way = wires[pipeline.ranks.axis].bandwidth
    if not way and len(pipeline.ranks) > 1:
        return None
    stages = range(len(pipeline.stages))
    passes = []
    for s in stages:
        times = known((*_own(pipeline, s, chip, target, guess), *_sent(pipeline, s, said, wires)))
        if times is None:
            return None
        passes.append([own + guess.sent * sent for own, sent in zip(times[:3], times[3:], strict=True)])
    transfer = [max(sent_by(pipeline, s)) / way if way else 0.0 for s in stages]
    forward, input_grad, weight_grad = zip(*passes, strict=True)
    if guess.start:
        forward, weight_grad = with_start(forward), with_start(weight_grad)
    return Costs(forward, input_grad, weight_grad, transfer)


def with_start(seconds: Sequence[float]) -> list[float]:
    """Actions with what the host takes to start them."""
    return [each + START for each in seconds]


def flops_costs(pipeline: Pipeline) -> Costs:
    """Each stage's FLOPs of one microbatch, in units of the mean forward pass."""
    passes = [[flops(works) for works in works_of(pipeline, s).values()] for s in range(len(pipeline.stages))]
    mean = fmean(forward for forward, _, _ in passes) or 1.0
    return Costs(*([count / mean for count in each] for each in zip(*passes, strict=True)))


def update_seconds(pipeline: Pipeline, chip: Chip, leaves: Sequence[Leaf]) -> float:
    """What the update takes on the rank with most: parameters and optimizer state are read and written once, and the
    gradients are read."""
    times = [{"params": 3, "optimizer": 2}.get(row.role, 0) for row in leaves]
    moved = (
        sum(n * piece_bytes(pipeline, place, rank) for n, place in zip(times, pipeline.leaves, strict=True))
        for rank in range(len(pipeline.ranks))
    )
    return max(moved) / chip.hbm_bandwidth


def around_seconds(
    pipeline: Pipeline, chip: Chip, target: Target | None, said: Mapping[Key, Said]
) -> float | None:
    """What the collectives take that stages have before their first action and after their last, gradients added up
    over the examples among them: of the rank with most, and those of the update. None where a figure is not known."""
    wires = roofline(chip, pipeline.ranks.mesh.shape, None, (), (), target).wires
    of_ranks, rest = defaultdict[int, float](float), 0.0
    for (kind, number), one in said.items():
        if kind in KINDS:
            continue
        taken = total(_times(one, wires))
        if taken is None:
            return None
        if kind in ("prepare", "settle"):
            of_ranks[pipeline.rank_of((kind, number))] += taken
        else:
            rest += taken
    return max(of_ranks.values(), default=0.0) + rest


def weights_seconds(
    pipeline: Pipeline,
    chip: Chip,
    target: Target | None,
    said: Mapping[Key, Said],
    batch_axes: Collection[str],
) -> tuple[float, ...] | None:
    """Seconds of one microbatch that each stage sends over the axes of the examples: weights that are gathered and
    gradients that are added up, the same however small it is. None where a figure is not known."""
    wires = roofline(chip, pipeline.ranks.mesh.shape, None, (), (), target).wires
    stages = range(len(pipeline.stages))
    each = known(total(_sent(pipeline, s, said, wires, batch_axes)) for s in stages)
    return None if each is None else tuple(each)


def _own(pipeline: Pipeline, s: int, chip: Chip, target: Target | None, guess: Guess) -> list[float | None]:
    """Seconds of the products of a stage's forward pass, of its input gradients and of its weight gradients."""
    axes = pipeline.ranks.mesh.shape
    shares = ([share for _, share in works] for works in works_of(pipeline, s).values())
    return [getattr(roofline(chip, axes, each, (), (), target), guess.own) for each in shares]


def _sent(
    pipeline: Pipeline,
    s: int,
    said: Mapping[Key, Said],
    wires: Mapping[str, Wire],
    over: Collection[str] | None = None,
) -> list[float | None]:
    """Seconds of the collectives of the same three, the mean over microbatches; those of a whole backward pass count as
    the weights'. `over`: of those alone that go over these axes and no other."""
    runs, m = runs_of(pipeline), pipeline.split.schedule.microbatches

    def each(kind: str) -> Iterator[float | None]:
        for t in _times(said.get((kind, s), Said(())), wires, over):
            yield None if t is None else t * runs[kind, s] / m

    return [total(t for kind in kinds for t in each(kind)) for kinds in ("F", "I", "WB")]


def _times(one: Said, wires: Mapping[str, Wire], over: Collection[str] | None = None) -> list[float | None]:
    """Seconds of the collectives of a program that runs once, None for what is not known."""
    rows = () if one.moves is None else merge(one.moves)
    among = (row for row in rows if over is None or (row.axes is not None and {*row.axes} <= {*over}))
    return [None] if one.moves is None else [seconds(row, wires) for row in among]
