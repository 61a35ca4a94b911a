"""Work of a pipeline's stages: products by pass, runs of each program, and stages with equal programs."""

from collections import Counter
from collections.abc import Iterator

from ..pipeline.executor import PipelineExecutor
from ..pipeline.jobs import ProgramKey
from ..plan import DeviceWork
from ..program.flops import Work
from ..program.ir import Equation
from ..schedule.actions import entry_actions

Works = list[tuple[Work, DeviceWork]]


def products_by_pass(pipeline: PipelineExecutor, s: int) -> dict[str, Works]:
    """Return the products of a stage for one microbatch, each with its share of one device.

    Args:
        pipeline: The pipeline.
        s: The stage.

    Returns:
        Products of the forward pass ("F"), the input gradients ("I") and the weight gradients ("W").
    """
    program = pipeline.stages[s].program.with_halved_backward
    # Products in loops and calls belong to the stage's equation that contains them.
    top = {inner: e.index for e in program.joint_program.top.equations for inner in _inside(e)}
    works: dict[str, Works] = {"F": [], "I": [], "W": []}
    for work, share in pipeline.stage_layouts(s).device_shares(program):
        at = top[work.equation]
        kind = "I" if at in program.input_gradient_equations else "W" if at in program.backward_equations else "F"
        works[kind].append((work, share))
    return works


def flops(works: Works) -> int:
    """Return the FLOPs on all devices of a stage."""
    return sum(work.flops for work, _ in works)


def input_share(pipeline: PipelineExecutor, s: int) -> float:
    """Return the share of a stage's whole backward pass spent on input gradients, 0 to 1, in FLOPs."""
    if not pipeline.stages[s].program.differentiable_incoming:
        return 0.0
    works = products_by_pass(pipeline, s)
    first, rest = flops(works["I"]), flops(works["W"])
    return first / (first + rest) if first + rest else 0.5


def _inside(e: Equation) -> Iterator[int]:
    """Yield the indices of an equation and of all equations nested in it."""
    yield e.index
    for body in e.bodies:
        for inner in body.sub_jaxpr.equations:
            yield from _inside(inner)


def runs_per_step(pipeline: PipelineExecutor) -> Counter[ProgramKey]:
    """Return the number of runs in a step of each program of a stage."""
    steps = (step for row in pipeline.split.schedule.grid for step in row)
    return Counter((action.kind, action.stage) for step in steps for action in entry_actions(step))


def first_with_same_programs(pipeline: PipelineExecutor) -> tuple[int, ...]:
    """Return, per stage, the first stage with the same programs on its devices; itself where no earlier one exists."""
    first: dict[int, int] = {}
    # Stages with the same programs share the function of a job.
    return tuple(first.setdefault(id(stage.job("F").run), s) for s, stage in enumerate(pipeline.stages))
