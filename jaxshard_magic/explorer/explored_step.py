"""A step to explore: its arrays, `%%shard` lines to plan or compile, and the layouts that the planner makes of them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from jax.sharding import Mesh

from ..compilation.planned_call import PlannedCall
from ..compilation.tracing import TraceCache
from ..config.strategy_text import parse_strategy
from ..errors import ShardError
from ..plan import Plan
from ..program.flatten_call import FlatCall
from ..program.sizes import element_bits
from ..report import Collective, Report
from ..search.plan_estimate import to_report_collective
from ..search.trials import described
from ..step import ShardedStep
from ..strategies.footprint import footprint
from ..strategies.planned_collectives import planned_collectives
from ..strategies.sharded_lowering import ShardedLowering
from .arrays import ExploredArray, ExploredLayout, unlinked
from .shard_sizes import dim_axes, shard_bytes

StepFactory = Callable[[str, Mesh], ShardedStep]  # (%%shard line, mesh) -> step
SLOW = 1.0  # seconds; slower planning is not repeated at every edit


@dataclass(frozen=True)
class LinePrediction:
    """Figures of a plan for one device, before compilation.

    Attributes:
        arrays: Bytes of the arguments.
        peak: Bytes at the peak.
        collectives: Collectives between devices.
    """

    arrays: int
    peak: int
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class CompiledLine:
    """Compiled result of a line.

    Attributes:
        line: The `%%shard` line.
        report: Report of the compiled step.
        predicted: Figures of the plan; None for a plan without any.
    """

    line: str
    report: Report
    predicted: LinePrediction | None


@dataclass(frozen=True)
class RefusedLine:
    """A line that could not be compiled.

    Attributes:
        line: The `%%shard` line.
        why: The reason.
    """

    line: str
    why: str


@dataclass(frozen=True)
class ExploredStep:
    """A step with a recorded call. Lines are planned and compiled for the shapes of the call.

    Attributes:
        name: Name of the step.
        arrays: Arrays of the arguments, in order.
        layout: Layout of the compiled program.
        run_layout: Equal to `layout`; None for a pipeline, with no comparable layout.
        mesh: Mesh of the compiled program.
        cell: Source of the step's cell without the first line; None outside of cells.
        call: The last call.
        make_step: Function from a `%%shard` line and a mesh to a step.
        traces: Traces shared by all lines.
    """

    name: str
    arrays: tuple[ExploredArray, ...]
    layout: ExploredLayout
    run_layout: ExploredLayout | None
    mesh: Mesh
    cell: str | None
    call: FlatCall
    make_step: StepFactory
    traces: TraceCache

    def plan(self, line: str, mesh: Mesh) -> ExploredLayout:
        """Return the layout of the arrays under a line on `mesh`.

        Raises:
            ShardError: The line can't be planned.
        """
        return _layout_of(self._planned(line, mesh).plan, self.arrays)

    def compile(self, line: str, mesh: Mesh) -> CompiledLine:
        """Plan and compile a line on `mesh`. Nothing runs.

        Raises:
            ShardError: The line can't be compiled.
        """
        predicted = _predicted(self._planned(line, mesh), self.arrays)
        step = self.make_step(line, mesh)
        step.programs.prepare_for(self.call)
        return CompiledLine(line, step.report(), predicted)

    def _planned(self, line: str, mesh: Mesh) -> PlannedCall:
        step = self.make_step(line, mesh)
        # With shared traces the user's code is not traced again for each line.
        step.programs.traces = self.traces
        return step.programs.planned_for(self.call)


def explore_step(step: ShardedStep, make_step: StepFactory) -> ExploredStep:
    """Return the last call of `step` for exploration.

    Args:
        step: The step.
        make_step: Function from a `%%shard` line and a mesh to a step.

    Raises:
        ShardError: The step has neither run nor been compiled.
    """
    entry = step.entry
    if entry is None or entry.call_shapes is None:
        raise ShardError(f"{step.name} has not run yet; call it once, or leave --dry-run to compile it")
    plan, traces = entry.plan, TraceCache()
    arrays = _arrays(plan, make_step, entry.call_shapes, traces)
    laid = _layout_of(plan, arrays)
    cell = None if step.cell is None else step.cell[1].partition("\n")[2].rstrip("\n")
    ran = laid if step.request.pipeline is None else None
    return ExploredStep(step.name, arrays, laid, ran, plan.mesh, cell, entry.call_shapes, make_step, traces)


def _held_of(laid: ExploredLayout, arrays: tuple[ExploredArray, ...]) -> int:
    """Return the bytes of all arrays on one device under a layout."""
    return sum(shard_bytes(a.shape, a.bits, cut, laid.mesh) for a, cut in zip(arrays, laid.cuts, strict=True))


def _layout_of(plan: Plan, arrays: tuple[ExploredArray, ...]) -> ExploredLayout:
    """Return the plan's layout in the order of `arrays`. Further constants of the plan are left out."""
    found = {leaf.path: leaf for leaf in plan.leaves}
    leaves = [found.get(array.path) for array in arrays]
    return ExploredLayout(
        plan.strategy,
        dict(plan.mesh.shape),
        tuple(
            dim_axes(leaf.spec if leaf else (), len(array.shape)) for leaf, array in zip(leaves, arrays, strict=True)
        ),
        tuple(leaf.reason if leaf else "" for leaf in leaves),
    )


