"""The step of a `%%shard` cell: made from its line, called on copies, compiled with what its report advises."""

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
from .later import ran_within
from .options import ShardOptions, line_text, parse, with_strategy
from .progress import Draw, Progress, line_for

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ..comparing import Requests
    from ..config.request import Request
    from ..report import Report
    from ..step import Entry, ShardedStep
    from .session import ShardSession


ALIKE = 0.6  # of the lines of two cells: so many the same, and the step is taken for the same one


def request_of(options: ShardOptions, mesh: "Mesh", path: str, function: Any) -> "Request":
    """What a line asks of the cell's step, with the specs that the function itself is annotated with.

    Raises ShardError as `make_request` does.
    """
    from ..config.request import make_request

    return make_request(
        options.strategy,
        mesh,
        **placed_by(options, path, function),
        check=options.check,
        **options.step_options,
    )


def requests_of(options: ShardOptions, strategies: Sequence[str], mesh: "Mesh") -> "Requests":
    """What a line that compares or searches asks of all its candidates, but for what the function says itself."""
    from ..comparing import Requests, meshes_of, said_of, varied

    placed = placed_by(options)
    return Requests(
        strategies,
        mesh,
        meshes_of(options.meshes),
        varied(options.vary),
        options.step_options,
        placed,
        options.keep_going,
        said_of({**placed, "step": options.step}),
    )


def placed_by(options: ShardOptions, path: str | None = None, function: Any = None) -> dict[str, Any]:
    """Specs, rules and the rest that a line says once for any strategy, with the specs of `function`'s annotations."""
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
    """A `%%shard` cell that is about to run: what its line says, its code, where its step is, and the step's mesh."""

    shell: Any
    session: "ShardSession"
    options: ShardOptions
    code: cells.Cell
    place: cells.Step
    mesh: "Mesh"

    @property
    def path(self) -> str:
        """What its reader calls the step."""
        return self.place.name

    @property
    def attached(self) -> bool:
        """Whether the step can run: not so on devices of a target."""
        from ..targets import target_of

        return target_of(self.mesh) is None

    @property
    def grows(self) -> bool:
        """Whether what is known so far is to be shown in the cell's output."""
        in_kernel = getattr(self.shell, "kernel", None) is not None
        return self.session.progress and not self.code.quiet and in_kernel

    @property
    def draw(self) -> Draw | None:
        """What draws the progress line; None for a session that wants none."""
        return line_for(self.shell) if self.session.progress else None

    def room(self) -> AbstractContextManager[Any]:
        """A context that ends a cell which fills the memory with arrays for devices that are not attached."""
        return nullcontext() if self.attached else cells.Room()

    @property
    def not_called(self) -> str | None:
        """What is said where the cell did not call a step whose arguments no names of the notebook are; else None."""
        place = self.place
        if place.inside:
            return f"{place.name} has not run yet: call {place.inside[0]}, then %shard shows the report."
        return (
            f"{place.name} has not run yet: call it, then %shard shows the report." if place.method else None
        )

    def prepare(self, step: "ShardedStep") -> None:
        """Tell a step of the cell where it is from, what it is called there, and how long it may compile."""
        step.compile_limit = self.session.compile_limit
        step.cell, step.path = (self.code.filename, self.code.text), self.place.full


def compile_of(this: ShardCell) -> float | None:
    """Seconds that the last compile of the cell's step took; None where the last step was another one, on other
    devices, or asked for otherwise."""
    last = this.session.step
    entry = getattr(last, "entry", None)  # a rehearsal has none
    if entry is None or last.cell is None or (last.path, last.mesh) != (this.place.full, this.mesh):
        return None
    line, _, code = last.cell[1].partition("\n")
    if _asked(with_strategy(parse(line_text(line)[0]))) != _asked(this.options):
        return None
    now = this.code.text.partition("\n")[2]
    alike = SequenceMatcher(None, code.splitlines(), now.splitlines()).ratio()
    return entry.compile_s if alike >= ALIKE else None


def _asked(options: ShardOptions) -> tuple[Any, ...]:
    """What of a line makes another program of the same step on the same devices."""
    return options.strategy, options.specs, options.rules, options.donate, options.step_options


def feeds_of(options: ShardOptions) -> "cells.Feeds | None":
    """What takes the batches of the cell's loop ahead; None where the line asks for none, or runs no step. A batch
    stays what the cell expects: no tensor is converted."""
    if not options.feed or options.dry_run:
        return None
    from ..feeding import Feed

    return partial(Feed, convert=False)


