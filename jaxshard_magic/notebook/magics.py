"""`%mesh`, `%%shard` and `%shard`: parse the line, call the API, return the mesh or the Report."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import getdoc
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, no_var_expand

from ..errors import ShardError
from . import cells, compare_cell, completions, mesh_line
from .auto_cell import Choosing
from .checkpointing import Checkpointing
from .displays import say
from .doctor_line import examined
from .early import Early
from .history_line import Keeping
from .later import Later
from .mesh_line import Meshes
from .on_hosts import OnHosts
from .options import (
    HELP,
    CodeOptions,
    ExploreOptions,
    HistoryOptions,
    LineOptions,
    LoadOptions,
    Options,
    ProfileOptions,
    SaveOptions,
    ScheduleOptions,
    chooses,
    compares,
    compiled_only,
    keeps_apart,
    only,
    parse,
    parse_command,
    with_strategies,
    with_strategy,
)
from .progress import Progress
from .scattered import Scattered
from .session import ShardSession
from .shard_cell import ShardCell, compared, compile_of, exercised, feeds_of, sharded, tried

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from jax.sharding import Mesh

    from ..codegen import Code
    from ..doctor import Doctor
    from ..explorer import Explorer
    from ..history import Calibration, History
    from ..report import Report
    from ..report.choice import Choice
    from ..report.comparison import Comparison
    from ..schedule import Comparison as Schedules
    from ..schedule import Schedule
    from ..step import ShardedStep, Watch
    from .training_view import TrainingView


@magics_class
class ShardMagics(Magics):
    """The magics of one notebook. The first of them that runs imports jax and the API."""

    shell: "InteractiveShell"

    def __init__(self, shell: "InteractiveShell"):
        super().__init__(shell)
        self.session = ShardSession(parent=shell)
        self._lengths = cells.Lengths()
        self._meshes = Meshes(shell, self.session)
        self.keeping = Keeping(shell)
        self.session.reserve = self.keeping.reserve
        self.failed = cells.Failed(shell)
        self.scattered = Scattered(self.session)
        self.early = Early(shell, self.session, self._keep)
        self.hosts = OnHosts(
            shell, self.session, self._keep, lambda shown: self.early.ended(shown, None, quiet=False)
        )
        self.later = Later(self.session)
        self._outliving: dict[str, cells.Binding] = {}  # of functions of cells that later ones may call
        self.matcher: Callable[[Any], Any] | None = None  # what completes our lines
        self._commands = {  # with lines of their own
            "schedule": (ScheduleOptions, self._scheduled),
            "history": (HistoryOptions, self._from_history),
            "explore": (ExploreOptions, self._explored),
            "code": (CodeOptions, self._coded),
            "profile": (ProfileOptions, self._profiled),
            "save": (SaveOptions, self._saved),
            "load": (LoadOptions, self._loaded),
        }

    @no_var_expand
    @line_magic
    def mesh(self, line: str) -> "Mesh | None":
        """Make the mesh that the next %%shard cells use and return it; alone, the current one.

        %mesh data=4 model=2            real devices when there are enough; on CPU, simulated ones
        %mesh data=-1 model=2           -1: what is left
        %mesh [[4,2],["fsdp","tp"]]     the config-file notation
        %mesh cpu:8 data=4 model=2      simulated devices beside an attached accelerator
        %mesh v5e:4x4 data=4 model=4    a TPU slice that isn't attached: %%shard compiles for it, and runs nothing
        %mesh h100:8 data=8             GPUs that aren't; a100:2x8 are two nodes of eight
        %mesh hosts:2 data=8            two processes of this machine as hosts: the cells that follow run on both
        %mesh ssh:node1,node2 data=16   hosts; slurm:4, mpi:4, pbs:4; cluster:PROFILE or its file, engines that run
        %mesh --close                   end the hosts; while there are some, axes alone make a mesh over them
        %mesh --list                    the chips, and the slices that are offered
        """
        __tracebackhide__ = True
        text, quiet = _silenced(line)
        try:
            if text in ("-h", "--help"):
                print(getdoc(self.mesh))
                return None
            if text == "--list":
                from ..targets import slices

                say(slices.listing())
                return None
            if self.hosts.takes(text):
                self.hosts.mesh(text, quiet)
                return None
            if text:
                self.session.mesh = self._meshes.built(text)
            built = self._meshes.current()
        except ShardError as error:
            raise UsageError(completions.one_line(error)) from None
        if built is None:
            print("no mesh yet: %mesh data=4 model=2 makes one; without one, %%shard takes all devices")
        if built is None or quiet:
            return None
        mesh_line.show(built)
        return built.mesh

    @no_var_expand
    @line_cell_magic
    def shard(
        self, line: str, cell: str | None = None
    ) -> "Report | Doctor | Schedule | Schedules | Comparison | Choice | History | Explorer | Code | None":
        __tracebackhide__ = True
        text, quiet = _silenced(line)
        try:
            command = next(iter(text.split(maxsplit=1)), "")
            if cell is None and command in self._commands:
                line_options, run = self._commands[command]
                self._keeps_apart(parse_command(text, line_options))
                found, name = run(text)
                if name:
                    self.shell.user_ns[name] = found
                return None if quiet else found
            options = parse(text)
            if options.help:
                print(HELP)
                return None
            if cell is None:
                self._keeps_apart(options)
                report = self._last(options)
            elif chooses(options):
                report, quiet = self._choose(options, line, cell)
            elif compares(options):
                report, quiet = self._compare(options, line, cell)
            else:
                report, quiet = self._run(options, line, cell)
        except ShardError as error:
            raise UsageError(completions.one_line(error)) from None
        except BaseException as error:
            error.__traceback__ = cells.own_lines(error.__traceback__)
            cells.drawn_alone(self.shell, error)
            raise
        if report is not None and options.output:
            self.shell.user_ns[options.output] = report
        return None if quiet else report

    shard.__doc__ = HELP

    def _last(self, options: Options) -> "Report | Doctor | Comparison | None":
        if options.words[:1] == ("doctor",):
            return examined(options, self.hosts, self._meshes)
        if options.words[:1] == ("abstract",):
            self._made_abstract(options)
            return None
        if options.words[:1] == ("compare",):
            numbers = options.words[1:]
            only(replace(options, words=("compare",)), "compare", "output")
            return self._of_the_past(numbers)
        if options.words[:1] == ("rescue",):
            say(self.hosts.rescue(options.words[1:]))
            return None
        for word in options.words:
            raise completions.no_command(word)
        if self.session.comparison is not None:
            return self.session.comparison
        if self.session.step is None:
            raise ShardError("no report yet: write %%shard fsdp above a cell with a train step")
        report = self.session.report()
        self._keep(report)
        return report

    def _of_the_past(self, words: Sequence[str]) -> "Comparison":
        self.keeping.write()
        return compare_cell.of_the_past(self.session.history, words, self.shell.user_ns, self.keeping.store)

    def _keeps_apart(self, options: LineOptions) -> None:
        """Refuse a name for what a line returns that the last step or the line itself uses."""
        step = self.session.step
        step = step.sharded if isinstance(step, cells.Rehearsal) else step
        if isinstance(options, ExploreOptions):
            roots = {word.partition(".")[0] for word in options.words}
            keeps_apart(options.output, roots, "what the line explores")
        if step is not None:
            keeps_apart(options.output, cells.used_by_call(step.__wrapped__, step.path), "the last step")

    def _scheduled(self, text: str) -> "tuple[Schedule | Schedules | None, str | None]":
        from . import schedule_line as _schedules

        built = self.session.mesh
        return _schedules.scheduled(text, {} if built is None else built.mesh.shape)

    def _from_history(self, text: str) -> "tuple[History | Calibration | Report | None, str | None]":
        from .history_line import listed

        self.keeping.write()
        return listed(text, self.keeping.store)

    def _explored(self, text: str) -> "tuple[Explorer | None, str | None]":
        from .explore_line import explored

        return explored(text, self.shell.user_ns, self.session, self._meshes, self.hosts.shapes)

    def _coded(self, text: str) -> "tuple[Code | None, str | None]":
        from .code_line import written

        return written(text, self.shell, self.session, self.failed)

    def _profiled(self, text: str) -> "tuple[Report | None, str | None]":
        from .profile_line import profiled

        report, name = profiled(text, self.shell, self.session)
        if report is not None:
            self._keep(report)
        return report, name

    def _saved(self, text: str) -> tuple[None, None]:
        from .save_line import saved

        return saved(text, self.shell, self.session)

    def _loaded(self, text: str) -> tuple[None, None]:
        from .save_line import loaded

        return loaded(text, self.shell, self.session)

    def _keep(self, report: "Report", cell: str | None = None) -> None:
        if self.session.remember:
            self.keeping.keep(report, cell)

    def _made_abstract(self, options: Options) -> None:
        from .abstract_line import abstract_names

        names = options.words[1:]
        only(replace(options, words=options.words[:1]), "abstract")
        if not names:
            raise ShardError(
                "%shard abstract takes the names of what is to become shapes: %shard abstract state"
            )
        for line in abstract_names(self.shell.user_ns, names):
            say(line)

    def _cell(self, options: Options, line: str, source: str, mesh: "Callable[[Options], Mesh]") -> ShardCell:
        """The cell parsed and its step found; `mesh` gives that of the line."""
        from ..targets import target_of

        code = cells.parse(self.shell, source, f"%%shard {line.strip()}")
        place = cells.find_step(code.tree, self.shell.user_ns, options.step)
        step = None if place.here else self.shell.user_ns.get(place.root)
        keeps_apart(options.output, cells.variables(code.tree), "this cell")
        keeps_apart(options.output, cells.used_by_call(step, place.path), "the step")
        devices = mesh(options)
        if (target := target_of(devices)) is not None:
            options = compiled_only(options, target.name)
        return ShardCell(self.shell, self.session, options, code, place, devices)

    def _run(self, options: Options, line: str, source: str) -> "tuple[Report | None, bool]":
        from ..request import parse_strategy
        from ..step import Watch
        from ..step.recorded import writable
        from ..views.show import make_ready

        options = with_strategy(options)
        if options.trace is not None:
            writable(options.trace)
        keeping = Checkpointing(options, self.early.saved)
        parse_strategy(options.strategy)
        make_ready(self.session.view)
        this = self._cell(options, line, source, self._meshes.wanted)
        known, report = True, None
        with Progress(this.draw, of=this.path, took=compile_of(this)) as progress:
            watch = None if this.options.dry_run else Watch(self._lengths.total)
            view = self._growing(watch, this)
            binding = cells.Binding(
                self.shell.user_ns, this.place, keeping.of(partial(self._sharded, this, progress, watch))
            )
            with view or nullcontext(), self.early.kept(this, lambda: binding.sharded):
                with binding:
                    with this.room(), self._followed(progress, watch, view) as lengths, keeping:
                        cells.run(self.shell, this.code, binding, lengths, feeds_of(options))
                    known = exercised(this, binding)
                with binding:  # a dry run ended the first one
                    if binding.bound:
                        self.session.begin(binding.sharded)
                    if known:
                        compared(binding.sharded, progress, self.session.options_limit)
                        report = self.session.report()
                    if not this.attached and report is not None and tried(binding.sharded, report, progress):
                        report = self.session.report()
        if report is not None:
            self._keep(report, this.code.text)
        if this.place.inside and not this.options.dry_run:
            self._outliving[this.place.full] = binding
            binding.outlive(partial(self._sharded_later, this))
        return report, this.code.quiet

    def _compare(self, options: Options, line: str, source: str) -> "tuple[Comparison, bool]":
        options, words = with_strategies(options)
        this = self._cell(options, line, source, self._meshes.devices)
        comparison, stopped = compare_cell.compared(this, words)
        comparison = self.session.compared(comparison)
        self._keep_trials(comparison, this.code)
        if stopped:
            self.early.ended(comparison, options.output, this.code.quiet)
            raise cells.Interrupted(stopped)
        return comparison, this.code.quiet

    def _choose(self, options: Options, line: str, source: str) -> "tuple[Choice, bool]":
        from ..step import Watch

        this = self._cell(options, line, source, self._meshes.devices)
        goes_on = not (this.options.dry_run or this.options.plan_only)
        watch = Watch(self._lengths.total) if goes_on else None
        with Progress(this.draw, of=this.path) as progress:
            choosing = Choosing(this, lead=partial(self._led, progress, watch), say=progress, goes_on=goes_on)
            choosing.ready()
            view = self._growing(watch, this)
            binding = cells.Binding(self.shell.user_ns, this.place, choosing.standing_in)
            with view or nullcontext(), self.early.kept(this, lambda: choosing.step):
                try:
                    with binding, this.room(), self._followed(progress, watch, view) as lengths:
                        cells.run(self.shell, this.code, binding, lengths)
                finally:  # the step stays where the user stopped it
                    choosing.settle(binding)
                choice = choosing.settled(binding)
        if choosing.step is None:
            choice = self.session.chose(choice)
            self._keep_trials(choice.comparison, this.code)
        else:
            self.session.begin(choosing.step)
            report = self.session.report()
            self.session.went_on = (choice, report)
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
        training = Training(watch.finished, self._lengths.total, watch.sample, lambda: watch.resumed)
        with self._lengths.counting(lambda: watch.calls), progress.following(training, view):
            try:
                yield self._lengths
            except BaseException:
                self.early.came(watch.calls, watch.finished()[1], self._lengths.total())
                raise
            finally:
                watch.leave()

    def _growing(self, watch: "Watch | None", this: ShardCell) -> "TrainingView | None":
        """What shows a training under its cell; None where nothing is followed."""
        from .training_view import TrainingView

        return None if watch is None else TrainingView(watch.run, self.session.view, this.grows)

    def _sharded(
        self, this: ShardCell, progress: Progress, watch: "Watch | None", function: Any
    ) -> "ShardedStep | cells.Rehearsal":
        """The user's function as the step of this cell's line; one that is sharded already is taken anew."""
        step = sharded(this.options, this.mesh, this.path, function)
        this.prepare(step)
        self._led(progress, watch, step)
        return cells.Rehearsal(step) if this.options.dry_run else step

    def _sharded_later(self, this: ShardCell, function: Any) -> "ShardedStep":
        """A step that a function of the cell binds when a later cell calls it."""
        step = sharded(this.options, this.mesh, this.path, function)
        this.prepare(step)
        self.session.begin(step)
        return step

    def _led(self, progress: Progress, watch: "Watch | None", step: Any) -> None:
        """Have the line tell of a step, and its report of the batch of the last one."""
        step.progress = progress
        if isinstance(self.session.step, type(step)) and self.session.step.name == step.name:
            step.before = self.session.step.ran
        if watch is not None:
            watch.follow(step)


def _silenced(line: str) -> tuple[str, bool]:
    """The line without its closing semicolon, and whether it had one."""
    text = line.strip()
    return text.rstrip("; "), text.endswith(";")
