"""`%shard schedule`: return one pipeline schedule, or a comparison of several."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import fill

from .. import schedule
from ..errors import ShardError, did_you_mean, list_names, unknown_name
from ..files import read_limited
from ..schedule import NAMES, Costs, Schedule, ScheduleComparison
from ..schedule.compare import split_costs
from .options import ScheduleOptions, flags_text, parse_command

ALL = "all"
STAGES, MICROBATCHES_A_STAGE = 4, 4
MOST_ACTIONS = 1_000_000
COSTS = {"F": "forward", "I": "input_grad", "W": "weight_grad"}
_MOST = 64 << 20  # bytes of a schedule's file
_FIELDS = ("forward", "input_grad", "weight_grad", "transfer", "kept_for_weight_grad")


def run_schedule_line(line: str, axes: Mapping[str, int]) -> tuple[Schedule | ScheduleComparison | None, str | None]:
    """Run a `%shard schedule` line.

    Sizes missing on the line are chosen and printed.

    Args:
        line: The line, from the word `schedule` on.
        axes: Axes of the notebook's mesh; the size of its pipeline axis is the default for `--stages`.

    Returns:
        The schedule or comparison and the name to bind it to; None and None for `--help`.
    """
    options = parse_command(line, ScheduleOptions)
    if options.help:
        print(help_text())
        return None, None
    return _schedule_or_comparison(options, axes), options.output


def _schedule_or_comparison(options: ScheduleOptions, axes: Mapping[str, int]) -> Schedule | ScheduleComparison:
    """Return the schedule of a name or a file, or the comparison of several names."""
    words = [name for word in options.words for name in word.split(",") if name]
    costs = None if options.costs is None else parse_costs(options.costs)
    files = [word for word in words if _is_path(word)]
    if files and len(words) > 1:
        raise ShardError(f"a file stands alone: %shard schedule {files[0]}; names are compared")
    if files:
        return _read(files[0], options, costs)
    if not words:
        raise ShardError(
            f"%shard schedule takes a name, several with commas, {ALL}, or a file; the names are {list_names(NAMES)}"
        )
    for name in words:
        if name not in NAMES and name != ALL:
            there_are = f"there are {list_names(NAMES)}, and {ALL}"
            where = "%shard schedule --help has all"
            raise ShardError(unknown_name(f"no schedule '{name}'", name, (*NAMES, ALL), there_are, where))
    options = _with_sizes(options, axes)
    stages, microbatches = options.stages or 0, options.microbatches or 0
    if ALL in words or len(words) > 1:
        names = [*NAMES] if ALL in words else words
        return schedule.compare(
            names,
            stages=stages,
            microbatches=microbatches,
            chunks=options.chunks,
            costs=costs,
            memory_limit=options.memory_limit,
        )
    (name,) = words
    chunks = options.chunks or NAMES[name].chunks or 1
    return schedule.make(
        name,
        stages=stages,
        microbatches=microbatches,
        chunks=chunks,
        costs=_divide_costs(costs, stages, chunks),
        memory_limit=options.memory_limit,
    )


def parse_costs(text: str) -> Costs:
    """Parse `--costs`: `F,I,W`, `F,I,W,transfer`, or names, with one value for each stage if wished.

    >>> parse_costs("1,1,1,0.1").transfer
    0.1
    >>> parse_costs("forward=1,1,1,2 W=0.5")
    Costs(forward=(1.0, 1.0, 1.0, 2.0), input_grad=1.0, weight_grad=0.5, transfer=0.0, kept_for_weight_grad=1.0)

    Raises:
        ShardError: A word is no number, a name is unknown or repeated, or `Costs` refuses the values.
    """
    if "=" not in text:
        numbers = [_number(word, text) for word in text.replace(",", " ").split()]
        if len(numbers) not in (3, 4):
            raise ShardError(
                f"--costs '{text}' has {len(numbers)} numbers; write F,I,W or F,I,W,transfer, as in 1,1,1,0.1, "
                'or names for one per stage: "forward=1,1,1,2 transfer=0.1"'
            )
        return Costs(*numbers)
    given: dict[str, float | list[float]] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        name = COSTS.get(name.upper(), name.replace("-", "_"))
        if not equals:
            raise ShardError(f"--costs: '{word}' has no '='; write a cost as in forward=1 or forward=1,1,1,2")
        if name not in _FIELDS:
            raise ShardError(
                f"--costs has no '{name}'; it has {list_names(_FIELDS)}; a whole backward pass takes input_grad and "
                "weight_grad together"
            )
        if name in given:
            raise ShardError(f"--costs says {name} twice; once is enough")
        numbers = [_number(each, word) for each in value.split(",")]
        given[name] = numbers if len(numbers) > 1 else numbers[0]
    return Costs(**given)


def _number(word: str, text: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ShardError(f"--costs '{text}': '{word}' is no number") from None


def _divide_costs(costs: Costs | None, stages: int, chunks: int) -> Costs | None:
    """Divide costs given for each P-th of the model among the stages of `chunks` chunks a rank."""
    return None if costs is None and chunks == 1 else split_costs(costs or Costs(), stages, chunks)


def _with_sizes(options: ScheduleOptions, axes: Mapping[str, int]) -> ScheduleOptions:
    """Fill in missing numbers of stages and microbatches, and print them.

    Raises:
        ShardError: The schedule would have more than a million actions.
    """
    from ..config.strategies import job_of

    taken, stages, microbatches = [], options.stages, options.microbatches
    if stages is None:
        axis = next((name for name in axes if job_of(name) == "pipeline"), None)
        stages = STAGES if axis is None else axes[axis]
        taken.append(f"{stages} stages" + (f", the mesh's {axis}" if axis else ""))
    if microbatches is None:
        microbatches = MICROBATCHES_A_STAGE * stages
        taken.append(f"{microbatches} microbatches")
    actions = 2 * stages * microbatches * (options.chunks or 1)
    if actions > MOST_ACTIONS:
        raise ShardError(
            f"{stages} stages and {microbatches} microbatches are {actions:,} actions; at most {MOST_ACTIONS:,} "
            "are simulated here"
        )
    if taken:
        print(f"taking {' and '.join(taken)}")
    return replace(options, stages=stages, microbatches=microbatches)


def _is_path(word: str) -> bool:
    return "." in word or "/" in word or os.sep in word


def _read(path: str, options: ScheduleOptions, costs: Costs | None) -> Schedule:
    """Read a schedule from a file, with the sizes of the file."""
    try:
        text = read_limited(Path(os.path.expanduser(path)), _MOST).decode("utf-8")
    except (OSError, ValueError) as error:
        raise ShardError(f"{path} can't be read: {_why(error)}.{_near(path)}") from None
    with _with_path_in_errors(path):
        found = schedule.parse(text)
        _without_sizes(found, options)
        name = Path(path).stem if found.name == "custom" else found.name
        found = replace(found, name=name, costs=_divide_costs(costs, found.stages, found.chunks))
        schedule.simulate(found)  # raises for a deadlock of ranks here, and not at display
    return found


def _without_sizes(found: Schedule, options: ScheduleOptions) -> None:
    """Raise `ShardError` for a size given on the line of a schedule from a file."""
    for field in ("stages", "microbatches", "chunks", "memory_limit"):
        if getattr(options, field) is not None:
            raise ShardError(
                f"it has its own sizes: {found.stages} stages, {found.microbatches} microbatches, {found.chunks} "
                f"chunks; leave --{field.replace('_', '-')} out"
            )


def _why(error: Exception) -> str:
    """Return the reason of a failed read in words."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it is no text in UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


