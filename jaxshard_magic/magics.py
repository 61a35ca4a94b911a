"""`%mesh`, `%%shard` and `%shard`: parse the line, call the API, return the mesh or the Report."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import getdoc
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, no_var_expand

from jaxshard_magic import _cell, _comparing, _meshes, _options, _words
from jaxshard_magic._choosing import Choosing
from jaxshard_magic._history import Keeping
from jaxshard_magic._meshes import Meshes
from jaxshard_magic._progress import Progress, line_for
from jaxshard_magic._steps import compared, made, preparing, tried
from jaxshard_magic.errors import ShardError
from jaxshard_magic.session import ShardSession

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from jax.sharding import Mesh

    from jaxshard_magic.codegen import Code
    from jaxshard_magic.doctor import Doctor
    from jaxshard_magic.explorer import Explorer
    from jaxshard_magic.history import History
    from jaxshard_magic.report import Report
    from jaxshard_magic.report.choice import Choice
    from jaxshard_magic.report.comparison import Comparison
    from jaxshard_magic.schedule import Comparison as Schedules
    from jaxshard_magic.schedule import Schedule
    from jaxshard_magic.step import Watch


@magics_class
class ShardMagics(Magics):
    """The magics of one notebook. The first of them that runs imports jax and the API."""

    shell: "InteractiveShell"

    def __init__(self, shell: "InteractiveShell"):
        super().__init__(shell)
        self.session = ShardSession(parent=shell)
        self._lengths = _cell.Lengths()
        self._meshes = Meshes(shell, self.session)
        self.keeping = Keeping(shell)
        self.failed = _cell.Failed(shell)
        self._commands = {  # with lines of their own
            "schedule": self._scheduled,
            "history": self._from_history,
            "explore": self._explored,
            "code": self._coded,
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
        %mesh --list                    the chips, and the slices that are offered
        """
        __tracebackhide__ = True
        text, quiet = _silenced(line)
        try:
            if text in ("-h", "--help"):
                print(getdoc(self.mesh))
                return None
            if text == "--list":
                print(_meshes.listing())
                return None
            if text:
                self.session.mesh = self._meshes.built(text)
            built = self._meshes.current()
        except ShardError as error:
            raise UsageError(_words.one_line(error)) from None
        if built is None:
            print("no mesh yet: %mesh data=4 model=2 makes one; without one, %%shard takes all devices")
        if built is None or quiet:
            return None
        _meshes.show(built)
        return built.mesh

    @no_var_expand
    @line_cell_magic
    def shard(
        self, line: str, cell: str | None = None
    ) -> "Report | Doctor | Schedule | Schedules | Comparison | Choice | History | Explorer | Code | None":
        __tracebackhide__ = True
        text, quiet = _silenced(line)
        try:
            if cell is None and text.split()[:1] and text.split()[0] in self._commands:
                found, name = self._commands[text.split()[0]](text)
                if name:
                    self.shell.user_ns[name] = found
                return None if quiet else found
            options = _options.parse(text)
            if options.help:
                print(_options.HELP)
                return None
            if cell is None:
                report = self._last(options)
            elif _options.chooses(options):
                report, quiet = self._choose(options, line, cell)
            elif _options.compares(options):
                report, quiet = self._compare(options, line, cell)
            else:
                report, quiet = self._run(options, line, cell)
        except ShardError as error:
            raise UsageError(_words.one_line(error)) from None
        except BaseException as error:
            error.__traceback__ = _cell.own_lines(error.__traceback__)
            raise
        if report is not None and options.output:
            self.shell.user_ns[options.output] = report
        return None if quiet else report

    shard.__doc__ = _options.HELP

    def _last(self, options: _options.Options) -> "Report | Doctor | Comparison | None":
        if options.words[:1] == ("doctor",):
            return self._examined(options)
        if options.words[:1] == ("abstract",):
            self._made_abstract(options)
            return None
        if options.words[:1] == ("compare",):
            numbers = options.words[1:]
            _options.only(replace(options, words=("compare",)), "compare", "output")
            return _comparing.of_the_past(self.session.history, numbers)
        for word in options.words:
            raise _words.no_command(word)
        if self.session.comparison is not None:
            return self.session.comparison
        if self.session.step is None:
            raise ShardError("no report yet: write %%shard fsdp above a cell with a train step")
        report = self.session.report()
        self._keep(report, step=self.session.step)
        return report

    def _examined(self, options: _options.Options) -> "Doctor":
        from jaxshard_magic.doctor import examine, jax_error

        _options.only(options, "doctor", "mesh", "output")
        if jax_error() is not None:  # without it there is neither a mesh nor the API
            return examine(None)
        from jaxshard_magic import api

        try:
            built = self._meshes.built(options.mesh) if options.mesh else self._meshes.current()
        except RuntimeError:  # a backend does not start, which the examination tells
            built = None
        return api.doctor(built and built.mesh)

    def _scheduled(self, text: str) -> "tuple[Schedule | Schedules | None, str | None]":
        from jaxshard_magic import _schedules

        built = self.session.mesh
        return _schedules.scheduled(text, {} if built is None else built.mesh.shape)

    def _from_history(self, text: str) -> "tuple[History | Report | None, str | None]":
        from jaxshard_magic import _history

        self.keeping.write()
        return _history.asked(text, self.keeping.store)

    def _explored(self, text: str) -> "tuple[Explorer | None, str | None]":
        from jaxshard_magic import _explore

        return _explore.asked(text, self.shell, self.session, self._meshes)

    def _coded(self, text: str) -> "tuple[Code | None, str | None]":
        from jaxshard_magic import _code

        return _code.asked(text, self.shell, self.session, self.failed)

    def _keep(self, report: "Report", cell: str | None = None, step: Any = None) -> None:
        if self.session.remember:
            self.keeping.keep(report, cell, step)

    def _made_abstract(self, options: _options.Options) -> None:
        from jaxshard_magic._abstract import abstract_names

        names = options.words[1:]
        _options.only(replace(options, words=options.words[:1]), "abstract")
        if not names:
            raise ShardError(
                "%shard abstract takes the names of what is to become shapes: %shard abstract state"
            )
        for line in abstract_names(self.shell.user_ns, names):
            print(line)

    def _run(self, options: _options.Options, line: str, source: str) -> "tuple[Report | None, bool]":
        from jaxshard_magic.step import Watch
        from jaxshard_magic.strategies import parse_strategy
        from jaxshard_magic.views.show import make_ready

        options = _options.with_strategy(options)
        parse_strategy(options.strategy)
        make_ready(self.session.view)
        cell = _cell.parse(self.shell, source, f"%%shard {line.strip()}")
        place = _cell.find_step(cell.tree, self.shell.user_ns, options.step)
        mesh = self._meshes.wanted(options)
        if (target := _meshes.target(mesh)) is not None:
            options = _options.compiled_only(options, target.name)
        room = nullcontext() if target is None else _cell.Room()
        known, report = True, None
        draw = line_for(self.shell) if self.session.progress else None
        with Progress(draw, of=place.path) as progress:
            watch = None if draw is None or options.dry_run else Watch()
            binding = _cell.Binding(
                self.shell.user_ns,
                place,
                partial(self._sharded, options, mesh, progress, watch, place.path, cell),
            )
            with binding:
                with room, self._followed(progress, watch) as lengths:
                    _cell.run(self.shell, cell, binding, lengths)
                known = self._exercise(options, binding)
            with binding:  # a dry run ended the first one
                self.session.begin(binding.sharded)
                if known:
                    compared(binding.sharded, progress, self.session.options_limit)
                    report = self.session.report()
                if target is not None and report is not None and tried(binding.sharded, report, progress):
                    report = self.session.report()
        if report is not None:
            self._keep(report, cell.text, binding.sharded)
        return report, cell.quiet

    def _compare(self, options: _options.Options, line: str, source: str) -> "tuple[Comparison, bool]":
        options, words = _options.with_strategies(options)
        cell = _cell.parse(self.shell, source, f"%%shard {line.strip()}")
        place = _cell.find_step(cell.tree, self.shell.user_ns, options.step)
        mesh = self._meshes.devices(options)
        if (target := _meshes.target(mesh)) is not None:
            options = _options.compiled_only(options, target.name)
        found = _comparing.compared(self.shell, self.session, options, words, cell, place, mesh)
        self.session.compared(found)
        self._keep_trials(found, cell)
        return found, cell.quiet

    def _choose(self, options: _options.Options, line: str, source: str) -> "tuple[Choice, bool]":
        from jaxshard_magic.step import Watch

        cell = _cell.parse(self.shell, source, f"%%shard {line.strip()}")
        place = _cell.find_step(cell.tree, self.shell.user_ns, options.step)
        mesh = self._meshes.devices(options)
        if (target := _meshes.target(mesh)) is not None:
            options = _options.compiled_only(options, target.name)
        goes_on = not (options.dry_run or options.plan_only)
        draw = line_for(self.shell) if self.session.progress else None
        watch = Watch() if draw is not None and goes_on else None
        with Progress(draw, of=place.path) as progress:
            found = Choosing(
                self.session,
                options,
                cell,
                place,
                mesh,
                partial(self._led, progress, watch),
                name_of=partial(_cell.name_of, self.shell),
                in_kernel=getattr(self.shell, "kernel", None) is not None,
                goes_on=goes_on,
                say=progress,
            )
            found.ready()
            binding = _cell.Binding(self.shell.user_ns, place, found.standing_in)
            with (
                binding,
                nullcontext() if target is None else _cell.Room(),
                self._followed(progress, watch) as lengths,
            ):
                _cell.run(self.shell, cell, binding, lengths)
            choice = found.settled(binding)
        if found.step is None:
            self.session.chose(choice)
            self._keep_trials(choice.comparison, cell)
        else:
            self.session.begin(found.step)
            self._keep(self.session.report(), cell.text, found.step)
        return choice, cell.quiet

    def _keep_trials(self, found: "Comparison", cell: _cell.Cell) -> None:
        for trial in found.trials:
            if trial.report is not None:
                self._keep(trial.report, cell.text)

    @contextmanager
    def _followed(self, progress: Progress, watch: "Watch | None") -> Iterator[_cell.Lengths | None]:
        """Meanwhile the line tells how far the loop has come that calls the watched step."""
        from jaxshard_magic._progress.training import Training

        if watch is None:
            yield None
            return
        training = Training(watch.finished, self._lengths.total)
        with self._lengths.counting(lambda: watch.calls), progress.following(training):
            try:
                yield self._lengths
            finally:
                watch.leave()

    def _exercise(self, options: _options.Options, binding: _cell.Binding) -> bool:
        """Run the step once when the cell did not, and as often again as asked; whether it has run."""
        from jaxshard_magic.step.copies import copies

        step = binding.sharded
        if not binding.bound:
            raise ShardError(f"the cell ended without binding {binding.step.path}")
        if step.calls == 0:
            try:
                args, kwargs = _cell.from_namespace(step.__wrapped__, self.shell.user_ns, binding.step.path)
            except _cell.Missing as missing:
                if options.dry_run:
                    raise
                print(missing)
                return False
            if hasattr(step.__wrapped__, "__self__") and not options.dry_run:
                step.prepare(*args, **kwargs)  # to run a method would change its object
            else:
                args, kwargs = copies((args, kwargs))
                step(*args, **kwargs)
        if options.repeat and step.calls == 0:
            raise ShardError(
                f"--repeat: call {binding.step.path} in the cell; alone, a method is only compiled"
            )
        if options.repeat:
            step.repeat(options.repeat)
        return True

    def _sharded(
        self,
        options: _options.Options,
        mesh: "Mesh",
        progress: Progress,
        watch: "Watch | None",
        path: str,
        cell: _cell.Cell,
        function: Any,
    ) -> Any:
        """The user's function as the step of this cell's line; one that is sharded already is taken anew."""
        step = made(options, mesh, path, function)
        preparing(self.session, cell, path, partial(_cell.name_of, self.shell))(step)
        self._led(progress, watch, step)
        return _cell.Rehearsal(step) if options.dry_run else step

    def _led(self, progress: Progress, watch: "Watch | None", step: Any) -> None:
        """Have the line tell of a step, and its report of the batch of the last one."""
        step.progress = progress
        if isinstance(self.session.step, type(step)) and self.session.step.name == step.name:
            step.examples_before = self.session.step.examples
        if watch is not None:
            watch.follow(step)


def _silenced(line: str) -> tuple[str, bool]:
    """The line without its closing semicolon, and whether it had one."""
    text = line.strip()
    return text.rstrip("; "), text.endswith(";")
