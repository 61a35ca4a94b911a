"""A step to explore: its arrays, how a strategy lays them out on a mesh, and the program of a line, compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from jax.sharding import Mesh

from ..comparing.sketch import collective
from ..config.strategy_text import parse_strategy
from ..errors import ShardError
from ..plan import Plan
from ..program.peel import Peeled
from ..report import Collective, Report
from ..step import ShardedStep
from ..step.planned import Planned
from ..step.tracing import Traces
from ..strategies.footprint import footprint
from ..strategies.hold import Hold
from ..strategies.traffic import traffic
from .array import Array, Laid, unlinked
from .cuts import cut_of, held
from .named import bits_of

Made = Callable[[str, Mesh], ShardedStep]  # a line as the step that it makes, on a mesh


@dataclass(frozen=True)
class Predicted:
    """What a plan tells of one device before anything is compiled: bytes of the arrays that go in, bytes at the peak,
    and what devices send each other."""

    arrays: int
    peak: int
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a line, beside what its plan told; None where a plan tells nothing."""

    line: str
    report: Report
    predicted: Predicted | None


@dataclass(frozen=True)
class Refused:
    """A line that could not be compiled, and why."""

    line: str
    why: str


@dataclass(frozen=True)
class Stepped:
    """A step that has run, or compiled: by the shapes of its last call all lines of it are planned and compiled.

    `arrays` are those that it takes, in order; `laid` is the layout of its program, `ran` the same where that is
    comparable, `cell` the source of its cell without the line.
    """

    name: str
    arrays: tuple[Array, ...]
    laid: Laid
    ran: Laid | None
    mesh: Mesh
    cell: str | None
    call: Peeled
    made: Made
    traces: Traces

    def plan(self, line: str, mesh: Mesh) -> Laid:
        """How a line lays the arrays out, on `mesh`. Raises `ShardError` for what can't be planned."""
        return _laid(self._planned(line, mesh).plan, self.arrays)

    def compile(self, line: str, mesh: Mesh) -> Compiled:
        """The line planned and compiled; nothing runs. Raises `ShardError` for what can't be."""
        predicted = _predicted(self._planned(line, mesh), self.arrays)
        step = self.made(line, mesh)
        step.prepare_for(self.call)
        return Compiled(line, step.report(), predicted)

    def _planned(self, line: str, mesh: Mesh) -> Planned:
        step = self.made(line, mesh)
        step.traces = self.traces
        return step.planned_for(self.call)


def stepped(step: ShardedStep, made: Made) -> Stepped:
    """The last call of `step` to explore. Raises `ShardError` where it has none."""
    entry = step.entry
    if entry is None or entry.call_of is None:
        raise ShardError(f"{step.name} has not run yet; call it once, or leave --dry-run to compile it")
    plan, traces = entry.plan, Traces()
    arrays = _arrays(plan, made, entry.call_of, traces)
    laid = _laid(plan, arrays)
    cell = None if step.cell is None else step.cell[1].partition("\n")[2].rstrip("\n")
    ran = laid if step.request.pipeline is None else None
    return Stepped(step.name, arrays, laid, ran, plan.mesh, cell, entry.call_of, made, traces)


def _held_of(laid: Laid, arrays: tuple[Array, ...]) -> int:
    """Bytes of the arrays that one device holds, as they are laid out."""
    return sum(held(a.shape, a.bits, cut, laid.mesh) for a, cut in zip(arrays, laid.cuts, strict=True))


def _laid(plan: Plan, arrays: tuple[Array, ...]) -> Laid:
    """The plan's layout in the order of `arrays`; constants that it has beside them are left out."""
    found = {leaf.path: leaf for leaf in plan.leaves}
    leaves = [found.get(array.path) for array in arrays]
    return Laid(
        plan.strategy,
        dict(plan.mesh.shape),
        tuple(
            cut_of(leaf.spec if leaf else (), len(array.shape))
            for leaf, array in zip(leaves, arrays, strict=True)
        ),
        tuple(leaf.why if leaf else "" for leaf in leaves),
    )


def _arrays(plan: Plan, made: Made, call: Peeled, traces: Traces) -> tuple[Array, ...]:
    classes = _classes(plan)
    if classes is None and parse_strategy(plan.strategy)[0].name == "spmd":
        axis = plan.mesh.axis_names[0]
        other = made(f"%%shard dp@{axis}", plan.mesh)
        other.traces = traces
        try:
            classes = _classes(other.planned_for(call).plan)
        except ShardError:  # a batch that the axis does not divide
            classes = None
    if classes is None or len(classes) != len(plan.leaves):
        classes = unlinked([len(leaf.shape) for leaf in plan.leaves])
    return tuple(
        Array(leaf.path, leaf.role, leaf.shape, str(leaf.dtype), bits_of(leaf.dtype), own)
        for leaf, own in zip(plan.leaves, classes, strict=True)
    )


def _classes(plan: Plan) -> list[tuple[int, ...]] | None:
    """Of each leaf's dimensions; None for a plan without a layout of its own."""
    if not isinstance(plan.run, Hold):
        return None
    layout, fresh = plan.run.layout, count(-1, -1)
    stored = set(layout.roles.stored) - layout.batch.dims.keys()
    return [
        tuple(layout.storage.of(value))
        if i in stored
        else tuple(next(fresh) for _ in layout.program.shapes[value])
        for i, value in enumerate(layout.program.inputs)
    ]


def _predicted(found: Planned, arrays: tuple[Array, ...]) -> Predicted | None:
    hold = found.plan.run
    if not isinstance(hold, Hold):
        return None
    memory = footprint(hold, [len(found.traced.consts) + i for i in found.donated])
    return Predicted(
        _held_of(_laid(found.plan, arrays), arrays), memory.peak, tuple(map(collective, traffic(hold)))
    )