def _near(path: str) -> str:
    """Return a suggestion of a file with a similar name in the same folder."""
    folder = Path(os.path.expanduser(path)).parent
    there = folder.glob("*.*") if os.path.isdir(folder) else ()
    return did_you_mean(Path(path).name, (each.name for each in there))


@contextmanager
def _with_path_in_errors(path: str) -> Iterator[None]:
    """Prefix a `ShardError` with the file's path."""
    try:
        yield
    except ShardError as error:
        raise ShardError(f"{path}: {error}") from None


def help_text() -> str:
    """Return the text printed by `%shard schedule --help`: forms of the line, schedules with their sources, options."""
    names = "\n".join(
        fill(f"{name:<12} {named.about} ({named.source})", 110, initial_indent="    ", subsequent_indent=" " * 17)
        for name, named in NAMES.items()
    )
    return f"""A pipeline schedule in time: its bubble, and what each rank holds. Several names are compared.

    %shard schedule 1f1b --stages 4 --microbatches 16      a Schedule, shown as its timeline
    %shard schedule 1f1b,zb-h1,zb-v                        compared: bubble against microbatches and memory
    %shard schedule all --costs 1,1.2,0.9,0.1              all of them, at these costs
    %shard schedule mine.csv                               your own: a line for each rank, 0F0 0F1 0B0 0B1

Schedules:
{names}

Options:
{flags_text(ScheduleOptions)}

Costs are times of one microbatch on a P-th of the model, in any unit: forward, input gradient, weight gradient, and
the transfer of a result to the next rank; 1,1,1,0 by default. One for each of the P parts, in the model's order:
--costs "forward=1,1,1,2 transfer=0.1"; kept_for_weight_grad is the share of the activations, 0 to 1, that is held
until the weight gradient is done. A rank with several chunks takes a part of that time for each of them.

In Python: from jaxshard_magic import schedule; schedule.make, simulate, compare, parse."""
