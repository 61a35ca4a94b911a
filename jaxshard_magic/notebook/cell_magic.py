"""`%%shard` above a cell: the cell runs with its step sharded, or that step is tried under several strategies, or the
fastest is searched for and goes on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from ..temporary import Unfinished
from . import cells, compare_cell
from .auto_cell import Choosing
from .checkpointing import Checkpointing
from .early import Early
from .growing import Growing
from .later import Later
from .mesh_line import Meshes
from .options import ShardOptions, check_output, compiled_only, with_strategies, with_strategy
from .progress import Progress
from .session import ShardSession
from .shard_cell import ShardCell, compared, compile_of, exercised, feeds_of, planned_first, sharded, tried

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from jax.sharding import Mesh

    from ..report import Report
    from ..report.choice import Choice
    from ..report.comparison import Comparison
    from ..step import ShardedStep, Watch
    from .training_view import TrainingView


BEFORE = (
    "Before it is compiled, the step is planned as below; the report of the compiled one takes its place."
)


class CellMagic:
    """Runs the cells of one notebook; `keep(report, cell)` puts a report into the history.

    `train`, `compare` and `choose` take the options and the text of a cell's line, and the cell; they return what is to
    be shown, and whether a semicolon ends the cell: then nothing is. They raise ShardError for what can't be, and what
    the cell raises.
    """

    def __init__(
        self,
        shell: "InteractiveShell",
        session: ShardSession,
        meshes: Meshes,
        early: Early,
        later: Later,
        keep: "Callable[[Report, str | None], None]",
    ):
        self._shell, self._session, self._meshes = shell, session, meshes
        self._early, self._later, self._keep = early, later, keep
        self.lengths = cells.Lengths()
        self._outliving: dict[str, cells.Binding] = {}  # of functions of cells that later ones may call

    def _cell(
        self, options: ShardOptions, line: str, source: str, mesh: "Callable[[ShardOptions], Mesh]"
    ) -> ShardCell:
        """The cell parsed and its step found; `mesh` gives that of the line."""
        from ..targets import target_of

        code = cells.parse(self._shell, source, f"%%shard {line.strip()}")
        place = cells.find_step(code.tree, self._shell.user_ns, options.step)
        step = None if place.here else self._shell.user_ns.get(place.root)
        check_output(options.output, cells.variables(code.tree), "this cell")
        check_output(options.output, cells.used_by_call(step, place.path), "the step")
        devices = mesh(options)
        if (target := target_of(devices)) is not None:
            options = compiled_only(options, target.name)
        return ShardCell(self._shell, self._session, options, code, place, devices)

    def train(self, options: ShardOptions, line: str, source: str) -> "tuple[Report | None, bool]":
        """Run a cell whose line says how its step is sharded; its report."""
        from ..config.strategy_text import parse_strategy
        from ..step import Watch
        from ..step.recorded import writable
        from ..views.show import make_ready

        options = with_strategy(options)
        if options.trace is not None:
            writable(options.trace)
        keeping = Checkpointing(options, self._early.saved)
        parse_strategy(options.strategy)
        make_ready(self._session.view)
        this = self._cell(options, line, source, self._meshes.wanted)
        known, report = True, None
        with Progress(this.draw, of=this.path, took=compile_of(this)) as progress:
            watch = None if this.options.dry_run else Watch(self.lengths.total)
            view, first = self._growing(watch, this), Growing(this.grows, self._session.view, lead=BEFORE)
            binding = cells.Binding(
                self._shell.user_ns,
                this.place,
                keeping.of(partial(self._sharded, this, progress, watch, first)),
            )
            try:
                with first, view or nullcontext(), self._early.kept(this, lambda: binding.sharded):
                    with binding:
                        with (
                            this.room(),
                            self._later.rejits,
                            self._followed(progress, watch, view) as lengths,
                            keeping,
                        ):
                            cells.run(self._shell, this.code, binding, lengths, feeds_of(options))
                        known = exercised(this, binding)
                    with binding:  # a dry run ended the first one
                        if binding.bound:
                            self._session.begin(binding.sharded)
                        if known:
                            compared(binding.sharded, progress, self._session.options_limit)
                            report = self._session.report()
                        if (
                            not this.attached
                            and report is not None
                            and tried(binding.sharded, report, progress)
                        ):
                            report = self._session.report()
            finally:
                if binding.stays and not this.options.dry_run:
                    self._outlives(this, binding)
        if report is not None:
            self._keep(report, this.code.text)
        return report, this.code.quiet

    def compare(self, options: ShardOptions, line: str, source: str) -> "tuple[Comparison, bool]":
        """Try a cell's step under each strategy of its line, on copies."""
        options, words = with_strategies(options)
        this = self._cell(options, line, source, self._meshes.devices)
        comparison, stopped = compare_cell.compared(this, words)
        comparison = self._session.compared(comparison)
        self._keep_trials(comparison, this.code)
        if stopped:
            self._early.ended(comparison, options.output, this.code.quiet)
            raise cells.Interrupted(stopped)
        return comparison, this.code.quiet

    def choose(self, options: ShardOptions, line: str, source: str) -> "tuple[Choice, bool]":
        """Search for a cell's strategy, and go on with the fastest unless its line says that nothing runs."""
        from ..step import Watch

        this = self._cell(options, line, source, self._meshes.devices)
        goes_on = not (this.options.dry_run or this.options.plan_only)
        watch = Watch(self.lengths.total) if goes_on else None
        with Progress(this.draw, of=this.path) as progress:
            choosing = Choosing(this, lead=partial(self._led, progress, watch), say=progress, goes_on=goes_on)
            choosing.ready()
            view = self._growing(watch, this)
            binding = cells.Binding(self._shell.user_ns, this.place, choosing.standing_in)
            with view or nullcontext(), self._early.kept(this, lambda: choosing.step):
                try:
                    followed = self._followed(progress, watch, view)
                    with binding, this.room(), self._later.rejits, followed as lengths:
                        cells.run(self._shell, this.code, binding, lengths)
                finally:  # the step stays where the user stopped it
                    choosing.settle(binding)
                choice = choosing.settled(binding)
        if choosing.step is None:
            choice = self._session.chose(choice)
            self._keep_trials(choice.comparison, this.code)
        else:
            self._session.begin(choosing.step)
            report = self._session.report()
            self._session.went_on = (choice, report)
            self._keep(report, this.code.text)
        return choice, this.code.quiet

    def _keep_trials(self, found: "Comparison", cell: cells.Cell) -> None:
        for trial in found.trials:
            if trial.report is not None:
                self._keep(trial.report, cell.text)

    @contextmanager
    def _followed(
        self, progress: Progress, watch: "Watch | None", view: "TrainingView | None"
    ) -> Iterator[cells.Lengths | None]:
        """Meanwhile the line tells how far the loop has come that calls the watched step, or the view does."""
        from .progress.training import Training

        if watch is None:
            yield None
            return
        training = Training(watch.finished, self.lengths.total, watch.sample, lambda: watch.resumed)
        counting, following = self.lengths.counting(lambda: watch.calls), progress.following(training, view)
        with counting, following, Unfinished(watch.leave):
            try:
                yield self.lengths
            except BaseException:
                self._early.came(watch.calls, watch.finished()[1], self.lengths.total())
                raise

    def _growing(self, watch: "Watch | None", this: ShardCell) -> "TrainingView | None":
        """What shows a training under its cell; None where nothing is followed."""
        from .training_view import TrainingView

        return None if watch is None else TrainingView(watch.run, self._session.view, this.grows)

    def _sharded(
        self, this: ShardCell, progress: Progress, watch: "Watch | None", first: Growing, function: Any
    ) -> "ShardedStep | cells.Rehearsal":
        """The user's function as the step of this cell's line; one that is sharded already is taken anew. While it
        compiles for long, `first` shows its plan."""
        from ..views.show import shows_growing

        step = sharded(this.options, this.mesh, this.path, function)
        this.prepare(step)
        if this.grows and shows_growing(self._session.view):
            step.early = partial(planned_first, this, step, first)
        self._led(progress, watch, step)
        return cells.Rehearsal(step) if this.options.dry_run else step

    def _sharded_later(self, this: ShardCell, function: Any) -> "ShardedStep":
        """A step that a function of the cell binds when a later cell calls it."""
        step = sharded(this.options, this.mesh, this.path, function)
        this.prepare(step)
        step.counts_rows = self._session.count_rows
        self._session.begin(step)
        self._later.follow(step)
        return step

    def _outlives(self, this: ShardCell, binding: cells.Binding) -> None:
        """After the cell, or after an error of its own: later cells find its step sharded."""
        if binding.bound and self._session.step is not binding.sharded:
            self._session.begin(binding.sharded)
        self._outliving[this.place.full] = binding
        binding.outlive(partial(self._sharded_later, this))

    def _led(self, progress: Progress, watch: "Watch | None", step: Any) -> None:
        """Have the line tell of a step, and its report of the batch of the last one."""
        step.progress, step.counts_rows = progress, self._session.count_rows
        if isinstance(self._session.step, type(step)) and self._session.step.name == step.name:
            step.before = self._session.step.ran
        if watch is not None:
            watch.follow(step)
