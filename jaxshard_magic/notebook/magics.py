"""`%mesh`, `%%shard` and `%shard`: parse the line, call the API, and return the mesh or the Report."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import getdoc
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, no_var_expand

from ..errors import ShardError
from . import cells, completions, mesh_line, search_cells
from .cell_magic import CellMagic
from .displays import say
from .early_reports import EarlyReports
from .history_line import HistoryWriter
from .hosts_session import HostsSession
from .later_calls import LaterCalls
from .mesh_line import Meshes
from .options import (
    HELP,
    CodeOptions,
    ExploreOptions,
    HistoryOptions,
    LineOptions,
    LoadOptions,
    ProfileOptions,
    SaveOptions,
    ScheduleOptions,
    ShardOptions,
    check_kind,
    check_only,
    check_output,
    is_comparison,
    is_search,
    line_text,
    parse,
    parse_command,
)
from .session import ShardSession
from .stage_errors import StageErrors

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
    from ..schedule import Schedule
    from ..schedule import ScheduleComparison as Schedules


@magics_class
class ShardMagics(Magics):
    """Magics of one notebook.

    Importing this module does not import jax. The first magic that runs imports jax and the API.
    """

    shell: "InteractiveShell"

    def __init__(self, shell: "InteractiveShell"):
        super().__init__(shell)
        self.session = ShardSession(parent=shell)
        self._meshes = Meshes(shell, self.session)
        self.history_writer = HistoryWriter(shell)
        self.session.reserve = self.history_writer.reserve
        self.failed = cells.FailedCells(shell)
        self.stage_errors = StageErrors(shell, self.session)
        self.early = EarlyReports(shell, self.session, self._keep, self.stage_errors.explain)
        self.hosts = HostsSession(
            shell, self.session, self._keep, lambda shown: self.early.queue_result(shown, None, quiet=False)
        )
        self.later = LaterCalls(shell, self.session)
        self.cell_magic = CellMagic(shell, self.session, self._meshes, self.early, self.later, self._keep)
        self.matcher: Callable[[Any], Any] | None = None  # None before IPython 8.6
        self._commands = {  # commands with options of their own
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
        # IPython leaves frames with this local variable out of tracebacks.
        __tracebackhide__ = True
        text, quiet = line_text(line)
        try:
            if text in ("-h", "--help"):
                print(getdoc(self.mesh))
                return None
            if text == "--list":
                from ..targets import slices

                say(slices.list_chips())
                return None
            if self.hosts.handles_mesh_line(text):
                self.hosts.run_mesh_line(text, quiet)
                return None
            if text:
                self.session.mesh = self._meshes.build(text)
            built = self._meshes.current()
        except ShardError as error:
            raise UsageError(completions.one_line(error)) from None
        if built is None:
            print("no mesh yet: %mesh data=4 model=2 makes one; without one, %%shard takes all devices")
        if built is None or quiet:
            return None
        mesh_line.show_mesh(built)
        return built.mesh

    @no_var_expand
    @line_cell_magic
    def shard(
        self, line: str, cell: str | None = None
    ) -> "Report | Doctor | Schedule | Schedules | Comparison | Choice | History | Explorer | Code | None":
        __tracebackhide__ = True
        text, quiet = line_text(line)
        try:
            command = next(iter(text.split(maxsplit=1)), "")
            if cell is None and command in self._commands:
                line_options, run = self._commands[command]
                self._check_output(parse_command(text, line_options))
                result, name = run(text)
                if name:
                    self.shell.user_ns[name] = result
                return None if quiet else result
            options = parse(text)
            if options.help:
                print(HELP)
                return None
            if cell is None:
                self._check_output(options)
                report = self._run_without_cell(options)
            else:
                check_kind(options)
                magic = self.cell_magic
                run_cell = (
                    magic.choose if is_search(options) else magic.compare if is_comparison(options) else magic.train
                )
                report, quiet = run_cell(options, line, cell)
        except ShardError as error:
            raise UsageError(completions.one_line(error)) from None
        except BaseException as error:
            # An exception of the user's cell is shown as without the magic: own frames, and the line that calls the
            # magic, are left out.
            error.__traceback__ = cells.user_traceback(error.__traceback__)
            cells.show_without_magic_line(self.shell, error)
            raise
        if report is not None and options.output:
            self.shell.user_ns[options.output] = report
        return None if quiet else report

    shard.__doc__ = HELP

    def _run_without_cell(self, options: ShardOptions) -> "Report | Doctor | Comparison | None":
        """Run `%shard` without a cell: a command without options of its own, or the report of the last step.

        Raises:
            ShardError: The command is unknown, or no step has run.
        """
        if options.words[:1] == ("doctor",):
            return _run_doctor_line(options, self.hosts, self._meshes)
        if options.words[:1] == ("abstract",):
            self._made_abstract(options)
            return None
        if options.words[:1] == ("compare",):
            numbers = options.words[1:]
            check_only(replace(options, words=("compare",)), "compare", "output")
            return self._compare_reports(numbers)
        if options.words[:1] == ("rescue",):
            say(self.hosts.rescue(options.words[1:]))
            return None
        for word in options.words:
            raise completions.unknown_command_error(word)
        if self.session.comparison is not None:
            return self.session.comparison
        if self.session.step is None:
            raise ShardError("no report yet: write %%shard fsdp above a cell with a train step")
        report = self.session.report()
        self._keep(report)
        return report

    def _compare_reports(self, words: Sequence[str]) -> "Comparison":
        """Compare stored reports: `%shard compare 3 5`."""
        # Reports of the running cell are written after it; the line has to find them already.
        self.history_writer.write()
        return search_cells.compare_reports(self.session.history, words, self.shell.user_ns, self.history_writer.store)

    def _check_output(self, options: LineOptions) -> None:
        """Raise `ShardError` if `-o` names a variable that the last step or the line itself reads."""
        step = self.session.step
        step = step.sharded if isinstance(step, cells.DryRunStep) else step
        if isinstance(options, ExploreOptions):
            roots = {word.partition(".")[0] for word in options.words}
            check_output(options.output, roots, "what the line explores")
        if step is not None:
            check_output(options.output, cells.used_by_call(step.__wrapped__, step.path), "the last step")

    def _scheduled(self, text: str) -> "tuple[Schedule | Schedules | None, str | None]":
        from . import schedule_line as _schedules

        built = self.session.mesh
        return _schedules.run_schedule_line(text, {} if built is None else built.mesh.shape)

    def _from_history(self, text: str) -> "tuple[History | Calibration | Report | None, str | None]":
        from .history_line import run_history_line

        self.history_writer.write()
        return run_history_line(text, self.history_writer.store)

    def _explored(self, text: str) -> "tuple[Explorer | None, str | None]":
        from .explore_line import run_explore_line

        return run_explore_line(text, self.shell.user_ns, self.session, self._meshes, self.hosts.shapes)

    def _coded(self, text: str) -> "tuple[Code | None, str | None]":
        from .code_line import run_code_line

        return run_code_line(text, self.shell, self.session, self.failed)

    def _profiled(self, text: str) -> "tuple[Report | None, str | None]":
        from .profile_line import run_profile_line

        report, name = run_profile_line(text, self.shell, self.session)
        if report is not None:
            self._keep(report)
        return report, name

    def _saved(self, text: str) -> tuple[None, None]:
        from .save_line import run_save_line

        return run_save_line(text, self.shell, self.session)

    def _loaded(self, text: str) -> tuple[None, None]:
        from .save_line import run_load_line

        return run_load_line(text, self.shell, self.session)

    def _keep(self, report: "Report", cell: str | None = None) -> None:
        """Queue a report for the history, unless `ShardSession.remember` is off."""
        if self.session.remember:
            self.history_writer.enqueue(report, cell)

    def _made_abstract(self, options: ShardOptions) -> None:
        """Run `%shard abstract`, and print a line for each name."""
        from .abstract_line import abstract_names

        names = options.words[1:]
        check_only(replace(options, words=options.words[:1]), "abstract")
        if not names:
            raise ShardError("%shard abstract takes the names of what is to become shapes: %shard abstract state")
        for line in abstract_names(self.shell.user_ns, names):
            say(line)


def _run_doctor_line(options: ShardOptions, hosts: HostsSession, meshes: Meshes) -> "Doctor":
    """Run a `%shard doctor` line.

    Args:
        options: Parsed options; only `--mesh` and `-o` are allowed.
        hosts: Hosts of the notebook, examined if running and the line names no mesh.
        meshes: Source of the mesh to examine.

    Raises:
        ShardError: Another option is given, or the mesh text is malformed.
    """
    from ..doctor import examine, jax_error

    check_only(options, "doctor", "mesh", "output")
    if jax_error() is not None:  # without JAX there are no meshes, and `api` can't be imported
        return examine(None)
    from .. import api

    if hosts.cluster is not None and not options.mesh:
        return api.doctor(hosts.cluster)
    try:
        built = meshes.build(options.mesh) if options.mesh else meshes.current()
    except RuntimeError:  # a backend does not start; the examination reports why
        built = None
    return api.doctor(built and built.mesh)
