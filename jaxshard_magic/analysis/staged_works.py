"""What the stages of a pipeline do: their products by the passes that they are of, how often each program runs, and
which stages run the same ones."""

from collections import Counter
from collections.abc import Iterator

from ..pipeline.executed import Pipeline
from ..pipeline.jobs import Key
from ..plan import Share
from ..program.flops import Work
from ..program.ir import Equation
from ..schedule.actions import parts

Works = list[tuple[Work, Share]]


def works_of(pipeline: Pipeline, s: int) -> dict[str, Works]:
    """The products of a stage for one microbatch, each with what one device does of it: those of its forward pass (F),
    of its input gradients (I) and of its weights' (W)."""
    program = pipeline.stages[s].program.with_halves
    top = {inner: e.index for e in program.whole.top.equations for inner in _inside(e)}
    works: dict[str, Works] = {"F": [], "I": [], "W": []}
    for work, share in pipeline.insides(s).shares(program):
        at = top[work.equation]
        kind = "I" if at in program.input_equations else "W" if at in program.backward_equations else "F"
        works[kind].append((work, share))
    return works


def flops(works: Works) -> int:
    """On all devices of a stage together."""
    return sum(work.flops for work, _ in works)


def input_share(pipeline: Pipeline, s: int) -> float:
    """The share of a stage's whole backward pass that is its input gradients, 0 to 1, in FLOPs."""
    if not pipeline.stages[s].program.moving_ins:
        return 0.0
    works = works_of(pipeline, s)
    first, rest = flops(works["I"]), flops(works["W"])
    return first / (first + rest) if first + rest else 0.5


def _inside(e: Equation) -> Iterator[int]:
    """The numbers of an equation and of all those inside of it."""
    yield e.index
    for door in e.doors:
        for inner in door.scope.equations:
            yield from _inside(inner)


def runs_of(pipeline: Pipeline) -> Counter[Key]:
    """How often a step runs each program of a stage."""
    steps = (step for row in pipeline.split.schedule.grid for step in row)
    return Counter((action.kind, action.stage) for step in steps for action in parts(step))


def first_alike(pipeline: Pipeline) -> tuple[int, ...]:
    """Of each stage the first that runs the same programs on its devices: itself, where none before it does."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(stage.job("F").run), s) for s, stage in enumerate(pipeline.stages))