def _arrays(plan: Plan, made: StepFactory, call: FlatCall, traces: TraceCache) -> tuple[ExploredArray, ...]:
    """Return the arrays of a plan with their dimension classes."""
    classes = _classes(plan)
    # spmd plans have no dimension classes; a dp plan links the same dimensions.
    if classes is None and parse_strategy(plan.strategy)[0].name == "spmd":
        axis = plan.mesh.axis_names[0]
        other = made(f"%%shard dp@{axis}", plan.mesh)
        other.programs.traces = traces
        try:
            classes = _classes(other.programs.planned_for(call).plan)
        except ShardError:  # the axis does not divide the batch
            classes = None
    if classes is None or len(classes) != len(plan.leaves):
        classes = unlinked([len(leaf.shape) for leaf in plan.leaves])
    return tuple(
        ExploredArray(leaf.path, leaf.role, leaf.shape, str(leaf.dtype), element_bits(leaf.dtype), own)
        for leaf, own in zip(plan.leaves, classes, strict=True)
    )


def _classes(plan: Plan) -> list[tuple[int, ...]] | None:
    """Return the dimension classes of each leaf; None for a plan without a layout of its own."""
    if not isinstance(plan.run, ShardedLowering):
        return None
    # Negative classes differ from all classes of the layout: such a dimension is linked to no other.
    layout, fresh = plan.run.layout, count(-1, -1)
    stored = set(layout.roles.storage_order) - layout.batch.input_dims.keys()
    return [
        tuple(layout.storage.classes_of(value))
        if i in stored
        else tuple(next(fresh) for _ in layout.program.shapes[value])
        for i, value in enumerate(layout.program.inputs)
    ]


def _predicted(found: PlannedCall, arrays: tuple[ExploredArray, ...]) -> LinePrediction | None:
    """Return the figures of a plan; None for a plan without a layout."""
    hold = found.plan.run
    if not isinstance(hold, ShardedLowering):
        return None
    memory = footprint(hold, [len(found.traced.consts) + i for i in found.donated])
    return LinePrediction(
        _held_of(_layout_of(found.plan, arrays), arrays),
        memory.peak,
        tuple(map(to_report_collective, planned_collectives(hold))),
    )


class PlannedLayouts:
    """Last planned layouts of an explorer. Methods take the mesh as a function, which may raise ShardError.

    Args:
        stepped: The step; None for arrays without a step.
        laid: First layout.
        note: Reason why no layout could be planned, or another remark.

    Attributes:
        strategy_layout: Last planned layout of the strategy alone.
        edited_layout: Layout with the edits by hand, under which other arrays may change too; None if not planned.
    """

    def __init__(self, stepped: ExploredStep | None, laid: ExploredLayout, note: str = ""):
        self._stepped, self._seconds = stepped, 0.0
        self.strategy_layout, self.edited_layout = laid, None
        self._notes = [note, ""]

    @property
    def note(self) -> str:
        """Reason why a layout could not be planned, in one line; empty if both could."""
        return next(filter(None, self._notes), "")

    def plan(self, line: str, mesh: Callable[[], Mesh]) -> None:
        """Plan the layout of the strategy alone. On failure the previous layout stays.

        Args:
            line: `%%shard` line of the strategy.
            mesh: Function that makes the mesh.
        """
        found, why = self._planned(line, mesh)
        self.strategy_layout, self.edited_layout, self._notes = found or self.strategy_layout, None, [why, ""]

    def plan_edited(self, line: str | None, mesh: Callable[[], Mesh], *, anyway: bool = False) -> None:
        """Plan the layout with the edits by hand.

        Nothing is planned after a failed plan, nor where the last planning took longer than a second.

        Args:
            line: `%%shard` line with the edits; None without edits.
            mesh: Function that makes the mesh.
            anyway: Plan even where planning is slow.
        """
        self.edited_layout, self._notes[1] = None, ""
        if line is not None and not self._notes[0] and (anyway or self._seconds < SLOW):
            self.edited_layout, self._notes[1] = self._planned(line, mesh)

    def _planned(self, line: str, mesh: Callable[[], Mesh]) -> tuple[ExploredLayout | None, str]:
        """Return the layout of a line, or None and the reason. Times the planning."""
        assert self._stepped is not None
        start = time.perf_counter()
        try:
            return self._stepped.plan(line, mesh()), ""
        except ShardError as error:
            return None, " ".join(str(error).split())
        except Exception as error:  # the step's own code may raise under this strategy
            return None, described(error)
        finally:
            self._seconds = time.perf_counter() - start
