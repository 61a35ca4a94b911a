"""Step of a `%%shard` cell: create it from the line, run it on copies, and compile it with the fix its report
advises."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ShardError
from ..introspect import is_method
from ..temporary import Replaced, attribute
from . import cells
from .displays import say
from .later_calls import enclosing_trace_hint
from .options import ShardOptions, line_text, parse, with_strategy
from .progress import Draw, Progress, line_for

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ..compilation.compiled_step import CompiledStep
    from ..config.request import Request
    from ..report import Report
    from ..search import Requests
    from ..step import ShardedStep
    from .session import ShardSession


ALIKE = 0.6  # share of equal lines from which on two cells count as versions of one cell


def request_of(options: ShardOptions, mesh: "Mesh", path: str, function: Any) -> "Request":
    """Return the request of a line for the cell's step.

    Args:
        options: Parsed options of the line.
        mesh: Mesh of the step.
        path: Name of the step for the report, unless the line gives one.
        function: The user's function, whose annotations may give PartitionSpecs.

    Raises:
        ShardError: As raised by `make_request`.
    """
    from ..config.request import make_request

    return make_request(
        options.strategy, mesh, **shard_arguments(options, path, function), check=options.check, **options.step_options
    )


def requests_of(options: ShardOptions, strategies: Sequence[str], mesh: "Mesh") -> "Requests":
    """Return the requests of a line that compares or searches, without the annotations of the function.

    Args:
        options: Parsed options of the line.
        strategies: Candidates.
        mesh: Mesh whose devices the candidates share.
    """
    from ..search import Requests, fixed_options_line, parse_meshes, parse_vary

    placed = shard_arguments(options)
    return Requests(
        strategies,
        mesh,
        parse_meshes(options.meshes),
        parse_vary(options.vary),
        options.step_options,
        placed,
        options.keep_going,
        fixed_options_line({**placed, "step": options.step}),
    )


def shard_arguments(options: ShardOptions, path: str | None = None, function: Any = None) -> dict[str, Any]:
    """Return the arguments of `shard` that hold for every strategy: specs, rules, donation, chip, name and data.

    Args:
        options: Parsed options of the line.
        path: Name of the step, unless the line gives one.
        function: The user's function; specs of the line override specs of its annotations.
    """
    from ..specs import parse_assignment

    return {
        "specs": ({} if function is None else cells.annotated_specs(function))
        | dict(map(parse_assignment, options.specs)),
        "rules": [parse_assignment(rule) for rule in options.rules],
        "donate": options.donate,
        "on": options.on,
        "name": options.name or path,
        "data": options.data,
    }


@dataclass(frozen=True)
class ShardCell:
    """`%%shard` cell about to run.

    Attributes:
        shell: IPython's shell.
        session: State between cells.
        options: Parsed options of the line.
        code: The parsed cell.
        place: Position of the step in the cell or the notebook.
        mesh: Mesh of the step.
    """

    shell: Any
    session: "ShardSession"
    options: ShardOptions
    code: cells.Cell
    place: cells.StepLocation
    mesh: "Mesh"

    @property
    def path(self) -> str:
        """Name of the step, as shown to the user."""
        return self.place.name

    @property
    def attached(self) -> bool:
        """True if the step can run; False for devices of a target, which are not attached."""
        from ..targets import target_of

        return target_of(self.mesh) is None

    @property
    def shows_early_results(self) -> bool:
        """True if intermediate results are displayed in the output of the cell."""
        in_kernel = getattr(self.shell, "kernel", None) is not None
        return self.session.progress and not self.code.quiet and in_kernel

    @property
    def draw(self) -> Draw | None:
        """Function to draw the progress line; None if the session shows no progress or nobody watches."""
        return line_for(self.shell) if self.session.progress else None

    def memory_guard(self) -> AbstractContextManager[Any]:
        """Return a context that ends a cell before it fills the memory with arrays for devices not attached."""
        return nullcontext() if self.attached else cells.MemoryGuard()

    @property
    def not_called_message(self) -> str | None:
        """Message for a cell without a call of a step whose arguments are no names of the notebook; None for other
        steps.

        Such steps are methods and functions defined inside another function.
        """
        place = self.place
        if place.inside:
            return f"{place.name} has not run yet: call {place.inside[0]}, then %shard shows the report."
        return f"{place.name} has not run yet: call it, then %shard shows the report." if place.method else None

    def prepare(self, step: "ShardedStep") -> None:
        """Set a step's cell, name in the cell, and limit of compile time."""
        step.programs.compile_limit = self.session.compile_limit
        step.cell, step.path = (self.code.filename, self.code.text), self.place.full


