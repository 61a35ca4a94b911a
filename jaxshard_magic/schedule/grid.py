"""Pipeline schedule: the order of actions on each rank, validated, printed and parsed."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from jaxshard_magic.errors import ShardError
from jaxshard_magic.schedule.actions import (
    KINDS,
    Action,
    ScheduleEntry,
    entry_actions,
    flatten_fused,
    parse_entry,
    shift_stages,
)
from jaxshard_magic.schedule.costs import Costs

if TYPE_CHECKING:
    from jaxshard_magic.report import Pipeline

Grid = tuple[tuple[ScheduleEntry, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """Order of the actions on each rank of a pipeline. Start times follow from the dependencies (see `simulate`).

    A pipeline has `stages` ranks, each a device or a group of devices. Each rank holds `chunks` parts of the model. An
    action names its part by stage number, 0 to stages x chunks - 1, in the order of the forward pass. Every stage runs
    each microbatch forward once and backward once, in full (`B`) or in halves (`I`, later `W`).

    Several losses of a step run in sequence. Their stages are numbered consecutively, without transfers between losses.

    Attributes:
        name: Name of the schedule.
        stages: Number of ranks.
        microbatches: Number of microbatches.
        chunks: Stages of each loss per rank.
        grid: For each rank, its actions in order.
        costs: Costs for which the schedule was made, and at which it is displayed; ignored by `==`.
        losses: Number of losses.

    Raises:
        ShardError: An action is missing, duplicated, before an action it depends on, or on a second rank; the message
            has rank and position. Deadlocks between ranks are detected by `simulate`.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    grid: Grid
    costs: Costs | None = field(default=None, compare=False)
    losses: int = 1

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def stages_per_loss(self) -> int:
        """Number of stages of each loss."""
        return self.stages * self.chunks

    @property
    def all_stages(self) -> int:
        """Number of stages on all ranks, for all losses."""
        return self.stages_per_loss * self.losses

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """Rank of each stage."""
        held = {stage: rank for rank, row in enumerate(self.grid) for stage, _, _ in flatten_fused(row)}
        return tuple(held[stage] for stage in range(self.all_stages))

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each rank, in the order of the model."""
        return tuple(
            tuple(stage for stage, held in enumerate(self.rank_of) if held == rank) for rank in range(self.stages)
        )

    @property
    def actions(self) -> int:
        """Number of actions on all ranks."""
        return sum(len(flatten_fused(row)) for row in self.grid)

    def __str__(self) -> str:
        """Return the grid as text for `parse`, a line per rank."""
        head = f"# {self.name}: {self.stages} stages, {self.microbatches} microbatches, {self.chunks} chunks"
        head += f", {self.losses} losses" if self.losses > 1 else ""
        return "\n".join([head, *(" ".join(map(str, row)) for row in self.grid)]) + "\n"

    def __repr__(self) -> str:
        size = f"{self.stages} stages x {self.microbatches} microbatches"
        chunks = f" x {self.chunks} chunks" if self.chunks > 1 else ""
        losses = f" x {self.losses} losses" if self.losses > 1 else ""
        return f"<Schedule {self.name}: {size}{chunks}{losses}>"

    def timeline(self, *, beside: bool = True) -> "Pipeline":
        r"""Simulate the schedule at its costs and return a timeline to show, save and share.

        Args:
            beside: Also simulate other schedules and sizes, in about half a second.

        >>> parse("0F0 0B0\n1F0 1B0").timeline(beside=False)
        <Pipeline custom: 2 stages x 1 microbatches, predicted>
        """
        from jaxshard_magic.schedule.timeline import timeline

        return timeline(self, with_alternatives=beside)

    def for_losses(self, losses: int) -> "Schedule":
        r"""Repeat the schedule for each of `losses` losses in sequence.

        The result has no costs of its own.

        >>> s = parse("0F0 0B0\n1F0 1B0").for_losses(2)
        >>> print(s)
        # custom: 2 stages, 1 microbatches, 1 chunks, 2 losses
        0F0 0B0 2F0 2B0
        1F0 1B0 3F0 3B0
        <BLANKLINE>
        """
        if losses == 1:
            return self
        every = range(0, losses * self.all_stages, self.all_stages)
        grid = tuple(tuple(shift_stages(step, by) for by in every for step in row) for row in self.grid)
        return replace(self, grid=grid, losses=losses * self.losses, costs=None)


_UNCHECKED_SIZE = 1_000_000  # stages x microbatches that are allocated whatever the number of actions
_HEAD = re.compile(r"#\s*(?P<name>[^:]+):(?:.*\b(?P<losses>\d{1,6}) losses)?")
_LABEL = re.compile(r"\s*(?:rank|stage)?\s*\d+\s*:", re.IGNORECASE)


def parse(text: str, name: str | None = None) -> Schedule:
    """Parse a schedule: a line per rank, with actions separated by spaces, or by commas as in a CSV file.

    Empty cells, empty lines and labels such as `rank 0:` are ignored. A line `# name: ..., 2 losses` gives the name and
    the number of losses.

    Args:
        text: The lines.
        name: Name of the schedule; by default the name in the text, or "custom".

    Raises:
        ShardError: A malformed word, with its line, or an invalid action (see `Schedule`).

    >>> parse("0F0 0F1 0B0 0B1").microbatches
    2
    """
    rows: list[tuple[ScheduleEntry, ...]] = []
    losses = 1
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            header = _HEAD.match(line.strip())
            name = name or (header["name"].strip() if header else None)
            losses = int(header["losses"]) if header and header["losses"] else losses
        elif words := _LABEL.sub("", line, count=1).replace(",", " ").split():
            rows.append(tuple(parse_entry(word, f"line {number}: ") for word in words))
    if not rows:
        raise ShardError("a schedule needs a line for each rank; the text has none")
    return from_rows(name or "custom", rows, losses)


def from_rows(name: str, rows: Sequence[Iterable[ScheduleEntry]], losses: int = 1) -> Schedule:
    """Build a schedule from the entries of each rank; sizes are inferred from the actions.

    Args:
        name: Name of the schedule.
        rows: For each rank, its entries in order.
        losses: Number of losses.

    Raises:
        ShardError: The stages don't divide evenly among ranks and losses, or the order is invalid (see `Schedule`).
    """
    grid = tuple(map(tuple, rows))
    actions = [part for row in grid for part in flatten_fused(row)]
    if not actions:
        raise ShardError(f"schedule {name} has no actions")
    stages = 1 + max(action.stage for action in actions)
    if stages % len(grid):
        raise ShardError(
            f"schedule {name} has {stages} stages on {len(grid)} ranks; each rank holds the same number of stages"
        )
    if losses < 1 or stages % (len(grid) * losses):
        raise ShardError(
            f"schedule {name} has {stages} stages on {len(grid)} ranks for {losses} losses; each rank holds the same "
            "number of stages of each"
        )
    microbatches = 1 + max(action.microbatch for action in actions)
    # A wrong number in a file must not allocate huge tables.
    if stages * microbatches > max(len(actions), _UNCHECKED_SIZE):
        raise ShardError(
            f"schedule {name} has {len(actions):,} actions, too few for the {stages:,} stages and {microbatches:,} "
            "microbatches that they name"
        )
    return Schedule(name, len(grid), microbatches, stages // (len(grid) * losses), grid, losses=losses)


def _validate(schedule: Schedule) -> None:
    """Raise ShardError unless every action appears once, on a single rank, after the actions of its stage it depends
    on."""
    if len(schedule.grid) != schedule.stages:
        raise ShardError(f"{schedule.name} has {len(schedule.grid)} lines for {schedule.stages} ranks")
    seen = _SeenActions.empty(schedule)
    positions, rank_of, microbatches = seen.positions, seen.rank_of, schedule.microbatches
    always, never = [0] * len(positions["F"]), [_UNSEEN] * len(positions["F"])
    # By kind of action: positions of the kind, of the kind that must precede it, and of the kind that excludes it.
    rules = {
        "F": (positions["F"], always, never),
        "B": (positions["B"], positions["F"], positions["I"]),
        "I": (positions["I"], positions["F"], positions["B"]),
        "W": (positions["W"], positions["I"], never),
    }
    for rank, row in enumerate(schedule.grid):
        for position, step in enumerate(row):
            for action in (step,) if type(step) is Action else entry_actions(step):
                stage, kind, microbatch = action
                if 0 <= stage < len(rank_of) and 0 <= microbatch < microbatches and kind in rules:
                    own, needed, other = rules[kind]
                    index = stage * microbatches + microbatch
                    if rank_of[stage] < 0:
                        rank_of[stage] = rank
                    if rank_of[stage] == rank and own[index] < 0 <= needed[index] and other[index] < 0:
                        own[index] = position
                        continue
                why = _violation(schedule, seen, rank, action)
                raise ShardError(f"schedule {schedule.name}: rank {rank}, action {position}, {action}: {why}")
    for index, (forward, whole, weight) in enumerate(zip(positions["F"], positions["B"], positions["W"], strict=True)):
        if forward < 0 or (whole < 0 and weight < 0):
            raise ShardError(f"schedule {schedule.name}: {_missing(seen, *divmod(index, microbatches))}")


_UNSEEN = -1


class _SeenActions(NamedTuple):
    """Actions in the rows read so far.

    Attributes:
        positions: By kind of action, the position in its row for each stage and microbatch, at index stage x
            microbatches + microbatch; `_UNSEEN` for an action not yet read.
        rank_of: Rank of each stage, -1 for a stage not yet read.
    """

    positions: dict[str, list[int]]
    rank_of: list[int]

    @staticmethod
    def empty(schedule: Schedule) -> "_SeenActions":
        stages = schedule.all_stages
        places = {kind: [_UNSEEN] * (stages * schedule.microbatches) for kind in KINDS}
        return _SeenActions(places, [_UNSEEN] * stages)


def _violation(schedule: Schedule, seen: _SeenActions, rank: int, action: Action) -> str:
    """Return the reason for which `action` is invalid at this point of the row."""
    stage, kind, microbatch = action
    stages = schedule.all_stages
    if kind not in KINDS:
        return f"kinds are {', '.join(KINDS)}"
    if not (0 <= stage < stages and 0 <= microbatch < schedule.microbatches):
        return f"there are {stages} stages and {schedule.microbatches} microbatches, each counted from 0"
    if seen.rank_of[stage] != rank:
        return f"stage {stage} already stands on rank {seen.rank_of[stage]}"
    index = stage * schedule.microbatches + microbatch
    if (place := seen.positions[kind][index]) >= 0:
        return f"it already stands at action {place}"
    need = "I" if kind == "W" else "F"
    if seen.positions[need][index] < 0:
        return f"{stage}{need}{microbatch} must stand before it"
    other = "I" if kind == "B" else "B"
    return f"{stage}{other}{microbatch} already does it, at action {seen.positions[other][index]}"


def _missing(seen: _SeenActions, stage: int, microbatch: int) -> str:
    """Return a message with the actions missing for a stage and a microbatch."""
    index = stage * (len(seen.positions["F"]) // len(seen.rank_of)) + microbatch
    if seen.positions["F"][index] < 0:
        lacks = f"{stage}F{microbatch}"
    elif seen.positions["I"][index] < 0:
        lacks = f"{stage}B{microbatch}, or {stage}I{microbatch} and {stage}W{microbatch}"
    else:
        lacks = f"{stage}W{microbatch}"
    return f"rank {seen.rank_of[stage]} lacks {lacks}" if seen.rank_of[stage] >= 0 else f"no rank has {lacks}"
