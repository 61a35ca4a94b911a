"""`%%shard` cells: run a cell with its step sharded, compare strategies for the step, or search for the fastest one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from ..temporary import UndoUnlessFinished
from . import cells, search_cells
from .checkpointing import Checkpointing
from .displays import LiveOutput
from .early_reports import EarlyReports
from .later_calls import LaterCalls
from .mesh_line import Meshes
from .options import ShardOptions, check_output, compiled_only, with_strategies, with_strategy
from .progress import Progress
from .search_cells import AutoCell
from .session import ShardSession
from .shard_cell import (
    ShardCell,
    add_alternatives,
    ensure_run,
    feed_factory,
    last_compile_s,
    shard_function,
    show_plan,
    try_fix,
)

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from jax.sharding import Mesh

    from ..report import Report
    from ..report.choice import Choice
    from ..report.comparison import Comparison
    from ..step import LoopMonitor, ShardedStep
    from .training_view import TrainingOutput


BEFORE = "Before it is compiled, the step is planned as below; the report of the compiled one takes its place."


class CellMagic:
    """Runner of the `%%shard` cells of one notebook.

    `train`, `compare` and `choose` take the parsed options, the text of the line, and the source of the cell. Each
    returns the result to display, and whether a semicolon at the end of the cell suppresses the display. Each raises
    `ShardError` for an impossible request, and passes exceptions of the cell on.

    Args:
        shell: IPython's shell.
        session: State between cells.
        meshes: Source of the mesh of each line.
        early: Keeps reports of cells that end early.
        later: Follows the step in later cells.
        keep: Called with a report and the text of its cell, to store both in the history.

    Attributes:
        loop_lengths: Number of iterations of the loops in the running cell.
    """

    def __init__(
        self,
        shell: "InteractiveShell",
        session: ShardSession,
        meshes: Meshes,
        early: EarlyReports,
        later: LaterCalls,
        keep: "Callable[[Report, str | None], None]",
    ):
        self._shell, self._session, self._meshes = shell, session, meshes
        self._early, self._later, self._keep = early, later, keep
        self.loop_lengths = cells.LoopLengths()
        self._outliving: dict[str, cells.Binding] = {}  # by step; functions of their cells may be called in later cells

    def _parse_cell(
        self, options: ShardOptions, line: str, source: str, mesh: "Callable[[ShardOptions], Mesh]"
    ) -> ShardCell:
        """Parse a cell, find its step, and check the names that the line would overwrite.

        Args:
            options: Parsed options of the line.
            line: Text of the line, for the first line of the parsed cell.
            source: Source of the cell below the line.
            mesh: Returns the mesh for the options.
        """
        from ..targets import target_of

        code = cells.parse(self._shell, source, f"%%shard {line.strip()}")
        place = cells.find_step(code.tree, self._shell.user_ns, options.step)
        step = None if place.in_cell else self._shell.user_ns.get(place.root)
        check_output(options.output, cells.variables(code.tree), "this cell")
        check_output(options.output, cells.used_by_call(step, place.path), "the step")
        devices = mesh(options)
        if (target := target_of(devices)) is not None:
            # Devices of a target are not attached: the step can be compiled for them and never run.
            options = compiled_only(options, target.name)
        return ShardCell(self._shell, self._session, options, code, place, devices)

    def train(self, options: ShardOptions, line: str, source: str) -> "tuple[Report | None, bool]":
        """Run a cell with its step sharded under one strategy, and return the step's report.

        The report is None if the step has not run: for example if the cell only defines the step and the notebook has
        no arguments for a call.
        """
        from ..config.strategy_text import parse_strategy
        from ..step import LoopMonitor
        from ..step.profiler_recording import writable_folder
        from ..views.show import preload_widgets

        options = with_strategy(options)
        # Mistakes on the line are reported before the cell runs: a cell may train for long.
        if options.trace is not None:
            writable_folder(options.trace)
        checkpointing = Checkpointing(options, self._early.record_save)
        parse_strategy(options.strategy)
        preload_widgets(self._session.view)
        this = self._parse_cell(options, line, source, self._meshes.for_line)
        has_report, report = True, None
        with Progress(this.draw, label=this.path, last_compile_s=last_compile_s(this)) as progress:
            watch = None if this.options.dry_run else LoopMonitor(self.loop_lengths.expected_total)
            view, first = (
                self._training_view(watch, this),
                LiveOutput(this.shows_early_results, self._session.view, lead=BEFORE),
            )
            binding = cells.Binding(
                self._shell.user_ns,
                this.place,
                checkpointing.wrap_factory(partial(self._shard_step, this, progress, watch, first)),
            )
            try:
                with first, view or nullcontext(), self._early.report_if_early(this, lambda: binding.sharded):
                    with binding:
                        with (
                            this.memory_guard(),
                            self._later.sharded_jits,
                            self._follow_loop(progress, watch, view) as lengths,
                            checkpointing,
                        ):
                            cells.run(self._shell, this.code, binding, lengths, feed_factory(options))
                        has_report = ensure_run(this, binding)
                    # Entered again: in a dry run, the exception of the step's first call has ended the context above.
                    with binding:
                        if binding.bound:
                            self._session.set_step(binding.sharded)
                        if has_report:
                            add_alternatives(binding.sharded, progress, self._session.options_limit)
                            report = self._session.report()
                        if not this.attached and report is not None and try_fix(binding.sharded, report, progress):
                            report = self._session.report()
            finally:
                if binding.stays and not this.options.dry_run:
                    self._keep_binding(this, binding)
        if report is not None:
            self._keep(report, this.code.text)
        return report, this.code.quiet

    def compare(self, options: ShardOptions, line: str, source: str) -> "tuple[Comparison, bool]":
        """Try a cell's step under each strategy of the line, on copies of its arguments.

        Raises:
            Interrupted: The user stopped the comparison; the part done so far is kept and displayed.
        """
        options, words = with_strategies(options)
        this = self._parse_cell(options, line, source, self._meshes.for_comparison)
        comparison, stopped = search_cells.compare_strategies(this, words)
        comparison = self._session.add_comparison(comparison)
        self._keep_trials(comparison, this.code)
        # A cell that raises has no value: the comparison is displayed below the line about the interrupt.
        if stopped:
            self._early.queue_result(comparison, options.output, this.code.quiet)
            raise cells.Interrupted(stopped)
        return comparison, this.code.quiet

    def choose(self, options: ShardOptions, line: str, source: str) -> "tuple[Choice, bool]":
        """Search for the strategy of a cell, and continue with the fastest one.

        With `--dry-run` or `--plan-only` the cell ends at the first call of its step.
        """
        from ..step import LoopMonitor

        this = self._parse_cell(options, line, source, self._meshes.for_comparison)
        goes_on = not (this.options.dry_run or this.options.plan_only)
        watch = LoopMonitor(self.loop_lengths.expected_total) if goes_on else None
        with Progress(this.draw, label=this.path) as progress:
            choosing = AutoCell(
                this, lead=partial(self._configure_step, progress, watch), say=progress, goes_on=goes_on
            )
            choosing.check_line()
            view = self._training_view(watch, this)
            binding = cells.Binding(self._shell.user_ns, this.place, choosing.make_stand_in)
            with view or nullcontext(), self._early.report_if_early(this, lambda: choosing.step):
                try:
                    followed = self._follow_loop(progress, watch, view)
                    with binding, this.memory_guard(), self._later.sharded_jits, followed as lengths:
                        cells.run(self._shell, this.code, binding, lengths)
                finally:  # after an interrupt the chosen step stays bound, too
                    choosing.bind_step(binding)
                choice = choosing.finish(binding)
        if choosing.step is None:
            choice = self._session.add_choice(choice)
            self._keep_trials(choice.comparison, this.code)
        else:
            self._session.set_step(choosing.step)
            report = self._session.report()
            self._session.went_on = (choice, report)
            self._keep(report, this.code.text)
        return choice, this.code.quiet

    def _keep_trials(self, found: "Comparison", cell: cells.Cell) -> None:
        """Store the reports of all trials of a comparison in the history."""
        for trial in found.trials:
            if trial.report is not None:
                self._keep(trial.report, cell.text)

    @contextmanager
    def _follow_loop(
        self, progress: Progress, watch: "LoopMonitor | None", view: "TrainingOutput | None"
    ) -> Iterator[cells.LoopLengths | None]:
        """Follow the loop that calls the monitored step: the progress line, or the view once shown, tells step and
        loss.

        Yields:
            The loop lengths for the run of the cell; None without a monitor.
        """
        from .loop_progress import LoopProgress

        if watch is None:
            yield None
            return
        training = LoopProgress(
            watch.finished_calls, self.loop_lengths.expected_total, watch.sample_activity, lambda: watch.resumed
        )
        counting, following = (self.loop_lengths.counting(lambda: watch.calls), progress.following(training, view))
        with counting, following, UndoUnlessFinished(watch.stop):
            try:
                yield self.loop_lengths
            except BaseException:
                self._early.record_progress(watch.calls, watch.finished_calls()[1], self.loop_lengths.expected_total())
                raise

    def _training_view(self, watch: "LoopMonitor | None", this: ShardCell) -> "TrainingOutput | None":
        """Return the view displayed below a training cell; None without a monitor."""
        from .training_view import TrainingOutput

        return None if watch is None else TrainingOutput(watch.run, self._session.view, this.shows_early_results)

    def _shard_step(
        self, this: ShardCell, progress: Progress, watch: "LoopMonitor | None", first: LiveOutput, function: Any
    ) -> "ShardedStep | cells.DryRunStep":
        """Return the user's function as the sharded step of the cell; a dry run gets a `DryRunStep`.

        A function sharded before is sharded again from its original. `first` shows the plan during a long compile.
        """
        from ..views.show import shows_growing

        step = shard_function(this.options, this.mesh, this.path, function)
        this.prepare(step)
        if this.shows_early_results and shows_growing(self._session.view):
            step.programs.on_planned = partial(show_plan, this, step, first)
        self._configure_step(progress, watch, step)
        return cells.DryRunStep(step) if this.options.dry_run else step

    def _shard_later_step(self, this: ShardCell, function: Any) -> "ShardedStep":
        """Return the step for a function of the cell that binds its step only when a later cell calls the function."""
        step = shard_function(this.options, this.mesh, this.path, function)
        this.prepare(step)
        step.count_expert_rows = self._session.count_rows
        self._session.set_step(step)
        self._later.follow(step)
        return step

    def _keep_binding(self, this: ShardCell, binding: cells.Binding) -> None:
        """Keep the binding after the cell, also after an exception of the cell, so that later cells find the step
        sharded."""
        if binding.bound and self._session.step is not binding.sharded:
            self._session.set_step(binding.sharded)
        self._outliving[this.place.full] = binding
        binding.shard_later_calls(partial(self._shard_later_step, this))

    def _configure_step(self, progress: Progress, watch: "LoopMonitor | None", step: Any) -> None:
        """Attach the progress line and the monitor to a step.

        The step also gets the signature of the previous run of a step of the same name: its report compares the batch
        sizes.
        """
        step.programs.progress, step.count_expert_rows = progress, self._session.count_rows
        if isinstance(self._session.step, type(step)) and self._session.step.name == step.name:
            step.previous_run = self._session.step.ran
        if watch is not None:
            watch.follow(step)