def last_compile_s(this: ShardCell) -> float | None:
    """Return the compile time in seconds of the previous run of this cell's step.

    None if the last step has another name, other devices or other options, or if less than 60% of the cell's lines are
    the same.
    """
    last = this.session.step
    entry = getattr(last, "entry", None)  # a `DryRunStep` has none
    if entry is None or last.cell is None or (last.path, last.mesh) != (this.place.full, this.mesh):
        return None
    line, _, code = last.cell[1].partition("\n")
    if _program_options(with_strategy(parse(line_text(line)[0]))) != _program_options(this.options):
        return None
    now = this.code.text.partition("\n")[2]
    alike = SequenceMatcher(None, code.splitlines(), now.splitlines()).ratio()
    return entry.compile_s if alike >= ALIKE else None


def _program_options(options: ShardOptions) -> tuple[Any, ...]:
    """Return the options of a line that change the compiled program."""
    return options.strategy, options.specs, options.rules, options.donate, options.step_options


def feed_factory(options: ShardOptions) -> "cells.Feeds | None":
    """Return a factory of feeds that prefetch the batches of the cell's loop.

    None without `--feed`, and for a dry run. Batches keep their type: no tensor is converted to an array.
    """
    if not options.feed or options.dry_run:
        return None
    from ..feeding import Feed

    return partial(Feed, convert=False)


def shard_function(options: ShardOptions, mesh: "Mesh", path: str, function: Any) -> "ShardedStep":
    """Shard a function as a line says; a function sharded before is sharded again from its original.

    Raises:
        ShardError: The request is impossible, or `--profile` can't record the step.
    """
    from ..step import ShardedStep
    from ..step.profiler_recording import check_recordable

    plain = function.__wrapped__ if isinstance(function, ShardedStep) else function
    step = ShardedStep(plain, request_of(options, mesh, path, plain))
    step.keep_arguments = bool(options.repeat or options.profile)
    if options.profile:
        check_recordable(step, options.profile)
    step.programs.read_on_compile = step.programs.allow_plan_only = True
    return step


def show_plan(this: ShardCell, step: "ShardedStep", show: "Callable[[Report], None]", plan: "CompiledStep") -> None:
    """Display the report of a plan while its program compiles.

    Args:
        this: The cell.
        step: The step.
        show: Displays a report.
        plan: The planned program, without an executable.
    """
    try:
        with Replaced(attribute(step.programs, "progress"), None):  # the progress line stays with the compile
            report = step.report_of(plan)
    except Exception as error:  # the compile goes on without this report
        say(f"{this.path} has no report of its plan: {type(error).__name__}: {error}")
    else:
        show(report)


def try_fix(rehearsal: cells.DryRunStep, report: "Report", progress: Progress) -> bool:
    """Compile a dry run's step with the first fix for a program that does not fit.

    Return whether this gave the bytes on a device with the fix, for the next report.
    """
    fix = next((a.fix for a in report.advice if a.code == "does-not-fit"), None)
    if fix is None or rehearsal.arguments is None:
        return False
    progress(f"does not fit; trying {fix}")
    try:
        return compile_fix(rehearsal.sharded, fix, *rehearsal.arguments)
    except ShardError:  # the advised fix may be impossible for this step
        return False
    finally:
        progress("")


