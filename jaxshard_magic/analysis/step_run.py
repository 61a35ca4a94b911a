"""`StepRun`: a sharded step and its calls, as far as a report tells of them beside the compiled program."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jax.sharding import Mesh

from ..compilation.loop_clock import LoopClock
from ..compilation.planned_call import PlannedCall
from ..compilation.recompilation import Recompilation
from ..config.request import Request
from ..program.flatten_call import FlatCall
from ..report import Alternative, Check, Checkpoints, EarlyEnd, Metrics
from .profile_analysis import Profile


@dataclass(frozen=True)
class StepRun:
    """A sharded step at the time of a report, with the measurements of its calls.

    Attributes:
        name: Name of the step.
        request: Strategy, mesh and options.
        plan_call: Plans a call under another request; raises ShardError for an impossible one.
        clock: Times of the reported program's calls in the loop.
        calls: Number of calls in the loop, of all programs together.
        profile: Recorded calls of the reported program; None without a recording.
        metrics: Metrics of the loop; None for calls that nobody followed.
        loss: Name of the loss among the metrics; None without one.
        idle_samples: Samples without a working device, by file and line of the loop.
        recompilations: Compiles in the middle of loops.
        data_share: Share of the time spent waiting for batches of a feed; None without a feed.
        previous_examples: Batch size of an earlier run of the same step; None without one.
        checkpoints: Cost of saving the loop's state; None if nothing was saved.
        checked: Comparison with the plain step; None without one.
        alternatives: The step with other options, as compiled.
        bytes_with_fix: Bytes on a device by suggested fix, as compiled.
        ended: Premature end of the cell; None after a regular end.
        report_number: Number of the report in its notebook.
        cell: Notebook cell of the step: its file name for Python, its text; None outside of a notebook.
    """

    name: str
    request: Request
    plan_call: Callable[[FlatCall, Request], PlannedCall]
    clock: LoopClock
    calls: int
    profile: Profile | None = None
    metrics: Metrics | None = None
    loss: str | None = None
    idle_samples: Mapping[tuple[str, int], int] = field(default_factory=dict)
    recompilations: Sequence[Recompilation] = ()
    data_share: float | None = None
    previous_examples: int | None = None
    checkpoints: Checkpoints | None = None
    checked: Check | None = None
    alternatives: tuple[Alternative, ...] = ()
    bytes_with_fix: Mapping[str, int] = field(default_factory=dict)
    ended: EarlyEnd | None = None
    report_number: int | None = None
    cell: tuple[str, str] | None = None

    @property
    def mesh(self) -> Mesh:
        """Mesh of the step."""
        return self.request.mesh