def sharded(options: ShardOptions, mesh: "Mesh", path: str, function: Any) -> "ShardedStep":
    """The function sharded as a line has it; one that is sharded already is taken anew."""
    from ..step import ShardedStep
    from ..step.recorded import recordable

    plain = function.__wrapped__ if isinstance(function, ShardedStep) else function
    step = ShardedStep(plain, request_of(options, mesh, path, plain))
    step.keep_arguments = bool(options.repeat or options.profile)
    if options.profile:
        recordable(step, options.profile)
    step.read_ahead = step.plan_stands = True
    return step


def planned_first(
    this: ShardCell, step: "ShardedStep", show: "Callable[[Report], None]", plan: "Entry"
) -> None:
    """Show the report of a plan while its program compiles."""
    from ..analysis.summary import summarize

    try:
        with Replaced(attribute(step, "progress"), None):  # its line tells of the compiler
            report = summarize(step, plan)
    except Exception as error:  # the step itself goes on
        say(f"{this.path} has no report of its plan: {type(error).__name__}: {error}")
    else:
        show(report)


def tried(rehearsal: cells.Rehearsal, report: "Report", progress: Progress) -> bool:
    """The first thing that would make a step fit is compiled as well; whether that told anything."""
    fix = next((a.fix for a in report.advice if a.code == "does-not-fit"), None)
    if fix is None or rehearsal.arguments is None:
        return False
    progress(f"does not fit; trying {fix}")
    try:
        return compiled_with(rehearsal.sharded, fix, *rehearsal.arguments)
    except ShardError:  # what is advised is for the user's own step, and need not be possible on it
        return False
    finally:
        progress("")


def compiled_with(step: "ShardedStep", fix: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Compile `step` as a fix of its report has it, for the same arguments; its reports then tell what that needs.

    False for a fix that is no line of the magics. Raises `ShardError` where the changed step can't be planned or
    compiled.
    """
    from .. import api
    from ..config.from_line import changed_by, is_line
    from ..step import ShardedStep

    if not is_line(fix):
        return False
    request = changed_by(fix, step.request, lambda text: api.build_mesh(text).mesh)
    other = ShardedStep(step.__wrapped__, request)
    other.progress, other.compile_limit = step.progress, step.compile_limit
    other.prepare(*args, **kwargs)
    memory = other.report().memory
    peaks = [d.peak for d in memory.per_device if d.peak is not None] if memory else []
    if peaks:
        step.tried[fix] = max(peaks)
    return bool(peaks)


def exercised(this: ShardCell, binding: cells.Binding) -> bool:
    """Run the step once when the cell did not, and as often again as asked; whether it has run."""
    from ..step.copies import copies

    step, options = binding.sharded, this.options
    kept = step.kept if binding.bound and not options.dry_run else None
    if kept is not None and kept.calls and step.calls == 0:
        return True  # what it would have done was done before
    if not (binding.bound or binding.step.inside):
        raise ShardError(f"the cell ended without binding {binding.step.path}")
    if (within := binding.take_within()) is not None and step.calls == 0:
        print(ran_within(this.path, within, this.shell.user_ns))
        return False
    if this.not_called is not None and (step is None or step.calls == 0):
        if options.dry_run:
            raise ShardError(this.not_called)
        print(this.not_called)
        return False
    if step.calls == 0:
        try:
            args, kwargs = cells.from_namespace(step.__wrapped__, this.shell.user_ns, binding.step.path)
        except cells.Missing as missing:
            if options.dry_run:
                raise
            say(str(missing))
            return False
        if is_method(step.__wrapped__) and not options.dry_run:
            step.prepare(*args, **kwargs)  # to run a method would change its object
        else:
            args, kwargs = copies((args, kwargs))
            step(*args, **kwargs)
    if (options.repeat or options.profile) and step.calls == 0:
        name = "--repeat" if options.repeat else "--profile"
        raise ShardError(f"{name}: call {binding.step.path} in the cell; alone, a method is only compiled")
    if options.repeat:
        step.repeat(options.repeat)
    if options.profile:
        step.profile(options.profile, trace=options.trace)
    return True


def compared(step: Any, progress: Progress, limit_s: float) -> None:
    """The step, or that of a dry run, is compiled without each option of its gradients as well, for its report."""
    from ..analysis.alternatives import alternatives

    if isinstance(step, cells.Rehearsal):
        step = step.sharded
    step.settle()
    with Replaced(attribute(step, "progress"), progress):
        step.alternatives = alternatives(step, limit_s)
    progress("")
