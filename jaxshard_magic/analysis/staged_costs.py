"""What a pipeline's actions would take on a chip: the roofline of each stage's programs, and their collectives."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..hardware import Chip
from ..pipeline.executed import Pipeline
from ..pipeline.programs import StageProgram
from ..plan import Share
from ..report import Leaf
from ..schedule import Costs
from ..targets import Target
from ..wires import Wire
from .roofline import roofline, seconds
from .staged import Said, inside_of, sent_by


def roofline_costs(
    pipeline: Pipeline, chip: Chip, target: Target | None, said: Mapping[Any, Said]
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
    found = []
    for stage in pipeline.stages:
        program = stage.program
        top = {inner: e.index for e in program.whole.top.equations for inner in inside_of(e)}
        mine = [0.0, 0.0, 0.0]
        for work, _ in pipeline.insides.shares(program):
            mine[_kind(program, top[work.equation])] += work.flops
        found.append(mine)
    mean = sum(f for f, _, _ in found) / len(found) or 1.0
    forward, input_grad, weight_grad = ([each[k] / mean for each in found] for k in range(3))
    return Costs(forward, input_grad, weight_grad)


def _kind(program: StageProgram, at: int) -> int:
    """Whether an equation of a stage's top level is of the forward pass (0), of the input gradient (1) or of the
    weights' (2)."""
    return 1 if at in program.input_equations else 2 if at in program.backward_equations else 0


def update_seconds(pipeline: Pipeline, chip: Chip, leaves: Sequence[Leaf]) -> float:
    """What the update takes on the rank with most: parameters and optimizer state are read and written once."""
    found = [0.0] * len(pipeline.ranks)
    for place, row in zip(pipeline.leaves, leaves, strict=True):
        times = {"params": 3, "optimizer": 2}.get(row.role, 0)
        for rank in set(place.readers):
            found[rank] += times * row.bytes_per_device / chip.hbm_bandwidth
    return max(found)


def _own(pipeline: Pipeline, s: int, chip: Chip, target: Target | None) -> tuple[float, float, float] | None:
    """Seconds of the products of a stage's forward pass, of its input gradients and of its weight gradients."""
    program = pipeline.stages[s].program
    top = {inner: e.index for e in program.whole.top.equations for inner in inside_of(e)}
    mine: tuple[list[Share], list[Share], list[Share]] = [], [], []
    for work, share in pipeline.insides.shares(program):
        mine[_kind(program, top[work.equation])].append(share)
    axes = pipeline.ranks.mesh.shape
    found = [roofline(chip, axes, each, (), (), target).own for each in mine]
    forward, input_grad, weight_grad = found
    if forward is None or input_grad is None or weight_grad is None:
        return None
    return forward, input_grad, weight_grad


def _sent(
    pipeline: Pipeline, s: int, said: Mapping[Any, Said], wires: Mapping[str, Wire]
) -> tuple[float, float, float] | None:
    """Seconds of the collectives of the same three; those of a whole backward pass count as the weights'."""
    found = []
    for kinds in ("F", "I", "WB"):
        rows = [row for kind in kinds if (kind, s) in said for row in said[kind, s].collectives]
        found.append(_total(seconds(row, wires) for row in rows))
    forward, input_grad, weight_grad = found
    if forward is None or input_grad is None or weight_grad is None:
        return None
    return forward, input_grad, weight_grad


def _total(times: Iterable[float | None]) -> float | None:
    known = list(times)
    return None if None in known else sum(t for t in known if t is not None)
