"""A `%%shard` cell that compares: its step, found as in any other, tried under several strategies on copies."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import ShardError, one_of, whole_number
from ..introspect import is_method
from . import cells
from .displays import say
from .growing import Growing
from .history_line import MOST
from .progress import Progress
from .shard_cell import ShardCell, placed_by, requests_of

if TYPE_CHECKING:
    from ..history import Store
    from ..report import Report
    from ..report.comparison import Comparison, Trial


def compared(this: ShardCell, strategies: Sequence[str]) -> "tuple[Comparison, str]":
    """The cell's step tried as its line has it, and in words how far that came where the user stopped it, else nothing;
    the cell ends at the step's first call, of which the arguments are.

    Raises ShardError for what the line alone tells, before the cell runs, and where the step has no arguments.
    """
    from ..comparing import How, Trying, candidates, chip_for
    from ..config.strategies import COMPARED
    from ..step.rejit import Rejits

    options, path, space = this.options, this.path, this.shell.user_ns
    requests = requests_of(options, list(strategies) or COMPARED, this.mesh)
    candidates(requests)
    binding = cells.Binding(space, this.place, cells.Awaited)
    with binding, this.room(), Rejits():
        cells.run(this.shell, this.code, binding)
    binding.undo()
    if this.not_called is not None and (binding.sharded is None or binding.sharded.arguments is None):
        raise ShardError(this.not_called)
    if binding.sharded is None:
        raise ShardError(f"the cell ended without binding {path}")
    function = binding.sharded.__wrapped__
    args, kwargs = binding.sharded.arguments or cells.from_namespace(function, space, path)
    method = is_method(function)
    if method and not options.dry_run:
        say(f"{path} is a method, and to run it would change its object: it is only compiled")

    growing = Growing(this.grows, this.session.view)
    with Progress(this.draw, of=path) as progress, growing:
        how = How(
            options.name or path,
            run=not options.dry_run and not method and this.attached,
            repeat=options.repeat or None,
            say=progress,
            show=growing,
            prepare=this.prepare,
        )
        placed = placed_by(options, path, function) | {"on": chip_for(this.mesh, options.on)}
        requests = replace(requests, placed=placed)
        trying = Trying(function, candidates(requests), how)
        comparison = trying(args, kwargs)
    if not trying.stopped:
        return comparison, ""
    compiled = sum(trial.report is not None for trial in comparison.trials)
    every = f"{len(comparison.trials) + len(comparison.left)} strategies"
    if not compiled:
        raise cells.Interrupted(f"Stopped before any of {every} had compiled.")
    ran = sum(trial.measured is not None for trial in comparison.trials)
    return comparison, f"Stopped: {compiled} of {every} compiled{f', {ran} ran' if how.run else ''}."


def of_the_past(
    history: "Sequence[Report]", words: Sequence[str], names: Mapping[str, Any], store: "Store"
) -> "Comparison":
    """Reports by their numbers or by the notebook's names for them; those of this session, `history`, without any.

    Raises ShardError for a word that is none of both, and where there is no report.
    """
    from ..report.comparison import Comparison

    if not history and not words:
        raise ShardError("no report yet: write %%shard fsdp above a cell with a train step")
    found = [_report(word, history, names, store) for word in words] or history
    chosen = list({id(report): report for report in found}.values())
    return Comparison(one_of(dict.fromkeys(report.name for report in chosen)), tuple(map(_trial, chosen)))


def _report(word: str, history: "Sequence[Report]", names: Mapping[str, Any], store: "Store") -> "Report":
    from ..report import Report

    if isinstance(named := names.get(word), Report):
        return named
    number = whole_number(word, MOST)
    if number is None:
        raise ShardError(
            f"%shard compare takes the numbers of reports, as %shard history lists them, or names of reports, not "
            f"{word!r}; alone it lists those of this session"
        )
    own = next((report for report in history if report.number == number), None)
    return own or replace(store.report(number), number=number)


def _trial(report: "Report") -> "Trial":
    from ..comparing import VARIED, line_of
    from ..report.comparison import Trial
    from ..report.parts import mesh_text

    axes, options = dict(report.mesh.axes), dict(report.options)
    own = {name: value for name, value in options.items() if name in VARIED}
    line = line_of(report.strategy, mesh_text(axes), own)
    return Trial(report.strategy, axes, options, line, report, number=report.number)
