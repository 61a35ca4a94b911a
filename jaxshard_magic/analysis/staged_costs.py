"""What a pipeline's actions would take on a chip: the roofline of each stage's programs, and their collectives."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ..hardware import Chip
from ..pipeline.executed import Pipeline
from ..pipeline.jobs import Key
from ..report import Leaf
from ..schedule import Costs
from ..schedule.actions import KINDS
from ..targets import Target
from ..wires import Wire
from .collectives import merge
from .roofline import roofline, seconds
from .staged_memory import piece_bytes
from .staged_moves import Said, sent_by
from .staged_works import flops, runs_of, works_of


def roofline_costs(
    pipeline: Pipeline, chip: Chip, target: Target | None, said: Mapping[Key, Said]
) -> Costs | None:
    """Seconds of each stage's actions on `chip`, as if nothing overlapped; None where a figure is not known.

    `target`: the slice or the nodes that the mesh is made of. `said`: what the programs' texts say.
    """
    mesh = pipeline.ranks.mesh
    wires = roofline(chip, mesh.shape, None, (), (), target).wires
    way = wires[pipeline.ranks.axis].bandwidth
    if not way and len(pipeline.ranks) > 1:
        return None
    forward, input_grad, weight_grad, transfer = [], [], [], []
    for s in range(len(pipeline.stages)):
        own = _own(pipeline, s, chip, target)
        sent = _sent(pipeline, s, said, wires)
        if own is None or sent is None:
            return None
        forward.append(own[0] + sent[0])
        input_grad.append(own[1] + sent[1])
        weight_grad.append(own[2] + sent[2])
        transfer.append(max(sent_by(pipeline, s)) / way if way else 0.0)
    return Costs(forward, input_grad, weight_grad, transfer)


def flops_costs(pipeline: Pipeline) -> Costs:
    """Each stage's FLOPs of one microbatch, in units of the mean forward pass."""
    found = [[flops(works) for works in works_of(pipeline, s).values()] for s in range(len(pipeline.stages))]
    mean = sum(f for f, _, _ in found) / len(found) or 1.0
    forward, input_grad, weight_grad = ([each[k] / mean for each in found] for k in range(3))
    return Costs(forward, input_grad, weight_grad)


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
        total = None if one.moves is None else _total(seconds(row, wires) for row in merge(one.moves))
        if total is None:
            return None
        if kind in ("prepare", "settle"):
            of_ranks[number] += total
        else:
            rest += total
    return max(of_ranks.values(), default=0.0) + rest


def _own(pipeline: Pipeline, s: int, chip: Chip, target: Target | None) -> tuple[float, float, float] | None:
    """Seconds of the products of a stage's forward pass, of its input gradients and of its weight gradients."""
    axes = pipeline.ranks.mesh.shape
    shares = ([share for _, share in works] for works in works_of(pipeline, s).values())
    forward, input_grad, weight_grad = (roofline(chip, axes, each, (), (), target).own for each in shares)
    if forward is None or input_grad is None or weight_grad is None:
        return None
    return forward, input_grad, weight_grad


def _sent(
    pipeline: Pipeline, s: int, said: Mapping[Key, Said], wires: Mapping[str, Wire]
) -> tuple[float, float, float] | None:
    """Seconds of the collectives of the same three, the mean over microbatches; those of a whole backward pass count as
    the weights'."""
    runs, m = runs_of(pipeline), pipeline.split.schedule.microbatches

    def each(kind: str) -> Iterable[float | None]:
        one = said.get((kind, s), Said(()))
        if one.moves is None:
            return [None]
        times = (seconds(row, wires) for row in merge(one.moves))
        return [None if t is None else t * runs[kind, s] / m for t in times]

    forward, input_grad, weight_grad = (
        _total(t for kind in kinds for t in each(kind)) for kinds in ("F", "I", "WB")
    )
    if forward is None or input_grad is None or weight_grad is None:
        return None
    return forward, input_grad, weight_grad


def _total(times: Iterable[float | None]) -> float | None:
    known = list(times)
    return None if None in known else sum(t for t in known if t is not None)