def compile_fix(step: "ShardedStep", fix: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Compile a step with a fix of its report, for the same arguments, and record the bytes on a device with the fix.

    Args:
        step: The step; its next reports tell the bytes with the fix.
        fix: A line of the magics.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        Whether the bytes are known: False for a fix that is no line of the magics.

    Raises:
        ShardError: The changed step can't be planned or compiled.
    """
    from .. import api
    from ..config.request import apply_line, is_line
    from ..step import ShardedStep

    if not is_line(fix):
        return False
    request = apply_line(fix, step.request, lambda text: api.build_mesh(text).mesh)
    other = ShardedStep(step.__wrapped__, request)
    other.programs.progress = step.programs.progress
    other.programs.compile_limit = step.programs.compile_limit
    other.prepare(*args, **kwargs)
    memory = other.report().memory
    peaks = [d.peak for d in memory.per_device if d.peak is not None] if memory else []
    if peaks:
        step.bytes_with_fix[fix] = max(peaks)
    return bool(peaks)


def ensure_run(this: ShardCell, binding: cells.Binding) -> bool:
    """Run the step on copies if the cell has not run it, and repeat or profile it as the line says.

    A method is compiled and not run, as a run would change its object.

    Args:
        this: The cell.
        binding: Binding of the step's name during the cell.

    Returns:
        Whether the step has a report. If False, the reason has been printed.

    Raises:
        ShardError: The cell did not bind the step, a dry run has no arguments, or `--repeat` or `--profile` has no call
            to repeat.
    """
    from ..step.copies import copy_arguments

    step, options = binding.sharded, this.options
    checkpoint_loop = step.last_checkpoint_loop if binding.bound and not options.dry_run else None
    if checkpoint_loop is not None and checkpoint_loop.calls and step.calls == 0:
        return True  # a resumed run: the earlier run made all calls
    if not (binding.bound or binding.step.inside):
        raise ShardError(f"the cell ended without binding {binding.step.path}")
    if (enclosing_trace := binding.take_outer_trace()) is not None and step.calls == 0:
        print(enclosing_trace_hint(this.path, enclosing_trace, this.shell.user_ns))
        return False
    if this.not_called_message is not None and (step is None or step.calls == 0):
        if options.dry_run:
            raise ShardError(this.not_called_message)
        print(this.not_called_message)
        return False
    if step.calls == 0:
        try:
            args, kwargs = cells.from_namespace(step.__wrapped__, this.shell.user_ns, binding.step.path)
        except cells.MissingArguments as missing:
            if options.dry_run:
                raise
            say(str(missing))
            return False
        if is_method(step.__wrapped__) and not options.dry_run:
            step.prepare(*args, **kwargs)  # a call would change the method's object
        else:
            # The step may donate its arguments, and the notebook's arrays have to survive.
            args, kwargs = copy_arguments((args, kwargs))
            step(*args, **kwargs)
    if (options.repeat or options.profile) and step.calls == 0:
        name = "--repeat" if options.repeat else "--profile"
        raise ShardError(f"{name}: call {binding.step.path} in the cell; alone, a method is only compiled")
    if options.repeat:
        step.repeat(options.repeat)
    if options.profile:
        step.profile(options.profile, trace=options.trace)
    return True


def add_alternatives(step: Any, progress: Progress, limit_s: float) -> None:
    """Compile the step without each option of its gradients as well, for the report's table of alternatives.

    Args:
        step: The step, or the stand-in of a dry run.
        progress: Progress line.
        limit_s: Seconds that all compiles together may take.
    """
    from ..step.alternatives import compile_alternatives

    if isinstance(step, cells.DryRunStep):
        step = step.sharded
    step.settle()
    with Replaced(attribute(step.programs, "progress"), progress):
        step.alternatives = compile_alternatives(step, limit_s)
    progress("")
